"""One conversion, from source to published folder: plan, write, prove, publish."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qwen35conv.errors import DestinationError, SourceError
from qwen35conv.facts.checkpoint import CONFIG, INDEX
from qwen35conv.facts.header import LFS_POINTER
from qwen35conv.fixes import read_pieces
from qwen35conv.planning.plan import Plan, PlanShard
from qwen35conv.planning.receipt import (
    ShardRecord,
    build_receipt,
    build_source_gains,
    computed_gains,
    options_document,
)
from qwen35conv.planning.rows import working_bytes
from qwen35conv.planning.sidecar import (
    RECEIPT,
    SOURCE_GAINS,
    ConfigEdit,
    SideFiles,
    build_config,
    build_index,
    build_json,
    config_edits,
    side_files,
)
from qwen35conv.proof import prove, read_back, verify_result
from qwen35conv.source import Source
from qwen35conv.version import __version__
from qwen35conv.writing.alignment import header_of
from qwen35conv.writing.forecast import forecast_shared
from qwen35conv.writing.journal import JOURNAL
from qwen35conv.writing.sharing import Link
from qwen35conv.writing.writer import (
    BUFFER_BYTES,
    Partial,
    Written,
    check_destination,
    publishing,
    settle,
    write_shards,
)

if TYPE_CHECKING:
    from qwen35conv.hub.source import HubSource
    from qwen35conv.verify import OnProgress, Verification, VerifyOptions

MTP_INDEX = "mtp.safetensors.index.json"
_N_CONNECTIONS = 8


@dataclass(frozen=True, slots=True)
class Preflight:
    """What a conversion will take, in bytes; `n_memory` is a bound on its buffers.

    Of `n_written`, `n_shared` are blocks of the source, which take no room.
    """

    n_read: int
    n_written: int
    n_shared: int
    n_memory: int
    n_free: int

    @property
    def n_needed(self) -> int:
        """Bytes that the disk must have free."""
        return self.n_written - self.n_shared


@dataclass(frozen=True, slots=True)
class Preparation:
    """Everything that is decided before the first byte is written."""

    plan: Plan
    destination: Path
    sidecar: Path | None  # the draft head's own folder
    config: dict[str, Any]
    edits: tuple[ConfigEdit, ...]
    files: SideFiles
    preflight: Preflight
    jobs: int
    link: Link

    @property
    def n_shard_bytes(self) -> int:
        """Bytes of the shards' data, which progress counts."""
        return sum(shard.n_bytes for shard in (*self.plan.shards, *self.plan.sidecar))


class ShardWriter(Protocol):
    """What `write_shards` does, here or elsewhere."""

    def __call__(
        self,
        shards: Sequence[PlanShard],
        source: Source,
        partial: Partial,
        *,
        jobs: int,
        checksum: bool,
        link: Link,
        on_bytes: Callable[[int], None],
    ) -> tuple[Written, ...]:
        """What was written, in the order of `shards`."""


@dataclass(frozen=True, slots=True)
class Means:
    """What a conversion that is one of many works with; alone it does without."""

    write_shards: ShardWriter = write_shards
    files: Mapping[str, bytes] = field(default_factory=dict)  # more files of the result, beside the receipt
    verifying: VerifyOptions | None = None  # what the result must pass before it appears; None: the quick steps
    on_check: OnProgress | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished conversion, and what was proved about it before it was published."""

    preparation: Preparation
    written: tuple[Written, ...]
    seconds: float
    n_headers: int  # files whose headers were read again
    n_tensors: int  # names, dtypes and shapes that agree with the plan and config.json
    n_gains: int  # computed gains that agree with the plan bit for bit
    verification: Verification | None  # what `verify` says of the result; None where it was not asked

    @property
    def n_bytes(self) -> int:
        """Bytes of the shards."""
        return sum(written.n_bytes for written in self.written)

    @property
    def n_shared(self) -> int:
        """Bytes of tensors in blocks that are the source's own."""
        return sum(written.n_shared for written in self.written)

    @property
    def n_copied(self) -> int:
        """Bytes of tensors that were copied."""
        return sum(written.n_copied for written in self.written)

    @property
    def n_computed(self) -> int:
        """Bytes of tensors that were computed."""
        return sum(written.n_computed for written in self.written)


def prepare(
    source: Source, plan: Plan, destination: Path, *, jobs: int | None = None, link: Link = Link.AUTO
) -> Preparation:
    """What will be written, and what that takes. Nothing is changed.

    Raises CheckpointError where config.json can't follow the tensors, and DestinationError where `link` asks for clones
    and the file system has none.
    """
    checkpoint = plan.checkpoint
    config = build_config(plan)
    files = side_files(checkpoint)
    _check_pointers(source, files)
    n_jobs = jobs or default_jobs(source, plan)
    shards, parent = (*plan.shards, *plan.sidecar), _parent(destination)
    n_side = sum(checkpoint.listing[file] for file in files.copied)
    n_made = len(build_json(config)) + len(build_json(build_index(plan.shards)))
    return Preparation(
        plan=plan,
        destination=destination,
        sidecar=destination.with_name(destination.name + "-mtp") if plan.sidecar else None,
        config=config,
        edits=config_edits(checkpoint.config.document, config),
        files=files,
        preflight=Preflight(
            n_read=n_side + sum(_n_read(shard) for shard in shards),
            n_written=n_side + n_made + sum(file_bytes(shard) for shard in shards),
            n_shared=forecast_shared(shards, source, parent, link),
            n_memory=n_jobs * max((_n_memory(shard) for shard in shards), default=BUFFER_BYTES),
            n_free=shutil.disk_usage(parent).free,
        ),
        jobs=n_jobs,
        link=link,
    )


