"""FP8 sources: dequantised as float32 NumPy does it, refused without being asked, whatever the experts' form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_view import bits

from qwen35conv import Options, make_plan, open_source, open_view, read_checkpoint, write
from qwen35conv.convert import prepare
from qwen35conv.errors import CheckpointError
from qwen35conv.planning.plan import Mtp
from qwen35conv.planning.scheme import SchemeError

BLOCK = (8, 10)  # no size of a tiny model is a multiple of both
ASKED = Options(dequantize=True)


def made(folder: Path, block: tuple[int, int] = BLOCK, **kinds: Any) -> tuple[Path, tiny.Tensors]:
    """An FP8 checkpoint, and the raw tensors that it stands for."""
    sizes = kinds.pop("sizes", tiny.SMALL)
    scale_dtype = kinds.pop("scale_dtype", tiny.BF16)
    plain = tiny.make(sizes, **kinds)
    tensors = quantized.coded(plain.raw, block, scale_dtype=scale_dtype)
    return tiny.save(folder, tensors, quantized.config_of(plain.config, block)), quantized.decoded(tensors, block)


def converted(source: Path, folder: Path, options: Options = ASKED, **how: Any) -> Path:
    opened = open_source(str(source))
    write(opened, make_plan(read_checkpoint(opened), options), folder, **how)
    return folder


@given(
    sizes=st.builds(
        tiny.Sizes,
        layers=st.integers(2, 4),
        interval=st.integers(2, 3),
        experts=st.sampled_from([0, 3]),
        expert_size=st.sampled_from([8, 14, 21]),
    ),
    block=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    experts=st.sampled_from(["fused", "single", "pairs"]),
    scale_dtype=st.sampled_from([tiny.BF16, np.dtype("f4")]),
    options=st.builds(
        Options,
        dequantize=st.just(True),
        mtp=st.sampled_from(Mtp),
        keep_vision=st.booleans(),
        max_shard_bytes=st.sampled_from([None, 5000]),
    ),
)
@settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))
def test_dequantised_equals_the_conversion_of_the_float32_reference(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: tiny.Sizes,
    block: tuple[int, int],
    experts: str,
    scale_dtype: np.dtype[Any],
    options: Options,
) -> None:
    folder = tmp_path_factory.mktemp("fp8")
    kinds = {"sizes": sizes, "experts": experts, "scale_dtype": scale_dtype}
    source, reference = made(folder / "fp8", block, **kinds)
    plain = tiny.save(folder / "plain", reference, tiny.make(sizes, experts=experts).config)
    found = tiny.load(converted(source, folder / "out", options, check=False))
    tiny.assert_same(found, tiny.load(converted(plain, folder / "want", replace(options, dequantize=False))))
    opened = open_source(str(source))
    view = open_view(opened, make_plan(read_checkpoint(opened), options))
    tiny.assert_same({name: bits(view[name]) for name in view}, found)


def test_the_real_block_size_and_matrices_of_several_blocks(tmp_path: Path) -> None:
    """Gate and up meet inside a block of 128 rows, and parts of a tensor are cut between blocks too."""
    sizes = tiny.Sizes(hidden=140, layers=2, interval=2, experts=3, expert_size=200, shared_size=150)
    source, reference = made(tmp_path / "fp8", (128, 128), sizes=sizes, scale_dtype=np.dtype("f4"))
    plain = tiny.save(tmp_path / "plain", reference, tiny.make(sizes).config)
    found = converted(source, tmp_path / "out")
    tiny.assert_same(tiny.load(found), tiny.load(converted(plain, tmp_path / "want", Options())))
    config = json.loads((found / "config.json").read_text())
    assert not any("quantization" in key for level in (config, config["text_config"]) for key in level)
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"


def test_parts_cut_within_blocks_join_to_the_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, _ = made(tmp_path / "fp8", sizes=tiny.SPARSE)
    want = tiny.load(converted(source, tmp_path / "want", jobs=1))
    monkeypatch.setattr("qwen35conv.planning.rows._CODE_BYTES", 24 * 3)
    monkeypatch.setattr("qwen35conv.writing.steps._COPY_BYTES", 24 * 11)
    tiny.assert_same(tiny.load(converted(source, tmp_path / "out", jobs=4)), want)


def test_every_code_times_every_scale_is_rounded_once_and_nan_stays(tmp_path: Path) -> None:
    plain = tiny.make(tiny.SMALL)
    tensors = quantized.coded(plain.raw, BLOCK, scale_dtype=np.dtype("f4"))
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    n = tensors[name].size
    tensors[name] = np.arange(n, dtype=np.uint64).astype(np.uint8).reshape(tensors[name].shape).view(quantized.E4M3)
    scales = tensors[f"{name}_scale_inv"]
    scales.flat[:6] = [0.0, 1e-42, 3e38, -1.7, np.inf, 1 / 3]
    opened = open_source(str(tiny.save(tmp_path / "fp8", tensors, quantized.config_of(plain.config, BLOCK))))
    view = open_view(opened, make_plan(read_checkpoint(opened), ASKED))
    with np.errstate(over="ignore", invalid="ignore"):
        want = quantized.decoded({name: tensors[name], f"{name}_scale_inv": scales}, BLOCK)[name]
    found = bits(view["language_model.model.layers.0.mlp.down_proj.weight"])
    nan = np.isnan(want.astype(np.float32))
    assert nan.any()
    assert (np.isnan(found.astype(np.float32)) == nan).all()
    assert found[~nan].tobytes() == want[~nan].tobytes()


def test_the_receipt_replays_every_tensor(tmp_path: Path) -> None:
    source, _ = made(tmp_path / "fp8", sizes=tiny.SPARSE)
    out = converted(source, tmp_path / "out")
    found = tiny.load(out)
    n = 0
    for name, entry in json.loads((out / "qwen35.json").read_text())["tensors"].items():
        if entry.get("fix") != "dequantize":
            continue
        n += 1
        blocks, rows = entry["blocks"], []
        kind = {"BF16": tiny.BF16, "F32": np.dtype("f4")}[blocks["dtype"]]
        for piece, scales, first in zip(entry["pieces"], blocks["pieces"], blocks["first_rows"], strict=True):
            codes = np.frombuffer(read(source, piece), quantized.E4M3).reshape(-1, entry["n_columns"])
            factors = np.frombuffer(read(source, scales), kind).reshape(-1, -(-codes.shape[1] // blocks["shape"][1]))
            over = np.repeat(np.repeat(factors, blocks["shape"][0], 0), blocks["shape"][1], 1).astype(np.float32)
            rows.append(codes.astype(np.float32) * over[first : first + len(codes), : codes.shape[1]])
        assert np.concatenate(rows).astype(tiny.BF16).tobytes() == found[name].tobytes()
    assert n > 30


def read(folder: Path, piece: tuple[str, int, int]) -> bytes:
    file, begin, end = piece
    return (folder / file).read_bytes()[begin:end]


def test_without_the_option_nothing_is_written_and_it_is_named(tmp_path: Path) -> None:
    source, _ = made(tmp_path / "fp8")
    with pytest.raises(SchemeError) as caught:
        converted(source, tmp_path / "out", Options())
    assert caught.value.exit_code == 1
    assert caught.value.hint is not None
    assert "--dequantize" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["fp8"]


def test_bytes_are_known_beforehand(tmp_path: Path) -> None:
    source, _ = made(tmp_path / "fp8", sizes=tiny.SPARSE)
    opened = open_source(str(source))
    flight = prepare(opened, make_plan(read_checkpoint(opened), ASKED), tmp_path / "out").preflight
    out = converted(source, tmp_path / "out")
    made_anew = ("qwen35.json", "qwen35-source-gains.bin")
    assert flight.n_written == sum(p.stat().st_size for p in out.iterdir() if p.name not in made_anew)


GATE = "model.language_model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{GATE}_scale_inv"), "FP8 without scales: 1 modules"),
        (lambda t: t.pop(GATE), "1 scales belong to no FP8 weight"),
        (lambda t: t.update({f"{GATE}_scale_inv": t[f"{GATE}_scale_inv"][1:]}), "for blocks of 8 x 10"),
        (lambda t: t.update({f"{GATE}_scale_inv": t[f"{GATE}_scale_inv"].astype("f2")}), "expected F32 or BF16"),
        (lambda t: t.update({GATE.replace("weight", "input_scale"): np.ones(1, "f4")}), "static activations"),
    ],
    ids=["no scales", "no weight", "another shape", "another dtype", "static activations"],
)
def test_scales_and_weights_stand_or_fall_together(tmp_path: Path, change: Any, message: str) -> None:
    plain = tiny.make()
    tensors = quantized.coded(plain.raw, BLOCK)
    change(tensors)
    source = tiny.save(tmp_path / "fp8", tensors, quantized.config_of(plain.config, BLOCK))
    with pytest.raises(CheckpointError, match=message):
        make_plan(read_checkpoint(open_source(str(source))), ASKED)


def test_a_plain_checkpoint_has_nothing_to_dequantise(tmp_path: Path) -> None:
    plain = tiny.make()
    source = tiny.save(tmp_path / "plain", plain.raw, plain.config)
    with pytest.raises(SchemeError, match="no FP8 weight in it"):
        make_plan(read_checkpoint(open_source(str(source))), ASKED)
