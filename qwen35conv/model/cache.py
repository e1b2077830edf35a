"""What a batch of sequences leaves behind in all layers, and how a speculative round is taken back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from qwen35conv.model.attention import AttentionState
from qwen35conv.model.gated_delta_net import DeltaCache
from qwen35conv.model.span import CallError, Span, span_of


@dataclass(slots=True)
class Cache:
    """What a batch of sequences has left behind: real positions of each row, and what each layer remembers."""

    lengths: list[int]
    layers: list[AttentionState | DeltaCache]
    rotary_shifts: list[int] = field(default_factory=list)  # how far rotary positions are ahead; empty: nowhere
    last: Span | None = None  # the span of a recorded round

    def span(
        self,
        n_steps: int,
        lengths: Sequence[int] | None = None,
        *,
        positions: np.ndarray | None = None,  # [3, B, T]
        stepwise: bool = False,
    ) -> Span:
        """The span of the next call. Raises CallError for lengths or positions of other shapes."""
        rotary = None
        if self.rotary_shifts:
            rotary = [n + shift for n, shift in zip(self.lengths, self.rotary_shifts, strict=True)]
        return span_of(n_steps, self.lengths, lengths, rotary=rotary, positions=positions, stepwise=stepwise)

    def move(self, span: Span) -> None:
        """Go past a span that all layers have seen."""
        before = self.rotary_shifts or [0] * len(self.lengths)
        shifts = before
        if span.positions is not None:
            largest = np.array(span.positions).max(axis=0)  # [B, T]
            shifts = [
                max(int(largest[row, :n].max()) + 1, begin + before[row]) - begin - n if n else before[row]
                for row, (n, begin) in enumerate(zip(span.n_real, span.begins, strict=True))
            ]
        elif span.rotary is not None:
            moved = [first - begin for first, begin in zip(span.rotary, span.begins, strict=True)]
            shifts = [a if n else b for a, b, n in zip(moved, before, span.n_real, strict=True)]
        self.rotary_shifts = shifts if any(shifts) else []
        self.lengths = list(span.ends)
        self.last = span

    def record(self, on: bool = True) -> None:
        """Let each call from now on leave its round behind, so that `keep` can take it back; or stop that."""
        for layer in self.layers:
            if isinstance(layer, DeltaCache):
                layer.recording = on
                layer.round = layer.round if on else None

    def keep(self, kept: int | Sequence[int]) -> None:
        """Go back to a prefix of the last call: one length for all rows, or one a row; 0 is none of it.

        Tails and states are those of a run over only the kept positions, bit for bit where products do not depend on
        how many positions they cover (`stepwise` makes sure). Raises CallError where no round was recorded, or it was
        shorter.
        """
        last = self.last
        rows = len(self.lengths)
        lengths = (kept,) * rows if isinstance(kept, int) else tuple(kept)
        deltas = [layer for layer in self.layers if isinstance(layer, DeltaCache)]
        if last is None or any(layer.round is None for layer in deltas):
            raise CallError("rollback: no round was recorded", hint="call record() before the round")
        if len(lengths) != rows or not all(0 <= n <= real for n, real in zip(lengths, last.n_real, strict=True)):
            raise CallError(f"rollback: expected at most {list(last.n_real)} positions, found {list(lengths)}")
        if last.positions is not None and lengths != last.n_real:
            raise CallError("rollback: a round with positions of images can only be kept whole")
        ends = tuple(begin + n for begin, n in zip(last.begins, lengths, strict=True))
        for layer in self.layers:
            layer.keep(lengths if isinstance(layer, DeltaCache) else ends)
            mx.eval(layer.arrays())
        self.lengths, self.last = list(ends), None
