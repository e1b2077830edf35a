"""One safetensors header: bytes to facts, and facts to bytes.

A file is 8 bytes (header length, little-endian), the header (JSON) and the data area. The header maps each tensor to
its dtype, shape and byte range in the data area; ranges tile it without holes or overlaps.
Source: the format description in the safetensors project's README.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from qwen35conv.errors import HeaderError

MAX_HEADER_BYTES = 32_000_000
MAX_TENSORS = 100_000  # of one file: whole models of one tensor an expert have 62,000
LENGTH_BYTES = 8
LFS_POINTER = b"version https://git-lfs"
_MAX_OFFSET = 2**63 - 1
_MAX_AXES = 64  # no exporter writes more, and the product of a million sizes would never come back


class Dtype(Enum):
    """A safetensors dtype; the value is its name in a header."""

    BOOL = "BOOL"
    F4 = "F4"
    F6_E2M3 = "F6_E2M3"
    F6_E3M2 = "F6_E3M2"
    U8 = "U8"
    I8 = "I8"
    F8_E5M2 = "F8_E5M2"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    I16 = "I16"
    U16 = "U16"
    F16 = "F16"
    BF16 = "BF16"
    I32 = "I32"
    U32 = "U32"
    F32 = "F32"
    C64 = "C64"
    F64 = "F64"
    I64 = "I64"
    U64 = "U64"

    @property
    def n_bits(self) -> int:
        """Bits of one element."""
        return _BITS[self]

    @property
    def n_align(self) -> int:
        """Bytes that an element's offset should be a multiple of."""
        return max(1, self.n_bits // 8)


_BITS = {
    Dtype.F4: 4,
    Dtype.F6_E2M3: 6,
    Dtype.F6_E3M2: 6,
    **dict.fromkeys(
        (
            Dtype.BOOL,
            Dtype.U8,
            Dtype.I8,
            Dtype.F8_E5M2,
            Dtype.F8_E4M3,
            Dtype.F8_E8M0,
            Dtype.F8_E4M3FNUZ,
            Dtype.F8_E5M2FNUZ,
        ),
        8,
    ),
    **dict.fromkeys((Dtype.I16, Dtype.U16, Dtype.F16, Dtype.BF16), 16),
    **dict.fromkeys((Dtype.I32, Dtype.U32, Dtype.F32), 32),
    **dict.fromkeys((Dtype.C64, Dtype.F64, Dtype.I64, Dtype.U64), 64),
}
_DTYPES = {dtype.value: dtype for dtype in Dtype}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: `begin` and `end` (one past) are bytes of the data area."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """The facts of one file: its tensors in the order of their bytes, and where its data area begins."""

    tensors: tuple[TensorInfo, ...]
    metadata: tuple[tuple[str, str], ...]
    data_begin: int
    data_end: int

    @property
    def n_bytes(self) -> int:
        """The length of the whole file."""
        return self.data_end


def n_bytes_of(dtype: Dtype, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor; None where its elements do not fill whole bytes."""
    n_bits = dtype.n_bits * math.prod(shape)
    return None if n_bits % 8 else n_bits // 8


def parse_length(where: str, prefix: bytes, n_file: int) -> int:
    """Bytes of the header, from the first 8 bytes of a file of `n_file` bytes.

    Raises HeaderError where no header of that length can stand in the file.
    """
    if n_file == 0:
        raise HeaderError(f"{where}: the file is empty", hint="the download may have failed; fetch this file again")
    if prefix.startswith(LFS_POINTER[:LENGTH_BYTES]):
        raise HeaderError(
            f"{where}: a Git LFS pointer, not the file itself",
            hint="run `git lfs pull` in the repository, or download the file from the Hub",
        )
    if n_file < LENGTH_BYTES or len(prefix) < LENGTH_BYTES:
        raise HeaderError(
            f"{where}: truncated: expected 8 bytes of header length, found {n_file}",
            hint="the download may be cut short; fetch this file again",
        )
    n_header = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if n_header > MAX_HEADER_BYTES:
        raise HeaderError(
            f"{where}: header length {n_header} bytes is over the limit of {MAX_HEADER_BYTES}",
            hint="this is no safetensors file, or it is damaged",
        )
    if LENGTH_BYTES + n_header > n_file:
        raise HeaderError(
            f"{where}: truncated: header of {n_header} bytes in a file of {n_file}",
            hint="the download may be cut short; fetch this file again",
        )
    return n_header


def parse_header(where: str, raw: bytes, n_file: int) -> Header:
    """The header of a file of `n_file` bytes; `raw` is its JSON, without the 8 bytes of length.

    `where` names the file in errors. Raises HeaderError for anything that is not a strictly valid header.
    """
    entries = _parse_json(where, raw)
    _check_text(where, entries)
    metadata = _parse_metadata(where, entries.pop("__metadata__", None))
    tensors = sorted((_parse_tensor(where, name, entry) for name, entry in entries.items()), key=_by_offset)
    n_data = n_file - LENGTH_BYTES - len(raw)
    expected = 0
    for tensor in tensors:
        if tensor.begin != expected:
            fault = "overlaps the tensor before it" if tensor.begin < expected else "leaves a hole before it"
            raise HeaderError(
                f"{where}: {shown(tensor.name)}: {fault}: expected offset {expected}, found {tensor.begin}",
                hint="the file is damaged or was written by a broken exporter",
            )
        expected = tensor.end
    if expected > n_data:
        raise HeaderError(
            f"{where}: truncated: tensors take {expected} bytes, the file has {n_data}",
            hint="the download may be cut short; fetch this file again",
        )
    if expected < n_data:
        raise HeaderError(
            f"{where}: {n_data - expected} bytes after the last tensor belong to none",
            hint="the file is damaged or was written by a broken exporter",
        )
    data_begin = LENGTH_BYTES + len(raw)
    return Header(tuple(tensors), metadata, data_begin, n_file)


def has_more_values(raw: bytes, n_pairs: int, n_values: int) -> bool:
    """Whether JSON may hold more pairs or values than that: counted in its bytes, before any of it is made."""
    return raw.count(b":") > n_pairs or sum(raw.count(mark) for mark in b",[{") > n_values


def build_header(tensors: Iterable[TensorInfo], metadata: Mapping[str, str], *, multiple: int = 8) -> bytes:
    """The first bytes of a file, length included: their number is a multiple of `multiple`, padded with spaces.

    Tensors must be in the order of their offsets.
    """
    document: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for tensor in tensors:
        document[tensor.name] = {
            "dtype": tensor.dtype.value,
            "shape": tensor.shape,
            "data_offsets": (tensor.begin, tensor.end),
        }
    raw = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-(LENGTH_BYTES + len(raw)) % multiple)
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw


