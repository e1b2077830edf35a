"""From projections to a state: the causal convolution, the gates, the gated delta rule, and the convolution's tail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from qwen35conv.kernels import compute_gates, gated_delta, gated_delta_state
from qwen35conv.model.span import CallError, Span

_L2_EPS = 1e-6

Convolution = Callable[[mx.array, mx.array], mx.array]
"""(window [B, K-1+T, C], taps [C, K, 1], oldest first) -> [B, T, C], SiLU included, in the window's dtype.

The inputs are borrowed: they must not be written to, nor kept. The output is owned: no part of an input may lie in it.
"""


def plain_convolution(window: mx.array, taps: mx.array) -> mx.array:
    """The causal convolution of each channel and its SiLU in MLX's own operations: the default."""
    mixed: mx.array = nn.silu(mx.conv1d(window, taps, groups=window.shape[-1]))
    return mixed


@dataclass(frozen=True, slots=True)
class Projections:
    """What the input projections give; also all that a speculative round must remember of them."""

    qkv: mx.array  # [B, T, C]  zero where padded
    a: mx.array  # [B, T, Hv]
    b: mx.array  # [B, T, Hv]

    def first(self, n_steps: int) -> Projections:
        """Those of the first positions."""
        return Projections(self.qkv[:, :n_steps], self.a[:, :n_steps], self.b[:, :n_steps])


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What enters the gated delta rule."""

    q: mx.array  # [B, T, Hk, Dk]  normalised and scaled
    k: mx.array  # [B, T, Hk, Dk]  normalised
    v: mx.array  # [B, T, Hv, Dv]
    g: mx.array  # [B, T, Hv]      float32
    beta: mx.array  # [B, T, Hv]


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The part of a gated delta net between its projections: small enough to keep when the layer is dropped."""

    taps: mx.array  # [C, K, 1], oldest first
    A_log: mx.array  # [Hv]
    dt_bias: mx.array  # [Hv]
    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    backend: str = "auto"
    convolve: Convolution = plain_convolution

    @property
    def n_kept(self) -> int:
        """Positions of the convolution's tail."""
        return self.taps.shape[1] - 1

    def window(self, qkv: mx.array, tail: mx.array | None) -> mx.array:
        """The convolution's input [B, K-1+T, C]; a sequence that begins has zeros before it."""
        if tail is None:
            tail = mx.zeros((qkv.shape[0], self.n_kept, qkv.shape[-1]), qkv.dtype)
        return mx.concatenate([tail, qkv], axis=1)

    def inputs(self, projections: Projections, window: mx.array, *, stepwise: bool = False) -> DeltaInputs:
        """What enters the gated delta rule. Raises CallError where a replaced convolution returns another shape."""
        batch, n_steps, n_channels = projections.qkv.shape
        mixed = self._convolved(window, n_steps, stepwise)
        if mixed.shape != (batch, n_steps, n_channels) or mixed.dtype != window.dtype:
            raise CallError(
                f"convolution: expected {window.dtype} {[batch, n_steps, n_channels]}, "
                f"found {mixed.dtype} {list(mixed.shape)}",
                hint="a replacement returns one value for each channel of each new position",
            )
        n_keys = self.n_key_heads * self.key_dim
        q, k, v = mx.split(mixed, [n_keys, 2 * n_keys], axis=-1)
        q, k = (heads.reshape(batch, n_steps, self.n_key_heads, self.key_dim) for heads in (q, k))
        g, beta = compute_gates(projections.a, projections.b, self.A_log, self.dt_bias)
        scale = self.key_dim**-0.5
        return DeltaInputs(
            q=scale**2 * unit_rms(q),
            k=scale * unit_rms(k),
            v=v.reshape(batch, n_steps, self.n_value_heads, self.value_dim),
            g=g,
            beta=beta,
        )

    def run(self, inputs: DeltaInputs, state: mx.array | None, span: Span) -> tuple[mx.array, mx.array]:
        """Outputs [B, T, Hv, Dv] and the state after the span's real positions."""
        return gated_delta(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.g,
            inputs.beta,
            self._begun(state, inputs.v.shape[0]),
            mask=span.mask(),
            backend=self.backend,
        )

    def state_after(self, inputs: DeltaInputs, state: mx.array | None, lengths: tuple[int, ...]) -> mx.array:
        """The state alone after the first `lengths[b]` positions of each row."""
        return gated_delta_state(
            inputs.k,
            inputs.v,
            inputs.g,
            inputs.beta,
            self._begun(state, inputs.v.shape[0]),
            mx.array(lengths, mx.int32),
            backend=self.backend,
        )

    def tail(self, window: mx.array, lengths: tuple[int, ...]) -> mx.array:
        """Each row's last K-1 real inputs [B, K-1, C] once it has `lengths[b]` new ones, in bytes of its own.

        Gathered: a slice, and even its copy, may keep the whole window alive.
        """
        places = mx.arange(self.n_kept)
        if len(set(lengths)) == 1:
            return mx.take(window, lengths[0] + places, axis=1)
        return mx.take_along_axis(window, (mx.array(lengths)[:, None] + places)[..., None], axis=1)

    def _convolved(self, window: mx.array, n_steps: int, stepwise: bool) -> mx.array:
        if not stepwise or n_steps <= 1:
            return self.convolve(window, self.taps)
        n_taps = self.n_kept + 1
        return mx.concatenate([self.convolve(window[:, t : t + n_taps], self.taps) for t in range(n_steps)], axis=1)

    def _begun(self, state: mx.array | None, batch: int) -> mx.array:
        if state is not None:
            return state
        return mx.zeros((batch, self.n_value_heads, self.value_dim, self.key_dim), mx.float32)


def unit_rms(x: mx.array) -> mx.array:
    """x [..., D] over its root mean square: sqrt(D) times the reference's l2norm.

    The reference adds its eps to the sum of squares, MLX to their mean.
    """
    return mx.fast.rms_norm(x, None, _L2_EPS / x.shape[-1])
