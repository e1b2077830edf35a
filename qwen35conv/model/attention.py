"""Full attention with an output gate, and its cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from qwen35conv.facts.config import ModelConfig
from qwen35conv.model.linear import Linear
from qwen35conv.model.span import Span
from qwen35conv.model.weights import Weights

_GROWTH = 256  # positions by which a cache grows


class AttentionState(Protocol):
    """What an attention layer remembers: keys and values go in, and attention over all of them comes out."""

    def attend(
        self,
        queries: mx.array,  # [B, H, T, D]
        keys: mx.array,  # [B, Hkv, T, D]
        values: mx.array,  # [B, Hkv, T, D]
        scale: float,
        span: Span,
    ) -> mx.array:
        """Keep the keys and values of the span; attention over all up to each position, [B, H, T, D]."""

    def arrays(self) -> list[mx.array]:
        """What must be evaluated before the layer is dropped."""


@dataclass(slots=True)
class KVCache:
    """Keys and values in growing buffers; row b holds position p at place p, and what lies behind its end is void."""

    keys: mx.array | None = None  # [B, Hkv, capacity, D]
    values: mx.array | None = None

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, span: Span) -> mx.array:
        """Keep the keys and values of the span; attention over all up to each position, [B, H, T, D]."""
        self.keys = _written(self.keys, keys, span)
        self.values = _written(self.values, values, span)
        n_keys = max(span.begins) + span.n_steps
        return _attend(queries, self.keys[..., :n_keys, :], self.values[..., :n_keys, :], scale, span)

    def arrays(self) -> list[mx.array]:
        """What must be evaluated before the layer is dropped."""
        return [x for x in (self.keys, self.values) if x is not None]


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention: q_proj gives a query and an output gate for each head."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: mx.array  # [D]
    k_norm: mx.array  # [D]
    n_heads: int
    n_kv_heads: int
    rotary_dim: int
    theta: float
    eps: float

    def __call__(
        self,
        x: mx.array,  # [B, T, hidden]
        span: Span,
        state: AttentionState | None = None,
    ) -> mx.array:
        """[B, T, hidden]; `state` remembers the keys and values where there is one."""
        batch, n_steps, _ = x.shape
        queries, gate = mx.split(self.q_proj(x).reshape(batch, n_steps, self.n_heads, -1), 2, axis=-1)
        keys = self.k_proj(x).reshape(batch, n_steps, self.n_kv_heads, -1)
        values = self.v_proj(x).reshape(batch, n_steps, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
        queries = self._rotated(mx.fast.rms_norm(queries, self.q_norm, self.eps).transpose(0, 2, 1, 3), span)
        keys = self._rotated(mx.fast.rms_norm(keys, self.k_norm, self.eps).transpose(0, 2, 1, 3), span)
        scale = queries.shape[-1] ** -0.5
        if state is None:
            y = _attend(queries, keys, values, scale, span)
        else:
            y = state.attend(queries, keys, values, scale, span)
        y = y.transpose(0, 2, 1, 3).reshape(batch, n_steps, -1)
        return self.o_proj(y * mx.sigmoid(gate.reshape(batch, n_steps, -1)))

    def _rotated(self, x: mx.array, span: Span) -> mx.array:
        return mx.fast.rope(
            x, self.rotary_dim, traditional=False, base=self.theta, scale=1.0, offset=span.offset
        )  # the first rotary_dim values of each head


def load_attention(weights: Weights, module: str, config: ModelConfig) -> Attention:
    """The full attention layer `module`. Raises OpaqueModuleError where it can't be run."""
    return Attention(
        q_proj=weights.linear(f"{module}.q_proj"),
        k_proj=weights.linear(f"{module}.k_proj"),
        v_proj=weights.linear(f"{module}.v_proj"),
        o_proj=weights.linear(f"{module}.o_proj"),
        q_norm=weights.array(f"{module}.q_norm.weight"),
        k_norm=weights.array(f"{module}.k_norm.weight"),
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        rotary_dim=config.rotary_dim,
        theta=config.rope.theta,
        eps=config.rms_norm_eps,
    )


def _attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float, span: Span) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=span.attention_mask())


def _written(buffer: mx.array | None, new: mx.array, span: Span) -> mx.array:
    """The buffer with each row's new positions in their places, grown where it was too short."""
    batch, n_heads, n_steps, width = new.shape
    needed = max(span.begins) + n_steps
    capacity = -(-needed // _GROWTH) * _GROWTH
    if buffer is None:
        buffer = mx.zeros((batch, n_heads, capacity, width), new.dtype)
    elif buffer.shape[2] < needed:
        more = mx.zeros((batch, n_heads, capacity - buffer.shape[2], width), new.dtype)
        buffer = mx.concatenate([buffer, more], axis=2)
    if span.begin is not None:
        buffer[:, :, span.begin : span.begin + n_steps] = new
        return buffer
    for row, begin in enumerate(span.begins):
        buffer[row, :, begin : begin + n_steps] = new[row]
    return buffer
