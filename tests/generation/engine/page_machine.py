"""A state machine over the scheduler and its pages: whatever happens, every token that a step reads is its own.

In place of keys and values a slot of the pool holds the tokens that they would be computed from.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from easytorch.generation.engine.pages import PagePool
from easytorch.generation.engine.params import SamplingParams
from easytorch.generation.engine.request import Request
from easytorch.generation.engine.scheduler import Scheduler


class PageMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(6, 20), size=st.integers(1, 4), budget=st.integers(1, 24), most=st.integers(1, 8),
        reuse=st.sampled_from([True, True, True, False]),
    )  # fmt: skip
    def begin(self, pages: int, size: int, budget: int, most: int, reuse: bool) -> None:
        self.size = size
        self.pool = PagePool(pages)
        self.scheduler = Scheduler(self.pool, size, max_batch_tokens=budget, max_requests=most, prefix_reuse=reuse)
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.made = 0

    @property
    def requests(self) -> list[Request]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    # few tokens, so that prompts begin alike
    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14), new=st.integers(1, 10))
    def add(self, prompt: list[int], new: int) -> None:
        most = min(len(prompt) + new, len(self.pool) * self.size)
        if most <= len(prompt):
            return
        self.made += 1
        none: Any = frozenset()
        self.scheduler.add(
            Request(str(self.made), None, len(prompt), list(prompt), SamplingParams(), 0, most, none, none, None)
        )

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), token=st.integers(0, 1))
    def step(self, data: Any, token: int) -> None:
        waiting, preemptions = [*self.scheduler.waiting], self.scheduler.preemptions
        chunks = self.scheduler.schedule()
        assert chunks, "requests wait, and nothing runs"
        assert all(chunk.start < chunk.end for chunk in chunks), "a work without a token"
        if self.scheduler.preemptions > preemptions:
            assert not any(chunk.request in waiting for chunk in chunks), (
                "a request begins with pages that another lost"
            )
        assert sum(chunk.end - chunk.start for chunk in chunks) <= self.scheduler.max_batch_tokens
        assert len({id(chunk.request) for chunk in chunks}) == len(chunks)
        for request, start, end in chunks:
            for place in range(start, end):
                self.slots[request.pages[place // self.size], place % self.size] = tuple(request.tokens[: place + 1])
        for request, _, end in chunks:
            assert end <= len(request.tokens)
            for place in range(end):
                slot = request.pages[place // self.size], place % self.size
                assert self.slots[slot] == tuple(request.tokens[: place + 1]), "another request's tokens"
        for chunk in chunks:
            if chunk.samples:
                chunk.request.append(token, None)
                if chunk.request.finish_reason is not None:
                    self.scheduler.remove(chunk.request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        self.scheduler.remove(data.draw(st.sampled_from(self.requests)))

    @rule()
    def fail(self) -> None:
        """A step that raised: what it had to write is not there."""
        chunks = self.scheduler.schedule()
        for request, start, end in chunks:
            for place in range(start, end):
                self.slots.pop((request.pages[place // self.size], place % self.size), None)
        self.scheduler.restart()

    @invariant()
    def no_page_is_lost(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = [page for request in self.requests for page in request.pages]
        assert [held.count(page) for page in range(len(self.pool))] == self.pool.ref_counts
        assert self.pool.free == self.pool.ref_counts.count(0)
        assert all(len(set(request.pages)) == len(request.pages) for request in self.requests)
        order = [int(request.request_id) for request in self.requests]
        assert order == sorted(order), "the first to come is the first served"
        assert len(self.scheduler.running) <= self.scheduler.max_requests
        assert all(not request.pages and request.slot < 0 for request in self.scheduler.waiting)
        slots = [request.slot for request in self.scheduler.running]
        assert len(set(slots)) == len(slots) and all(0 <= one < self.scheduler.max_requests for one in slots)

    def teardown(self) -> None:
        """Everything comes to its end."""
        if not hasattr(self, "pool"):
            return
        for _ in range(10_000):
            if not self.requests:
                break
            self.step(None, 0)
        assert not self.requests and self.pool.free == len(self.pool)
