"""The gated delta rule on the backend at hand: a Metal or CUDA kernel, or plain operations.

Three ways to the same numbers: `reference` defines the recurrence, one kernel body (`body`) runs it on Apple and
NVIDIA GPUs, and `gated_delta_mlx` asks MLX's own implementation for a third opinion.
"""

from __future__ import annotations

from functools import cache, partial

import mlx.core as mx
import mlx.nn as nn

from qwen35conv.errors import Qwen35ConvError
from qwen35conv.kernels import cuda, metal, reference
from qwen35conv.kernels.launch import fits

__all__ = [
    "BACKENDS",
    "BackendError",
    "NoBackendError",
    "available_backends",
    "compute_gates",
    "gated_delta",
    "gated_delta_mlx",
    "gated_delta_state",
    "resolve_backend",
]

BACKENDS = ("auto", "metal", "cuda", "ops")


class BackendError(Qwen35ConvError):
    """A backend that is unknown, or that this machine or these shapes do not allow."""

    usual_hint = "choose --backend auto"


class NoBackendError(BackendError):
    """A backend that is asked for by name and is not to be had here: a usage error, no fault of the checkpoint."""

    exit_code = 2


@cache
def available_backends() -> tuple[str, ...]:
    """Backends that run on this machine, best first; `ops` always does."""
    found = (("metal", metal.is_available()), ("cuda", cuda.is_available()), ("ops", True))
    return tuple(name for name, available in found if available)


def resolve_backend(name: str = "auto") -> str:
    """The backend that `name` stands for: itself, or the best available one for `auto`.

    `auto` takes `ops` where MLX's default device is the CPU. Raises BackendError for an unknown name,
    NoBackendError for a backend that this machine does not have.
    """
    if name not in BACKENDS:
        raise BackendError(f"backend: expected one of {', '.join(BACKENDS)}, found {name!r}")
    available = available_backends()
    if name == "auto":
        return available[0] if mx.default_device().type == mx.DeviceType.gpu else "ops"
    if name not in available:
        raise NoBackendError(
            f"backend: {name} is not available here, only {', '.join(available)}", hint="choose --backend auto"
        )
    return name


def gated_delta(
    q: mx.array,  # [B, T, Hk, Dk]  normalised and scaled
    k: mx.array,  # [B, T, Hk, Dk]  normalised
    v: mx.array,  # [B, T, Hv, Dv]
    g: mx.array,  # [B, T, Hv]      decay in (0, 1], float32
    beta: mx.array,  # [B, T, Hv]
    state: mx.array,  # [B, Hv, Dv, Dk]  float32
    *,
    mask: mx.array | None = None,  # [B, T]  bool, False where padded
    backend: str = "auto",
) -> tuple[mx.array, mx.array]:
    """Run T steps: y [B, T, Hv, Dv] in q's dtype, and the new state [B, Hv, Dv, Dk] in float32.

    Hv is a multiple of Hk; key head h // (Hv // Hk) serves value head h. A padded step leaves the state untouched
    and has y = 0. Raises BackendError where the backend cannot run. See `reference` for the definition.
    """
    match _backend_for(backend, q, k, v, state):
        case "metal":
            return metal.gated_delta(q, k, v, g, beta, state, mask)
        case "cuda":
            return cuda.gated_delta(q, k, v, g, beta, state, mask)
        case _:
            return reference.gated_delta(q, k, v, g, beta, state, mask)


def gated_delta_state(
    k: mx.array,  # [B, T, Hk, Dk]  normalised
    v: mx.array,  # [B, T, Hv, Dv]
    g: mx.array,  # [B, T, Hv]      decay in (0, 1], float32
    beta: mx.array,  # [B, T, Hv]
    state: mx.array,  # [B, Hv, Dv, Dk]  float32
    lengths: mx.array,  # [B]  int32, 0 to T
    *,
    backend: str = "auto",
) -> mx.array:
    """The state [B, Hv, Dv, Dk] after the first `lengths[b]` steps of each row, without any output.

    Bit for bit the state of `gated_delta` over only those steps. Raises BackendError where the backend cannot run.
    """
    match _backend_for(backend, k, k, v, state):
        case "metal":
            return metal.gated_delta_state(k, v, g, beta, state, lengths)
        case "cuda":
            return cuda.gated_delta_state(k, v, g, beta, state, lengths)
        case _:
            return reference.gated_delta_state(k, v, g, beta, state, lengths)


def gated_delta_mlx(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, *, mask: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The same as `gated_delta`, by MLX's own `mx.fast.gated_delta_update`: a third opinion."""
    y, after = mx.fast.gated_delta_update(q, k, v, g, beta, state, mask)
    return y, after


def compute_gates(
    a: mx.array,  # [B, T, Hv]
    b: mx.array,  # [B, T, Hv]
    A_log: mx.array,  # [Hv]
    dt_bias: mx.array,  # [Hv]
) -> tuple[mx.array, mx.array]:
    """Decay g = exp(-exp(A_log) softplus(a + dt_bias)) in float32 and write strength beta = sigmoid(b), [B, T, Hv]."""
    return _decay(A_log, a, dt_bias), mx.sigmoid(b)


@partial(mx.compile, shapeless=True)  # compiled as in mlx-lm: the same fusion gives the same bits
def _decay(A_log: mx.array, a: mx.array, dt_bias: mx.array) -> mx.array:
    return mx.exp(-mx.exp(A_log.astype(mx.float32)) * nn.softplus(a + dt_bias))


def _backend_for(name: str, q: mx.array, k: mx.array, v: mx.array, state: mx.array) -> str:
    """The backend to run on, once the inputs are known to fit it."""
    batch, n_steps, n_key_heads, key_dim = k.shape
    _, _, n_value_heads, value_dim = v.shape
    if n_value_heads % n_key_heads:
        raise BackendError(f"gated delta rule: {n_value_heads} value heads are no multiple of {n_key_heads} key heads")
    expected = (batch, n_value_heads, value_dim, key_dim)
    if state.shape != expected or state.dtype != mx.float32:
        raise BackendError(f"gated delta rule: expected a float32 state {expected}, found {state.dtype} {state.shape}")
    backend = resolve_backend(name)
    if backend == "ops" or n_steps == 0:
        return "ops"
    one_dtype = q.dtype == k.dtype == v.dtype
    if one_dtype and fits(key_dim):
        return backend
    if name == "auto":
        return "ops"
    wanted = "q, k and v in one dtype" if not one_dtype else "a key dimension of 8 or more that is a multiple of 4"
    raise BackendError(
        f"gated delta rule: {backend} takes {wanted}, found {q.dtype}, {k.dtype}, {v.dtype}, Dk {key_dim}",
        hint="choose --backend ops",
    )
