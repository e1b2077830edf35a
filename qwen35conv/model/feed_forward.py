"""The MLP of a layer: dense, or a mixture of experts beside a shared one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from qwen35conv.facts.config import ModelConfig
from qwen35conv.model.linear import ExpertLinear, Linear
from qwen35conv.model.weights import Weights

_SORT_FROM = 64  # choices from which tokens are sorted by expert, so that weights are read in order


@partial(mx.compile, shapeless=True)
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """SiLU(gate) * up; compiled as mlx-lm does, for the same bits."""
    activated: mx.array = nn.silu(gate)
    return activated * up


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A dense MLP."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear

    def __call__(self, x: mx.array) -> mx.array:
        """[..., hidden] -> [..., hidden]."""
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """A router's best experts for each token, weighted, and a shared expert behind a gate of its own."""

    router: Linear
    gate_proj: ExpertLinear
    up_proj: ExpertLinear
    down_proj: ExpertLinear
    shared: FeedForward
    shared_gate: Linear
    n_per_token: int
    norm_topk_prob: bool

    def __call__(self, x: mx.array) -> mx.array:
        """[B, T, hidden] -> [B, T, hidden]."""
        chances = mx.softmax(self.router(x), axis=-1, precise=True)
        experts = mx.argpartition(chances, kth=-self.n_per_token, axis=-1)[..., -self.n_per_token :]
        weights = mx.take_along_axis(chances, experts, axis=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        flat = experts.reshape(-1, self.n_per_token)
        run = self._gathered if self.gate_proj.gathers(x) else self._one_by_one
        y = run(x.reshape(-1, x.shape[-1]), flat).reshape(*experts.shape, -1)
        y = (y * weights[..., None]).sum(axis=-2)
        return y + mx.sigmoid(self.shared_gate(x)) * self.shared(x)

    def _gathered(self, x: mx.array, experts: mx.array) -> mx.array:
        """[N, hidden] and experts [N, k] -> [N, k, hidden]."""
        n_choices = experts.size
        if n_choices < _SORT_FROM:
            return self._run(x[:, None, None], experts, is_sorted=False).squeeze(-2)
        flat = experts.flatten()
        order = mx.argsort(flat)
        rows = x[order // self.n_per_token][:, None]
        y = self._run(rows, flat[order], is_sorted=True)
        return y[mx.argsort(order)].reshape(*experts.shape, -1)

    def _run(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        up = self.up_proj.gathered(x, experts, is_sorted=is_sorted)
        gate = self.gate_proj.gathered(x, experts, is_sorted=is_sorted)
        return self.down_proj.gathered(swiglu(gate, up), experts, is_sorted=is_sorted)

    def _one_by_one(self, x: mx.array, experts: mx.array) -> mx.array:
        """The same, an expert at a time with all its tokens: for dtypes that can't be gathered on a CPU."""
        chosen = np.array(experts).ravel()
        order = np.argsort(chosen, kind="stable")
        found, begins = np.unique(chosen[order], return_index=True)
        parts = []
        for index, places in zip(found.tolist(), np.split(order, begins[1:]), strict=True):
            mlp = FeedForward(*(part.expert(index) for part in (self.gate_proj, self.up_proj, self.down_proj)))
            parts.append(mlp(x[mx.array(places // self.n_per_token)]))
        back = np.argsort(order, kind="stable")
        return mx.concatenate(parts)[mx.array(back)].reshape(*experts.shape, -1)


def load_feed_forward(weights: Weights, module: str) -> FeedForward:
    """The dense MLP `module`. Raises OpaqueModuleError where it can't be run."""
    return FeedForward(*(weights.linear(f"{module}.{name}_proj") for name in ("gate", "up", "down")))


def load_mixture(weights: Weights, module: str, config: ModelConfig) -> MixtureOfExperts:
    """The mixture of experts `module`. Raises OpaqueModuleError where it can't be run."""
    gate, up, down = (weights.experts(f"{module}.switch_mlp.{name}_proj") for name in ("gate", "up", "down"))
    return MixtureOfExperts(
        router=weights.linear(f"{module}.gate"),
        gate_proj=gate,
        up_proj=up,
        down_proj=down,
        shared=load_feed_forward(weights, f"{module}.shared_expert"),
        shared_gate=weights.linear(f"{module}.shared_expert_gate"),
        n_per_token=config.n_experts_per_token,
        norm_topk_prob=config.norm_topk_prob,
    )
