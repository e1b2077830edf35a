"""A result published on the Hub: checked once more, with a card made from its receipt."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from qwen35conv.convert import Preparation, file_bytes
from qwen35conv.errors import CheckpointError, SourceError
from qwen35conv.facts.checkpoint import CONFIG, INDEX, SUFFIX, few, parse_index
from qwen35conv.facts.header import Dtype
from qwen35conv.fixes import fixed
from qwen35conv.hub.card import Front, build_card, parse_front
from qwen35conv.hub.upload import CARD, Published, check_repository, upload
from qwen35conv.planning.pieces import Fix, Rule, Write
from qwen35conv.planning.receipt import SCHEMA, build_receipt, computed_gains, parse_receipt
from qwen35conv.planning.sidecar import RECEIPT, SOURCE_GAINS
from qwen35conv.proof import verify_result
from qwen35conv.reading import read_checkpoint, read_header
from qwen35conv.source import LocalSource, Source
from qwen35conv.version import __version__

__all__ = ["Publication", "Published", "check_repository", "draft_push", "prepare_push", "push"]

_MAX_CARD = 10_000_000  # bytes
_GAIN_FIXES = {Fix.ADD_ONE.value, Fix.SUBTRACT_ONE.value, Fix.CAST.value}


@dataclass(frozen=True, slots=True)
class Publication:
    """What goes to a repository: the files of a folder with their bytes, and the card in place of its README."""

    repo: str
    private: bool
    folder: Path
    files: Mapping[str, int | None]  # None: not written yet, and not known before
    card: str


def prepare_push(folder: Path, repo: str, *, private: bool = False, verified: bool = False) -> Publication:
    """What will be sent. Nothing is, and the Hub is not asked.

    Raises SourceError for a folder that is no whole result of a conversion, CheckpointError for one that fails its
    verification (`verified` says that it has just passed).
    """
    receipt = _read_receipt(folder)
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }
    source = LocalSource(folder, str(folder))
    with _reading_receipt(folder):
        _check_shards(source, receipt)
        _check_others(source, receipt, files)
        assumed = receipt["options"]["assume"] is not None
        if not verified:
            _check_gains(source, receipt)
    if not verified:
        hint = "nothing was sent; convert again"
        verify_result(source, read_checkpoint(source), label=str(folder), assumed=assumed, hint=hint)
    readme = folder / CARD
    front = Front()
    if readme.is_file() and readme.stat().st_size <= _MAX_CARD:
        front = parse_front(readme.read_text(encoding="utf-8", errors="replace"))
    files.pop(CARD, None)
    with _reading_receipt(folder):
        return Publication(repo, private, folder, files, build_card(receipt, front, repo))


def draft_push(source: Source, preparation: Preparation, repo: str, *, private: bool = False) -> Publication:
    """What would be sent of a result that is only planned."""
    plan = preparation.plan
    files: dict[str, int | None] = {file: source.listing[file] for file in preparation.files.copied if file != CARD}
    files |= {shard.file: file_bytes(shard) for shard in plan.shards}
    files |= dict.fromkeys([CONFIG, INDEX, RECEIPT, *([SOURCE_GAINS] if computed_gains(plan) else [])])
    front = Front()
    if CARD in preparation.files.copied and source.listing[CARD] <= _MAX_CARD:
        (raw,) = source.read(CARD, [(0, source.listing[CARD])])
        front = parse_front(raw.decode("utf-8", "replace"))
    receipt = json.loads(json.dumps(build_receipt(plan, [], preparation.edits, preparation.files)))
    card = build_card(receipt, front, repo)
    return Publication(repo, private, preparation.destination, dict(sorted(files.items())), card)


def push(publication: Publication, *, progress: bool = False) -> Published:
    """The commit that now holds a result. `progress` lets the upload draw its bars.

    Raises DestinationError where the repository can't be written, or holds another model; the same call resumes.
    """
    check_repository(publication.repo, publication.files)
    flag = ["--private"] if publication.private else []
    again = shlex.join(["qwen35", "push", *flag, str(publication.folder), publication.repo])
    return upload(
        publication.repo,
        {file: publication.folder / file for file in publication.files},
        publication.card,
        private=publication.private,
        message=f"Converted by qwen35conv {__version__}",
        resume=f"`{again}` goes on; what has arrived is not sent again",
        progress=progress,
    )


def _check_shards(source: LocalSource, receipt: Mapping[str, Any]) -> None:
    """Raises SourceError where the shards are not the files that the receipt speaks of."""
    if INDEX not in source.listing:
        raise SourceError(f"{source.label}: no {INDEX} in it", hint="convert again")
    index = parse_index(source.read(INDEX, [(0, source.listing[INDEX])])[0])
    wrong = []
    for file in sorted(set(index.values())):  # a draft head's own folder has its own
        shard = receipt["shards"].get(file, {})
        if source.listing.get(file) != shard.get("n_bytes") or shard.get("sha256") not in (None, _sha256(source, file)):
            wrong.append(file)
    if wrong:
        raise SourceError(
            f"{source.label}: {len(wrong)} shards are not those of {RECEIPT}: {few(wrong)}",
            hint="convert again; a result that was changed is not published",
        )


def _check_others(source: LocalSource, receipt: Mapping[str, Any], files: Collection[str]) -> None:
    """Raises CheckpointError where config.json or the index is not the receipt's, or other files stand beside them."""
    index = parse_index(source.read(INDEX, [(0, source.listing[INDEX])])[0])
    shards = set(index.values())
    planned = {name: entry["file"] for name, entry in receipt["tensors"].items() if entry["file"] in shards}
    changed = [INDEX] if index != planned else []
    if CONFIG not in files or _sha256(source, CONFIG) != receipt["config_sha256"]:
        changed.append(CONFIG)
    if changed:
        raise CheckpointError(
            f"{source.label}: {few(changed)}: changed since the conversion",
            hint="convert again; a result that was changed is not published",
        )
    known = {*shards, *receipt["files_copied"], CONFIG, INDEX, RECEIPT, SOURCE_GAINS, CARD}
    if others := sorted(file for file in files if file not in known):
        raise CheckpointError(
            f"{source.label}: {len(others)} files are not of the conversion: {few(others)}",
            hint="move them elsewhere; only what was converted is published",
        )


