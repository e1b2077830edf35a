"""Small checkpoints for the tests, and by plain NumPy what a right conversion of each holds.

No two axes of a model have the same length, so a transposed or mistaken axis can't pass.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

BF16 = np.dtype(ml_dtypes.bfloat16)
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Sizes:
    """A model of a few KB. Hv = 3 Hk, and key and value dimensions differ."""

    hidden: int = 24
    layers: int = 4
    vocab: int = 50
    intermediate: int = 40
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    key_heads: int = 2
    value_heads: int = 6
    key_dim: int = 8
    value_dim: int = 10
    kernel: int = 4
    experts: int = 0
    experts_per_token: int = 2
    expert_size: int = 14
    shared_size: int = 18
    interval: int = 4

    @property
    def conv(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.interval == 0


SMALL = Sizes()
SPARSE = Sizes(experts=5)


@dataclass(frozen=True)
class Made:
    """A checkpoint before it is written: tensors by raw name, their canonical form, and config.json."""

    raw: Tensors
    canonical: Tensors
    config: dict[str, Any]


def make(
    sizes: Sizes = SMALL,
    *,
    seed: int = 1,
    experts: str = "fused",
    vision: bool = True,
    mtp: bool = True,
    tied: bool = False,
    text_only: bool = False,
    gain_dtype: np.dtype[Any] = BF16,
) -> Made:
    """A raw checkpoint with random weights, gains as real ones lie, and its canonical form.

    `experts` is `fused`, `single` (one tensor each) or `pairs` (one tensor each, gate and up fused).
    """
    random = np.random.default_rng(seed)
    outer = "model." if text_only else "model.language_model."
    raw: Tensors = {}
    canonical: Tensors = {}

    def normal(*shape: int, scale: float = 0.2, dtype: np.dtype[Any] = BF16) -> np.ndarray:
        return (random.standard_normal(shape) * scale).astype(np.float32).astype(dtype)

    def put(stored: str, name: str, value: np.ndarray, shown: np.ndarray | None = None) -> None:
        raw[stored] = value
        canonical[name] = value if shown is None else shown

    def gain(n: int, mean: float) -> tuple[np.ndarray, np.ndarray]:
        delta = normal(n, scale=0.09, dtype=gain_dtype) + np.array(mean, dtype=gain_dtype)
        delta[0] = -0.11  # a raw gain always has some below zero
        return delta, (delta.astype(np.float32) + 1).astype(gain_dtype)

    put(f"{outer}embed_tokens.weight", "language_model.model.embed_tokens.weight", normal(sizes.vocab, sizes.hidden))
    for i in range(sizes.layers):
        stored, name = f"{outer}layers.{i}.", f"language_model.model.layers.{i}."
        for norm, mean in (("input_layernorm", -0.03), ("post_attention_layernorm", -0.2)):
            put(f"{stored}{norm}.weight", f"{name}{norm}.weight", *gain(sizes.hidden, mean))
        if sizes.is_full(i):
            queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
            for proj, shape in (
                ("q_proj", (2 * queries, sizes.hidden)),
                ("k_proj", (keys, sizes.hidden)),
                ("v_proj", (keys, sizes.hidden)),
                ("o_proj", (sizes.hidden, queries)),
            ):
                put(f"{stored}self_attn.{proj}.weight", f"{name}self_attn.{proj}.weight", normal(*shape))
            for norm in ("q_norm", "k_norm"):
                put(f"{stored}self_attn.{norm}.weight", f"{name}self_attn.{norm}.weight", *gain(sizes.head_dim, 0.7))
        else:
            values = sizes.value_heads * sizes.value_dim
            conv = normal(sizes.conv, 1, sizes.kernel)
            put(
                f"{stored}linear_attn.conv1d.weight",
                f"{name}linear_attn.conv1d.weight",
                conv,
                np.moveaxis(conv, 2, 1),
            )
            for proj, shape in (
                ("in_proj_qkv", (sizes.conv, sizes.hidden)),
                ("in_proj_z", (values, sizes.hidden)),
                ("in_proj_a", (sizes.value_heads, sizes.hidden)),
                ("in_proj_b", (sizes.value_heads, sizes.hidden)),
                ("out_proj", (sizes.hidden, values)),
            ):
                put(f"{stored}linear_attn.{proj}.weight", f"{name}linear_attn.{proj}.weight", normal(*shape))
            control = np.abs(normal(sizes.value_dim, scale=0.05, dtype=np.dtype("f4"))) + np.float32(0.82)
            put(f"{stored}linear_attn.norm.weight", f"{name}linear_attn.norm.weight", control)
            decay = np.log(random.uniform(0.01, 0.4, sizes.value_heads)).astype(np.float32)
            put(f"{stored}linear_attn.A_log", f"{name}linear_attn.A_log", decay)
            put(f"{stored}linear_attn.dt_bias", f"{name}linear_attn.dt_bias", normal(sizes.value_heads))
        _put_mlp(raw, canonical, f"{stored}mlp.", f"{name}mlp.", sizes, experts, normal)
    put(f"{outer}norm.weight", "language_model.model.norm.weight", *gain(sizes.hidden, 0.9))
    if not tied:
        put("lm_head.weight", "language_model.lm_head.weight", normal(sizes.vocab, sizes.hidden))
    if vision:
        raw["model.visual.patch_embed.proj.weight"] = normal(7, 3, 2, 5, 6)
        raw["model.visual.blocks.0.norm1.weight"] = normal(7)
    if mtp:
        _put_mtp(raw, sizes, gain, normal)
    return Made(raw, canonical, make_config(sizes, vision=vision, mtp=mtp, tied=tied, text_only=text_only))


def _put_mlp(raw: Tensors, canonical: Tensors, stored: str, name: str, sizes: Sizes, experts: str, normal: Any) -> None:
    hidden = sizes.hidden

    def put(path: str, *shape: int) -> None:
        raw[f"{stored}{path}.weight"] = canonical[f"{name}{path}.weight"] = normal(*shape)

    def put_three(stem: str, wide: int) -> None:
        put(f"{stem}gate_proj", wide, hidden)
        put(f"{stem}up_proj", wide, hidden)
        put(f"{stem}down_proj", hidden, wide)

    if not sizes.experts:
        put_three("", sizes.intermediate)
        return
    put("gate", sizes.experts, hidden)
    put_three("shared_expert.", sizes.shared_size)
    put("shared_expert_gate", 1, hidden)
    wide = sizes.expert_size
    gate, up = normal(sizes.experts, wide, hidden), normal(sizes.experts, wide, hidden)
    down = normal(sizes.experts, hidden, wide)
    for proj, stacked in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        canonical[f"{name}switch_mlp.{proj}.weight"] = stacked
    if experts == "fused":
        raw[f"{stored}experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        raw[f"{stored}experts.down_proj"] = down
        return
    for e in range(sizes.experts):
        if experts == "pairs":
            raw[f"{stored}experts.{e}.gate_up_proj.weight"] = np.concatenate([gate[e], up[e]])
        else:
            raw[f"{stored}experts.{e}.gate_proj.weight"] = gate[e]
            raw[f"{stored}experts.{e}.up_proj.weight"] = up[e]
        raw[f"{stored}experts.{e}.down_proj.weight"] = down[e]


def _put_mtp(raw: Tensors, sizes: Sizes, gain: Any, normal: Any) -> None:
    raw["mtp.fc.weight"] = normal(sizes.hidden, 2 * sizes.hidden)
    for norm, mean in (("pre_fc_norm_embedding", -0.45), ("pre_fc_norm_hidden", -0.2), ("norm", 0.9)):
        raw[f"mtp.{norm}.weight"] = gain(sizes.hidden, mean)[0]
    for norm in ("input_layernorm", "post_attention_layernorm"):
        raw[f"mtp.layers.0.{norm}.weight"] = gain(sizes.hidden, 0.05)[0]
    for norm in ("q_norm", "k_norm"):
        raw[f"mtp.layers.0.self_attn.{norm}.weight"] = gain(sizes.head_dim, 0.7)[0]
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    for proj, rows, columns in (
        ("q_proj", 2 * queries, sizes.hidden),
        ("k_proj", keys, sizes.hidden),
        ("v_proj", keys, sizes.hidden),
        ("o_proj", sizes.hidden, queries),
    ):
        raw[f"mtp.layers.0.self_attn.{proj}.weight"] = normal(rows, columns)
    _put_mlp(raw, {}, "mtp.layers.0.mlp.", "", sizes, "fused", normal)


def make_config(
    sizes: Sizes, *, vision: bool = False, mtp: bool = False, tied: bool = False, text_only: bool = False
) -> dict[str, Any]:
    """config.json as transformers writes it."""
    kind = "qwen3_5_moe" if sizes.experts else "qwen3_5"
    text: dict[str, Any] = {
        "model_type": f"{kind}_text",
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "vocab_size": sizes.vocab,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_key_head_dim": sizes.key_dim,
        "linear_value_head_dim": sizes.value_dim,
        "linear_conv_kernel_dim": sizes.kernel,
        "layer_types": ["full_attention" if sizes.is_full(i) else "linear_attention" for i in range(sizes.layers)],
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    }
    if sizes.experts:
        text |= {
            "num_experts": sizes.experts,
            "num_experts_per_tok": sizes.experts_per_token,
            "moe_intermediate_size": sizes.expert_size,
            "shared_expert_intermediate_size": sizes.shared_size,
        }
    else:
        text["intermediate_size"] = sizes.intermediate
    if mtp:
        text["mtp_num_hidden_layers"] = 1
    if text_only:
        return {"architectures": ["Qwen3_5ForCausalLM"], **text}
    config: dict[str, Any] = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": kind,
        "text_config": text,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }
    if vision:
        config |= {"vision_config": {"in_channels": 3, "depth": 1}, "image_token_id": 45, "video_token_id": 46}
    return config


def save(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    *,
    n_shards: int = 2,
    index: bool = True,
    seed: int = 3,
    metadata: dict[str, str] | None = None,
) -> Path:
    """Write a checkpoint's folder by the safetensors library, tensors dealt to shards at random."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    np.random.default_rng(seed).shuffle(names)
    weight_map: dict[str, str] = {}
    for i in range(n_shards):
        file = f"model.safetensors-{i + 1:05d}-of-{n_shards:05d}.safetensors"
        members = {name: np.ascontiguousarray(tensors[name]) for name in names[i::n_shards]}
        save_file(members, folder / file, metadata or {"format": "pt"})
        weight_map |= dict.fromkeys(members, file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path) -> Tensors:
    """Every tensor of a folder, by the strict safetensors library."""
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - the handle is no mapping
                assert name not in found, f"{name} stands in two files"
                found[name] = opened.get_tensor(name)
    return found


def assert_same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Both hold the same names, dtypes, shapes and bytes."""
    assert sorted(found) == sorted(expected)
    for name, want in expected.items():
        got = found[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        assert got.tobytes() == np.ascontiguousarray(want).tobytes(), name


def with_layers(n: int, sizes: Sizes = SMALL) -> Sizes:
    """The same sizes with another number of layers."""
    return replace(sizes, layers=n)
