"""What a plan is made of, read from a source: headers, gains, and what lies beside the shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from qwen35conv.copies import compare_head, without_copies
from qwen35conv.errors import CheckpointError, Qwen35ConvError, SourceError
from qwen35conv.facts.checkpoint import (
    CONFIG,
    INDEX,
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
from qwen35conv.source import Source

_MAX_JSON = 40_000_000  # bytes: an index of 190,000 tensors is well below
_MAX_TENSORS = 400_000  # in all files
_MAX_HEADERS = 64_000_000  # bytes, of all files: they are read before one is parsed
_MAX_VALUES = 64_000_000  # bytes of gains and decay parameters, which are read whole; published models have 3 MB
_NO_MODEL = "this is no model of the family"

OnProgress = Callable[[str, int, int], None]  # what is read, and how many files of how many are done


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
        tensors, equal = without_copies(source, tensors, sampled)
        findings += equal
    check_is_model(source.label, tensors)
    gains, not_finite, odd = _read_values(source, tensors, on_progress)
    is_equal, told = compare_head(source, tensors, sampled) if config.tied else (None, [])
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


def _read_json(source: Source, file: str) -> bytes:
    n_bytes = source.listing[file]
    if n_bytes > _MAX_JSON:
        raise SourceError(f"{file}: {n_bytes} bytes: too large for what it should be", hint="this is no model's file")
    return source.read(file, [(0, n_bytes)])[0]


def _is_draft_head(header: Header) -> bool:
    """Whether a file holds nothing but a draft head."""
    places = [parse_name(tensor.name) for tensor in header.tensors]
    return bool(places) and all(place is not None and place.region is Region.MTP for place in places)


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
