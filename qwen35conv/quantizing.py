"""Weights as MLX packs them, by MLX itself on the CPU: rows are packed alone, so parts join to the whole."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from qwen35conv.facts.header import Dtype
from qwen35conv.planning.pieces import Part, Write

if TYPE_CHECKING:
    import mlx.core as mx

_streams = threading.local()


def quantized(write: Write, dtype: Dtype, raw: bytes) -> Mapping[Part, bytes]:
    """Every part of the packed form of values [R, C] that are stored in `dtype`."""
    import mlx.core as mx

    assert write.packed is not None
    how, stream = write.packed.quantization, _stream()
    kinds = {Dtype.BF16: mx.bfloat16, Dtype.F16: mx.float16, Dtype.F32: mx.float32}
    values = mx.array(np.frombuffer(raw, "<u4" if dtype is Dtype.F32 else "<u2").reshape(-1, write.n_columns))
    values = values.view(kinds[dtype], stream=stream).astype(kinds[write.packed.dtype], stream=stream)
    parts = mx.quantize(values, how.group_size, how.bits, mode=how.mode, stream=stream)
    bits = [_bits(part, stream) for part in parts]
    mx.eval(bits)
    return {kind: np.asarray(part).tobytes() for kind, part in zip(Part, bits, strict=False)}


def _bits(array: mx.array, stream: mx.Stream) -> mx.array:
    import mlx.core as mx

    return array.view({2: mx.uint16, 4: mx.uint32}.get(array.itemsize, mx.uint8), stream=stream)


def _stream() -> mx.Stream:
    """This thread's own stream: MLX evaluates those of several threads side by side."""
    import mlx.core as mx

    if not hasattr(_streams, "own"):
        _streams.own = mx.new_stream(mx.cpu)
    found: mx.Stream = _streams.own
    return found
