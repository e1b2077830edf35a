"""Arguments in, one call, one report. Nothing is decided here."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from qwen35conv.errors import Qwen35ConvError
from qwen35conv.version import __version__

if TYPE_CHECKING:
    from qwen35conv.batch.results import Result
    from qwen35conv.facts.config import ModuleQuantization
    from qwen35conv.generation.convention import Generation
    from qwen35conv.planning.plan import Options

app = typer.Typer(
    name="qwen35",
    help="Convert Qwen3.5-family checkpoints to the canonical MLX layout, bit for bit where nothing changes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

INTERRUPTED, TERMINATED = 130, 143
_RESUMING = {"convert", "push", "batch"}  # the other commands only read


class MtpChoice(str, Enum):
    """What becomes of the draft head."""

    drop = "drop"
    keep = "keep"
    sidecar = "sidecar"


class LinkChoice(str, Enum):
    """How the source's bytes come into the result."""

    auto = "auto"
    clone = "clone"
    copy = "copy"


class Assumption(str, Enum):
    """A generation that the user vouches for."""

    raw = "raw"
    canonical = "canonical"


class NormChoice(str, Enum):
    """How gains are stored."""

    source = "source"
    float32 = "float32"


class ModeChoice(str, Enum):
    """How MLX packs weights."""

    affine = "affine"
    mxfp4 = "mxfp4"
    nvfp4 = "nvfp4"
    mxfp8 = "mxfp8"


class Backend(str, Enum):
    """What runs the gated delta rule."""

    auto = "auto"
    metal = "metal"
    cuda = "cuda"
    ops = "ops"


class RunChoice(str, Enum):
    """What weights are read as."""

    source = "source"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


SourceArg = Annotated[
    str, typer.Argument(metavar="SRC", help="A checkpoint's folder, one .safetensors file, or a Hub id owner/name.")
]
RevisionOpt = Annotated[
    Optional[str], typer.Option("--revision", metavar="R", help="A Hub repository's branch, tag or commit.")
]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
DebugOpt = Annotated[bool, typer.Option("--debug", help="Show a traceback where something fails.")]
IgnoreIndexOpt = Annotated[
    bool, typer.Option("--ignore-index", help="Read every shard of the folder by its header, whatever the index says.")
]
KeepVisionOpt = Annotated[bool, typer.Option("--keep-vision", help="Keep the vision tower, as vision_tower.*.")]
MtpOpt = Annotated[
    MtpChoice, typer.Option("--mtp", help="The draft head: leave it out, keep it in DST, or write it to DST-mtp.")
]
AssumeOpt = Annotated[
    Optional[Assumption], typer.Option("--assume", help="Overrule the verdict on the generation. You vouch for it.")
]
RepairOpt = Annotated[
    bool, typer.Option("--repair", help="Repair gains that were shifted twice, never, or before the move.")
]
NormDtypeOpt = Annotated[
    NormChoice, typer.Option("--norm-dtype", help="Store gains as the source does, or exactly, in float32.")
]
MaxShardOpt = Annotated[
    Optional[str], typer.Option("--max-shard-size", metavar="SIZE", help="Fill shards up to a size, such as 5GB.")
]
TieOpt = Annotated[
    bool, typer.Option("--tie-embeddings", help="Use the embeddings as the head where an untied one is missing.")
]
DequantizeOpt = Annotated[bool, typer.Option("--dequantize", help="Turn FP8 weights, scaled in blocks, into bfloat16.")]
QuantizeOpt = Annotated[
    Optional[int], typer.Option("--quantize", metavar="BITS", min=2, max=8, help="Quantise on the way, as mlx-lm does.")
]
GroupSizeOpt = Annotated[
    Optional[int], typer.Option("--group-size", metavar="N", min=16, max=128, help="Weights that share a scale.")
]
ModeOpt = Annotated[
    Optional[ModeChoice], typer.Option("--mode", help="How --quantize packs; affine where it is not given.")
]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"qwen35 {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command()
def inspect(
    source: SourceArg,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor and what becomes of it.")] = False,
    save: Annotated[
        Optional[Path], typer.Option("--report", metavar="FILE", help="Save the screen as FILE.html or FILE.svg.")
    ] = None,
    lora_targets: Annotated[
        bool, typer.Option("--lora-targets", help="List the modules that a LoRA adapter may target.")
    ] = False,
    keep_vision: KeepVisionOpt = False,
    mtp: MtpOpt = MtpChoice.drop,
    assume: AssumeOpt = None,
    repair: RepairOpt = False,
    dequantize: DequantizeOpt = False,
    quantize: QuantizeOpt = None,
    group_size: GroupSizeOpt = None,
    mode: ModeOpt = None,
    ignore_index: IgnoreIndexOpt = False,
    revision: RevisionOpt = None,
    as_json: JsonOpt = False,
    debug: DebugOpt = False,
) -> None:
    """Say what a checkpoint is, on which evidence, what would become of it, and which loaders would ruin it."""
    if lora_targets and (tensors or save is not None):
        raise typer.BadParameter("--lora-targets is a list of its own: it goes with neither --tensors nor --report")
    with _reporting("inspect", as_json, debug):
        from qwen35conv import report
        from qwen35conv.inspection import inspect_checkpoint
        from qwen35conv.reading import read_checkpoint
        from qwen35conv.source import open_source

        packing = _packing(quantize, group_size, mode)
        options = replace(_options(keep_vision, mtp, assume, repair), dequantize=dequantize, quantize=packing)
        opened = open_source(source, revision=revision)
        with report.steps("inspect") as on_progress:
            checkpoint = read_checkpoint(opened, ignore_index=ignore_index, sampled=True, on_progress=on_progress)
        inspection = inspect_checkpoint(checkpoint, options)
        if lora_targets and inspection.plan is not None:
            report.show_lora_targets(inspection.plan, as_json=as_json)
            return
        report.show_inspection(inspection, as_json=as_json, all_tensors=tensors, report=save)
        if inspection.problem is not None:
            raise typer.Exit(inspection.problem.exit_code)


