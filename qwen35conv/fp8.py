"""FP8 values times the scales of their blocks, as bfloat16.

The product is taken in float32 and rounded once, to nearest even. A block has 256 possible products: they are made
once, and each stored code picks one.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from qwen35conv.planning.pieces import Write
from qwen35conv.reading import values_of
from qwen35conv.rounding import as_bfloat16


def dequantized(
    write: Write,
    raw: bytes,  # codes [R, C] of all pieces, one after the other
    scales: bytes,  # of all pieces' blocks, likewise
) -> np.ndarray:
    """Bits of bfloat16 values [R, C]."""
    blocks = write.blocks
    assert blocks is not None
    codes = np.frombuffer(raw, "u1").reshape(-1, write.n_columns)
    factors = values_of(blocks.dtype, scales).reshape(-1, -(-write.n_columns // blocks.n_columns))
    out = np.empty(codes.shape, "<u2")
    begin = band = 0
    # One offset a column into the products of its row of blocks.
    offsets = np.arange(write.n_columns, dtype=np.int64) // blocks.n_columns * 256
    for piece, first in zip(write.pieces, blocks.first_rows, strict=True):
        end, row = begin + piece.n_bytes // write.n_columns, first
        while begin < end:
            last = min(end, begin + blocks.n_rows - row)
            with np.errstate(over="ignore", invalid="ignore"):
                products = as_bfloat16(factors[band][:, None] * _values()[None, :])
            np.take(products.reshape(-1), codes[begin:last] + offsets, out=out[begin:last], mode="clip")
            begin, row, band = last, 0, band + 1
    return out


@cache
def _values() -> np.ndarray:
    """The 256 values of E4M3 without infinities: float32. Source: FP8 Formats for Deep Learning, arXiv:2209.05433."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -size, size).astype(np.float32)
