"""The forecast, against the table of known loads and against mlx-lm's own sanitize."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from qwen35conv.generation.convention import ConvLayout, Generation, Naming
from qwen35conv.generation.loaders import LOADERS, Artifact, Confidence, Outcome, Stored, forecast, stored_gains

RAW = Artifact(Naming.RAW, ConvLayout.RAW, has_mtp=True, gains=Stored.DELTA)
OURS = Artifact(Naming.CANONICAL, ConvLayout.CANONICAL, has_mtp=False, gains=Stored.GAMMA)
OLD, NEW, VLM, BUN, SWIFT, SWIFT_NEW = range(6)  # the order of LOADERS


def outcomes(artifact: Artifact) -> list[Outcome]:
    return [f.outcome for f in forecast(artifact)]


def test_the_known_loaders_are_listed_in_a_fixed_order() -> None:
    names = [(loader.name, loader.versions.split()[0]) for loader in LOADERS]
    assert names == [
        ("mlx-lm", "up"),
        ("mlx-lm", "from"),
        ("mlx-vlm", "0.7"),
        ("mlx-bun", "0.4"),
        ("mlx-swift-lm", "before"),
        ("mlx-swift-lm", "from"),
    ]


def test_every_loader_loads_a_raw_export_and_our_result_right() -> None:
    assert set(outcomes(RAW)) == {Outcome.RIGHT}
    assert set(outcomes(OURS)) == {Outcome.RIGHT}


@pytest.mark.parametrize(
    ("artifact", "wrong", "outcome"),
    [
        pytest.param(
            Artifact(Naming.CANONICAL, ConvLayout.CANONICAL, has_mtp=True, gains=Stored.GAMMA),
            {OLD, BUN, SWIFT},
            Outcome.SHIFTS_TWICE,
            id="converted, mtp head kept",
        ),
        pytest.param(
            Artifact(Naming.NEUTRAL, ConvLayout.CANONICAL, has_mtp=False, gains=Stored.GAMMA),
            {VLM},
            Outcome.SHIFTS_TWICE,
            id="converted, bare names",
        ),
        pytest.param(
            Artifact(Naming.CANONICAL, ConvLayout.CANONICAL, has_mtp=False, gains=Stored.DELTA),
            set(range(6)),
            Outcome.SHIFTS_NOT,
            id="never shifted",
        ),
        pytest.param(
            Artifact(Naming.CANONICAL, ConvLayout.CANONICAL, has_mtp=True, gains=Stored.DELTA),
            {NEW, VLM, SWIFT_NEW},
            Outcome.SHIFTS_NOT,
            id="never shifted, mtp head kept: the old rule is right by luck",
        ),
        pytest.param(
            Artifact(Naming.RAW, ConvLayout.RAW, has_mtp=False, gains=Stored.GAMMA),
            set(range(6)),
            Outcome.SHIFTS_TWICE,
            id="raw names and conv, gains gamma",
        ),
        pytest.param(
            Artifact(Naming.CANONICAL, ConvLayout.CANONICAL, has_mtp=False, gains=Stored.TWICE),
            set(range(6)),
            Outcome.STAYS_TWICE,
            id="shifted twice on disk",
        ),
        pytest.param(
            Artifact(Naming.MIXED, ConvLayout.CANONICAL, has_mtp=False, gains=Stored.GAMMA),
            {VLM},
            Outcome.SHIFTS_SOME,
            id="converted, names mixed",
        ),
        pytest.param(
            Artifact(Naming.RAW, ConvLayout.RAW, has_mtp=False, gains=Stored.DELTA, per_expert=True),
            {OLD, NEW, BUN, SWIFT, SWIFT_NEW},
            Outcome.CANNOT,
            id="raw, one tensor per expert: mlx-vlm stacks them",
        ),
        pytest.param(
            Artifact(Naming.RAW, ConvLayout.FLAT, has_mtp=False, gains=Stored.DELTA),
            set(range(6)),
            Outcome.CANNOT,
            id="conv squeezed",
        ),
        pytest.param(
            Artifact(Naming.RAW, ConvLayout.RAW, has_mtp=False, gains=Stored.DELTA, raw_quantization_keys=True),
            {OLD, VLM},
            Outcome.CANNOT,
            id="quantised under raw names",
        ),
    ],
)
def test_each_known_trap_is_forecast_for_the_loaders_that_fall_into_it(
    artifact: Artifact, wrong: set[int], outcome: Outcome
) -> None:
    found = outcomes(artifact)
    assert {i for i, o in enumerate(found) if o is outcome} == wrong
    assert all(o in (Outcome.RIGHT, Outcome.UNKNOWN) for i, o in enumerate(found) if i not in wrong)


def test_nothing_is_promised_where_the_gains_are_mixed() -> None:
    artifact = Artifact(Naming.RAW, ConvLayout.RAW, has_mtp=False, gains=stored_gains(Generation.MIXED))
    assert set(outcomes(artifact)) == {Outcome.UNKNOWN}


def test_a_verdict_says_what_is_on_disk() -> None:
    assert stored_gains(Generation.NEVER_SHIFTED) is Stored.DELTA
    assert stored_gains(Generation.SHIFTED_RAW) is Stored.GAMMA
    assert stored_gains(Generation.UNKNOWN) is None


SIZES = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 4, "vocab_size": 7, "num_attention_heads": 3}
NAMES = {Naming.RAW: "model.language_model.", Naming.CANONICAL: "language_model.model.", Naming.NEUTRAL: "model."}


@pytest.mark.parametrize(
    ("naming", "conv", "has_mtp", "gains"),
    list(product(NAMES, (ConvLayout.RAW, ConvLayout.CANONICAL), (False, True), Stored)),
)
def test_mlx_lm_itself_does_what_is_forecast_for_it(
    naming: Naming, conv: ConvLayout, has_mtp: bool, gains: Stored
) -> None:
    module = pytest.importorskip("mlx_lm.models.qwen3_5")
    version = pytest.importorskip("mlx_lm").__version__
    if tuple(int(x) for x in version.split(".")[:2]) < (0, 32):
        pytest.skip(f"the forecast tested here is for mlx-lm from 0.32, this is {version}")
    mx: Any = pytest.importorskip("mlx.core")
    stored = {Stored.DELTA: -0.25, Stored.GAMMA: 0.75, Stored.TWICE: 1.75}[gains]
    prefix = NAMES[naming]
    weights = {
        f"{prefix}layers.0.input_layernorm.weight": mx.full((12,), stored),
        f"{prefix}layers.0.linear_attn.conv1d.weight": mx.zeros((10, 1, 4) if conv is ConvLayout.RAW else (10, 4, 1)),
    }
    if has_mtp:
        weights["mtp.norm.weight"] = mx.full((12,), 1.5)
    model = module.Model(module.ModelArgs.from_dict({"model_type": "qwen3_5", "text_config": dict(SIZES)}))
    loaded = model.sanitize(weights)["language_model.model.layers.0.input_layernorm.weight"][0].item()

    expected = {
        Outcome.RIGHT: 0.75,
        Outcome.SHIFTS_NOT: -0.25,
        Outcome.SHIFTS_TWICE: stored + 1,
        Outcome.STAYS_TWICE: 1.75,
    }[outcomes(Artifact(naming, conv, has_mtp, gains))[NEW]]
    assert loaded == expected
    assert LOADERS[NEW].confidence is Confidence.TESTED


def test_mlx_lm_itself_leaves_per_expert_names_unstacked() -> None:
    module = pytest.importorskip("mlx_lm.models.qwen3_5_moe")
    mx: Any = pytest.importorskip("mlx.core")
    sizes = SIZES | {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 5,
        "shared_expert_intermediate_size": 6,
    }
    model = module.Model(module.ModelArgs.from_dict({"model_type": "qwen3_5_moe", "text_config": sizes}))
    name = "model.language_model.layers.0.mlp.experts.1.gate_proj.weight"
    loaded = model.sanitize({name: mx.zeros((5, 12))})
    assert not any("switch_mlp" in key for key in loaded)
    assert outcomes(Artifact(Naming.RAW, ConvLayout.RAW, False, Stored.DELTA, per_expert=True))[NEW] is Outcome.CANNOT
