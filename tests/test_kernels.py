"""The gated delta rule in plain operations, judged by a float64 recurrence, by MLX and by mlx-lm."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35conv import kernels
from qwen35conv.kernels import launch, metal


class Inputs(NamedTuple):
    """The arguments of `gated_delta`, in order. No two axes have the same length, and the state is not zero."""

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array
    state: mx.array


def make_inputs(
    *, n_steps: int, batch: int = 2, key_dim: int = 64, value_dim: int = 18, dtype: mx.Dtype = mx.float32, seed: int = 5
) -> Inputs:
    """Random inputs with 3 key heads and 9 value heads, q and k normalised."""
    random = np.random.default_rng(seed)
    keys, values = (batch, n_steps, 3, key_dim), (batch, n_steps, 9, value_dim)

    def unit() -> mx.array:
        x = random.standard_normal(keys)
        return mx.array((x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)).astype(dtype)

    return Inputs(
        q=unit(),
        k=unit(),
        v=mx.array(random.standard_normal(values, dtype=np.float32)).astype(dtype),
        g=mx.array(random.uniform(0.3, 1.0, values[:3]).astype(np.float32)),
        beta=mx.array(random.uniform(0.05, 0.95, values[:3]).astype(np.float32)).astype(dtype),
        state=mx.array(random.standard_normal((batch, 9, value_dim, key_dim), dtype=np.float32)),
    )


def cut(x: Inputs, steps: slice, state: mx.array, rows: slice = slice(None)) -> Inputs:
    """Some steps of some rows, on a state of their own."""
    q, k, v, g, beta = (a[rows, steps] for a in x[:-1])
    return Inputs(q, k, v, g, beta, state)


def largest(x: mx.array) -> float:
    """The largest magnitude; NaN if any is."""
    return float(np.abs(np.array(x.astype(mx.float32))).max(initial=0.0))


def recurrence(x: Inputs, mask: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The definition, step by step and head by head in float64."""
    q, k, v, g, beta, state = (np.array(a.astype(mx.float32)).astype(np.float64) for a in x)
    y = np.zeros(v.shape)
    for b, t, h in np.ndindex(*v.shape[:3]):
        if mask is not None and not mask[b, t]:
            continue
        key, query = k[b, t, h // 3], q[b, t, h // 3]
        decayed = g[b, t, h] * state[b, h]
        error = beta[b, t, h] * (v[b, t, h] - decayed @ key)
        state[b, h] = decayed + np.outer(error, key)
        y[b, t, h] = state[b, h] @ query
    return y, state


MASK = [[True, True, False, True, False, True, True], [False, False, True, True, True, False, True]]


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
def test_the_reference_equals_a_float64_recurrence(mask: list[list[bool]] | None) -> None:
    x = make_inputs(n_steps=7)
    y, state = kernels.gated_delta(*x, mask=None if mask is None else mx.array(mask), backend="ops")
    want_y, want_state = recurrence(x, None if mask is None else np.array(mask))
    np.testing.assert_allclose(np.array(y), want_y, atol=2e-6)
    np.testing.assert_allclose(np.array(state), want_state, atol=2e-6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_the_reference_has_the_bits_of_mlx_lm(dtype: mx.Dtype) -> None:
    gated_delta = pytest.importorskip("mlx_lm.models.gated_delta")
    x = make_inputs(n_steps=7, dtype=dtype)
    y, state = kernels.gated_delta(*x, backend="ops")
    want_y, want_state = gated_delta.gated_delta_ops(*x)
    assert mx.array_equal(y, want_y)
    assert y.dtype == dtype
    assert mx.array_equal(state, want_state)


def test_gates_have_the_bits_of_mlx_lm() -> None:
    gated_delta = pytest.importorskip("mlx_lm.models.gated_delta")
    a, b = (mx.random.normal((2, 5, 9), key=mx.random.key(i)).astype(mx.bfloat16) for i in (1, 2))
    A_log, dt_bias = (mx.random.normal((9,), key=mx.random.key(i)) for i in (3, 4))
    g, beta = kernels.compute_gates(a, b, A_log, dt_bias.astype(mx.bfloat16))
    assert g.dtype == mx.float32
    assert mx.array_equal(g, gated_delta.compute_g(A_log, a, dt_bias.astype(mx.bfloat16)))
    assert mx.array_equal(beta, mx.sigmoid(b))


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
def test_mlx_itself_is_of_the_same_opinion(mask: list[list[bool]] | None) -> None:
    x = make_inputs(n_steps=7)
    given_mask = None if mask is None else mx.array(mask)
    y, state = kernels.gated_delta_mlx(*x, mask=given_mask)
    want_y, want_state = kernels.gated_delta(*x, mask=given_mask, backend="ops")
    assert largest(state - want_state) < 2e-6
    assert largest(y - want_y) < 2e-6


def test_the_state_alone_has_the_bits_of_a_run_over_the_kept_steps() -> None:
    x = make_inputs(n_steps=7, batch=4, dtype=mx.bfloat16)
    lengths = [0, 7, 1, 4]
    state = kernels.gated_delta_state(*x[1:], mx.array(lengths), backend="ops")
    for i, length in enumerate(lengths):
        row = slice(i, i + 1)
        _, want = kernels.gated_delta(*cut(x, slice(length), x.state[row], row), backend="ops")
        assert mx.array_equal(state[row], want)


@given(cuts=st.lists(st.integers(0, 8), max_size=3))
@settings(deadline=None, max_examples=10)
def test_any_cut_of_the_steps_has_the_same_bits(cuts: list[int]) -> None:
    x = make_inputs(n_steps=8, dtype=mx.bfloat16)
    want_y, want_state = kernels.gated_delta(*x, backend="ops")
    outputs, state, begin = [], x.state, 0
    for end in [*sorted(cuts), 8]:
        y, state = kernels.gated_delta(*cut(x, slice(begin, end), state), backend="ops")
        outputs.append(y)
        begin = end
    assert mx.array_equal(mx.concatenate(outputs, axis=1), want_y)
    assert mx.array_equal(state, want_state)


def test_without_writing_only_decay_is_left() -> None:
    x = make_inputs(n_steps=6)
    _, state = kernels.gated_delta(*x[:4], mx.zeros_like(x.beta), x.state, backend="ops")
    decay = mx.prod(x.g, axis=1)[..., None, None]
    assert largest(state - x.state * decay) < 1e-6


def test_a_transposed_state_is_an_error() -> None:
    x = make_inputs(n_steps=2)
    with pytest.raises(kernels.BackendError, match="expected a float32 state"):
        kernels.gated_delta(*x[:-1], x.state.swapaxes(-1, -2), backend="ops")


def test_value_heads_must_be_a_multiple_of_key_heads() -> None:
    x = make_inputs(n_steps=2)
    with pytest.raises(kernels.BackendError, match="no multiple"):
        kernels.gated_delta(x.q, x.k, x.v[:, :, :8], x.g[..., :8], x.beta[..., :8], x.state[:, :8], backend="ops")


def test_a_backend_that_is_not_here_is_an_error_that_names_those_that_are() -> None:
    missing = [name for name in ("metal", "cuda") if name not in kernels.available_backends()]
    for name in missing:
        with pytest.raises(kernels.BackendError, match="ops"):
            kernels.resolve_backend(name)
    with pytest.raises(kernels.BackendError, match="expected one of"):
        kernels.resolve_backend("vulkan")
    assert missing  # no machine has both


def test_auto_is_the_best_backend_of_the_default_device() -> None:
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    assert kernels.resolve_backend("auto") == (kernels.available_backends()[0] if on_gpu else "ops")


@pytest.mark.parametrize("kind", ["plain", "masked", "state"])
def test_the_metal_call_is_complete(kind: str) -> None:
    """Exactly what `mx.fast.metal_kernel` and its kernel would be given, without a GPU to give it to."""
    x = make_inputs(n_steps=7, key_dim=128, value_dim=36, dtype=mx.bfloat16)
    rows = {"plain": None, "masked": mx.ones((2, 7), mx.bool_), "state": mx.array([3, 0])}[kind]
    call = metal.make_metal_call(None if kind == "state" else x.q, *x[1:], rows)
    plan = call.plan

    names = ["k", "v", "g", "beta", "state_in", "steps"]
    want = {"plain": ["q", *names], "masked": ["q", *names, "mask"], "state": [*names, "lengths"]}[kind]
    assert list(plan.kernel.input_names) == want
    shapes = dict(zip(want, (a.shape for a in call.inputs), strict=True))
    dtypes = dict(zip(want, (a.dtype for a in call.inputs), strict=True))
    assert shapes["k"] == (2, 7, 3, 128)
    assert shapes["steps"] == (1,)
    assert call.inputs[want.index("steps")].item() == 7
    assert (dtypes["k"], dtypes["g"], dtypes["state_in"], dtypes["steps"]) == (
        mx.bfloat16,
        mx.float32,
        mx.float32,
        mx.int32,
    )
    if kind == "masked":
        assert dtypes["mask"] == mx.bool_

    outputs = [("y", (2, 7, 9, 36), mx.bfloat16), ("state_out", (2, 9, 36, 128), mx.float32)]
    found = zip(plan.kernel.output_names, plan.output_shapes, plan.output_dtypes, strict=True)
    assert list(found) == (outputs[1:] if kind == "state" else outputs)

    types = {name: value for name, value in plan.template if isinstance(value, mx.Dtype)}
    sizes = {name: value for name, value in plan.template if isinstance(value, int)}
    assert types == {"InT": mx.bfloat16, "BetaT": mx.bfloat16}
    assert (sizes["Dk"], sizes["Dv"], sizes["Hk"], sizes["Hv"]) == (128, 36, 3, 9)
    assert sizes["Depth"] <= sizes["Lanes"]
    rows_a_group = sizes["Rows"] * 32 // sizes["Lanes"]
    assert plan.grid == (32, -(-36 // rows_a_group), 2 * 9)
    assert plan.threadgroup[0] == 32

    # MLX declares the Metal attributes it finds by name in the source, and nothing else of the body is free.
    assert "thread_position_in_grid" in plan.kernel.source
    assert "thread_index_in_simdgroup" in plan.kernel.source
    assert (
        f"#define HAS_MASK {int(kind == 'masked')}\n#define STATE_ONLY {int(kind == 'state')}\n" in plan.kernel.header
    )
    assert plan.kernel.header.endswith(metal.HEADER)
    if metal.is_available():
        launch.run(call, mx.fast.metal_kernel)


def test_no_length_makes_a_new_kernel_but_one_step() -> None:
    plans = [metal.make_metal_call(*make_inputs(n_steps=n, dtype=mx.bfloat16)).plan for n in (1, 2, 7, 30)]
    assert plans[1].kernel is plans[2].kernel is plans[3].kernel
    assert plans[1].template == plans[2].template == plans[3].template
    assert plans[0].kernel is not plans[1].kernel


def test_every_variant_has_a_name_of_its_own() -> None:
    x = make_inputs(n_steps=2, dtype=mx.bfloat16)
    calls = [
        metal.make_metal_call(*x),
        metal.make_metal_call(*x, mx.ones((2, 2), mx.bool_)),
        metal.make_metal_call(None, *x[1:], mx.array([1, 2])),
        metal.make_metal_call(*make_inputs(n_steps=1)),
    ]
    assert len({call.plan.kernel.name for call in calls}) == len(calls)
