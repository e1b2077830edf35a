"""Whether a job's destination is what it would make: receipt, source revision and options agree.

The receipt says what was done, to the byte; it knows no times and no places, so the same input gives the same receipt.
Which very files of this machine were read and made, and what the result has passed, stands beside it in a hidden stamp.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

from qwen35conv.batch.settings import Settings, Verifying
from qwen35conv.convert import Preparation, file_bytes
from qwen35conv.facts.checkpoint import CONFIG, INDEX
from qwen35conv.fixes import read_pieces
from qwen35conv.planning.receipt import ShardRecord, build_receipt, build_source_gains, computed_gains
from qwen35conv.planning.sidecar import RECEIPT, SOURCE_GAINS, build_index, build_json
from qwen35conv.reading import read_checkpoint
from qwen35conv.source import LocalSource, Source

STAMP = ".batch.json"  # hidden, as no file that is copied from a source is
_SCHEMA = "qwen35/batch-stamp/1"
_QUICK = "quick"


class Standing(Enum):
    """What a destination is to its job."""

    NEW = "new"  # nothing is there, or something else
    UNPROVED = (
        "unproved"  # its receipt is the job's, but who made these files is not noted: a plain conversion, or hands
    )
    UNVERIFIED = "unverified"  # it is what the job makes, but has not passed what the job asks
    FINISHED = "finished"


def standing_of(source: Source, preparation: Preparation, settings: Settings) -> Standing:
    """What the destination of a job is to it. Reads the documents that stand there, and no weights."""
    receipt = _read(preparation.destination / RECEIPT)
    if receipt is None or not _is_receipt_of(receipt, preparation, settings) or not _is_whole(preparation):
        return Standing.NEW
    stamp = _read(preparation.destination / STAMP)
    if stamp is not None and stamp.get("source") != source_digest(source, preparation):
        return Standing.NEW
    if stamp is None or stamp.get("result") != result_digest(preparation):
        if preparation.sidecar is None:
            return Standing.UNPROVED
        if stamp is None or "result" in stamp:  # without it: made to the end, and cut off before that was noted
            return Standing.NEW
    wanted, passed = verifying_digest(settings), stamp.get("verified")
    if wanted is None or passed == wanted or (wanted == _QUICK and passed is not None):
        return Standing.FINISHED
    return Standing.UNVERIFIED


def is_proved(source: Source, preparation: Preparation) -> bool:
    """Whether a destination holds, byte for byte, what the job would write into it. Reads both whole.

    Raises SourceError where the source can't be read.
    """
    from qwen35conv.verify import plan_to_verify
    from qwen35conv.verify.bytes import check_bytes, plan_of_all
    from qwen35conv.view import open_view  # MLX: only where it is used

    result = LocalSource(preparation.destination, str(preparation.destination))
    for file in preparation.files.copied:
        ranges = [(0, source.listing[file])]
        if result.listing.get(file) != source.listing[file] or source.read(file, ranges) != result.read(file, ranges):
            return False
    gains = {write.sources[0]: (write, read_pieces(source, write.pieces)) for write in computed_gains(preparation.plan)}
    if gains and _content(preparation.destination / SOURCE_GAINS) != build_source_gains(gains):
        return False
    checkpoint = read_checkpoint(result)
    if checkpoint.strays or checkpoint.sidecars:  # some loaders would read them too
        return False
    whole = plan_of_all(checkpoint, plan_to_verify(checkpoint))
    return check_bytes(open_view(source, preparation.plan), open_view(result, whole)).passed is True


def build_stamp(source: Source, preparation: Preparation, settings: Settings) -> bytes:
    """The stamp of a result that is to pass what a job asks, before it is there."""
    return build_json(_stamp(source, preparation, settings))


def build_last_stamp(source: Source, preparation: Preparation, settings: Settings, pushed: str | None = None) -> bytes:
    """The stamp of a destination that has passed what a job asks, and of the repository that holds it."""
    published = {} if pushed is None else {"pushed": pushed}
    return build_json(_stamp(source, preparation, settings) | {"result": result_digest(preparation)} | published)


def _stamp(source: Source, preparation: Preparation, settings: Settings) -> dict[str, Any]:
    digest = source_digest(source, preparation)
    return {"schema": _SCHEMA, "source": digest, "verified": verifying_digest(settings)}


def is_noted(destination: Path) -> bool:
    """Whether the stamp of a destination says which files stand there."""
    stamp = _read(destination / STAMP)
    return stamp is not None and "result" in stamp


def is_pushed(destination: Path, repo: str) -> bool:
    """Whether what stands at a destination was sent to a repository."""
    stamp = _read(destination / STAMP)
    return stamp is not None and stamp.get("pushed") == repo


def renew_stamp(stamp: bytes, destination: Path) -> None:
    """Replace the stamp of a destination, whole or not at all. Raises OSError where it can't be written."""
    beside = destination / f"{STAMP}.{os.getpid()}"
    try:
        beside.write_bytes(stamp)
        beside.rename(destination / STAMP)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


