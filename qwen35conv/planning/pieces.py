"""What a plan consists of: byte ranges, the few fixes, and one fate for every stored tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from qwen35conv.facts.checkpoint import SourceTensor
from qwen35conv.facts.config import ModuleQuantization
from qwen35conv.facts.header import Dtype, n_bytes_of


class Fix(Enum):
    """The one thing that may be done to the bytes of a tensor."""

    NONE = "none"
    ADD_ONE = "add one"
    SUBTRACT_ONE = "subtract one"
    CAST = "cast"  # a gain written in another dtype, value unchanged
    PATCH_AXES = "patch axes"  # [O, C, T, H, W] -> [O, T, H, W, C]
    DEQUANTIZE = "dequantize"  # FP8 values times the scales of their blocks
    QUANTIZE = "quantize"  # one part of what MLX packs a weight into, dequantised before where it has blocks


class Rule(Enum):
    """What happens to a tensor, for people and counts."""

    KEEP = "unchanged"
    RENAME = "renamed"
    MOVE_AXES = "conv axes moved"
    GAIN = "gains shifted"
    CAST = "gains cast"
    SPLIT = "fused experts split"
    STACK = "experts stacked"
    PATCH = "patch embedding transposed"
    DEQUANTIZE = "dequantized"
    QUANTIZE = "quantized"


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `begin` to `end` (one past) of a source file."""

    file: str
    begin: int
    end: int

    @property
    def n_bytes(self) -> int:
        """Bytes of the piece."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Blocks:
    """How an FP8 weight is scaled: for each of its pieces, which hold rows of one matrix, the rows of scales over them.

    A scale covers `n_rows` x `n_columns` values; `first_rows` are rows of a piece's first block that lie before it.
    """

    pieces: tuple[Piece, ...]
    first_rows: tuple[int, ...]
    dtype: Dtype
    n_rows: int
    n_columns: int


class Part(Enum):
    """One of the tensors that a packed weight becomes, by its parameter's name."""

    WEIGHT = "weight"
    SCALES = "scales"
    BIASES = "biases"


@dataclass(frozen=True, slots=True)
class Packed:
    """How a weight is packed, from values in `dtype`, and which part of it a write holds."""

    quantization: ModuleQuantization
    dtype: Dtype
    part: Part


@dataclass(frozen=True, slots=True)
class Write:
    """One canonical tensor: its pieces joined, then fixed. `source_dtype` is how the pieces are stored.

    Of a weight that is dequantised or quantised (`blocks`, `packed`) each piece holds whole rows of one matrix.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    fix: Fix
    rule: Rule
    source_dtype: Dtype
    source_shape: tuple[int, ...]
    sources: tuple[str, ...]
    blocks: Blocks | None = None
    packed: Packed | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes written."""
        found = n_bytes_of(self.dtype, self.shape)
        assert found is not None
        return found

    @property
    def read_pieces(self) -> tuple[Piece, ...]:
        """All that is read for it: the pieces, and the scales of their blocks."""
        return self.pieces if self.blocks is None else self.pieces + self.blocks.pieces

    @property
    def n_columns(self) -> int:
        """Values in a row as stored, of a weight that is dequantised or quantised."""
        return self.source_shape[-1]


@dataclass(frozen=True, slots=True)
class Skip:
    """A stored tensor that is not written, and why."""

    name: str
    file: str
    n_bytes: int
    reason: str


def piece_of(tensor: SourceTensor, begin: int = 0, n_bytes: int | None = None) -> Piece:
    """A tensor's bytes, or `n_bytes` of them from `begin` on."""
    start = tensor.begin + begin
    return Piece(tensor.file, start, tensor.end if n_bytes is None else start + n_bytes)


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same bytes in the same order in as few pieces as possible."""
    merged: list[Piece] = []
    for piece in pieces:
        if merged and merged[-1].file == piece.file and merged[-1].end == piece.begin:
            merged[-1] = Piece(piece.file, merged[-1].begin, piece.end)
        else:
            merged.append(piece)
    return tuple(merged)


def copy_of(tensor: SourceTensor, name: str, shape: tuple[int, ...] | None = None) -> Write:
    """A write of all the tensor's bytes under a new name, and possibly a shape that orders them alike."""
    shape = tensor.shape if shape is None else shape
    rule = Rule.MOVE_AXES if shape != tensor.shape else Rule.KEEP if name == tensor.name else Rule.RENAME
    return Write(
        name, tensor.dtype, shape, (piece_of(tensor),), Fix.NONE, rule, tensor.dtype, tensor.shape, (tensor.name,)
    )
