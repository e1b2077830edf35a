"""What becomes of each tensor: the rules, the refusals, and the properties that every plan has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen35conv.errors import CheckpointError, ConventionError
from qwen35conv.generation.convention import Generation
from qwen35conv.planning.pieces import Fix, Rule
from qwen35conv.planning.plan import Mtp, NormDtype, Options, Plan, make_plan
from qwen35conv.reading import read_checkpoint
from qwen35conv.source import open_source
from qwen35conv.view import open_view


def plan_of(folder: Path, options: Options | None = None) -> Plan:
    return make_plan(read_checkpoint(open_source(str(folder))), options)


def plan_for(tmp_path: Path, tensors: tiny.Tensors, config: dict[str, Any], **options: Any) -> Plan:
    return plan_of(tiny.save(tmp_path / "source", tensors, config), Options(**options))


def fates(plan: Plan) -> dict[str, Rule]:
    return {write.name: write.rule for write in plan.writes()}


MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense, tied": {"tied": True},
    "text only": {"text_only": True, "vision": False, "mtp": False},
    "fused experts": {"sizes": tiny.SPARSE},
    "one tensor per expert": {"sizes": tiny.SPARSE, "experts": "single", "text_only": True, "vision": False},
    "gate and up fused per expert": {"sizes": tiny.SPARSE, "experts": "pairs"},
    "float32 gains": {"gain_dtype": np.dtype("f4")},
    "float16 gains": {"gain_dtype": np.dtype("f2")},
}


@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)
def test_the_plan_names_shapes_and_bytes_are_those_of_the_canonical_form(tmp_path: Path, kind: dict[str, Any]) -> None:
    made = tiny.make(**kind)
    folder = tiny.save(tmp_path / "source", made.raw, made.config, n_shards=3)
    source = open_source(str(folder))
    plan = make_plan(read_checkpoint(source))
    assert plan.verdict.generation is Generation.RAW
    view = open_view(source, plan)
    assert sorted(view) == sorted(made.canonical)
    for name, want in made.canonical.items():
        assert view.write(name).shape == want.shape
        assert b"".join(view.chunks(name, 100)) == np.ascontiguousarray(want).tobytes(), name
    dropped = {name for name in made.raw if name.startswith(("mtp.", "model.visual."))}
    assert {skip.name for skip in plan.skips} == dropped


@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)
def test_the_plan_of_the_canonical_form_is_empty(tmp_path: Path, kind: dict[str, Any]) -> None:
    made = tiny.make(**kind)
    plan = plan_for(tmp_path, made.canonical, made.config)
    assert plan.verdict.generation is Generation.CANONICAL
    assert plan.is_identity


def test_the_control_and_the_decay_are_never_shifted(tmp_path: Path) -> None:
    made = tiny.make()
    plan = plan_for(tmp_path, made.raw, made.config)
    shifted = {write.name for write in plan.writes() if write.fix is Fix.ADD_ONE}
    assert len(shifted) == 4 * 2 + 2 + 1
    assert not any("linear_attn" in name for name in shifted)


def test_a_flat_conv_gains_an_axis(tmp_path: Path) -> None:
    made = tiny.make()
    name = "model.language_model.layers.0.linear_attn.conv1d.weight"
    flat = {key: value[:, 0] if key.endswith("conv1d.weight") else value for key, value in made.raw.items()}
    plan = plan_for(tmp_path, flat, made.config, assume=Generation.RAW)
    (write,) = (write for write in plan.writes() if write.sources == (name,))
    assert write.shape == (tiny.SMALL.conv, tiny.SMALL.kernel, 1)


def test_a_kept_vision_tower_is_renamed_and_its_patch_embedding_transposed(tmp_path: Path) -> None:
    made = tiny.make()
    folder = tiny.save(tmp_path / "source", made.raw, made.config)
    source = open_source(str(folder))
    plan = make_plan(read_checkpoint(source), Options(keep_vision=True))
    view = open_view(source, plan)
    patch = made.raw["model.visual.patch_embed.proj.weight"]
    assert view.write("vision_tower.patch_embed.proj.weight").shape == (7, 2, 5, 6, 3)
    want = np.ascontiguousarray(patch.transpose(0, 2, 3, 4, 1)).tobytes()
    assert b"".join(view.chunks("vision_tower.patch_embed.proj.weight")) == want
    assert fates(plan)["vision_tower.blocks.0.norm1.weight"] is Rule.RENAME


@pytest.mark.parametrize(("mtp", "prefix"), [(Mtp.KEEP, "language_model.mtp."), (Mtp.SIDECAR, "mtp.")])
def test_a_kept_draft_heads_gains_follow_its_own_verdict(tmp_path: Path, mtp: Mtp, prefix: str) -> None:
    made = tiny.make()
    plan = plan_for(tmp_path, made.raw, made.config, mtp=mtp)
    writes = [write for shard in (*plan.shards, *plan.sidecar) for write in shard.writes]
    head = {write.name: write for write in writes if "mtp." in write.name}
    assert all(name.startswith(prefix) for name in head)
    assert sum(write.fix is Fix.ADD_ONE for write in head.values()) == 7
    assert len(head) == sum(name.startswith("mtp.") for name in made.raw)
    assert ("mtp-kept" in {finding.code for finding in plan.findings}) is (mtp is Mtp.KEEP)


def test_float32_gains_are_exact(tmp_path: Path) -> None:
    made = tiny.make()
    folder = tiny.save(tmp_path / "source", made.raw, made.config)
    source = open_source(str(folder))
    view = open_view(source, make_plan(read_checkpoint(source), Options(norm_dtype=NormDtype.FLOAT32)))
    stored = made.raw["model.language_model.norm.weight"].astype(np.float64)
    got = np.array(view["language_model.model.norm.weight"]).astype(np.float64)
    np.testing.assert_array_equal(got, stored + 1)


def _shift(by: float, tensors: tiny.Tensors) -> tiny.Tensors:
    gains = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")
    return {
        name: (value.astype(np.float32) + by).astype(value.dtype) if name.endswith(gains) else value
        for name, value in tensors.items()
    }


@pytest.mark.parametrize(
    ("generation", "tensors"),
    [
        (Generation.DOUBLE_SHIFTED, lambda made: _shift(1, made.canonical)),
        (Generation.NEVER_SHIFTED, lambda made: _shift(-1, made.canonical)),
        (
            Generation.SHIFTED_RAW,
            lambda made: (
                _shift(1, {n: v for n, v in made.raw.items() if not n.startswith("mtp.")})
                | {"model.language_model.norm.weight": made.canonical["language_model.model.norm.weight"]}
            ),
        ),
    ],
    ids=lambda value: value.value if isinstance(value, Generation) else "",
)
def test_broken_gains_stop_and_can_be_repaired(
    tmp_path: Path, generation: Generation, tensors: Callable[[tiny.Made], tiny.Tensors]
) -> None:
    made = tiny.make(tiny.with_layers(12))
    folder = tiny.save(tmp_path / "source", tensors(made), made.config)
    with pytest.raises(ConventionError, match=f"norm gains are {generation.value}") as caught:
        plan_of(folder)
    assert caught.value.exit_code == 1
    assert "--repair" in str(caught.value.hint)
    source = open_source(str(folder))
    view = open_view(source, make_plan(read_checkpoint(source), Options(repair=True)))
    for name, want in made.canonical.items():
        got = np.array(view[name].astype(mx.float32))
        np.testing.assert_allclose(got, want.astype(np.float32), atol=1 / 128, err_msg=name)


def test_a_user_may_vouch_for_a_generation(tmp_path: Path) -> None:
    made = tiny.make()
    folder = tiny.save(tmp_path / "source", _shift(-1, made.canonical), made.config)
    assert plan_of(folder, Options(assume=Generation.RAW)).shift == 1
    assert plan_of(folder, Options(assume=Generation.CANONICAL)).is_identity


def test_the_head_of_a_tied_model_is_dropped_only_where_it_is_the_embeddings(tmp_path: Path) -> None:
    made = tiny.make(tied=True)
    embeddings = made.raw["model.language_model.embed_tokens.weight"]
    equal = plan_for(tmp_path / "a", made.raw | {"lm_head.weight": embeddings}, made.config)
    assert equal.tied
    assert any(skip.name == "lm_head.weight" for skip in equal.skips)
    other = plan_for(tmp_path / "b", made.raw | {"lm_head.weight": embeddings[::-1].copy()}, made.config)
    assert not other.tied
    assert "tied-head-differs" in {finding.code for finding in other.findings}


def test_an_untied_model_without_its_head_is_an_error_unless_tied_on_request(tmp_path: Path) -> None:
    made = tiny.make()
    headless = {name: value for name, value in made.raw.items() if name != "lm_head.weight"}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        plan_for(tmp_path, headless, made.config)
    assert plan_for(tmp_path, headless, made.config, tie=True).tied


def without(name: str) -> Callable[[tiny.Tensors], tiny.Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def replaced(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[tiny.Tensors], tiny.Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name])}


def added(name: str, value: np.ndarray) -> Callable[[tiny.Tensors], tiny.Tensors]:
    return lambda tensors: tensors | {name: value}


LAYER = "model.language_model.layers.0."
Z = np.zeros((3, 5), tiny.BF16)
REFUSED: dict[str, tuple[Callable[[tiny.Tensors], tiny.Tensors], str]] = {
    "an unknown name": (added(f"{LAYER}mlp.sinks", Z), f"have names that no rule knows: {LAYER}mlp.sinks"),
    "a missing tensor": (
        without(f"{LAYER}linear_attn.out_proj.weight"),
        "1 tensors that config.json implies are missing",
    ),
    "a missing gain": (
        without(f"{LAYER}input_layernorm.weight"),
        "missing: language_model.model.layers.0.input_layernorm",
    ),
    "a wrong shape": (
        replaced(f"{LAYER}linear_attn.in_proj_a.weight", lambda v: v.T.copy()),
        "expected [6, 24], found [24, 6]",
    ),
    "a layer too many": (
        added("model.language_model.layers.7.input_layernorm.weight", np.zeros(24, tiny.BF16)),
        "no place in the model",
    ),
    "a bias nobody has": (added(f"{LAYER}linear_attn.out_proj.bias", np.zeros(24, tiny.BF16)), "no place in the model"),
    "a strange conv": (
        replaced(f"{LAYER}linear_attn.conv1d.weight", lambda v: v.reshape(23, 4, 4)),
        "expected [C, 1, 4]",
    ),
    "two copies of a module": (
        added("model.layers.0.input_layernorm.weight", np.zeros(24, tiny.BF16)),
        "two sources each",
    ),
    "a partitioned save": (
        replaced(f"{LAYER}linear_attn.out_proj.weight", lambda v: v[:0, :0].reshape(0)),
        "a partitioned save",
    ),
    "NaN in a gain": (
        replaced("model.language_model.norm.weight", lambda v: np.full_like(v, np.nan)),
        "NaN or infinity in 1 gains",
    ),
    "FP8 in blocks": (added(f"{LAYER}linear_attn.out_proj.weight_scale_inv", Z), "FP8 in blocks: 1 modules"),
    "AWQ": (added(f"{LAYER}linear_attn.out_proj.qzeros", Z), "AWQ or GPTQ: 1 modules"),
    "NVFP4": (added(f"{LAYER}linear_attn.out_proj.weight_global_scale", Z), "NVFP4 (compressed-tensors): 1 modules"),
    "a scale without its packing": (added(f"{LAYER}linear_attn.out_proj.scales", Z), "a scale beside a BF16 weight"),
    "a packed weight without scales": (
        replaced(f"{LAYER}linear_attn.out_proj.weight", lambda v: np.zeros((24, 8), np.uint32)),
        "its scales are gone",
    ),
    "an integer weight": (
        replaced(f"{LAYER}linear_attn.out_proj.weight", lambda v: v.view(np.int16)),
        "1 tensors in a dtype they can't have: language_model.model.layers.0.linear_attn.out_proj.weight (I16)",
    ),
    "a decay of float64": (replaced(f"{LAYER}linear_attn.A_log", lambda v: v.astype("f8")), "A_log (F64)"),
    "a packed decay": (replaced(f"{LAYER}linear_attn.dt_bias", lambda v: v.astype("u4")), "dt_bias (U32)"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_or_not_for_us_stops_with_exit_1(
    tmp_path: Path, change: Callable[[tiny.Tensors], tiny.Tensors], message: str
) -> None:
    made = tiny.make()
    with pytest.raises(CheckpointError) as caught:
        plan_for(tmp_path, change(made.raw), made.config)
    assert message in str(caught.value)
    assert caught.value.exit_code == 1


BIASED = [f"model.language_model.layers.3.self_attn.{name}_proj.bias" for name in "qkvo"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [((128, 32, 32, 24), None), ((128, 32, 32), "o_proj.bias"), ((128, 32, 3, 24), "v_proj.bias: expected [32]")],
)
def test_attention_biases_are_held_to_the_config(tmp_path: Path, rows: tuple[int, ...], message: str | None) -> None:
    made = tiny.make()
    made.config["text_config"]["attention_bias"] = True
    biases = {name: np.zeros(n, tiny.BF16) for name, n in zip(BIASED, rows, strict=False)}
    if message is None:
        plan_for(tmp_path, made.raw | biases, made.config)
        return
    with pytest.raises(CheckpointError, match=re.escape(message)):
        plan_for(tmp_path, made.raw | biases, made.config)


HEADS: dict[str, tuple[Callable[[tiny.Tensors], tiny.Tensors], str]] = {
    "a gain of two axes": (replaced("mtp.norm.weight", lambda v: v[None]), "mtp.norm.weight: expected [24]"),
    "a turned weight": (replaced("mtp.fc.weight", np.transpose), "mtp.fc.weight: expected [24, 48]"),
    "a tensor that is not there": (without("mtp.fc.weight"), "missing: "),
    "one layer more": (added("mtp.layers.1.input_layernorm.weight", np.zeros(24, tiny.BF16)), "no place"),
    "an integer weight": (replaced("mtp.fc.weight", lambda v: v.view(np.int16)), "mtp.fc.weight (I16)"),
}


@pytest.mark.parametrize("mtp", [Mtp.KEEP, Mtp.SIDECAR])
@pytest.mark.parametrize(("change", "message"), HEADS.values(), ids=HEADS)
def test_a_draft_head_that_is_kept_must_be_whole(
    tmp_path: Path, change: Callable[[tiny.Tensors], tiny.Tensors], message: str, mtp: Mtp
) -> None:
    made = tiny.make()
    with pytest.raises(CheckpointError) as caught:
        plan_for(tmp_path, change(made.raw), made.config, mtp=mtp)
    assert message in str(caught.value)
    assert "--mtp drop" in str(caught.value.hint)
    plan_for(tmp_path / "dropped", change(made.raw), made.config)


@pytest.mark.parametrize("mtp", [Mtp.KEEP, Mtp.SIDECAR])
def test_a_draft_head_that_is_asked_for_and_not_there_is_told(tmp_path: Path, mtp: Mtp) -> None:
    made = tiny.make(mtp=False)
    plan = plan_for(tmp_path, made.raw, made.config, mtp=mtp)
    assert [found.code for found in plan.findings] == ["mtp-none"]
    assert not plan.sidecar


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
RAGGED: dict[str, tuple[Callable[[tiny.Tensors], tiny.Tensors], str]] = {
    "missing": (without(EXPERT), "1 of 5 experts are missing: 3"),
    "ragged": (replaced(EXPERT, lambda v: v[:-1].copy()), f"{EXPERT}: BF16 [13, 24], but expert 0 has BF16 [14, 24]"),
    "another dtype": (replaced(EXPERT, lambda v: v.astype(np.float16)), f"{EXPERT}: F16 [14, 24]"),
    "one too many": (
        added(EXPERT.replace(".3.", ".5."), np.zeros((14, 24), tiny.BF16)),
        "more than config.json has: 5",
    ),
}


@pytest.mark.parametrize(("change", "message"), RAGGED.values(), ids=RAGGED)
def test_experts_that_do_not_stack_are_named(
    tmp_path: Path, change: Callable[[tiny.Tensors], tiny.Tensors], message: str
) -> None:
    made = tiny.make(tiny.SPARSE, experts="single", text_only=True, vision=False, mtp=False)
    with pytest.raises(CheckpointError) as caught:
        plan_for(tmp_path, change(made.raw), made.config)
    assert message in str(caught.value)


def test_swapped_axes_of_fused_experts_are_an_error(tmp_path: Path) -> None:
    made = tiny.make(tiny.SPARSE)
    name = f"{LAYER}mlp.experts.gate_up_proj"
    with pytest.raises(CheckpointError, match=r"expected \[experts 5, rows 28, inputs\], found \[5, 24, 28\]"):
        plan_for(tmp_path, made.raw | {name: made.raw[name].swapaxes(1, 2).copy()}, made.config)


def test_shards_follow_the_source_or_a_size(tmp_path: Path) -> None:
    made = tiny.make()
    folder = tiny.save(tmp_path / "source", made.raw, made.config, n_shards=3)
    plan = plan_of(folder)
    assert [shard.file for shard in plan.shards] == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    for i, shard in enumerate(plan.shards, 1):
        assert {write.pieces[0].file for write in shard.writes} == {f"model.safetensors-{i:05d}-of-00003.safetensors"}
    cut = plan_of(folder, Options(max_shard_bytes=9000))
    assert len(cut.shards) > 3
    assert all(shard.n_bytes <= 9000 or len(shard.writes) == 1 for shard in cut.shards)
    assert sorted(write.name for write in cut.writes()) == sorted(write.name for write in plan.writes())


def test_every_element_of_the_result_is_aligned(tmp_path: Path) -> None:
    made = tiny.make(tiny.Sizes(value_heads=6, value_dim=9, hidden=23))
    for shard in plan_for(tmp_path, made.raw, made.config).shards:
        assert all(info.begin % info.dtype.n_align == 0 for info in shard.tensors())


@given(n_shards=st.integers(1, 6), seed=st.integers(0, 99), kind=st.sampled_from(sorted(MODELS)))
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_every_tensor_has_one_fate_however_it_is_dealt_to_shards(
    tmp_path_factory: pytest.TempPathFactory, n_shards: int, seed: int, kind: str
) -> None:
    made = tiny.make(**MODELS[kind])
    folder = tiny.save(tmp_path_factory.mktemp("dealt"), made.raw, made.config, n_shards=n_shards, seed=seed)
    plan = plan_of(folder)
    written = [source for write in plan.writes() for source in write.sources]
    skipped = [skip.name for skip in plan.skips]
    assert set(written) | set(skipped) == set(made.raw)
    assert not set(written) & set(skipped)
    names = [write.name for write in plan.writes()]
    assert len(names) == len(set(names))
    n_written = sum(piece.n_bytes for write in plan.writes() for piece in write.pieces)
    n_stored = sum(value.nbytes for value in made.raw.values())
    assert n_written + sum(skip.n_bytes for skip in plan.skips) == n_stored
    pieces = sorted((piece.file, piece.begin, piece.end) for write in plan.writes() for piece in write.pieces)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(pieces))


def test_oddities_are_findings(tmp_path: Path) -> None:
    made = tiny.make(mtp=False)
    raw = {name.replace("layers.1.", "layers.1._orig_mod."): value for name, value in made.raw.items()}
    raw["model.language_model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    config = json.loads(json.dumps(made.config))
    config["text_config"] |= {"mtp_num_hidden_layers": 1, "vocab_size": 60}
    del config["text_config"]["rope_parameters"]
    plan = plan_for(tmp_path, raw, config)
    assert {f.code for f in plan.findings} == {"wrapped-names", "mtp-declared", "vocab-size", "rope-theta"}
    assert any("rotary buffer" in skip.reason for skip in plan.skips)
