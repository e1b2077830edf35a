"""The gated delta rule on an Apple GPU, through `mx.fast.metal_kernel`."""

from __future__ import annotations

import mlx.core as mx

from qwen35conv.kernels.launch import Call, Tuning, make_call, run

# Registers are dearer than on an NVIDIA GPU, and other lane groups hide the latency: two steps under way.
TUNING = Tuning(lanes=16, rows=2, vector=8, depth=2, ahead=0, groups=4)

# MLX passes inputs of fewer than eight elements in the constant address space, all others in device memory.
HEADER = """
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T v[N];
};

template <int N, typename T>
Pack<T, N> load(const device T* from) {
  return *(const device Pack<T, N>*)from;
}

template <int N, typename T>
Pack<T, N> load(const constant T* from) {
  Pack<T, N> pack;
  for (int i = 0; i < N; ++i) pack.v[i] = from[i];
  return pack;
}

template <typename T, int N>
float widen(Pack<T, N> pack, int i) {
  return float(pack.v[i]);
}

template <typename T, int N>
void store(device T* to, Pack<T, N> pack) {
  *(device Pack<T, N>*)to = pack;
}
"""


def is_available() -> bool:
    """Whether MLX runs on an Apple GPU here."""
    return bool(mx.metal.is_available())


def make_metal_call(
    q: mx.array | None,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    rows: mx.array | None = None,
) -> Call:
    """What would be handed to `mx.fast.metal_kernel`; the arguments are those of `launch.make_call`."""
    return make_call(HEADER, TUNING, q, k, v, g, beta, state, rows)


def gated_delta(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """As `reference.gated_delta`."""
    y, after = run(make_metal_call(q, k, v, g, beta, state, mask), mx.fast.metal_kernel)
    return y, after


def gated_delta_state(
    k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, lengths: mx.array
) -> mx.array:
    """As `reference.gated_delta_state`."""
    return run(make_metal_call(None, k, v, g, beta, state, lengths), mx.fast.metal_kernel)[0]
