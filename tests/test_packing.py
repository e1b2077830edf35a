"""Quantised on the way: the bits that mlx-lm's own conversion gives, and the keys of its config."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import field
import mlx.core as mx
import numpy as np
import pytest
import quantized
import tiny
from test_view import bits

from qwen35conv import Options, make_plan, open_source, open_view, read_checkpoint, write
from qwen35conv.convert import prepare
from qwen35conv.errors import CheckpointError
from qwen35conv.facts.config import ModuleQuantization
from qwen35conv.generation.convention import Generation
from qwen35conv.planning.packing import packing_of
from qwen35conv.verify import VerifyOptions, open_original, plan_to_verify, verify

WIDE = tiny.Sizes(hidden=128, intermediate=192, vocab=70, heads=4, head_dim=32, key_dim=16, value_dim=32, layers=4)
SPARSE = replace(WIDE, experts=5, expert_size=64, shared_size=96)
MODES = {
    "affine-4": ModuleQuantization(64, 4, "affine"),
    "affine-3-32": ModuleQuantization(32, 3, "affine"),
    "affine-8-128": ModuleQuantization(128, 8, "affine"),
    "mxfp4": ModuleQuantization(32, 4, "mxfp4"),
    "nvfp4": ModuleQuantization(16, 4, "nvfp4"),
    "mxfp8": ModuleQuantization(32, 8, "mxfp8"),
}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"sizes": WIDE},
    "dense-tied": {"sizes": WIDE, "tied": True},
    "sparse-fused": {"sizes": SPARSE},
    "sparse-single": {"sizes": SPARSE, "experts": "single"},
}


def converted(source: Path, folder: Path, options: Options, **how: Any) -> Path:
    opened = open_source(str(source))
    write(opened, make_plan(read_checkpoint(opened), options), folder, **how)
    return folder


def saved(folder: Path, kind: str, **more: Any) -> Path:
    made = tiny.make(**KINDS[kind], **more)
    return tiny.save(folder, made.raw, made.config)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["dense", "dense-tied", "sparse-fused"])
def test_the_result_is_what_mlx_lm_quantises(kind: str, mode: str, tmp_path: Path) -> None:
    utils = pytest.importorskip("mlx_lm.utils")
    from mlx.utils import tree_flatten, tree_map_with_path

    how = MODES[mode]
    source = saved(tmp_path / "source", kind)
    out = converted(source, tmp_path / "out", Options(quantize=how), jobs=3)
    model, config = utils.load_model(source, lazy=True)
    dtype = getattr(mx, config["text_config"]["dtype"])  # as its convert casts before it quantises
    keep = model.cast_predicate
    model.update(
        tree_map_with_path(
            lambda k, v: v.astype(dtype) if keep(k) and mx.issubdtype(v.dtype, mx.floating) else v, model.parameters()
        )
    )
    model, theirs = utils.quantize_model(model, config, how.group_size, how.bits, mode=how.mode)
    want = {name: bits(array) for name, array in dict(tree_flatten(model.parameters())).items()}
    found = tiny.load(out)
    assert sorted(found) == sorted(want)
    cast = {name for name in found if name.endswith("linear_attn.norm.weight")}  # float32 here, cast there
    assert all(found[name].dtype == np.float32 for name in cast)
    tiny.assert_same(
        {n: v for n, v in found.items() if n not in cast}, {n: v for n, v in want.items() if n not in cast}
    )
    ours = json.loads((out / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        assert ours[key] == theirs[key]
    loaded, _ = utils.load_model(out, strict=True)
    tiny.assert_same({name: bits(array) for name, array in dict(tree_flatten(loaded.parameters())).items()}, found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_view_equals_the_conversion_and_verify_agrees(kind: str, mode: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "source", kind)
    options = Options(quantize=MODES[mode], max_shard_bytes=60_000)
    out = converted(source, tmp_path / "out", options, jobs=2)
    opened = open_source(str(source))
    plan = make_plan(read_checkpoint(opened), options)
    view, found = open_view(opened, plan), tiny.load(out)
    tiny.assert_same({name: bits(view[name]) for name in view}, found)
    for name in view:
        if view.write(name).packed is not None and view.write(name).shape[0] > 3:
            assert bits(view.rows(name, 1, 3)).tobytes() == found[name][1:3].tobytes()
    assert prepare(opened, plan, tmp_path / "again").preflight.n_written + n_made(out) == n_bytes(out)
    result = open_source(str(out))
    checkpoint = read_checkpoint(result)
    again = plan_to_verify(checkpoint)
    original = open_original(str(source), result, checkpoint, again)
    checks = {check.name: check for check in verify(result, again, checkpoint, VerifyOptions(original=original)).checks}
    assert all(checks[name].passed for name in ("structure", "source", "kernel")), checks


def n_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def n_made(folder: Path) -> int:
    """Bytes of what is only known when it is done: the receipt and the stored gains."""
    return sum((folder / file).stat().st_size for file in ("qwen35.json", "qwen35-source-gains.bin"))


def test_fp8_is_dequantised_and_then_quantised(tmp_path: Path) -> None:
    block = (24, 40)
    made = tiny.make(SPARSE)
    tensors = quantized.coded(made.raw, block)
    source = tiny.save(tmp_path / "fp8", tensors, quantized.config_of(made.config, block))
    plain = tiny.save(tmp_path / "plain", quantized.decoded(tensors, block), made.config)
    options = Options(dequantize=True, quantize=MODES["affine-4"])
    found = tiny.load(converted(source, tmp_path / "out", options))
    tiny.assert_same(found, tiny.load(converted(plain, tmp_path / "want", replace(options, dequantize=False))))
    a, b = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("out", "want"))
    assert a == b


def test_what_is_packed_is_not_packed_again(tmp_path: Path) -> None:
    out = converted(saved(tmp_path / "source", "dense"), tmp_path / "out", Options(quantize=MODES["mxfp4"]))
    packed = read_checkpoint(open_source(str(out)))
    with pytest.raises(CheckpointError, match="packed already"):
        make_plan(packed, Options(quantize=MODES["mxfp4"], assume=Generation.CANONICAL))


ENTRY = {"group_size": 32, "bits": 4}
OTHERS: dict[str, Any] = {"a text": "4bit", "a list": [1], "no entry of MLX's": {"foo": 1}}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_the_entry_that_says_how_weights_are_packed_is_the_one_that_is_written(tmp_path: Path, other: Any) -> None:
    made = tiny.make(WIDE, vision=False, mtp=False)
    tensors = field.packed(made.canonical, lambda name: "mlp" in name)
    config = made.config | {"quantization": other, "quantization_config": ENTRY}
    out = converted(tiny.save(tmp_path / "source", tensors, config), tmp_path / "out", Options())
    written = json.loads((out / "config.json").read_text())
    assert written["quantization"] == written["quantization_config"] == ENTRY


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_a_mode_that_the_scales_do_not_have_is_refused(tmp_path: Path, mode: str) -> None:
    made = tiny.make(WIDE, vision=False, mtp=False)
    packed = field.packed(made.canonical, lambda name: "mlp" in name, bits=8 if mode == "mxfp8" else 4)
    without = {name: value for name, value in packed.items() if not name.endswith(".biases")}
    for tensors, message in ((packed, "has no biases"), (without, "scales: expected")):
        config = made.config | {"quantization": {"group_size": 16 if mode == "nvfp4" else 32, "mode": mode}}
        source = tiny.save(tmp_path / "source", tensors, config)
        with pytest.raises(CheckpointError, match=message):
            make_plan(read_checkpoint(open_source(str(source))))


def test_weights_that_no_group_divides_are_told(tmp_path: Path) -> None:
    made = tiny.make()  # of rows of 24, 40, 60 and 64 only the last divide
    checkpoint = read_checkpoint(open_source(str(tiny.save(tmp_path / "source", made.raw, made.config))))
    plan = make_plan(checkpoint, Options(quantize=MODES["mxfp4"]))
    (told,) = [found.text for found in plan.findings if found.code == "not-packed"]
    assert "groups of 32" in told
    assert list(plan.packing) == ["language_model.model.layers.3.self_attn.o_proj"]


def test_the_draft_head_and_the_vision_tower_stay_as_they_are(tmp_path: Path) -> None:
    from qwen35conv.planning.plan import Mtp

    source = saved(tmp_path / "source", "dense")
    options = Options(keep_vision=True, mtp=Mtp.KEEP, quantize=MODES["affine-4"])
    found = tiny.load(converted(source, tmp_path / "out", options, check=False))
    aside = [name for name in found if "mtp." in name or name.startswith("vision_tower.")]
    assert len(aside) > 10
    assert not any(name.endswith((".scales", ".biases")) for name in aside)


@pytest.mark.parametrize(
    ("n_bits", "group_size", "mode", "found"),
    [
        (4, None, "affine", ModuleQuantization(64, 4, "affine")),
        (4, None, "mxfp4", ModuleQuantization(32, 4, "mxfp4")),
        (7, None, "affine", "affine packing has 2, 3, 4, 5, 6 or 8 bits, and groups of 32, 64 or 128"),
        (8, None, "nvfp4", "nvfp4 has 4 bits, and groups of 16"),
        (4, 64, "mxfp4", "mxfp4 has 4 bits, and groups of 32"),
    ],
)
def test_only_forms_that_mlx_has_are_taken(n_bits: int, group_size: int | None, mode: str, found: object) -> None:
    assert packing_of(n_bits, group_size, mode) == found


@pytest.mark.parametrize("mode", ["affine-4", "affine-3-32", "mxfp4", "nvfp4"])
def test_what_autoround_packed_for_mlx_rides_through_under_raw_names(mode: str, tmp_path: Path) -> None:
    """Every byte stays; its own keys in config.json become MLX's, which is what a loader asks for."""
    how = MODES[mode]
    plain = tiny.make(WIDE, vision=False, mtp=False)
    out = converted(saved(tmp_path / "plain", "dense", vision=False, mtp=False), tmp_path / "q", Options(quantize=how))
    packed = tiny.load(out)
    stored = {name: value for name, value in plain.raw.items() if value.ndim != 2 or "conv1d" in name or "norm" in name}
    stored |= {
        name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head"): v
        for name, v in packed.items()
        if f"{name.rpartition('.')[0]}.scales" in packed
    }
    kinds = {"mxfp4": "mx_fp", "nvfp4": "nv_fp"}
    entry = {"quant_method": "auto-round", "bits": how.bits, "group_size": how.group_size, "sym": False,
             "data_type": kinds.get(how.mode, "int"), "packing_format": "mlx"}  # fmt: skip
    source = tiny.save(tmp_path / "source", stored, {**plain.config, "quantization_config": entry})
    found = converted(source, tmp_path / "out", Options())
    tiny.assert_same(tiny.load(found), packed)
    ours = json.loads((found / "config.json").read_text())
    want = {"bits": how.bits, "group_size": how.group_size, "mode": how.mode}
    assert ours["quantization"] == ours["quantization_config"] == want


