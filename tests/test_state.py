"""What is remembered between calls: padding, rollback, appended tokens, chunks, and rows on their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_draws import EXPERTS, FULL, LINEAR, draw_config, draw_ids
from test_model import distance, held, same

from qwen35conv.model.attention import KVCache
from qwen35conv.model.cache import Cache
from qwen35conv.model.decoder import Decoder
from qwen35conv.model.delta_rule import DeltaInputs
from qwen35conv.model.feeding import append, independent_rows, prefill
from qwen35conv.model.gated_delta_net import DeltaCache
from qwen35conv.model.linear import PlainLinear
from qwen35conv.model.padding import padding_of
from qwen35conv.model.span import CallError, span_of

DTYPES = (mx.float32, mx.bfloat16, mx.float16)
MODELS: list[dict[str, Any]] = [{}, EXPERTS]
TOKENS = [draw_ids(draw_config(), 3, 24, seed=seed) for seed in range(2)]


def decoder_in(dtype: mx.Dtype = mx.float32, **changes: Any) -> Decoder:
    return held(draw_config(**changes), dtype)


def remembered(cache: Cache, row: int) -> list[mx.array]:
    """A row's tails and states, and its keys and values up to its end."""
    end, found = cache.lengths[row], []
    for layer in cache.layers:
        if isinstance(layer, DeltaCache):
            found += [x[row] for x in layer.arrays()]
        elif end and isinstance(layer, KVCache):
            found += [x[row, :, :end] for x in layer.arrays()]
    return found


def all_same(a: Cache, row: int, b: Cache, other: int = 0) -> bool:
    return all(same(x, y) for x, y in zip(remembered(a, row), remembered(b, other), strict=True))


def all_near(a: Cache, row: int, b: Cache, other: int = 0) -> bool:
    pairs = zip(remembered(a, row), remembered(b, other), strict=True)
    return all(x.shape == y.shape and (not x.size or distance(x, y) < 1e-4) for x, y in pairs)


def token_by_token(decoder: Decoder, ids: np.ndarray, cache: Cache) -> mx.array:
    """Logits [1, T, vocabulary] of one row, each token in a call of its own."""
    return mx.concatenate([decoder(ids[:, t : t + 1], cache) for t in range(ids.shape[1])], axis=1)


@pytest.mark.parametrize("experts", MODELS)
def test_after_a_long_prefill_only_the_state_is_in_memory(experts: dict[str, Any]) -> None:
    decoder = decoder_in(**experts)
    ids = draw_ids(decoder.config, 1, 700)
    decoder.hidden(ids[:, :9])  # weights are evaluated before memory is counted
    mx.eval(decoder.hidden(ids))
    before = mx.get_active_memory()
    cache = decoder.make_cache()
    y = decoder.hidden(ids, cache)
    mx.eval(y)
    del y
    logical = sum(x.nbytes for layer in cache.layers for x in layer.arrays())
    window = 703 * decoder.config.conv_size * 4
    assert mx.get_active_memory() - before <= logical + 20_000 < logical + window


@pytest.mark.parametrize("experts", MODELS)
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_each_row_of_a_padded_batch_equals_its_single_run(experts: dict[str, Any], side: str) -> None:
    decoder = decoder_in(**experts)
    lengths, n_steps, more = [7, 1, 0, 4, 2], 9, [3, 0, 5, 2, 1]
    ids, further = draw_ids(decoder.config, 5, n_steps), draw_ids(decoder.config, 5, 5, seed=2)
    first = {"left": n_steps, "right": 0, "both": 1}[side]
    begins = [min(first, n_steps - n) for n in lengths]
    mask = np.array([[b <= t < b + n for t in range(n_steps)] for b, n in zip(begins, lengths, strict=True)])
    cache = decoder.make_cache(batch=5)
    logits = decoder(ids, cache, mask=mask)
    assert cache.lengths == lengths
    after = decoder(further, cache, more)
    decoded = decoder(further[:, :1], cache)
    for row, (begin, n) in enumerate(zip(begins, lengths, strict=True)):
        single = decoder.make_cache()
        if n:
            alone = decoder(ids[row : row + 1, begin : begin + n], single)
            assert distance(alone, logits[row : row + 1, begin : begin + n]) < 1e-4
        if more[row]:
            alone = decoder(further[row : row + 1, : more[row]], single)
            assert distance(alone, after[row : row + 1, : more[row]]) < 1e-4
        assert distance(decoder(further[row : row + 1, :1], single), decoded[row : row + 1]) < 1e-4
        assert all_near(cache, row, single)