PrivateOpt = Annotated[bool, typer.Option("--private", help="Make the Hub repository private.")]


@app.command()
def convert(
    source: SourceArg,
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make. It must not exist.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and what would be written.")] = False,
    keep_vision: KeepVisionOpt = False,
    mtp: MtpOpt = MtpChoice.drop,
    assume: AssumeOpt = None,
    repair: RepairOpt = False,
    norm_dtype: NormDtypeOpt = NormChoice.source,
    max_shard_size: MaxShardOpt = None,
    tie_embeddings: TieOpt = False,
    dequantize: DequantizeOpt = False,
    quantize: QuantizeOpt = None,
    group_size: GroupSizeOpt = None,
    mode: ModeOpt = None,
    jobs: Annotated[
        Optional[int], typer.Option("--jobs", min=1, max=64, help="Shards, or connections to the Hub, at once.")
    ] = None,
    link: Annotated[
        LinkChoice, typer.Option("--link", help="Share blocks with the source: where that can be, or fail, or never.")
    ] = LinkChoice.auto,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST, once the new folder is whole.")] = False,
    checksum: Annotated[bool, typer.Option("--checksum", help="Put each shard's SHA-256 into the receipt.")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Skip the quick verification of the result.")] = False,
    ignore_index: IgnoreIndexOpt = False,
    revision: RevisionOpt = None,
    via_cache: Annotated[
        bool, typer.Option("--via-cache", help="Download a Hub repository's files into the local cache first.")
    ] = False,
    push_to_hub: Annotated[
        Optional[str], typer.Option("--push-to-hub", metavar="owner/new", help="Publish the result on the Hub.")
    ] = None,
    private: PrivateOpt = False,
    as_json: JsonOpt = False,
    debug: DebugOpt = False,
) -> None:
    """Write the canonical form of a checkpoint to a new folder, whole or not at all."""
    if private and push_to_hub is None:
        raise typer.BadParameter("--private needs --push-to-hub")
    if push_to_hub is not None:
        _check_hub_id("--push-to-hub", push_to_hub)
    with _reporting("convert", as_json, debug):
        from qwen35conv import report
        from qwen35conv.convert import carry_out, check_target, download_first, prepare
        from qwen35conv.planning.plan import make_plan
        from qwen35conv.reading import read_checkpoint
        from qwen35conv.source import LocalSource, open_source
        from qwen35conv.writing.sharing import Link

        options = _options(keep_vision, mtp, assume, repair, norm_dtype, max_shard_size, tie_embeddings)
        options = replace(options, dequantize=dequantize, quantize=_packing(quantize, group_size, mode))
        opened = open_source(source, revision=revision)
        if via_cache and isinstance(opened, LocalSource):
            raise typer.BadParameter("--via-cache needs a Hub id; this source is on this machine already")
        check_target(opened, destination, overwrite=overwrite)
        with report.steps("convert") as on_progress:
            plan = make_plan(read_checkpoint(opened, ignore_index=ignore_index, on_progress=on_progress), options)
        before = LinkChoice.auto if via_cache else link  # what is not here yet can't be asked
        preparation = prepare(opened, plan, destination, jobs=jobs, link=Link(before.value))
        if dry_run:
            from qwen35conv.push import draft_push

            draft = None if push_to_hub is None else draft_push(opened, preparation, push_to_hub, private=private)
            report.show_plan(preparation, draft, as_json=as_json)
            return
        if push_to_hub is not None:
            from qwen35conv.push import check_repository

            check_repository(push_to_hub, [shard.file for shard in plan.shards])
        if not isinstance(opened, LocalSource) and via_cache:
            download_first(opened, preparation, progress=report.shows_progress())
            preparation = prepare(opened, plan, destination, jobs=jobs, link=Link(link.value))
        with report.progress("convert", preparation.n_shard_bytes) as on_bytes:
            outcome = carry_out(
                opened, preparation, overwrite=overwrite, checksum=checksum, check=not no_verify, on_bytes=on_bytes
            )
        publication, published = None, None
        if push_to_hub is not None:
            from qwen35conv.push import prepare_push, push

            verified = outcome.verification is not None
            publication = prepare_push(destination, push_to_hub, private=private, verified=verified)
            published = push(publication, progress=report.shows_progress())
        report.show_conversion(outcome, publication, published, as_json=as_json)


@app.command("push")
def push_command(
    folder: Annotated[Path, typer.Argument(metavar="DST", help="The folder that convert made.")],
    repo: Annotated[str, typer.Argument(metavar="owner/new", help="The Hub repository; made where it does not exist.")],
    private: PrivateOpt = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the card and the files; send nothing.")] = False,
    as_json: JsonOpt = False,
    debug: DebugOpt = False,
) -> None:
    """Publish a converted folder on the Hub, with a model card made from its receipt, if it passes its verification."""
    _check_hub_id("owner/new", repo)
    with _reporting("push", as_json, debug):
        from qwen35conv import report
        from qwen35conv.push import prepare_push, push

        publication = prepare_push(folder, repo, private=private)
        published = None if dry_run else push(publication, progress=report.shows_progress())
        report.show_push(publication, published, as_json=as_json)


@app.command()
def verify(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="A checkpoint's folder or Hub id, raw or converted.")
    ],
    source: Annotated[
        Optional[str], typer.Option("--source", metavar="SRC", help="What it was made from: every byte is compared.")
    ] = None,
    prompt: Annotated[Optional[str], typer.Option("--prompt", metavar="TEXT", help="Run this text.")] = None,
    prompt_file: Annotated[
        Optional[Path], typer.Option("--prompt-file", metavar="FILE", help="Run the text of a file.")
    ] = None,
    tokens: Annotated[Optional[str], typer.Option("--tokens", metavar="1,2,3", help="Run these token ids.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the chat template.")] = False,
    max_new_tokens: Annotated[
        Optional[int], typer.Option("--max-new-tokens", min=0, max=4096, help="Tokens to continue by.")
    ] = None,
    backend: Annotated[Backend, typer.Option("--backend", help="What runs the gated delta rule.")] = Backend.auto,
    reference: Annotated[
        Optional[Path],
        typer.Option("--reference", metavar="FILE", help="A safetensors file with input_ids and logits to agree with."),
    ] = None,
    atol: Annotated[Optional[float], typer.Option("--atol", min=0, help="How far logits may lie apart.")] = None,
    dtype: Annotated[RunChoice, typer.Option("--dtype", help="What weights are read as.")] = RunChoice.source,
    deep: Annotated[bool, typer.Option("--deep", help="Every value, and the invariants of the forward pass.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time of a forward pass goes.")] = False,
    max_memory: Annotated[
        Optional[str],
        typer.Option("--max-memory", metavar="SIZE", help="Keep the model in memory up to this size, such as 8GB."),
    ] = None,
    ignore_index: IgnoreIndexOpt = False,
    revision: RevisionOpt = None,
    as_json: JsonOpt = False,
    debug: DebugOpt = False,
) -> None:
    """Prove that a checkpoint is right: names, values, bytes, and a forward pass on this machine."""
    given = [text for text in (prompt, prompt_file, tokens) if text is not None]
    if len(given) > 1:
        raise typer.BadParameter("--prompt, --prompt-file and --tokens exclude each other")
    if chat and prompt is None and prompt_file is None:
        raise typer.BadParameter("--chat needs --prompt or --prompt-file")
    if max_new_tokens is not None and not given:
        raise typer.BadParameter("--max-new-tokens needs --prompt, --prompt-file or --tokens")
    if atol is not None and reference is None:
        raise typer.BadParameter("--atol needs --reference")
    if atol is not None and not math.isfinite(atol):
        raise typer.BadParameter("--atol: expected a finite number")
    with _reporting("verify", as_json, debug):
        from qwen35conv import report
        from qwen35conv import verify as room
        from qwen35conv.reading import read_checkpoint
        from qwen35conv.source import open_source
        from qwen35conv.verify.tokens import read_prompt

        opened = open_source(checkpoint, revision=revision if source is None else None)
        found = read_checkpoint(opened, ignore_index=ignore_index)
        plan = room.plan_to_verify(found)
        options = room.VerifyOptions(
            original=None if source is None else room.open_original(source, opened, found, plan, revision=revision),
            prompt=prompt if prompt_file is None else read_prompt(prompt_file),
            tokens=None if tokens is None else _token_ids(tokens),
            chat=chat,
            max_new_tokens=max_new_tokens,
            backend=backend.value,
            reference=reference,
            atol=atol,
            dtype=room.RunDtype(dtype.value),
            deep=deep,
            profile=profile,
            max_memory=None if max_memory is None else _size("--max-memory", max_memory),
        )
        with report.steps("verify") as on_progress:
            verification = room.verify(opened, plan, found, options, on_progress)
        report.show_verification(checkpoint, verification, as_json=as_json)
        if verification.exit_code:
            raise typer.Exit(verification.exit_code)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint's folder, file or Hub id, raw or converted.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    assume_a: Annotated[
        Optional[Assumption], typer.Option("--assume-a", help="Overrule the verdict on A's generation.")
    ] = None,
    assume_b: Annotated[
        Optional[Assumption], typer.Option("--assume-b", help="Overrule the verdict on B's generation.")
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Take gains that were shifted twice or never as convert would repair them.")
    ] = False,
    ignore_index: IgnoreIndexOpt = False,
    revision_a: Annotated[
        Optional[str], typer.Option("--revision-a", metavar="R", help="A's branch, tag or commit on the Hub.")
    ] = None,
    revision_b: Annotated[
        Optional[str], typer.Option("--revision-b", metavar="R", help="B's branch, tag or commit on the Hub.")
    ] = None,
    as_json: JsonOpt = False,
    debug: DebugOpt = False,
) -> None:
    """Compare two checkpoints under their canonical names, each after its own plan. Exit 1 on a difference."""
    with _reporting("diff", as_json, debug):
        from qwen35conv import report
        from qwen35conv.comparison import compare, make_pair
        from qwen35conv.reading import read_checkpoint
        from qwen35conv.source import open_source

        first, second = open_source(a, revision=revision_a), open_source(b, revision=revision_b)
        pair = make_pair(
            (first, read_checkpoint(first, ignore_index=ignore_index)),
            (second, read_checkpoint(second, ignore_index=ignore_index)),
            assume=(_generation(assume_a), _generation(assume_b)),
            repair=repair,
        )
        with report.progress("diff", pair.n_bytes) as on_bytes:
            comparison = compare(pair, on_bytes)
        report.show_comparison(comparison, as_json=as_json)
        if comparison.exit_code:
            raise typer.Exit(comparison.exit_code)


