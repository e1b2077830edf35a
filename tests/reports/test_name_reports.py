"""Field reports on draft heads and their config (D), names, vision and text-only exports (E), expert layouts (F)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized
import tiny
from field import (
    CANONICAL_HEAD,
    config_of,
    convert,
    converted,
    head_of,
    inspect,
    is_head_gain,
    is_trunk_gain,
    qwen35,
    refused,
    renamed,
    shifted,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

FEW = settings(max_examples=20, deadline=None)
INDEX = "model.safetensors.index.json"
OUTER = "model.language_model."
MANY = replace(tiny.SPARSE, experts=12)


def index_of(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def headless(tensors: tiny.Tensors) -> tiny.Tensors:
    return {name: value for name, value in tensors.items() if "mtp." not in name}


def edited(config: dict[str, Any], **text: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(config))
    found["text_config"] |= text
    return found


# --- D: draft heads and their config ---------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["mtp.safetensors", "mtp/model.safetensors", "extra/heads.safetensors"])
def test_d01_a_file_with_a_head_that_the_index_lacks_is_listed_as_a_sidecar(file: str, tmp_path: Path) -> None:
    made = tiny.make()
    source = tiny.save(tmp_path / "source", headless(made.raw), made.config)
    (source / file).parent.mkdir(exist_ok=True)
    save_file(head_of(made.raw), source / file)
    (source / "mtplx_runtime.json").write_text("{}")
    found = inspect(source)
    assert found.code == 0
    assert found.document["checkpoint"]["sidecars"] == [file]
    assert found.document["verdicts"]["sidecars"][file]["generation"] == "raw"
    assert {"mtp-sidecar", "mtp-declared"} <= found.codes
    assert convert(source, tmp_path / "out").code == 0
    assert not [f for f in (tmp_path / "out").rglob("*.safetensors") if "mtp" in str(f.relative_to(tmp_path / "out"))]


@pytest.mark.parametrize("file", ["mtp.safetensors", "heads-00001.safetensors", "layers-mtp.safetensors"])
def test_d02_a_head_is_found_by_the_index_whatever_its_file_is_called(file: str, tmp_path: Path) -> None:
    made = tiny.make(tiny.SPARSE, experts="single")
    source = tiny.save(tmp_path / "source", headless(made.raw), made.config)
    head = head_of(made.raw)
    save_file(head, source / file)
    weight_map = index_of(source) | dict.fromkeys(head, file)
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    found = inspect(source)
    assert (found.code, found.head) == (0, "raw")
    assert convert(source, tmp_path / "out", "--mtp", "keep").code == 0
    assert {f.name for f in (tmp_path / "out").glob("*.safetensors")} == set(index_of(tmp_path / "out").values())
    assert all(f.name.startswith("model-") for f in (tmp_path / "out").glob("*.safetensors"))
    assert sum(name.startswith(CANONICAL_HEAD) for name in tiny.load(tmp_path / "out")) == len(head) + 1


@pytest.mark.parametrize("count", [None, 0, 1, 2])
@pytest.mark.parametrize("level", ["text", "top", "both"])
@pytest.mark.parametrize("key", ["mtp_num_hidden_layers", "num_nextn_predict_layers"])
@pytest.mark.parametrize("stored", [True, False])
def test_d04_d05_d07_d08_the_result_promises_no_head_in_so_many_words(
    count: int | None, level: str, key: str, stored: bool, tmp_path: Path
) -> None:
    made = tiny.make(vision=False, mtp=stored)
    config = edited(made.config)
    config["text_config"].pop("mtp_num_hidden_layers", None)
    if count is not None:
        for entries in {"text": [config["text_config"]], "top": [config],
                        "both": [config, config["text_config"]]}[level]:  # fmt: skip
            entries[key] = count
    source = tiny.save(tmp_path / "source", made.raw, config)
    found = inspect(source)
    assert ("mtp-declared" in found.codes) == (bool(count) and not stored)
    assert convert(source, tmp_path / "out", "--no-verify").code == 0
    written = config_of(tmp_path / "out")
    assert written["text_config"]["mtp_num_hidden_layers"] == 0
    assert not [entries[k] for entries in (written, written["text_config"]) for k in ("mtp_num_hidden_layers", key)
                if entries.get(k)]  # fmt: skip


@pytest.mark.parametrize("form", ["fused", "single", "pairs"])
@pytest.mark.parametrize("how", ["keep", "sidecar"])
def test_d10_experts_of_a_head_may_be_fused_or_single(form: str, how: str, tmp_path: Path) -> None:
    made = tiny.make(MANY, experts="fused")
    tensors = dict(made.raw)
    stem = "mtp.layers.0.mlp.experts."
    fused, down = tensors.pop(f"{stem}gate_up_proj"), tensors.pop(f"{stem}down_proj")
    size = MANY.expert_size
    if form == "fused":
        tensors |= {f"{stem}gate_up_proj": fused, f"{stem}down_proj": down}
    for e in range(MANY.experts) if form != "fused" else ():
        tensors[f"{stem}{e}.down_proj.weight"] = down[e]
        if form == "pairs":
            tensors[f"{stem}{e}.gate_up_proj.weight"] = fused[e]
        else:
            tensors[f"{stem}{e}.gate_proj.weight"] = fused[e, :size]
            tensors[f"{stem}{e}.up_proj.weight"] = fused[e, size:]
    source = tiny.save(tmp_path / "source", tensors, made.config)
    assert convert(source, tmp_path / "out", "--mtp", how).code == 0
    got = tiny.load(tmp_path / ("out" if how == "keep" else "out-mtp"))
    prefix = CANONICAL_HEAD if how == "keep" else "mtp."
    for name, want in (("gate", fused[:, :size]), ("up", fused[:, size:]), ("down", down)):
        np.testing.assert_array_equal(got[f"{prefix}layers.0.mlp.switch_mlp.{name}_proj.weight"], want)


def test_d11_a_head_that_is_declared_but_missing_is_said_in_the_plan(tmp_path: Path) -> None:
    made = tiny.make()
    source = tiny.save(tmp_path / "source", headless(made.raw), made.config)
    told = "config.json promises a draft head (mtp), but no tensor of one is stored"
    assert told in " ".join(qwen35("inspect", source).out.split())
    assert told in " ".join(qwen35("convert", source, tmp_path / "out", "--dry-run").out.split())


# --- E: names, vision, text-only -------------------------------------------------------------------------------------

VISION = [
    "model.language_model.visual.",
    "model.visual.",
    "visual.",
    "vision_tower.",
    "model.vision_tower.",
    "language_model.vision_tower.",
    "model.language_model.vision_tower.",
    "language_model.model.visual.",
    "language_model.visual.",
]


@pytest.mark.parametrize("prefix", VISION)
@pytest.mark.parametrize("canonical", [False, True])
def test_e01_e07_e08_e10_vision_is_vision_under_every_prefix(prefix: str, canonical: bool, tmp_path: Path) -> None:
    made = tiny.make(replace(tiny.SMALL, hidden=64, layers=8), mtp=False)
    trunk = made.canonical if canonical else {n: v for n, v in made.raw.items() if "visual" not in n}
    tower = {n.replace("model.visual.", prefix): v for n, v in made.raw.items() if "visual" in n}
    assert len(tower) == 2
    source = tiny.save(tmp_path / "source", {**trunk, **tower}, made.config)
    found = inspect(source)
    assert found.code == 0
    assert found.generation == ("canonical" if canonical else "raw")
    assert convert(source, tmp_path / "out").code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)
    assert "vision_config" not in config_of(tmp_path / "out")
    assert convert(source, tmp_path / "seeing", "--keep-vision").code == 0
    kept = {n for n in tiny.load(tmp_path / "seeing") if not n.startswith("language_model.")}
    assert kept == {"vision_tower.patch_embed.proj.weight", "vision_tower.blocks.0.norm1.weight"}


@pytest.mark.parametrize("times", [2, 3, 5])
@pytest.mark.parametrize("first", ["model.", ""])
def test_e02_a_stacked_prefix_is_collapsed_and_reported(times: int, first: str, tmp_path: Path) -> None:
    made = tiny.make()
    stacked = first + "language_model." * times + ("" if first else "model.")
    tensors = renamed(made.raw, lambda n: n.replace(OUTER, stacked))
    source = tiny.save(tmp_path / "source", tensors, made.config)
    found = inspect(source)
    assert found.code == 0
    assert "stacked-prefix" in found.codes
    assert convert(source, tmp_path / "out").code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)


@FEW
@given(
    architecture=st.sampled_from(
        ["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Anything", None]
    ),
    model_type=st.sampled_from(["qwen3_5", "qwen3_5_text", None]),
    text_type=st.sampled_from(["qwen3_5", "qwen3_5_text", None]),
    nested=st.booleans(),
    prefix=st.sampled_from(["model.language_model.", "model.", "language_model.model.", "language_model.", ""]),
)
def test_e04_e05_names_model_type_and_architecture_are_independent(
    architecture: str | None, model_type: str | None, text_type: str | None, nested: bool, prefix: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    if (model_type if not nested else model_type or text_type) is None:
        return
    made = tiny.make(vision=False, mtp=False, text_only=not nested)
    config = json.loads(json.dumps(made.config))
    config["architectures"] = [architecture]
    config["model_type"] = model_type
    if nested:
        config["text_config"]["model_type"] = text_type
    tensors = renamed(made.canonical, lambda n: n.replace("language_model.model.", prefix))
    tensors = {n: np.moveaxis(v, 1, 2) if n.endswith("conv1d.weight") else v for n, v in tensors.items()}
    home = tmp_path_factory.mktemp("e04")
    source = tiny.save(home / "source", shifted(tensors, -1), config)
    found = inspect(source)
    assert (found.code, found.generation) == (0, "raw"), found.err
    assert convert(source, home / "out", "--no-verify").code == 0
    written = config_of(home / "out")
    assert written["architectures"] == [architecture]
    assert (written["model_type"], written["text_config"]["model_type"]) == ("qwen3_5", "qwen3_5_text")
    assert sorted(tiny.load(home / "out")) == sorted(made.canonical)


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_5_moe_text"])
@pytest.mark.parametrize("nested", [True, False])
def test_e05_sparse_types_are_known_too(kind: str, nested: bool, tmp_path: Path) -> None:
    made = tiny.make(tiny.SPARSE, text_only=not nested, vision=False)
    source = tiny.save(tmp_path / "source", made.raw, made.config | {"model_type": kind})
    assert inspect(source).code == 0


def test_e11_the_4b_has_426_297_and_15_tensors(tmp_path: Path) -> None:
    made = tiny.make(tiny.with_layers(32), tied=True)
    tensors = {n: v for n, v in made.raw.items() if "visual" not in n}
    tensors |= {f"model.visual.blocks.{i // 12}.part{i % 12}.weight": np.ones(7, tiny.BF16) for i in range(288)}
    tensors |= {f"model.visual.merger.part{i}.weight": np.ones(7, tiny.BF16) for i in range(9)}
    source = tiny.save(tmp_path / "source", tensors, made.config, n_shards=2)
    found = inspect(source, "--tensors")
    assert found.code == 0
    assert len(tensors) == found.document["checkpoint"]["n_tensors"] == 738
    assert len(found.document["plan"]["writes"]) == 426
    reasons = [skip["reason"] for skip in found.document["plan"]["skips"]]
    assert sorted(reasons.count(reason) for reason in set(reasons)) == [15, 297]
    screen = " ".join(qwen35("inspect", source).out.split())
    assert "738 tensors: text model 426, vision tower 297, draft head (mtp) 15" in screen


@pytest.mark.parametrize("flag", [True, False])
def test_e13_a_config_that_speaks_of_two_modalities_may_have_text_alone(flag: bool, tmp_path: Path) -> None:
    made = tiny.make(vision=False)
    config = made.config | {"language_model_only": flag, "vision_config": {"depth": 2}, "image_token_id": 7}
    source = tiny.save(tmp_path / "source", made.raw, config)
    assert convert(source, tmp_path / "out").code == 0
    written = config_of(tmp_path / "out")
    assert not {"vision_config", "image_token_id"} & set(written)
    assert "vision-declared" in inspect(source, "--keep-vision").codes


@pytest.mark.parametrize("sizes", [tiny.SMALL, tiny.SPARSE], ids=["dense", "moe"])
def test_e14_a_flat_config_is_read_and_written_nested(sizes: tiny.Sizes, tmp_path: Path) -> None:
    made = tiny.make(sizes, text_only=True, vision=False)
    assert "text_config" not in made.config
    assert convert(tiny.save(tmp_path / "source", made.raw, made.config), tmp_path / "out").code == 0
    written = config_of(tmp_path / "out")
    for key, value in made.config.items():
        if key not in ("architectures", "model_type", "mtp_num_hidden_layers", "tie_word_embeddings"):
            assert written["text_config"][key] == value, key
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)


UNKNOWN = [
    f"{OUTER}layers.0.mlp.adapter.weight",
    f"{OUTER}layers.1.linear_attn.in_proj_qkvz.weight",
    "score.weight",
    "value_head.summary.bias",
    f"{OUTER}layers.x.input_layernorm.weight",
    "transformer.h.0.attn.weight",
]


def test_e16_unknown_names_are_listed_in_full_and_stop(tmp_path: Path) -> None:
    made = tiny.make()
    tensors = dict(made.raw) | {name: np.ones((3, 5), tiny.BF16) for name in UNKNOWN}
    source = tiny.save(tmp_path / "source", tensors, made.config)
    for name in UNKNOWN:
        one = tiny.save(tmp_path / name, dict(made.raw) | {name: np.ones(3, tiny.BF16)}, made.config)
        refused(convert(one, tmp_path / "out"), 1, "1 of ", "names that no rule knows", name)
    found = inspect(source, "--tensors")
    assert found.code == 1
    unnamed = {tensor["name"] for tensor in found.document["tensors"] if not tensor["is_named"]}
    assert unnamed == set(UNKNOWN)
    listed = "".join(qwen35("inspect", source, "--tensors").out.split())
    assert all(name in listed for name in UNKNOWN)
    assert not (tmp_path / "out").exists()


WRAPPERS: dict[str, Callable[[str], str]] = {
    "compiled": lambda n: f"_orig_mod.{n}",
    "compiled inside": lambda n: n.replace(OUTER, "model._orig_mod.language_model."),
    "sharded": lambda n: n.replace(".mlp", "._fsdp_wrapped_module.mlp"),
    "checkpointed": lambda n: n.replace(".linear_attn", "._checkpoint_wrapped_module.linear_attn"),
    "float32 decay": lambda n: n.replace("linear_attn.A_log", "linear_attn._fp32_params.A_log"),
    "data parallel": lambda n: f"module.{n}",
    "data parallel twice": lambda n: f"module.module.{n}",
    "fabric": lambda n: f"_forward_module.{n}",
    "all at once": lambda n: f"module._orig_mod._fsdp_wrapped_module.{n}".replace(
        ".linear_attn", "._checkpoint_wrapped_module._orig_mod.linear_attn"
    ),
    "at the end": lambda n: n.replace("embed_tokens.weight", "embed_tokens._orig_mod.weight"),
}  # fmt: skip


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_e17_e19_e20_wrappers_in_names_are_stripped_and_counted(wrap: Callable[[str], str], tmp_path: Path) -> None:
    made = tiny.make(tiny.SPARSE)
    tensors = renamed(made.raw, wrap)
    n_wrapped = sum(wrap(name) != name for name in made.raw)
    assert n_wrapped
    source = tiny.save(tmp_path / "source", tensors, made.config)
    found = inspect(source)
    assert (found.code, found.generation) == (0, "raw"), found.err
    finding = next(f for f in found.document["findings"] if f["code"] == "wrapped-names")
    assert finding["text"].startswith(f"{n_wrapped} names ")
    assert convert(source, tmp_path / "out").code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)


def test_e20_a_wrapped_copy_beside_the_plain_one_is_no_silent_choice(tmp_path: Path) -> None:
    made = tiny.make(vision=False, mtp=False)
    name = f"{OUTER}layers.0.mlp.up_proj.weight"
    tensors = dict(made.raw) | {f"_orig_mod.{name}": made.raw[name] * 2}
    refused(convert(tiny.save(tmp_path / "source", tensors, made.config), tmp_path / "out"), 1, "two sources", name)


def raw_file(tensors: tiny.Tensors, extra: dict[str, dict[str, Any]]) -> bytes:
    """A safetensors file with header entries of no bytes that the library would not write."""
    header, data = {}, b""
    for name, value in tensors.items():
        raw = np.ascontiguousarray(value).tobytes()
        kind = {"bfloat16": "BF16", "float32": "F32"}[str(value.dtype)]
        header[name] = {"dtype": kind, "shape": value.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    header |= {name: {"data_offsets": [len(data), len(data)], **entry} for name, entry in extra.items()}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("entry", "code", "told"),
    [
        ({"dtype": "", "shape": [0]}, 3, "unknown dtype ''"),
        ({"dtype": "", "shape": []}, 3, "unknown dtype ''"),
        ({"dtype": None, "shape": [0]}, 3, "unknown dtype 'None'"),
        ({"dtype": "F32", "shape": [0]}, 1, "no elements"),
        ({"dtype": "BF16", "shape": [0, 24]}, 1, "no elements"),
    ],
)
@pytest.mark.parametrize("wrapper", ["._fp32_params", ""])
def test_e17_a_stub_without_bytes_is_named(
    entry: dict[str, Any], code: int, told: str, wrapper: str, tmp_path: Path
) -> None:
    made = tiny.make(vision=False, mtp=False)
    stub = f"{OUTER}layers.0.linear_attn{wrapper}.A_log"
    tensors = {n: v for n, v in made.raw.items() if n != f"{OUTER}layers.0.linear_attn.A_log"}
    source = tiny.save(tmp_path / "source", {}, made.config, n_shards=0, index=False)
    (source / "model.safetensors").write_bytes(raw_file(tensors, {stub: entry}))
    refused(convert(source, tmp_path / "out"), code, "model.safetensors", stub, told)


def test_e22_the_layout_is_stated(tmp_path: Path) -> None:
    made = tiny.make()
    raw = inspect(tiny.save(tmp_path / "raw", made.raw, made.config))
    canonical = inspect(tiny.save(tmp_path / "canonical", converted(made), made.config))
    assert raw.document["verdicts"]["trunk"]["facts"] == {
        "naming": "raw", "conv": "[C, 1, K]", "has_mtp": True, "metadata_format": "pt", "markers": [],
    }  # fmt: skip
    assert canonical.document["verdicts"]["trunk"]["facts"]["naming"] == "canonical"
    assert "raw names, conv [C, 1, K]" in qwen35("inspect", tmp_path / "raw").out
    assert "canonical names, conv [C, K, 1]" in qwen35("inspect", tmp_path / "canonical").out


# --- F: expert layouts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["single", "pairs"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_f01_f04_experts_one_by_one_are_stacked_by_number(form: str, seed: int, tmp_path: Path) -> None:
    made = tiny.make(MANY, experts=form)  # twelve: 10 and 11 come before 2 where names are sorted
    source = tiny.save(tmp_path / "source", made.raw, made.config, n_shards=3, seed=seed)
    assert inspect(source).code == 0
    assert convert(source, tmp_path / "out").code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)


def test_f01_experts_one_by_one_in_fp8_are_stacked_with_their_scales_if_asked(tmp_path: Path) -> None:
    block = (8, 10)
    made = tiny.make(MANY, experts="single")
    tensors = quantized.coded(made.raw, block)
    plain = tiny.save(tmp_path / "plain", quantized.decoded(tensors, block), made.config)
    source = tiny.save(tmp_path / "source", tensors, quantized.config_of(made.config, block), n_shards=3, seed=2)
    n = sum(name.endswith("_scale_inv") for name in tensors)
    refused(convert(source, tmp_path / "out"), 1, f"{n} modules", "--dequantize")
    assert not (tmp_path / "out").exists()
    assert convert(plain, tmp_path / "wanted").code == 0
    assert convert(source, tmp_path / "out", "--dequantize").code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), tiny.load(tmp_path / "wanted"))


def test_f02_a_fused_tensor_is_split_by_its_byte_ranges(tmp_path: Path) -> None:
    from qwen35conv import make_plan, open_source, read_checkpoint

    made = tiny.make(MANY, vision=False, mtp=False)
    source = tiny.save(tmp_path / "source", made.raw, made.config)
    plan = make_plan(read_checkpoint(open_source(str(source))))
    halves = [w for w in plan.writes() if w.name.endswith(("switch_mlp.gate_proj.weight", "switch_mlp.up_proj.weight"))]
    assert len(halves) == 2 * MANY.layers
    n_half = MANY.expert_size * MANY.hidden * 2
    for write in halves:
        assert write.fix.value == "none"
        assert [piece.n_bytes for piece in write.pieces] == [n_half] * MANY.experts


@pytest.mark.parametrize(
    ("name", "axes"),
    [("gate_up_proj", (0, 2, 1)), ("down_proj", (0, 2, 1)), ("gate_up_proj", (1, 0, 2)), ("down_proj", (2, 1, 0))],
)
@pytest.mark.parametrize("where", [OUTER, "mtp."])
def test_f05_swapped_axes_of_fused_experts_are_refused_by_name(
    name: str, axes: tuple[int, ...], where: str, tmp_path: Path
) -> None:
    made = tiny.make(tiny.SPARSE)
    stored = f"{where}layers.0.mlp.experts.{name}"
    swapped = dict(made.raw) | {stored: np.ascontiguousarray(made.raw[stored].transpose(axes))}
    source = tiny.save(tmp_path / "source", swapped, made.config)
    run = convert(source, tmp_path / "out", "--mtp", "sidecar")
    refused(run, 1, stored, str(list(swapped[stored].shape)))


def test_f05_an_adapter_is_refused_before_anything_is_split(tmp_path: Path) -> None:
    made = tiny.make(tiny.SPARSE)
    lora = {
        f"base_model.model.{OUTER}layers.0.mlp.experts.{side}.weight": np.ones((3, 5), tiny.BF16)
        for side in ("lora_A", "lora_B", "base_layer.lora_A.default")
    }
    refused(qwen35("inspect", tiny.save(tmp_path / "alone", lora, made.config)), 1, "adapter", "merge")
    refused(qwen35("inspect", tiny.save(tmp_path / "both", {**made.raw, **lora}, made.config)), 1, "adapter", "merge")


@pytest.mark.parametrize("rows", ["thirds", "swapped parts", "too few"])
def test_f07_the_fused_projection_has_the_rows_that_config_implies(rows: str, tmp_path: Path) -> None:
    made = tiny.make(tied=True, vision=False, mtp=False)
    name = f"{OUTER}layers.0.linear_attn.in_proj_qkv.weight"
    value = made.raw[name]
    sizes = tiny.SMALL
    n_rows = {
        "thirds": 3 * sizes.key_heads * sizes.key_dim,
        "swapped parts": 2 * sizes.value_heads * sizes.value_dim + sizes.key_heads * sizes.key_dim,
        "too few": len(value) - 1,
    }[rows]
    tensors = dict(made.raw) | {name: np.resize(value, (n_rows, value.shape[1]))}
    source = tiny.save(tmp_path / "source", tensors, made.config)
    refused(convert(source, tmp_path / "out"), 1, "in_proj_qkv.weight", f"expected [{sizes.conv}, {sizes.hidden}]")


def test_f07_a_tied_model_lacks_a_head_by_right(tmp_path: Path) -> None:
    made = tiny.make(tied=True)
    source = tiny.save(tmp_path / "source", made.raw, made.config)
    assert convert(source, tmp_path / "out").code == 0
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is True
    assert not any(is_trunk_gain(n) and is_head_gain(n) for n in made.raw)
