"""Whether each layer does the same however its positions are fed: padded, in a batch, or one by one.

Only the mixers are asked: the MLP has neither state nor positions. Each layer gets the prompt's own hidden states, so
that differences stay the layer's and do not add up.
"""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np

from qwen35conv.model import Block, Decoder, DeltaCache, KVCache, OpaqueModuleError, span_of
from qwen35conv.verify.check import Check, OnProgress, Value

_STEPS = {mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}
_ALLOWED = 4  # rounding steps of the largest output


def check_invariants(decoder: Decoder, ids: np.ndarray, on_progress: OnProgress | None = None) -> Check:
    """Prefill against token by token and against chunks, padded rows against single ones, for every layer."""
    try:
        x = decoder.embed(ids[:1])
    except OpaqueModuleError as error:
        return Check("invariants", None, f"can't be run: {error}")
    n_steps, n_layers = x.shape[1], decoder.config.n_layers
    allowed = _ALLOWED * _STEPS.get(x.dtype, 2.0**-17)
    worst = {"token by token": 0.0, "in two chunks": 0.0, "in a padded batch": 0.0}
    wrong: list[str] = []
    for i in range(n_layers):
        try:
            block = decoder.block(i)
        except OpaqueModuleError as error:
            return Check("invariants", False if wrong else None, f"can't go on at layer {i}: {error}")
        normed = mx.fast.rms_norm(x, block.input_norm, block.eps)
        whole = block.mix(normed, span_of(n_steps, [0]))
        size = max(float(mx.abs(whole.astype(mx.float32)).max()), 1e-30)
        found = {
            "token by token": _distance(whole, _in_parts(block, normed, range(n_steps + 1))),
            "in two chunks": _distance(whole, _in_parts(block, normed, (0, (n_steps + 1) // 2, n_steps))),
            "in a padded batch": _padded(block, normed),
        }
        for how, distance in found.items():
            worst[how] = float(np.maximum(worst[how], distance / size))
            if not distance <= allowed * size:
                wrong.append(f"layer {i} {how} ({distance / size:.1e} of its size)")
        x = block(x, span_of(n_steps, [0]))
        mx.eval(x)
        del block
        if on_progress is not None:
            on_progress("invariants", i + 1, n_layers)
    details: list[tuple[str, Value]] = [("positions", n_steps), ("allowed", allowed)]
    details += [(f"{how}, of the output's size", distance) for how, distance in worst.items()]
    if wrong:
        return Check("invariants", False, f"{len(wrong)} layers differ: {'; '.join(wrong[:3])}", tuple(details))
    return Check("invariants", True, f"{n_layers} layers: one prefill equals {', '.join(worst)}", tuple(details))


def _in_parts(block: Block, x: mx.array, ends: range | tuple[int, ...]) -> mx.array:
    cache, parts = block.make_cache(), []
    for begin, end in pairwise(ends):
        if end > begin:
            parts.append(block.mix(x[:, begin:end], span_of(end - begin, [begin]), cache))
            mx.eval(parts[-1], cache.arrays())
    return mx.concatenate(parts, axis=1)


def _padded(block: Block, x: mx.array) -> float:
    """The largest difference of rows of several lengths in one batch from each row alone, states included."""
    n_steps = x.shape[1]
    lengths = sorted({n_steps, n_steps // 2, min(2, n_steps), 0}, reverse=True)
    rows = mx.concatenate([mx.concatenate([x[:, i:], x[:, :i]], axis=1) for i in range(len(lengths))])
    together = block.make_cache()
    batched = block.mix(rows, span_of(n_steps, [0] * len(lengths), lengths), together)
    distance = 0.0
    for row, length in enumerate(lengths):
        if not length:
            continue
        alone = block.make_cache()
        single = block.mix(rows[row : row + 1, :length], span_of(length, [0]), alone)
        distance = float(np.maximum(distance, _distance(single, batched[row : row + 1, :length])))
        for a, b in zip(_remembered(alone, length), _remembered(together, length), strict=True):
            if _distance(a[0], b[row]) > 1e-2 * max(float(mx.abs(a.astype(mx.float32)).max()), 1e-30):
                return float("inf")
    return distance


def _remembered(cache: KVCache | DeltaCache, length: int) -> list[mx.array]:
    """What a cache holds of a row's first positions."""
    if isinstance(cache, DeltaCache):
        return cache.arrays()
    return [x[:, :, :length] for x in cache.arrays()]


def _distance(a: mx.array, b: mx.array) -> float:
    return float(mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max())
