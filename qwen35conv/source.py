"""Where a checkpoint lies, and how it is read: listings, byte ranges, and the facts that a plan is made of."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from qwen35conv.errors import CheckpointError, Qwen35ConvError, SourceError
from qwen35conv.facts.checkpoint import (
    CONFIG,
    INDEX,
    SET_NAME,
    SUFFIX,
    Checkpoint,
    Finding,
    Origin,
    Severity,
    Shard,
    Sidecar,
    SourceTensor,
    check_is_model,
    choose_files,
    few,
    gain_name,
    is_value,
    locate,
    parse_index,
)
from qwen35conv.facts.config import parse_config
from qwen35conv.facts.header import LENGTH_BYTES, Dtype, Header, parse_header, parse_length, shown
from qwen35conv.facts.layout import Place, Region, Role, parse_name
from qwen35conv.generation.convention import Gain

if TYPE_CHECKING:
    from qwen35conv.hub.source import HubSource

_MAX_DEPTH = 3  # of subfolders that are looked into for strays
_MAX_JSON = 40_000_000  # bytes: an index of 190,000 tensors is well below
_MAX_TENSORS = 400_000  # in all files
_MAX_HEADERS = 64_000_000  # bytes, of all files: they are read before one is parsed
_MAX_VALUES = 64_000_000  # bytes of gains and decay parameters, which are read whole; published models have 3 MB
_BLOCK = 1 << 20
_NO_MODEL = "this is no model of the family"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

_SAMPLES = 16  # places where a sampled comparison looks
_SAMPLE_BYTES = 4 << 10

Range = tuple[int, int]
OnProgress = Callable[[str, int, int], None]  # what is read, and how many files of how many are done


class Source(Protocol):
    """Files to read by name and byte range."""

    @property
    def label(self) -> str:
        """What people call it."""

    @property
    def listing(self) -> Mapping[str, int]:
        """Every file, by its path inside the source with `/`, and its bytes."""

    def read(self, file: str, ranges: Sequence[Range]) -> list[bytes]:
        """The bytes of each range of a file. Raises SourceError where it ends early or can't be read."""

    def read_many(
        self, wanted: Mapping[str, Sequence[Range]], on_file: Callable[[str], None] = ...
    ) -> Mapping[str, list[bytes]]:
        """As `read`, of several files; `on_file` is told of each that is done."""

    def stream(self, file: str, begin: int, end: int, stop: threading.Event | None = None) -> Iterator[bytes]:
        """The bytes of one range, a few MB at most at a time; another thread may set `stop` to end it."""

    @property
    def origin(self) -> Origin | None:
        """The commit on the Hub, where it is one."""

    def identity(self, file: str) -> str:
        """A text that changes when the file does."""

    def local_path(self, file: str) -> Path | None:
        """The file on this machine, where it is one; for no file, the source itself."""


@dataclass(frozen=True)
class LocalSource:
    """A folder, or one safetensors file of it. Never opened for writing."""

    folder: Path
    label: str
    only: str | None = None  # read this shard alone, whatever an index says

    @cached_property
    def listing(self) -> Mapping[str, int]:
        """Every regular file to a depth of three folders, and its bytes; links to files are followed."""
        found = dict(_walk(self.folder, ""))
        if self.only is not None:
            found = {f: n for f, n in found.items() if f == self.only or not (f.endswith(SUFFIX) or f == INDEX)}
        return found

    def read(self, file: str, ranges: Sequence[Range]) -> list[bytes]:
        """The bytes of each range of a file. Raises SourceError where it ends early or can't be read."""
        path = self.folder / file
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise SourceError(f"{path}: not a regular file")
            with path.open("rb", buffering=0) as opened:
                found = []
                for begin, end in ranges:
                    opened.seek(begin)
                    found.append(_read_exactly(opened.fileno(), path, end - begin))
                return found
        except OSError as error:
            raise SourceError(f"{path}: can't be read: {error.strerror or error}") from error

    def read_many(
        self, wanted: Mapping[str, Sequence[Range]], on_file: Callable[[str], None] = lambda file: None
    ) -> dict[str, list[bytes]]:
        """As `read`, of several files, one after the other."""
        found = {}
        for file, ranges in wanted.items():
            found[file] = self.read(file, ranges)
            on_file(file)
        return found

    def stream(self, file: str, begin: int, end: int, stop: threading.Event | None = None) -> Iterator[bytes]:
        """The bytes of one range, a MB at a time."""
        for at in range(begin, end, _BLOCK):
            yield from self.read(file, [(at, min(at + _BLOCK, end))])

    @property
    def origin(self) -> None:
        """Not from the Hub."""

    def identity(self, file: str) -> str:
        """Bytes, time of the last change, and number of the file."""
        try:
            found = (self.folder / file).stat()
        except OSError as error:
            raise SourceError(f"{self.folder / file}: can't be read: {error.strerror or error}") from error
        return f"{found.st_size}:{found.st_mtime_ns}:{found.st_ino}"

    def local_path(self, file: str) -> Path:
        """The file on this machine; for no file, what the source itself is: its folder, or its one file."""
        return self.folder / (file or self.only or "")


