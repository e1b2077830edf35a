"""The modules of a model, made from canonical tensors as they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from qwen35conv.errors import CheckpointError
from qwen35conv.facts.config import ModuleQuantization
from qwen35conv.model.linear import (
    ExpertLinear,
    Linear,
    PlainExperts,
    PlainLinear,
    QuantizedExperts,
    QuantizedLinear,
    RowTable,
    can_run,
)

_FLOATS = (mx.float32, mx.bfloat16, mx.float16)


class Tensors(Protocol):
    """Canonical tensors by name, whole or by rows. A view is one."""

    def __getitem__(self, name: str, /) -> mx.array:
        """The whole tensor."""

    def __contains__(self, name: object, /) -> bool:
        """Whether there is such a tensor."""

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        """Rows `begin` to `end` (one past) of the first axis."""


class OpaqueModuleError(CheckpointError):
    """A module whose weights are packed in a way that MLX has no product for."""


@dataclass(frozen=True)
class Weights:
    """Modules over canonical tensors: `packing` says how each quantised one is packed, `dtype` what floats become."""

    tensors: Tensors
    packing: Mapping[str, ModuleQuantization | None]
    dtype: mx.Dtype | None = None  # None: as stored

    def array(self, name: str) -> mx.array:
        """A plain tensor."""
        return self._cast(self.tensors[name])

    def linear(self, module: str) -> Linear:
        """A linear module. Raises OpaqueModuleError where it can't be run."""
        packing = self._packing(module)
        weight = self.array(f"{module}.weight")
        bias = self.array(f"{module}.bias") if f"{module}.bias" in self.tensors else None
        if packing is None:
            return PlainLinear(weight, bias)
        return QuantizedLinear(weight, *self._scales(module), packing, bias)

    def experts(self, module: str) -> ExpertLinear:
        """A stack of linear modules. Raises OpaqueModuleError where it can't be run."""
        packing = self._packing(module)
        weight = self.array(f"{module}.weight")
        return PlainExperts(weight) if packing is None else QuantizedExperts(weight, *self._scales(module), packing)

    def table(self, module: str, n_rows: int, width: int) -> RowTable:
        """A matrix that is read by rows; its use raises OpaqueModuleError where it can't be run."""
        packing = self.packing.get(module)
        refusal = None if can_run(packing) else _refusal(module, packing)
        bits = packing.bits if packing is not None else 8 * self.tensors.rows(f"{module}.weight", 0, 1).dtype.size
        return RowTable(
            n_rows=n_rows,
            n_bytes=n_rows * width * bits // 8,
            packing=packing,
            read=lambda part, begin, end: self._cast(self.tensors.rows(f"{module}.{part}", begin, end)),
            has_bias=f"{module}.bias" in self.tensors,
            dtype=self.dtype,
            refusal=refusal,
        )

    def opaque(self, modules: Iterable[str]) -> tuple[str, ...]:
        """Those of the modules that can't be run."""
        return tuple(module for module in modules if not can_run(self.packing.get(module)))

    def _packing(self, module: str) -> ModuleQuantization | None:
        packing = self.packing.get(module)
        if not can_run(packing):
            raise _refusal(module, packing)
        return packing

    def _scales(self, module: str) -> tuple[mx.array, mx.array | None]:
        biases = self.array(f"{module}.biases") if f"{module}.biases" in self.tensors else None
        return self.array(f"{module}.scales"), biases

    def _cast(self, array: mx.array) -> mx.array:
        return array if self.dtype is None or array.dtype not in _FLOATS else array.astype(self.dtype)


def _refusal(module: str, packing: ModuleQuantization | None) -> OpaqueModuleError:
    assert packing is not None
    return OpaqueModuleError(
        f"{module}: packed as mode {packing.mode!r} with {packing.bits} bits in groups of {packing.group_size}, "
        "which MLX has no matrix product for",
        hint="it converts byte for byte all the same; its own loader must verify it",
    )
