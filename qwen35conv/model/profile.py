"""Where the time of a forward pass goes: by phase, and by kind of layer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import mlx.core as mx
import numpy as np

from qwen35conv.facts.config import LayerKind
from qwen35conv.model.attention import Attention, AttentionState
from qwen35conv.model.cache import Cache
from qwen35conv.model.decoder import Block, Decoder
from qwen35conv.model.delta_rule import DeltaInputs, Projections
from qwen35conv.model.gated_delta_net import DeltaCache, GatedDeltaNet
from qwen35conv.model.span import Span

T = TypeVar("T")
OnLayerTimed = Callable[[int, int], None]  # layers done, of how many


class Phase(str, Enum):
    """A part of a layer."""

    PROJECTIONS = "projections"  # of the mixer, its norm included
    CONV = "conv"  # with SiLU, gates and key norms; rotary positions count as the kernel's
    KERNEL = "kernel"  # the gated delta rule, or attention
    OUTPUT = "output"  # gate, norm and output projection
    MLP = "mlp"


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """The time of one phase in all layers of a kind."""

    kind: LayerKind
    phase: Phase
    seconds: float
    n_layers: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Times of one call over all layers. Phases are evaluated one by one: their sum is above the time of a call."""

    n_rows: int
    n_steps: int
    times: tuple[PhaseTime, ...]

    @property
    def seconds(self) -> float:
        """All phases of all layers."""
        return sum(entry.seconds for entry in self.times)

    def share(self, entry: PhaseTime) -> float:
        """The part of the whole that one entry takes."""
        return entry.seconds / self.seconds if self.seconds else 0.0


class Stopwatch:
    """The shortest time of each phase of one layer, over some repeats."""

    def __init__(self) -> None:
        self.seconds: dict[Phase, float] = {}

    def time(self, phase: Phase, run: Callable[[], T]) -> T:
        """What `run` returns, once it is evaluated."""
        began = time.perf_counter()
        result = run()
        mx.eval(result)
        taken = time.perf_counter() - began
        self.seconds[phase] = min(taken, self.seconds.get(phase, taken))
        return result


def profile(
    decoder: Decoder,
    ids: np.ndarray,  # [B, T]
    cache: Cache | None = None,  # moved past the ids
    n_repeats: int = 3,
    on_layer: OnLayerTimed | None = None,
) -> Profile:
    """Times of a call by phase and kind of layer, each the shortest of some repeats after one that is not counted."""
    cache = decoder.make_cache(ids.shape[0]) if cache is None else cache
    span = cache.span(ids.shape[1])
    x = decoder.embed(ids)
    sums: dict[tuple[LayerKind, Phase], list[float]] = {}
    for i, kind in enumerate(decoder.config.layer_kinds):
        block, state = decoder.block(i), cache.layers[i]
        _run_phases(block, x, span, state, Stopwatch())  # reads the weights, and compiles
        watch = Stopwatch()
        for _ in range(n_repeats):
            _run_phases(block, x, span, state, watch)
        for phase, seconds in watch.seconds.items():
            sums.setdefault((kind, phase), []).append(seconds)
        x = block(x, span, state)
        mx.eval(x, state.arrays())
        del block
        if on_layer is not None:
            on_layer(i + 1, decoder.config.n_layers)
    cache.move(span)
    times = [PhaseTime(kind, phase, sum(found), len(found)) for (kind, phase), found in sums.items()]
    return Profile(ids.shape[0], ids.shape[1], tuple(times))


def _run_phases(
    block: Block, x: mx.array, span: Span, state: AttentionState | DeltaCache, watch: Stopwatch
) -> mx.array:
    """A block's output, phase by phase; the recurrent state stays where it is, and appended keys are the same again."""

    def normed() -> mx.array:
        return mx.fast.rms_norm(x, block.input_norm, block.eps)

    if isinstance(block.mixer, GatedDeltaNet):
        assert isinstance(state, DeltaCache)
        mixed = _run_delta(block.mixer, normed, span, state, watch)
    else:
        assert not isinstance(state, DeltaCache)
        mixed = _run_attention(block.mixer, normed, span, state, watch)
    y = x + mixed
    mx.eval(y)
    return watch.time(Phase.MLP, lambda: y + block.mlp(mx.fast.rms_norm(y, block.post_norm, block.eps)))


def _run_delta(
    net: GatedDeltaNet, normed: Callable[[], mx.array], span: Span, state: DeltaCache, watch: Stopwatch
) -> mx.array:
    def project() -> tuple[mx.array, mx.array, mx.array, mx.array]:
        x = normed()
        made = net.project(x, span)
        return made.qkv, made.a, made.b, net.gate(x, span)

    def convolve() -> tuple[mx.array, ...]:
        window = net.rule.window(qkv, state.tail)
        made = net.rule.inputs(Projections(qkv, a, b), window)
        return made.q, made.k, made.v, made.g, made.beta, net.rule.tail(window, span.n_real)

    qkv, a, b, z = watch.time(Phase.PROJECTIONS, project)
    *inputs, _ = watch.time(Phase.CONV, convolve)
    y, _ = watch.time(Phase.KERNEL, lambda: net.rule.run(DeltaInputs(*inputs), state.state, span))
    return watch.time(Phase.OUTPUT, lambda: net.finish(y, z, span))


def _run_attention(
    layer: Attention, normed: Callable[[], mx.array], span: Span, state: AttentionState, watch: Stopwatch
) -> mx.array:
    queries, keys, values, gate = watch.time(Phase.PROJECTIONS, lambda: layer.project(normed()))
    y = watch.time(Phase.KERNEL, lambda: layer.attend(queries, keys, values, span, state))
    return watch.time(Phase.OUTPUT, lambda: layer.finish(y, gate))
