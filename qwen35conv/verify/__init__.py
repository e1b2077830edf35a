"""Proof on the user's own machine that a checkpoint is right: names, values, bytes, and a forward pass.

It runs over the plan's view, so it works the same on a raw source and on a converted result.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace

from qwen35conv.facts.checkpoint import Checkpoint
from qwen35conv.generation.convention import Generation
from qwen35conv.model.weights import Weights
from qwen35conv.planning.plan import NormDtype, Options, Plan, make_plan
from qwen35conv.planning.receipt import read_assumption
from qwen35conv.planning.sidecar import RECEIPT
from qwen35conv.planning.verdicts import judge_checkpoint
from qwen35conv.reading import read_checkpoint
from qwen35conv.source import Source, open_source
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
from qwen35conv.verify.kernel_check import check_kernel
from qwen35conv.verify.structure import check_structure
from qwen35conv.verify.values import check_values
from qwen35conv.view import open_view

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
    "verify",
]

_PASSES = (Step.PROMPT, Step.REFERENCE, Step.INVARIANTS, Step.SERVING, Step.PROFILE)  # what runs the whole model
_ALONE = threading.Lock()  # one at a time in a process: each counts on all processors and on the memory that is free
_MAX_RECEIPT = 400_000_000  # bytes


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
    if steps.intersection(_PASSES):
        from qwen35conv.verify.passes import check_passes  # the whole model and a tokenizer: where they are run

        checks += check_passes(source, run_plan, checkpoint, weights, options, on_progress)
    return Verification(tuple(checks))


def _plan_to_run(checkpoint: Checkpoint, plan: Plan, dtype: RunDtype) -> Plan:
    """The plan for a forward pass: in float32 gains are shifted in float32 too, as nothing else is rounded there."""
    if dtype is not RunDtype.FLOAT32 or plan.shift == 0:
        return plan
    return make_plan(checkpoint, replace(plan.options, norm_dtype=NormDtype.FLOAT32), plan.verdicts)