def write(
    source: Source,
    plan: Plan,
    destination: Path | str,
    *,
    jobs: int | None = None,
    overwrite: bool = False,
    checksum: bool = False,
    check: bool = True,
    link: Link = Link.AUTO,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> Outcome:
    """Carry a plan out: `destination` appears when it is whole and proved, or not at all.

    `check` runs the quick steps of a verification on the result before it appears. `on_bytes` is told of written bytes
    as they come. Raises CheckpointError where the result fails that, DestinationError where the folder can't be
    written, and SourceError where the source can't be read or changes meanwhile. What is finished is kept; the same
    call resumes.
    """
    return carry_out(
        source,
        prepare(source, plan, Path(destination), jobs=jobs, link=link),
        overwrite=overwrite,
        checksum=checksum,
        check=check,
        on_bytes=on_bytes,
    )


def download_first(source: HubSource, preparation: Preparation, *, progress: bool = False) -> None:
    """Have all that will be read in the local cache, by the ordinary download; it is read from there then.

    `progress` lets that draw its bars. Raises SourceError where it can't be had, DestinationError where the cache or
    the destination lack room.
    """
    from qwen35conv.hub.repository import cache_folder

    files = {*preparation.plan.checkpoint.identities, *preparation.files.copied, CONFIG, INDEX} & source.listing.keys()
    wanted = [file for file in sorted(files) if source.local_path(file) is None]
    n_bytes, n_written = sum(source.listing[file] for file in wanted), preparation.preflight.n_written
    cache = _parent(cache_folder())
    free, target = shutil.disk_usage(cache).free, _parent(preparation.destination)
    is_one_disk = cache.stat().st_dev == target.stat().st_dev
    if (need := n_bytes + (n_written if is_one_disk else 0)) > free:
        also = f", the result {n_written} bytes on the same disk" if is_one_disk else ""
        raise DestinationError(
            f"{cache_folder()}: the download needs {n_bytes} bytes{also}: {need} in all, {free} are free",
            hint="free some space, set HF_HOME to another disk, or leave --via-cache out, which needs no second copy",
        )
    _check_room(preparation, n_written)
    source.download(wanted, progress=progress)


def carry_out(
    source: Source,
    preparation: Preparation,
    *,
    overwrite: bool = False,
    checksum: bool = False,
    check: bool = True,
    on_bytes: Callable[[int], None] = lambda n: None,
    means: Means | None = None,
) -> Outcome:
    """As `write`, from what was prepared."""
    means = means or Means()
    begun = time.monotonic()
    plan, destination, aside = preparation.plan, preparation.destination, preparation.sidecar
    if aside is not None:
        settle(destination, aside)
    for target in (destination, aside):
        if target is not None:
            check_target(source, target, overwrite=overwrite)
    _check_unchanged(source, plan)
    key = conversion_key(plan)
    if check:  # its libraries take as long to load as half a gigabyte to copy, and the writers leave a processor idle
        threading.Thread(target=import_module, args=("qwen35conv.verify",), daemon=True).start()
    with ExitStack() as stack:
        if aside is not None:
            stack.callback(settle, destination, aside)
        partial = stack.enter_context(publishing(destination, key=key, overwrite=overwrite))
        beside = (
            stack.enter_context(publishing(aside, key=key, overwrite=overwrite, settled=False))
            if aside is not None
            else None
        )
        _check_space(preparation, [partial] if beside is None else [partial, beside])
        how: dict[str, Any] = {"jobs": preparation.jobs, "checksum": checksum, "link": preparation.link}
        written = means.write_shards(plan.shards, source, partial, on_bytes=on_bytes, **how)
        if beside is not None:
            written += means.write_shards(plan.sidecar, source, beside, on_bytes=on_bytes, **how)
            beside.write_file(MTP_INDEX, build_json(build_index(plan.sidecar)))
        _write_side_files(source, preparation, partial, written)
        for file, content in means.files.items():
            partial.write_file(file, content)
        n_headers, n_tensors, n_gains = prove(source, plan.shards, partial.folder)
        if beside is not None:
            proof = prove(source, plan.sidecar, beside.folder)
            n_headers, n_tensors, n_gains = n_headers + proof[0], n_tensors + proof[1], n_gains + proof[2]
        result, found = read_back(plan, partial.folder)
        verification = None
        if check:
            verification = verify_result(
                result,
                found,
                means.verifying,
                means.on_check,
                label=plan.checkpoint.label,
                assumed=plan.options.assume is not None,
                hint="nothing was published; --no-verify skips this, if you know better",
            )
    return Outcome(preparation, written, time.monotonic() - begun, n_headers, n_tensors, n_gains, verification)


def check_target(source: Source, destination: Path, *, overwrite: bool = False) -> None:
    """Raises DestinationError where a folder can't be made: it exists, is the source, or stands below a file."""
    folder = source.local_path("")
    if folder is not None:
        check_destination(folder, destination)
    if os.path.lexists(destination):
        if not overwrite and not (destination / JOURNAL).is_file():  # a journal: published, and not yet cleaned up
            raise DestinationError(f"{destination}: exists", hint="choose another folder, or --overwrite to replace it")
        return
    parent = next(place for place in destination.absolute().parents if os.path.lexists(place))
    if not parent.is_dir():
        raise DestinationError(f"{destination}: {parent} is no folder", hint="choose another destination")


def conversion_key(plan: Plan) -> str:
    """A digest of version, source files, options and plan: equal keys write equal bytes."""
    digest = hashlib.sha256()
    digest.update(json.dumps([__version__, options_document(plan), dict(plan.checkpoint.identities)]).encode())
    for shard in (*plan.shards, *plan.sidecar):
        digest.update(
            repr(
                (shard.file, [(w.name, w.dtype, w.shape, w.fix, w.pieces, w.blocks, w.packed) for w in shard.writes])
            ).encode()
        )
    return digest.hexdigest()


def file_bytes(shard: PlanShard) -> int:
    """Bytes of a shard's file, header included."""
    return len(header_of(shard)) + shard.n_bytes


def _parent(path: Path) -> Path:
    """The nearest folder above a path that exists."""
    return next(folder for folder in path.absolute().parents if folder.is_dir())


def _n_read(shard: PlanShard) -> int:
    """Bytes read for a shard; the parts of a packed weight share theirs."""
    packed = {write.pieces: write for write in shard.writes if write.packed is not None}
    others = [write for write in shard.writes if write.packed is None]
    return sum(piece.n_bytes for write in (*others, *packed.values()) for piece in write.read_pieces)


def _n_memory(shard: PlanShard) -> int:
    """A bound on the bytes that a thread holds while it writes a shard."""
    return max((working_bytes(write) for write in shard.writes), default=0) + BUFFER_BYTES


def default_jobs(source: Source, plan: Plan) -> int:
    """Threads that copy: of a disk more than a few only make it seek, of a network each is a connection."""
    if any(source.local_path(shard.file) is None for shard in plan.checkpoint.shards):
        return _N_CONNECTIONS
    return min(4, os.cpu_count() or 1)


def _check_unchanged(source: Source, plan: Plan) -> None:
    """Raises SourceError where a shard is no longer the file that was planned; the writer watches from here on."""
    for file, identity in plan.checkpoint.identities.items():
        if source.identity(file) != identity:
            raise SourceError(
                f"{source.label}/{file}: the file changed since it was planned",
                hint="wait until it is whole, then run the same command again",
            )


def _check_pointers(source: Source, files: SideFiles) -> None:
    """Raises SourceError for a side file that is only a Git LFS pointer: a tokenizer would be lost without a word."""
    for file in files.copied:
        n_bytes = min(source.listing[file], len(LFS_POINTER))
        if source.read(file, [(0, n_bytes)])[0] == LFS_POINTER:
            raise SourceError(
                f"{source.label}/{file}: a Git LFS pointer, not the file itself",
                hint="run `git lfs pull` in the repository, or download the file from the Hub",
            )


def _check_space(preparation: Preparation, partials: Sequence[Partial]) -> None:
    n_done = sum(partial.n_finished_bytes + partial.n_grown_bytes for partial in partials)
    _check_room(preparation, preparation.preflight.n_needed - n_done)


def _check_room(preparation: Preparation, need: int) -> None:
    free = preparation.preflight.n_free
    if need > free:
        raise DestinationError(
            f"{preparation.destination}: needs {need} bytes, the file system has {free} free",
            hint="free some space, or choose a destination on another disk",
        )


def _write_side_files(source: Source, preparation: Preparation, partial: Partial, written: Sequence[Written]) -> None:
    plan = preparation.plan
    for file in preparation.files.copied:
        n_bytes = plan.checkpoint.listing[file]
        partial.write_file(file, source.stream(file, 0, n_bytes))
    gains = {write.sources[0]: (write, read_pieces(source, write.pieces)) for write in computed_gains(plan)}
    if gains:
        partial.write_file(SOURCE_GAINS, build_source_gains(gains))
    records = [ShardRecord(shard.file, shard.n_bytes, shard.sha256) for shard in written]
    receipt = build_receipt(plan, records, preparation.edits, preparation.files)
    partial.write_file(CONFIG, build_json(preparation.config))
    partial.write_file(RECEIPT, build_json(receipt))
    partial.write_file(INDEX, build_json(build_index(plan.shards)))
