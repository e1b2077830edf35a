"""A speculative round of one gated delta net, to be taken back to any prefix of it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from qwen35conv.model.delta_rule import DeltaRule, Projections
from qwen35conv.model.span import Span


@dataclass(frozen=True, slots=True)
class DeltaRound:
    """What a call read: the inputs of its recurrence, and what was remembered before it."""

    rule: DeltaRule
    span: Span
    projections: Projections
    tail: mx.array | None  # [B, K-1, C] before the round; None: nothing came before
    state: mx.array | None  # [B, Hv, Dv, Dk] before the round

    def kept(self, lengths: tuple[int, ...]) -> tuple[mx.array | None, mx.array | None]:
        """Tail and state as if only the first `lengths[b]` positions of each row had come.

        The recurrence runs again over them from the state before, without outputs; no projection runs.
        """
        n_steps = max(lengths)
        if n_steps == 0:
            return self.tail, self.state
        projections = self.projections.first(n_steps)
        window = self.rule.window(projections.qkv, self.tail)
        inputs = self.rule.inputs(projections, window, stepwise=self.span.stepwise)
        return self.rule.tail(window, lengths), self.rule.state_after(inputs, self.state, lengths)

    def arrays(self) -> list[mx.array]:
        """What must be evaluated before the layer is dropped."""
        recorded = self.projections
        parts = (recorded.qkv, recorded.a, recorded.b, self.tail, self.state, self.rule.taps)
        return [x for x in (*parts, self.rule.A_log, self.rule.dt_bias) if x is not None]
