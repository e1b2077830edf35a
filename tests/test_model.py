"""The forward pass, judged by transformers' logits, by mlx-lm's own forward, and by itself run in other ways."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from model_draws import EXPERTS, FULL, LINEAR, Held, draw_config, draw_ids, draw_tensors, oracle
from safetensors.numpy import load_file

from qwen35conv.facts.config import ModelConfig, ModuleQuantization
from qwen35conv.facts.layout import TRUNK_PREFIX
from qwen35conv.model.decoder import Decoder, load_block, load_decoder
from qwen35conv.model.gated_delta_net import DeltaCache
from qwen35conv.model.linear import RowTable
from qwen35conv.model.span import span_of
from qwen35conv.model.weights import OpaqueModuleError, Weights
from qwen35conv.planning.plan import NormDtype, Options, Plan, make_plan
from qwen35conv.reading import read_checkpoint
from qwen35conv.source import open_source
from qwen35conv.view import View, open_view

WITH_LOGITS = ("raw-dense-vl-mtp", "raw-dense-text-tied", "raw-moe-vl-mtp", "raw-moe-text-per-expert")
DTYPES = (mx.float32, mx.bfloat16, mx.float16)
IDS = np.arange(7, 47)[None]  # with two experts a token, more choices than are run unsorted


def opened(folder: Path, options: Options | None = None) -> tuple[ModelConfig, Plan, View]:
    source = open_source(str(folder))
    checkpoint = read_checkpoint(source)
    plan = make_plan(checkpoint, options)
    return checkpoint.config, plan, open_view(source, plan)


def decoder_of(folder: Path, dtype: mx.Dtype | None = None, options: Options | None = None) -> Decoder:
    config, plan, view = opened(folder, options)
    return load_decoder(config, Weights(view, plan.packing, dtype), tied=plan.tied, backend="ops")


def held(
    config: ModelConfig, dtype: mx.Dtype = mx.float32, *, keep: bool = True, cast: mx.Dtype | None = None
) -> Decoder:
    weights = Weights(Held(draw_tensors(config, dtype)), {}, cast)
    return load_decoder(config, weights, tied=bool(config.tied), backend="ops", keep=keep)


def mlx_lm_of(folder: Path, dtype: mx.Dtype | None = None) -> nn.Module:
    config, plan, view = opened(folder)
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed (extra: judges)")
    module = import_module(f"mlx_lm.models.{config.model_type}")
    document = config.document
    text = {**document.get("text_config", document), "tie_word_embeddings": plan.tied}
    model: nn.Module = module.Model(module.ModelArgs(model_type=config.model_type, text_config=text))
    if plan.packing:
        packed = {
            name: {"group_size": p.group_size, "bits": p.bits, "mode": p.mode}
            for name, p in plan.packing.items()
            if p is not None
        }
        nn.quantize(model, class_predicate=lambda name, _: packed.get(name, False))
    model.load_weights([(n, x if dtype is None or x.dtype == mx.uint32 else x.astype(dtype)) for n, x in view.items()])
    return model


def same(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and bool(mx.array_equal(a, b))


def distance(a: mx.array, b: mx.array) -> float:
    return float(mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max())


@pytest.mark.parametrize("case", WITH_LOGITS)
def test_logits_in_float32_are_those_of_transformers(case: str) -> None:
    folder = oracle(case)
    judge = {name: mx.array(x) for name, x in load_file(folder / "logits.safetensors").items()}
    ours = decoder_of(folder / "src", mx.float32, Options(norm_dtype=NormDtype.FLOAT32))(judge["input_ids"])
    assert distance(ours, judge["logits"]) <= 1e-3
    assert mx.array_equal(ours.argmax(-1), judge["logits"].argmax(-1))


def test_a_raw_source_and_its_conversion_by_mlx_lm_give_the_same_bits() -> None:
    folder = oracle("raw-dense-vl-mtp") / "src"
    stored: dict[str, mx.array] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        stored |= mx.load(str(shard))  # type: ignore[arg-type]
    config, plan, _ = opened(folder)
    converted = Weights(Held(mlx_lm_of(folder).sanitize(stored)), {})
    assert same(decoder_of(folder)(IDS), load_decoder(config, converted, tied=plan.tied, backend="ops")(IDS))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("canonical", None),
        ("canonical", mx.float32),
        ("raw-dense-text-tied", None),
        ("raw-moe-vl-mtp", mx.float32),  # mlx-lm's gathered product takes float32 alone on a CPU
        ("raw-names-quantised-mtp", mx.float32),  # in bfloat16 MLX sums quantised products too coarsely on a CPU
    ],
)
def test_prefill_and_decode_have_the_bits_of_mlx_lm(case: str, dtype: mx.Dtype | None) -> None:
    folder = oracle(case) / "src"
    judge, ours = mlx_lm_of(folder, dtype), decoder_of(folder, dtype)
    ids = mx.array(IDS)
    assert same(ours(ids), judge(ids))
    theirs, cache = judge.make_cache(), ours.make_cache()
    for begin, end in ((0, 9), (9, 10), (10, 11), (11, 14)):
        assert same(ours(ids[:, begin:end], cache), judge(ids[:, begin:end], cache=theirs))


def test_a_quantised_product_on_a_cpu_keeps_float32_sums() -> None:
    folder = oracle("raw-names-quantised-mtp") / "src"
    exact = decoder_of(folder, mx.float32)(IDS)
    assert distance(decoder_of(folder)(IDS), exact) < distance(mlx_lm_of(folder)(mx.array(IDS)), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", [{}, EXPERTS])
def test_every_stored_dtype_runs_and_stays_near_float32(dtype: mx.Dtype, experts: dict[str, object]) -> None:
    config = draw_config(**experts)
    ids = draw_ids(config, 2, 13)
    block = load_block(Weights(Held(draw_tensors(config, dtype)), {}), 0, config, "ops")
    exact = load_block(Weights(Held(draw_tensors(config, dtype)), {}, mx.float32), 0, config, "ops")
    x = held(config, dtype).embed(ids)
    y = block(x, span_of(13, [0, 0]))
    assert y.dtype == dtype
    assert held(config, dtype)(ids).dtype == dtype
    distances = mx.abs(y.astype(mx.float32) - exact(x.astype(mx.float32), span_of(13, [0, 0]))).max(axis=-1)
    # A router near a tie may choose another expert in a coarser dtype: most positions must agree, not all.
    assert float((distances < 0.1).mean()) > 0.9


@pytest.mark.parametrize("n_tokens", [5, 40])  # fewer and more choices than are sorted
def test_experts_one_by_one_equal_the_gathered_product(n_tokens: int) -> None:
    config = draw_config(**EXPERTS)
    mixture = load_block(Weights(Held(draw_tensors(config)), {}), 0, config, "ops").mlp
    x = mx.random.normal((n_tokens, config.hidden_size), key=mx.random.key(3))
    experts = mx.array(np.random.default_rng(4).integers(0, 5, (n_tokens, 3)))
    assert distance(mixture._gathered(x, experts), mixture._one_by_one(x, experts)) < 1e-5  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "changes",
    [{}, EXPERTS, {"tie_word_embeddings": True}, {"num_hidden_layers": 2, "layer_types": [FULL, LINEAR]}],
)
def test_token_by_token_equals_one_prefill(changes: dict[str, object]) -> None:
    config = draw_config(**changes)
    decoder = held(config)
    ids = draw_ids(config, 2, 11)
    cache = decoder.make_cache(batch=2)
    steps = [decoder(ids[:, begin:end], cache) for begin, end in ((0, 4), (4, 5), (5, 9), (9, 10), (10, 11))]
    assert distance(mx.concatenate(steps, axis=1), decoder(ids)) < 1e-4
    assert cache.lengths == [11, 11]


@pytest.mark.parametrize("experts", [{}, EXPERTS])
def test_rows_of_unequal_length_equal_their_single_runs(experts: dict[str, object]) -> None:
    config = draw_config(**experts)
    decoder = held(config)
    lengths, more = [7, 1, 0, 4], [3, 0, 5, 2]
    ids, further = draw_ids(config, 4, 7), draw_ids(config, 4, 5, seed=2)
    cache = decoder.make_cache(batch=4)
    batched = decoder(ids, cache, lengths), decoder(further, cache, more)
    for row in range(4):
        single = decoder.make_cache()
        for ids_, logits, n in zip((ids, further), batched, (lengths[row], more[row]), strict=True):
            if n:
                alone = decoder(ids_[row : row + 1, :n], single)
                assert distance(alone, logits[row : row + 1, :n]) < 1e-4
        for theirs, ours in zip(single.layers, cache.layers, strict=True):
            if isinstance(ours, DeltaCache):
                for alone, together in zip(theirs.arrays(), ours.arrays(), strict=True):
                    assert distance(alone, together[row]) < 1e-5
    assert cache.lengths == [10, 1, 5, 6]


def test_streamed_layers_and_head_slices_give_the_bits_of_a_model_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = draw_config()
    ids = draw_ids(config, 1, 9)
    kept = held(config)(ids)
    monkeypatch.setattr("qwen35conv.model.decoder.HEAD_SLICE", 5000)
    streamed = held(config, keep=False)
    assert len(streamed.head.slices(5000)) > 5
    assert same(streamed(ids), kept)
    assert not streamed._blocks


def test_the_conv_tail_owns_its_bytes() -> None:
    n_tokens = 700  # a window of 540 KB, beside 12 KB of tail and state
    config = draw_config(vocab_size=7)
    block = load_block(Weights(Held(draw_tensors(config)), {}), 0, config, "ops")
    x = mx.random.normal((1, n_tokens, config.hidden_size), key=mx.random.key(5))
    cache = DeltaCache()
    mx.eval(x, block.mix(x, span_of(n_tokens, [0])))  # all weights are evaluated before memory is counted
    before = mx.get_active_memory()
    y = block.mix(x, span_of(n_tokens, [0]), cache)
    mx.eval(y, cache.arrays())
    del y
    logical = sum(array.nbytes for array in cache.arrays())
    assert mx.get_active_memory() - before <= logical + 10_000


@pytest.mark.parametrize(
    ("mode", "group_size", "bits"),
    [*(("affine", 32, bits) for bits in (2, 3, 4, 5, 6, 8)), ("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8)],
)
@pytest.mark.parametrize("experts", [{}, EXPERTS])
def test_packed_modules_equal_their_unpacked_weights(
    mode: str, group_size: int, bits: int, experts: dict[str, object]
) -> None:
    config = draw_config(**experts)
    tensors = draw_tensors(config)
    packing = ModuleQuantization(group_size, bits, mode)
    packed, unpacked, modes = dict(tensors), dict(tensors), {}
    for name, weight in tensors.items():
        module, _, parameter = name.rpartition(".")
        plain = weight.ndim < 2 or "conv1d" in name or weight.shape[-1] % 32
        if parameter != "weight" or plain or module.endswith("in_proj_a"):  # one override: not quantised
            continue
        parts = mx.quantize(weight, group_size, bits, mode=mode)
        unpacked[name] = mx.dequantize(*parts, group_size=group_size, bits=bits, mode=mode, dtype=mx.float32)
        packed |= zip((name, f"{module}.scales", f"{module}.biases"), parts, strict=False)
        modes[module] = packing
    assert f"{TRUNK_PREFIX}embed_tokens" in modes
    a, b = (
        load_decoder(config, Weights(Held(t), m, mx.float32), tied=False, backend="ops")
        for t, m in ((packed, modes), (unpacked, {}))
    )
    ids = draw_ids(config, 1, 9)
    assert distance(a.embed(ids), b.embed(ids)) == 0
    assert distance(a(ids), b(ids)) < 2e-3


def test_a_module_in_a_foreign_mode_is_named() -> None:
    config = draw_config()
    module = f"{TRUNK_PREFIX}layers.1.self_attn.o_proj"
    weights = Weights(Held(draw_tensors(config)), {module: ModuleQuantization(64, 3, "trellis")})
    load_block(weights, 0, config)
    with pytest.raises(OpaqueModuleError, match=r"layers\.1\.self_attn\.o_proj.*trellis"):
        load_block(weights, 1, config)
    assert weights.opaque(["language_model.lm_head", module]) == (module,)


def test_embeddings_are_read_by_rows_and_neighbours_at_once() -> None:
    matrix, asked = mx.random.normal((50, 3), key=mx.random.key(0)), []

    def read(_: str, begin: int, end: int) -> mx.array:
        asked.append((begin, end))
        return matrix[begin:end]

    ids = np.array([[4, 49, 5], [6, 4, 20]])
    assert same(RowTable(50, 600, None, read).lookup(ids), matrix[mx.array(ids)])
    assert asked == [(4, 7), (20, 21), (49, 50)]


def test_an_attention_bias_is_added() -> None:
    config = draw_config(attention_bias=True)
    tensors = draw_tensors(config)
    name = f"{TRUNK_PREFIX}layers.1.self_attn.o_proj"
    bias = mx.random.normal((config.hidden_size,), key=mx.random.key(1))
    x = mx.random.normal((1, 5, config.hidden_size), key=mx.random.key(2))
    without, with_ = (
        load_block(Weights(Held(t), {}), 1, config).mix(x, span_of(5, [0]))
        for t in (tensors, {**tensors, f"{name}.bias": bias})
    )
    assert distance(with_ - without, mx.broadcast_to(bias, without.shape)) < 1e-5


def test_shifting_a_layer_moves_its_gains_and_not_the_gated_norm() -> None:
    config = draw_config()
    tensors = draw_tensors(config)
    moved = {
        name: x + 1 if name.endswith(("_layernorm.weight", "q_norm.weight", "k_norm.weight")) else x
        for name, x in tensors.items()
    }
    x = mx.random.normal((1, 5, config.hidden_size), key=mx.random.key(2))
    for i in range(config.n_layers):
        plain, right = (load_block(Weights(Held(t), {}), i, config) for t in (tensors, moved))
        assert same(plain.shifted(1)(x, span_of(5, [0])), right(x, span_of(5, [0])))


def test_a_hook_sees_what_leaves_each_layer() -> None:
    config = draw_config()
    decoder, seen = held(config), []
    hidden = decoder.hidden(draw_ids(config, 1, 6), on_layer=lambda i, x: seen.append((i, x)))
    assert [i for i, _ in seen] == [0, 1, 2]
    assert same(decoder.final_norm(seen[-1][1]), hidden)
