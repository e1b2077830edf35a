"""The header reader against the strict safetensors library, and every way a file can be wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from qwen35conv.errors import HeaderError
from qwen35conv.facts.header import Dtype, TensorInfo, build_header, n_bytes_of, parse_header, parse_length, shown


def read(raw: bytes) -> list[TensorInfo]:
    """The tensors of a whole file."""
    n_header = parse_length("f", raw[:8], len(raw))
    return list(parse_header("f", raw[8 : 8 + n_header], len(raw)).tensors)


def file_of(header: Any, data: bytes = b"") -> bytes:
    """A file with the given header, a JSON value or bytes as they are."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_file_by_the_safetensors_library_reads_as_it_is() -> None:
    raw = save({"b": np.ones((3, 2), np.float16), "a": np.zeros(5, np.int64)}, {"format": "pt"})
    tensors = {tensor.name: (tensor.dtype, tensor.shape, tensor.n_bytes) for tensor in read(raw)}
    assert tensors == {"a": (Dtype.I64, (5,), 40), "b": (Dtype.F16, (3, 2), 12)}


WRONG = {
    "empty": (b"", "the file is empty"),
    "shorter than its length": (b"\1\0\0", "truncated"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n", "Git LFS pointer"),
    "header past the file": (struct.pack("<Q", 90) + b"{}", "truncated: header of 90 bytes"),
    "header over 32 MB": (struct.pack("<Q", 32_000_001) + b"{}", "over the limit"),
    "header of astronomic length": (struct.pack("<Q", 2**64 - 1) + b"{}", "over the limit"),
    "invalid JSON": (file_of(b'{"a": '), "not valid JSON"),
    "invalid UTF-8": (file_of(b'{"\xff": 1}'), "not UTF-8"),
    "half a character": (file_of(b'{"\\ud800": {}}'), "not valid Unicode"),
    "not an object": (file_of([1]), "no JSON object"),
    "NaN": (file_of(b'{"a": NaN}'), "NaN is no JSON"),
    "deep nesting": (file_of(b"[" * 200_000), "nested too deep"),
    "a huge number": (file_of(b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "duplicate keys": (file_of(b'{"a": 1, "a": 1}'), "'a' stands in it twice"),
    "duplicate keys inside": (file_of(b'{"a": {"dtype": "F32", "dtype": "F32"}}'), "'dtype' stands in it twice"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), "map strings to strings"),
    "a tensor that is none": (file_of({"a": 5}), "a: expected dtype, shape and data_offsets"),
    "an entry too many": (file_of({"a": {**entry(), "x": 1}}, bytes(8)), "a: expected dtype"),
    "unknown dtype": (file_of({"a": entry("F33")}, bytes(8)), "a: unknown dtype 'F33'"),
    "empty dtype": (file_of({"a": entry("")}, bytes(8)), "a: unknown dtype ''"),
    "dtype no string": (file_of({"a": {**entry(), "dtype": 3}}, bytes(8)), "a: unknown dtype '3'"),
    "negative size": (file_of({"a": entry(shape=(-2,))}, bytes(8)), "a: the shape must be"),
    "size no whole number": (file_of({"a": entry(shape=(2.0,))}, bytes(8)), "a: the shape must be"),
    "size true": (file_of({"a": entry(shape=(True, 2))}, bytes(8)), "a: the shape must be"),
    "overflowing shape": (file_of({"a": entry(shape=(2**62, 2**62))}, bytes(8)), "a: expected 8507"),
    "many axes": (file_of({"a": entry(shape=(2,) * 65)}, bytes(8)), "a: the shape must be"),
    "negative offset": (file_of({"a": entry(offsets=(-8, 0))}, bytes(8)), "a: data_offsets must be"),
    "overflowing offset": (file_of({"a": entry(offsets=(2**64, 2**64 + 8))}, bytes(8)), "a: data_offsets must be"),
    "three offsets": (file_of({"a": entry(offsets=(0, 8, 8))}, bytes(8)), "a: data_offsets must be"),
    "reversed offsets": (file_of({"a": entry(offsets=(8, 0))}, bytes(8)), "a: expected 8 bytes"),
    "fewer bytes than the shape": (
        file_of({"a": entry(offsets=(0, 4))}, bytes(4)),
        "a: expected 8 bytes for F32 [2], found 4",
    ),
    "half a byte": (file_of({"a": entry("F4", (3,), (0, 1))}, bytes(1)), "does not fill whole bytes"),
    "a hole": (file_of({"a": entry(offsets=(4, 12))}, bytes(12)), "a: leaves a hole"),
    "an overlap": (file_of({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "b: overlaps"),
    "truncated data": (file_of({"a": entry()}, bytes(7)), "truncated: tensors take 8 bytes, the file has 7"),
    "bytes of no tensor": (file_of({"a": entry()}, bytes(9)), "1 bytes after the last tensor"),
}


# Where the safetensors library looks away.
LENIENT = {"NaN", "an entry too many", "many axes", "duplicate keys inside"}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_one_clear_error(name: str, tmp_path: Path) -> None:
    raw, message = WRONG[name]
    with pytest.raises(HeaderError) as caught:
        read(raw)
    assert message in str(caught.value)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    if name in LENIENT:
        return
    path = tmp_path / "f.safetensors"
    path.write_bytes(raw)
    with pytest.raises((SafetensorError, FileNotFoundError)), safe_open(path, framework="numpy"):
        pass


@pytest.mark.parametrize("metadata", [b'{"__metadata__": null}', b'{"__metadata__": {}}', b"{}"], ids=str)
def test_metadata_may_be_null_empty_or_absent(metadata: bytes) -> None:
    assert read(file_of(metadata)) == []


def test_names_with_terminal_escapes_are_shown_escaped() -> None:
    assert shown("a\x1b[31mb\nc\u202e") == "a\\x1b[31mb\\nc\\u202e"
    assert len(shown("x" * 5000)) < 120


NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> list[TensorInfo]:
    """Tensors that tile a data area."""
    infos, end = [], 0
    for name in draw(st.lists(NAMES, unique=True, max_size=8)):
        dtype, shape = draw(st.sampled_from(Dtype)), draw(SHAPES)
        n_bytes = n_bytes_of(dtype, shape)
        if n_bytes is None:
            dtype, n_bytes = Dtype.U8, n_bytes_of(Dtype.U8, shape)
        assert n_bytes is not None
        infos.append(TensorInfo(name, dtype, shape, end, end + n_bytes))
        end += n_bytes
    return infos


@given(layouts(), st.dictionaries(NAMES, NAMES, max_size=2), st.sampled_from([8, 64, 4096]))
@settings(deadline=None, max_examples=80)
def test_a_built_header_reads_as_what_it_was_built_from(
    infos: list[TensorInfo], metadata: dict[str, str], multiple: int
) -> None:
    raw = build_header(infos, metadata, multiple=multiple)
    assert len(raw) % multiple == 0
    whole = raw + bytes(infos[-1].end if infos else 0)
    header = parse_header("f", whole[8 : len(raw)], len(whole))
    assert header.data_begin == len(raw)
    assert sorted(header.tensors, key=lambda t: t.name) == sorted(infos, key=lambda t: t.name)
    assert dict(header.metadata) == metadata


@given(layouts())
@settings(deadline=None, max_examples=40)
def test_the_strict_library_accepts_a_built_header(
    tmp_path_factory: pytest.TempPathFactory, infos: list[TensorInfo]
) -> None:
    path = tmp_path_factory.mktemp("built") / "f.safetensors"
    path.write_bytes(build_header(infos, {"format": "mlx"}) + bytes(infos[-1].end if infos else 0))
    with safe_open(path, framework="numpy") as opened:
        assert sorted(opened.keys()) == sorted(info.name for info in infos)
        assert all(tuple(opened.get_slice(info.name).get_shape()) == info.shape for info in infos)


@given(st.binary(max_size=200) | layouts().map(lambda infos: build_header(infos, {})))
@settings(deadline=None, max_examples=200)
def test_any_bytes_are_a_header_or_one_error(raw: bytes) -> None:
    try:
        read(raw)
    except HeaderError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either outcome is right


@given(layouts(), st.data())
@settings(deadline=None, max_examples=100)
def test_what_we_accept_the_strict_library_accepts(
    tmp_path_factory: pytest.TempPathFactory, infos: list[TensorInfo], data: st.DataObject
) -> None:
    whole = bytearray(build_header(infos, {"format": "mlx"}) + bytes(infos[-1].end if infos else 0))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        read(bytes(whole))
    except HeaderError:
        return
    path = tmp_path_factory.mktemp("mutated") / "f.safetensors"
    path.write_bytes(whole)
    with safe_open(path, framework="numpy"):
        pass