def test_what_stands_in_padding_changes_nothing() -> None:
    decoder = decoder_in()
    ids = draw_ids(decoder.config, 2, 6)
    mask = np.array([[False, False, True, True, True, True], [True, True, True, False, False, False]])
    found = []
    for filler in (0, 77):
        cache = decoder.make_cache(batch=2)
        logits = decoder(np.where(mask, ids, filler), cache, mask=mask)
        found.append((logits[mx.array([0, 1]), mx.array([5, 2])], cache))
    assert same(found[0][0], found[1][0])
    assert all(all_same(found[0][1], row, found[1][1], row) for row in range(2))


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_a_mask_is_brought_to_the_front_and_back(data: st.DataObject) -> None:
    mask = np.array(data.draw(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3)))
    padding, x = padding_of(mask), np.arange(mask.size).reshape(mask.shape)
    packed = padding.packed(x)
    for row, n in enumerate(padding.lengths):
        assert packed[row, :n].tolist() == x[row][mask[row]].tolist()
    assert np.array_equal(np.take_along_axis(packed, padding.places, axis=1), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", MODELS)
def test_independent_rows_have_the_bits_of_their_single_runs(dtype: mx.Dtype, experts: dict[str, Any]) -> None:
    decoder = decoder_in(dtype, **experts)
    caches = [decoder.make_cache() for _ in range(3)]
    singles = [decoder.make_cache() for _ in range(3)]
    for lengths in ([9, 0, 4], [1, 3, 1]):
        rows = [draw_ids(decoder.config, n, seed=n) for n in lengths]
        for row, hidden in enumerate(independent_rows(decoder, rows, caches)):
            if lengths[row]:
                assert same(hidden, decoder.hidden(rows[row][None], singles[row]))
            assert caches[row].lengths == singles[row].lengths
            assert all_same(caches[row], 0, singles[row])


@settings(deadline=None, max_examples=25)
@given(
    kept=st.one_of(st.integers(0, 5), st.lists(st.integers(0, 5), min_size=3, max_size=3)),
    experts=st.sampled_from(MODELS),
    dtype=st.sampled_from(DTYPES),
    begun=st.booleans(),
)
def test_a_round_taken_back_leaves_the_bits_of_a_run_over_what_was_kept(
    kept: int | list[int], experts: dict[str, Any], dtype: mx.Dtype, begun: bool
) -> None:
    decoder = decoder_in(dtype, **experts)
    cache, fresh = decoder.make_cache(batch=3), decoder.make_cache(batch=3)
    for each in (cache, fresh) if begun else ():  # rows of unequal length, one still without a token
        decoder.hidden(TOKENS[0][:, :6], each, [6, 2, 0])
    lengths = [kept] * 3 if isinstance(kept, int) else kept
    cache.record()
    decoder.hidden(TOKENS[1][:, :5], cache, stepwise=True)
    cache.keep(kept)
    if n_steps := max(lengths):
        decoder.hidden(TOKENS[1][:, :n_steps], fresh, lengths, stepwise=True)
    assert cache.lengths == fresh.lengths
    for row in range(3):
        assert all_same(cache, row, fresh, row)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [2, 4, [5, 0, 2], [1, 3, 3]])
