"""Numbers and verdicts in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen35conv.generation.convention import Generation, Role, Verdict
from qwen35conv.generation.evidence import CONTROL_HIGH, CONTROL_LOW
from qwen35conv.report.page import Span

if TYPE_CHECKING:
    from qwen35conv.planning.plan import Plan

MEANING = {
    Generation.RAW: "as transformers exports it: gains hold gamma - 1, conv not moved",
    Generation.CANONICAL: "already canonical: gains hold gamma, conv moved, as MLX computes",
    Generation.DOUBLE_SHIFTED: "1 was added to the gains twice: they hold gamma + 1",
    Generation.NEVER_SHIFTED: "the conv was moved, the gains were not: they still hold gamma - 1",
    Generation.SHIFTED_RAW: "the gains hold gamma already, the layout is raw",
    Generation.MIXED: "its parts disagree on what a gain holds",
    Generation.UNKNOWN: "what a gain holds is not settled: converting would be a guess",
}
_HEAD_ROLES = {
    Role.PRE_FC_EMBEDDING: "embedding",
    Role.PRE_FC_HIDDEN: "hidden",
    Role.INPUT: "input",
    Role.POST: "post",
    Role.FINAL: "final",
}
_UNITS = ("B", "kB", "MB", "GB", "TB")


def style_of(generation: Generation) -> str:
    """Red for what is broken, yellow for what nobody knows."""
    styles = {Generation.RAW: "bold blue", Generation.CANONICAL: "bold green", Generation.UNKNOWN: "bold yellow"}
    return styles.get(generation, "bold red")


def sized(n_bytes: int) -> str:
    """Bytes in the unit that leaves three digits."""
    n, unit = float(n_bytes), 0
    while n >= 999.5 and unit < len(_UNITS) - 1:
        n, unit = n / 1000, unit + 1
    return f"{n_bytes} B" if not unit else f"{n:.{2 if n < 9.995 else 1 if n < 99.95 else 0}f} {_UNITS[unit]}"


def exact(n_bytes: int) -> str:
    """Bytes to the last one, grouped."""
    return f"{n_bytes:,} B"


def counted(n: int, what: str) -> str:
    """A number of things."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def span_of_means(lowest: float, highest: float) -> str:
    """A range; one number where both ends look the same."""
    low, high = f"{lowest:.2f}", f"{highest:.2f}"
    return low if low == high else f"{low} to {high}"


def overruled(plan: Plan) -> str | None:
    """What an option made of the verdict; None where the plan follows it."""
    if plan.shift == plan.verdict.shift:
        return None
    how = "--repair" if plan.options.assume is None else f"--assume {plan.options.assume.value}"
    return f"overruled by {how}: {f'{plan.shift:+d} to each gain' if plan.shift else 'the gains stay as they are'}"


def control_line(verdict: Verdict) -> str | None:
    """What the gated norms say; None where there are none."""
    means = [s.mean for s in verdict.stats if s.role is Role.CONTROL]
    if not means:
        return None
    right = all(CONTROL_LOW <= mean <= CONTROL_HIGH for mean in means)
    said = "gamma, as ever: nobody shifts these" if right else "not what gamma looks like"
    return f"control: {counted(len(means), 'gated norm')}, means {span_of_means(min(means), max(means))}: {said}"


def head_spans(name: str, verdict: Verdict) -> list[Span]:
    """One line on a draft head: its verdict and the means it rests on."""
    roles = [(s.role, s.mean) for s in verdict.stats]
    means = [f"{label} {mean:.2f}" for wanted, label in _HEAD_ROLES.items() for role, mean in roles if role is wanted]
    told = f"  means: {', '.join(means)}" if means else ""
    generation = verdict.generation
    return [(name, "dim"), "  ", (generation.value.upper(), style_of(generation)), (told, "")]
