"""Field reports on FP8, foreign schemes and MLX-packed weights (G), tied heads (H), dtypes (I), the gated delta net
(J), config (P) and architectures outside of the family (Q).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import quantized
import tiny
from field import config_of, convert, inspect, is_trunk_gain, packed, qwen35, refused, shifted
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from test_scheme import PROJS, SCHEMES
from test_scheme import saved as scheme_saved

from qwen35conv.kernels.reference import gated_delta

FEW = settings(max_examples=15, deadline=None)
OUTER = "model.language_model."
INNER = "language_model.model."
WIDE = tiny.Sizes(hidden=64, vocab=50, intermediate=96, layers=8, value_dim=16)
ENTRY = {"group_size": 32, "bits": 4, "mode": "affine"}


def is_packable(name: str) -> bool:
    return "layers." in name and "_proj" in name and "mtp." not in name


def edited(config: dict[str, Any], **text: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(config))
    found["text_config"] |= text
    return found


# --- G: FP8 and other schemes ----------------------------------------------------------------------------------------

BLOCK = (8, 10)


def coded(folder: Path, change: Callable[[str], bool] = lambda name: True, **kinds: Any) -> tuple[Path, tiny.Tensors]:
    """An FP8 checkpoint of the tensors that `change` keeps, and the canonical tensors that the whole stands for."""
    made = tiny.make(vision=False, mtp=False, **kinds)
    tensors = quantized.coded(made.raw, BLOCK)
    plain = tiny.save(folder / "plain", quantized.decoded(tensors, BLOCK), made.config)
    assert convert(plain, folder / "wanted").code == 0
    kept = {name: value for name, value in tensors.items() if change(name)}
    return tiny.save(folder / "source", kept, quantized.config_of(made.config, BLOCK)), tiny.load(folder / "wanted")


def test_g01_fp8_is_refused_with_its_count_and_names_or_dequantised_when_asked(tmp_path: Path) -> None:
    source, wanted = coded(tmp_path)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    n = sum(name.endswith("_scale_inv") for name in index["weight_map"])
    refused(convert(source, tmp_path / "out"), 1, f"FP8 in blocks: {n} modules", f"({OUTER}layers.0.", "--dequantize")
    assert not (tmp_path / "out").exists()
    assert inspect(source).code == 1
    assert convert(source, tmp_path / "out", "--dequantize").code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), wanted)
    assert "quantization_config" not in config_of(tmp_path / "out")


@pytest.mark.parametrize("lost", ["gate_proj.weight_scale_inv", "gate_proj.weight"])
def test_g02_g04_a_scale_and_its_weight_are_a_pair(lost: str, tmp_path: Path) -> None:
    source, _ = coded(tmp_path, lambda name: not name.endswith(lost))
    assert convert(source, tmp_path / "out").code == 1
    refused(convert(source, tmp_path / "out", "--dequantize"), 1, "gate_proj")
    assert not (tmp_path / "out").exists()


def test_g05_each_of_two_schemes_is_named(tmp_path: Path) -> None:
    made = tiny.make(vision=False, mtp=False)
    row, four = (f"{OUTER}layers.{i}.mlp.down_proj" for i in (0, 3))
    tensors = {name: value for name, value in made.raw.items() if name not in (f"{row}.weight", f"{four}.weight")}
    codes = np.zeros((24, 40), quantized.E4M3)
    tensors |= {f"{row}.weight": codes, f"{row}.weight_scale": np.ones((24, 1), tiny.BF16)}
    tensors |= {
        f"{four}.weight_packed": np.zeros((24, 20), "u1"),
        f"{four}.weight_scale": np.ones((24, 3), quantized.E4M3),
        f"{four}.weight_global_scale": np.ones(1, "f4"),
    }
    groups = {
        "group_0": {"targets": ["re:.*layers.*proj"], "weights": {"num_bits": 8, "strategy": "channel"}},
        "group_1": {"targets": ["re:.*layers.3.*proj"], "weights": {"num_bits": 4, "strategy": "tensor_group"}},
    }
    entry = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    source = tiny.save(tmp_path / "source", tensors, made.config | {"quantization_config": entry})
    named = ("FP8 (one scale a tensor or row): 1 modules", "NVFP4 (compressed-tensors): 1 modules")
    refused(convert(source, tmp_path / "out"), 1, *named, row, four)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("exporter", "name"),
    [
        ("NVFP4, compressed-tensors", "NVFP4 (compressed-tensors)"),
        ("NVFP4, ModelOpt", "NVFP4 (ModelOpt)"),
        ("AWQ", "AWQ"),
    ],
)
def test_g07_g08_g13_a_foreign_scheme_is_named_with_what_to_download_instead(
    exporter: str, name: str, tmp_path: Path
) -> None:
    tails, entry, *_ = SCHEMES[exporter]
    source = scheme_saved(tmp_path / "source", tails, entry)
    told = inspect(source)
    assert told.code == 1
    assert [(scheme["name"], scheme["n_modules"]) for scheme in told.document["schemes"]] == [(name, len(PROJS))]
    run = convert(source, tmp_path / "out")
    refused(run, 1, f"{name}: {len(PROJS)} modules", "download the BF16 release", "quantised for MLX")
    assert "unknown" not in run.err
    assert not (tmp_path / "out").exists()


# --- G: weights packed by MLX ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
@pytest.mark.parametrize("scales", [tiny.BF16, np.dtype("f2")], ids=str)
@pytest.mark.parametrize("prefix", [OUTER, "model.", INNER])
def test_g10_g11_settings_of_modules_are_renamed_with_the_tensors(
    key: str, scales: Any, prefix: str, tmp_path: Path
) -> None:
    made = tiny.make(WIDE, vision=False, mtp=False)
    wide = {n for n in made.raw if is_packable(n) and ("down_proj" in n or "o_proj" in n)}
    tensors = packed(made.raw, lambda n: is_packable(n) and n not in wide, scales=scales)
    tensors = packed(tensors, lambda n: n in wide, bits=8, scales=scales)
    eights = {
        n.removesuffix(".scales") for n in tensors if n.endswith(".scales") and n.replace("scales", "weight") in wide
    }
    assert eights
    entry = ENTRY | {n.replace(OUTER, prefix): {"group_size": 32, "bits": 8} for n in eights}
    tensors = {n.replace(OUTER, prefix): v for n, v in tensors.items()}
    source = tiny.save(tmp_path / "source", tensors, made.config | {key: entry})
    assert inspect(source).code == 0
    assert convert(source, tmp_path / "out").code == 0
    written = config_of(tmp_path / "out")
    assert written["quantization"] == written["quantization_config"]
    own = {name: value for name, value in written["quantization"].items() if isinstance(value, dict)}
    assert own == {n.replace(OUTER, INNER): {"group_size": 32, "bits": 8} for n in eights}
    got = tiny.load(tmp_path / "out")
    for name, value in tensors.items():
        if name.endswith((".scales", ".biases")) or value.dtype == np.uint32:
            np.testing.assert_array_equal(got[name.replace(prefix, INNER)], value)


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
@pytest.mark.parametrize("level", ["top", "text"])
def test_g14_plain_weights_under_a_config_of_4_bits_lose_the_claim(key: str, level: str, tmp_path: Path) -> None:
    made = tiny.make()
    entry = ENTRY | {f"{OUTER}layers.0.mlp.up_proj": {"bits": 8, "group_size": 64}}
    config = made.config | {key: entry} if level == "top" else edited(made.config, **{key: entry})
    source = tiny.save(tmp_path / "source", made.raw, config)
    assert convert(source, tmp_path / "out").code == 0
    written = config_of(tmp_path / "out")
    for entries in (written, written["text_config"]):
        assert not {"quantization", "quantization_config"} & set(entries)


@pytest.mark.parametrize("part", ["scales", "biases"])
def test_g14_packed_weights_without_their_scales_stop(part: str, tmp_path: Path) -> None:
    made = tiny.make(WIDE, vision=False, mtp=False)
    tensors = packed(made.raw, is_packable)
    lost = f"{OUTER}layers.1.mlp.up_proj"
    del tensors[f"{lost}.{part}"]
    source = tiny.save(tmp_path / "source", tensors, made.config | {"quantization": ENTRY})
    refused(convert(source, tmp_path / "out"), 1, lost.replace(OUTER, INNER), f"its {part} are gone")
    assert not (tmp_path / "out").exists()


def test_g14_packed_weights_under_a_config_that_speaks_of_none_stop(tmp_path: Path) -> None:
    made = tiny.make(WIDE, vision=False, mtp=False)
    source = tiny.save(tmp_path / "source", packed(made.raw, is_packable), made.config)
    refused(convert(source, tmp_path / "out"), 1, "packed", "quantization")


@pytest.mark.parametrize("plain", ["mlp.gate.weight", "shared_expert_gate.weight", "shared_expert.up_proj.weight"])
@pytest.mark.parametrize("said", [True, False])
def test_g16_modules_of_one_build_need_not_share_one_state(plain: str, said: bool, tmp_path: Path) -> None:
    sizes = replace(WIDE, experts=5, expert_size=32, shared_size=96)
    made = tiny.make(sizes, vision=False, mtp=False)
    tensors = packed(
        made.canonical, lambda n: ("_proj" in n or "gate" in n) and "layers" in n and not n.endswith(plain)
    )
    entry = ENTRY | ({n.removesuffix(".weight"): False for n in tensors if n.endswith(plain)} if said else {})
    source = tiny.save(tmp_path / "source", tensors, made.config | {"quantization": entry})
    assert inspect(source).code == 0
    assert convert(source, tmp_path / "out").code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), tensors)


@pytest.mark.parametrize("lost", ["linear_attn.out_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_g17_what_a_packed_build_lacks_is_named_before_anything_is_written(lost: str, tmp_path: Path) -> None:
    made = tiny.make(WIDE, vision=False, mtp=False)
    tensors = {n: v for n, v in packed(made.canonical, is_packable).items() if f".{lost}." not in n}
    source = tiny.save(tmp_path / "source", tensors, made.config | {"quantization": ENTRY})
    refused(convert(source, tmp_path / "out"), 1, "tensors that config.json implies are missing", f"{lost}.weight")
    assert not list(tmp_path.glob("out*"))


# --- H: tied embeddings and the head ---------------------------------------------------------------------------------


def test_h01_an_untied_models_head_is_kept(tmp_path: Path) -> None:
    made = tiny.make(tied=False)
    assert convert(tiny.save(tmp_path / "source", made.raw, made.config), tmp_path / "out").code == 0
    assert "language_model.lm_head.weight" in tiny.load(tmp_path / "out")
    assert config_of(tmp_path / "out")["text_config"]["tie_word_embeddings"] is False


def test_h02_a_missing_head_is_reported_and_tied_only_if_asked(tmp_path: Path) -> None:
    made = tiny.make(tied=False)
    tensors = {n: v for n, v in made.raw.items() if n != "lm_head.weight"}
    source = tiny.save(tmp_path / "source", tensors, made.config, n_shards=4)
    assert inspect(source).code == 1
    refused(convert(source, tmp_path / "out"), 1, "lm_head.weight is missing", "--tie-embeddings")
    assert convert(source, tmp_path / "out", "--tie-embeddings").code == 0
    written = config_of(tmp_path / "out")
    assert written["tie_word_embeddings"] is written["text_config"]["tie_word_embeddings"] is True


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight"])
def test_h04_an_extra_head_goes_if_it_is_the_embeddings_and_stays_with_a_warning_if_not(
    equal: bool, name: str, tmp_path: Path
) -> None:
    made = tiny.make(tied=True)
    rows = made.raw[f"{OUTER}embed_tokens.weight"]
    extra = rows.copy() if equal else np.roll(rows, 1, axis=0)
    source = tiny.save(tmp_path / "source", dict(made.raw) | {name: extra}, made.config)
    found = inspect(source)
    assert ("tied-head-differs" in found.codes) == (not equal)
    assert convert(source, tmp_path / "out").code == 0
    written, got = config_of(tmp_path / "out"), tiny.load(tmp_path / "out")
    assert written["tie_word_embeddings"] is written["text_config"]["tie_word_embeddings"] is equal
    assert ("language_model.lm_head.weight" in got) == (not equal)


@pytest.mark.parametrize("levels", [("text",), ("top",), ("top", "text"), ()])
@pytest.mark.parametrize("tied", [True, False])
def test_h05_the_flag_is_written_at_both_levels(levels: tuple[str, ...], tied: bool, tmp_path: Path) -> None:
    made = tiny.make(tied=tied)
    config = edited(made.config)
    for name, entries in (("top", config), ("text", config["text_config"])):
        entries.pop("tie_word_embeddings", None)
        if name in levels:
            entries["tie_word_embeddings"] = tied
    source = tiny.save(tmp_path / "source", made.raw, config)
    assert ("tie-inferred" in inspect(source).codes) == (not levels)
    assert convert(source, tmp_path / "out").code == 0
    written = config_of(tmp_path / "out")
    assert written["tie_word_embeddings"] is written["text_config"]["tie_word_embeddings"] is tied


# --- I: dtypes -------------------------------------------------------------------------------------------------------


@FEW
@given(
    decay=st.sampled_from(["bf16", "f4", "f2"]),
    control=st.sampled_from(["bf16", "f4", "f2"]),
    gains=st.sampled_from(["bf16", "f4", "f2"]),
    norm_dtype=st.sampled_from(["source", "float32"]),
)
def test_i01_i02_i05_i07_i08_each_tensor_keeps_its_dtype(
    decay: str, control: str, gains: str, norm_dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kinds = {"bf16": tiny.BF16, "f4": np.dtype("f4"), "f2": np.dtype("f2")}
    made = tiny.make(mtp=False, vision=False, gain_dtype=kinds[gains])
    tensors = {
        n: v.astype(kinds[decay]) if n.endswith("A_log")
        else v.astype(kinds[control]) if n.endswith("linear_attn.norm.weight") else v
        for n, v in made.raw.items()
    }  # fmt: skip
    home = tmp_path_factory.mktemp("i01")
    source = tiny.save(home / "source", tensors, made.config)
    found = inspect(source)
    assert found.code == 0
    assert ("a-log-dtype" in found.codes) == (decay != "f4")
    assert convert(source, home / "out", "--no-verify", "--norm-dtype", norm_dtype).code == 0
    got = tiny.load(home / "out")
    for name, value in tensors.items():
        new = got[name.replace(OUTER, INNER).replace("lm_head", "language_model.lm_head")]
        if is_trunk_gain(name):
            assert new.dtype == (np.dtype("f4") if norm_dtype == "float32" else value.dtype)
        else:
            assert new.dtype == value.dtype, name
            assert new.tobytes() == np.ascontiguousarray(value).tobytes(), name


NOT_FINITE = ["A_log", "dt_bias", "linear_attn.norm.weight", "input_layernorm.weight", "q_norm.weight", "l.norm.weight"]


@pytest.mark.parametrize("suffix", NOT_FINITE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("dtype", [tiny.BF16, np.dtype("f4")], ids=str)
def test_i04_what_is_not_finite_is_found(suffix: str, bad: float, dtype: Any, tmp_path: Path) -> None:
    made = tiny.make(vision=False, mtp=False)
    name = next(n for n in made.raw if n.endswith(suffix))
    value = made.raw[name].astype(dtype)
    value[1] = bad
    source = tiny.save(tmp_path / "source", dict(made.raw) | {name: value}, made.config)
    found = inspect(source)
    if suffix == "A_log" and bad == -np.inf:  # a head that never forgets: odd, and well defined
        assert found.code == 0
        assert "a-log-infinite" in found.codes
        assert convert(source, tmp_path / "out").code == 0
        return
    assert found.code == 1
    refused(convert(source, tmp_path / "out"), 1, "NaN or infinity", name)


# --- J: the gated delta net ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_j01_j02_each_key_head_serves_consecutive_value_heads(ratio: int) -> None:
    rng = np.random.default_rng(ratio)
    b, t, hk, dk, dv = 2, 5, 3, 8, 6
    hv = hk * ratio
    q, k = rng.standard_normal((2, b, t, hk, dk)) * 0.4
    v = rng.standard_normal((b, t, hv, dv))
    decay, beta = rng.uniform(0.3, 0.99, (b, t, hv)), rng.uniform(0.1, 0.9, (b, t, hv))
    state = rng.standard_normal((b, hv, dv, dk)) * 0.3
    arrays = (mx.array(x.astype(np.float32)) for x in (q, k, v, decay, beta, state))
    y, end = gated_delta(*arrays)
    for h in range(hv):
        key_head = h // ratio
        for i in range(b):
            s = state[i, h].copy()
            for j in range(t):
                s *= decay[i, j, h]
                s += np.outer(beta[i, j, h] * (v[i, j, h] - s @ k[i, j, key_head]), k[i, j, key_head])
                np.testing.assert_allclose(np.array(y)[i, j, h], s @ q[i, j, key_head], atol=1e-5)
            np.testing.assert_allclose(np.array(end)[i, h], s, atol=1e-5)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_j02_every_published_ratio_converts_and_runs(ratio: int, tmp_path: Path) -> None:
    made = tiny.make(tiny.Sizes(key_heads=2, value_heads=2 * ratio), vision=False, mtp=False)
    run = convert(tiny.save(tmp_path / "source", made.raw, made.config), tmp_path / "out")
    assert run.code == 0, run.err
    assert {check["name"] for check in run.document["verification"]} >= {"kernel"}


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("linear_num_value_heads", 5, "linear_num_key_heads"),
        ("linear_num_key_heads", 4, "linear_num_key_heads"),
        ("num_key_value_heads", 3, "num_key_value_heads"),
        ("num_attention_heads", 3, "num_key_value_heads"),
    ],
)
def test_j02_heads_that_do_not_divide_are_refused_by_key(key: str, value: int, told: str, tmp_path: Path) -> None:
    made = tiny.make(vision=False, mtp=False)
    source = tiny.save(tmp_path / "source", made.raw, edited(made.config, **{key: value}))
    refused(convert(source, tmp_path / "out"), 1, told, "divide")


@pytest.mark.parametrize("shape", [(60,), (1,), (10, 6), (8,)])
def test_j04_the_gated_norm_is_one_head_wide(shape: tuple[int, ...], tmp_path: Path) -> None:
    made = tiny.make(vision=False, mtp=False)
    names = [n for n in made.raw if n.endswith("linear_attn.norm.weight")]
    tensors = dict(made.raw) | {n: np.full(shape, 0.87, np.float32) for n in names}
    source = tiny.save(tmp_path / "source", tensors, made.config)
    refused(convert(source, tmp_path / "out"), 1, "linear_attn.norm.weight", "expected [10]", str(list(shape)))


@pytest.mark.parametrize("where", ["metadata", "second shard", "config", "name"])
def test_j05_a_file_that_came_through_gguf_is_warned_of(where: str, tmp_path: Path) -> None:
    made = tiny.make(vision=False, mtp=False)
    config = dict(made.config)
    metadata = {"format": "pt"}
    if where == "metadata":
        metadata["general.source"] = "converted from GGUF"
    elif where == "config":
        config["quantization_config"] = {"quant_method": "gguf"}
    elif where == "name":
        config["_name_or_path"] = "someone/Qwen3.5-4B-GGUF"
    source = tiny.save(tmp_path / "source", made.raw, config, metadata=metadata)
    if where == "second shard":
        last = sorted(source.glob("*.safetensors"))[-1]
        save_file(load_file(last), last, {"origin": "gguf-to-safetensors 1.2"})
    found = inspect(source)
    assert found.code == 0
    assert "gguf-origin" in found.codes


# --- P: config, rope, tokenizer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling", "flat"])
@pytest.mark.parametrize("theta", [10_000_000, 5_000_000.0])
def test_p01_theta_is_written_nested_and_beside(place: str, theta: float, tmp_path: Path) -> None:
    made = tiny.make(vision=False, mtp=False)
    config = edited(made.config)
    rope = config["text_config"].pop("rope_parameters") | {"rope_theta": theta}
    if place == "flat":
        config["text_config"] |= {k: v for k, v in rope.items() if k != "rope_type"}
    else:
        config["text_config"][place] = rope
    source = tiny.save(tmp_path / "source", made.raw, config)
    assert "rope-theta" not in inspect(source).codes
    assert convert(source, tmp_path / "out").code == 0
    text = config_of(tmp_path / "out")["text_config"]
    assert text["rope_parameters"]["rope_theta"] == text["rope_theta"] == theta
    assert text["rope_parameters"]["partial_rotary_factor"] == text["partial_rotary_factor"] == 0.25
    assert text["rope_parameters"]["mrope_section"] == [1, 1, 0]


@pytest.mark.parametrize("left", [{}, {"rope_type": "default"}, None])
def test_p02_an_absent_theta_is_a_warning_and_the_familys_is_written(left: Any, tmp_path: Path) -> None:
    made = tiny.make(vision=False, mtp=False)
    config = edited(made.config, rope_parameters=left)
    source = tiny.save(tmp_path / "source", made.raw, config)
    finding = next(f for f in inspect(source).document["findings"] if f["code"] == "rope-theta")
    assert finding["severity"] == "warning"
    assert convert(source, tmp_path / "out").code == 0
    text = config_of(tmp_path / "out")["text_config"]
    assert text["rope_theta"] == text["rope_parameters"]["rope_theta"] == 10_000_000


@pytest.mark.parametrize("name", ["TokenizersBackend", "Qwen2TokenizerFast", "Qwen3_5Tokenizer", "Ünïcode"])
def test_p04_p05_the_tokenizers_class_name_is_never_rewritten(name: str, tmp_path: Path) -> None:
    made = tiny.make()
    source = tiny.save(tmp_path / "source", made.raw, made.config | {"architectures": [name]})
    files = {
        "tokenizer_config.json": json.dumps({"tokenizer_class": name}, ensure_ascii=False, indent=1).encode() + b"\r\n",
        "tokenizer.json": b'{"model": {}}',
        "vocab.json": b"{}",
        "merges.txt": b"#version\n",
        "special_tokens_map.json": b"{ }",
        "chat_template.jinja": b"{{ x }}",
    }
    for file, content in files.items():
        (source / file).write_bytes(content)
    assert convert(source, tmp_path / "out").code == 0
    for file, content in files.items():
        assert (tmp_path / "out" / file).read_bytes() == content
    assert config_of(tmp_path / "out")["architectures"] == [name]


@pytest.mark.parametrize("n_rows", [31, 47, 64])
@pytest.mark.parametrize("tied", [True, False])
def test_p07_the_config_follows_the_embeddings(n_rows: int, tied: bool, tmp_path: Path) -> None:
    made = tiny.make(replace(tiny.SMALL, vocab=n_rows), tied=tied, vision=False, mtp=False)
    source = tiny.save(tmp_path / "source", made.raw, edited(made.config, vocab_size=50))
    finding = next(f for f in inspect(source).document["findings"] if f["code"] == "vocab-size")
    assert finding["severity"] == "warning"
    assert f"{n_rows} rows" in finding["text"]
    assert convert(source, tmp_path / "out").code == 0
    assert config_of(tmp_path / "out")["text_config"]["vocab_size"] == n_rows


def test_p07_a_head_of_other_rows_than_the_embeddings_is_refused(tmp_path: Path) -> None:
    made = tiny.make(vision=False, mtp=False)
    tensors = dict(made.raw) | {"lm_head.weight": made.raw["lm_head.weight"][:40]}
    source = tiny.save(tmp_path / "source", tensors, made.config)
    refused(convert(source, tmp_path / "out"), 1, "lm_head.weight", "expected [50, 24], found [40, 24]")


@pytest.mark.parametrize(
    "kind", ["qwen3_5_vision", "qwen3_5_moe_vision", "qwen3_5", "qwen3_vl", "siglip", 7, None]
)  # fmt: skip
def test_p08_the_vision_blocks_own_type_is_ignored(kind: Any, tmp_path: Path) -> None:
    made = tiny.make()
    vision = made.config["vision_config"] | {"model_type": kind}
    source = tiny.save(tmp_path / "source", made.raw, made.config | {"vision_config": vision})
    assert inspect(source).code == 0
    assert inspect(source, "--keep-vision").code == 0


# --- Q: out of the family --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen4_exp", "qwen3", "qwen3_next", "qwen3_5_next", "llama", "", 5])
@pytest.mark.parametrize("level", ["top", "text", "both"])
@pytest.mark.parametrize("by", [0.22, 1.15])
def test_q01_q02_another_architecture_is_refused_whatever_its_norms(
    kind: Any, level: str, by: float, tmp_path: Path
) -> None:
    made = tiny.make(vision=False, mtp=False)
    config = edited(made.config)
    if level in ("top", "both"):
        config["model_type"] = kind
    if level in ("text", "both"):
        config["text_config"]["model_type"] = kind
    tensors = shifted(made.raw, by + 0.2) | {"model.ngram_table.weight": np.ones((3, 5), tiny.BF16)}
    source = tiny.save(tmp_path / "source", tensors, config)
    for run in (
        qwen35("inspect", source),
        convert(source, tmp_path / "out"),
        convert(source, tmp_path / "out", "--repair"),
        convert(source, tmp_path / "out", "--assume", "raw"),
    ):
        refused(run, 1, "model_type", str(kind), "not of the Qwen3.5 family")
    assert not (tmp_path / "out").exists()