def test_a_round_of_common_products_is_taken_back_to_the_bits_of_its_own_inputs(
    dtype: mx.Dtype, kept: int | list[int]
) -> None:
    decoder = decoder_in(dtype)
    cache = decoder.make_cache(batch=3)
    decoder.hidden(TOKENS[0][:, :6], cache)
    cache.record()
    decoder.hidden(TOKENS[1][:, :5], cache)
    rounds = {i: layer.round for i, layer in enumerate(cache.layers) if isinstance(layer, DeltaCache)}
    cache.keep(kept)
    lengths = [kept] * 3 if isinstance(kept, int) else kept
    for i, each in rounds.items():
        layer = cache.layers[i]
        assert isinstance(layer, DeltaCache)
        assert layer.state is not None
        assert each is not None
        assert each.state is not None
        for row, n in enumerate(lengths):
            state = each.state[row : row + 1]
            if n:  # one row, one length, and with outputs
                window = each.rule.window(each.projections.first(n).qkv, each.tail)
                inputs = each.rule.inputs(each.projections.first(n), window)
                alone = DeltaInputs(*(x[row : row + 1] for x in parts_of(inputs)))
                _, state = each.rule.run(alone, state, span_of(n, [6]))
            assert same(layer.state[row], state[0])


def parts_of(inputs: DeltaInputs) -> tuple[mx.array, ...]:
    return inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta


@pytest.mark.parametrize("experts", MODELS)
@pytest.mark.parametrize("kept", [0, 3, 5, [5, 0, 2]])
def test_after_a_rollback_decoding_goes_on_as_if_nothing_had_been_drafted(
    kept: int | list[int], experts: dict[str, Any]
) -> None:
    decoder = decoder_in(**experts)
    cache, plain = decoder.make_cache(batch=3), decoder.make_cache(batch=3)
    for each in (cache, plain):
        decoder.hidden(TOKENS[0][:, :6], each)
    cache.record()
    decoder.hidden(TOKENS[1][:, :5], cache)
    cache.keep(kept)
    cache.record(on=False)
    lengths = [kept] * 3 if isinstance(kept, int) else kept
    decoder.hidden(TOKENS[1][:, :5], plain, lengths)
    further = TOKENS[1][:, 9:11]
    assert distance(decoder(further, cache), decoder(further, plain)) < 1e-4
    assert all(layer.round is None for layer in cache.layers if isinstance(layer, DeltaCache))


def test_a_rollback_runs_neither_projections_nor_output(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_in()
    cache = decoder.make_cache(batch=3)
    cache.record()
    decoder.hidden(TOKENS[0][:, :4], cache)

    def refuse(*_: object, **__: object) -> mx.array:
        raise AssertionError("no product and no output may run")

    for place in ("linear.PlainLinear.__call__", "gated_delta_net.gated_norm", "delta_rule.gated_delta"):
        monkeypatch.setattr(f"qwen35conv.model.{place}", refuse)
    cache.keep([2, 0, 3])
    assert cache.lengths == [2, 0, 3]


def test_a_round_that_was_not_recorded_or_is_shorter_is_refused() -> None:
    decoder = decoder_in()
    cache = decoder.make_cache(batch=3)
    decoder.hidden(TOKENS[0][:, :4], cache)
    with pytest.raises(CallError, match="no round"):
        cache.keep(2)
    cache.record()
    decoder.hidden(TOKENS[0][:, :4], cache, [4, 1, 2])
    for kept in (5, 2, [1, 1], [-1, 0, 0]):
        with pytest.raises(CallError, match="at most"):
            cache.keep(kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", MODELS)
@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4])
def test_appended_tokens_have_the_bits_of_token_by_token(
    dtype: mx.Dtype, experts: dict[str, Any], n_tokens: int
) -> None:
    decoder = decoder_in(dtype, **experts)
    ids = draw_ids(decoder.config, 1, 7 + n_tokens)
    together, apart = decoder.make_cache(), decoder.make_cache()
    for cache in (together, apart):
        decoder.hidden(ids[:, :7], cache)
    logits = mx.concatenate(
        [x for _, x in decoder.head_slices(append(decoder, ids[:, 7:], together), stepwise=True)], axis=-1
    )
    assert same(logits, token_by_token(decoder, ids[:, 7:], apart))
    assert all_same(together, 0, apart)
    assert together.lengths == apart.lengths


