"""What a verification asks and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import mlx.core as mx

from qwen35conv.planning.plan import Plan
from qwen35conv.source import Source

Value = str | int | float | bool
OnProgress = Callable[[str, int, int], None]  # what, done, of how many


class Step(str, Enum):
    """The steps of a verification, in order."""

    STRUCTURE = "structure"
    VALUES = "values"
    SOURCE = "source"
    KERNEL = "kernel"
    PROMPT = "prompt"
    REFERENCE = "reference"
    INVARIANTS = "invariants"
    SERVING = "serving"
    PROFILE = "profile"


QUICK = (Step.STRUCTURE, Step.VALUES, Step.KERNEL)  # what `convert` runs on its result


class RunDtype(str, Enum):
    """What weights are read as for a forward pass."""

    SOURCE = "source"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def array_dtype(self) -> mx.Dtype | None:
        """MLX's dtype; None: as stored."""
        return {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}.get(self.value)


@dataclass(frozen=True, slots=True)
class Original:
    """What a result was made from: its plan is compared with the result, byte for byte."""

    source: Source
    plan: Plan


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What a user may ask of a verification. A step without what it needs is left out."""

    steps: tuple[Step, ...] = tuple(Step)
    original: Original | None = None
    prompt: str | None = None
    tokens: tuple[int, ...] | None = None  # instead of a prompt
    chat: bool = False  # put the prompt through the chat template
    max_new_tokens: int | None = None  # None: 24 where the model stays in memory, else 1
    backend: str = "auto"
    reference: Path | None = None
    atol: float | None = None
    dtype: RunDtype = RunDtype.SOURCE
    deep: bool = False
    profile: bool = False  # time the phases of the forward pass
    brief: bool = False  # the kernel step takes one head of the layer, so that nothing large is read
    max_memory: int | None = None  # bytes up to which layers stay in memory; None: a fraction of what is free


@dataclass(frozen=True, slots=True)
class Check:
    """What one step found. `passed` is None where it could not judge."""

    name: str
    passed: bool | None
    summary: str
    details: tuple[tuple[str, Value], ...] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """All checks of a checkpoint, in order."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(check.passed is not False for check in self.checks)

    @property
    def exit_code(self) -> int:
        """What the command returns."""
        return 0 if self.passed else 1
