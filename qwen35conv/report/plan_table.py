"""A plan as tables: what happens to how many tensors and bytes, and what else is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from qwen35conv.inspection import is_named, skip_tallies, write_tallies
from qwen35conv.planning.pieces import Fix
from qwen35conv.report.page import Page, Span
from qwen35conv.report.words import counted, sized

if TYPE_CHECKING:
    from qwen35conv.facts.checkpoint import Checkpoint
    from qwen35conv.planning.plan import Plan, PlanShard
    from qwen35conv.planning.sidecar import ConfigEdit, SideFiles

_VALUE_COLUMNS = 40


def show_tallies(page: Page, plan: Plan) -> None:
    """The fates of all tensors, and what the result has of them."""
    written, left = write_tallies(plan), skip_tallies(plan.skips)
    rows: list[list[Span]] = [[row.what, f"{row.n_tensors:,}", sized(row.n_bytes)] for row in written]
    rows += [[(f"left out: {row.what}", "dim"), f"{row.n_tensors:,}", sized(row.n_bytes)] for row in left]
    n, n_bytes = sum(row.n_tensors for row in written), sum(row.n_bytes for row in written)
    rows.append([("written in all", "bold"), (f"{n:,}", "bold"), (sized(n_bytes), "bold")])
    page.table(rows, align="lrr", head=["", "tensors", "bytes"])


def show_files(page: Page, plan: Plan, edits: Sequence[ConfigEdit], files: SideFiles, *, brief: bool) -> None:
    """What is written besides tensors: shards, edits of config.json, copied files; only counts where `brief`."""
    if brief:
        shards = counted(len(plan.shards) + len(plan.sidecar), "shard")
        copied = f"{counted(len(files.copied), 'side file')} copied"
        left = f", {len(files.left)} left" if files.left else ""
        page.line(f"into {shards}; config.json: {counted(len(edits), 'edit')}; {copied}{left}", hang=2)
        return
    page.heading("Files")
    page.table(_shard_rows(plan.shards) + _shard_rows(plan.sidecar), align="lrr", head=["", "tensors", "bytes"])
    if edits:
        page.heading("Edits of config.json")
        page.table([[edit.key, *_change(edit)] for edit in edits], align="ll")
    page.heading("Side files")
    if files.copied:
        page.line(("copied  ", "dim"), ", ".join(files.copied), hang=8)
    for file, reason in files.left.items():
        page.line(("left    ", "dim"), f"{file}: {reason}", hang=8)
    if not files.copied and not files.left:
        page.line("none")


def _shard_rows(shards: Sequence[PlanShard]) -> list[list[Span]]:
    return [[shard.file, f"{len(shard.writes):,}", sized(shard.n_bytes)] for shard in shards]


def _change(edit: ConfigEdit) -> list[Span]:
    if edit.moved_from is not None:
        return [f"moved from {edit.moved_from}"]
    if edit.after is None:
        return [(f"gone (was {_clipped(edit.before or '')})", "dim")]
    if edit.before is None:
        return [f"new: {_clipped(edit.after)}"]
    return [f"{_clipped(edit.before)} → {_clipped(edit.after)}"]


def _clipped(value: str) -> str:
    return value if len(value) <= _VALUE_COLUMNS else f"{value[: _VALUE_COLUMNS - 1]}…"


def tensor_lines(plan: Plan) -> list[str]:
    """A line for each write and each skip."""
    return [*_write_lines(plan), *(f"{skip.name}  left out: {skip.reason}" for skip in plan.skips)]


def stored_lines(checkpoint: Checkpoint) -> list[str]:
    """A line for each stored tensor of a checkpoint that no plan covers."""
    return [
        f"{tensor.name}  {tensor.dtype.value} {_shape(tensor.shape)}  {tensor.file}"
        f"{'' if is_named(tensor) else '  no rule knows this name'}"
        for tensor in checkpoint.tensors
    ]


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(str(n) for n in shape)}]"


def _write_lines(plan: Plan) -> Iterator[str]:
    for shard in (*plan.shards, *plan.sidecar):
        for write in shard.writes:
            more = f" and {len(write.sources) - 1} more" if len(write.sources) > 1 else ""
            fix = "" if write.fix is Fix.NONE else f", {write.fix.value}"
            name = "" if write.sources == (write.name,) else f" → {write.name}"
            yield f"{write.sources[0]}{more}{name}  {write.dtype.value} {_shape(write.shape)}  {write.rule.value}{fix}"
