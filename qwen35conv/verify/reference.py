"""Whether the logits are those that another implementation gave."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from qwen35conv.errors import SourceError
from qwen35conv.model.decoder import Decoder
from qwen35conv.verify.check import Check, OnProgress, Value
from qwen35conv.verify.forward import AS_STORED, run_layers

EXACT_ATOL = 1e-3  # weights read as float32, gains exact
_AGREE, _DISAGREE = 0.95, 0.5  # share of equal first choices that settles it where rounding moves logits


@dataclass(frozen=True, slots=True)
class Reference:
    """Another implementation's logits [B, T, V] for ids [B, T]."""

    ids: np.ndarray
    logits: mx.array


def read_reference(path: Path, n_rows: int) -> Reference:
    """The reference in a safetensors file with `input_ids` and `logits`. Raises SourceError where it is none."""
    try:
        held = mx.load(str(path), format="safetensors")
    except (OSError, RuntimeError, ValueError) as error:
        raise SourceError(f"{path}: can't be read as safetensors: {error}") from error
    assert isinstance(held, dict)
    if not {"input_ids", "logits"} <= held.keys():
        raise SourceError(f"{path}: expected input_ids and logits, found {', '.join(sorted(held)) or 'nothing'}")
    ids, logits = held["input_ids"], held["logits"]
    if ids.ndim == 1:
        ids, logits = ids[None], logits[None] if logits.ndim == 2 else logits
    if ids.ndim != 2 or logits.shape != (*ids.shape, n_rows):
        raise SourceError(
            f"{path}: expected input_ids [B, T] and logits [B, T, {n_rows}], found {ids.shape} and {logits.shape}",
            hint="the reference belongs to another model",
        )
    if ids.size == 0 or not mx.issubdtype(ids.dtype, mx.integer):
        raise SourceError(f"{path}: expected one token id and more, found {ids.dtype} {ids.shape}")
    stored = np.array(ids)
    outside = stored[(stored < 0) | (stored >= n_rows)]
    if outside.size:
        raise SourceError(
            f"{path}: token {outside[0]} is not in the model's vocabulary of {n_rows}",
            hint="the reference belongs to another model",
        )
    return Reference(stored, logits)


def check_reference(
    reference: Reference,
    decoder: Decoder,
    *,
    atol: float | None,
    is_exact: bool,
    on_progress: OnProgress | None = None,
) -> Check:
    """Our logits against another implementation's. `is_exact`: weights and gains are read without any rounding."""
    passed = run_layers(decoder, reference.ids, on_progress=on_progress)
    if passed.stopped is not None:
        return Check("reference", None, f"can't go on behind {passed.n_layers} layers: {passed.stopped}")
    distance, size = 0.0, 0.0
    best = [np.full(reference.ids.shape, -np.inf) for _ in range(2)]
    choice = [np.zeros(reference.ids.shape, dtype=np.int64) for _ in range(2)]
    for begin, logits in decoder.head_slices(passed.hidden[AS_STORED]):
        theirs = reference.logits[..., begin : begin + logits.shape[-1]]
        pair = [np.array(x.astype(mx.float32)) for x in (logits, theirs)]
        distance = float(np.maximum(distance, np.abs(pair[0] - pair[1]).max()))  # NaN stays NaN
        size = max(size, float(np.abs(pair[1]).max()))
        for which, part in enumerate(pair):
            place = part.argmax(axis=-1)
            value = np.take_along_axis(part, place[..., None], axis=-1)[..., 0]
            better = value > best[which]
            best[which] = np.where(better, value, best[which])
            choice[which] = np.where(better, begin + place, choice[which])
    agreement = float((choice[0] == choice[1]).mean())
    details: tuple[tuple[str, Value], ...] = (
        ("positions", reference.ids.size),
        ("largest difference", distance),
        ("largest reference logit", size),
        ("equal first choices", agreement),
    )
    told = f"largest difference {distance:.2g} (logits up to {size:.2g}), {agreement:.0%} of the first choices equal"
    limit = EXACT_ATOL if atol is None and is_exact else atol
    if limit is not None:
        verdict = distance <= limit
        return Check("reference", verdict, f"{told}; allowed {limit:g}", (*details, ("allowed", limit)))
    if agreement >= _AGREE or not agreement >= _DISAGREE:
        return Check("reference", agreement >= _AGREE, told, details)
    why = "rounding in the stored dtype allows no verdict; --dtype float32 on the raw source, or --atol, does"
    return Check("reference", None, f"{told}: {why}", details)
