"""`PagePool`: reference counts of the pages of a cache, and which free pages can be reused for the same prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PagePool:
    """Pages by number, with the number of requests that use each; a page without one is free.

    A full page may be cached by the hash of its tokens and of all before them (prefix.py). It stays cached after its
    release until it is allocated for other tokens, least recently released first.
    """

    def __init__(self, num_pages: int) -> None:
        self.ref_counts = [0] * num_pages
        self._free: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self.clear()

    def clear(self) -> None:
        """Frees every page and empties the cache."""
        self.ref_counts = [0] * len(self.ref_counts)
        self._free = OrderedDict.fromkeys(range(len(self.ref_counts)))
        self.clear_cache()

    def __len__(self) -> int:
        return len(self.ref_counts)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._page_of)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages of the longest cached prefix of `hashes`; their reference counts are unchanged."""
        pages: list[int] = []
        for one in hashes:
            if (page := self._page_of.get(one)) is None:
                break
            pages.append(page)
        return pages

    def can_allocate(self, count: int, shared: Iterable[int] = ()) -> bool:
        """Whether `count` pages can be allocated after `share(shared)`."""
        return count + sum(self.ref_counts[page] == 0 for page in shared) <= len(self._free)

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            if self.ref_counts[page] == 0:
                del self._free[page]
            self.ref_counts[page] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, which are removed from the cache; ask `can_allocate` first."""
        assert count <= len(self._free), "ask can_allocate first"
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self.ref_counts[page] = 1
            if (known := self._hash_of.pop(page, None)) is not None:
                del self._page_of[known]
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Decrements reference counts, last pages first: the beginning of a prompt is the likeliest to be reused."""
        for page in reversed(pages):
            assert self.ref_counts[page] > 0, f"page {page} is free already"
            self.ref_counts[page] -= 1
            if self.ref_counts[page] == 0:
                self._free[page] = None

    def cache(self, page: int, hash_: bytes) -> None:
        """Caches a full page in use under `hash_`; of several pages with one hash the first is kept."""
        assert self.ref_counts[page] > 0
        if hash_ not in self._page_of and page not in self._hash_of:
            self._page_of[hash_] = page
            self._hash_of[page] = hash_

    def clear_cache(self) -> None:
        """Empties the cache, as after a change of the model's weights."""
        self._page_of.clear()
        self._hash_of.clear()
