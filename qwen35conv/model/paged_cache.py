"""Keys and values in pages of one pool: what a serving engine's page store looks like behind the attention seam."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

from qwen35conv.model.attention import attention
from qwen35conv.model.span import CallError, Span


@dataclass(slots=True)
class PagePool:
    """The pages of one layer, shared by the rows of any number of batches."""

    n_pages: int
    page_size: int  # positions of a page
    keys: mx.array | None = None  # [pages, Hkv, page, D]
    values: mx.array | None = None
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(self.n_pages))[::-1]

    def take(self) -> int:
        """A free page. Raises CallError where none is left."""
        if not self.free:
            raise CallError(f"page pool: all {self.n_pages} pages are taken", hint="free rows, or make it larger")
        return self.free.pop()

    def store(self, page: int, place: int, keys: mx.array, values: mx.array) -> None:
        """Put keys and values [Hkv, n, D] into a page, from `place` on."""
        if self.keys is None or self.values is None:
            shape = (self.n_pages, keys.shape[0], self.page_size, keys.shape[2])
            self.keys, self.values = mx.zeros(shape, keys.dtype), mx.zeros(shape, values.dtype)
        end = place + keys.shape[1]
        self.keys[page, :, place:end] = keys
        self.values[page, :, place:end] = values


@dataclass(slots=True)
class PagedKVCache:
    """The rows of one batch as lists of pages; only real positions take room."""

    pool: PagePool
    pages: list[list[int]] = field(default_factory=list)  # of each row, in the order of its positions

    def append(self, keys: mx.array, values: mx.array, span: Span) -> None:
        """Keep the keys and values of the span. Raises CallError where the pool has no page left."""
        size = self.pool.page_size
        self.pages = self.pages or [[] for _ in span.begins]
        for row, (begin, end) in enumerate(zip(span.begins, span.ends, strict=True)):
            while len(self.pages[row]) * size < end:
                self.pages[row].append(self.pool.take())
            at = begin
            while at < end:
                stop = min(end, (at // size + 1) * size)
                part = slice(at - begin, stop - begin)
                self.pool.store(self.pages[row][at // size], at % size, keys[row, :, part], values[row, :, part])
                at = stop

    def attend(self, queries: mx.array, scale: float, span: Span) -> mx.array:
        """Attention over all positions up to each query's own, [B, H, T, D]."""
        n_pages = -(-span.n_keys // self.pool.page_size)
        table = mx.array([(row + [0] * n_pages)[:n_pages] for row in self.pages])  # void places see any page
        keys, values = (self._gathered(x, table, span.n_keys) for x in self._pool())
        return attention(queries, keys, values, scale, span)

    def keep(self, lengths: tuple[int, ...]) -> None:
        """Give back each row's pages from `lengths[b]` on."""
        for row, length in zip(self.pages, lengths, strict=True):
            n_pages = -(-length // self.pool.page_size)
            self.pool.free += row[n_pages:][::-1]
            del row[n_pages:]

    def arrays(self) -> list[mx.array]:
        """What must be evaluated before the layer is dropped: the pool, which other rows share."""
        return [x for x in (self.pool.keys, self.pool.values) if x is not None]

    def _pool(self) -> tuple[mx.array, mx.array]:
        if self.pool.keys is None or self.pool.values is None:
            raise CallError("page pool: nothing was appended yet", hint="append at least one real position first")
        return self.pool.keys, self.pool.values

    def _gathered(self, pool: mx.array, table: mx.array, n_keys: int) -> mx.array:
        """[B, Hkv, n_keys, D] of the pages [B, n]."""
        found = pool[table].transpose(0, 2, 1, 3, 4)
        return found.reshape(*found.shape[:2], -1, found.shape[-1])[:, :, :n_keys]
