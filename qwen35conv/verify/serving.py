"""Whether layers in a row do the same through the calls of a serving engine: prefill, append, rollback, rows apart.

Rounding adds up from layer to layer, so what is asked here has an exact answer, or, where products of other sizes are
compared, only a gross difference counts; `invariants` has the fine ones, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from qwen35conv.facts.config import LayerKind
from qwen35conv.model.cache import Cache
from qwen35conv.model.capture import Capture
from qwen35conv.model.decoder import Decoder
from qwen35conv.model.feeding import append, independent_rows, prefill
from qwen35conv.model.gated_delta_net import DeltaCache
from qwen35conv.model.lora import LoraTarget
from qwen35conv.model.profile import Profile, profile
from qwen35conv.model.weights import OpaqueModuleError
from qwen35conv.verify.check import Check, OnProgress, Value

_GROSS = 0.5  # of the size of what leaves the layers: a wrong position or state changes all of it
_APPENDED = 3
_DRAFTED = 4

Finding = tuple[str, float, float]  # what was asked, the difference, and what is allowed of it
Question = Callable[[Decoder, np.ndarray], Iterator[Finding]]


def first_layers(decoder: Decoder, n_bytes: int, allowed: int) -> Decoder:
    """The decoder itself where it is held in memory; else its layers up to the first with attention, held if they fit
    into `allowed` bytes, of `n_bytes` for all layers.
    """
    if decoder.keep:
        return decoder
    kinds = decoder.config.layer_kinds
    n = kinds.index(LayerKind.FULL) + 1 if LayerKind.FULL in kinds else 1
    config = replace(decoder.config, layer_kinds=kinds[:n])
    return replace(decoder, config=config, keep=n_bytes * n // len(kinds) <= allowed)


def check_serving(
    decoder: Decoder,
    ids: np.ndarray,  # [1, T], T at least 8
    targets: Sequence[LoraTarget],
    on_progress: OnProgress | None = None,
) -> Check:
    """One run of the decoder's layers against every call that a serving engine makes of them."""
    questions: list[Question] = [_prefilled, _appended, _rolled_back, _apart, _captured, _profiled]
    found: list[Finding] = []
    try:
        for i, ask in enumerate(questions):
            found += ask(decoder, ids)
            if on_progress is not None:
                on_progress("serving", i + 1, len(questions) + 1)
        found += _adapted(decoder, targets)
    except OpaqueModuleError as error:
        return Check("serving", None, f"can't be run: {error}")
    wrong = [f"{how} ({distance:.1e} of its size)" for how, distance, limit in found if not distance <= limit]
    details: list[tuple[str, Value]] = [("layers", decoder.config.n_layers), ("positions", ids.shape[1])]
    details += [(f"{how}, of the output's size", distance) for how, distance, _ in found]
    if wrong:
        return Check("serving", False, f"{len(wrong)} calls differ: {'; '.join(wrong)}", tuple(details))
    summary = f"{decoder.config.n_layers} layers in a row give the same in {len(found)} calls of a serving engine"
    return Check("serving", True, summary, tuple(details))


def _rows(ids: np.ndarray) -> np.ndarray:
    """Two rows of the same tokens, begun at other places, [2, T]."""
    return np.concatenate([ids, np.roll(ids, -3, axis=1)])