@app.command()
def batch(
    jobs_file: Annotated[
        Path, typer.Argument(metavar="JOBS", help="A job file: .toml, .yaml or .jsonl.", show_default=True)
    ] = Path("jobs.toml"),
    init: Annotated[bool, typer.Option("--init", help="Write a commented example to JOBS.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Look at all, and show what would be written and what it takes.")
    ] = False,
    jobs: Annotated[Optional[int], typer.Option("--jobs", min=1, max=64, help="Jobs at once, on this machine.")] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first job that fails.")] = False,
    part: Annotated[
        Optional[str], typer.Option("--slice", metavar="I/N", help="Only part I of N, such as 3/10.")
    ] = None,
    junit: Annotated[
        Optional[Path], typer.Option("--junit", metavar="FILE", help="Write a test case for each job.")
    ] = None,
    summary: Annotated[
        Optional[Path], typer.Option("--summary", metavar="FILE.md", help="Write a page for people, in Markdown.")
    ] = None,
    scheduler: Annotated[
        Optional[str], typer.Option("--scheduler", metavar="URL", help="Run on a Dask cluster: tcp://host:8786.")
    ] = None,
    local_cluster: Annotated[
        Optional[int], typer.Option("--local-cluster", min=1, max=64, help="Run on a Dask cluster made here, of N.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line an event, in a terminal too.")] = False,
    debug: DebugOpt = False,
) -> None:
    """Convert and verify many checkpoints, a few at a time; what is finished is skipped, the rest resumes."""
    if scheduler is not None and local_cluster is not None:
        raise typer.BadParameter("--scheduler and --local-cluster exclude each other")
    if jobs is not None and (scheduler is not None or local_cluster is not None):
        raise typer.BadParameter("--jobs is for this machine alone: a cluster has its workers")
    with _reporting("batch", as_json, debug):
        from qwen35conv import report
        from qwen35conv.batch.jobs import read_jobs, take_slice, write_example
        from qwen35conv.batch.results import exit_code_of

        if init:
            write_example(jobs_file)
            typer.echo(f"{jobs_file}: an example to edit", err=True)
            return
        chosen = read_jobs(jobs_file)
        if part is not None:
            chosen = take_slice(chosen, _slice(part))
        n_at_once = jobs or min(4, os.cpu_count() or 1)
        if dry_run:
            from qwen35conv.batch.survey import survey_jobs

            survey = survey_jobs(chosen, n_at_once=n_at_once)
            report.show_survey(survey, as_json=as_json)
            raise typer.Exit(survey.exit_code)
        written = [file for file in (junit, summary) if file is not None]
        if len({os.path.realpath(file) for file in (jobs_file, *written)}) <= len(written):
            raise typer.BadParameter("--junit, --summary and JOBS are different files")
        for file in written:
            report.check_writable(file)
        from qwen35conv.batch.runner import Stop, run_jobs, stopping_on_signals

        stop = Stop()

        def exit_code(results: Sequence[Result]) -> int:
            if stop.signal is not None:
                return TERMINATED if stop.signal == signal.SIGTERM else INTERRUPTED
            return exit_code_of(results)

        with ExitStack() as stack:
            if scheduler is None and local_cluster is None:
                events = run_jobs(chosen, n_at_once=n_at_once, fail_fast=fail_fast, stop=stop)
            else:
                from qwen35conv.batch.cluster import connected, run_on_cluster

                client = stack.enter_context(connected(scheduler, local_cluster or 1))
                events = run_on_cluster(chosen, client, fail_fast=fail_fast, stop=stop)
            stack.enter_context(stopping_on_signals(stop))
            results = report.show_batch(events, [job.name for job in chosen], exit_code, as_json=as_json)
        if junit is not None:
            report.write_junit(results, junit)
        if summary is not None:
            report.write_summary(results, summary)
        raise typer.Exit(exit_code(results))


