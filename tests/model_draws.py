"""Random small text models for tests: no two axes of equal length, three value heads to a key head."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qwen35conv.facts.config import LayerKind, ModelConfig, parse_config
from qwen35conv.facts.layout import HEAD_MODULE, TRUNK_PREFIX, Role
from qwen35conv.planning.inventory import expected_head, expected_trunk

LINEAR, FULL = (kind.value for kind in LayerKind)
SIZES: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 96,
    "vocab_size": 131,
    "num_hidden_layers": 3,
    "layer_types": [LINEAR, FULL, LINEAR],
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.4},
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 32,
}


def draw_config(**changes: Any) -> ModelConfig:
    """The config of a small model."""
    return parse_config("config.json", json.dumps(SIZES | changes).encode())


@dataclass(frozen=True)
class Held:
    """Canonical tensors in memory."""

    arrays: Mapping[str, mx.array]

    def __getitem__(self, name: str) -> mx.array:
        return self.arrays[name]

    def __contains__(self, name: object) -> bool:
        return name in self.arrays

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        return self.arrays[name][begin:end]


def draw_tensors(config: ModelConfig, dtype: mx.Dtype = mx.float32, seed: int = 0) -> dict[str, mx.array]:
    """Canonical weights at the scale of a trained model; A_log and the gated norm stay in float32."""
    rng = np.random.default_rng(seed)
    named = [(TRUNK_PREFIX + e.module, e) for e in expected_trunk(config)]
    if not config.tied:
        named.append((HEAD_MODULE, expected_head(config)))
    drawn = {}
    for module, e in named:
        noise = rng.standard_normal(e.shape)
        match e.role:
            case Role.GAIN | Role.CONTROL:
                values = 1 + 0.2 * noise
            case Role.DECAY if module.endswith("A_log"):
                values = np.log(rng.uniform(0.05, 4, e.shape))
            case Role.CONV | Role.DECAY:
                values = 0.5 * noise
            case _:
                values = noise * e.shape[-1] ** -0.5
        name = f"{module}.{e.parameter}" if e.parameter else module
        keeps = e.role is Role.CONTROL or name.endswith("A_log")
        drawn[name] = mx.array(values.astype(np.float32)).astype(mx.float32 if keeps else dtype)
    return drawn


def draw_ids(config: ModelConfig, *shape: int, seed: int = 1) -> np.ndarray:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape)


def oracle(case: str) -> Path:
    """The folder of an oracle case; skips the test where none is at hand."""
    places = [
        Path(__file__).parent / "data" / "oracle",
        Path(os.environ.get("QWEN35_ORACLE", "/nonexistent")),
        Path(__file__).parents[2] / "shared" / "oracle" / "data",
    ]
    for place in places:
        for folder in (place / case, place / "data" / case):
            if (folder / "src").is_dir():
                return folder
    pytest.skip(f"no oracle case {case} at hand (set QWEN35_ORACLE)")