def open_source(
    spec: str, *, revision: str | None = None, stop: threading.Event | None = None
) -> LocalSource | HubSource:
    """The source that `spec` names: a folder or a single safetensors file; where neither is there, a Hub repository.

    `revision` is a repository's branch, tag or commit. Another thread may set `stop` to end what waits for the Hub.
    Raises SourceError where nothing is there.
    """
    found = _open_local(spec)
    if found is not None:
        if revision is not None:
            raise SourceError(
                f"{shown(spec)}: a folder or file on this machine has no --revision {shown(revision)}",
                hint="leave --revision out, or run the command in another folder to mean the Hub's repository",
            )
        return found
    if _HUB_ID.fullmatch(spec):
        from qwen35conv.hub.source import open_hub  # huggingface_hub: only where it is used

        return open_hub(spec, revision, stop)
    raise SourceError(
        f"{shown(spec)}: no such folder or file",
        hint="check the path; it was not found on this machine. A Hub repository is named owner/name",
    )


def _open_local(spec: str) -> LocalSource | None:
    """The folder or file that `spec` names; None where there is none."""
    try:
        path = Path(spec).expanduser()
        if path.is_dir():
            return LocalSource(path, spec)
        if path.is_file():
            if path.suffix != SUFFIX:
                raise SourceError(f"{spec}: not a folder, and not a {SUFFIX} file", hint="give the checkpoint's folder")
            _refuse_part_of_set(path)
            return LocalSource(path.parent, spec, only=path.name)
        exists = path.exists()
    except OSError as error:
        raise SourceError(f"{shown(spec)}: can't be opened: {error.strerror or error}") from error
    except (ValueError, RuntimeError) as error:
        raise SourceError(f"{shown(spec)}: no valid path: {error}", hint="check the path") from error
    if exists:
        raise SourceError(f"{spec}: neither a folder nor a regular file")
    return None


def _refuse_part_of_set(path: Path) -> None:
    """Raises SourceError for one file of several: read alone, the others' tensors would seem to be missing."""
    match = SET_NAME.fullmatch(path.name)
    if match is not None and int(match["n"]) > 1:
        raise SourceError(f"{path.name}: one of {int(match['n'])} shards", hint="give the folder that holds them all")


