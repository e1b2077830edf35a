"""Proof on the user's own machine that a checkpoint is right: names, values, bytes, and a forward pass.

It runs over the plan's view, so it works the same on a raw source and on a converted result.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np

from qwen35conv.errors import SourceError
from qwen35conv.facts.checkpoint import Checkpoint
from qwen35conv.facts.header import Dtype
from qwen35conv.facts.layout import TRUNK_PREFIX, Role, parse_name
from qwen35conv.generation.convention import Generation
from qwen35conv.model import Decoder, Weights, load_decoder, lora_targets
from qwen35conv.planning.plan import NormDtype, Options, Plan, make_plan
from qwen35conv.planning.receipt import read_assumption
from qwen35conv.planning.sidecar import RECEIPT
from qwen35conv.planning.verdicts import judge_checkpoint
from qwen35conv.source import Source, open_source, read_checkpoint
from qwen35conv.verify.apart import run_apart
from qwen35conv.verify.bytes import check_bytes, plan_like, plan_of_all
from qwen35conv.verify.check import (
    QUICK,
    Check,
    OnProgress,
    Original,
    RunDtype,
    Step,
    Verification,
    VerifyOptions,
)
from qwen35conv.verify.invariants import check_invariants
from qwen35conv.verify.kernel_check import check_kernel
from qwen35conv.verify.memory import allowed_memory, model_bytes
from qwen35conv.verify.prompt import check_prompt
from qwen35conv.verify.reference import check_reference, read_reference
from qwen35conv.verify.serving import check_serving, first_layers
from qwen35conv.verify.structure import check_structure
from qwen35conv.verify.timing import check_timing
from qwen35conv.verify.tokens import TextError
from qwen35conv.verify.values import check_values
from qwen35conv.view import View, open_view

__all__ = [
    "QUICK",
    "Check",
    "OnProgress",
    "Original",
    "RunDtype",
    "Step",
    "Verification",
    "VerifyOptions",
    "open_original",
    "plan_like",
    "plan_to_verify",
    "read_prompt",
    "verify",
]

_FORWARD = (Step.PROMPT, Step.REFERENCE, Step.INVARIANTS, Step.SERVING, Step.PROFILE)  # what needs a decoder
_ALONE = threading.Lock()  # one at a time in a process: each counts on all processors and on the memory that is free
_MAX_RECEIPT = 400_000_000  # bytes
_PROFILE_TOKENS = 128
_SERVED_TOKENS = 19
_DEEP_TOKENS = 33  # positions that the invariants are asked over, where no prompt is given


def plan_to_verify(checkpoint: Checkpoint) -> Plan:
    """The plan of a checkpoint to verify: where its gains are broken, the one that takes them as they are.

    The verdict stays in the plan, and fails the verification. Raises CheckpointError for what can't be planned at all.
    """
    verdicts = judge_checkpoint(checkpoint)
    assume = None if verdicts.trunk.converts else Generation.CANONICAL
    return make_plan(checkpoint, Options(assume=assume), verdicts)


def open_original(
    spec: str, result: Source, checkpoint: Checkpoint, plan: Plan, *, revision: str | None = None
) -> Original:
    """What a result was made from, under the plan that the result's own tensors and its receipt speak of.

    Raises SourceError where it can't be read, CheckpointError where no plan leads from it to such a result.
    """
    source = open_source(spec, revision=revision)
    assume = None
    if 0 < (n_bytes := result.listing.get(RECEIPT, 0)) <= _MAX_RECEIPT:
        assume = read_assumption(result.read(RECEIPT, [(0, n_bytes)])[0])
    return Original(source, plan_like(read_checkpoint(source), plan_of_all(checkpoint, plan), assume))


def read_prompt(file: Path) -> str:
    """The text of a file. Raises TextError where it has none."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise SourceError(f"{file}: can't be read: {error.strerror or error}", hint="check the path") from error
    except UnicodeDecodeError as error:
        raise TextError(f"{file}: is no UTF-8 text", hint="give a plain text file") from error


def verify(
    source: Source,
    plan: Plan,
    checkpoint: Checkpoint,
    options: VerifyOptions | None = None,
    on_progress: OnProgress | None = None,
) -> Verification:
    """What each step finds on a checkpoint.

    Raises SourceError for what can't be read, TextError for a prompt that can't be used.
    """
    with _ALONE:
        return run_apart(lambda: _verify(source, plan, checkpoint, options or VerifyOptions(), on_progress))


