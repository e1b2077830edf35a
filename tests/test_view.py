"""The view against the converted folder: the same bits, for any checkpoint."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen35conv import Options, make_plan, open_source, open_view, read_checkpoint, write
from qwen35conv.generation.convention import Generation
from qwen35conv.planning.plan import Mtp, NormDtype


def bits(array: mx.array) -> np.ndarray:
    """The array's bytes, dtype and shape as NumPy has them."""
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(tiny.BF16)
    return np.array(array)


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[tiny.Made, dict[str, Any]]:
    """A raw checkpoint of any kind, and how it is cut into shards."""
    sparse = draw(st.booleans())
    made = tiny.make(
        tiny.Sizes(
            hidden=draw(st.sampled_from([20, 23, 26])),
            layers=draw(st.integers(1, 6)),
            experts=draw(st.integers(2, 4)) if sparse else 0,
            interval=draw(st.integers(2, 4)),
        ),
        seed=draw(st.integers(0, 999)),
        experts=draw(st.sampled_from(["fused", "single", "pairs"])),
        vision=draw(st.booleans()),
        mtp=draw(st.booleans()),
        tied=draw(st.booleans()),
        gain_dtype=draw(st.sampled_from([tiny.BF16, np.dtype("f4"), np.dtype("f2")])),
    )
    return made, {"n_shards": draw(st.integers(1, 4)), "index": draw(st.booleans()), "seed": draw(st.integers(0, 99))}


@given(
    checkpoints(),
    st.builds(
        Options,
        keep_vision=st.booleans(),
        mtp=st.sampled_from(Mtp),
        norm_dtype=st.sampled_from(NormDtype),
        max_shard_bytes=st.sampled_from([None, 1, 5000, 10**9]),
    ),
    st.integers(1, 3),
)
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
def test_the_view_equals_the_conversion_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[tiny.Made, dict[str, Any]], options: Options, jobs: int
) -> None:
    made, cut = drawn
    folder = tmp_path_factory.mktemp("view")
    source = open_source(str(tiny.save(folder / "source", made.raw, made.config, **cut)))
    plan = make_plan(read_checkpoint(source), options)
    write(source, plan, folder / "out", jobs=jobs)
    found = tiny.load(folder / "out")
    view = open_view(source, plan)
    tiny.assert_same({name: bits(array) for name, array in view.items()}, found)
    if options.norm_dtype is NormDtype.SOURCE:
        tiny.assert_same({name: found[name] for name in made.canonical}, made.canonical)

    again = open_source(str(folder / "out"))
    vouched = Options(keep_vision=options.keep_vision, mtp=options.mtp, assume=Generation.CANONICAL)
    identity = make_plan(read_checkpoint(again), vouched)
    assert identity.is_identity
    write(again, identity, folder / "twice", jobs=jobs)
    tiny.assert_same(tiny.load(folder / "twice"), found)


def test_rows_read_only_what_they_need(tmp_path: Any) -> None:
    made = tiny.make(tiny.SPARSE)
    source = open_source(str(tiny.save(tmp_path / "source", made.raw, made.config)))
    view = open_view(source, make_plan(read_checkpoint(source)))
    for path in ("embed_tokens.weight", "layers.0.mlp.switch_mlp.up_proj.weight", "norm.weight"):
        name = f"language_model.model.{path}"
        want = made.canonical[name][2:4]
        assert bits(view.rows(name, 2, 4)).tobytes() == np.ascontiguousarray(want).tobytes()
    assert "nothing" not in view
    with pytest.raises(KeyError):
        view["nothing"]


def test_every_dtype_arrives_as_mx_load_has_it(tmp_path: Any) -> None:
    made = tiny.make()
    folder = tiny.save(tmp_path / "source", made.canonical, made.config, n_shards=1)
    source = open_source(str(folder))
    view = open_view(source, make_plan(read_checkpoint(source)))
    loaded = mx.load(str(next(folder.glob("*.safetensors"))))
    assert isinstance(loaded, dict)
    for name, want in loaded.items():
        assert view[name].dtype == want.dtype
        assert mx.array_equal(view[name], want)
