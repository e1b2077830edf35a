"""The kernel body, compiled as C++ under its Metal header and run with 32 lanes in lock step, beside the reference."""

from __future__ import annotations

import mlx.core as mx
import pytest
from shim import COMPILER, run_on_cpu
from test_kernels import Inputs, cut, largest, make_inputs

from qwen35conv.kernels import cuda, metal, reference
from qwen35conv.kernels.launch import Tuning, make_call

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernel body with")

HALF_STEP = {mx.float32: 2e-6, mx.bfloat16: 2e-2, mx.float16: 2e-3}  # of outputs of size 2 or so
TUNINGS = {"metal": metal.TUNING, "cuda": cuda.TUNING}


def run(x: Inputs, tuning: Tuning, rows: mx.array | None = None) -> tuple[mx.array, mx.array]:
    y, state = run_on_cpu(make_call(metal.HEADER, tuning, x.q, x.k, x.v, x.g, x.beta, x.state, rows))
    return y, state


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("tuning", TUNINGS)
def test_the_body_equals_the_reference(tuning: str, dtype: mx.Dtype) -> None:
    x = make_inputs(n_steps=11, dtype=dtype)
    y, state = run(x, TUNINGS[tuning])
    want_y, want_state = reference.gated_delta(*x)
    assert largest(state - want_state) < 2e-6
    assert largest(y - want_y) <= HALF_STEP[dtype]
    assert y.dtype == dtype


@pytest.mark.parametrize(("key_dim", "value_dim"), [(8, 5), (12, 6), (24, 7), (128, 20)])
def test_the_body_runs_at_odd_dimensions(key_dim: int, value_dim: int) -> None:
    x = make_inputs(n_steps=3, key_dim=key_dim, value_dim=value_dim, dtype=mx.float32)
    y, state = run(x, metal.TUNING)
    want_y, want_state = reference.gated_delta(*x)
    assert largest(state - want_state) < 2e-6
    assert largest(y - want_y) < 2e-6


@pytest.mark.parametrize("n_steps", [1, 4, 7])
def test_a_mask_leaves_the_state_of_padded_steps_untouched(n_steps: int) -> None:
    x = make_inputs(n_steps=n_steps, dtype=mx.bfloat16)
    mask = mx.array([[(t * 5 + b) % 3 != 0 for t in range(n_steps)] for b in range(2)])
    y, state = run(x, cuda.TUNING, mask)
    want_y, want_state = reference.gated_delta(*x, mask)
    assert largest(state - want_state) < 2e-6
    assert largest(y - want_y) <= HALF_STEP[mx.bfloat16]
    assert mx.all(mx.where(mask[..., None, None], 0, y) == 0)


@pytest.mark.parametrize("lengths", [[0, 7], [7, 3], [1, 4]])
def test_the_state_alone_has_the_bits_of_a_run_over_the_kept_steps(lengths: list[int]) -> None:
    x = make_inputs(n_steps=7, dtype=mx.bfloat16)
    call = make_call(metal.HEADER, cuda.TUNING, None, x.k, x.v, x.g, x.beta, x.state, mx.array(lengths))
    (state,) = run_on_cpu(call)
    for i, length in enumerate(lengths):
        row = slice(i, i + 1)
        kept = cut(x, slice(length), x.state[row], row)
        want = run(kept, cuda.TUNING)[1] if length else kept.state
        assert mx.array_equal(state[row], want)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_masked_and_state_only_rows_of_many_lengths_equal_the_reference(dtype: mx.Dtype) -> None:
    lengths = mx.array([0, 1, 2, 63, 64, 65, 1000])
    x = make_inputs(n_steps=1000, batch=7, key_dim=32, value_dim=2, dtype=dtype)
    mask = mx.arange(1000)[None] < lengths[:, None]
    y, masked = run(x, metal.TUNING, mask)
    (alone,) = run_on_cpu(make_call(metal.HEADER, metal.TUNING, None, x.k, x.v, x.g, x.beta, x.state, lengths))
    want_y, want_state = reference.gated_delta(*x, mask)
    assert largest(masked - want_state) <= 1e-5
    assert mx.array_equal(alone, masked)
    assert largest(y - want_y) <= HALF_STEP[dtype]


def test_any_cut_of_the_steps_has_the_same_bits() -> None:
    x = make_inputs(n_steps=11, dtype=mx.bfloat16)
    want_y, want_state = run(x, cuda.TUNING)
    outputs, state = [], x.state
    for begin, end in ((0, 1), (1, 6), (6, 11)):
        y, state = run(cut(x, slice(begin, end), state), cuda.TUNING)
        outputs.append(y)
    assert mx.array_equal(mx.concatenate(outputs, axis=1), want_y)
    assert mx.array_equal(state, want_state)
