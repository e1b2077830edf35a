"""Arguments in, one call, one report. Nothing is decided here."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from qwen35conv.errors import Qwen35ConvError
from qwen35conv.version import __version__

if TYPE_CHECKING:
    from qwen35conv.facts.config import ModuleQuantization
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


class MtpChoice(str, Enum):
    """What becomes of the draft head."""

    drop = "drop"
    keep = "keep"
    sidecar = "sidecar"


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


SourceArg = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint's folder, or one .safetensors file.")]
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
    as_json: JsonOpt = False,
    debug: DebugOpt = False,
) -> None:
    """Say what a checkpoint is, on which evidence, what would become of it, and which loaders would ruin it."""
    with _reporting("inspect", as_json, debug):
        from qwen35conv import report
        from qwen35conv.inspection import inspect_checkpoint
        from qwen35conv.source import open_source, read_checkpoint

        checkpoint = read_checkpoint(open_source(source), ignore_index=ignore_index)
        packing = _packing(quantize, group_size, mode)
        options = replace(_options(keep_vision, mtp, assume, repair), dequantize=dequantize, quantize=packing)
        inspection = inspect_checkpoint(checkpoint, options)
        if lora_targets and inspection.plan is not None:
            report.show_lora_targets(inspection.plan, as_json=as_json)
            return
        report.show_inspection(inspection, as_json=as_json, all_tensors=tensors, report=save)
        if inspection.problem is not None:
            raise typer.Exit(inspection.problem.exit_code)


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
    jobs: Annotated[Optional[int], typer.Option("--jobs", min=1, max=64, help="Shards at once.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST, once the new folder is whole.")] = False,
    checksum: Annotated[bool, typer.Option("--checksum", help="Put each shard's SHA-256 into the receipt.")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Skip the quick verification of the result.")] = False,
    ignore_index: IgnoreIndexOpt = False,
    as_json: JsonOpt = False,
    debug: DebugOpt = False,
) -> None:
    """Write the canonical form of a checkpoint to a new folder, whole or not at all."""
    with _reporting("convert", as_json, debug):
        from qwen35conv import report
        from qwen35conv.convert import carry_out, check_target, prepare
        from qwen35conv.planning.plan import make_plan
        from qwen35conv.source import open_source, read_checkpoint

        options = _options(keep_vision, mtp, assume, repair, norm_dtype, max_shard_size, tie_embeddings)
        options = replace(options, dequantize=dequantize, quantize=_packing(quantize, group_size, mode))
        opened = open_source(source)
        check_target(opened, destination, overwrite=overwrite)
        plan = make_plan(read_checkpoint(opened, ignore_index=ignore_index), options)
        preparation = prepare(opened, plan, destination, jobs=jobs)
        if dry_run:
            report.show_plan(preparation, as_json=as_json)
            return
        with report.progress("convert", preparation.n_shard_bytes) as on_bytes:
            outcome = carry_out(
                opened, preparation, overwrite=overwrite, checksum=checksum, check=not no_verify, on_bytes=on_bytes
            )
        report.show_conversion(outcome, as_json=as_json)


@app.command()
def verify(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="A checkpoint's folder, raw or converted.")],
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
    as_json: JsonOpt = False,
    debug: DebugOpt = False,
) -> None:
    """Prove that a checkpoint is right: names, values, bytes, and a forward pass on this machine."""
    given = [text for text in (prompt, prompt_file, tokens) if text is not None]
    if len(given) > 1:
        raise typer.BadParameter("--prompt, --prompt-file and --tokens exclude each other")
    if chat and prompt is None and prompt_file is None:
        raise typer.BadParameter("--chat needs --prompt or --prompt-file")
    if atol is not None and reference is None:
        raise typer.BadParameter("--atol needs --reference")
    with _reporting("verify", as_json, debug):
        from qwen35conv import report
        from qwen35conv import verify as room
        from qwen35conv.source import open_source, read_checkpoint

        opened = open_source(checkpoint)
        found = read_checkpoint(opened, ignore_index=ignore_index)
        plan = room.plan_to_verify(found)
        options = room.VerifyOptions(
            original=None if source is None else room.open_original(source, found, plan),
            prompt=prompt if prompt_file is None else room.read_prompt(prompt_file),
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


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more when it closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


class _Terminated(BaseException):
    """SIGTERM: unwinds like an interrupt, so that what is finished is kept."""


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise _Terminated


@contextmanager
def _reporting(command: str, as_json: bool, debug: bool) -> Iterator[None]:
    """Turn what goes wrong in a command into two lines and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        _stop("interrupted", INTERRUPTED, command, as_json)
    except _Terminated:
        _stop("terminated", TERMINATED, command, as_json)
    except Qwen35ConvError as error:
        _fail(error, command, as_json, debug)
    except (BrokenPipeError, typer.Exit, typer.BadParameter):
        raise
    except Exception as error:
        where = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        unexpected = Qwen35ConvError(f"unexpected: {where}", hint="--debug shows where; please report it")
        _fail(unexpected, command, as_json, debug)


def _fail(error: Qwen35ConvError, command: str, as_json: bool, debug: bool) -> None:
    from qwen35conv import report

    if debug:
        import traceback

        traceback.print_exc()
    report.show_error(error, command=command, as_json=as_json)
    raise typer.Exit(error.exit_code)


def _stop(what: str, code: int, command: str, as_json: bool) -> None:
    from qwen35conv import report

    error = Qwen35ConvError(what, hint="what is finished is kept; the same command resumes")
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
    from qwen35conv.generation.convention import Generation
    from qwen35conv.planning.plan import Mtp, NormDtype, Options

    if repair and assume is not None:
        raise typer.BadParameter("--repair and --assume exclude each other")
    return Options(
        keep_vision=keep_vision,
        mtp=Mtp(mtp.value),
        assume=None if assume is None else Generation(assume.value),
        repair=repair,
        norm_dtype=NormDtype(norm_dtype.value),
        max_shard_bytes=None if max_shard_size is None else _size("--max-shard-size", max_shard_size),
        tie=tie_embeddings,
    )


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


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def _token_ids(text: str) -> tuple[int, ...]:
    if re.fullmatch(r"\s*\d{1,9}(\s*,\s*\d{1,9})*\s*", text) is None:
        raise typer.BadParameter(f"--tokens: expected numbers with commas between them, found {text[:60]!r}")
    return tuple(int(number) for number in text.split(","))


def _size(option: str, text: str) -> int:
    """Bytes, from a number with or without a unit: 500MB, 5GB, 2GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", text.strip().upper())
    if match is None or (n := int(float(match[1]) * _UNITS[match[2] or ""])) < 1:
        raise typer.BadParameter(f"{option}: expected a size such as 5GB, found {text!r}")
    return n
