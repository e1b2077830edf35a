"""One kernel call, complete: the source, its parameters, the grid and the arguments, as data.

`metal` and `cuda` hand it to MLX; tests read it, or hand it to a C++ compiler.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import mlx.core as mx

from qwen35conv.kernels.body import BODY

GROUP = 32  # lanes that exchange values: a simdgroup, a warp
Builder = Callable[..., Any]  # MLX types what it builds as object


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a backend may choose freely: none of it changes the result but for the order of a sum."""

    lanes: int  # lanes that share rows of the state, at most
    rows: int  # rows they share
    vector: int  # neighbouring values a lane reads at once, at most
    depth: int  # steps whose inputs are under way, in a long run; a power of two
    ahead: int  # steps before that in which they are brought into the cache; 0 for never
    groups: int  # lane groups in a thread block


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: each is made once
class Kernel:
    """The arguments of `mx.fast.metal_kernel` or `mx.fast.cuda_kernel`."""

    name: str
    header: str
    source: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel and the arguments of a call of it, but for the arrays."""

    kernel: Kernel
    template: tuple[tuple[str, int | mx.Dtype], ...]
    grid: tuple[int, int, int]  # in threads
    threadgroup: tuple[int, int, int]
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[mx.Dtype, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a kernel, complete."""

    inputs: tuple[mx.array, ...]
    plan: Plan


def fits(key_dim: int) -> bool:
    """Whether the kernel can run heads of this key dimension: whole vectors of four, at least two of them."""
    return key_dim % 4 == 0 and key_dim >= 8


def split(key_dim: int, tuning: Tuning) -> tuple[int, int]:
    """Lanes and vector length: as many as `tuning` allows and key_dim divides into."""
    return next(
        (lanes, vector)
        for lanes in (32, 16, 8, 4, 2, 1)
        for vector in (8, 4)
        if lanes <= tuning.lanes and vector <= tuning.vector and key_dim % (lanes * vector) == 0
    )


def make_call(
    backend_header: str,
    tuning: Tuning,
    q: mx.array | None,  # [B, T, Hk, Dk]; None runs the state alone
    k: mx.array,  # [B, T, Hk, Dk]
    v: mx.array,  # [B, T, Hv, Dv]
    g: mx.array,  # [B, T, Hv]
    beta: mx.array,  # [B, T, Hv]
    state: mx.array,  # [B, Hv, Dv, Dk]
    rows: mx.array | None = None,  # mask [B, T], or with q None lengths [B]
) -> Call:
    """The call that runs T steps of each row of the batch."""
    shape = k.shape
    inputs: tuple[mx.array, ...] = (k, v, g.astype(mx.float32), beta, state, _steps(shape[1]))
    if q is None:
        assert rows is not None
        inputs = (*inputs, rows.astype(mx.int32))
    else:
        inputs = (q, *inputs) if rows is None else (q, *inputs, rows.astype(mx.bool_))
    kind = "state" if q is None else "plain" if rows is None else "masked"
    return Call(inputs, _make_plan(backend_header, tuning, kind, shape, v.shape, k.dtype, beta.dtype))


@lru_cache(maxsize=256)
def _make_plan(
    backend_header: str,
    tuning: Tuning,
    kind: str,
    key_shape: tuple[int, int, int, int],
    value_shape: tuple[int, int, int, int],
    dtype: mx.Dtype,
    beta_dtype: mx.Dtype,
) -> Plan:
    """Everything about a call but its arrays; kept, because a decode step is shorter than this is in Python."""
    batch, n_steps, n_key_heads, key_dim = key_shape
    n_value_heads, value_dim = value_shape[2:]
    lanes, vector = split(key_dim, tuning)
    rows = min(tuning.rows, value_dim)
    template = (
        ("InT", dtype),
        ("BetaT", beta_dtype),
        ("Dk", key_dim),
        ("Dv", value_dim),
        ("Hk", n_key_heads),
        ("Hv", n_value_heads),
        ("Lanes", lanes),
        ("Rows", rows),
        ("Vec", vector),
        ("Depth", 1 if n_steps == 1 else min(tuning.depth, lanes)),
        ("Ahead", tuning.ahead),
    )
    state_shape = (batch, n_value_heads, value_dim, key_dim)
    return Plan(
        kernel=_make_kernel(backend_header, kind, n_steps == 1, tuning.ahead > 0),
        template=template,
        grid=(GROUP, -(-value_dim // (GROUP // lanes * rows)), batch * n_value_heads),
        threadgroup=(GROUP, tuning.groups, 1),
        output_shapes=(state_shape,) if kind == "state" else (value_shape, state_shape),
        output_dtypes=(mx.float32,) if kind == "state" else (dtype, mx.float32),
    )


@cache
def _make_kernel(backend_header: str, kind: str, one_step: bool, ahead: bool) -> Kernel:
    """The shared body under a backend's header: `plain`, `masked`, or the `state` alone; for one step or any number."""
    flags = {
        "HAS_MASK": kind == "masked",
        "STATE_ONLY": kind == "state",
        "ONE_STEP": one_step,
        "BRING_NEAR": ahead and not one_step,
    }
    header = "".join(f"#define {name} {int(on)}\n" for name, on in flags.items()) + backend_header
    common = ("k", "v", "g", "beta", "state_in", "steps")
    inputs = {"plain": ("q", *common), "masked": ("q", *common, "mask"), "state": (*common, "lengths")}[kind]
    # MLX keeps compiled CUDA kernels by name, on disk too: a changed source must change the name.
    checksum = zlib.crc32((header + BODY).encode())
    return Kernel(
        name=f"qwen35_gated_delta_{kind}_{checksum:08x}",
        header=header,
        source=BODY,
        input_names=inputs,
        output_names=("state_out",) if kind == "state" else ("y", "state_out"),
    )


@lru_cache(maxsize=64)
def _steps(n_steps: int) -> mx.array:
    """The length as an input rather than a constant: no length makes MLX compile again."""
    return mx.array([n_steps], dtype=mx.int32)


def run(call: Call, build: Builder) -> list[mx.array]:
    """The outputs of a call, its kernel made by `mx.fast.metal_kernel` or `mx.fast.cuda_kernel`."""
    plan = call.plan
    outputs: list[mx.array] = _built(build, plan.kernel)(
        inputs=call.inputs,
        template=plan.template,
        grid=plan.grid,
        threadgroup=plan.threadgroup,
        output_shapes=plan.output_shapes,
        output_dtypes=plan.output_dtypes,
        stream=mx.gpu,
    )
    return outputs


@cache
def _built(build: Builder, kernel: Kernel) -> Callable[..., Any]:
    built: Callable[..., Any] = build(
        name=kernel.name,
        input_names=kernel.input_names,
        output_names=kernel.output_names,
        source=kernel.source,
        header=kernel.header,
    )
    return built
