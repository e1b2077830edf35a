"""Rows padded on the left, on the right or anywhere: brought to the front for the layers, and back for the caller."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qwen35conv.model.span import CallError


@dataclass(frozen=True, slots=True)
class Padding:
    """Where each row's real positions lie."""

    lengths: tuple[int, ...]  # real positions of each row
    order: np.ndarray  # [B, T] the caller's places, real ones first and in their order

    def packed(self, x: np.ndarray) -> np.ndarray:
        """x [..., B, T] with the real positions of each row at its front."""
        return np.take_along_axis(x, np.broadcast_to(self.order, x.shape), axis=-1)

    @property
    def places(self) -> np.ndarray:
        """Where each of the caller's positions lies in packed rows, [B, T]."""
        return np.argsort(self.order, axis=1)


def padding_of(mask: np.ndarray) -> Padding:
    """The padding of a mask [B, T], True where real. Raises CallError for one of another kind."""
    if mask.ndim != 2 or mask.dtype != np.bool_:
        raise CallError(f"mask: expected booleans [B, T], found {mask.dtype} {list(mask.shape)}")
    return Padding(tuple(mask.sum(axis=1).tolist()), np.argsort(~mask, axis=1, kind="stable"))
