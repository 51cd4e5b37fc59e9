"""`Scheduler`: which tokens of which requests run in the next step, and whose pages they take."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from easytorch.generation.engine.pages import PagePool
from easytorch.generation.engine.prefix import extend_hashes
from easytorch.generation.engine.request import Request


class Work(NamedTuple):
    """Tokens [start, end) of a request run in this step; the last one's logits are wanted where `samples`."""

    request: Request
    start: int
    end: int

    @property
    def samples(self) -> bool:
        return self.end == len(self.request.tokens)


class Scheduler:
    """First come, first served. A step has at most `max_batch_tokens` tokens: one of each request that decodes, then
    prompts, in chunks where they are longer than what is left.

    A request begins when there are pages for all tokens it has. When a running one finds none for its next token, the
    latest is preempted and recomputed later: the first can always go on.
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
        self._let_go(request)

    def restart(self) -> None:
        """All requests wait, to be computed anew, and no page is held or remembered."""
        self.pool.clear()
        self.waiting.extendleft(reversed(self.running))
        self.running = []
        self._slots = list(range(self.max_requests))
        for request in self.waiting:
            request.pages, request.computed, request.slot = [], 0, -1

    def schedule(self) -> list[Work]:
        works: list[Work] = []
        left = self.max_batch_tokens
        preempted = self.preemptions
        place = 0
        while place < len(self.running) and left:
            request = self.running[place]
            end = min(len(request.tokens), request.computed + left)
            if not self._grow(request, end):
                break  # it was the last one itself
            works.append(self._take(request, end))
            left -= works[-1].end - works[-1].start
            place += 1
        while self.waiting and left and len(self.running) < self.max_requests and preempted == self.preemptions:
            request = self.waiting[0]
            if not self._begin(request):
                break
            self.running.append(self.waiting.popleft())
            works.append(self._take(request, min(len(request.tokens), request.computed + left)))
            left -= works[-1].end - works[-1].start
        return works

    def _take(self, request: Request, end: int) -> Work:
        """The work of a request up to `end`. Pages that it fills can be shared from now on: whoever does so runs in
        this step or later, and a step writes all its pages before it reads any."""
        work = Work(request, request.computed, end)
        request.computed = end
        if self.prefix_reuse:
            extend_hashes(request.hashes, request.tokens, self.page_size)
            for page in range(work.start // self.page_size, end // self.page_size):
                self.pool.remember(request.pages[page], request.hashes[page])
        return work

    def _begin(self, request: Request) -> bool:
        """Gives a waiting request pages for all its tokens, as far as they are there already shared ones."""
        shared: list[int] = []
        if self.prefix_reuse:
            extend_hashes(request.hashes, request.tokens, self.page_size)
            # one token at least is computed: its logits are what the next one is sampled from
            shared = self.pool.match(request.hashes[: (len(request.tokens) - 1) // self.page_size])
        missing = self._pages_of(len(request.tokens)) - len(shared)
        if not self.pool.can_take(missing, shared):
            return False
        self.pool.share(shared)
        request.pages = shared + self.pool.take(missing)
        request.slot = self._slots.pop()
        request.computed = len(shared) * self.page_size
        if request.cached is None:
            request.cached = request.computed
        return True

    def _grow(self, request: Request, end: int) -> bool:
        """Gives a running request the pages that its tokens up to `end` lack; False where it lost its own."""
        missing = self._pages_of(end) - len(request.pages)
        while missing > 0 and not self.pool.can_take(missing):
            latest = self.running.pop()
            self._let_go(latest)
            self.waiting.appendleft(latest)
            self.preemptions += 1
            if latest is request:
                return False
        request.pages += self.pool.take(max(0, missing))
        return True

    def _let_go(self, request: Request) -> None:
        self.pool.release(request.pages)
        if request.slot >= 0:
            self._slots.append(request.slot)
        request.pages, request.computed, request.slot = [], 0, -1

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