def source_digest(source: Source, preparation: Preparation) -> str:
    """A digest of which files were read, in which state."""
    checkpoint = preparation.plan.checkpoint
    files = sorted({*checkpoint.identities, *preparation.files.copied, CONFIG})
    return _digest({file: source.identity(file) for file in files})


def result_digest(preparation: Preparation) -> str:
    """A digest of which files stand at the destination, in which state; hidden files are nobody's business."""
    found = {}
    for place in (preparation.destination, preparation.sidecar):
        for folder, folders, names in os.walk(place or ""):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                if not name.startswith("."):
                    path = Path(folder, name)
                    state = path.lstat()
                    key = os.fsencode(path.relative_to(preparation.destination.parent)).hex()
                    found[key] = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_mode]
    return _digest(found)


def verifying_digest(settings: Settings) -> str | None:
    """What a result must pass, as a digest; None where nothing is asked."""
    asked = settings.verifying
    if settings.no_verify:
        return None
    if not asked.is_asked:
        return _QUICK
    return _digest({"asked": repr(asked), "files": [_state(path) for path in _files(asked)]})


def _files(asked: Verifying) -> list[Path]:
    return [path for path in (asked.prompt_file, asked.reference) if path is not None]


def _state(path: Path) -> list[int] | None:
    with suppress(OSError):
        found = path.stat()
        return [found.st_size, found.st_mtime_ns]
    return None


def _is_receipt_of(receipt: Mapping[str, Any], preparation: Preparation, settings: Settings) -> bool:
    """Whether a receipt is, but for the tool's version, the one that the job would write."""
    shards = (*preparation.plan.shards, *preparation.plan.sidecar)
    stored = receipt.get("shards")
    if not isinstance(stored, dict) or not all(isinstance(found, dict) for found in stored.values()):
        return False
    records = [ShardRecord(s.file, file_bytes(s), stored.get(s.file, {}).get("sha256")) for s in shards]
    if settings.checksum and any(record.sha256 is None for record in records):
        return False
    wanted = json.loads(build_json(build_receipt(preparation.plan, records, preparation.edits, preparation.files)))
    return _without_version(wanted) == _without_version(receipt)


def _without_version(receipt: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in receipt.items() if key != "tool"}


def _is_whole(preparation: Preparation) -> bool:
    """Whether every shard has its length, and config.json and the index their content."""
    plan = preparation.plan
    places = [(preparation.destination, shard) for shard in plan.shards]
    if preparation.sidecar is not None:
        places += [(preparation.sidecar, shard) for shard in plan.sidecar]
    try:
        return all((place / shard.file).stat().st_size == file_bytes(shard) for place, shard in places) and all(
            _content(preparation.destination / file) == build_json(document)
            for file, document in ((CONFIG, preparation.config), (INDEX, build_index(plan.shards)))
        )
    except OSError:
        return False


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON document; None where none is there."""
    with suppress(ValueError, RecursionError):
        found = json.loads(_content(path) or b"")
        return found if isinstance(found, dict) else None
    return None


def _content(path: Path) -> bytes | None:
    """What a file holds; None where it is none: a pipe of that name would be waited for without end."""
    with suppress(OSError):
        return path.read_bytes() if path.is_file() else None
    return None


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
