"""Which pages of a pool hold the tokens of which row."""

from __future__ import annotations

from collections.abc import Sequence


class PageTable:
    """Rows of pages. A page that several rows hold is copied before one of them writes to it (copy on write)."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.free = list(range(num_pages - 1, -1, -1))
        self.holders = [0] * num_pages
        self.rows: list[list[int]] = []

    def reserve(self, start: int, end: int) -> list[tuple[int, int]]:
        """Allocates pages for tokens [start, end) of every row; returns (from, to) of the pages to be copied first.

        `MemoryError` where the pool has too few pages; nothing is changed then.
        """
        first, last = start // self.page_size, -(-end // self.page_size)
        missing = sum(max(0, last - len(row)) for row in self.rows)
        holders = dict[int, int]()
        for row in self.rows:
            for page in row[first:last]:
                holders[page] = holders.get(page, 0) + 1
        # the last row to hold a page keeps it, if no other does
        copies = sum(self.holders[page] - 1 if many == self.holders[page] else many for page, many in holders.items())
        if missing + copies > len(self.free):
            raise MemoryError(
                f"the pool has {len(self.free)} of {len(self.holders)} pages left, and {missing + copies} are needed; "
                "free rows, or make it with more memory"
            )
        copied = []
        for row in self.rows:
            for place in range(first, min(last, len(row))):
                if self.holders[row[place]] > 1:
                    page = self._take()
                    copied.append((row[place], page))
                    self.holders[row[place]] -= 1
                    row[place] = page
            row.extend(self._take() for _ in range(last - len(row)))
        return copied

    def select(self, rows: Sequence[int]) -> None:
        """The rows become copies of `rows`, which share their pages."""
        chosen = [list(self.rows[index]) for index in rows]
        for row in chosen:
            for page in row:
                self.holders[page] += 1
        self.truncate(0)
        self.rows = chosen

    def truncate(self, length: int) -> None:
        """Frees the pages after `length` tokens."""
        kept = -(-length // self.page_size)
        for row in self.rows:
            for page in row[kept:]:
                self.holders[page] -= 1
                if self.holders[page] == 0:
                    self.free.append(page)
            del row[kept:]

    def _take(self) -> int:
        page = self.free.pop()
        self.holders[page] = 1
        return page
