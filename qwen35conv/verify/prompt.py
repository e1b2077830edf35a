"""Whether a text makes sense to the model, and whether it would make more with each gain moved by one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from qwen35conv.model.decoder import Decoder
from qwen35conv.source import Source
from qwen35conv.verify.check import Check, OnProgress, Value, VerifyOptions
from qwen35conv.verify.forward import AS_STORED, Scores, greedy, run_layers, score
from qwen35conv.verify.tokens import TextError, decode, encode, read_tokenizer

SHIFTS = (AS_STORED, 1.0, -1.0)
# Losses are weighed in units of ln(vocabulary), the loss of a model that knows nothing.
_SENSE = 0.75  # a loss below makes sense; untrained weights stay above, but for luck on a few tokens
_CLEAR = 0.05  # a difference in loss that is no accident
_NOTICED = 0.02  # ... and what is enough where one loss is also _TIMES the other: a text the model knows well
_TIMES = 1.5
_FEW = 8  # predictions below which a text fails no checkpoint
_KEPT_TOKENS = 24


def check_prompt(
    source: Source, decoder: Decoder, options: VerifyOptions, on_progress: OnProgress | None = None
) -> Check:
    """The loss of a text as the gains are, and with each one higher or lower; and what the model says next.

    Raises TextError for a prompt that can't be read.
    """
    tokenizer = read_tokenizer(source)
    if options.tokens is not None:
        tokens = options.tokens
    else:
        assert options.prompt is not None
        tokens = encode(source, tokenizer, options.prompt, chat=options.chat)
    ids = as_ids(tokens, decoder.head.n_rows)
    cache = decoder.make_cache()
    passed = run_layers(decoder, ids, SHIFTS, cache, on_progress)
    details: list[tuple[str, Value]] = [("tokens", ids.size), ("layers run", passed.n_layers)]
    if passed.stopped is not None:
        finite = all(bool(mx.isfinite(x).all()) for by, x in passed.hidden.items() if by == AS_STORED)
        summary = f"can't go on behind {passed.n_layers} layers: {passed.stopped}"
        return Check("prompt", None if finite else False, summary, tuple(details))
    scores = score(decoder, passed.hidden, ids)
    uniform = math.log(decoder.head.n_rows)
    details += [
        ("loss per token", round(scores[AS_STORED].loss, 4)),
        ("loss with every gain + 1", round(scores[1.0].loss, 4)),
        ("loss with every gain - 1", round(scores[-1.0].loss, 4)),
        ("ln(vocabulary)", round(uniform, 4)),
    ]
    details += [
        (f"candidate {i}", f"{decode(tokenizer, [token])!r} {chance:.1%}")
        for i, (token, chance) in enumerate(scores[AS_STORED].top, 1)
    ]
    if scores[AS_STORED].is_finite:
        n_tokens = options.max_new_tokens
        if n_tokens is None:
            n_tokens = _KEPT_TOKENS if decoder.keep else 1
        if n_tokens > 0:
            stops = stop_tokens(decoder.config.document)
            found = greedy(decoder, cache, scores[AS_STORED].top[0][0], n_tokens, stops)
            details.append(("continuation", decode(tokenizer, found)))
    verdict, summary = judge_losses(scores, uniform)
    return Check("prompt", verdict, summary, tuple(details))


def judge_losses(scores: Mapping[float, Scores], uniform: float) -> tuple[bool | None, str]:
    """Whether the gains are right as they are (None: can't tell), and why."""
    as_stored = scores[AS_STORED].loss
    if not scores[AS_STORED].is_finite:
        return False, "the forward pass gives NaN or infinity"
    if uniform == 0:
        return None, "a vocabulary of one token has no loss"
    if math.isnan(as_stored):
        return None, "one token has no loss: give a longer text to judge the gains by"
    moved = {shift: s.loss if s.is_finite else math.inf for shift, s in scores.items() if shift != AS_STORED}
    best = min(moved, key=lambda shift: moved[shift])
    told = f"loss {as_stored:.2f} a token, {moved[1.0]:.2f} with every gain + 1, {moved[-1.0]:.2f} with - 1"
    if min(as_stored, moved[best]) > _SENSE * uniform:
        return None, f"{told}: none is well below ln(vocabulary) = {uniform:.2f}, so this text can't judge the gains"
    if _is_clearly_lower(moved[best], as_stored, uniform):
        if scores[AS_STORED].losses.size < _FEW:
            return None, f"{told}: the text is too short to judge by"
        side = "one shift short" if best > 0 else "shifted once too often"
        return False, f"{told}: the norm gains are {side}"
    if _is_clearly_lower(as_stored, moved[best], uniform):
        return True, f"{told}: the gains are right"
    return None, f"{told}: too close to tell; give a longer text"


def _is_clearly_lower(low: float, high: float, uniform: float) -> bool:
    by = (high - low) / uniform
    return by > _CLEAR or (by > _NOTICED and high > _TIMES * low)


def as_ids(tokens: Sequence[int], n_rows: int) -> np.ndarray:
    """Token ids [1, T]. Raises TextError where there are none, or the model does not have one."""
    if not tokens:
        raise TextError("the prompt has no tokens")
    outside = [token for token in tokens if not 0 <= token < n_rows]
    if outside:
        raise TextError(
            f"token {outside[0]} is not in the model's vocabulary of {n_rows}",
            hint="the tokenizer or the tokens belong to another model",
        )
    return np.array([tokens])


def stop_tokens(document: Mapping[str, object]) -> frozenset[int]:
    """The tokens that end a text, as config.json has them."""
    text = document.get("text_config")
    found: set[int] = set()
    for level in (document, text if isinstance(text, dict) else {}):
        value = level.get("eos_token_id")
        found |= {token for token in (value if isinstance(value, list) else [value]) if type(token) is int}
    return frozenset(found)
