"""Rotary positions on part of each head: plain ones, and multimodal ones of three axes, interleaved or in sections.

Source: the family's published config (`mrope_section`, `mrope_interleaved`, `partial_rotary_factor`).
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from qwen35conv.errors import CheckpointError
from qwen35conv.facts.config import ModelConfig
from qwen35conv.model.span import Span


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """Turns the first `dims` values of each head, value i together with value i + dims / 2."""

    dims: int
    theta: float
    section: tuple[int, ...]  # frequencies of time, height and width
    interleaved: bool

    def __call__(self, x: mx.array, span: Span) -> mx.array:
        """x [B, H, T, D], turned. Text takes MLX's own kernel, whatever form its positions came in."""
        if span.positions is None:
            return mx.fast.rope(x, self.dims, traditional=False, base=self.theta, scale=1.0, offset=span.offset)
        angles = self.angles(span.positions)[:, None]  # [B, 1, T, dims / 2]
        cos, sin = mx.cos(angles), mx.sin(angles)
        first, second, rest = mx.split(x, [self.dims // 2, self.dims], axis=-1)
        first, second = first.astype(mx.float32), second.astype(mx.float32)
        turned = mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return mx.concatenate([turned.astype(x.dtype), rest], axis=-1)

    def angles(self, positions: mx.array) -> mx.array:
        """Angles [B, T, dims / 2] in float32 of positions [3, B, T]. Raises CheckpointError for a bad `section`."""
        exponents = np.arange(0, self.dims, 2, dtype=np.float64) / self.dims
        frequencies = mx.array((self.theta**-exponents).astype(np.float32))
        chosen = positions[mx.array(self.axes())].astype(mx.float32)  # [dims / 2, B, T]
        return chosen.transpose(1, 2, 0) * frequencies

    def axes(self) -> np.ndarray:
        """Which of the three axes each frequency follows, [dims / 2]. Raises CheckpointError for a bad `section`."""
        n = self.dims // 2
        if len(self.section) != 3 or (not self.interleaved and sum(self.section) != n):
            raise CheckpointError(
                f"mrope_section: expected three numbers for {n} frequencies, found {list(self.section)}",
                hint="positions of images can't be run; text can",
            )
        if not self.interleaved:
            return np.repeat(np.arange(3), self.section)
        axes = np.zeros(n, dtype=np.int64)
        for axis in (1, 2):
            axes[axis : 3 * self.section[axis] : 3] = axis
        return axes


def rotary_of(config: ModelConfig) -> RotaryEmbedding:
    """The rotary embedding that config.json describes."""
    rope = config.rope
    return RotaryEmbedding(config.rotary_dim, rope.theta, rope.mrope_section, rope.mrope_interleaved)