def read_checkpoint(
    source: Source, *, ignore_index: bool = False, sampled: bool = False, on_progress: OnProgress | None = None
) -> Checkpoint:
    """All facts of a checkpoint: headers, config, index, and the few KB of gains; no other tensor is read.

    Where large tensors must be compared with each other, `sampled` reads a few places of those that are on no disk of
    this machine. Raises SourceError or HeaderError for what can't be read, CheckpointError for what is no such model.
    """
    listing = source.listing
    weight_map = None
    if INDEX in listing and not ignore_index:
        weight_map = parse_index(_read_json(source, INDEX))
    chosen = choose_files(
        source.label, listing, weight_map, check_sets=not ignore_index, listed_by_hub=_is_asked(source.origin)
    )
    if CONFIG not in listing:
        raise SourceError(f"{source.label}: no {CONFIG} beside the shards", hint="fetch it from the model's repository")
    config = parse_config(f"{source.label}/{CONFIG}", _read_json(source, CONFIG))
    identities = {file: source.identity(file) for file in chosen.files}
    headers = _read_headers(source, chosen.files, _counting("headers", len(chosen.files), on_progress))
    shards = [Shard(file, headers[file]) for file in chosen.files]
    strays = list(chosen.strays)
    if weight_map is None and len(shards) > 1:
        heads = [shard.file for shard in shards if _is_draft_head(shard.header)]
        if len(heads) < len(shards):
            shards = [shard for shard in shards if shard.file not in heads]
            strays += heads
    tensors, findings = locate(shards, weight_map)
    if weight_map is None:
        tensors, equal = _without_copies(source, tensors, sampled)
        findings += equal
    check_is_model(source.label, tensors)
    gains, not_finite, odd = _read_values(source, tensors, on_progress)
    is_equal, told = _compare_head(source, tensors, sampled) if config.tied else (None, [])
    odd += told
    origin = source.origin
    if origin is not None and not _is_asked(origin):
        text = (
            f"the Hub was not asked: {origin.revision} is commit {origin.commit} as the local cache has it, "
            "and what the cache lacks of it is not copied"
        )
        odd.append(Finding("from-cache", text))
    sidecars, strays = _read_sidecars(source, strays, findings)
    metadata = next((shard.header.metadata for shard in shards if shard.header.metadata), ())
    return Checkpoint(
        label=source.label,
        config=config,
        metadata=dict(metadata),
        listing=listing,
        shards=tuple(shards),
        identities=identities,
        tensors=tuple(tensors),
        gains=gains,
        not_finite=not_finite,
        head_equals_embeddings=is_equal,
        strays=tuple(strays),
        sidecars=sidecars,
        findings=(*findings, *odd),
        origin=origin,
        ignored_index=ignore_index and INDEX in listing,
    )


def _is_asked(origin: Origin | None) -> bool:
    return origin is not None and origin.asked


def read_header(source: Source, file: str) -> Header:
    """The parsed header of one file. Raises HeaderError where it is not strictly valid."""
    n_file = source.listing.get(file)
    if n_file is None:
        raise SourceError(f"{source.label}/{file}: is not there any more")
    (prefix,) = source.read(file, [(0, min(n_file, LENGTH_BYTES))])
    n_header = parse_length(file, prefix, n_file)
    (raw,) = source.read(file, [(LENGTH_BYTES, LENGTH_BYTES + n_header)])
    return parse_header(file, raw, n_file)


def _read_headers(source: Source, files: Sequence[str], on_file: Callable[[str], None]) -> dict[str, Header]:
    """As `read_header`, of several files at once."""
    listing = source.listing
    prefixes = source.read_many({file: [(0, min(listing[file], LENGTH_BYTES))] for file in files})
    lengths = {file: parse_length(file, prefixes[file][0], listing[file]) for file in files}
    if sum(lengths.values()) > _MAX_HEADERS:
        raise SourceError(f"{source.label}: headers of more than {_MAX_HEADERS} bytes", hint=_NO_MODEL)
    raws = source.read_many({file: [(LENGTH_BYTES, LENGTH_BYTES + n)] for file, n in lengths.items()}, on_file)
    headers: dict[str, Header] = {}
    n_tensors = 0
    for file in files:
        headers[file] = parse_header(file, raws[file][0], listing[file])
        n_tensors += len(headers[file].tensors)
        if n_tensors > _MAX_TENSORS:
            raise SourceError(f"{source.label}: more than {_MAX_TENSORS} tensors", hint=_NO_MODEL)
    return headers


def _counting(what: str, total: int, on_progress: OnProgress | None) -> Callable[[str], None]:
    """A function to be told of each file that is done, by one thread at a time."""
    done = 0

    def on_file(file: str) -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(what, done, total)

    return on_file


def values_of(dtype: Dtype, raw: bytes) -> np.ndarray:
    """Stored BF16, F16 or F32 values as float32, exactly."""
    if dtype is Dtype.BF16:
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(raw, "<f2" if dtype is Dtype.F16 else "<f4").astype(np.float32)


