"""Which positions a call covers, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Span:
    """T positions of each row of a batch: row b begins at `begins[b]`, and its first `lengths[b]` are real."""

    n_steps: int
    begins: tuple[int, ...]
    lengths: tuple[int, ...] | None = None  # None: all of T are real

    @property
    def begin(self) -> int | None:
        """Where all rows begin, or None where they differ."""
        return self.begins[0] if len(set(self.begins)) == 1 else None

    @property
    def offset(self) -> int | mx.array:
        """The first position, for the rotary embedding: one number, or one a row [B]."""
        return self.begins[0] if self.begin is not None else mx.array(self.begins)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last real position of each row."""
        lengths = self.lengths or (self.n_steps,) * len(self.begins)
        return tuple(begin + length for begin, length in zip(self.begins, lengths, strict=True))

    def mask(self) -> mx.array | None:
        """True where a position is real, [B, T]; None where all are."""
        if self.lengths is None:
            return None
        return mx.arange(self.n_steps) < mx.array(self.lengths)[:, None]

    def attention_mask(self) -> str | mx.array | None:
        """Which keys a query may see: those up to its own position.

        Padding comes after a row's real positions, and the next call overwrites its keys: no real query ever sees it.
        """
        if self.begin is not None:
            return "causal" if self.n_steps > 1 else None
        n_keys = max(self.begins) + self.n_steps
        queries = mx.array(self.begins)[:, None, None, None] + mx.arange(self.n_steps)[:, None]  # [B, 1, T, 1]
        return mx.arange(n_keys) <= queries


def span_of(n_steps: int, begins: Sequence[int], lengths: Sequence[int] | None = None) -> Span:
    """The span of a call; lengths that leave no padding are dropped."""
    if lengths is not None and any(length != n_steps for length in lengths):
        return Span(n_steps, tuple(begins), tuple(lengths))
    return Span(n_steps, tuple(begins))
