"""Schemes that MLX cannot read: named with their modules and bits, told what to do, refused before a byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiny
from typer.testing import CliRunner

from qwen35conv.cli import app

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
STEM = "model.language_model.layers.{}.mlp.{}_proj"
PROJS = [STEM.format(i, name) for i in range(4) for name in ("gate", "up", "down")]

# What exporters put in place of `weight` [40, 24] for each module: tail -> dtype and shape; the config; name and bits.
Tails = dict[str, tuple[Any, tuple[int, ...]]]
SCHEMES: dict[str, tuple[Tails, dict[str, Any], str, list[int]]] = {
    "compressed-tensors pack-quantized": (
        {"weight_packed": ("i4", (40, 3)), "weight_scale": (tiny.BF16, (40, 1)), "weight_shape": ("i8", (2,))},
        {"quant_method": "compressed-tensors", "format": "pack-quantized",
         "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}}},
        "compressed-tensors, pack-quantized", [4],
    ),
    "NVFP4, compressed-tensors": (
        {"weight_packed": ("u1", (40, 12)), "weight_scale": (E4M3, (40, 2)), "weight_global_scale": ("f4", (1,)),
         "input_global_scale": ("f4", (1,))},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        "NVFP4 (compressed-tensors)", [4],
    ),
    "NVFP4, ModelOpt": (
        {"weight": ("u1", (40, 12)), "weight_scale": (E4M3, (40, 2)), "weight_scale_2": ("f4", ()),
         "input_scale": ("f4", ())},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "NVFP4 (ModelOpt)", [4],
    ),
    "AWQ": (
        {"qweight": ("i4", (24, 5)), "qzeros": ("i4", (1, 5)), "scales": ("f2", (1, 40))},
        {"quant_method": "awq", "bits": 4, "group_size": 24, "version": "gemm"},
        "AWQ", [4],
    ),
    "GPTQ": (
        {"qweight": ("i4", (3, 40)), "qzeros": ("i4", (1, 5)), "scales": ("f2", (1, 40)), "g_idx": ("i4", (24,))},
        {"quant_method": "gptq", "bits": 4, "group_size": 24},
        "GPTQ", [4],
    ),
    "AutoRound": (
        {"qweight": ("i4", (3, 40)), "qzeros": ("i4", (1, 5)), "scales": ("f2", (1, 40))},
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"},
        "AutoRound", [4],
    ),
    "bitsandbytes, 4 bits": (
        {"weight": ("u1", (480, 1)), "weight.absmax": ("u1", (15,)), "weight.quant_map": ("f4", (16,)),
         "weight.nested_absmax": ("f4", (1,)), "weight.quant_state.bitsandbytes__nf4": ("u1", (90,))},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "bitsandbytes", [4],
    ),
    "bitsandbytes, 8 bits": (
        {"weight": ("i1", (40, 24)), "SCB": ("f4", (40,)), "weight_format": ("u1", ())},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "bitsandbytes", [8],
    ),
    "FP8, a scale each row": (
        {"weight": (E4M3, (40, 24)), "weight_scale": (tiny.BF16, (40, 1))},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        "FP8 (one scale a tensor or row)", [8],
    ),
    "FP8, a scale each tensor": (
        {"weight": (E4M3, (40, 24)), "weight_scale_inv": ("f4", (1,))},
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "FP8 (one scale a tensor or row)", [8],
    ),
    "FP8, static": (
        {"weight": (E4M3, (40, 24)), "weight_scale_inv": ("f4", ()), "activation_scale": ("f4", ())},
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        "FP8 with static activations", [8],
    ),
}  # fmt: skip


def saved(folder: Path, tails: Tails, entry: dict[str, Any]) -> Path:
    made = tiny.make(vision=False)
    tensors = {name: value for name, value in made.raw.items() if name.removesuffix(".weight") not in PROJS}
    for module in PROJS:
        tensors |= {f"{module}.{tail}": np.zeros(shape, dtype) for tail, (dtype, shape) in tails.items()}
    return tiny.save(folder, tensors, {**made.config, "quantization_config": entry})


@pytest.mark.parametrize(("tails", "entry", "name", "bits"), SCHEMES.values(), ids=SCHEMES)
def test_a_scheme_is_named_and_refused(
    tmp_path: Path, tails: Tails, entry: dict[str, Any], name: str, bits: list[int]
) -> None:
    source = saved(tmp_path / "source", tails, entry)
    runner = CliRunner()
    told = runner.invoke(app, ["inspect", str(source), "--json"])
    assert told.exit_code == 1
    document = json.loads(told.stdout)
    assert document["verdict"] == "raw"
    (scheme,) = document["schemes"]
    assert (scheme["name"], scheme["n_modules"], scheme["bits"]) == (name, len(PROJS), bits)
    assert scheme["can_dequantize"] is False
    assert "BF16 release" in scheme["advice"]
    shown = runner.invoke(app, ["inspect", str(source)])
    assert shown.exit_code == 1
    assert f"{name}: {len(PROJS)} modules, {bits[0]} bits" in " ".join(shown.stdout.split())

    for more in ([], ["--dequantize"], ["--quantize", "4"]):
        refused = runner.invoke(app, ["convert", str(source), str(tmp_path / "out"), *more])
        assert refused.exit_code == 1
        assert name in refused.stderr
        assert "BF16 release" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_two_schemes_are_both_named(tmp_path: Path) -> None:
    made = tiny.make(vision=False)
    tensors = dict(made.raw)
    first, second = PROJS[:2]
    for module in (first, second):
        del tensors[f"{module}.weight"]
    tensors |= {
        f"{first}.weight": np.zeros((40, 24), E4M3),
        f"{first}.weight_scale": np.zeros((40, 1), tiny.BF16),
        f"{second}.weight_packed": np.zeros((40, 12), "u1"),
        f"{second}.weight_scale": np.zeros((40, 2), E4M3),
        f"{second}.weight_global_scale": np.zeros(1, "f4"),
    }
    entry = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    source = tiny.save(tmp_path / "source", tensors, {**made.config, "quantization_config": entry})
    document = json.loads(CliRunner().invoke(app, ["inspect", str(source), "--json"]).stdout)
    names = {scheme["name"]: scheme["n_modules"] for scheme in document["schemes"]}
    assert names == {"FP8 (one scale a tensor or row)": 1, "NVFP4 (compressed-tensors)": 1}


def test_fp8_in_blocks_comes_with_the_command_that_converts_it(tmp_path: Path) -> None:
    import quantized

    made = tiny.make()
    tensors = quantized.coded(made.raw, (8, 10))
    source = tiny.save(tmp_path / "source", tensors, quantized.config_of(made.config, (8, 10)))
    told = CliRunner().invoke(app, ["inspect", str(source), "--json"])
    assert told.exit_code == 1
    document = json.loads(told.stdout)
    (scheme,) = document["schemes"]
    assert (scheme["name"], scheme["bits"], scheme["can_dequantize"]) == ("FP8 in blocks", [8], True)
    assert scheme["n_modules"] == sum(name.endswith("_scale_inv") for name in tensors)
    assert "--dequantize" in document["next"]
    assert document["dequantize"]["rules"]["dequantized"]["tensors"] > 20
    told = CliRunner().invoke(app, ["inspect", str(source), "--dequantize", "--json"])
    assert told.exit_code == 0
    assert json.loads(told.stdout)["converts"] is True
