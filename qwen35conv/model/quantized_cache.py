"""Keys and values in 4 or 8 bits, and attention over them, as they are packed where MLX has sound products for that."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from qwen35conv.model.attention import written
from qwen35conv.model.linear import on_cpu, wide_on_cpu
from qwen35conv.model.span import CallError, Span

_BITS, _GROUPS = (4, 8), (32, 64, 128)

Packed = tuple[mx.array, ...]  # values, scales and biases, [B, Hkv, capacity, ...] each


@dataclass(slots=True)
class QuantizedKVCache:
    """Keys and values in growing buffers, each head's values quantised in groups."""

    bits: int = 8
    group_size: int = 64
    keys: Packed = ()
    values: Packed = ()

    def __post_init__(self) -> None:
        if self.bits not in _BITS or self.group_size not in _GROUPS:
            raise CallError(
                f"quantised cache: expected bits of {_BITS} and groups of {_GROUPS}, "
                f"found {self.bits} and {self.group_size}"
            )

    def append(self, keys: mx.array, values: mx.array, span: Span) -> None:
        """Keep the keys and values of the span. Raises CallError where heads have no whole number of groups."""
        if keys.shape[-1] % self.group_size:
            raise CallError(
                f"quantised cache: heads of {keys.shape[-1]} values are no multiple of groups of {self.group_size}",
                hint="choose a smaller group",
            )
        self.keys = self._written(self.keys, keys, span)
        self.values = self._written(self.values, values, span)

    def attend(self, queries: mx.array, scale: float, span: Span) -> mx.array:
        """Attention over all positions up to each query's own, [B, H, T, D]."""
        batch, n_heads, n_steps, width = queries.shape
        n_kv_heads = self.keys[0].shape[1]
        grouped = wide_on_cpu(queries * scale).reshape(batch, n_kv_heads, -1, n_steps, width)
        scores = self._product(grouped, self.keys, span, transpose=True)
        if span.n_steps > 1 or span.begin is None:
            scores = mx.where(span.visible()[:, :, None], scores, -float("inf"))
        chances = mx.softmax(scores, axis=-1, precise=True)
        y = self._product(chances, self.values, span, transpose=False)
        return y.reshape(batch, n_heads, n_steps, width).astype(queries.dtype)

    def keep(self, lengths: tuple[int, ...]) -> None:
        """Nothing to do: the next span writes over what is forgotten, and no query before it sees that."""

    def arrays(self) -> list[mx.array]:
        """What must be evaluated before the layer is dropped."""
        return [*self.keys, *self.values]

    def _written(self, packed: Packed, new: mx.array, span: Span) -> Packed:
        parts = mx.quantize(new, group_size=self.group_size, bits=self.bits)
        return tuple(written(packed[i] if packed else None, part, span) for i, part in enumerate(parts))

    def _product(self, x: mx.array, packed: Packed, span: Span, *, transpose: bool) -> mx.array:
        """x [B, Hkv, H / Hkv, T, ...] times the first positions of what is packed."""
        weight, scales, biases = (part[:, :, None, : span.n_keys] for part in packed)
        scales, biases = scales.astype(x.dtype), biases.astype(x.dtype)
        if _has_products(packed[1].shape[-1] * self.group_size):
            return mx.quantized_matmul(
                x, weight, scales, biases, transpose=transpose, group_size=self.group_size, bits=self.bits
            )
        plain = mx.dequantize(weight, scales, biases, group_size=self.group_size, bits=self.bits)
        return x @ (plain.swapaxes(-1, -2) if transpose else plain)


def _has_products(width: int) -> bool:
    """Whether MLX multiplies by packed rows of `width` values as attention needs it.

    CUDA has no kernel for most of these shapes, and Metal's for columns leaves out what is beyond a multiple of 64.
    """
    return on_cpu() or (mx.metal.is_available() and width % 64 == 0)
