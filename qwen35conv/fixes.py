"""The only arithmetic of a conversion: a gain plus or minus one, a cast, and the patch embedding's axes."""

from __future__ import annotations

import numpy as np

from qwen35conv.facts.header import Dtype
from qwen35conv.planning.pieces import Fix, Write
from qwen35conv.source import values_of

_SHIFTS = {Fix.ADD_ONE: 1.0, Fix.SUBTRACT_ONE: -1.0, Fix.CAST: 0.0}


def fixed(write: Write, raw: bytes) -> bytes:
    """The bytes of a canonical tensor from its joined pieces.

    A shift is a float32 add, rounded once (nearest even) to the written dtype: the bits of the same add in that dtype.
    """
    if write.fix is Fix.NONE:
        return raw
    if write.fix is Fix.PATCH_AXES:
        n_bytes = write.source_dtype.n_bits // 8
        stored = np.frombuffer(raw, f"V{n_bytes}").reshape(write.source_shape)
        return np.ascontiguousarray(np.moveaxis(stored, 1, -1)).tobytes()
    values = values_of(write.source_dtype, raw)
    if write.fix is not Fix.CAST:
        values = values + np.float32(_SHIFTS[write.fix])
    return _stored(write.dtype, values)


def _stored(dtype: Dtype, values: np.ndarray) -> bytes:
    """Float32 values as a dtype stores them, rounded to nearest even.

    bfloat16 is rounded here by hand: importing ml_dtypes takes longer than converting a gigabyte.
    """
    if dtype is not Dtype.BF16:
        return values.astype("<f2" if dtype is Dtype.F16 else "<f4").tobytes()
    bits = values.view("<u4")
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype("<u2").tobytes()
