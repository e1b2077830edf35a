"""FP8 checkpoints made from plain ones, and by float32 NumPy what dequantising them gives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import tiny

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
PLAIN = re.compile(r"norm|conv1d|A_log|dt_bias|embed_tokens|lm_head|visual|mlp\.gate\.|shared_expert_gate|in_proj_[ab]")


def coded(
    tensors: Mapping[str, np.ndarray], block: tuple[int, int], *, seed: int = 7, scale_dtype: np.dtype[Any] = tiny.BF16
) -> tiny.Tensors:
    """The tensors with random codes and scales in place of each weight that exporters quantise."""
    random = np.random.default_rng(seed)
    found: tiny.Tensors = {}
    for name, value in tensors.items():
        if PLAIN.search(name) or value.ndim < 2:
            found[name] = value
            continue
        codes = random.integers(0, 256, value.shape, dtype=np.uint8)
        codes[(codes & 127) == 127] = 3  # NaN has a test of its own
        shape = (*value.shape[:-2], -(-value.shape[-2] // block[0]), -(-value.shape[-1] // block[1]))
        scales = np.exp(random.uniform(-9, -5, shape)).astype(np.float32).astype(scale_dtype)
        found[name] = codes.view(E4M3)
        found[f"{name}_scale_inv"] = scales
    return found


def decoded(tensors: Mapping[str, np.ndarray], block: tuple[int, int]) -> tiny.Tensors:
    """Every weight as bfloat16: its value times its block's scale in float32, rounded once."""
    found = {}
    for name, value in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        if value.dtype == E4M3:
            scales = tensors[f"{name}_scale_inv"].astype(np.float32)
            for axis, n in zip((-2, -1), block, strict=True):
                scales = np.repeat(scales, n, axis).take(range(value.shape[axis]), axis)
            value = (value.astype(np.float32) * scales).astype(tiny.BF16)
        found[name] = value
    return found


def config_of(config: Mapping[str, Any], block: tuple[int, int]) -> dict[str, Any]:
    """config.json as exporters of FP8 write it."""
    entry = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": ["lm_head", "model.visual"],
    }
    return {**config, "quantization_config": entry}
