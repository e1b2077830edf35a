"""What others make of a result: mlx-lm loads it strictly and computes the same bits, transformers the same logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import oracle
import pytest
from mlx.utils import tree_flatten
from oracle import Case
from safetensors.numpy import load_file

from qwen35conv import Options, make_plan, open_source, read_checkpoint, write
from qwen35conv.planning.plan import NormDtype

pytestmark = pytest.mark.slow

TEXT_ONLY = ("raw-dense-text-tied", "raw-moe-text-per-expert")  # as transformers writes them
LOADABLE = [case for case in oracle.SOUND if case.name not in TEXT_ONLY]
WITH_LOGITS = [case for case in oracle.CASES if case.logits.exists()]
EXACT = Options(norm_dtype=NormDtype.FLOAT32)
SHIFTED = ("_layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")
IDS = [[7, 3, 41, 12, 0, 29, 33, 5, 18]]


def named(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    """Where equal operations give equal bits."""
    before = mx.default_device()
    mx.set_default_device(mx.Device(mx.cpu))
    yield
    mx.set_default_device(before)


@pytest.fixture(scope="module")
def mlx_lm() -> ModuleType:
    module: ModuleType = pytest.importorskip("mlx_lm.utils")
    return module


@pytest.fixture(scope="module")
def make_oracle() -> ModuleType:
    for name in ("torch", "transformers", "mlx_lm"):
        pytest.importorskip(name)
    import make_oracle

    return make_oracle


def convert(source: Path, destination: Path, options: Options | None = None) -> Path:
    opened = open_source(str(source))
    write(opened, make_plan(read_checkpoint(opened), options), destination, check=False)  # the judges are these tests
    return destination


def load(mlx_lm: ModuleType, folder: Path, *, float32: bool = False, **config: Any) -> Any:
    """mlx-lm's model, loaded strictly."""
    model, _ = mlx_lm.load_model(folder, strict=True, model_config=config)
    if float32:
        model.set_dtype(mx.float32)
    return model


def run(model: Any, ids: Any = IDS) -> np.ndarray:
    """Logits [1, T, V], exactly, as float32."""
    return np.array(model(mx.array(ids)).astype(mx.float32))


