"""What is proved about a result before it appears: it is what was planned, and it verifies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35conv.errors import CheckpointError, DestinationError, SourceError
from qwen35conv.facts.checkpoint import Checkpoint, few
from qwen35conv.facts.header import TensorInfo
from qwen35conv.fixes import fixed, read_pieces
from qwen35conv.generation.convention import Generation
from qwen35conv.planning.plan import Options, Plan, PlanShard, make_plan
from qwen35conv.planning.receipt import is_computed_gain
from qwen35conv.reading import read_checkpoint, read_header
from qwen35conv.source import LocalSource, Source

if TYPE_CHECKING:
    from qwen35conv.verify import OnProgress, Verification, VerifyOptions


def prove(source: Source, shards: Sequence[PlanShard], folder: Path) -> tuple[int, int, int]:
    """Files, tensors and computed gains of a result that agree with the plan: its headers and gains are read again.

    Raises DestinationError where the result is not what was planned.
    """
    result = LocalSource(folder, str(folder))
    planned = {write.name: (shard.file, write) for shard in shards for write in shard.writes}
    found: dict[str, tuple[str, int, TensorInfo]] = {}
    for shard in shards:
        with _reading_back(folder):
            header = read_header(result, shard.file)
        found |= {tensor.name: (shard.file, header.data_begin, tensor) for tensor in header.tensors}
    wrong = sorted(found.keys() ^ planned.keys())
    n_gains = 0
    for name in found.keys() & planned.keys():
        (file, data_begin, tensor), (wanted_file, write) = found[name], planned[name]
        right = (file, tensor.dtype, tensor.shape) == (wanted_file, write.dtype, write.shape)
        if right and is_computed_gain(write):
            with _reading_back(folder):
                (stored,) = result.read(file, [(data_begin + tensor.begin, data_begin + tensor.end)])
            right = stored == fixed(write, read_pieces(source, write.pieces))
            n_gains += 1
        if not right:
            wrong.append(name)
    if wrong:
        raise DestinationError(f"{folder}: {len(wrong)} tensors are not what was planned: {few(wrong)}")
    return len(shards), len(found), n_gains


@contextmanager
def _reading_back(folder: Path) -> Iterator[None]:
    """What can't be read here has just been written: the destination is at fault, not the source."""
    try:
        yield
    except SourceError as error:
        hint = "its disk may be failing, or someone removed it; run the same command again"
        raise DestinationError(f"{folder}: what was written can't be read again: {error}", hint=hint) from error


def read_back(plan: Plan, folder: Path) -> tuple[LocalSource, Checkpoint]:
    """The result that a plan made, read as any other checkpoint.

    Raises DestinationError where the result's own plan, made from its config.json, is not empty.
    """
    result = LocalSource(folder, str(folder))
    options = Options(assume=Generation.CANONICAL, keep_vision=plan.options.keep_vision, mtp=plan.options.mtp)
    with _reading_back(folder):
        found = read_checkpoint(result)
    if not make_plan(found, options).is_identity:
        raise DestinationError(f"{folder}: converting the result again would change it")
    return result, found


def verify_result(
    result: Source,
    found: Checkpoint,
    options: VerifyOptions | None = None,
    on_progress: OnProgress | None = None,
    *,
    label: str,
    assumed: bool,
    hint: str,
) -> Verification:
    """A verification of a result, of the quick steps where nothing else is asked.

    `assumed`: the user vouched for the generation of the source. Raises CheckpointError where a step fails.
    """
    from qwen35conv.verify import QUICK, VerifyOptions, plan_to_verify, verify  # MLX: only where it is used

    again = plan_to_verify(found)
    verification = verify(result, again, found, options or VerifyOptions(steps=QUICK, brief=True), on_progress)
    # Whoever overrules the verdict on the source has overruled it on the result. And gains of a model of a few layers
    # may say less once they are shifted: every one of them has just been compared with the plan.
    vouched = assumed or again.verdict.generation is Generation.UNKNOWN
    for check in verification.checks:
        if check.passed is False and not (vouched and check.name == "values"):
            raise CheckpointError(
                f"{label}: the result fails its verification: {check.name}: {check.summary}",
                hint=hint,
            )
    return verification