def _sha256(source: LocalSource, file: str) -> str:
    digest = hashlib.sha256()
    for part in source.stream(file, 0, source.listing[file]):
        digest.update(part)
    return digest.hexdigest()


def _check_gains(source: LocalSource, receipt: Mapping[str, Any]) -> None:
    """Raises CheckpointError where a computed gain is not what the source's own, kept beside the shards, gives."""
    fixes = {fix.value: fix for fix in Fix}
    computed = {name: entry for name, entry in receipt["tensors"].items() if entry.get("fix", "none") in _GAIN_FIXES}
    if not computed:
        return
    kept = read_header(source, SOURCE_GAINS) if SOURCE_GAINS in source.listing else None
    headers = {file: read_header(source, file) for file in source.listing if file.endswith(SUFFIX) and "/" not in file}
    stored = {
        tensor.name: (file, header.data_begin + tensor.begin, header.data_begin + tensor.end)
        for file, header in headers.items()
        for tensor in header.tensors
    }
    wrong = []
    originals = kept.tensors if kept is not None else ()
    for (name, entry), original in zip_longest(computed.items(), originals):
        if name is None or original is None or kept is None:
            raise CheckpointError(
                f"{source.label}: {SOURCE_GAINS} does not hold the gains that were computed", hint="convert again"
            )
        if entry["file"] not in headers:
            continue  # in the draft head's own folder
        write = Write(
            name, Dtype(entry["dtype"]), tuple(entry["shape"]), (), fixes[entry["fix"]], Rule.GAIN,
            original.dtype, original.shape, (original.name,),
        )  # fmt: skip
        (raw,) = source.read(SOURCE_GAINS, [(kept.data_begin + original.begin, kept.data_begin + original.end)])
        if name in stored:
            file, begin, end = stored[name]
            if source.read(file, [(begin, end)])[0] != fixed(write, raw):
                wrong.append(name)
    if wrong:
        raise CheckpointError(
            f"{source.label}: fails its verification: {len(wrong)} gains are not what was computed: {few(wrong)}",
            hint="convert again; a result that was changed is not published",
        )


def _read_receipt(folder: Path) -> dict[str, Any]:
    path = folder / RECEIPT
    if not path.is_file():
        why = f"no {RECEIPT} in it: not the result of a conversion" if folder.is_dir() else "no such folder"
        raise SourceError(
            f"{folder}: {why}",
            hint="give the folder that `qwen35 convert` made",
        )
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: can't be read: {error.strerror or error}", hint="check its permissions") from error
    found = parse_receipt(str(path), raw)
    if found.get("schema") != SCHEMA or not isinstance(found.get("shards"), dict):
        raise _no_receipt(path)
    return dict(found)


@contextmanager
def _reading_receipt(folder: Path) -> Iterator[None]:
    """Turns what a receipt does not hold, or holds otherwise, into one error."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _no_receipt(folder / RECEIPT) from error


def _no_receipt(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: not a receipt of this version", hint="convert again with this version")
