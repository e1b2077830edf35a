"""Whether each layer does the same however its positions are fed: in parts, padded, drafted and taken back, in pages.

Each layer gets the prompt's own hidden states, so that differences stay the layer's and do not add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product

import mlx.core as mx
import numpy as np

from qwen35conv.model.attention import AttentionState, KVCache
from qwen35conv.model.capture import Capture
from qwen35conv.model.decoder import Block, Decoder
from qwen35conv.model.delta_rule import plain_convolution
from qwen35conv.model.feed_forward import FeedForward, swiglu
from qwen35conv.model.feeding import rows_apart
from qwen35conv.model.gated_delta_net import DeltaCache, GatedDeltaNet
from qwen35conv.model.padding import padding_of
from qwen35conv.model.paged_cache import PagedKVCache, PagePool
from qwen35conv.model.quantized_cache import QuantizedKVCache
from qwen35conv.model.span import Span, span_of
from qwen35conv.model.weights import OpaqueModuleError
from qwen35conv.verify.check import Check, OnProgress, Value

_STEPS = {mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}
_ALLOWED = 4  # rounding steps of the largest output
_DRAFTED = 5  # positions of a speculative round
_APPENDED = 4
_SLACK = 1 << 16  # bytes that an allocator may round up

Finding = tuple[str, float, float]  # what was asked, the difference, and what is allowed of it


def check_invariants(decoder: Decoder, ids: np.ndarray, on_progress: OnProgress | None = None) -> Check:
    """One prefill against every other way to feed the same positions, for every layer."""
    try:
        x = decoder.embed(ids[:1])
    except OpaqueModuleError as error:
        return Check("invariants", None, f"can't be run: {error}")
    n_steps, n_layers = x.shape[1], decoder.config.n_layers
    allowed = _ALLOWED * _STEPS.get(x.dtype, 2.0**-17)
    worst: dict[str, float] = {}
    wrong: list[str] = []
    for i in range(n_layers):
        try:
            block = decoder.block(i)
        except OpaqueModuleError as error:
            return Check("invariants", False if wrong else None, f"can't go on at layer {i}: {error}")
        normed = mx.fast.rms_norm(x, block.input_norm, block.eps)
        whole = block.mix(normed, span_of(n_steps, [0]))
        for how, distance, limit in _asked(_Layer(block, x, normed, whole, allowed)):
            worst[how] = _largest(worst.get(how, 0.0), distance)
            if not distance <= limit:
                wrong.append(f"layer {i} {how} ({distance:.1e} of its size)")
        x = block(x, span_of(n_steps, [0]))
        mx.eval(x)
        del block
        if on_progress is not None:
            on_progress("invariants", i + 1, n_layers)
    if decoder.keep:  # a streamed model would have to be read once more
        how = "in a second run"
        worst[how] = _again(decoder, ids[:1], x)
        if worst[how] != 0:
            wrong.append(f"the last layer {how} ({worst[how]:.1e} of its size)")
    details: list[tuple[str, Value]] = [("positions", n_steps), ("allowed", allowed)]
    details += [(f"{how}, of the output's size", distance) for how, distance in worst.items()]
    if wrong:
        return Check("invariants", False, f"{len(wrong)} layers differ: {'; '.join(wrong[:3])}", tuple(details))
    return Check(
        "invariants", True, f"{n_layers} layers give the same in {len(worst)} ways to run them", tuple(details)
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer and the prompt that reaches it."""

    block: Block
    x: mx.array  # [1, T, hidden] before the norm
    normed: mx.array
    whole: mx.array  # the mixer's output in one prefill
    allowed: float  # of the output's size

    @property
    def n_steps(self) -> int:
        return self.x.shape[1]

    def rows(self, n: int) -> mx.array:
        """The prompt's normed positions, begun at another place in each row, [n, T, hidden]."""
        x = self.normed
        return mx.concatenate([mx.concatenate([x[:, i:], x[:, :i]], axis=1) for i in range(n)])


