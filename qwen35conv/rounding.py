"""Float32 to bfloat16, rounded to nearest even.

By hand: importing ml_dtypes takes longer than converting a gigabyte.
"""

from __future__ import annotations

import numpy as np


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits of float32 values as bfloat16; NaN stays NaN."""
    bits = values.view("<u4")
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype("<u2")