def main() -> None:
    """Run the command line."""
    _open_streams()
    signal.signal(signal.SIGTERM, _stop_at)
    signal.signal(signal.SIGINT, _stop_at)
    try:
        app()
    except _StoppedError as stopped:  # before a command began
        raise SystemExit(stopped.exit_code) from None
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more when it closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def _open_streams() -> None:
    """Open what was closed before we began: else the first file that is opened would get what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


class _StoppedError(BaseException):
    """SIGINT or SIGTERM: unwinds like an interrupt, so that what is finished is kept; typer lets it pass."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.what, self.exit_code = (
            ("terminated", TERMINATED) if number == signal.SIGTERM else ("interrupted", INTERRUPTED)
        )


def _stop_at(number: int, frame: FrameType | None) -> None:
    raise _StoppedError(number)


@contextmanager
def _reporting(command: str, as_json: bool, debug: bool) -> Iterator[None]:
    """Turn what goes wrong in a command into two lines and an exit code."""
    try:
        _import_report()
        yield
    except KeyboardInterrupt:
        _stop("interrupted", INTERRUPTED, command, as_json)
    except _StoppedError as stopped:
        _stop(stopped.what, stopped.exit_code, command, as_json)
    except Qwen35ConvError as error:
        _fail(error, command, as_json, debug)
    except (BrokenPipeError, typer.Exit, typer.BadParameter):
        raise
    except Exception as error:
        where = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        unexpected = Qwen35ConvError(f"unexpected: {where}", hint="--debug shows where; please report it")
        _fail(unexpected, command, as_json, debug)


