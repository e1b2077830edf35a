"""Linear attention: a causal convolution, the gated delta rule, a gated norm; and what it remembers.

Source: Gated Delta Networks, arXiv:2412.06464, as the Qwen3-Next family builds it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from qwen35conv.facts.config import ModelConfig
from qwen35conv.model.delta_rule import Convolution, DeltaInputs, DeltaRule, Projections
from qwen35conv.model.linear import Linear
from qwen35conv.model.rollback import DeltaRound
from qwen35conv.model.span import Span
from qwen35conv.model.weights import Weights

__all__ = ["DeltaCache", "DeltaInputs", "GatedDeltaNet", "gated_norm", "load_gated_delta_net"]


@dataclass(slots=True)
class DeltaCache:
    """What a gated delta net remembers: the last K-1 inputs of its convolution, and the state of its heads."""

    tail: mx.array | None = None  # [B, K-1, C], before SiLU; owns its bytes
    state: mx.array | None = None  # [B, Hv, Dv, Dk]  float32
    recording: bool = False  # whether the next call leaves its round behind
    round: DeltaRound | None = None

    def keep(self, lengths: tuple[int, ...]) -> None:
        """Go back to the first `lengths[b]` positions of each row of the recorded round, and forget the round."""
        assert self.round is not None
        if lengths != self.round.span.n_real:
            self.tail, self.state = self.round.kept(lengths)
        self.round = None

    def arrays(self) -> list[mx.array]:
        """What must be evaluated before the layer is dropped."""
        recorded = [] if self.round is None else self.round.arrays()
        return [x for x in (self.tail, self.state) if x is not None] + recorded


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """The linear attention of a layer."""

    in_proj_qkv: Linear
    in_proj_z: Linear
    in_proj_b: Linear
    in_proj_a: Linear
    out_proj: Linear
    rule: DeltaRule
    norm: mx.array  # [Dv], as gamma in either generation
    eps: float

    def __call__(
        self,
        x: mx.array,  # [B, T, hidden]
        span: Span,
        cache: DeltaCache | None = None,
    ) -> mx.array:
        """[B, T, hidden]; `cache` is read, and moved past the span's real positions."""
        tail, state = (None, None) if cache is None else (cache.tail, cache.state)
        projections, z = self.project(x, span), self.gate(x, span)
        window = self.rule.window(projections.qkv, tail)
        new_tail = self.rule.tail(window, span.n_real)
        inputs = self.rule.inputs(projections, window, stepwise=span.stepwise)
        y, new_state = self.rule.run(inputs, state, span)
        if cache is not None:
            cache.round = DeltaRound(self.rule, span, projections, tail, state) if cache.recording else None
            cache.tail, cache.state = new_tail, new_state
        return self.finish(y, z, span)

    def project(self, x: mx.array, span: Span) -> Projections:
        """What enters the convolution and the gates; padded positions are zero."""
        qkv = span.mapped(self.in_proj_qkv, x)
        if (mask := span.mask()) is not None:
            qkv = mx.where(mask[..., None], qkv, 0)
        return Projections(qkv, span.mapped(self.in_proj_a, x), span.mapped(self.in_proj_b, x))

    def gate(self, x: mx.array, span: Span) -> mx.array:
        """The output gate z [B, T, Hv * Dv]."""
        return span.mapped(self.in_proj_z, x)

    def prepare(
        self,
        x: mx.array,  # [B, T, hidden]
        span: Span,
        tail: mx.array | None = None,  # [B, K-1, C]; None: nothing came before
    ) -> tuple[DeltaInputs, mx.array]:
        """What enters the gated delta rule, and the convolution's new tail [B, K-1, C]."""
        projections = self.project(x, span)
        window = self.rule.window(projections.qkv, tail)
        new_tail = self.rule.tail(window, span.n_real)
        return self.rule.inputs(projections, window, stepwise=span.stepwise), new_tail

    def finish(
        self,
        y: mx.array,  # [B, T, Hv, Dv]
        z: mx.array,  # [B, T, Hv * Dv]
        span: Span,
    ) -> mx.array:
        """The layer's output [B, T, hidden]."""
        normed = gated_norm(y, z.reshape(y.shape), self.norm, self.eps)
        return span.mapped(self.out_proj, normed.reshape(*y.shape[:2], -1))

    def with_convolution(self, convolve: Convolution) -> GatedDeltaNet:
        """The same layer with another convolution."""
        return replace(self, rule=replace(self.rule, convolve=convolve))


def load_gated_delta_net(weights: Weights, module: str, config: ModelConfig, backend: str = "auto") -> GatedDeltaNet:
    """The linear attention layer `module`. Raises OpaqueModuleError where it can't be run."""
    return GatedDeltaNet(
        in_proj_qkv=weights.linear(f"{module}.in_proj_qkv"),
        in_proj_z=weights.linear(f"{module}.in_proj_z"),
        in_proj_b=weights.linear(f"{module}.in_proj_b"),
        in_proj_a=weights.linear(f"{module}.in_proj_a"),
        out_proj=weights.linear(f"{module}.out_proj"),
        rule=DeltaRule(
            taps=weights.array(f"{module}.conv1d.weight"),
            A_log=weights.array(f"{module}.A_log"),
            dt_bias=weights.array(f"{module}.dt_bias"),
            n_key_heads=config.n_key_heads,
            n_value_heads=config.n_value_heads,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            backend=backend,
        ),
        norm=weights.array(f"{module}.norm.weight"),
        eps=config.rms_norm_eps,
    )


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