def shown(name: str) -> str:
    """A name for people: control characters and terminal escapes as escapes, long ones cut."""
    text = name if name.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)
    return text if len(text) <= 120 else f"{text[:100]}…{text[-16:]}"


class _DuplicateKeyError(ValueError):
    """A JSON object that has a key twice."""


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its pairs. Raises ValueError for a key that stands in it twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _DuplicateKeyError(f"the key {shown(twice)!r} stands in it twice")
    return found


def _parse_json(where: str, raw: bytes) -> dict[str, Any]:
    damaged = "this is no safetensors file, or it is damaged"
    if has_more_values(raw, 5 * MAX_TENSORS, 12 * MAX_TENSORS):
        raise HeaderError(f"{where}: the header holds more than {MAX_TENSORS} tensors", hint="save it in more shards")
    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise HeaderError(f"{where}: the header is not UTF-8 (byte {error.start})", hint=damaged) from error
    except RecursionError as error:
        raise HeaderError(f"{where}: the header is nested too deep", hint=damaged) from error
    except _DuplicateKeyError as error:
        raise HeaderError(f"{where}: duplicate key in the header: {error}", hint=damaged) from error
    except ValueError as error:
        raise HeaderError(f"{where}: the header is not valid JSON: {error}", hint=damaged) from error
    if not isinstance(document, dict):
        raise HeaderError(f"{where}: the header is no JSON object", hint=damaged)
    return document


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _check_text(where: str, entries: Mapping[str, Any]) -> None:
    """Names and metadata must be text that can be written again: JSON can spell half a character."""
    try:
        "".join(entries).encode()
    except UnicodeEncodeError as error:
        raise HeaderError(f"{where}: a name or its metadata in the header is not valid Unicode") from error


def _parse_metadata(where: str, entry: Any) -> tuple[tuple[str, str], ...]:
    if entry is None:
        return ()
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise HeaderError(f"{where}: __metadata__ must map strings to strings")
    _check_text(where, {**entry, "".join(entry.values()): None})
    return tuple(sorted(entry.items()))


def _told(value: Any) -> str:
    """A value of a header for people; where it is nested only its kind."""
    some = value[:4] if isinstance(value, list) else value
    is_flat = not any(isinstance(item, list | dict) for item in (some if isinstance(some, list) else [some]))
    return shown(str(some)) if is_flat else type(value).__name__


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_OFFSET


def _parse_tensor(where: str, name: str, entry: Any) -> TensorInfo:
    at = f"{where}: {shown(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"{at}: expected dtype, shape and data_offsets")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise HeaderError(f"{at}: unknown dtype {_told(entry['dtype'])!r}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > _MAX_AXES or not all(_is_size(n) for n in shape):
        raise HeaderError(f"{at}: the shape must be a list of sizes from 0 to 2^63 - 1")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise HeaderError(f"{at}: data_offsets must be two numbers from 0 to 2^63 - 1, found {_told(offsets)}")
    begin, end = offsets
    wanted = n_bytes_of(dtype, tuple(shape))
    if wanted is None:
        raise HeaderError(f"{at}: {dtype.value} {shape} does not fill whole bytes")
    if wanted != end - begin:
        raise HeaderError(
            f"{at}: expected {wanted} bytes for {dtype.value} {shape}, found {end - begin}",
            hint="the file is damaged or was written by a broken exporter",
        )
    return TensorInfo(name, dtype, tuple(shape), begin, end)


def _by_offset(tensor: TensorInfo) -> tuple[int, int]:
    return tensor.begin, tensor.end