def _asked(layer: _Layer) -> Iterator[Finding]:
    """Every question about a layer, with the largest difference found."""
    n, block, normed, whole, allowed = layer.n_steps, layer.block, layer.normed, layer.whole, layer.allowed
    yield "token by token", _distance(whole, _in_parts(block, normed, range(n + 1))), allowed
    yield "in two chunks", _distance(whole, _in_parts(block, normed, (0, (n + 1) // 2, n))), allowed
    for side in ("right", "left"):
        yield f"in a batch padded on the {side}", _padded(layer, left=side == "left"), allowed
    yield "in appended tokens against single ones", _appended(layer), 0.0
    yield "after a rollback against a fresh run", _rolled_back(layer), 0.0
    yield "in rows apart against rows alone", _apart(layer), 0.0
    yield "with a compiled SwiGLU against a plain one", _activated(layer), allowed
    if isinstance(block.mixer, GatedDeltaNet):
        through, by_taps = _convolved(layer, block.mixer)
        yield "through a convolution put in its place", through, 0.0
        yield "by a sum over the convolution's taps", by_taps, allowed
        yield "with bytes that outlive a prefill", _outliving(layer), 0.0
        return
    text = np.broadcast_to(np.arange(n), (3, 1, n))
    yield "at text positions of three axes", _distance(whole, block.mix(normed, span_of(n, [0], positions=text))), 0.0
    turned = replace(span_of(n, [0]), positions=mx.array(text))
    yield "by the rotary of three axes", _distance(whole, block.mix(normed, turned)), allowed
    paged = PagedKVCache(PagePool(n_pages=n, page_size=5))
    yield "over pages", _distance(whole, _in_parts(block, normed, (0, n // 2, n), paged)), allowed
    groups = [group for group in (128, 64, 32) if block.mixer.q_norm.shape[0] % group == 0]
    for bits, group in product((8, 4), groups[:1]):
        packed = QuantizedKVCache(bits, group), _Unpacked(bits, group)
        a, b = (_in_parts(block, normed, (0, n // 2, n), state) for state in packed)
        yield f"over keys and values of {bits} bits against the same unpacked", _distance(b, a), 4 * allowed


def _in_parts(
    block: Block, x: mx.array, ends: range | tuple[int, ...], state: AttentionState | DeltaCache | None = None
) -> mx.array:
    state, parts = block.make_cache() if state is None else state, []
    for begin, end in pairwise(ends):
        if end > begin:
            parts.append(block.mix(x[:, begin:end], span_of(end - begin, [begin]), state))
            mx.eval(parts[-1], state.arrays())
    return mx.concatenate(parts, axis=1)


def _padded(layer: _Layer, *, left: bool) -> float:
    """The largest difference of rows of several lengths in one batch from each row alone, states included."""
    block, n = layer.block, layer.n_steps
    lengths = sorted({n, n // 2, min(2, n), 0}, reverse=True)
    rows = layer.rows(len(lengths))
    filled = np.arange(n) < np.array(lengths)[:, None]
    padding = padding_of(filled[:, ::-1] if left else filled)
    order, places = (mx.array(x)[..., None] for x in (padding.order, padding.places))
    given = mx.take_along_axis(rows, places, axis=1)  # as a caller would have padded them
    together = block.make_cache()
    span = span_of(n, [0] * len(lengths), padding.lengths)
    batched = mx.take_along_axis(block.mix(mx.take_along_axis(given, order, axis=1), span, together), places, axis=1)
    distance = 0.0
    for row, length in enumerate(lengths):
        if not length:
            continue
        alone = block.make_cache()
        single = block.mix(rows[row : row + 1, :length], span_of(length, [0]), alone)
        begin = n - length if left else 0
        distance = _largest(distance, _distance(single, batched[row : row + 1, begin : begin + length]))
        for a, b in zip(_remembered(alone, length), _remembered(together, length), strict=True):
            if not _distance(a[0], b[row]) <= 1e-2:
                return float("inf")
    return distance


def _appended(layer: _Layer) -> float:
    """Up to four tokens in one step from one token at a time, through the whole layer and its state."""
    block, n = layer.block, layer.n_steps
    begin = max(n - _APPENDED, 0)
    x, together, apart = layer.x, block.make_cache(), block.make_cache()
    for state in (together, apart):
        if begin:
            block(x[:, :begin], span_of(begin, [0]), state)
    y = block(x[:, begin:], span_of(n - begin, [begin], stepwise=True), together)
    singles = [block(x[:, t : t + 1], span_of(1, [t]), apart) for t in range(begin, n)]
    return _largest(_distance(y, mx.concatenate(singles, axis=1)), _states_apart(together, apart, n))


def _rolled_back(layer: _Layer) -> float:
    """A round of which each row keeps another prefix from a run over only that: states, and the next output."""
    block = layer.block
    n_drafted = min(_DRAFTED, layer.n_steps)
    rows, kept = layer.rows(3), (n_drafted, 0, min(2, n_drafted))
    drafted, fresh = block.make_cache(), block.make_cache()
    for state in (drafted, fresh):
        block.mix(rows, span_of(layer.n_steps, [0] * 3), state)
    begins = [layer.n_steps] * 3
    if isinstance(drafted, DeltaCache):
        drafted.recording = True
    block.mix(rows[:, :n_drafted], span_of(n_drafted, begins, stepwise=True), drafted)
    ends = tuple(begin + n for begin, n in zip(begins, kept, strict=True))
    drafted.keep(kept if isinstance(drafted, DeltaCache) else ends)
    block.mix(rows[:, :n_drafted], span_of(n_drafted, begins, kept, stepwise=True), fresh)
    found = _states_apart(drafted, fresh, layer.n_steps)
    a, b = (block.mix(rows[:, -1:], span_of(1, ends), state) for state in (drafted, fresh))
    return _largest(found, _distance(b, a))


def _apart(layer: _Layer) -> float:
    """Rows that share a layer without a common product from the same rows alone."""
    block, n = layer.block, layer.n_steps
    rows = [layer.rows(2)[1:], layer.x[:, : max(1, n // 2)]]
    spans = [span_of(row.shape[1], [0]) for row in rows]
    together = rows_apart(block, rows, spans, [block.make_cache() for _ in rows])
    return _largest(
        *(_distance(block(x, s, block.make_cache()), y) for x, s, y in zip(rows, spans, together, strict=True))
    )


def _activated(layer: _Layer) -> float:
    """The compiled activation of the (shared) MLP from its definition in float32."""
    mlp = layer.block.mlp if isinstance(layer.block.mlp, FeedForward) else layer.block.mlp.shared
    x = mx.fast.rms_norm(layer.x, layer.block.post_norm, layer.block.eps)
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    wide = gate.astype(mx.float32)
    return _distance(wide * mx.sigmoid(wide) * up.astype(mx.float32), swiglu(gate, up))


def _convolved(layer: _Layer, net: GatedDeltaNet) -> tuple[float, float]:
    """The layer with a convolution put in its place, which also compares itself with a sum over taps in float32."""
    found = []

    def convolve(window: mx.array, taps: mx.array) -> mx.array:
        y = plain_convolution(window, taps)
        n_taps, wide = taps.shape[1], window.astype(mx.float32)
        parts = [wide[:, k : k + y.shape[1]] * taps[:, k, 0].astype(mx.float32) for k in range(n_taps)]
        total = mx.stack(parts).sum(axis=0)
        found.append(_distance(total * mx.sigmoid(total), y))
        return y

    y = net.with_convolution(convolve)(layer.normed, span_of(layer.n_steps, [0]))
    return _distance(layer.whole, y), _largest(*found)


def _outliving(layer: _Layer) -> float:
    """Bytes that a prefill leaves in memory beyond its tail and state, for each of theirs."""
    cache = DeltaCache()
    mx.synchronize()
    before = mx.get_active_memory()
    y = layer.block.mix(layer.normed, span_of(layer.n_steps, [0]), cache)
    mx.eval(y, cache.arrays())
    del y
    mx.synchronize()
    logical = sum(x.nbytes for x in cache.arrays())
    return max(0, mx.get_active_memory() - before - logical - _SLACK) / logical


def _again(decoder: Decoder, ids: np.ndarray, x: mx.array) -> float:
    """What leaves the last layer in a run of the whole model, from what left it here."""
    last = decoder.config.n_layers - 1
    capture = Capture([last])
    decoder.hidden(ids, on_layer=capture)
    return _distance(x, capture.states[last])


class _Unpacked(KVCache):
    """Keys and values as a quantised cache would give them back."""

    def __init__(self, bits: int, group_size: int) -> None:
        super().__init__()
        self.bits, self.group_size = bits, group_size

    def append(self, keys: mx.array, values: mx.array, span: Span) -> None:
        """Keep the keys and values of the span."""
        super().append(self._rounded(keys), self._rounded(values), span)

    def _rounded(self, x: mx.array) -> mx.array:
        parts = mx.quantize(x, group_size=self.group_size, bits=self.bits)
        return mx.dequantize(*parts, group_size=self.group_size, bits=self.bits)


def _states_apart(a: KVCache | DeltaCache, b: KVCache | DeltaCache, length: int) -> float:
    """The largest difference of what two caches hold of the first positions."""
    pairs = zip(_remembered(a, length), _remembered(b, length), strict=True)
    return _largest(*(_distance(x, y) for x, y in pairs))


def _remembered(cache: KVCache | DeltaCache, length: int) -> list[mx.array]:
    """What a cache holds of a row's first positions."""
    if isinstance(cache, DeltaCache):
        return cache.arrays()
    return [x[:, :, :length] for x in cache.arrays()]


def _largest(*found: float) -> float:
    """The largest; NaN where there is one."""
    return float(np.max(found))


def _distance(a: mx.array, b: mx.array) -> float:
    """The largest difference of b, of the size of a; NaN where there is one."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return float(mx.abs(a - b).max() / mx.maximum(mx.abs(a).max(), 1e-30))
