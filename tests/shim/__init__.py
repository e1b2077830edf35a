"""Run a kernel call on the CPU: its source compiled as C++ under the Metal header and a shim of Metal's names."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from qwen35conv.kernels.launch import Call

COMPILER = shutil.which("g++") if sys.platform == "linux" else None  # elsewhere contexts are another matter
Array = np.ndarray[Any, np.dtype[Any]]
NAMES = Path(__file__).with_name("metal_names.h")
TYPES = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.int32: "int32_t",
    mx.bool_: "bool",
}


def run_on_cpu(call: Call) -> list[mx.array]:
    """The outputs of a call, computed by its own source with 32 lanes in lock step."""
    inputs = [_to_numpy(x) for x in call.inputs]
    shapes, dtypes = call.plan.output_shapes, call.plan.output_dtypes
    # All ones is NaN in every float type: what the kernel does not write shows up.
    outputs = [
        np.full(np.prod(shape) * dtype.size, 0xFF, np.uint8) for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    buffers = [x.ctypes.data for x in [*inputs, *outputs]]
    together = _compile(_source(call)).run(
        (ctypes.c_void_p * len(buffers))(*buffers), call.plan.grid[1], call.plan.grid[2]
    )
    assert together, "the lanes of a group parted ways"
    return [_to_mlx(x, shape, dtype) for x, shape, dtype in zip(outputs, shapes, dtypes, strict=True)]


def _source(call: Call) -> str:
    """A C++ program around the source, with the signature that MLX would write."""
    plan, kernel = call.plan, call.plan.kernel
    constants = "\n".join(
        f"  constexpr int {name} = {value};" if isinstance(value, int) else f"  using {name} = {TYPES[value]};"
        for name, value in plan.template
    )
    typed = [
        *((f"const {TYPES[x.dtype]}*", name) for x, name in zip(call.inputs, kernel.input_names, strict=True)),
        *((f"{TYPES[dtype]}*", name) for dtype, name in zip(plan.output_dtypes, kernel.output_names, strict=True)),
    ]
    arguments = "\n".join(f"  auto {name} = ({kind})buffers[{i}];" for i, (kind, name) in enumerate(typed))
    return f"""
#include "{NAMES}"
{kernel.header}
static void** buffers;
static void body() {{
{constants}
{arguments}
{kernel.source}
}}
extern "C" bool run(void** given, int groups, int heads) {{
  buffers = given;
  shim::kernel = body;
  for (int z = 0; z < heads; ++z)
    for (int y = 0; y < groups; ++y)
      if (!shim::run_group(y, z)) return false;
  return true;
}}
"""


@cache
def _compile(source: str) -> ctypes.CDLL:
    assert COMPILER is not None
    name = hashlib.sha256(source.encode()).hexdigest()[:16]
    with tempfile.TemporaryDirectory() as folder:
        program, library = Path(folder, f"{name}.cpp"), Path(folder, f"{name}.so")
        program.write_text(source)
        # Unfortified: glibc's checked longjmp takes a jump to another lane's stack for an error.
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-U_FORTIFY_SOURCE"]
        subprocess.run([COMPILER, *flags, "-o", library, program], check=True, capture_output=True, text=True)
        loaded = ctypes.CDLL(str(library))
    loaded.run.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_int]
    loaded.run.restype = ctypes.c_bool
    return loaded


def _to_numpy(x: mx.array) -> Array:
    return np.ascontiguousarray(np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x))


def _to_mlx(data: Array, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    if dtype == mx.bfloat16:
        return mx.array(data.view(np.uint16).reshape(shape)).view(mx.bfloat16)
    return mx.array(data.view({mx.float32: np.float32, mx.float16: np.float16}[dtype]).reshape(shape))