def test_the_receipt_replays_what_was_packed(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "sparse-single")
    out = converted(source, tmp_path / "out", Options(quantize=MODES["affine-4"]))
    found, n = tiny.load(out), 0
    for name, entry in json.loads((out / "qwen35.json").read_text())["tensors"].items():
        how = entry.get("packed")
        if how is None:
            continue
        n += 1
        raw = b"".join((source / file).read_bytes()[begin:end] for file, begin, end in entry["pieces"])
        assert (entry["source_dtype"], how["from"]) == ("BF16", "BF16")
        values = mx.array(np.frombuffer(raw, "u2").reshape(-1, entry["n_columns"])).view(mx.bfloat16)
        parts = mx.quantize(values, how["group_size"], how["bits"], mode=how["mode"], stream=mx.cpu)
        part = parts[["weight", "scales", "biases"].index(how["part"])]
        assert bits(part).tobytes() == found[name].tobytes()
    assert n > 100


def test_many_threads_and_small_parts_write_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "sparse-fused")
    options = Options(quantize=MODES["affine-4"])
    want = tiny.load(converted(source, tmp_path / "want", options, jobs=1))
    monkeypatch.setattr("qwen35conv.planning.rows._ROWS_BYTES", 256 * 7)
    monkeypatch.setattr("qwen35conv.writing.steps._COPY_BYTES", 256 * 33)
    tiny.assert_same(tiny.load(converted(source, tmp_path / "out", options, jobs=8)), want)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="only Linux lists a process's threads there")
def test_one_conversion_after_another_leaves_no_more_threads(tmp_path: Path) -> None:
    source, options = saved(tmp_path / "source", "dense"), Options(quantize=MODES["affine-4"])
    converted(source, tmp_path / "first", options, jobs=3)
    before = len(list(Path("/proc/self/task").iterdir()))
    for i in range(8):
        converted(source, tmp_path / str(i), options, jobs=3)
    # A writer that came too late to be lent a stream in the first may make its own later: three at most in all.
    assert len(list(Path("/proc/self/task").iterdir())) <= before + 3