def _prefilled(decoder: Decoder, ids: np.ndarray) -> Iterator[Finding]:
    n = ids.shape[1]
    rows, short = _rows(ids), n - 3
    filled = np.arange(n) >= np.array([[0], [n - short]])  # the second row is padded on its left
    given = np.where(filled, np.stack([rows[0], np.roll(rows[1], n - short)]), 0)
    together = decoder.make_cache(2)
    last = prefill(decoder, given, together, mask=filled, chunk=(n + 1) // 2)
    for row, length in enumerate((n, short)):
        alone = decoder.make_cache()
        whole = prefill(decoder, rows[row : row + 1, :length], alone, chunk=n)
        yield f"prefill of row {row} in chunks of a padded batch", _distance(whole, last[row : row + 1]), _GROSS
        yield f"row {row}'s length behind it", float(abs(alone.lengths[0] - together.lengths[row])), 0.0


def _appended(decoder: Decoder, ids: np.ndarray) -> Iterator[Finding]:
    begin = ids.shape[1] - _APPENDED
    caches = [_prefilled_cache(decoder, ids[:, :begin]) for _ in range(2)]
    y = append(decoder, ids[:, begin:], caches[0])
    singles = [decoder.hidden(ids[:, t : t + 1], caches[1]) for t in range(begin, ids.shape[1])]
    yield "append against single tokens", _distance(mx.concatenate(singles, axis=1), y), 0.0
    yield "what an append leaves behind", _caches_apart(*caches), 0.0


def _rolled_back(decoder: Decoder, ids: np.ndarray) -> Iterator[Finding]:
    rows = _rows(ids)
    draft, kept = rows[:, :_DRAFTED], (1, 3)
    drafted, fresh = (_prefilled_cache(decoder, rows) for _ in range(2))
    drafted.record()
    decoder.hidden(draft, drafted, stepwise=True)
    drafted.keep(kept)
    decoder.hidden(draft, fresh, kept, stepwise=True)
    yield "a rollback's state against a run over the kept prefix", _caches_apart(fresh, drafted), 0.0
    outputs = [decoder.hidden(rows[:, -1:], cache) for cache in (fresh, drafted)]
    yield "the token after a rollback", _distance(*outputs), 0.0


def _apart(decoder: Decoder, ids: np.ndarray) -> Iterator[Finding]:
    rows = [ids[0], ids[0, : ids.shape[1] // 2]]
    together = independent_rows(decoder, rows, [decoder.make_cache() for _ in rows])
    for row, y in zip(rows, together, strict=True):
        alone = decoder.hidden(row[None], decoder.make_cache())
        yield f"rows apart, one of {len(row)}, against it alone", _distance(alone, y), 0.0


def _captured(decoder: Decoder, ids: np.ndarray) -> Iterator[Finding]:
    last = decoder.config.n_layers - 1
    capture = Capture([last])
    y = decoder.hidden(ids, on_layer=capture)
    yield "what a hook captures of the last layer", _distance(y, decoder.final_norm(capture.states[last])), 0.0


def _profiled(decoder: Decoder, ids: np.ndarray) -> Iterator[Finding]:
    plain, timed = decoder.make_cache(), decoder.make_cache()
    decoder.hidden(ids, plain)
    found = profile(decoder, ids, timed, n_repeats=1)
    yield "what a profiled run leaves behind", _caches_apart(plain, timed), 0.0
    yield "layers without times", float(decoder.config.n_layers - _n_timed(found)), 0.0


def _n_timed(profile: Profile) -> int:
    """Layers whose every phase took time."""
    n_layers = {entry.kind: entry.n_layers for entry in profile.times}
    untimed = {entry.kind for entry in profile.times if entry.seconds <= 0}
    return sum(n for kind, n in n_layers.items() if kind not in untimed)


def _adapted(decoder: Decoder, targets: Sequence[LoraTarget]) -> Iterator[Finding]:
    """Every LoRA target of the layers, run over one position: its outputs must be as many as listed, and finite."""
    wrong = n_run = 0
    for target in targets:
        if not any(f".layers.{i}." in target.module for i in range(decoder.config.n_layers)):
            continue
        n_run += 1
        x = mx.ones((1, target.n_inputs), decoder.norm.dtype)
        weights = decoder.weights
        linear = weights.experts(target.module).expert(0) if target.n_experts else weights.linear(target.module)
        y = linear(x)
        wrong += y.shape[-1] != target.n_outputs or not bool(mx.isfinite(y).all())
    yield f"LoRA targets that don't run, of {n_run}", float(wrong), 0.0
    yield "layers without a LoRA target", float(n_run == 0), 0.0


def _prefilled_cache(decoder: Decoder, ids: np.ndarray) -> Cache:
    cache = decoder.make_cache(ids.shape[0])
    prefill(decoder, ids, cache)
    return cache


def _caches_apart(a: Cache, b: Cache) -> float:
    """The largest difference of what two caches hold of real positions; infinite where they hold other things."""
    if a.lengths != b.lengths:
        return float("inf")
    found = 0.0
    for one, other in zip(a.layers, b.layers, strict=True):
        pairs = list(zip(one.arrays(), other.arrays(), strict=False))
        if len(one.arrays()) != len(other.arrays()) or any(x.shape != y.shape for x, y in pairs):
            return float("inf")
        for x, y in pairs:
            for row, length in enumerate(a.lengths):
                pair = (x[row], y[row]) if isinstance(one, DeltaCache) else (x[row, :, :length], y[row, :, :length])
                found = float(np.max([found, _distance(*pair)]))
    return found


def _distance(a: mx.array, b: mx.array) -> float:
    """The largest difference of b, of the size of a; NaN where there is one."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return float(mx.abs(a - b).max() / mx.maximum(mx.abs(a).max(), 1e-30))
