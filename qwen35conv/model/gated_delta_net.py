"""Linear attention: a causal convolution, the gated delta rule, a gated norm; and what it remembers.

Source: Gated Delta Networks, arXiv:2412.06464, as the Qwen3-Next family builds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from qwen35conv.facts.config import ModelConfig
from qwen35conv.kernels import compute_gates, gated_delta
from qwen35conv.model.linear import Linear
from qwen35conv.model.span import Span
from qwen35conv.model.weights import Weights

_L2_EPS = 1e-6


@dataclass(slots=True)
class DeltaCache:
    """What a gated delta net remembers: the last K-1 inputs of its convolution, and the state of its heads."""

    tail: mx.array | None = None  # [B, K-1, C], before SiLU; owns its bytes
    state: mx.array | None = None  # [B, Hv, Dv, Dk]  float32

    def arrays(self) -> list[mx.array]:
        """What must be evaluated before the layer is dropped."""
        return [x for x in (self.tail, self.state) if x is not None]


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What enters the gated delta rule."""

    q: mx.array  # [B, T, Hk, Dk]  normalised and scaled
    k: mx.array  # [B, T, Hk, Dk]  normalised
    v: mx.array  # [B, T, Hv, Dv]
    g: mx.array  # [B, T, Hv]      float32
    beta: mx.array  # [B, T, Hv]


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """The linear attention of a layer."""

    in_proj_qkv: Linear
    in_proj_z: Linear
    in_proj_b: Linear
    in_proj_a: Linear
    out_proj: Linear
    conv: mx.array  # [C, K, 1], taps oldest first
    A_log: mx.array  # [Hv]
    dt_bias: mx.array  # [Hv]
    norm: mx.array  # [Dv], as gamma in either generation
    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    eps: float
    backend: str = "auto"

    def __call__(
        self,
        x: mx.array,  # [B, T, hidden]
        span: Span,
        cache: DeltaCache | None = None,
    ) -> mx.array:
        """[B, T, hidden]; `cache` is read, and moved past the span's real positions."""
        tail = None if cache is None else cache.tail
        inputs, new_tail = self.prepare(x, span, tail)
        state = None if cache is None else cache.state
        if state is None:
            state = mx.zeros((x.shape[0], self.n_value_heads, self.value_dim, self.key_dim), mx.float32)
        y, state = gated_delta(
            inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, state, mask=span.mask(), backend=self.backend
        )
        if cache is not None:
            cache.tail, cache.state = new_tail, state
        z = self.in_proj_z(x).reshape(y.shape)
        return self.out_proj(gated_norm(y, z, self.norm, self.eps).reshape(*x.shape[:2], -1))

    def prepare(
        self,
        x: mx.array,  # [B, T, hidden]
        span: Span,
        tail: mx.array | None = None,  # [B, K-1, C]; None: nothing came before
    ) -> tuple[DeltaInputs, mx.array]:
        """What enters the gated delta rule, and the convolution's new tail [B, K-1, C]."""
        batch, n_steps, _ = x.shape
        n_kept = self.conv.shape[1] - 1
        qkv = self.in_proj_qkv(x)
        if (mask := span.mask()) is not None:
            qkv = mx.where(mask[..., None], qkv, 0)
        if tail is None:
            tail = mx.zeros((batch, n_kept, qkv.shape[-1]), qkv.dtype)
        window = mx.concatenate([tail, qkv], axis=1)
        mixed = nn.silu(mx.conv1d(window, self.conv, groups=qkv.shape[-1]))
        n_keys = self.n_key_heads * self.key_dim
        q, k, v = mx.split(mixed, [n_keys, 2 * n_keys], axis=-1)
        q, k = (heads.reshape(batch, n_steps, self.n_key_heads, self.key_dim) for heads in (q, k))
        g, beta = compute_gates(self.in_proj_a(x), self.in_proj_b(x), self.A_log, self.dt_bias)
        scale = self.key_dim**-0.5
        inputs = DeltaInputs(
            q=scale**2 * unit_rms(q),
            k=scale * unit_rms(k),
            v=v.reshape(batch, n_steps, self.n_value_heads, self.value_dim),
            g=g,
            beta=beta,
        )
        return inputs, _tail(window, n_kept, span)


def load_gated_delta_net(weights: Weights, module: str, config: ModelConfig, backend: str = "auto") -> GatedDeltaNet:
    """The linear attention layer `module`. Raises OpaqueModuleError where it can't be run."""
    return GatedDeltaNet(
        in_proj_qkv=weights.linear(f"{module}.in_proj_qkv"),
        in_proj_z=weights.linear(f"{module}.in_proj_z"),
        in_proj_b=weights.linear(f"{module}.in_proj_b"),
        in_proj_a=weights.linear(f"{module}.in_proj_a"),
        out_proj=weights.linear(f"{module}.out_proj"),
        conv=weights.array(f"{module}.conv1d.weight"),
        A_log=weights.array(f"{module}.A_log"),
        dt_bias=weights.array(f"{module}.dt_bias"),
        norm=weights.array(f"{module}.norm.weight"),
        n_key_heads=config.n_key_heads,
        n_value_heads=config.n_value_heads,
        key_dim=config.key_dim,
        value_dim=config.value_dim,
        eps=config.rms_norm_eps,
        backend=backend,
    )


def unit_rms(x: mx.array) -> mx.array:
    """x [..., D] over its root mean square: sqrt(D) times the reference's l2norm.

    The reference adds its eps to the sum of squares, MLX to their mean.
    """
    return mx.fast.rms_norm(x, None, _L2_EPS / x.shape[-1])


def gated_norm(
    x: mx.array,  # [B, T, Hv, Dv]
    gate: mx.array,  # [B, T, Hv, Dv]
    gain: mx.array,  # [Dv]
    eps: float,
) -> mx.array:
    """RMSNorm of each head, times SiLU of the gate in float32; in x's dtype."""
    return _gated(mx.fast.rms_norm(x, gain, eps), gate).astype(x.dtype)


@partial(mx.compile, shapeless=True)  # one fused kernel, with the bits that mlx-lm's has
def _gated(x: mx.array, gate: mx.array) -> mx.array:
    activated: mx.array = nn.silu(gate.astype(mx.float32))
    return activated * x.astype(mx.float32)


def _tail(window: mx.array, n_kept: int, span: Span) -> mx.array:
    """Each row's last `n_kept` real inputs; gathered, because a slice would keep the whole window alive."""
    places = mx.arange(n_kept)
    if span.lengths is None:
        return mx.take(window, span.n_steps + places, axis=1)
    places = mx.array(span.lengths)[:, None] + places
    return mx.take_along_axis(window, places[..., None], axis=1)