def shifted_again(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    return {name: w + 1 if name.endswith(SHIFTED) and w.ndim == 1 else w for name, w in weights.items()}


def older_rule(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """What loaders did before the draft head stopped to count: any mtp tensor, or any conv to move, means raw."""
    is_raw = any("mtp." in name or ("conv1d.weight" in name and w.shape[-1] != 1) for name, w in weights.items())
    kept = {
        name: w.moveaxis(2, 1) if "conv1d.weight" in name and w.shape[-1] != 1 else w
        for name, w in weights.items()
        if "mtp." not in name
    }
    return shifted_again(kept) if is_raw else kept


@named(LOADABLE)
def test_mlx_lm_computes_the_same_bits_from_source_and_result(case: Case, mlx_lm: ModuleType, tmp_path: Path) -> None:
    sparse = "moe" in case.name  # whose gathered product MLX has for the CPU in float32 alone
    from_source = run(load(mlx_lm, case.source, float32=sparse))
    from_result = run(load(mlx_lm, convert(case.source, tmp_path / "out"), float32=sparse))
    assert from_source.std() > 0.5
    assert from_result.tobytes() == from_source.tobytes()


@named([case for case in oracle.SOUND if case.name in TEXT_ONLY])
def test_mlx_lm_loads_text_only_exports_after_conversion_alone(case: Case, mlx_lm: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Model type .* not supported"):
        load(mlx_lm, case.source)
    model = load(mlx_lm, convert(case.source, tmp_path / "out"), float32=True)
    kind = case.config()["model_type"].removesuffix("_text")
    if kind == "qwen3_5_moe":  # under the right type, too: nothing stacks the experts
        with pytest.raises(ValueError, match="parameters not in model"):
            load(mlx_lm, case.source, model_type=kind)
    else:
        assert run(model).tobytes() == run(load(mlx_lm, case.source, float32=True, model_type=kind)).tobytes()


@named(WITH_LOGITS)
def test_with_float32_gains_the_logits_are_those_of_transformers(
    case: Case, mlx_lm: ModuleType, tmp_path: Path
) -> None:
    check_logits(case, load(mlx_lm, convert(case.source, tmp_path / "out", EXACT), float32=True))


def check_logits(case: Case, model: Any) -> None:
    """The logits are those recorded, and they would not be with one more shift."""
    recorded = load_file(case.logits)
    ids, logits = recorded["input_ids"], recorded["logits"]
    np.testing.assert_allclose(run(model, ids), logits, atol=5e-3, rtol=0)
    model.load_weights(list(shifted_again(dict(tree_flatten(model.parameters()))).items()))
    assert np.abs(run(model, ids) - logits).max() > 1


@named(WITH_LOGITS)
def test_with_gains_rounded_alike_transformers_agrees_with_the_result(
    case: Case, make_oracle: ModuleType, mlx_lm: ModuleType, tmp_path: Path
) -> None:
    """A stored gain is 1 + delta rounded to bfloat16, as any MLX loader has it; transformers adds in float32."""
    import torch
    import transformers

    kind = getattr(transformers, case.config()["architectures"][0])
    theirs = kind.from_pretrained(case.source, dtype=torch.float32, experts_implementation=experts(case)).eval()
    with torch.no_grad():
        for name, gain in theirs.named_parameters():
            if make_oracle.is_gain(name, gain) and "visual" not in name:
                gain.copy_((gain.bfloat16() + 1).float() - 1)
        ids = load_file(case.logits)["input_ids"]
        logits = theirs(input_ids=torch.from_numpy(ids).long(), use_cache=False).logits.numpy()
    ours = run(load(mlx_lm, convert(case.source, tmp_path / "out"), float32=True), ids)
    np.testing.assert_allclose(ours, logits, atol=5e-3, rtol=0)


def experts(case: Case) -> str | None:
    return "eager" if "moe" in case.name else None


@named(oracle.BROKEN)
def test_a_repaired_result_computes_what_its_sound_twin_does(case: Case, mlx_lm: ModuleType, tmp_path: Path) -> None:
    sound = run(load(mlx_lm, case.twin.source, float32=True))
    repaired = run(load(mlx_lm, convert(case.source, tmp_path / "out", Options(repair=True)), float32=True))
    broken = run(load(mlx_lm, case.source, float32=True))  # loads without a word
    if case.generation != "double-shifted":
        assert repaired.tobytes() == sound.tobytes()
    # A double shift has rounded twice: what is left is small beside what the shift did.
    assert np.abs(broken - sound).max() > 2
    assert 3 * np.abs(repaired - sound).max() < np.abs(broken - sound).max()


@named(LOADABLE)
def test_the_rule_of_older_loaders_does_not_touch_the_result(
    case: Case, mlx_lm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.models import qwen3_5

    result = convert(case.source, tmp_path / "out")
    from_result = run(load(mlx_lm, result, float32=True))
    from_source = run(load(mlx_lm, case.source, float32=True))
    monkeypatch.setattr(qwen3_5.TextModel, "sanitize", older_rule)
    assert run(load(mlx_lm, result, float32=True)).tobytes() == from_result.tobytes()
    apart = np.abs(run(load(mlx_lm, case.source, float32=True)) - from_source).max()
    assert (apart > 2) if case.name == "canonical-mtp-kept" else (apart == 0)


@named(oracle.CASES)
def test_mlx_lms_sanitize_still_gives_what_was_recorded(case: Case, make_oracle: ModuleType) -> None:
    if case.is_broken:
        assert case.expected() == case.twin.expected()
    elif case.name == "raw-moe-text-per-expert":  # which mlx-lm can't stack
        tensors = fused(make_oracle.loaded(case.source))
        assert recomputed(make_oracle, tensors, case) == case.expected()
    else:
        assert recomputed(make_oracle, make_oracle.loaded(case.source), case) == case.expected()


def recomputed(make_oracle: ModuleType, tensors: dict[str, Any], case: Case) -> dict[str, oracle.Digest]:
    found = make_oracle.sanitized(tensors, case.config())
    return {name: (entry["dtype"], tuple(entry["shape"]), entry["sha256"]) for name, entry in found.items()}


def fused(tensors: dict[str, Any]) -> dict[str, Any]:
    """Each expert's projections as the layer's two fused tensors."""
    import torch

    found = {name: value for name, value in tensors.items() if ".experts." not in name}
    stems = sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name})
    for stem in stems:
        n = sum(name.startswith(f"{stem}.experts.") for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors[f"{stem}.experts.{e}.{proj}_proj.weight"] for e in range(n)])
            for proj in ("gate", "up", "down")
        )
        found |= {f"{stem}.experts.gate_up_proj": torch.cat([gate, up], dim=1), f"{stem}.experts.down_proj": down}
    return found


@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("kind", ["raw_dense_vl_mtp", "raw_moe_text_per_expert", "raw_moe_vl_mtp"])
def test_other_seeds_and_sizes_convert_as_well(
    kind: str, seed: int, make_oracle: ModuleType, mlx_lm: ModuleType, tmp_path: Path
) -> None:
    sizes = make_oracle.Sizes(
        hidden=20, vocab=60, layers=6 + seed % 2, key_heads=3, value_heads=9, key_dim=12, value_dim=6, experts=7
    )
    (tmp_path / kind).mkdir()
    getattr(make_oracle, kind)(tmp_path / kind, seed, sizes)
    case = Case(tmp_path / kind)
    result = convert(case.source, tmp_path / "out")
    assert oracle.digests(result) == case.expected()
    load(mlx_lm, result)
    check_logits(case, load(mlx_lm, convert(case.source, tmp_path / "exact", EXACT), float32=True))
