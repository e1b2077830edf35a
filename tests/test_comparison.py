"""Two checkpoints compared: equal after each one's own plan, and every difference told."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import qwen35

from qwen35conv.comparison import Comparison, compare, make_pair
from qwen35conv.convert import write
from qwen35conv.errors import CheckpointError
from qwen35conv.generation.convention import Generation
from qwen35conv.planning.plan import Mtp, NormDtype, Options, make_plan
from qwen35conv.reading import read_checkpoint
from qwen35conv.source import open_source

GAIN = "language_model.model.layers.1.input_layernorm.weight"
PLAIN = "language_model.model.layers.3.self_attn.q_proj.weight"


def compared(a: Path, b: Path, **options: Any) -> Comparison:
    sources = [open_source(str(path)) for path in (a, b)]
    first, second = ((source, read_checkpoint(source)) for source in sources)
    return compare(make_pair(first, second, **options))


def converted(folder: Path, target: Path, options: Options) -> Path:
    source = open_source(str(folder))
    write(source, make_plan(read_checkpoint(source), options), target, check=False)
    return target


def saved(path: Path, tensors: tiny.Tensors, **kinds: bool) -> Path:
    return tiny.save(path, tensors, tiny.make_config(tiny.SMALL, **kinds))


OPTIONS = {
    "plain": Options(),
    "vision": Options(keep_vision=True),
    "mtp": Options(mtp=Mtp.KEEP),
    "sidecar": Options(mtp=Mtp.SIDECAR),
    "float32": Options(norm_dtype=NormDtype.FLOAT32),
    "resharded": Options(max_shard_bytes=9000, keep_vision=True, mtp=Mtp.KEEP),
}


@pytest.mark.parametrize("experts", ["fused", "single", "pairs", "none"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_raw_checkpoint_equals_its_conversion(tmp_path: Path, options: Options, experts: str) -> None:
    made = tiny.make(tiny.SMALL) if experts == "none" else tiny.make(tiny.SPARSE, experts=experts)
    raw = tiny.save(tmp_path / "raw", made.raw, made.config)
    result = converted(raw, tmp_path / "out", options)
    for a, b in ((raw, result), (result, raw), (raw, raw), (result, result)):
        found = compared(a, b)
        assert found.is_equal, found
        assert found.exit_code == 0
        assert found.n_compared >= len(made.canonical)
    assert [left.what for left in compared(raw, result).left] == [
        what
        for what, kept in (("vision tower", options.keep_vision), ("draft head (mtp)", options.mtp is Mtp.KEEP))
        if not kept
    ]


def test_a_kept_draft_head_and_vision_tower_are_compared(tmp_path: Path) -> None:
    made = tiny.make()
    other = dict(made.raw)
    for name in ("mtp.norm.weight", "model.visual.patch_embed.proj.weight"):
        other[name] = other[name].copy()
        other[name].reshape(-1)[3] += 1
    raw = tiny.save(tmp_path / "raw", made.raw, made.config)
    changed = tiny.save(tmp_path / "changed", other, made.config)
    result = converted(raw, tmp_path / "out", Options(keep_vision=True, mtp=Mtp.KEEP))
    names = {found.name: found.n_differ for found in compared(changed, result).values}
    assert names == {"language_model.mtp.norm.weight": 1, "vision_tower.patch_embed.proj.weight": 1}


@settings(deadline=None, max_examples=30)
@given(
    position=st.integers(0, 127 * 24 - 1),
    value=st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0, 3.5, -7.25]),
    before=st.sampled_from([np.nan, np.inf, 0.0, 1.5]),
)
def test_one_element_that_differs_is_counted_and_measured(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: float, before: float
) -> None:
    folder = tmp_path_factory.mktemp("one")
    made = tiny.make(mtp=False, vision=False)
    x, y = dict(made.canonical), dict(made.canonical)
    x[PLAIN], y[PLAIN] = x[PLAIN].copy(), y[PLAIN].copy()
    x[PLAIN].reshape(-1)[position], y[PLAIN].reshape(-1)[position] = before, value
    found = compared(saved(folder / "a", x), saved(folder / "b", y))
    p, q = (t[PLAIN].astype(np.float64) for t in (x, y))
    same = (p == q) & (np.signbit(p) == np.signbit(q)) | (np.isnan(p) & np.isnan(q))
    if same.all():
        assert found.is_equal
        return
    (difference,) = found.values
    assert (difference.name, difference.n, difference.n_differ) == (PLAIN, p.size, 1)
    if np.isfinite(before) and np.isfinite(value):
        assert (difference.max_abs, difference.n_not_finite) == (abs(before - value), 0)
    else:
        assert (difference.max_abs, difference.n_not_finite) == (None, 1)


def test_what_stands_on_one_side_or_in_another_form_is_named(tmp_path: Path) -> None:
    made = tiny.make(mtp=False, vision=False, tied=False)
    other = dict(made.canonical)
    del other["language_model.lm_head.weight"]
    other[PLAIN] = other[PLAIN].astype(np.float32) + np.float32(0.25)
    a = saved(tmp_path / "a", made.canonical)
    b = saved(tmp_path / "b", other, tied=True)
    found = compared(a, b)
    assert (found.only_a, found.only_b) == (("language_model.lm_head.weight",), ())
    (form,) = found.forms
    assert (form.name, [dtype.value for dtype in form.dtypes]) == (PLAIN, ["BF16", "F32"])
    (values,) = found.values
    assert (values.n_differ, values.max_abs) == (other[PLAIN].size, 0.25)
    assert compared(b, a).only_b == found.only_a
    assert found.exit_code == 1


def test_two_models_of_different_sizes_differ_in_shape(tmp_path: Path) -> None:
    wide = tiny.Sizes(intermediate=44)
    a, b = tiny.make(mtp=False, vision=False), tiny.make(wide, mtp=False, vision=False)
    found = compared(saved(tmp_path / "a", a.canonical), tiny.save(tmp_path / "b", b.canonical, b.config))
    assert {form.name.rsplit(".", 2)[-2] for form in found.forms} == {"gate_proj", "up_proj", "down_proj"}
    assert not {form.name for form in found.forms} & {value.name for value in found.values}


def shifted(tensors: tiny.Tensors, by: int) -> tiny.Tensors:
    gains = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")
    return {name: value + np.array(by, tiny.BF16) if name.endswith(gains) else value for name, value in tensors.items()}


def test_gains_that_were_shifted_twice_are_a_difference_of_one_and_repair_takes_it_back(tmp_path: Path) -> None:
    made = tiny.make(mtp=False, vision=False)
    good, twice = saved(tmp_path / "good", made.canonical), saved(tmp_path / "twice", shifted(made.canonical, 1))
    found = compared(good, twice)
    assert found.a.problem is None
    assert "double-shifted" in str(found.b.problem)
    assert found.values[0].max_abs == pytest.approx(1, abs=0.02)
    assert {value.name for value in found.values} == {
        name for name in made.canonical if not np.array_equal(made.canonical[name], shifted(made.canonical, 1)[name])
    }
    repaired = compared(good, twice, repair=True)
    assert repaired.b.problem is None
    assert all((value.max_abs or 0) < 0.02 for value in repaired.values)  # the second add rounded once more
    result = converted(twice, tmp_path / "out", Options(repair=True))
    assert compared(twice, result, repair=True).is_equal


def test_two_copies_of_a_broken_checkpoint_are_no_proof_unless_someone_vouches(tmp_path: Path) -> None:
    made = tiny.make(mtp=False, vision=False)
    twice = saved(tmp_path / "twice", shifted(made.canonical, 1))
    found = compared(twice, twice)
    assert not found.values
    assert not found.is_equal
    assert compared(twice, twice, assume=(Generation.CANONICAL, Generation.CANONICAL)).is_equal


def test_two_copies_of_what_nobody_can_tell_are_equal_where_they_are_laid_out_alike(tmp_path: Path) -> None:
    made = tiny.make(mtp=False, vision=False)
    gains = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")
    odd = {name: np.full_like(value, 0.37) if name.endswith(gains) else value for name, value in made.raw.items()}
    moved = {name: np.full_like(value, 0.37) if name.endswith(gains) else value
             for name, value in made.canonical.items()}  # fmt: skip
    a, b = saved(tmp_path / "a", odd), saved(tmp_path / "b", moved)
    assert "unknown" in str(compared(a, a).a.problem)
    assert compared(a, a).is_equal
    other = compared(a, b)
    assert not other.values
    assert not other.is_equal


def test_fp8_in_blocks_equals_what_it_is_dequantised_to(tmp_path: Path) -> None:
    block = (24, 40)
    made = tiny.make()
    coded = quantized.coded(made.raw, block)
    config = quantized.config_of(made.config, block)
    source = tiny.save(tmp_path / "fp8", coded, config)
    plain = tiny.save(tmp_path / "plain", quantized.decoded(coded, block), made.config)
    assert compared(source, plain).is_equal
    assert compared(source, source).is_equal
    name = next(name for name in coded if name.endswith("o_proj.weight_scale_inv"))
    coded[name] = coded[name] * np.array(2, coded[name].dtype)
    found = compared(source, tiny.save(tmp_path / "other", coded, config))
    assert not found.is_equal


def test_an_unknown_name_stops_the_comparison(tmp_path: Path) -> None:
    made = tiny.make()
    broken = tiny.save(tmp_path / "raw", made.raw | {"model.surprise": made.raw["lm_head.weight"]}, made.config)
    with pytest.raises(CheckpointError, match=r"model\.surprise"):
        compared(broken, broken)


def test_the_command_tells_people_and_scripts(tmp_path: Path) -> None:
    made = tiny.make()
    raw = tiny.save(tmp_path / "raw", made.raw, made.config)
    result = converted(raw, tmp_path / "out", Options())
    same = qwen35("diff", raw, result, "--json")
    assert same.returncode == 0, same.stderr
    document = json.loads(same.stdout)
    assert (document["schema"], document["equal"]) == ("qwen35/diff/1", True)
    assert [document[side]["verdict"] for side in "ab"] == ["raw", "canonical"]
    told = qwen35("diff", raw, result, "--assume-a", "canonical")
    assert told.returncode == 1
    assert "DIFFERENT" in told.stdout
    assert GAIN.rsplit(".", 1)[0] in told.stdout
    document = json.loads(qwen35("diff", raw, result, "--assume-a", "canonical", "--json").stdout)
    assert not document["equal"]
    assert GAIN in {value["name"] for value in document["values"]}
    assert qwen35("diff", raw, tmp_path / "none").returncode == 3


def test_memory_stays_bounded_by_chunks_not_by_tensors(tmp_path: Path) -> None:
    made = tiny.make(tiny.Sizes(vocab=700_000), mtp=False, vision=False)
    name = "language_model.model.embed_tokens.weight"
    other = dict(made.canonical)
    other[name] = other[name].copy()
    other[name][-1, -1] += 1
    n_tensor = other[name].nbytes
    a = tiny.save(tmp_path / "a", made.canonical, made.config)
    b = tiny.save(tmp_path / "b", other, made.config)
    del made, other
    tracemalloc.start()
    try:
        found = compared(a, b)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [value.name for value in found.values] == [name]
    assert n_tensor > 30_000_000
    assert peak < 4 * 2**20 * 4 * 12  # four readers; per chunk of 4 MB the bytes of both and their float64
