"""The kernel on an NVIDIA GPU, beside the reference on the same GPU."""

from __future__ import annotations

import mlx.core as mx
import pytest
from test_kernels import cut, largest, make_inputs

from qwen35conv import kernels

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif("cuda" not in kernels.available_backends(), reason="no CUDA device that MLX can use"),
]

DTYPES = pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
LENGTHS = [0, 1, 2, 63, 64, 65, 1000]
STATE_ERROR = 1e-5
OUTPUT_ERROR = {mx.float32: 1e-5, mx.bfloat16: 2e-2, mx.float16: 2e-3}  # half a step of an output of size 4


@DTYPES
@pytest.mark.parametrize("n_steps", LENGTHS)
def test_every_length_equals_the_reference(n_steps: int, dtype: mx.Dtype) -> None:
    x = make_inputs(n_steps=n_steps, batch=4, key_dim=128, value_dim=36, dtype=dtype)
    y, state = kernels.gated_delta(*x, backend="cuda")
    want_y, want_state = kernels.gated_delta(*x, backend="ops")
    assert largest(state - want_state) <= STATE_ERROR
    assert largest(y - want_y) <= OUTPUT_ERROR[dtype]


@DTYPES
@pytest.mark.parametrize("lengths", [[n] * 7 for n in LENGTHS] + [LENGTHS], ids=[*map(str, LENGTHS), "mixed"])
def test_masked_and_state_only_rows_equal_the_reference(lengths: list[int], dtype: mx.Dtype) -> None:
    n_steps = max(max(lengths), 4)  # rows shorter than the batch, or empty, beside padding
    x = make_inputs(n_steps=n_steps, batch=7, key_dim=128, value_dim=12, dtype=dtype)
    rows = mx.array(lengths)
    mask = mx.arange(n_steps)[None] < rows[:, None]
    y, masked = kernels.gated_delta(*x, mask=mask, backend="cuda")
    alone = kernels.gated_delta_state(*x[1:], rows, backend="cuda")
    want_y, want_state = kernels.gated_delta(*x, mask=mask, backend="ops")
    assert largest(masked - want_state) <= STATE_ERROR
    assert mx.array_equal(alone, masked)
    assert largest(y - want_y) <= OUTPUT_ERROR[dtype]
    assert mx.all(mx.where(mask[..., None, None], 0, y) == 0)


@DTYPES
def test_left_padded_rows_have_the_bits_of_single_runs(dtype: mx.Dtype) -> None:
    lengths = [0, 1, 2, 63, 64, 65]
    x = make_inputs(n_steps=65, batch=6, key_dim=128, value_dim=12, dtype=dtype)
    mask = mx.arange(65)[None] >= 65 - mx.array(lengths)[:, None]
    y, state = kernels.gated_delta(*x, mask=mask, backend="cuda")
    for i, length in enumerate(lengths):
        row, real = slice(i, i + 1), slice(65 - length, 65)
        want_y, want_state = kernels.gated_delta(*cut(x, real, x.state[row], row), backend="cuda")
        assert mx.array_equal(state[row], want_state)
        assert mx.array_equal(y[row, real], want_y)


@DTYPES
def test_prefill_has_the_bits_of_token_by_token(dtype: mx.Dtype) -> None:
    x = make_inputs(n_steps=19, key_dim=128, value_dim=36, dtype=dtype)
    want_y, want_state = kernels.gated_delta(*x, backend="cuda")
    outputs, state = [], x.state
    for t in range(19):
        y, state = kernels.gated_delta(*cut(x, slice(t, t + 1), state), backend="cuda")
        outputs.append(y)
    assert mx.array_equal(mx.concatenate(outputs, axis=1), want_y)
    assert mx.array_equal(state, want_state)