def test_appended_tokens_of_several_rows_have_the_bits_of_steps_of_the_same_batch() -> None:
    decoder = decoder_in()
    together, apart = decoder.make_cache(batch=3), decoder.make_cache(batch=3)
    append(decoder, TOKENS[0][:, :4], together, [4, 0, 2])
    for t in range(4):
        decoder.hidden(TOKENS[0][:, t : t + 1], apart, [int(t < n) for n in (4, 0, 2)])
    assert together.lengths == apart.lengths == [4, 0, 2]
    assert all(all_same(together, row, apart, row) for row in range(3))


def test_no_product_spans_positions_of_an_append_or_rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, plain = decoder_in(), PlainLinear.__call__
    shapes: list[tuple[int, ...]] = []  # on some CPUs bits can't tell

    def noted(self: PlainLinear, x: mx.array) -> mx.array:
        shapes.append(x.shape[:2])
        return plain(self, x)

    monkeypatch.setattr(PlainLinear, "__call__", noted)
    append(decoder, TOKENS[0][:, :4], decoder.make_cache(batch=3))
    assert set(shapes) == {(3, 1)}
    shapes.clear()
    independent_rows(decoder, list(TOKENS[0][:, :4]), [decoder.make_cache() for _ in range(3)])
    assert set(shapes) == {(1, 4)}
    shapes.clear()
    decoder.hidden(TOKENS[0][:, :4])
    assert set(shapes) == {(3, 4)}


def test_a_cache_of_another_number_of_rows_is_refused() -> None:
    decoder = decoder_in()
    with pytest.raises(CallError, match="made for 2 rows, found 3"):
        decoder.hidden(TOKENS[0], decoder.make_cache(batch=2))


def test_more_than_four_tokens_are_not_appended() -> None:
    decoder = decoder_in()
    with pytest.raises(CallError, match="1 to 4"):
        append(decoder, TOKENS[0][:, :5], decoder.make_cache(batch=3))


@pytest.mark.parametrize("experts", MODELS)
@pytest.mark.parametrize("chunk", [1, 5, 24, 100])
@pytest.mark.parametrize("lengths", [[24, 24, 24], [24, 0, 11]])
def test_a_prefill_in_chunks_equals_one_shot(experts: dict[str, Any], chunk: int, lengths: Sequence[int]) -> None:
    decoder = decoder_in(**experts)
    chunked, whole = decoder.make_cache(batch=3), decoder.make_cache(batch=3)
    mask = np.arange(24) >= 24 - np.array(lengths)[:, None]  # padded on the left
    last = prefill(decoder, TOKENS[0], chunked, mask=mask, chunk=chunk)
    hidden = decoder.hidden(TOKENS[0], whole, mask=mask)
    assert last.shape == (3, 1, decoder.config.hidden_size)
    assert chunked.lengths == whole.lengths == list(lengths)
    for row, n in enumerate(lengths):
        assert distance(last[row, 0], hidden[row, -1] if n else mx.zeros_like(hidden[row, 0])) < 1e-4
        assert all_near(chunked, row, whole, row)


def peak_of_a_prefill(n_layers: int, n_tokens: int, chunk: int) -> int:
    """Bytes at the peak above weights and caches."""
    decoder = decoder_in(num_hidden_layers=n_layers, layer_types=[LINEAR, FULL] * (n_layers // 2))
    ids = draw_ids(decoder.config, 1, n_tokens)
    decoder.hidden(ids[:, :9])  # reads the weights
    cache = decoder.make_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    prefill(decoder, ids, cache, chunk=chunk)
    peak = mx.get_peak_memory() - before
    return peak - sum(x.nbytes for layer in cache.layers for x in layer.arrays())


def test_the_peak_of_a_prefill_grows_neither_with_depth_nor_with_length() -> None:
    shallow, deep = peak_of_a_prefill(2, 192, 64), peak_of_a_prefill(12, 192, 64)
    assert deep < 1.2 * shallow
    assert peak_of_a_prefill(2, 768, 64) < 2.2 * shallow  # attention's scores see more keys
    assert peak_of_a_prefill(2, 768, 768) > 4 * shallow  # one shot does grow
