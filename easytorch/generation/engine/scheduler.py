"""`Scheduler`: which tokens of which requests run in the next step, and which requests are preempted."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from easytorch.generation.engine.pages import PagePool
from easytorch.generation.engine.prefix import extend_hashes
from easytorch.generation.engine.request import Request

# Rows of logits that a step computes for `prompt_logprobs`: a vocabulary of 128k in float32 takes 128 MB for them.
MOST_SCORED = 256


class ScheduledChunk(NamedTuple):
    """Tokens [start, end) of a request, which run in this step; `samples`: the next token is sampled after them;
    `scored`: the positions whose logits score the prompt's next token."""

    request: Request
    start: int
    end: int

    @property
    def samples(self) -> bool:
        return self.end == len(self.request.tokens)

    @property
    def scored(self) -> range:
        wanted = self.request.unscored
        return range(max(self.start, wanted.start), min(self.end, wanted.stop))


class Scheduler:
    """First come, first served. A step has at most `max_batch_tokens` tokens: one of each request that decodes, then
    prompts, in chunks where they are longer than what is left.

    A request is admitted when there are pages for all its tokens. When there is none for the next token of a running
    one, the request admitted last is preempted and recomputed later, so the first can always continue.
    """

    def __init__(
        self, pool: PagePool, page_size: int, *, max_batch_tokens: int, max_requests: int, prefix_reuse: bool
    ) -> None:
        self.pool, self.page_size = pool, page_size
        self.max_batch_tokens, self.max_requests = max_batch_tokens, max_requests
        self.prefix_reuse = prefix_reuse
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._slots = list(range(max_requests))

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Removes a finished or aborted request, running or waiting."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._release(request)

    def restart(self) -> None:
        """Moves all requests back to the queue, to be recomputed, and frees and uncaches every page."""
        self.pool.clear()
        self.waiting.extendleft(reversed(self.running))
        self.running = []
        self._slots = list(range(self.max_requests))
        for request in self.waiting:
            request.pages, request.computed, request.slot = [], 0, -1

    def schedule(self) -> list[ScheduledChunk]:
        chunks: list[ScheduledChunk] = []
        left, to_score = self.max_batch_tokens, MOST_SCORED
        preempted = self.preemptions
        place = 0
        while place < len(self.running) and left:
            request = self.running[place]
            end = self._end(request, left, to_score)
            if not self._extend_pages(request, end):
                break  # preempted: it was admitted last
            place += 1
            if end > request.computed:
                chunks.append(self._schedule_up_to(request, end))
                left -= chunks[-1].end - chunks[-1].start
                to_score -= len(chunks[-1].scored)
        while self.waiting and left and len(self.running) < self.max_requests and preempted == self.preemptions:
            request = self.waiting[0]
            if (request.unscored and not to_score) or not self._admit(request):
                break
            self.running.append(self.waiting.popleft())
            chunks.append(self._schedule_up_to(request, self._end(request, left, to_score)))
            left -= chunks[-1].end - chunks[-1].start
            to_score -= len(chunks[-1].scored)
        return chunks

    @staticmethod
    def _end(request: Request, left: int, to_score: int) -> int:
        """Where its next chunk ends: after `left` tokens at most, `to_score` of which are scored."""
        end = min(len(request.tokens), request.computed + left)
        first = max(request.computed, request.unscored.start)
        # what follows the last position that is scored is free
        return end if len(range(first, min(end, request.unscored.stop))) <= to_score else first + to_score

    def _schedule_up_to(self, request: Request, end: int) -> ScheduledChunk:
        """Schedules a request up to `end` and caches the pages that this fills: a request that shares them runs in
        this step or later, and a step writes all its pages before it reads any."""
        chunk = ScheduledChunk(request, request.computed, end)
        request.computed = end
        if self.prefix_reuse:
            extend_hashes(request.hashes, request.tokens, self.page_size)
            for page in range(chunk.start // self.page_size, end // self.page_size):
                self.pool.cache(request.pages[page], request.hashes[page])
        return chunk

    def _admit(self, request: Request) -> bool:
        """Allocates pages for all tokens of a waiting request, sharing cached ones; False where there are too few."""
        shared: list[int] = []
        if self.prefix_reuse:
            extend_hashes(request.hashes, request.tokens, self.page_size)
            # one token at least is computed: its logits are what the next one is sampled from
            most = min([len(request.tokens) - 1, *request.unscored[:1]])
            if not request.params.skip_reading_prefix_cache:
                shared = self.pool.match(request.hashes[: most // self.page_size])
        missing = self._num_pages(len(request.tokens)) - len(shared)
        if not self.pool.can_allocate(missing, shared):
            return False
        self.pool.share(shared)
        request.pages = shared + self.pool.allocate(missing)
        request.slot = self._slots.pop()
        request.computed = len(shared) * self.page_size
        if request.cached is None:
            request.cached = request.computed
        return True

    def _extend_pages(self, request: Request, end: int) -> bool:
        """Allocates the pages for tokens up to `end`, preempting others; False where it was preempted itself."""
        missing = self._num_pages(end) - len(request.pages)
        while missing > 0 and not self.pool.can_allocate(missing):
            latest = self.running.pop()
            self._release(latest)
            self.waiting.appendleft(latest)
            self.preemptions += 1
            if latest is request:
                return False
        request.pages += self.pool.allocate(max(0, missing))
        return True

    def _release(self, request: Request) -> None:
        self.pool.release(request.pages)
        if request.slot >= 0:
            self._slots.append(request.slot)
        request.pages, request.computed, request.slot = [], 0, -1

    def _num_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
