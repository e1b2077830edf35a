"""FP8 weights that are scaled block by block: which scales belong to which weight, and the writes that dequantise it.

Source: transformers' fine-grained FP8 exports: `weight` F8_E4M3 [O, I] beside `weight_scale_inv` [ceil(O / 128),
ceil(I / 128)] (a factor, in spite of its name), fused experts with a leading axis.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from qwen35conv.errors import CheckpointError
from qwen35conv.facts.checkpoint import SourceTensor, few
from qwen35conv.facts.config import ModelConfig
from qwen35conv.facts.header import Dtype, shown
from qwen35conv.facts.layout import BLOCK_SCALE
from qwen35conv.planning.pieces import Blocks, Fix, Piece, Rule, Write, piece_of

CODES = Dtype.F8_E4M3
_SCALES = (Dtype.F32, Dtype.BF16)


def pair_scales(
    label: str, tensors: Sequence[SourceTensor], config: ModelConfig
) -> tuple[list[SourceTensor], Mapping[str, SourceTensor]]:
    """The tensors without the scales, and the scales by the name of their weight.

    Raises CheckpointError for a scale without its weight, or scales of another shape. A weight without scales is a
    scheme of its own, and refused before.
    """
    scales = {t.name.removesuffix(BLOCK_SCALE): t for t in tensors if t.name.endswith(BLOCK_SCALE)}
    weights = [tensor for tensor in tensors if not tensor.name.endswith(BLOCK_SCALE)]
    coded = {tensor.name: tensor for tensor in weights if tensor.dtype is CODES}
    if orphans := [scale.name for name, scale in scales.items() if name not in coded]:
        raise CheckpointError(
            f"{label}: {len(orphans)} scales belong to no FP8 weight: {few(orphans)}",
            hint="a scale is never dropped; fetch or export the checkpoint again",
        )
    for name, scale in scales.items():
        _check_scale(coded[name], scale, config)
    return weights, scales


def _check_scale(weight: SourceTensor, scale: SourceTensor, config: ModelConfig) -> None:
    if len(weight.shape) not in (2, 3):
        raise CheckpointError(f"{shown(weight.name)}: an FP8 weight of shape {list(weight.shape)} has no blocks")
    assert config.fp8_block is not None
    rows, columns = config.fp8_block
    wanted = (*weight.shape[:-2], -(-weight.shape[-2] // rows), -(-weight.shape[-1] // columns))
    if scale.shape != wanted or scale.dtype not in _SCALES:
        raise CheckpointError(
            f"{shown(scale.name)}: expected F32 or BF16 {list(wanted)} for blocks of {rows} x {columns}, "
            f"found {scale.dtype.value} {list(scale.shape)}",
            hint="weight_block_size in config.json may be another checkpoint's; download the BF16 release",
        )


def dequantized(
    writes: Sequence[Write],
    tensors: Sequence[SourceTensor],
    scales: Mapping[str, SourceTensor],
    block: tuple[int, int],
) -> list[Write]:
    """The same writes, those of FP8 weights as bfloat16 by the scales of their blocks."""
    by_place = {(tensor.file, tensor.begin): tensor for tensor in tensors if tensor.name in scales}
    starts: dict[str, list[int]] = {}
    for file, begin in sorted(by_place):
        starts.setdefault(file, []).append(begin)

    def matrices(piece: Piece) -> Iterator[tuple[SourceTensor, int, int, Piece]]:
        """A piece cut where matrices end: tensor, matrix, its first row in it, and the bytes."""
        begin = piece.begin
        while begin < piece.end:
            found = starts[piece.file]
            tensor = by_place[piece.file, found[bisect_right(found, begin) - 1]]
            n_row = tensor.shape[-1]
            n_matrix = tensor.shape[-2] * n_row
            matrix, offset = divmod(begin - tensor.begin, n_matrix)
            end = min(piece.end, tensor.begin + (matrix + 1) * n_matrix)
            yield tensor, matrix, offset // n_row, Piece(piece.file, begin, end)
            begin = end

    def one(write: Write) -> Write:
        dtypes = {scales[name].dtype for name in write.sources}
        if len(dtypes) > 1:
            raise CheckpointError(
                f"{write.name}: the scales of its experts are stored in different dtypes",
                hint="experts of one layer must be alike to be stacked",
            )
        pieces, over, first_rows = [], [], []
        for cut in write.pieces:
            for tensor, matrix, first, piece in matrices(cut):
                scale = scales[tensor.name]
                low, high = first // block[0], -(-(first + piece.n_bytes // tensor.shape[-1]) // block[0])
                n_row = scale.shape[-1] * scale.dtype.n_bits // 8
                pieces.append(piece)
                over.append(piece_of(scale, (matrix * scale.shape[-2] + low) * n_row, (high - low) * n_row))
                first_rows.append(first % block[0])
        return replace(
            write,
            dtype=Dtype.BF16,
            fix=Fix.DEQUANTIZE,
            rule=Rule.DEQUANTIZE,
            pieces=tuple(pieces),
            sources=(*write.sources, *(scales[name].name for name in write.sources)),
            blocks=Blocks(tuple(over), tuple(first_rows), dtypes.pop(), *block),
        )

    return [write if write.dtype is not CODES else one(write) for write in writes]
