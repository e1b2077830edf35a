"""Hidden states that are kept as they leave chosen layers."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx


class Capture:
    """A hook for `Decoder.hidden`: `states[i]` is what left layer i in the last call, [B, T, hidden]."""

    def __init__(self, layers: Iterable[int]) -> None:
        self.layers = frozenset(layers)
        self.states: dict[int, mx.array] = {}

    def __call__(self, index: int, x: mx.array) -> None:
        """See one layer's output."""
        if index in self.layers:
            self.states[index] = x
