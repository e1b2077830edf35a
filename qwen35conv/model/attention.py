"""Full attention with an output gate, and its cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from qwen35conv.facts.config import ModelConfig
from qwen35conv.model.linear import Linear
from qwen35conv.model.rope import RotaryEmbedding, rotary_of
from qwen35conv.model.span import Span
from qwen35conv.model.weights import Weights

_GROWTH = 256  # positions by which a cache grows


class AttentionState(Protocol):
    """What an attention layer remembers; row b's position p is what came p-th, wherever it is stored."""

    def append(
        self,
        keys: mx.array,  # [B, Hkv, T, D]
        values: mx.array,  # [B, Hkv, T, D]
        span: Span,
    ) -> None:
        """Keep the keys and values of the span, in the place of any that were kept for its positions."""

    def attend(
        self,
        queries: mx.array,  # [B, H, T, D]
        scale: float,
        span: Span,
    ) -> mx.array:
        """Attention of the span's queries over all positions up to their own, [B, H, T, D]."""

    def keep(self, lengths: tuple[int, ...]) -> None:
        """Forget each row's positions from `lengths[b]` on: the next span begins there."""

    def arrays(self) -> list[mx.array]:
        """What must be evaluated before the layer is dropped."""


@dataclass(slots=True)
class KVCache:
    """Keys and values in growing buffers; row b holds position p at place p, and what lies behind its end is void."""

    keys: mx.array | None = None  # [B, Hkv, capacity, D]
    values: mx.array | None = None

    def append(self, keys: mx.array, values: mx.array, span: Span) -> None:
        """Keep the keys and values of the span."""
        self.keys = written(self.keys, keys, span)
        self.values = written(self.values, values, span)

    def attend(self, queries: mx.array, scale: float, span: Span) -> mx.array:
        """Attention over all positions up to each query's own, [B, H, T, D]."""
        assert self.keys is not None
        assert self.values is not None
        n_keys = span.n_keys
        return attention(queries, self.keys[..., :n_keys, :], self.values[..., :n_keys, :], scale, span)

    def keep(self, lengths: tuple[int, ...]) -> None:
        """Nothing to do: the next span writes over what is forgotten, and no query before it sees that."""

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
    rotary: RotaryEmbedding
    eps: float

    def __call__(
        self,
        x: mx.array,  # [B, T, hidden]
        span: Span,
        state: AttentionState | None = None,
    ) -> mx.array:
        """[B, T, hidden]; `state` remembers the keys and values where there is one."""
        if span.stepwise and span.n_steps > 1:
            state = KVCache() if state is None else state
            parts = [self(x[:, t : t + 1], span.step(t), state) for t in range(span.n_steps)]
            return mx.concatenate(parts, axis=1)
        queries, keys, values, gate = self.project(x)
        y = self.attend(queries, keys, values, span, state)
        return self.finish(y, gate)

    def project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Queries [B, T, H, D], keys and values [B, T, Hkv, D], and the output gate [B, T, H, D]."""
        batch, n_steps, _ = x.shape
        queries, gate = mx.split(self.q_proj(x).reshape(batch, n_steps, self.n_heads, -1), 2, axis=-1)
        keys = self.k_proj(x).reshape(batch, n_steps, self.n_kv_heads, -1)
        return queries, keys, self.v_proj(x).reshape(batch, n_steps, self.n_kv_heads, -1), gate

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, span: Span, state: AttentionState | None
    ) -> mx.array:
        """Attention [B, H, T, D] of what `project` gives, behind norms and rotary positions."""
        queries = self.rotary(mx.fast.rms_norm(queries, self.q_norm, self.eps).transpose(0, 2, 1, 3), span)
        keys = self.rotary(mx.fast.rms_norm(keys, self.k_norm, self.eps).transpose(0, 2, 1, 3), span)
        values = values.transpose(0, 2, 1, 3)
        scale = queries.shape[-1] ** -0.5
        if state is None:
            return attention(queries, keys, values, scale, span)
        state.append(keys, values, span)
        return state.attend(queries, scale, span)

    def finish(
        self,
        y: mx.array,  # [B, H, T, D]
        gate: mx.array,  # [B, T, H, D]
    ) -> mx.array:
        """The layer's output [B, T, hidden]."""
        batch, n_steps = gate.shape[:2]
        y = y.transpose(0, 2, 1, 3).reshape(batch, n_steps, -1)
        return self.o_proj(y * mx.sigmoid(gate.reshape(batch, n_steps, -1)))


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
        rotary=rotary_of(config),
        eps=config.rms_norm_eps,
    )


def attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, span: Span) -> mx.array:
    """Attention [B, H, T, D] over keys and values [B, Hkv, n_keys, D] that lie at their positions."""
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=span.attention_mask())


def written(buffer: mx.array | None, new: mx.array, span: Span) -> mx.array:
    """The buffer [B, Hkv, capacity, width] with each row's new positions in their places, grown where too short."""
    batch, n_heads, n_steps, width = new.shape
    capacity = -(-span.n_keys // _GROWTH) * _GROWTH
    if buffer is None:
        buffer = mx.zeros((batch, n_heads, capacity, width), new.dtype)
    elif buffer.shape[2] < span.n_keys:
        more = mx.zeros((batch, n_heads, capacity - buffer.shape[2], width), new.dtype)
        buffer = mx.concatenate([buffer, more], axis=2)
    if span.begin is not None:
        buffer[:, :, span.begin : span.begin + n_steps] = new
        return buffer
    for row, begin in enumerate(span.begins):
        buffer[row, :, begin : begin + n_steps] = new[row]
    return buffer
