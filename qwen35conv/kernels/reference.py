"""The gated delta rule in plain MLX operations: the definition that every kernel is judged by.

For each value head, with state S [Dv, Dk] in float32, one step is

    S <- g S;   S <- S + beta (v - S k) k^T;   y = S q

Source: Gated Delta Networks, arXiv:2412.06464, the gated delta rule.
"""

from __future__ import annotations

import mlx.core as mx


def gated_delta(
    q: mx.array,  # [B, T, Hk, Dk]  normalised and scaled
    k: mx.array,  # [B, T, Hk, Dk]  normalised
    v: mx.array,  # [B, T, Hv, Dv]
    g: mx.array,  # [B, T, Hv]      decay in (0, 1]
    beta: mx.array,  # [B, T, Hv]
    state: mx.array,  # [B, Hv, Dv, Dk]  float32
    mask: mx.array | None = None,  # [B, T]  bool, False where padded
) -> tuple[mx.array, mx.array]:
    """Outputs y [B, T, Hv, Dv] in q's dtype and the state after T steps.

    A padded step leaves the state untouched and has y = 0.
    """
    n_steps = k.shape[1]
    if n_steps == 0:
        return mx.zeros(v.shape, dtype=q.dtype), state
    steps = _by_step(k, v, g, beta)
    queries = q.astype(mx.float32)[:, :, :, None, None]
    grouped = _grouped(state, k.shape[2])
    outputs = []
    for t in range(n_steps):
        after = _step(grouped, *(x[:, t] for x in steps))
        y = (after * queries[:, t]).sum(axis=-1)
        if mask is not None:
            real = mask[:, t, None, None, None]
            y = mx.where(real, y, 0.0)
            after = mx.where(real[..., None], after, grouped)
        grouped = after
        outputs.append(y)
    return mx.stack(outputs, axis=1).reshape(v.shape).astype(q.dtype), grouped.reshape(state.shape)


def gated_delta_state(
    k: mx.array,  # [B, T, Hk, Dk]
    v: mx.array,  # [B, T, Hv, Dv]
    g: mx.array,  # [B, T, Hv]
    beta: mx.array,  # [B, T, Hv]
    state: mx.array,  # [B, Hv, Dv, Dk]  float32
    lengths: mx.array,  # [B]  int32, 0 to T
) -> mx.array:
    """The state after the first `lengths[b]` steps of each row; nothing of the output is computed."""
    steps = _by_step(k, v, g, beta)
    grouped = _grouped(state, k.shape[2])
    for t in range(k.shape[1]):
        kept = (lengths > t)[:, None, None, None, None]
        grouped = mx.where(kept, _step(grouped, *(x[:, t] for x in steps)), grouped)
    return grouped.reshape(state.shape)


def _step(state: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array) -> mx.array:
    """One update of the grouped state [B, Hk, R, Dv, Dk].

    Products and row sums rather than matrix products: on a CPU, MLX's batched matrix-vector product is three
    times slower, and this order gives the same bits as mlx-lm's recurrence.
    """
    state = state * g
    delta = (v - (state * k).sum(axis=-1, keepdims=True)) * beta
    return state + k * delta


def _by_step(k: mx.array, v: mx.array, g: mx.array, beta: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Inputs in float32, value heads split by the key head that serves them, shaped to broadcast over the state."""
    n_key_heads = k.shape[2]

    def split(x: mx.array) -> mx.array:  # [B, T, Hv, ...] -> [B, T, Hk, R, ...]
        return x.astype(mx.float32).reshape(*x.shape[:2], n_key_heads, -1, *x.shape[3:])

    return (
        k.astype(mx.float32)[:, :, :, None, None],
        split(v)[..., None],
        split(g)[..., None, None],
        split(beta)[..., None, None],
    )


def _grouped(state: mx.array, n_key_heads: int) -> mx.array:
    """[B, Hv, Dv, Dk] -> [B, Hk, R, Dv, Dk]: value head h is served by key head h // R."""
    return state.reshape(state.shape[0], n_key_heads, -1, *state.shape[2:])
