"""Which positions a call covers, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from qwen35conv.errors import Qwen35ConvError


class CallError(Qwen35ConvError):
    """A call that the model, or what it remembers, does not allow."""

    usual_hint = "the message says what the call must be"


@dataclass(frozen=True, slots=True)
class Span:
    """T positions of each row of a batch: row b begins at `begins[b]`, and its first `lengths[b]` are real.

    Left-padded rows are brought into this form by `padding_of`. Made by `span_of`, once for all layers.
    """

    n_steps: int
    begins: tuple[int, ...]
    lengths: tuple[int, ...] | None = None  # None: all of T are real
    rotary: tuple[int, ...] | None = None  # rotary position of each row's first step; None: its begin
    stepwise: bool = False  # each product position by position, for the bits of single-token decode
    positions: mx.array | None = field(default=None, compare=False)  # [3, B, T] where the three axes part
    real: mx.array | None = field(default=None, compare=False)  # [B, T] True where real; None: everywhere

    @property
    def begin(self) -> int | None:
        """Where all rows begin, or None where they differ."""
        return self.begins[0] if len(set(self.begins)) == 1 else None

    @property
    def offset(self) -> int | mx.array:
        """The first position, for the rotary embedding: one number, or one a row [B]."""
        first = self.rotary or self.begins
        return first[0] if len(set(first)) == 1 else mx.array(first)

    @property
    def n_keys(self) -> int:
        """Positions of the longest row, this span's and all before, padding included."""
        return max(self.begins) + self.n_steps

    @property
    def n_real(self) -> tuple[int, ...]:
        """Real positions of each row."""
        return (self.n_steps,) * len(self.begins) if self.lengths is None else self.lengths

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last real position of each row."""
        return tuple(begin + length for begin, length in zip(self.begins, self.n_real, strict=True))

    def mask(self) -> mx.array | None:
        """True where a position is real, [B, T]; None where all are. One array, shared by all layers."""
        return self.real

    def visible(self) -> mx.array:
        """Which keys each query may see, [B or 1, 1, T, n_keys]: those up to its own position.

        Padding comes after a row's real positions, and the next call overwrites its keys: no real query ever sees it.
        """
        begins = mx.array(self.begins if self.begin is None else self.begins[:1])
        queries = begins[:, None, None, None] + mx.arange(self.n_steps)[:, None]
        return mx.arange(self.n_keys) <= queries

    def attention_mask(self) -> str | mx.array | None:
        """The same in the cheapest form that MLX's attention takes."""
        if self.begin is not None:
            return "causal" if self.n_steps > 1 else None
        return self.visible()

    def step(self, t: int) -> Span:
        """The span of position `t` alone."""
        lengths = tuple(min(max(n - t, 0), 1) for n in self.n_real)
        return span_of(
            1,
            [begin + t for begin in self.begins],
            lengths,
            rotary=None if self.rotary is None else [first + t for first in self.rotary],
            positions=None if self.positions is None else np.array(self.positions[..., t : t + 1]),
        )

    def mapped(self, f: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
        """f(x) [B, T, ...] of x [B, T, in]; position by position where `stepwise`.

        A matrix product over several positions may sum in another order than over one.
        """
        if not self.stepwise or self.n_steps <= 1:
            return f(x)
        return mx.concatenate([f(x[:, t : t + 1]) for t in range(self.n_steps)], axis=1)


def span_of(
    n_steps: int,
    begins: Sequence[int],
    lengths: Sequence[int] | None = None,
    *,
    rotary: Sequence[int] | None = None,
    positions: np.ndarray | None = None,  # [3, B, T] time, height, width
    stepwise: bool = False,
) -> Span:
    """The span of a call; lengths that leave no padding are dropped, and so are positions that count one by one.

    Raises CallError for lengths or positions of other shapes.
    """
    n_rows = len(begins)
    if lengths is not None:
        if len(lengths) != n_rows or not all(0 <= n <= n_steps for n in lengths):
            raise CallError(f"lengths: expected {n_rows} numbers from 0 to {n_steps}, found {list(lengths)}")
        if all(n == n_steps for n in lengths):
            lengths = None
    if positions is not None:
        if positions.shape != (3, n_rows, n_steps):
            raise CallError(f"positions: expected {[3, n_rows, n_steps]}, found {list(positions.shape)}")
        if _counts(positions, lengths):
            rotary, positions = positions[0, :, 0].tolist(), None
    if rotary is not None and tuple(rotary) == tuple(begins):
        rotary = None
    return Span(
        n_steps,
        tuple(begins),
        None if lengths is None else tuple(lengths),
        None if rotary is None else tuple(rotary),
        stepwise,
        None if positions is None else mx.array(positions.astype(np.int32)),
        None if lengths is None else mx.arange(n_steps) < mx.array(list(lengths))[:, None],
    )


def _counts(positions: np.ndarray, lengths: Sequence[int] | None) -> bool:
    """Whether the axes agree and real positions count one by one, as text does."""
    n_steps = positions.shape[2]
    if not n_steps:
        return False
    wanted = positions[:1, :, :1] + np.arange(n_steps)
    padded = np.zeros((positions.shape[1], n_steps), bool)
    if lengths is not None:
        padded = np.arange(n_steps) >= np.array(lengths)[:, None]
    return bool(np.all((positions == wanted) | padded))
