"""Each spelling that exporters, wrappers and converters use, and the canonical module that it means."""

from __future__ import annotations

import pytest

from qwen35conv.facts.layout import Region, Role, canonical_modules, is_known, layer_of, parse_name
from qwen35conv.generation.convention import Naming

TRUNK = "language_model.model."

CASES = {
    # the two generations and text-only exports
    "model.language_model.embed_tokens.weight": (f"{TRUNK}embed_tokens", Naming.RAW),
    "language_model.model.embed_tokens.weight": (f"{TRUNK}embed_tokens", Naming.CANONICAL),
    "model.embed_tokens.weight": (f"{TRUNK}embed_tokens", Naming.NEUTRAL),
    "layers.3.input_layernorm.weight": (f"{TRUNK}layers.3.input_layernorm", Naming.NEUTRAL),
    "language_model.layers.3.input_layernorm.weight": (f"{TRUNK}layers.3.input_layernorm", Naming.CANONICAL),
    "lm_head.weight": ("language_model.lm_head", Naming.NEUTRAL),
    "language_model.lm_head.weight": ("language_model.lm_head", Naming.CANONICAL),
    "model.language_model.norm.weight": (f"{TRUNK}norm", Naming.RAW),
    # inside a layer
    "model.layers.2.linear_attn.A_log": (f"{TRUNK}layers.2.linear_attn.A_log", Naming.NEUTRAL),
    "model.layers.2.linear_attn.norm.weight": (f"{TRUNK}layers.2.linear_attn.norm", Naming.NEUTRAL),
    "model.layers.2.linear_attn.in_proj_qkv.scales": (f"{TRUNK}layers.2.linear_attn.in_proj_qkv", Naming.NEUTRAL),
    "model.layers.2.mlp.gate.biases": (f"{TRUNK}layers.2.mlp.gate", Naming.NEUTRAL),
    "model.layers.2.mlp.experts.17.up_proj.weight": (f"{TRUNK}layers.2.mlp.switch_mlp.up_proj", Naming.NEUTRAL),
    "language_model.model.layers.2.mlp.switch_mlp.up_proj.weight": (
        f"{TRUNK}layers.2.mlp.switch_mlp.up_proj",
        Naming.CANONICAL,
    ),
    # what training wrappers and broken savers leave
    "_orig_mod.model.layers.1.mlp.up_proj.weight": (f"{TRUNK}layers.1.mlp.up_proj", Naming.NEUTRAL),
    "model.layers.1._checkpoint_wrapped_module.mlp._orig_mod.up_proj.weight": (
        f"{TRUNK}layers.1.mlp.up_proj",
        Naming.NEUTRAL,
    ),
    "model.layers.0.linear_attn._fp32_params.A_log": (f"{TRUNK}layers.0.linear_attn.A_log", Naming.NEUTRAL),
    "model.language_model.language_model.language_model.layers.0.mlp.up_proj.weight": (
        f"{TRUNK}layers.0.mlp.up_proj",
        Naming.RAW,
    ),
    # vision under any prefix
    "model.visual.blocks.0.norm1.weight": ("vision_tower.blocks.0.norm1.weight", Naming.NEUTRAL),
    "visual.merger.norm.bias": ("vision_tower.merger.norm.bias", Naming.NEUTRAL),
    "vision_tower.merger.norm.bias": ("vision_tower.merger.norm.bias", Naming.NEUTRAL),
    "language_model.vision_tower.merger.norm.bias": ("vision_tower.merger.norm.bias", Naming.CANONICAL),
    "model.language_model.visual.merger.norm.bias": ("vision_tower.merger.norm.bias", Naming.RAW),
    # the draft head
    "mtp.pre_fc_norm_hidden.weight": ("language_model.mtp.pre_fc_norm_hidden", Naming.NEUTRAL),
    "language_model.mtp.layers.0.self_attn.q_norm.weight": (
        "language_model.mtp.layers.0.self_attn.q_norm",
        Naming.CANONICAL,
    ),
    "model.mtp.fc.weight": ("language_model.mtp.fc", Naming.NEUTRAL),
}


@pytest.mark.parametrize(("name", "expected"), CASES.items(), ids=CASES)
def test_each_spelling_means_one_canonical_module(name: str, expected: tuple[str, Naming]) -> None:
    place = parse_name(name)
    assert place is not None
    assert (canonical_modules(place), place.naming) == ((expected[0],), expected[1])
    assert is_known(place) == (place.region is not Region.VISION)


def test_fused_experts_become_two_modules() -> None:
    for name in ("model.layers.2.mlp.experts.gate_up_proj", "model.layers.2.mlp.experts.9.gate_up_proj.weight"):
        place = parse_name(name)
        assert place is not None
        stem = f"{TRUNK}layers.2.mlp.switch_mlp."
        assert canonical_modules(place) == (f"{stem}gate_proj", f"{stem}up_proj")
        assert is_known(place)


UNKNOWN = [
    "model.layers.0.mlp.experts.gate_proj_extra",
    "model.layers.x.mlp.up_proj.weight",
    "model.layers.٣.mlp.up_proj.weight",  # a digit, but not one of a layer number
    "model.layers.0.self_attn.sinks",
    "transformer.h.0.attn.weight",
    "model",
    "",
    "...",
    "model.language_model",
    "model.layers.0.linear_attn.A_log.weight",
    "../../etc/passwd",
]


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_without_a_rule_is_none(name: str) -> None:
    assert parse_name(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.up_proj.weight_scale",
        "model.layers.0.input_layernorm.weight_scale_inv",
        "model.layers.0.mlp.up_proj.lora_A.weight",
        "model.layers.0.input_layernorm.bias",
        "lm_head",
    ],
)
def test_a_known_module_with_a_strange_parameter_is_not_known(name: str) -> None:
    place = parse_name(name)
    assert place is not None
    assert not is_known(place)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.layers.0.mlp.up_proj.weight_scale_inv", Role.LINEAR),
        ("model.layers.0.mlp.experts.gate_up_proj_scale_inv", Role.FUSED_EXPERTS),
        ("model.language_model.layers.0.mlp.experts.7.down_proj.weight_scale_inv", Role.EXPERT),
    ],
)
def test_the_scales_of_fp8_blocks_stand_where_their_weight_does(name: str, role: Role) -> None:
    place, weight = parse_name(name), parse_name(name.removesuffix("_scale_inv"))
    assert place is not None
    assert weight is not None
    assert (place.module, place.role, place.expert) == (weight.module, role, weight.expert)
    assert place.parameter == "weight_scale_inv"
    assert is_known(place)


def test_wrappers_and_doubled_prefixes_are_counted() -> None:
    place = parse_name("_orig_mod.model.language_model.language_model.norm._orig_mod.weight")
    assert place is not None
    assert (place.n_wrappers, place.collapsed, place.role) == (2, True, Role.GAIN)


def test_layer_numbers() -> None:
    assert [layer_of(path) for path in ("layers.12.mlp.gate", "norm", "layers.1")] == [12, None, None]