def _import_report() -> None:
    """Import what says how a command ended, undisturbed: NumPy, once interrupted, can't be imported again."""
    late = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, late)
    try:
        from qwen35conv import report  # noqa: F401
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fail(error: Qwen35ConvError, command: str, as_json: bool, debug: bool) -> None:
    from qwen35conv import report

    if debug:
        import traceback

        traceback.print_exc()
    report.show_error(error, command=command, as_json=as_json)
    raise typer.Exit(error.exit_code)


def _stop(what: str, code: int, command: str, as_json: bool) -> None:
    from qwen35conv import report

    kept = "what is finished is kept; the same command resumes"
    error = Qwen35ConvError(what, hint=kept if command in _RESUMING else "nothing was changed; run it again")
    error.exit_code = code
    report.show_error(error, command=command, as_json=as_json)
    raise typer.Exit(code)


def _options(
    keep_vision: bool,
    mtp: MtpChoice,
    assume: Assumption | None,
    repair: bool,
    norm_dtype: NormChoice = NormChoice.source,
    max_shard_size: str | None = None,
    tie_embeddings: bool = False,
) -> Options:
    from qwen35conv.planning.plan import Mtp, NormDtype, Options

    if repair and assume is not None:
        raise typer.BadParameter("--repair and --assume exclude each other")
    return Options(
        keep_vision=keep_vision,
        mtp=Mtp(mtp.value),
        assume=_generation(assume),
        repair=repair,
        norm_dtype=NormDtype(norm_dtype.value),
        max_shard_bytes=None if max_shard_size is None else _size("--max-shard-size", max_shard_size),
        tie=tie_embeddings,
    )


