"""config.json as people have it: nested, flat, trimmed, wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny

from qwen35conv.errors import CheckpointError, SourceError
from qwen35conv.facts.config import LayerKind, parse_config


def parse(document: Any) -> Any:
    return parse_config("config.json", json.dumps(document).encode())


def test_nested_and_flat_give_the_same_sizes() -> None:
    nested, flat = parse(tiny.make_config(tiny.SMALL)), parse(tiny.make_config(tiny.SMALL, text_only=True))
    for field in ("hidden_size", "layer_kinds", "conv_size", "rope", "rotary_dim", "tied", "model_type"):
        assert getattr(nested, field) == getattr(flat, field)
    assert (nested.nested, flat.nested) == (True, False)
    assert nested.conv_size == 2 * 2 * 8 + 6 * 10
    assert nested.layer_kinds == (LayerKind.LINEAR,) * 3 + (LayerKind.FULL,)


def test_layers_follow_an_interval_where_no_list_is_given() -> None:
    document = tiny.make_config(tiny.with_layers(9), text_only=True)
    del document["layer_types"]
    kinds = parse(document | {"full_attention_interval": 3}).layer_kinds
    assert [i for i, kind in enumerate(kinds) if kind is LayerKind.FULL] == [2, 5, 8]


def test_the_family_fills_what_is_absent() -> None:
    document = tiny.make_config(tiny.SMALL, text_only=True)
    for key in ("head_dim", "linear_conv_kernel_dim", "rope_parameters", "tie_word_embeddings", "rms_norm_eps"):
        del document[key]
    config = parse(document)
    assert (config.head_dim, config.conv_kernel, config.rope.theta, config.tied) == (256, 4, 1e7, None)
    assert not config.rope.theta_given


def test_theta_is_found_at_either_place() -> None:
    document = tiny.make_config(tiny.SMALL, text_only=True)
    del document["rope_parameters"]
    assert parse(document | {"rope_theta": 5000.0}).rope.theta == 5000
    assert parse(document | {"rope_scaling": {"rope_theta": 7000}}).rope.theta == 7000


@pytest.mark.parametrize("level", ["top", "text"])
def test_the_tie_flag_and_the_draft_layers_are_read_at_both_levels(level: str) -> None:
    document = tiny.make_config(tiny.SMALL)
    del document["tie_word_embeddings"], document["text_config"]["tie_word_embeddings"]
    (document if level == "top" else document["text_config"]).update(tie_word_embeddings=True, mtp_num_hidden_layers=1)
    config = parse(document)
    assert (config.tied, config.n_mtp_layers) == (True, 1)


@pytest.mark.parametrize(
    ("model_type", "text_type"),
    [
        ("qwen3_5", "qwen3_5_text"),
        ("qwen3_5", None),
        ("qwen3_5_text", "qwen3_5_text"),
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        ("qwen3_5_moe_text", None),
        (None, "qwen3_5_text"),
    ],
)
def test_every_spelling_of_the_family_is_known(model_type: str | None, text_type: str | None) -> None:
    sparse = "moe" in f"{model_type}{text_type}"
    document = tiny.make_config(tiny.SPARSE if sparse else tiny.SMALL)
    document["model_type"], document["text_config"]["model_type"] = model_type, text_type
    assert parse(document).model_type == ("qwen3_5_moe" if sparse else "qwen3_5")


def test_another_architecture_inside_is_refused_too() -> None:
    document = tiny.make_config(tiny.SMALL)
    document["text_config"]["model_type"] = "qwen4_exp_text"
    with pytest.raises(CheckpointError, match="qwen4_exp_text"):
        parse(document)


@pytest.mark.parametrize("model_type", ["qwen4_exp", "llama", "qwen3_next", "", None, 3])
def test_another_architecture_is_refused_by_name(model_type: Any) -> None:
    document = tiny.make_config(tiny.SMALL, text_only=True) | {"model_type": model_type}
    with pytest.raises(CheckpointError, match=r"not of the Qwen3\.5 family"):
        parse(document)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", "24"),
        ("hidden_size", None),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", True),
        ("rms_norm_eps", "tiny"),
        ("rope_theta", 10**400),
        ("layer_types", ["linear_attention"]),
        ("layer_types", ["sliding"] * 4),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("partial_rotary_factor", 2),
        ("partial_rotary_factor", 0.07),  # 1 of 16
        ("partial_rotary_factor", 0.01),
        ("linear_conv_kernel_dim", 1),
    ],
)
def test_a_wrong_value_names_its_key(key: str, value: Any) -> None:
    document = tiny.make_config(tiny.SMALL, text_only=True)
    del document["rope_parameters"]
    with pytest.raises(CheckpointError, match=key):
        parse(document | {key: value})


@pytest.mark.parametrize("n", [0, 6, True, "2"])
def test_a_token_goes_to_one_expert_and_to_no_more_than_there_are(n: Any) -> None:
    document = tiny.make_config(tiny.SPARSE, text_only=True)
    assert parse(document | {"num_experts_per_tok": None}).n_experts_per_token == 5
    with pytest.raises(CheckpointError, match="num_experts_per_tok: expected a whole number from 1 to 5"):
        parse(document | {"num_experts_per_tok": n})


DEEP = b'{"a":' * 60 + b"1" + b"}" * 60
POINTER = b"version https://git-lfs.github.com/spec/v1\n"


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"\xff\xfe", b"3", b"[" * 100_000, DEEP, b'{"a": "\\ud800"}', POINTER],
    ids=range(9),
)
def test_no_json_is_a_source_that_cannot_be_read(raw: bytes) -> None:
    with pytest.raises(SourceError):
        parse_config("config.json", raw)


def test_quantisation_has_a_default_modules_and_modes_of_others() -> None:
    entry = {
        "group_size": 32,
        "bits": 4,
        "a.b": {"bits": 8},
        "c": False,
        "d": {"mode": "trellis", "bits": 2.5, "group_size": 16},
    }
    quantization = parse(tiny.make_config(tiny.SMALL) | {"quantization": entry}).quantization
    assert (quantization.default.bits, quantization.default.mode) == (4, "affine")
    assert (quantization.modules["a.b"].bits, quantization.modules["a.b"].group_size) == (8, 32)
    assert quantization.modules["c"] is None
    assert (quantization.modules["d"].mode, quantization.modules["d"].bits) == ("trellis", 0)
    foreign = parse(tiny.make_config(tiny.SMALL) | {"quantization_config": {"quant_method": "fp8"}})
    assert (foreign.quantization, foreign.foreign_scheme) == (None, "fp8")
