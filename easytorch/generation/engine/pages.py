"""`PagePool`: which pages of the cache are held, and which of the others still have tokens that may come again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PagePool:
    """Pages by number. A page is held by as many requests as have taken or shared it; the rest are free.

    A full page may be remembered by the hash of its tokens and of all before them (prefix.py). It stays so when nobody
    holds it, until it is taken for other tokens: the pages that were released first go first.
    """

    def __init__(self, num_pages: int) -> None:
        self.holders = [0] * num_pages
        self._free: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self.clear()

    def clear(self) -> None:
        """Every page is free, and none remembered."""
        self.holders = [0] * len(self.holders)
        self._free = OrderedDict.fromkeys(range(len(self.holders)))
        self.forget()

    def __len__(self) -> int:
        return len(self.holders)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def remembered(self) -> int:
        return len(self._page_of)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages of the longest beginning of `hashes` that is remembered; they are not held yet."""
        pages: list[int] = []
        for one in hashes:
            if (page := self._page_of.get(one)) is None:
                break
            pages.append(page)
        return pages

    def can_take(self, count: int, shared: Iterable[int] = ()) -> bool:
        """Whether `count` pages can be taken after `shared` have been shared."""
        return count + sum(self.holders[page] == 0 for page in shared) <= len(self._free)

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            if self.holders[page] == 0:
                del self._free[page]
            self.holders[page] += 1

    def take(self, count: int) -> list[int]:
        """`count` free pages, whose contents are forgotten; `can_take` says whether there are as many."""
        assert count <= len(self._free), "ask can_take first"
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self.holders[page] = 1
            if (known := self._hash_of.pop(page, None)) is not None:
                del self._page_of[known]
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Lets go of pages, of a request's last tokens first: what begins a prompt is the likeliest to come again."""
        for page in reversed(pages):
            assert self.holders[page] > 0, f"page {page} is free already"
            self.holders[page] -= 1
            if self.holders[page] == 0:
                self._free[page] = None

    def remember(self, page: int, hash_: bytes) -> None:
        """`page`, which is held and full, has the tokens of `hash_`. The first page of equal ones is remembered."""
        assert self.holders[page] > 0
        if hash_ not in self._page_of and page not in self._hash_of:
            self._page_of[hash_] = page
            self._hash_of[page] = hash_

    def forget(self) -> None:
        """No page is remembered: as after a change of the model's weights."""
        self._page_of.clear()
        self._hash_of.clear()
