"""Linear maps over plain or MLX-quantised weights, one matrix or a stack of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from qwen35conv.errors import CheckpointError
from qwen35conv.facts.config import ModuleQuantization

_GROUPS = {"affine": (32, 64, 128), "mxfp4": (32,), "nvfp4": (16,), "mxfp8": (32,)}
_BITS = {"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,), "nvfp4": (4,), "mxfp8": (8,)}


def can_run(packing: ModuleQuantization | None) -> bool:
    """Whether MLX has a matrix product for weights packed like this; None is unpacked."""
    return packing is None or (
        packing.group_size in _GROUPS.get(packing.mode, ()) and packing.bits in _BITS.get(packing.mode, ())
    )


def on_cpu() -> bool:
    """Whether arrays are computed on the CPU, where some of MLX's products are narrower than on a GPU."""
    return mx.default_device().type == mx.DeviceType.cpu


class Linear(Protocol):
    """A map of the last axis."""

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] -> [..., out]."""


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """Weights as they were trained."""

    weight: mx.array  # [out, in]
    bias: mx.array | None = None  # [out]

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] -> [..., out]."""
        if self.bias is not None:
            return mx.addmm(self.bias, x, self.weight.T)
        return x @ self.weight.T


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """Weights as MLX packs them."""

    weight: mx.array  # [out, in * bits / 32]  uint32
    scales: mx.array  # [out, in / group]
    biases: mx.array | None  # [out, in / group]; None for the floating-point modes
    packing: ModuleQuantization
    bias: mx.array | None = None  # [out]

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] -> [..., out]."""
        y = mx.quantized_matmul(
            wide_on_cpu(x),
            self.weight,
            self.scales,
            self.biases,
            transpose=True,
            group_size=self.packing.group_size,
            bits=self.packing.bits,
            mode=self.packing.mode,
        ).astype(_result_dtype(x, self.scales))
        return y if self.bias is None else y + self.bias


class ExpertLinear(Protocol):
    """A stack of maps, of which each row of the input takes one."""

    def gathered(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        """[N, k or 1, 1, in] and experts [N, k] -> [N, k, 1, out]."""

    def expert(self, index: int) -> Linear:
        """The map of one expert."""

    def gathers(self, x: mx.array) -> bool:
        """Whether `gathered` runs for this input on this device."""


@dataclass(frozen=True, slots=True)
class PlainExperts:
    """Experts' weights as they were trained."""

    weight: mx.array  # [E, out, in]

    def gathered(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        """[N, k or 1, 1, in] and experts [N, k] -> [N, k, 1, out]."""
        return mx.gather_mm(x, self.weight.swapaxes(-1, -2), rhs_indices=experts, sorted_indices=is_sorted)

    def expert(self, index: int) -> Linear:
        """The map of one expert."""
        return PlainLinear(self.weight[index])

    def gathers(self, x: mx.array) -> bool:
        """Whether MLX gathers these: on a CPU it does so in float32 alone."""
        return not on_cpu() or (x.dtype == mx.float32 and self.weight.dtype == mx.float32)


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """Experts' weights as MLX packs them."""

    weight: mx.array  # [E, out, in * bits / 32]  uint32
    scales: mx.array  # [E, out, in / group]
    biases: mx.array | None  # [E, out, in / group]
    packing: ModuleQuantization

    def gathered(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        """[N, k or 1, 1, in] and experts [N, k] -> [N, k, 1, out]."""
        return mx.gather_qmm(
            wide_on_cpu(x),
            self.weight,
            self.scales,
            self.biases,
            rhs_indices=experts,
            transpose=True,
            group_size=self.packing.group_size,
            bits=self.packing.bits,
            mode=self.packing.mode,
            sorted_indices=is_sorted,
        ).astype(_result_dtype(x, self.scales))

    def expert(self, index: int) -> Linear:
        """The map of one expert."""
        biases = None if self.biases is None else self.biases[index]
        return QuantizedLinear(self.weight[index], self.scales[index], biases, self.packing)

    def gathers(self, x: mx.array) -> bool:
        """Whether MLX gathers these: always."""
        return True


@dataclass(frozen=True, slots=True)
class RowTable:
    """A matrix [rows, width] too large to hold, read a few rows at a time: the embeddings, or the head.

    `read(part, begin, end)` gives rows of the `weight`, or of a packed weight's `scales` and `biases`.
    """

    n_rows: int
    n_bytes: int
    packing: ModuleQuantization | None
    read: Callable[[str, int, int], mx.array]
    has_bias: bool = False
    dtype: mx.Dtype | None = None  # what rows are dequantised to; None: as MLX does
    refusal: CheckpointError | None = None  # raised on use, where the rows can't be run

    def lookup(self, ids: np.ndarray) -> mx.array:
        """The rows of `ids` [...], as [..., width]; neighbouring rows are read at once. Raises `refusal`."""
        self._check()
        wanted, places = np.unique(ids, return_inverse=True)
        runs = np.split(wanted, np.nonzero(np.diff(wanted) != 1)[0] + 1)
        rows = mx.concatenate([self._rows(int(run[0]), int(run[-1]) + 1) for run in runs])
        return rows[mx.array(places.reshape(ids.shape))]

    def linear(self, begin: int, end: int) -> Linear:
        """The map to outputs `begin` to `end` (one past). Raises `refusal`."""
        self._check()
        bias = self.read("bias", begin, end) if self.has_bias else None
        weight = self.read("weight", begin, end)
        if self.packing is None:
            return PlainLinear(weight, bias)
        return QuantizedLinear(weight, *self._scales(begin, end), self.packing, bias)

    def slices(self, n_bytes: int) -> list[tuple[int, int]]:
        """Row ranges that cover the table, about `n_bytes` each."""
        step = max(1, n_bytes * self.n_rows // max(1, self.n_bytes))
        return [(begin, min(begin + step, self.n_rows)) for begin in range(0, self.n_rows, step)]

    def _check(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def _rows(self, begin: int, end: int) -> mx.array:
        weight = self.read("weight", begin, end)
        if self.packing is None:
            return weight
        return mx.dequantize(
            weight,
            *self._scales(begin, end),
            group_size=self.packing.group_size,
            bits=self.packing.bits,
            mode=self.packing.mode,
            dtype=self.dtype,
        )

    def _scales(self, begin: int, end: int) -> tuple[mx.array, mx.array | None]:
        assert self.packing is not None
        biases = self.read("biases", begin, end) if self.packing.mode == "affine" else None
        return self.read("scales", begin, end), biases


def wide_on_cpu(x: mx.array) -> mx.array:
    """The input in float32 on a CPU: there MLX sums quantised products in the input's own dtype.

    In bfloat16 that loses a tenth of the result's size at 1,024 inputs; a GPU sums in float32.
    """
    return x.astype(mx.float32) if on_cpu() else x


def _result_dtype(x: mx.array, scales: mx.array) -> mx.Dtype:
    """The dtype that MLX itself gives a quantised product."""
    if scales.dtype == mx.uint8 or x.dtype == scales.dtype:
        return x.dtype
    return mx.float32
