"""Parts of the engine that need no model: which pages are kept, and where a text ends."""

from __future__ import annotations

import random

import pytest
import torch

from easytorch.generation.engine.pages import PagePool
from easytorch.generation.engine.params import SamplingParams
from easytorch.generation.engine.request import Logprob, Request
from easytorch.generation.engine.sampler import _adjust
from easytorch.generation.engine.scheduler import Scheduler
from easytorch.generation.engine.stop import StoppedText


class Letters:
    """A tokenizer whose token n is the nth letter, and so many after it."""

    def __init__(self, letters: int = 1) -> None:
        self._letters = letters

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(ord("a") + one + more) for one in ids for more in range(self._letters))


def test_what_begins_a_prompt_is_kept_longest():
    pool = PagePool(4)
    pages = pool.allocate(3)
    hashes = [b"first", b"second", b"third"]
    for page, one in zip(pages, hashes, strict=True):
        pool.cache(page, one)
    pool.release(pages)
    assert pool.match(hashes) == pages
    assert pool.allocate(2) == [3, pages[2]]  # the one never used, then the end of the prompt
    assert pool.match(hashes) == pages[:2] and pool.num_cached == 2


def test_of_pages_with_equal_tokens_the_first_is_remembered():
    pool = PagePool(3)
    first, second = pool.allocate(2)
    pool.cache(first, b"same")
    pool.cache(second, b"same")
    assert pool.match([b"same"]) == [first] and pool.num_cached == 1
    pool.release([second])
    pool.allocate(2)  # the second of them among these
    assert pool.match([b"same"]) == [first]
    pool.release([first])
    pool.allocate(1)
    assert pool.match([b"same"]) == [] and pool.num_cached == 0


def test_a_preempted_request_waits_before_those_that_never_ran():
    scheduler = Scheduler(PagePool(5), 1, max_batch_tokens=9, max_requests=2, prefix_reuse=False)
    none = frozenset()
    first, second, third = (Request(one, None, 2, [0, 0], SamplingParams(), 0, 5, none, none, None) for one in "123")
    for request in (first, second, third):
        scheduler.add(request)
    assert [work.request for work in scheduler.schedule()] == [first, second]
    for request in (first, second):
        request.append(0, None)
    assert [work.request for work in scheduler.schedule()] == [first], "it has the last page"
    assert [*scheduler.waiting] == [second, third] and scheduler.preemptions == 1


def test_cached_tokens_are_those_of_a_request_s_first_admission():
    """What it finds of its own pages when it comes back has been computed for it before."""
    scheduler = Scheduler(PagePool(5), 1, max_batch_tokens=9, max_requests=2, prefix_reuse=True)
    none = frozenset()
    first, second = (
        Request(str(one), None, 2, [one, one + 1], SamplingParams(), 0, 5, none, none, None) for one in (0, 5)
    )
    for request in (first, second):
        scheduler.add(request)
    scheduler.schedule()
    for request in (first, second):
        request.append(0, None)
    assert [work.request for work in scheduler.schedule()] == [first] and scheduler.preemptions == 1
    scheduler.remove(first)
    (chunk,) = scheduler.schedule()
    assert (chunk.request, chunk.start, second.cached) == (second, 2, 0), "its pages were still there"


def test_nothing_ends_a_text_before_its_least_length():
    ends = {"end_tokens": frozenset([2]), "stop_tokens": frozenset([3])}
    for generated, expected in ((1, [2, 3]), (2, [])):
        request = Request("0", None, 1, [0] * (1 + generated), SamplingParams(min_tokens=2), 0, 9, text=None, **ends)
        adjusted = _adjust(torch.zeros(5), request)
        found = [] if adjusted is None else adjusted.isneginf().nonzero().flatten().tolist()
        assert found == expected


@pytest.mark.parametrize("include", [False, True])
def test_a_text_ends_with_the_first_stop_string_and_shows_none_of_it_before(include):
    draw = random.Random(5)
    for _ in range(200):
        stop = ["".join(draw.choices("ab", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3))]
        tokens = [draw.randrange(3) for _ in range(12)]
        whole = Letters().decode(tokens)
        text = StoppedText(Letters(), stop, include_stop=include, skip_special_tokens=True)
        shown, matched, seen = [], None, ""
        for token in tokens:
            seen += chr(ord("a") + token)
            matched = text.push(token, search=True)
            shown.append(text.visible)
            if matched is not None:
                break
            assert len(text.visible) >= len(seen) - (0 if include else max(map(len, stop)) - 1), "held back for nothing"
        if matched is None:
            matched = text.finish(search=True)
        # the first to be complete; of those that are at once the first to begin, and of these the longest
        ends = [end for end in range(1, 13) if any(whole[:end].endswith(one) for one in stop)]
        expected, ended_by = whole, None
        if ends:
            done = whole[: ends[0]]
            _, _, ended_by = min((done.find(one), -len(one), one) for one in stop if done.endswith(one))
            expected = done if include else done[: len(done) - len(ended_by)]
        assert (text.visible, matched) == (expected, ended_by)
        assert all(expected.startswith(one) for one in shown), "what was shown is taken back"


@pytest.mark.parametrize(
    ("stop", "ended_by"), [(["ab", "abc"], "abc"), (["abc", "ab"], "abc"), (["bcd", "ab"], "ab"), (["c", "cd"], "cd")]
)
def test_of_stop_strings_in_one_token_the_first_ends_the_text_and_of_these_the_longest(stop, ended_by):
    text = StoppedText(Letters(4), stop, include_stop=True, skip_special_tokens=True)
    assert (text.push(0, search=True), text.visible) == (ended_by, "abcd"[: "abcd".find(ended_by) + len(ended_by)])


def test_penalties_count_a_token_once_and_each_time():
    given = {"presence_penalty": 1.5, "frequency_penalty": 0.25, "logit_bias": {1: 2.0, 4: -3.0}}
    none = frozenset()
    request = Request("0", None, 2, [6, 5, 5, 7, 5], SamplingParams(**given), 0, 9, none, none, None)
    expected = torch.tensor([0.0, 2.0, 0.0, 0.0, -3.0, -1.5 - 2 * 0.25, 0.0, -1.5 - 0.25])
    assert torch.equal(_adjust(torch.zeros(8), request), expected)


def test_min_tokens_and_most_tokens_count_the_last_one_too():
    def reason(params: SamplingParams, tokens: list[int], most: int = 9) -> list[str | None]:
        stop = params.stop_strings
        text = StoppedText(Letters(), stop, include_stop=False, skip_special_tokens=True)
        request = Request("0", None, 1, [0], params, 0, 1 + most, frozenset(), frozenset(), text)
        found = []
        for token in tokens:
            request.append(token, None)
            found.append(request.finish_reason)
        return found

    assert reason(SamplingParams(stop="b", min_tokens=3), [0, 0, 1]) == [None, None, "stop"]
    assert reason(SamplingParams(stop="b", min_tokens=3), [0, 1, 0]) == [None, None, None]
    assert reason(SamplingParams(), [0, 0, 0], most=3) == [None, None, "length"]


def test_an_output_does_not_change_with_later_tokens():
    none = frozenset()
    request = Request("0", None, 1, [0], SamplingParams(logprobs=1), 0, 9, none, none, None)
    request.append(4, {4: Logprob(-0.5, 1)})
    first = request.output().outputs[0]
    request.append(5, {5: Logprob(-0.5, 1)})
    assert first.token_ids == [4] and [*map(list, first.logprobs)] == [[4]]