def _walk(folder: Path, prefix: str, depth: int = 0) -> Iterator[tuple[str, int]]:
    try:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        if depth:
            return  # a subfolder of no concern
        raise SourceError(f"{folder}: can't be read: {error.strerror or error}") from error
    for entry in listed:
        name = f"{prefix}{entry.name}"
        if not _is_text(name):
            if not prefix and entry.name.endswith(SUFFIX):
                raise SourceError(f"{shown(name)}: the file's name is not valid UTF-8", hint="rename it")
            continue  # no document could name it
        try:
            if entry.is_dir(follow_symlinks=False):
                if depth < _MAX_DEPTH and entry.name != ".git":
                    yield from _walk(Path(entry.path), f"{name}/", depth + 1)
            elif stat.S_ISREG((found := entry.stat()).st_mode):
                yield name, found.st_size
        except OSError:
            continue  # a link that leads nowhere: as good as no file


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_exactly(descriptor: int, path: Path, n_bytes: int) -> bytes:
    parts = []
    while n_bytes:
        part = os.read(descriptor, n_bytes)
        if not part:
            raise SourceError(
                f"{path}: ends {n_bytes} bytes early", hint="the file shrank, or its download is unfinished"
            )
        parts.append(part)
        n_bytes -= len(part)
    return b"".join(parts)


def _read_json(source: Source, file: str) -> bytes:
    n_bytes = source.listing[file]
    if n_bytes > _MAX_JSON:
        raise SourceError(f"{file}: {n_bytes} bytes: too large for what it should be", hint="this is no model's file")
    return source.read(file, [(0, n_bytes)])[0]


def _is_draft_head(header: Header) -> bool:
    """Whether a file holds nothing but a draft head."""
    places = [parse_name(tensor.name) for tensor in header.tensors]
    return bool(places) and all(place is not None and place.region is Region.MTP for place in places)


def _without_copies(
    source: Source, tensors: list[SourceTensor], sampled: bool
) -> tuple[list[SourceTensor], list[Finding]]:
    """Each tensor once. Raises SourceError where two shards hold different tensors of one name."""
    once: dict[str, SourceTensor] = {}
    copies = []
    for tensor in tensors:
        first = once.setdefault(tensor.name, tensor)
        if first is tensor:
            continue
        alike = (first.dtype, first.shape) == (tensor.dtype, tensor.shape) and _equal(source, first, tensor, sampled)
        if not alike:
            raise SourceError(
                f"{shown(tensor.name)}: stands in {first.file} and {tensor.file}, with different values",
                hint="without an index nobody knows which is right; remove the file that does not belong",
            )
        copies.append(tensor.name)
    how = "equal bytes where they were compared" if _is_sampled(source, tensors, sampled) else "equal bytes"
    text = f"{len(copies)} tensors stand in two shards, with {how}: {few(copies)}"
    found = Finding("equal-copies", text, Severity.WARNING)
    return list(once.values()), [found] if copies else []


def _is_sampled(source: Source, tensors: Sequence[SourceTensor], sampled: bool) -> bool:
    return sampled and any(source.local_path(tensor.file) is None for tensor in tensors)


def _equal(source: Source, a: SourceTensor, b: SourceTensor, sampled: bool) -> bool:
    """Whether two tensors of equal length hold the same bytes; stops at the first difference.

    Where only a sample is read, equal means that no difference was found.
    """
    if _is_sampled(source, (a, b), sampled) and a.n_bytes > _SAMPLES * _SAMPLE_BYTES:
        step = (a.n_bytes - _SAMPLE_BYTES) // (_SAMPLES - 1)
        places = [(i * step, i * step + _SAMPLE_BYTES) for i in range(_SAMPLES)]
        x, y = (source.read(t.file, [(t.begin + begin, t.begin + end) for begin, end in places]) for t in (a, b))
        return x == y
    return all(one == other for one, other in zip(_blocks(source, a), _blocks(source, b), strict=True))


def _blocks(source: Source, tensor: SourceTensor) -> Iterator[bytes]:
    """A tensor's bytes as one stream, cut into blocks of equal length."""
    waiting = bytearray()
    for part in source.stream(tensor.file, tensor.begin, tensor.end):
        waiting += part
        while len(waiting) >= _BLOCK:
            yield bytes(waiting[:_BLOCK])
            del waiting[:_BLOCK]
    yield bytes(waiting)


def _compare_head(source: Source, tensors: Sequence[SourceTensor], sampled: bool) -> tuple[bool | None, list[Finding]]:
    """Whether a stored head equals the embeddings; None where none is stored. And what to tell of a sample."""
    heads = {t.place.parameter: t for t in tensors if t.place and t.place.region is Region.HEAD}
    rows = {t.place.parameter: t for t in tensors if t.place and t.place.role is Role.EMBEDDING}
    if not heads:
        return None, []
    is_equal = heads.keys() == rows.keys() and all(
        (head.dtype, head.shape) == (rows[key].dtype, rows[key].shape) and _equal(source, head, rows[key], sampled)
        for key, head in heads.items()
    )
    if not is_equal or not _is_sampled(source, [*heads.values(), *rows.values()], sampled):
        return is_equal, []
    text = f"the stored head equals the embeddings at the {_SAMPLES} places that were read; convert compares all of it"
    return is_equal, [Finding("head-sampled", text)]


