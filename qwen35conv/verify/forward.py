"""One streamed pass over a prompt: as the checkpoint folds its gains, and as it would with each moved by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from qwen35conv.model.cache import Cache
from qwen35conv.model.decoder import Decoder
from qwen35conv.model.span import span_of
from qwen35conv.model.weights import OpaqueModuleError
from qwen35conv.verify.check import OnProgress

AS_STORED = 0.0


@dataclass(frozen=True, slots=True)
class Passed:
    """Final hidden states [B, T, hidden] by what was added to each gain; fewer layers where one can't be run."""

    hidden: dict[float, mx.array]
    n_layers: int
    stopped: str | None  # what could not be run


def run_layers(
    decoder: Decoder,
    ids: np.ndarray,  # [B, T]
    shifts: Sequence[float] = (AS_STORED,),
    cache: Cache | None = None,  # moved by the pass as stored
    on_progress: OnProgress | None = None,
) -> Passed:
    """Every layer over the prompt, each loaded once for all shifts and dropped before the next."""
    n_layers = decoder.config.n_layers
    try:
        embedded = decoder.embed(ids)
    except OpaqueModuleError as error:
        return Passed({}, 0, str(error))
    hidden = dict.fromkeys(shifts, embedded)
    span = span_of(ids.shape[1], [0] * ids.shape[0] if cache is None else cache.lengths)
    for i in range(n_layers):
        try:
            block = decoder.block(i)
        except OpaqueModuleError as error:
            return Passed(hidden, i, str(error))
        state = None if cache is None else cache.layers[i]
        for shift in shifts:
            if shift == AS_STORED:
                hidden[shift] = block(hidden[shift], span, state)
            else:
                hidden[shift] = block.shifted(shift)(hidden[shift], span)
            mx.eval(hidden[shift], [] if state is None else state.arrays())
        del block
        if on_progress is not None:
            on_progress("layers", i + 1, n_layers)
    if cache is not None:
        cache.lengths = list(span.ends)
    refusal = decoder.head.refusal
    hidden = {shift: decoder.final_norm(x, shift) for shift, x in hidden.items()}
    return Passed(hidden, n_layers, None if refusal is None else str(refusal))


@dataclass(frozen=True, slots=True)
class Scores:
    """What the head says of a prompt [T], without its logits being kept."""

    losses: np.ndarray  # [T - 1] -log of the probability of each next token
    top: tuple[tuple[int, float], ...]  # the likeliest tokens after the last, with their probabilities
    is_finite: bool

    @property
    def loss(self) -> float:
        """The mean loss of a token; NaN for a prompt of one."""
        return float(self.losses.mean()) if self.losses.size else float("nan")


def score(decoder: Decoder, hidden: dict[float, mx.array], ids: np.ndarray, n_top: int = 5) -> dict[float, Scores]:
    """The scores of one prompt's [1, T] hidden states, each part of the head read once for all of them."""
    running = {shift: _Running(ids[0], n_top) for shift in hidden}
    shifts = list(hidden)
    stacked = mx.concatenate([hidden[shift] for shift in shifts], axis=0)
    for begin, logits in decoder.head_slices(stacked):
        for row, shift in enumerate(shifts):
            running[shift].add(begin, np.array(logits[row].astype(mx.float32)))
    return {shift: one.scores() for shift, one in running.items()}


class _Running:
    """Log-sum-exp, the wanted logits and the best of the last position, over slices of the vocabulary."""

    def __init__(self, ids: np.ndarray, n_top: int) -> None:
        self.ids, self.n_top = ids, n_top
        self.largest = np.full(len(ids), -np.inf)
        self.total = np.zeros(len(ids))
        self.wanted = np.full(len(ids) - 1, -np.inf)
        self.top: list[tuple[float, int]] = []
        self.is_finite = True

    def add(self, begin: int, logits: np.ndarray) -> None:
        """Logits [T, rows] of the vocabulary from `begin` on."""
        self.is_finite &= bool(np.isfinite(logits).all())
        if not self.is_finite:
            return
        largest = np.maximum(self.largest, logits.max(axis=1))
        self.total = self.total * np.exp(self.largest - largest)
        self.total += np.exp(logits - largest[:, None], dtype=np.float64).sum(axis=1)
        self.largest = largest
        places = self.ids[1:] - begin
        here = np.nonzero((places >= 0) & (places < logits.shape[1]))[0]
        self.wanted[here] = logits[here, places[here]]
        n_best = min(self.n_top, logits.shape[1])
        best = np.argpartition(logits[-1], -n_best)[-n_best:]
        self.top += [(float(logits[-1, i]), begin + int(i)) for i in best]
        self.top = sorted(self.top, key=lambda entry: (-entry[0], entry[1]))[: self.n_top]

    def scores(self) -> Scores:
        """The scores, once all slices were added."""
        if not self.is_finite:
            return Scores(np.full(len(self.wanted), np.nan), (), False)
        normaliser = self.largest + np.log(self.total)
        top = tuple((i, float(np.exp(logit - normaliser[-1]))) for logit, i in self.top)
        return Scores(normaliser[:-1] - self.wanted, top, True)


def greedy(decoder: Decoder, cache: Cache, first: int, n_tokens: int, stops: frozenset[int]) -> list[int]:
    """The likeliest continuation: `first`, and up to `n_tokens` in all, until a stop token."""
    found = [first]
    while len(found) < n_tokens and found[-1] not in stops:
        hidden = decoder.hidden(np.array([[found[-1]]]), cache)
        best = (-float("inf"), 0)
        for begin, logits in decoder.head_slices(hidden):
            row = np.array(logits[0, -1].astype(mx.float32))
            place = int(row.argmax())
            if row[place] > best[0]:
                best = (float(row[place]), begin + place)
        found.append(best[1])
    return found
