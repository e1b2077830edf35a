"""The gated delta rule against values computed by an Apple GPU, at a 27B model's head geometry."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from shim import COMPILER, run_on_cpu

from qwen35conv import kernels
from qwen35conv.kernels import cuda, metal
from qwen35conv.kernels.launch import Tuning, make_call

FOLDER = Path(os.environ.get("QWEN35_GOLDEN", Path(__file__).parents[2] / "shared" / "golden"))
FILE = FOLDER / "metal-gated-delta.json"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="no golden values: set QWEN35_GOLDEN to their folder")

Kernel = Callable[..., tuple[mx.array, mx.array]]
Gates = Callable[[mx.array, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]


def round_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16 precision."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def apple_gates(a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array) -> tuple[mx.array, mx.array]:
    """The gates as that GPU computed them: rounded to bfloat16 after every step, the decay itself in float32."""
    r = round_bfloat16
    a_, b_, A_log_, dt_bias_ = (np.array(x.astype(mx.float32)) for x in (a, b, A_log, dt_bias))
    x = r(a_ + dt_bias_)
    softplus = r(np.maximum(x, 0) + r(np.log1p(r(np.exp(r(np.minimum(x, 0) - np.maximum(x, 0)))))))
    s = r(1 / r(1 + r(np.exp(np.abs(b_)))))
    beta = np.where(b_ < 0, s, r(1 - s))
    return mx.array(np.exp(-np.exp(A_log_) * softplus)), mx.array(beta).astype(mx.bfloat16)


def on_cpu(tuning: Tuning) -> Kernel:
    """The kernel body, compiled as C++."""

    def run(*inputs: mx.array) -> tuple[mx.array, mx.array]:
        y, state = run_on_cpu(make_call(metal.HEADER, tuning, *inputs))
        return y, state

    return run


def by_backend(backend: str) -> Kernel:
    """`gated_delta` itself."""
    return lambda *inputs: kernels.gated_delta(*inputs, backend=backend)


needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernel body with")
needs_cuda = pytest.mark.skipif("cuda" not in kernels.available_backends(), reason="no CUDA device")
KERNELS = [
    pytest.param(by_backend("ops"), id="reference"),
    pytest.param(on_cpu(metal.TUNING), id="body-metal", marks=needs_compiler),
    pytest.param(on_cpu(cuda.TUNING), id="body-cuda", marks=needs_compiler),
    pytest.param(by_backend("cuda"), id="cuda", marks=[needs_cuda, pytest.mark.cuda]),
]


@cache
def golden() -> dict[str, Any]:
    """The file, parsed once."""
    data: dict[str, Any] = json.loads(FILE.read_text())
    return data


def run_both(kernel: Kernel, gates: Gates) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Found and expected y as float32: the prefill from no state, and the decode step after it."""
    data = golden()
    batch, Hk, Hv, Dk, Dv = (data[name] for name in ("B", "HK", "HV", "DK", "DV"))
    A_log, dt_bias = (mx.array(data[name]).astype(mx.bfloat16) for name in ("A_log", "dt_bias"))
    state = mx.zeros((batch, Hv, Dv, Dk))
    outputs = {}
    for phase in ("prefill", "decode"):
        part = data[phase]
        shapes = {"q": (Hk, Dk), "k": (Hk, Dk), "v": (Hv, Dv), "a": (Hv,), "b": (Hv,), "y": (Hv, Dv)}
        q, k, v, a, b, want = (
            mx.array(part[name]).astype(mx.bfloat16).reshape(batch, part["T"], *shape) for name, shape in shapes.items()
        )
        y, state = kernel(q, k, v, *gates(a, b, A_log, dt_bias), state)
        outputs[phase] = np.array(y.astype(mx.float32)), np.array(want.astype(mx.float32))
    return outputs


@pytest.mark.parametrize("kernel", KERNELS)
def test_fed_with_the_same_gates_the_values_are_the_same(kernel: Kernel) -> None:
    outputs = run_both(kernel, apple_gates)
    different = {phase: np.count_nonzero(found != want) for phase, (found, want) in outputs.items()}
    assert outputs["prefill"][0].size == 18432
    assert different["prefill"] <= 2
    assert different["decode"] == 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_with_our_own_gates_the_values_are_within_one_step(kernel: Kernel) -> None:
    # One bfloat16 step at the largest output. A gate that rounds the other way moves every output by a fraction of
    # the terms that it sums up, so one that nearly cancels out is off by many steps of its own.
    for found, want in run_both(kernel, kernels.compute_gates).values():
        step = 2.0 ** (np.floor(np.log2(np.abs(want).max())) - 7)
        assert np.abs(found - want).max() <= step
        assert np.mean(found == want) > 0.7  # and most are the same