def _read_values(
    source: Source, tensors: Sequence[SourceTensor], on_progress: OnProgress | None
) -> tuple[tuple[Gain, ...], tuple[str, ...], list[Finding]]:
    """The gains, the names of those and of decay parameters that are not finite, and findings."""
    by_file: dict[str, list[SourceTensor]] = {}
    for tensor in tensors:
        if is_value(tensor):
            by_file.setdefault(tensor.file, []).append(tensor)
    _check_size(by_file.values())
    gains: dict[str, Gain] = {}
    not_finite, without_decay = [], []
    wanted = {file: [(t.begin, t.end) for t in members] for file, members in by_file.items()}
    raws = source.read_many(wanted, _counting("gains", len(wanted), on_progress))
    for file, members in by_file.items():
        for tensor, raw in zip(members, raws[file], strict=True):
            values = values_of(tensor.dtype, raw)
            place = tensor.place
            assert place is not None
            if place.role is not Role.DECAY:
                gains[tensor.name] = Gain(tensor.name, gain_name(place), tensor.file, tensor.dtype.value, values)
            if np.isfinite(values).all():
                continue
            if place.path.endswith("A_log") and not np.isnan(values).any() and values.max() < np.inf:
                without_decay.append(tensor.name)
            else:
                not_finite.append(tensor.name)
    findings = []
    if without_decay:
        text = f"{len(without_decay)} A_log hold -inf (heads that never forget): {few(without_decay)}"
        findings.append(Finding("a-log-infinite", text, Severity.WARNING))
    return tuple(gains[t.name] for t in tensors if t.name in gains), tuple(not_finite), findings


def _check_size(groups: Iterable[Sequence[SourceTensor]]) -> None:
    """Raises CheckpointError where the gains are too large to be some, before they are read."""
    tensors = [tensor for group in groups for tensor in group]
    if sum(tensor.n_bytes for tensor in tensors) > _MAX_VALUES:
        largest = max(tensors, key=lambda tensor: tensor.n_bytes)
        raise CheckpointError(
            f"{largest.file}: {shown(largest.name)}: {largest.n_bytes} bytes of a gain or decay parameter, not KB",
            hint="this is no checkpoint of the family, or its names were mixed up",
        )


def _read_sidecars(
    source: Source, strays: Sequence[str], findings: list[Finding]
) -> tuple[tuple[Sidecar, ...], list[str]]:
    """Draft heads beside the shards, and the strays that are none. A broken stray is only a finding."""
    sidecars, others = [], []
    for file in strays:
        try:
            header = read_header(source, file)
            members = [tensor for tensor in _sidecar_tensors(file, header) if is_value(tensor)]
            if not members:
                others.append(file)
                continue
            _check_size([members])
            raws = source.read(file, [(tensor.begin, tensor.end) for tensor in members])
        except Qwen35ConvError as error:
            findings.append(Finding("stray-broken", f"a file that takes no part is broken: {error}", Severity.WARNING))
            others.append(file)
            continue
        gains = (
            Gain(t.name, gain_name(t.place), file, t.dtype.value, values_of(t.dtype, raw))
            for t, raw in zip(members, raws, strict=True)
            if t.place is not None and t.place.role is Role.GAIN
        )
        sidecars.append(Sidecar(file, len(header.tensors), tuple(gains)))
    return tuple(sidecars), others


def _sidecar_tensors(file: str, header: Header) -> Iterator[SourceTensor]:
    """The draft head's tensors of a file; in a file named after it they may all lack the `mtp.` prefix."""
    places: list[Place | None] = [parse_name(info.name) for info in header.tensors]
    if "mtp" in file.lower() and not any(place and place.region is Region.MTP for place in places):
        places = [parse_name(f"mtp.{info.name}") for info in header.tensors]
    for info, place in zip(header.tensors, places, strict=True):
        if place is not None and place.region is Region.MTP:
            begin = header.data_begin
            yield SourceTensor(info.name, info.dtype, info.shape, file, begin + info.begin, begin + info.end, place)
