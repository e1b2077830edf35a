"""Where the time of a forward pass goes on this machine: by phase, and by kind of layer."""

from __future__ import annotations

import numpy as np

from qwen35conv.model.decoder import Decoder
from qwen35conv.model.profile import profile
from qwen35conv.model.weights import OpaqueModuleError
from qwen35conv.verify.check import Check, OnProgress, Value


def check_timing(decoder: Decoder, ids: np.ndarray, on_progress: OnProgress | None = None) -> Check:
    """The times of one prefill; it judges nothing."""

    def on_layer(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress("profile", done, total)

    try:
        found = profile(decoder, ids, on_layer=on_layer)
    except OpaqueModuleError as error:
        return Check("profile", None, f"can't be run: {error}")
    details: list[tuple[str, Value]] = [
        (
            f"{entry.kind.value}, {entry.phase.value}",
            f"{entry.seconds * 1e3:.2f} ms in {entry.n_layers} layers, {found.share(entry):.0%}",
        )
        for entry in found.times
    ]
    return Check(
        "profile", True, f"{found.n_steps} positions, {found.seconds * 1e3:.1f} ms in all phases", tuple(details)
    )
