"""The jobs of a file: defaults applied, globs expanded, destinations filled in, and no two in each other's way."""

from __future__ import annotations

import glob
import os
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qwen35conv.batch.job_file import Entry, JobFile, JobFileError, parse_job_file
from qwen35conv.batch.settings import DESTINATION, PUSH, SOURCE, Settings, make_settings
from qwen35conv.errors import DestinationError
from qwen35conv.facts.checkpoint import CONFIG, SUFFIX
from qwen35conv.planning.plan import Mtp
from qwen35conv.quantities import parse_hub_id

_FIELDS = ("name", "parent")
_MAX_BYTES = 20_000_000  # of a job file


@dataclass(frozen=True, slots=True)
class Job:
    """One checkpoint to convert and verify. `name` is its destination as the file has it, unique among the jobs."""

    name: str
    source: str
    destination: Path
    settings: Settings


def read_jobs(path: Path) -> tuple[Job, ...]:
    """All jobs of a file, in its order; relative paths are meant from the file's folder.

    Raises JobFileError, with the line, for what can't be done.
    """
    try:
        with path.open("rb") as opened:
            raw = opened.read(_MAX_BYTES + 1)
        text = raw.decode()
    except OSError as error:
        hint = "check the path; `qwen35 batch --init` writes an example"
        raise JobFileError(f"{path}: can't be read: {error.strerror or error}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise JobFileError(f"{path}: is no UTF-8 text", hint="give a .toml, .yaml or .jsonl file") from error
    if len(raw) > _MAX_BYTES:
        raise JobFileError(
            f"{path}: more than {_MAX_BYTES} bytes: no job file", hint="give a .toml, .yaml or .jsonl file"
        )
    file = parse_job_file(str(path), text)
    pairs = [(entry, job) for entry in file.jobs for job in _expanded(file, entry, path.parent)]
    _check_apart(file, pairs)
    return tuple(job for _, job in pairs)


def take_slice(jobs: Sequence[Job], part: tuple[int, int]) -> tuple[Job, ...]:
    """Part i of n, the same whatever the file's order: every job is in exactly one part, and parts are equally long."""
    i, n = part
    mine = {job.name for job in sorted(jobs, key=lambda job: job.name)[i - 1 :: n]}
    return tuple(job for job in jobs if job.name in mine)


def write_example(path: Path) -> None:
    """Write a commented job file. Raises JobFileError for a name that is no .toml, DestinationError where it exists."""
    if path.suffix != ".toml":
        raise JobFileError(f"{path}: the example is TOML", hint="name it jobs.toml")
    try:
        with path.open("x", encoding="utf-8") as opened:
            opened.write(EXAMPLE)
    except FileExistsError as error:
        raise DestinationError(f"{path}: exists", hint="choose another name") from error
    except OSError as error:
        raise DestinationError(f"{path}: can't be written: {error.strerror or error}") from error


def _expanded(file: JobFile, entry: Entry, folder: Path) -> Iterator[Job]:
    values, settings = make_settings(file, entry, folder)
    for key in (SOURCE, DESTINATION):
        if key not in values:
            raise file.fail(entry.line_of(None), f"a job without {key}", f"say {key} here, or for all jobs at the top")
    line = _line_of(file, entry, SOURCE)
    template, line_of_template = values[DESTINATION], _line_of(file, entry, DESTINATION)
    sources = _sources(folder / _expanded_home(file, line, SOURCE, values[SOURCE]), values[SOURCE])
    if not sources:
        raise file.fail(
            line, f"source: nothing matches {values[SOURCE]!r}", "a checkpoint is a folder with config.json"
        )
    found = []
    for source in sources:
        name = _filled(file, line_of_template, template, source)
        repo = settings.push_to_hub
        if repo is not None:
            repo = _filled(file, _line_of(file, entry, PUSH), repo, source, PUSH)
            try:
                repo = parse_hub_id(repo)
            except ValueError as error:
                raise file.fail(_line_of(file, entry, PUSH), f"{PUSH}: {error}") from error
        own = replace(settings, push_to_hub=repo)
        place = folder / _expanded_home(file, line_of_template, DESTINATION, name)
        if not place.name:
            raise file.fail(line_of_template, f"{DESTINATION}: {name!r} names no folder", "name the folder to make")
        found.append(Job(name, source, place, own))
    # The glob of a second run meets what the first one made.
    made = {place for job in found for place in _places(job)}
    yield from (job for job in found if len(found) == 1 or Path(job.source) not in made)


def _line_of(file: JobFile, entry: Entry, key: str) -> int:
    return (entry if key in entry.values else file.defaults).line_of(key)


def _expanded_home(file: JobFile, line: int, key: str, path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise file.fail(line, f"{key}: no valid path: {error}", "write it without ~") from error


def _sources(here: Path, source: str) -> list[str]:
    """The checkpoints that a source, which would lie `here`, names: itself, or all that its glob matches, sorted."""
    is_there = _exists(here)
    if is_there or not set(source) & set("*?["):
        return [str(here) if is_there else source]  # else a Hub id, or an error of that job's own
    matches = [Path(match) for match in sorted(glob.glob(str(here), recursive=True))]  # noqa: PTH207 - a pattern may be absolute
    folders = {match for match in matches if (match / CONFIG).is_file()}
    return [str(match) for match in matches if match in folders or _is_alone(match, folders)]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # longer than any name
        return False


def _is_alone(match: Path, folders: Collection[Path]) -> bool:
    """Whether a match is a shard that is no part of a checkpoint that matches too."""
    return match.suffix == SUFFIX and match.parent not in folders


def _filled(file: JobFile, line: int, template: str, source: str, key: str = DESTINATION) -> str:
    """A destination, or a repository, for a source. Raises JobFileError for a template with another field."""
    parts = [part for part in source.rstrip("/").split("/") if part not in ("", ".")] or ["checkpoint"]
    known = {"name": parts[-1].removesuffix(SUFFIX), "parent": parts[-2] if len(parts) > 1 else ""}
    try:
        fields = {
            f"{field}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}"
            for _, field, spec, conversion in string.Formatter().parse(template)
            if field is not None
        }
        if fields <= known.keys():
            return template.format(**known)
        wrong = ", ".join(f"{{{field}}}" for field in sorted(fields - known.keys()))
    except ValueError as error:
        raise file.fail(line, f"{key}: {error}", "a brace that is meant is written twice: {{") from error
    raise file.fail(line, f"{key}: unknown {wrong}", f"known are {', '.join(f'{{{one}}}' for one in _FIELDS)}")


def _places(job: Job) -> Iterator[Path]:
    """The folders that a job makes."""
    yield job.destination
    yield job.destination.with_name(f"{job.destination.name}.partial")
    if job.settings.options.mtp is Mtp.SIDECAR:
        yield job.destination.with_name(f"{job.destination.name}-mtp")


def _check_apart(file: JobFile, pairs: Iterable[tuple[Entry, Job]]) -> None:
    """Raises JobFileError where two jobs write one folder, or one writes where another reads or writes."""
    made: dict[Path, tuple[Entry, Job]] = {}
    read: dict[Path, tuple[Entry, Job]] = {}
    pairs = list(pairs)
    for entry, job in pairs:
        if _exists(Path(job.source)):
            read[_real(job.source)] = entry, job
        for place in _places(job):
            other = made.setdefault(_real(place), (entry, job))
            if other[1] is not job:
                before = f"{other[1].source} (line {_line_of(file, other[0], SOURCE)})"
                message = f"{job.source}: {place.name} is the destination of {before} too"
                raise file.fail(_line_of(file, entry, DESTINATION), message, "{name} gives each source its own")
    for entry, job in pairs:
        source = _real(job.source)
        for maker, _ in _others(made, job, (source, *source.parents)):
            message = f"{job.source}: another job makes this source (line {_line_of(file, maker, DESTINATION)})"
            raise file.fail(_line_of(file, entry, SOURCE), message, "jobs run in no order; put it into a second file")
        place = _real(job.destination)
        for taken, what in ((made, "destination"), (read, "source")):
            for _, other_job in _others(taken, job, place.parents):
                message = f"{job.name}: lies inside the {what} of another job, {other_job.name}"
                raise file.fail(_line_of(file, entry, DESTINATION), message, "name a folder beside it")


def _others(taken: Mapping[Path, tuple[Entry, Job]], job: Job, places: Iterable[Path]) -> Iterator[tuple[Entry, Job]]:
    return (taken[place] for place in places if place in taken and taken[place][1] is not job)


def _real(path: Path | str) -> Path:
    """Where a path leads, links resolved as far as there are any."""
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError):  # no path at all: an error of that job's own
        return Path(path)


EXAMPLE = """\
# Jobs for `qwen35 batch`. Relative paths are meant from this file's folder.

# What stands at the top holds for every job; a job may say otherwise.
# Keys are the long names of the options of `qwen35 convert` and `qwen35 verify`.
destination = "converted/{name}-mlx"    # {name}: the source's last part; {parent}: the one before it
checksum = true                         # each shard's SHA-256 in the receipt
# mtp = "drop"                          # or "keep", "sidecar"
# keep-vision = false
# norm-dtype = "source"                 # or "float32"
# max-shard-size = "5GB"
# overwrite = false

# What the result must pass before it appears, beyond the quick steps:
# prompt = "The capital of France is"
# deep = true                           # every value, every byte against the source, and the invariants

[[job]]
source = "models/Qwen3.5-0.8B"          # a folder or one .safetensors file

[[job]]
source = "models/finetunes/*"           # every checkpoint that matches, a job each

# [[job]]
# source = "models/odd-export"
# destination = "converted/odd-mlx"
# repair = true                         # or assume = "raw" or "canonical"
"""
