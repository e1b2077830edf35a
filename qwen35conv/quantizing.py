"""Weights as MLX packs them, by MLX itself on the CPU: rows are packed alone, so parts join to the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from qwen35conv.facts.header import Dtype
from qwen35conv.planning.pieces import Part, Write

if TYPE_CHECKING:
    import mlx.core as mx

_idle: list[mx.Stream] = []


def quantized(write: Write, dtype: Dtype, raw: bytes) -> Mapping[Part, bytes]:
    """Every part of the packed form of values [R, C] that are stored in `dtype`."""
    import mlx.core as mx

    assert write.packed is not None
    how = write.packed.quantization
    kinds = {Dtype.BF16: mx.bfloat16, Dtype.F16: mx.float16, Dtype.F32: mx.float32}
    values = mx.array(np.frombuffer(raw, "<u4" if dtype is Dtype.F32 else "<u2").reshape(-1, write.n_columns))
    with _stream() as stream:
        values = values.view(kinds[dtype], stream=stream).astype(kinds[write.packed.dtype], stream=stream)
        parts = mx.quantize(values, how.group_size, how.bits, mode=how.mode, stream=stream)
        bits = [_bits(part, stream) for part in parts]
        mx.eval(bits)
    return {kind: np.asarray(part).tobytes() for kind, part in zip(Part, bits, strict=False)}


def _bits(array: mx.array, stream: mx.Stream) -> mx.array:
    import mlx.core as mx

    return array.view({2: mx.uint16, 4: mx.uint32}.get(array.itemsize, mx.uint8), stream=stream)


@contextmanager
def _stream() -> Iterator[mx.Stream]:
    """A stream that is this thread's alone meanwhile: MLX evaluates those of several threads side by side.

    They are lent and come back: a stream has a thread of the system behind it, which lives as long as the process.
    """
    import mlx.core as mx

    try:
        stream = _idle.pop()
    except IndexError:
        stream = mx.new_thread_unsafe_stream(mx.cpu)
    try:
        yield stream
    finally:
        _idle.append(stream)
