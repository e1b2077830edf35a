"""What an attention layer may remember by: growing, quantised and paged, all behind one seam."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from model_draws import draw_config, draw_ids
from test_model import distance, held

from qwen35conv.model.attention import KVCache
from qwen35conv.model.paged_cache import PagedKVCache, PagePool
from qwen35conv.model.quantized_cache import QuantizedKVCache
from qwen35conv.model.span import CallError, span_of

B, H, HKV, D = 3, 6, 2, 128
SPANS = (  # steps, begins, lengths
    (5, (0, 0, 0), None),
    (1, (5, 5, 5), None),
    (4, (6, 6, 6), (4, 0, 2)),
    (1, (10, 6, 8), None),
    (3, (11, 7, 9), None),
)


def drawn(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def expected(queries: mx.array, keys: np.ndarray, values: np.ndarray, begin: int) -> np.ndarray:
    """Attention of one row in float64: queries [H, T, D] over keys and values [Hkv, N, D]."""
    q = np.array(queries, dtype=np.float64)
    keys, values = keys.repeat(H // HKV, axis=0), values.repeat(H // HKV, axis=0)
    scores = np.einsum("htd,hnd->htn", q, keys) * D**-0.5
    hidden = np.arange(keys.shape[1]) > begin + np.arange(q.shape[1])[:, None]
    scores = np.where(hidden, -np.inf, scores)
    chances = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(np.einsum("htn,hnd->htd", chances / chances.sum(axis=-1, keepdims=True), values))


def unpacked(x: mx.array, bits: int, group_size: int) -> mx.array:
    parts = mx.quantize(x, group_size=group_size, bits=bits)
    return mx.dequantize(*parts, group_size=group_size, bits=bits)


@pytest.mark.parametrize(
    "state",
    [
        lambda: KVCache(),
        lambda: PagedKVCache(PagePool(n_pages=12, page_size=4)),
        *(lambda b=bits, g=group: QuantizedKVCache(b, g) for bits in (4, 8) for group in (32, 64, 128)),
    ],
)
def test_attention_over_what_is_remembered_is_that_of_float64(state: object) -> None:
    cache = state()  # type: ignore[operator]
    kept_keys = [np.zeros((HKV, 0, D))] * B
    kept_values = [np.zeros((HKV, 0, D))] * B
    for seed, (n_steps, begins, lengths) in enumerate(SPANS):
        span = span_of(n_steps, begins, lengths)
        q, k, v = drawn(B, H, n_steps, D, seed=seed), *(drawn(B, HKV, n_steps, D, seed=seed + i) for i in (50, 90))
        cache.append(k, v, span)
        y = cache.attend(q, D**-0.5, span)
        if isinstance(cache, QuantizedKVCache):
            k, v = (unpacked(x, cache.bits, cache.group_size) for x in (k, v))
        for row, n in enumerate(span.n_real):
            kept_keys[row] = np.concatenate([kept_keys[row], np.array(k[row, :, :n])], axis=1)
            kept_values[row] = np.concatenate([kept_values[row], np.array(v[row, :, :n])], axis=1)
            wanted = expected(q[row, :, :n], kept_keys[row], kept_values[row], begins[row])
            assert np.abs(np.array(y[row, :, :n]) - wanted).max(initial=0) < 1e-5


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_eight_bits_stay_near_and_four_bits_farther(dtype: mx.Dtype) -> None:
    errors = []
    for bits in (8, 4):
        cache, plain = QuantizedKVCache(bits, 64), KVCache()
        for begin, n_steps in ((0, 30), (30, 1)):
            span = span_of(n_steps, [begin] * B)
            q, k, v = (drawn(B, h, n_steps, D, seed=begin + h).astype(dtype) for h in (H, HKV, HKV))
            for each in (cache, plain):
                each.append(k, v, span)
        y = cache.attend(q, D**-0.5, span)
        assert y.dtype == dtype
        errors.append(distance(y, plain.attend(q, D**-0.5, span)))
        assert sum(x.nbytes for x in cache.arrays()) < (0.6 if bits == 8 else 0.4) * sum(
            x.nbytes for x in plain.arrays()
        )
    assert errors[0] < 0.03
    assert errors[0] < errors[1] < 0.4


@pytest.mark.parametrize(("bits", "group_size"), [(3, 64), (8, 16), (2, 32)])
def test_other_bits_and_groups_are_refused(bits: int, group_size: int) -> None:
    with pytest.raises(CallError, match="quantised cache"):
        QuantizedKVCache(bits, group_size)


def test_heads_without_a_whole_number_of_groups_are_refused() -> None:
    x = drawn(1, 2, 3, 96, seed=0)
    with pytest.raises(CallError, match="no multiple of groups of 64"):
        QuantizedKVCache(8, 64).append(x, x, span_of(3, [0]))


def test_a_decoder_runs_over_pages_as_over_a_growing_cache() -> None:
    config = draw_config()
    decoder = held(config)
    pools = {i: PagePool(n_pages=20, page_size=3) for i in range(config.n_layers)}
    paged = decoder.make_cache(3, attention=lambda i: PagedKVCache(pools[i]))
    plain = decoder.make_cache(3)
    for seed, (n_steps, lengths) in enumerate(((7, [7, 0, 4]), (1, None), (4, None))):
        ids = draw_ids(config, 3, n_steps, seed=seed)
        paged.record()
        a, b = decoder(ids, paged, lengths), decoder(ids, plain, lengths)
        for row, n in enumerate(lengths or [n_steps] * 3):
            assert not n or distance(a[row, :n], b[row, :n]) < 1e-5
    taken = 20 - len(pools[1].free)
    assert taken == sum(-(-n // 3) for n in paged.lengths)
    paged.keep(0)
    assert paged.lengths == [8, 1, 5]
    assert 20 - len(pools[1].free) == 3 + 1 + 2 < taken


def test_pages_are_shared_by_batches_until_none_is_left() -> None:
    pool = PagePool(n_pages=3, page_size=4)
    x = drawn(1, 2, 5, 8, seed=1)
    first, second = PagedKVCache(pool), PagedKVCache(pool)
    with pytest.raises(CallError, match="nothing was appended"):
        PagedKVCache(pool, [[]]).attend(drawn(1, 4, 1, 8, seed=0), 1.0, span_of(1, [0]))
    first.append(x, x, span_of(5, [0]))
    with pytest.raises(CallError, match="all 3 pages"):
        second.append(x, x, span_of(5, [0]))
    first.keep((0,))
    second.append(x, x, span_of(5, [0]))
    assert len(pool.free) == 1
    assert sorted(second.pages[0] + pool.free) == [0, 1, 2]


def test_a_decoder_runs_over_a_quantised_cache() -> None:
    config = draw_config(head_dim=64, rope_parameters={"partial_rotary_factor": 0.25})
    decoder = held(config)
    quantised = decoder.make_cache(2, attention=lambda _: QuantizedKVCache(8, 32))
    plain = decoder.make_cache(2)
    for n_steps, lengths in ((9, [9, 5]), (1, None), (1, None)):
        ids = draw_ids(config, 2, n_steps)
        a, b = decoder(ids, quantised, lengths), decoder(ids, plain, lengths)
        last = [n - 1 for n in lengths or [n_steps] * 2]
        rows = mx.array([0, 1]), mx.array(last)
        assert 0 < distance(a[rows], b[rows]) < 0.1