def _check_hub_id(option: str, text: str) -> None:
    from qwen35conv.quantities import parse_hub_id

    try:
        parse_hub_id(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from error


def _generation(assume: Assumption | None) -> Generation | None:
    from qwen35conv.generation.convention import Generation

    return None if assume is None else Generation(assume.value)


def _packing(bits: int | None, group_size: int | None, mode: ModeChoice | None) -> ModuleQuantization | None:
    """How to quantise; None where that is not asked for."""
    from qwen35conv.planning.packing import packing_of

    if bits is None:
        if group_size is not None or mode is not None:
            raise typer.BadParameter("--group-size and --mode need --quantize BITS")
        return None
    found = packing_of(bits, group_size, "affine" if mode is None else mode.value)
    if isinstance(found, str):
        raise typer.BadParameter(f"--quantize: {found}")
    return found


def _token_ids(text: str) -> tuple[int, ...]:
    from qwen35conv.quantities import parse_token_ids

    try:
        return parse_token_ids(text)
    except ValueError as error:
        raise typer.BadParameter(f"--tokens: {error}") from error


def _slice(text: str) -> tuple[int, int]:
    from qwen35conv.quantities import parse_slice

    try:
        return parse_slice(text)
    except ValueError as error:
        raise typer.BadParameter(f"--slice: {error}") from error


def _size(option: str, text: str) -> int:
    from qwen35conv.quantities import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from error