def _verify(
    source: Source, plan: Plan, checkpoint: Checkpoint, options: VerifyOptions, on_progress: OnProgress | None
) -> Verification:
    if options.dtype is RunDtype.FLOAT32:  # MLX reads it at its first product: else CUDA rounds float32 to 11 bits
        os.environ.setdefault("MLX_ENABLE_TF32", "0")
    steps = set(options.steps)
    config = checkpoint.config
    checks = []
    if Step.STRUCTURE in steps:
        checks.append(check_structure(checkpoint, plan))
    if Step.VALUES in steps:
        checks.append(
            check_values(
                source, checkpoint, plan, everything=options.deep, brief=options.brief, on_progress=on_progress
            )
        )
    if Step.SOURCE in steps and options.original is not None:
        whole = plan_of_all(checkpoint, plan)
        original = open_view(options.original.source, options.original.plan)
        checks.append(check_bytes(original, open_view(source, whole), on_progress))
    run_plan = _plan_to_run(checkpoint, plan, options.dtype)
    view = open_view(source, run_plan)
    weights = Weights(view, run_plan.packing, options.dtype.array_dtype)
    if Step.KERNEL in steps:
        checks.append(check_kernel(config, weights, options.backend, brief=options.brief))
    forward = [step for step in _FORWARD if step in steps]
    if not forward:
        return Verification(tuple(checks))
    decoder = _load(view, weights, run_plan, checkpoint, options)
    opaque = tuple(sorted(m for m in weights.opaque(run_plan.packing) if m.startswith("language_model.")))
    if Step.PROMPT in forward:
        if options.prompt is None and options.tokens is None:
            checks.append(Check("prompt", None, "no text to judge by: give one with --prompt"))
        else:
            checks.append(_naming(check_prompt(source, decoder, options, on_progress), opaque))
    if Step.REFERENCE in forward and options.reference is not None:
        reference = read_reference(options.reference, decoder.head.n_rows)
        is_exact = options.dtype is RunDtype.FLOAT32 and _gains_are_exact(run_plan)
        found = check_reference(reference, decoder, atol=options.atol, is_exact=is_exact, on_progress=on_progress)
        checks.append(_naming(found, opaque))
    if Step.INVARIANTS in forward and options.deep:
        ids = np.random.default_rng(0).integers(0, decoder.head.n_rows, (1, _DEEP_TOKENS))
        checks.append(_naming(check_invariants(decoder, ids, on_progress), opaque))
    if Step.SERVING in forward and options.deep:
        ids = np.random.default_rng(1).integers(0, decoder.head.n_rows, (1, _SERVED_TOKENS))
        n_bytes, allowed = model_bytes(run_plan, options.dtype), allowed_memory(options.max_memory)
        served = first_layers(decoder, n_bytes, allowed)
        checks.append(_naming(check_serving(served, ids, lora_targets(run_plan), on_progress), opaque))
    if Step.PROFILE in forward and options.profile:
        ids = np.random.default_rng(0).integers(0, decoder.head.n_rows, (1, _PROFILE_TOKENS))
        checks.append(_naming(check_timing(decoder, ids, on_progress), opaque))
    return Verification(tuple(checks))


def _plan_to_run(checkpoint: Checkpoint, plan: Plan, dtype: RunDtype) -> Plan:
    """The plan for a forward pass: in float32 gains are shifted in float32 too, as nothing else is rounded there."""
    if dtype is not RunDtype.FLOAT32 or plan.shift == 0:
        return plan
    return make_plan(checkpoint, replace(plan.options, norm_dtype=NormDtype.FLOAT32), plan.verdicts)


def _gains_are_exact(plan: Plan) -> bool:
    """Whether no gain was rounded when it was shifted: float32 throughout."""
    return all(
        write.dtype is Dtype.F32
        for write in plan.writes()
        if (place := parse_name(write.name)) is not None and place.role is Role.GAIN
    )


def _load(view: View, weights: Weights, plan: Plan, checkpoint: Checkpoint, options: VerifyOptions) -> Decoder:
    embeddings = f"{TRUNK_PREFIX}embed_tokens.weight"
    n_rows = view.write(embeddings).shape[0] if embeddings in view else None
    keep = model_bytes(plan, options.dtype) <= allowed_memory(options.max_memory)
    return load_decoder(
        checkpoint.config, weights, tied=plan.tied, vocab_size=n_rows, backend=options.backend, keep=keep
    )


def _naming(check: Check, opaque: tuple[str, ...]) -> Check:
    """The check with every module named that could not be run."""
    if not opaque:
        return check
    return replace(check, details=(*check.details, ("modules that can't be run", ", ".join(opaque))))
