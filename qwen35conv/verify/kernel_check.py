"""Whether the gated delta rule runs right on this machine, over the checkpoint's own first linear layer."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from qwen35conv.facts.config import LayerKind, ModelConfig
from qwen35conv.facts.layout import TRUNK_PREFIX
from qwen35conv.kernels import gated_delta, gated_delta_mlx, resolve_backend
from qwen35conv.model.gated_delta_net import DeltaCache, DeltaInputs, GatedDeltaNet, load_gated_delta_net
from qwen35conv.model.span import span_of
from qwen35conv.model.weights import OpaqueModuleError, Weights
from qwen35conv.verify.check import Check, Value
from qwen35conv.verify.one_head import one_head_config, one_head_weights

_BATCH, _STEPS, _FEW_STEPS = 2, 67, 5  # no powers of two, so that no kernel's blocks come out even
_STATE_ERROR = 1e-5  # of the state's size


def check_kernel(config: ModelConfig, weights: Weights, backend: str, *, brief: bool = False) -> Check:
    """The selected backend against the reference, MLX's own and float64; prefill against token by token.

    `brief` takes the first key head of the layer alone, over fewer steps.
    """
    index = next((i for i, kind in enumerate(config.layer_kinds) if kind is LayerKind.LINEAR), None)
    if index is None:
        return Check("kernel", None, "the model has no linear attention layer to run")
    layer = f"{TRUNK_PREFIX}layers.{index}"
    name = resolve_backend(backend)
    n_steps = _FEW_STEPS if brief else _STEPS
    if brief:
        weights = one_head_weights(weights, f"{layer}.linear_attn", config)
        config = one_head_config(config)
    try:
        net = load_gated_delta_net(weights, f"{layer}.linear_attn", config, name)
    except OpaqueModuleError as error:
        return Check("kernel", None, f"can't be run: {error}")
    gain = weights.array(f"{layer}.input_layernorm.weight")
    noise = mx.random.normal((_BATCH, n_steps, config.hidden_size), key=mx.random.key(0)).astype(gain.dtype)
    x = mx.fast.rms_norm(noise, gain, config.rms_norm_eps)
    span = span_of(n_steps, [0] * _BATCH)
    inputs, _ = net.prepare(x, span)
    shape = (_BATCH, config.n_value_heads, config.value_dim, config.key_dim)
    state = mx.random.normal(shape, key=mx.random.key(1)) * 0.3
    runs = {
        "the reference": _run(inputs, state, "ops"),
        "MLX's own": _run_mlx(inputs, state),
        "float64": _exact(inputs, state),
        "token by token": _stepped(inputs, state, name),
    }
    y, after = _run(inputs, state, name)
    if name == "ops":
        del runs["the reference"]
    details: list[tuple[str, Value]] = [
        ("backend", name),
        ("layer", index),
        ("shape", f"B {_BATCH}, T {n_steps}, Hk {config.n_key_heads}, Hv {config.n_value_heads}, "
                  f"Dk {config.key_dim}, Dv {config.value_dim}"),
        ("dtype", str(y.dtype).removeprefix("mlx.core.")),
        ("decay", f"{float(inputs.g.min()):.3g} to {float(inputs.g.max()):.3g}"),
    ]  # fmt: skip
    wrong = []
    step = 2.0 ** -{mx.bfloat16: 8, mx.float16: 11}.get(y.dtype, 17)
    for judge, (other_y, other_state) in runs.items():
        y_error, state_error = _relative(y, other_y), _relative(after, other_state)
        details.append((f"against {judge}", f"y {y_error:.1e}, state {state_error:.1e} of their size"))
        if not (y_error <= step and state_error <= _STATE_ERROR):
            wrong.append(judge)
    apart = _whole_layer(net, x)
    details.append(("whole layer, prefill against token by token", f"{apart:.1e} of its size"))
    if not apart <= 4 * step:
        wrong.append("the whole layer token by token")
    if not bool(mx.all((inputs.g >= 0) & (inputs.g <= 1))):
        wrong.append("decays within 0 and 1")
    if wrong:
        return Check("kernel", False, f"layer {index} on {name} disagrees with {', '.join(wrong)}", tuple(details))
    return Check("kernel", True, f"layer {index} on {name} agrees with {', '.join(runs)}", tuple(details))


def _run(inputs: DeltaInputs, state: mx.array, backend: str) -> tuple[mx.array, mx.array]:
    return gated_delta(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, state, backend=backend)


def _run_mlx(inputs: DeltaInputs, state: mx.array) -> tuple[mx.array, mx.array]:
    """MLX's own recurrence, in float32: from narrower inputs it rounds within each step on some devices."""
    q, k, v, beta = (x.astype(mx.float32) for x in (inputs.q, inputs.k, inputs.v, inputs.beta))
    return gated_delta_mlx(q, k, v, inputs.g, beta, state)


def _stepped(inputs: DeltaInputs, state: mx.array, backend: str) -> tuple[mx.array, mx.array]:
    outputs = []
    for t in range(inputs.q.shape[1]):
        q, k, v, g, beta = (x[:, t : t + 1] for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
        y, state = gated_delta(q, k, v, g, beta, state, backend=backend)
        outputs.append(y)
    return mx.concatenate(outputs, axis=1), state


def _exact(inputs: DeltaInputs, state: mx.array) -> tuple[mx.array, mx.array]:
    """The recurrence in NumPy and float64, one value head group at a time."""
    q, k, v, g, beta = (
        np.array(x.astype(mx.float32), dtype=np.float64) for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    )
    ratio = v.shape[2] // k.shape[2]
    q, k = q.repeat(ratio, axis=2), k.repeat(ratio, axis=2)
    s = np.array(state, dtype=np.float64)
    y = np.empty(v.shape)
    for t in range(q.shape[1]):
        s *= g[:, t, :, None, None]
        delta = (v[:, t] - np.einsum("bhvk,bhk->bhv", s, k[:, t])) * beta[:, t, :, None]
        s += delta[..., None] * k[:, t, :, None]
        y[:, t] = np.einsum("bhvk,bhk->bhv", s, q[:, t])
    return mx.array(y.astype(np.float32)), mx.array(s.astype(np.float32))


def _whole_layer(net: GatedDeltaNet, x: mx.array) -> float:
    """How far a prefill and single tokens lie apart, conv and caches included, relative to the output's size."""
    batch, n_steps, _ = x.shape
    whole = net(x, span_of(n_steps, [0] * batch), DeltaCache())
    cache, parts = DeltaCache(), []
    for t in range(n_steps):
        parts.append(net(x[:, t : t + 1], span_of(1, [t] * batch), cache))
        mx.eval(parts[-1], cache.arrays())
    return _relative(whole, mx.concatenate(parts, axis=1))


def _relative(a: mx.array, b: mx.array) -> float:
    """The largest difference, in units of the largest value; NaN where there is one."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return float(mx.abs(a - b).max() / mx.maximum(mx.abs(b).max(), 1e-30))
