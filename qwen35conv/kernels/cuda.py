"""The gated delta rule on an NVIDIA GPU, through `mx.fast.cuda_kernel`."""

from __future__ import annotations

import mlx.core as mx

from qwen35conv.kernels.launch import Tuning, make_call, run

TUNING = Tuning(lanes=8, rows=3, vector=8, depth=2, ahead=16, groups=1)

# The Metal names the body uses.
HEADER = """
#define thread_position_in_grid \\
  make_uint3(blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z)
#define thread_index_in_simdgroup threadIdx.x

__device__ inline float simd_shuffle_xor(float value, int step) {
  return __shfl_xor_sync(0xffffffffu, value, step);
}

template <typename T>
constexpr bool is_bfloat16 = false;
template <>
constexpr bool is_bfloat16<__nv_bfloat16> = true;

template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T v[N];
};

template <int N, typename T>
__device__ inline Pack<T, N> load(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

__device__ inline void bring_near(const char* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

template <typename T, int N>
__device__ inline float widen(const Pack<T, N>& pack, int i) {
  if constexpr (sizeof(pack) % 4 == 0 && is_bfloat16<T>) {
    // One instruction for each half of a word. In assembly, or the compiler makes three of it.
    const unsigned int word = reinterpret_cast<const unsigned int*>(&pack)[i / 2];
    float value;
    if (i % 2) {
      asm volatile("and.b32 %0, %1, 0xffff0000;" : "=f"(value) : "r"(word));
    } else {
      asm volatile("shl.b32 %0, %1, 16;" : "=f"(value) : "r"(word));
    }
    return value;
  } else {
    return float(pack.v[i]);
  }
}

template <typename T, int N>
__device__ inline void store(T* to, Pack<T, N> pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}
"""


def is_available() -> bool:
    """Whether MLX runs on an NVIDIA GPU here."""
    return bool(mx.cuda.is_available())


def gated_delta(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """As `reference.gated_delta`."""
    y, after = run(make_call(HEADER, TUNING, q, k, v, g, beta, state, mask), mx.fast.cuda_kernel)
    return y, after


def gated_delta_state(
    k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, lengths: mx.array
) -> mx.array:
    """As `reference.gated_delta_state`."""
    return run(make_call(HEADER, TUNING, None, k, v, g, beta, state, lengths), mx.fast.cuda_kernel)[0]
