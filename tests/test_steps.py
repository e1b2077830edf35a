from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35conv.facts.header import Dtype, build_header
from qwen35conv.fixes import fixed
from qwen35conv.planning.pieces import Fix, Piece, Rule, Write
from qwen35conv.planning.plan import PlanShard
from qwen35conv.planning.rows import rows_of
from qwen35conv.writing.alignment import METADATA
from qwen35conv.writing.steps import steps_of


def copied(name: str, *pieces: Piece) -> Write:
    n_bytes = sum(piece.n_bytes for piece in pieces)
    return Write(name, Dtype.U8, (n_bytes,), pieces, Fix.NONE, Rule.KEEP, Dtype.U8, (n_bytes,), (name,))


def computed(name: str, begin: int, n: int) -> Write:
    piece = Piece("a", begin, begin + 2 * n)
    return Write(name, Dtype.BF16, (n,), (piece,), Fix.ADD_ONE, Rule.GAIN, Dtype.BF16, (n,), (name,))


def test_ranges_that_follow_each_other_are_one_copy() -> None:
    shard = PlanShard("x", (copied("p", Piece("a", 10, 20)), copied("q", Piece("a", 20, 25), Piece("a", 25, 40))))
    header, *steps = steps_of(shard)
    assert [(step.n_bytes, step.content) for step in steps] == [(30, Piece("a", 10, 40))]
    assert header.content == build_header(shard.tensors(), METADATA)
    assert steps[0].offset == header.n_bytes


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param((Piece("a", 10, 20), Piece("b", 20, 30)), id="another file"),
        pytest.param((Piece("a", 10, 20), Piece("a", 21, 30)), id="a hole"),
        pytest.param((Piece("a", 10, 20), Piece("a", 10, 20)), id="the same again"),
        pytest.param((Piece("a", 20, 30), Piece("a", 10, 20)), id="backwards"),
    ],
)
def test_other_ranges_stay_apart(pieces: tuple[Piece, ...]) -> None:
    assert [step.content for step in steps_of(PlanShard("x", (copied("p", *pieces),)))[1:]] == list(pieces)


def test_a_computed_tensor_stands_between_copies() -> None:
    shard = PlanShard("x", (copied("p", Piece("a", 0, 10)), computed("g", 10, 5), copied("q", Piece("a", 20, 28))))
    header, *steps = steps_of(shard)
    assert [step.content for step in steps] == [Piece("a", 0, 10), shard.writes[1], Piece("a", 20, 28)]
    assert [step.offset - header.n_bytes for step in steps] == [0, 10, 20]


def test_a_long_copy_is_cut_where_a_thread_may_stop() -> None:
    n_bytes = (200 << 20) + 3
    steps = steps_of(PlanShard("x", (copied("p", Piece("a", 7, 7 + n_bytes)),)))[1:]
    assert max(step.n_bytes for step in steps) <= 64 << 20
    assert sum(step.n_bytes for step in steps) == n_bytes


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 60), st.integers(0, 20)), max_size=4)))
def test_steps_tile_the_file_and_bring_the_same_bytes(tensors: list[list[tuple[str, int, int]]]) -> None:
    random = np.random.default_rng(5)
    files = {name: random.integers(0, 256, 80, dtype=np.uint8).tobytes() for name in "ab"}
    writes = [copied(f"t{i}", *(Piece(f, at, at + n) for f, at, n in parts)) for i, parts in enumerate(tensors)]
    shard = PlanShard("x", tuple(writes))
    built = b""
    for step in steps_of(shard):
        assert step.offset == len(built)
        content = step.content
        built += files[content.file][content.begin : content.end] if isinstance(content, Piece) else content  # type: ignore[operator]
        assert step.offset + step.n_bytes == len(built)
    wanted = b"".join(files[piece.file][piece.begin : piece.end] for write in writes for piece in write.pieces)
    assert built == build_header(shard.tensors(), METADATA) + wanted


@pytest.mark.parametrize("n_rows", [1, 7, 3001])
def test_a_computed_tensor_comes_in_small_parts_that_join_to_the_whole(n_rows: int) -> None:
    random = np.random.default_rng(3)
    patch = random.standard_normal((n_rows, 3, 2, 16, 18)).astype(ml_dtypes.bfloat16)
    raw = patch.tobytes()
    piece = Piece("a", 100, 100 + len(raw))
    shape = (n_rows, 2, 16, 18, 3)
    write = Write("p", Dtype.BF16, shape, (piece,), Fix.PATCH_AXES, Rule.PATCH, Dtype.BF16, patch.shape, ("s",))
    parts = list(rows_of(write))
    assert max(part.n_bytes for part in parts) <= 4 << 20
    joined = b"".join(fixed(part, raw[part.pieces[0].begin - 100 : part.pieces[0].end - 100]) for part in parts)
    assert joined == np.ascontiguousarray(patch.transpose(0, 2, 3, 4, 1)).tobytes()
    assert joined == fixed(write, raw)


def test_rows_larger_than_a_part_come_one_by_one() -> None:
    shape = (3, 3, 1, 1000, 1001)
    piece = Piece("a", 0, 2 * int(np.prod(shape)))
    write = Write("p", Dtype.BF16, (3, 1, 1000, 1001, 3), (piece,), Fix.PATCH_AXES, Rule.PATCH, Dtype.BF16, shape, ())
    assert [part.source_shape[0] for part in rows_of(write)] == [1, 1, 1]


def test_a_cast_gain_grows_part_by_part() -> None:
    gain = replace(computed("g", 0, 3), dtype=Dtype.F32)
    (step,) = steps_of(PlanShard("x", (gain,)))[1:]
    assert step.n_bytes == 12
