"""What running the model shows: on a text, against stored logits, on its invariants, as a server would, and timed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qwen35conv.facts.checkpoint import Checkpoint
from qwen35conv.facts.header import Dtype
from qwen35conv.facts.layout import TRUNK_PREFIX, Role, parse_name
from qwen35conv.model.decoder import Decoder, load_decoder
from qwen35conv.model.lora import lora_targets
from qwen35conv.model.weights import Weights
from qwen35conv.planning.plan import Plan
from qwen35conv.source import Source
from qwen35conv.verify.check import Check, OnProgress, RunDtype, Step, VerifyOptions
from qwen35conv.verify.invariants import check_invariants
from qwen35conv.verify.memory import allowed_memory, model_bytes
from qwen35conv.verify.prompt import check_prompt
from qwen35conv.verify.reference import check_reference, read_reference
from qwen35conv.verify.serving import check_serving, first_layers
from qwen35conv.verify.timing import check_timing

_PROFILE_TOKENS = 128
_SERVED_TOKENS = 19
_DEEP_TOKENS = 33  # positions that the invariants are asked over, where no prompt is given


def check_passes(
    source: Source,
    plan: Plan,
    checkpoint: Checkpoint,
    weights: Weights,
    options: VerifyOptions,
    on_progress: OnProgress | None,
) -> list[Check]:
    """The steps of `options` that run the whole model, `plan` being the one that its `weights` follow.

    Raises SourceError for what can't be read, TextError for a prompt that can't be used.
    """
    decoder = _load(weights, plan, checkpoint, options)
    opaque = tuple(sorted(m for m in weights.opaque(plan.packing) if m.startswith("language_model.")))
    checks = []
    if Step.PROMPT in options.steps:
        if options.prompt is None and options.tokens is None:
            checks.append(Check("prompt", None, "no text to judge by: give one with --prompt"))
        else:
            checks.append(_naming(check_prompt(source, decoder, options, on_progress), opaque))
    if Step.REFERENCE in options.steps and options.reference is not None:
        reference = read_reference(options.reference, decoder.head.n_rows)
        is_exact = options.dtype is RunDtype.FLOAT32 and _gains_are_exact(plan)
        found = check_reference(reference, decoder, atol=options.atol, is_exact=is_exact, on_progress=on_progress)
        checks.append(_naming(found, opaque))
    if Step.INVARIANTS in options.steps and options.deep:
        ids = np.random.default_rng(0).integers(0, decoder.head.n_rows, (1, _DEEP_TOKENS))
        checks.append(_naming(check_invariants(decoder, ids, on_progress), opaque))
    if Step.SERVING in options.steps and options.deep:
        ids = np.random.default_rng(1).integers(0, decoder.head.n_rows, (1, _SERVED_TOKENS))
        n_bytes, allowed = model_bytes(plan, options.dtype), allowed_memory(options.max_memory)
        served = first_layers(decoder, n_bytes, allowed)
        checks.append(_naming(check_serving(served, ids, lora_targets(plan), on_progress), opaque))
    if Step.PROFILE in options.steps and options.profile:
        ids = np.random.default_rng(0).integers(0, decoder.head.n_rows, (1, _PROFILE_TOKENS))
        checks.append(_naming(check_timing(decoder, ids, on_progress), opaque))
    return checks


def _gains_are_exact(plan: Plan) -> bool:
    """Whether no gain was rounded when it was shifted: float32 throughout."""
    return all(
        write.dtype is Dtype.F32
        for write in plan.writes()
        if (place := parse_name(write.name)) is not None and place.role is Role.GAIN
    )


def _load(weights: Weights, plan: Plan, checkpoint: Checkpoint, options: VerifyOptions) -> Decoder:
    embeddings = f"{TRUNK_PREFIX}embed_tokens.weight"
    n_rows = next((write.shape[0] for write in plan.writes() if write.name == embeddings), None)
    keep = model_bytes(plan, options.dtype) <= allowed_memory(options.max_memory)
    return load_decoder(
        checkpoint.config, weights, tied=plan.tied, vocab_size=n_rows, backend=options.backend, keep=keep
    )


def _naming(check: Check, opaque: tuple[str, ...]) -> Check:
    """The check with every module named that could not be run."""
    if not opaque:
        return check
    return replace(check, details=(*check.details, ("modules that can't be run", ", ".join(opaque))))
