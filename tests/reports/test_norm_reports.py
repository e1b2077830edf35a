"""Field reports on norm gains: shifted twice (A), never (B), and by rules that one tensor, name or flag decides (C)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiny
from field import (
    CANONICAL_HEAD,
    config_of,
    convert,
    converted,
    deep,
    head_of,
    inspect,
    is_head_gain,
    is_trunk_gain,
    packed,
    qwen35,
    refused,
    renamed,
    shifted,
    with_mean,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

WIDE = tiny.Sizes(hidden=64, vocab=50, intermediate=96, layers=8)
PER_TEST = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
CASE = st.integers(0, 2**32 - 1)


def outcomes(document: dict[str, Any], side: str) -> dict[str, str]:
    return {f"{f['loader']} {f['versions']}": f["outcome"] for f in document["loaders"][side]}


# --- A: shifted twice ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [CANONICAL_HEAD, "mtp.", "model.mtp."])
@pytest.mark.parametrize("vision", [False, True])
def test_a01_a_converted_build_with_its_head_inside_is_canonical_and_no_norm_changes(
    head: str, vision: bool, tmp_path: Path
) -> None:
    made = tiny.make()
    tensors = converted(made, head=head)
    if vision:
        tensors |= {f"vision_tower.{k.removeprefix('model.visual.')}": v for k, v in made.raw.items() if "visual" in k}
    source = tiny.save(tmp_path / "source", tensors, made.config, metadata={"format": "mlx"})
    found = inspect(source)
    assert (found.code, found.generation, found.document["plan"]["gain_shift"]) == (0, "canonical", 0)
    screen = qwen35("inspect", source).out
    assert "left out: draft head (mtp)" in screen
    assert convert(source, tmp_path / "out").code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)


@PER_TEST
@given(seed=CASE, mean=st.floats(-0.9, 2.6), by=st.sampled_from([0, 1]))
def test_a02_no_single_norm_decides(seed: int, mean: float, by: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    rng = np.random.default_rng(seed)
    made = tiny.make(deep(tiny.SMALL), mtp=False, vision=False, seed=seed % 1000)
    tensors = dict(made.canonical if by else made.raw)
    odd = str(rng.choice([n for n in tensors if is_trunk_gain(n)]))
    tensors = with_mean(tensors, odd, mean)
    found = inspect(tiny.save(tmp_path_factory.mktemp("a02") / "s", tensors, made.config, metadata={"format": "x"}))
    # The others speak for themselves: right, or stopped because the odd one looks foreign. Never the other shift.
    assert found.generation in ("canonical" if by else "raw", "mixed", "unknown")
    assert found.code == (0 if found.generation in ("canonical", "raw") else 1)


def test_a04_a_converted_moe_build_with_its_head_is_already_canonical(tmp_path: Path) -> None:
    made = tiny.make(tiny.SPARSE)
    source = tiny.save(tmp_path / "source", converted(made), made.config)
    shown = qwen35("inspect", source)
    assert shown.code == 0
    assert "CANONICAL" in shown.out
    assert "already canonical" in shown.out


@pytest.mark.parametrize("sizes", [tiny.SMALL, tiny.SPARSE], ids=["dense", "moe"])
@pytest.mark.parametrize("experts", ["fused", "single", "pairs"])
def test_a05_a_result_loads_right_by_every_rule_old_and_new(sizes: tiny.Sizes, experts: str, tmp_path: Path) -> None:
    made = tiny.make(sizes, experts=experts)
    source = tiny.save(tmp_path / "source", made.raw, made.config)
    assert convert(source, tmp_path / "out").code == 0
    found = inspect(tmp_path / "out")
    assert set(outcomes(found.document, "source").values()) == {"loads right"}
    tensors = tiny.load(tmp_path / "out")
    assert {v.shape[1:] for n, v in tensors.items() if n.endswith("conv1d.weight")} == {(sizes.kernel, 1)}
    assert not any("mtp." in name for name in tensors)


def test_a07_loaders_with_and_without_a_gate_agree_on_the_result(tmp_path: Path) -> None:
    made = tiny.make()
    found = inspect(tiny.save(tmp_path / "source", converted(made), made.config))
    before, after = outcomes(found.document, "source"), outcomes(found.document, "result")
    assert len(set(before.values())) > 1  # this file gives two results
    assert set(after.values()) == {"loads right"}


@pytest.mark.parametrize("how", ["drop", "sidecar"])
def test_a08_the_head_of_a_converted_build_can_be_left_out_or_split_off(how: str, tmp_path: Path) -> None:
    made = tiny.make()
    source = tiny.save(tmp_path / "source", converted(made), made.config, metadata={"format": "mlx"})
    found = inspect(source)
    assert found.document["next"].startswith("qwen35 convert ")
    assert "would shift twice" in outcomes(found.document, "source").values()
    assert convert(source, tmp_path / "out", "--mtp", how).code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)
    assert (tmp_path / "out-mtp").exists() == (how == "sidecar")
    if how == "sidecar":
        head = {n: v for n, v in converted(made, head="mtp.").items() if n.startswith("mtp.")}
        tiny.assert_same(tiny.load(tmp_path / "out-mtp"), head)


@PER_TEST
@given(
    seed=CASE,
    sizes=st.sampled_from([deep(tiny.SMALL), replace(tiny.SPARSE, hidden=72, layers=12), deep(WIDE, 24)]),
    experts=st.sampled_from(["fused", "single", "pairs"]),
    text_only=st.booleans(),
    tied=st.booleans(),
    n_shards=st.integers(1, 5),
)
def test_a10_the_plan_of_a_result_is_empty(
    seed: int, sizes: tiny.Sizes, experts: str, text_only: bool, tied: bool, n_shards: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    made = tiny.make(sizes, seed=seed, experts=experts, text_only=text_only, tied=tied, vision=not text_only)
    home = tmp_path_factory.mktemp("a10")
    source = tiny.save(home / "source", made.raw, made.config, n_shards=n_shards, seed=seed)
    assert convert(source, home / "out", "--no-verify").code == 0
    again = inspect(home / "out")
    assert (again.code, again.document["plan"]["is_identity"], again.document["changes"]) == (0, True, False)
    assert again.document["config_edits"] == []
    assert convert(home / "out", home / "twice", "--no-verify").code == 0
    tiny.assert_same(tiny.load(home / "twice"), made.canonical)
    assert (home / "twice" / "config.json").read_bytes() == (home / "out" / "config.json").read_bytes()


@pytest.mark.parametrize("prefix", ["model.", "", "model.language_model.", "language_model."])
def test_a11_values_decide_and_names_do_not(prefix: str, tmp_path: Path) -> None:
    made = tiny.make(vision=False, mtp=False)
    bare = renamed(
        made.canonical, lambda n: n.replace("language_model.model.", prefix).replace("language_model.lm", "lm")
    )
    found = inspect(tiny.save(tmp_path / "source", bare, made.config))
    assert (found.code, found.generation, found.document["plan"]["gain_shift"]) == (0, "canonical", 0)
    assert convert(tmp_path / "source", tmp_path / "out").code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)


@pytest.mark.parametrize("layers", [4, 12, 32])
def test_a13_a_converted_build_without_a_head_needs_nothing(layers: int, tmp_path: Path) -> None:
    made = tiny.make(tiny.with_layers(layers), mtp=False, vision=False)
    found = inspect(tiny.save(tmp_path / "source", made.canonical, made.config))
    assert (found.code, found.generation) == (0, "canonical")
    assert "mtp-declared" not in found.codes


@pytest.mark.parametrize("head", [True, False])
def test_a14_no_gain_of_a_head_is_counted_with_the_trunk(head: bool, tmp_path: Path) -> None:
    sizes = deep(tiny.SPARSE)
    made = tiny.make(sizes, mtp=head)
    found = inspect(tiny.save(tmp_path / "source", made.raw, made.config), "--tensors")
    n_full = sum(sizes.is_full(i) for i in range(sizes.layers))
    gains = [w for w in found.document["plan"]["writes"] if w["fix"] == "add one"]
    assert len(gains) == 2 * sizes.layers + 2 * n_full + 1
    assert not any("mtp" in write["name"] for write in gains)


def test_a16_a_quantised_build_with_its_head_names_the_loaders_that_shift_it_again(tmp_path: Path) -> None:
    made = tiny.make(WIDE)
    tensors = packed(converted(made), lambda n: "layers." in n and "mtp" not in n)
    entry = {"group_size": 32, "bits": 4, "mode": "affine"}
    source = tiny.save(tmp_path / "source", tensors, made.config | {"quantization": entry})
    found = inspect(source)
    assert (found.code, found.generation) == (0, "canonical")
    before = outcomes(found.document, "source")
    assert before["mlx-lm up to 0.31"] == "would shift twice"
    assert before["mlx-lm from 0.32"] == "loads right"
    assert set(outcomes(found.document, "result").values()) == {"loads right"}


@pytest.mark.parametrize(("by", "shift"), [(0, 1), (1, 0)], ids=["raw", "gamma"])
@pytest.mark.parametrize("dtype", [tiny.BF16, np.dtype("f4")], ids=str)
def test_a17_all_seven_norms_of_a_head_get_one_verdict(by: int, shift: int, dtype: Any, tmp_path: Path) -> None:
    made = tiny.make()
    tensors = converted(made, head="mtp.", head_by=by)
    tensors = {n: v.astype(dtype) if is_head_gain(n) else v for n, v in tensors.items()}
    source = tiny.save(tmp_path / "source", tensors, made.config)
    assert convert(source, tmp_path / "out", "--mtp", "sidecar").code == 0
    got = tiny.load(tmp_path / "out-mtp")
    gains = [n for n in got if is_head_gain(n)]
    assert len(gains) == 7
    for name in gains:
        np.testing.assert_array_equal(got[name], (tensors[name].astype(np.float32) + shift).astype(dtype))
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)


@pytest.mark.parametrize(("embedding", "hidden"), [(0.2734, 0.4937), (0.4937, 0.2734), (0.56, 0.84)])
def test_a19_small_gamma_norms_before_fc_are_gamma(embedding: float, hidden: float, tmp_path: Path) -> None:
    made = tiny.make(tiny.SPARSE)
    tensors = converted(made)
    for suffix, mean in (("pre_fc_norm_embedding.weight", embedding), ("pre_fc_norm_hidden.weight", hidden)):
        name = f"{CANONICAL_HEAD}{suffix}"
        rng = np.random.default_rng(5)
        values = np.maximum(mean + 0.06 * rng.standard_normal(tensors[name].shape), 0.02)
        tensors[name] = values.astype(np.float32).astype(tiny.BF16)
    source = tiny.save(tmp_path / "source", tensors, made.config)
    assert inspect(source).head == "canonical"
    assert convert(source, tmp_path / "out", "--mtp", "sidecar").code == 0
    for name, value in tiny.load(tmp_path / "out-mtp").items():
        if is_head_gain(name):
            np.testing.assert_array_equal(value, tensors[CANONICAL_HEAD + name.removeprefix("mtp.")])


@pytest.mark.parametrize(("by", "verdict", "code"), [(0, "never-shifted", 1), (1, "canonical", 0)])
def test_a20_one_naming_two_conventions_and_the_values_tell(by: int, verdict: str, code: int, tmp_path: Path) -> None:
    made = tiny.make(mtp=False, vision=False)
    tensors = made.canonical if by else shifted(made.canonical, -1)
    found = inspect(tiny.save(tmp_path / "source", tensors, made.config))
    assert (found.generation, found.code) == (verdict, code)


@pytest.mark.parametrize(
    ("by", "hold"), [(-1, "gamma - 1"), (0, "gamma"), (1, "gamma + 1")], ids=["delta", "gamma", "twice"]
)
def test_a22_json_says_what_the_gains_hold(by: int, hold: str, tmp_path: Path) -> None:
    made = tiny.make(deep(tiny.SMALL), mtp=False, vision=False)
    found = inspect(tiny.save(tmp_path / "source", shifted(made.canonical, by), made.config))
    assert found.document["verdicts"]["trunk"]["gains_hold"] == hold


# --- B: never shifted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [4, 12])
def test_b01_verify_fails_on_gains_that_were_never_shifted(layers: int, tmp_path: Path) -> None:
    made = tiny.make(tiny.with_layers(layers), mtp=False, vision=False)
    source = tiny.save(tmp_path / "source", shifted(made.canonical, -1), made.config)
    found = qwen35("verify", source, "--json")
    assert found.code == 1
    values = next(check for check in found.document["checks"] if check["name"] == "values")
    assert values["passed"] is False
    assert "never-shifted" in values["summary"]


@pytest.mark.parametrize("file", ["mtp/weights.safetensors", "mtp.safetensors", "model-mtp.safetensors"])
@pytest.mark.parametrize("prefix", ["mtp.", "", "model.mtp.", "language_model.mtp."])
@pytest.mark.parametrize(("by", "verdict"), [(0, "raw"), (1, "canonical")])
def test_b02_a_head_beside_the_trunk_is_judged_by_its_own_values(
    file: str, prefix: str, by: int, verdict: str, tmp_path: Path
) -> None:
    made = tiny.make()
    source = tiny.save(tmp_path / "source", made.canonical, made.config)
    head = converted(made, head="mtp.", head_by=by)
    (source / file).parent.mkdir(exist_ok=True)
    save_file(head_of(head, prefix=prefix), source / file)
    found = inspect(source)
    assert (found.code, found.generation) == (0, "canonical")
    assert found.document["verdicts"]["sidecars"][file]["generation"] == verdict
    assert len(found.document["verdicts"]["sidecars"][file]["gains"]) == 7
    assert found.document["checkpoint"]["sidecars"] == [file]


def test_b04_a_raw_head_in_a_converted_build_is_seen_by_its_values(tmp_path: Path) -> None:
    made = tiny.make()
    source = tiny.save(tmp_path / "source", converted(made, head_by=0), made.config)
    found = inspect(source)
    assert (found.generation, found.head) == ("canonical", "raw")
    assert convert(source, tmp_path / "out", "--mtp", "keep").code == 0
    got = tiny.load(tmp_path / "out")
    for name in (n for n in got if is_head_gain(n)):
        raw = made.raw["mtp." + name.removeprefix(CANONICAL_HEAD)]
        np.testing.assert_array_equal(got[name], (raw.astype(np.float32) + 1).astype(raw.dtype))


@pytest.mark.parametrize("pack", [False, True])
def test_b05_a_head_is_whole_with_seven_norms_and_its_experts(pack: bool, tmp_path: Path) -> None:
    made = tiny.make(tiny.Sizes(hidden=64, vocab=50, experts=5, expert_size=32, shared_size=96, layers=8))
    tensors, config = dict(made.raw), made.config
    if pack:
        tensors = packed(tensors, lambda n: n.startswith("mtp.layers.0.self_attn."))
        config = config | {"quantization": {"group_size": 32, "bits": 4}}
    source = tiny.save(tmp_path / "source", tensors, config)
    assert convert(source, tmp_path / "out", "--mtp", "sidecar").code == 0
    got = tiny.load(tmp_path / "out-mtp")
    assert sum(is_head_gain(name) for name in got) == 7
    fused = made.raw["mtp.layers.0.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(got["mtp.layers.0.mlp.switch_mlp.gate_proj.weight"], fused[:, :32])
    np.testing.assert_array_equal(got["mtp.layers.0.mlp.switch_mlp.up_proj.weight"], fused[:, 32:])
    assert "mtp.layers.0.mlp.switch_mlp.down_proj.weight" in got
    assert "mtp.layers.0.mlp.gate.weight" in got
    assert ("mtp.layers.0.self_attn.q_proj.scales" in got) == pack


@pytest.mark.parametrize("scales", [tiny.BF16, np.dtype("f2")], ids=str)
def test_b07_scales_of_a_head_keep_their_dtype_and_another_than_the_models_is_a_finding(
    scales: Any, tmp_path: Path
) -> None:
    made = tiny.make(WIDE)
    tensors = packed(made.raw, lambda n: n.startswith("mtp."), scales=scales)
    config = made.config | {"quantization": {"group_size": 32, "bits": 4}}
    source = tiny.save(tmp_path / "source", tensors, config)
    found = inspect(source, "--mtp", "sidecar")
    assert ("scales-dtype" in found.codes) == (scales != tiny.BF16)
    assert convert(source, tmp_path / "out", "--mtp", "sidecar").code == 0
    got = tiny.load(tmp_path / "out-mtp")
    assert {v.dtype for n, v in got.items() if n.endswith(".scales")} == {scales}


# --- C: mixed conventions, heuristics, precision ---------------------------------------------------------------------


@pytest.mark.parametrize("head", ["mtp.", CANONICAL_HEAD])
def test_c01_a_head_whose_norms_disagree_is_not_written_unless_told(head: str, tmp_path: Path) -> None:
    made = tiny.make()
    tensors = converted(made, head=head, head_by=0)
    tensors = with_mean(tensors, "mtp.norm.weight", 2.9)
    tensors = {n: np.maximum(v, np.array(1.5, v.dtype)) if n.endswith("mtp.norm.weight") else v
               for n, v in tensors.items()}  # fmt: skip
    source = tiny.save(tmp_path / "source", tensors, made.config)
    found = inspect(source)
    assert (found.code, found.generation, found.head) == (0, "canonical", "mixed")
    assert convert(source, tmp_path / "out").code == 0
    for how in ("keep", "sidecar"):
        refused(convert(source, tmp_path / how, "--mtp", how), 1, "the draft head's norm gains are mixed")
        assert not (tmp_path / how).exists()
        assert convert(source, tmp_path / how, "--mtp", how, "--assume", "canonical").code == 0


@PER_TEST
@given(seed=CASE, naming=st.sampled_from(["raw", "canonical"]))
def test_c02_the_order_of_tensors_and_files_changes_no_verdict(
    seed: int, naming: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng(seed)
    made = tiny.make(tiny.with_layers(24), mtp=False, vision=False, seed=seed % 1000)
    tensors = dict(made.raw)
    inputs = [n for n in tensors if n.endswith("layernorm.weight")]
    for name in rng.choice(inputs, 3, replace=False):  # some raw norms average above 0.5
        tensors = with_mean(tensors, str(name), float(rng.uniform(0.5, 0.75)))
    if naming == "canonical":
        tensors = renamed(tensors, lambda n: n.replace("model.language_model.", "language_model.model."))
    home = tmp_path_factory.mktemp("c02")
    verdicts = {
        inspect(tiny.save(home / f"{i}", tensors, made.config, n_shards=1, seed=int(rng.integers(1 << 30)))).generation
        for i in range(3)
    }
    assert len(verdicts) == 1
    assert verdicts <= {"raw", "mixed", "unknown"}


@pytest.mark.parametrize("where", ["config", "text_config", "metadata"])
@pytest.mark.parametrize("key", ["norm_convention", "preshifted_norm_weights", "jang_norms_pre_shifted"])
@pytest.mark.parametrize("value", ["runtime_minus2", "", "\x1b[31mraw", "yes please"])
def test_c04_a_marker_that_nobody_knows_is_no_marker(where: str, key: str, value: str, tmp_path: Path) -> None:
    made = tiny.make()
    config = json.loads(json.dumps(made.config))
    metadata = {"format": "pt"}
    {"config": config, "text_config": config["text_config"], "metadata": metadata}[where][key] = value
    source = tiny.save(tmp_path / "source", made.raw, config, metadata=metadata)
    found = inspect(source)
    assert (found.code, found.generation) == (0, "raw")
    assert f"{key} = " in found.warnings
    assert "is not known: ignored" in found.warnings
    assert convert(source, tmp_path / "out").code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)


@pytest.mark.parametrize("where", ["config", "text_config"])
@pytest.mark.parametrize(
    "stale",
    [{"norm_convention": "raw"}, {"preshifted_norm_weights": False}, {"mtp_norm_encoding": "delta"}, {}],
    ids=lambda stale: next(iter(stale), "none"),
)
def test_c05_the_state_of_the_gains_is_written_down_and_no_old_claim_survives(
    where: str, stale: dict[str, Any], tmp_path: Path
) -> None:
    made = tiny.make()
    config = json.loads(json.dumps(made.config))
    (config if where == "config" else config["text_config"]).update(stale)
    source = tiny.save(tmp_path / "source", made.raw, config)
    assert convert(source, tmp_path / "out").code == 0
    written = config_of(tmp_path / "out")
    assert written["text_config"]["norm_convention"] == "gamma"
    levels = (written, written["text_config"])
    assert not any(key in level for level in levels for key in stale if key != "norm_convention")
    assert "norm_convention" not in written
    again = inspect(tmp_path / "out")
    assert (again.code, again.generation, again.warnings) == (0, "canonical", "")
    # Read as a hint, no more: a claim against clear values is only reported.
    lying = json.loads((tmp_path / "out" / "config.json").read_text())
    lying["text_config"]["norm_convention"] = "raw"
    (tmp_path / "out" / "config.json").write_text(json.dumps(lying))
    denied = inspect(tmp_path / "out")
    assert (denied.code, denied.generation) == (0, "canonical")
    assert "norm_convention = 'raw'" in denied.warnings


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("by", [0, 1, 2])
def test_c07_a_draft_shard_in_the_folder_changes_nothing_of_the_trunk(index: bool, by: int, tmp_path: Path) -> None:
    made = tiny.make(deep(tiny.SPARSE), vision=False)
    trunk = {n: v for n, v in made.raw.items() if not n.startswith("mtp.")}
    source = tiny.save(tmp_path / "source", trunk, made.config, index=index)
    alone = inspect(source)
    draft = shifted(head_of(made.raw), by, is_head_gain)
    save_file(draft, source / "draft-mtp.safetensors")
    beside = inspect(source)
    assert beside.code == alone.code == 0
    told = "generation", "reasons", "by", "shift", "gains_hold"
    trunks = [found.document["verdicts"]["trunk"] for found in (alone, beside)]
    assert [trunks[0][k] for k in told] == [trunks[1][k] for k in told]
    assert alone.document["plan"]["rules"] == beside.document["plan"]["rules"]


@PER_TEST
@given(seed=CASE, scale=st.sampled_from([1e-4, 0.01, 0.3]), kind=st.sampled_from(["bf16", "f2", "f4"]))
def test_c08_one_is_added_in_float32_and_rounded_once(
    seed: int, scale: float, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dtype = tiny.BF16 if kind == "bf16" else np.dtype(kind)
    made = tiny.make(mtp=False, vision=False, gain_dtype=dtype)
    rng = np.random.default_rng(seed)
    name = "model.language_model.norm.weight"
    made.raw[name] = (rng.standard_normal(24) * scale).astype(np.float32).astype(dtype)
    home = tmp_path_factory.mktemp("c08")
    source = tiny.save(home / "source", made.raw, made.config)
    assert convert(source, home / "out", "--no-verify").code == 0
    got = tiny.load(home / "out")["language_model.model.norm.weight"]
    exact = made.raw[name].astype(np.float64) + 1  # no sum of these needs more bits than float64 has
    if dtype == np.dtype("f4"):
        np.testing.assert_array_equal(got, exact.astype(np.float32))
        return
    # Of the two neighbours in the dtype none lies nearer to the exact sum.
    if dtype == np.dtype("f2"):
        step = np.abs(np.nextafter(got, np.array(9, dtype)).astype(np.float64) - got.astype(np.float64))
    else:
        step = np.abs(np.spacing(got.astype(np.float32))).astype(np.float64) * 2**16
    assert (np.abs(got.astype(np.float64) - exact) <= step / 2).all()
    kept = convert(source, home / "exact", "--no-verify", "--norm-dtype", "float32")
    assert kept.code == 0
    wide = tiny.load(home / "exact")["language_model.model.norm.weight"]
    np.testing.assert_array_equal(wide, exact.astype(np.float32))


@pytest.mark.parametrize(("by", "told"), [(-1, "zero-centred"), (1, "someone shifted"), (-0.87 - 0.13, "zero-centred")])
@pytest.mark.parametrize("canonical", [True, False])
def test_c10_a_gated_norm_near_0_or_2_stops(by: float, told: str, canonical: bool, tmp_path: Path) -> None:
    made = tiny.make(mtp=False, vision=False)
    tensors = made.canonical if canonical else made.raw
    tensors = shifted(tensors, by, lambda n: n.endswith("linear_attn.norm.weight"))
    source = tiny.save(tmp_path / "source", tensors, made.config)
    found = inspect(source)
    assert (found.code, found.generation) == (1, "unknown")
    refused(convert(source, tmp_path / "out"), 1, told)


def test_c10_one_gated_norm_among_others_that_was_shifted_stops(tmp_path: Path) -> None:
    made = tiny.make(deep(tiny.SMALL), mtp=False, vision=False)
    tensors = shifted(made.raw, 1, lambda n: n.endswith("layers.5.linear_attn.norm.weight"))
    found = inspect(tiny.save(tmp_path / "source", tensors, made.config))
    assert (found.code, found.generation) == (1, "unknown")


@PER_TEST
@given(seed=CASE, far=st.floats(0.5, 4))
def test_c11_sums_that_were_rounded_are_right_though_they_differ_by_more_than_one(
    seed: int, far: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = tiny.make(deep(tiny.SMALL), mtp=False, vision=False, seed=seed % 997)
    rng = np.random.default_rng(seed)
    raw = dict(made.raw)
    for name in (n for n in raw if is_trunk_gain(n)):  # a few entries far out: their sums lose bits
        far_out = rng.random(raw[name].shape) < 0.05
        raw[name] = np.where(far_out, np.array(far + rng.random(), tiny.BF16), raw[name]).astype(tiny.BF16)
    home = tmp_path_factory.mktemp("c11")
    source = tiny.save(home / "source", raw, made.config)
    assert convert(source, home / "out", "--no-verify").code == 0
    stored = raw["model.language_model.norm.weight"].astype(np.float64)
    got = tiny.load(home / "out")["language_model.model.norm.weight"].astype(np.float64)
    assert np.abs(got - stored - 1).max() < 0.02
    found = inspect(home / "out")
    assert (found.code, found.generation) == (0, "canonical")
    assert qwen35("verify", home / "out", "--source", source, "--json").document["passed"] is True


@PER_TEST
@given(seed=CASE, low=st.floats(0.3, 1.0), high=st.floats(1.0, 1.7))
def test_c13_gains_that_a_smoothing_quantiser_divided_are_never_shifted(
    seed: int, low: float, high: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = tiny.make(deep(tiny.SMALL), mtp=False, vision=False, seed=seed % 997)
    rng = np.random.default_rng(seed)
    tensors = {
        n: (v.astype(np.float32) / rng.uniform(low, high)).astype(ml_dtypes.bfloat16) if is_trunk_gain(n) else v
        for n, v in made.canonical.items()
    }
    found = inspect(tiny.save(tmp_path_factory.mktemp("c13") / "s", tensors, made.config))
    plan = found.document["plan"]
    assert plan is None or plan["gain_shift"] == 0
