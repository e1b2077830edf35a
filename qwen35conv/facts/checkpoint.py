"""The facts of one checkpoint: its shard set, what each tensor is, and what is odd about it.

Everything here is made from a file listing, parsed headers and parsed JSON; nothing is opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from qwen35conv.errors import CheckpointError, SourceError
from qwen35conv.facts.config import ModelConfig, parse_json
from qwen35conv.facts.header import Dtype, Header, TensorInfo, shown
from qwen35conv.facts.layout import Place, Region, Role, parse_name
from qwen35conv.generation.convention import Gain

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
SUFFIX = ".safetensors"
SET_NAME = re.compile(r"(?P<stem>.+)-(?P<i>\d{5})-of-(?P<n>\d{5})\.safetensors")
_INCOMPLETE = (".incomplete", ".part", ".aria2", ".crdownload")
_LORA = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "modules_to_save")


class Severity(Enum):
    """Whether a finding only informs, or its owner should act."""

    NOTE = "note"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something odd that the conversion survives. `code` is stable, for scripts."""

    code: str
    text: str
    severity: Severity = Severity.NOTE


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One stored tensor: `begin` and `end` (one past) are bytes of the file."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int
    place: Place | None  # None: no rule knows the name

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of the set, its header parsed."""

    file: str
    header: Header


@dataclass(frozen=True, slots=True)
class ShardSet:
    """Which files belong to the checkpoint, and which lie beside it."""

    files: tuple[str, ...]
    strays: tuple[str, ...]
    weight_map: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A draft head in a file of its own, beside the shards: its gains are judged alone."""

    file: str
    n_tensors: int
    gains: tuple[Gain, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """The commit of a Hub repository that a checkpoint is read at."""

    repo: str
    revision: str  # as it was asked for
    commit: str
    etags: Mapping[str, str]  # of the weights, by file
    asked: bool  # whether the Hub said which commit that is; else the local cache did


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All facts that a plan is made of. `gains` holds the stored values of every gain, float32."""

    label: str
    config: ModelConfig
    metadata: Mapping[str, str]  # __metadata__ of the first shard that has any
    listing: Mapping[str, int]  # every file of the source and its bytes
    shards: tuple[Shard, ...]
    identities: Mapping[str, str]  # of each shard's file, taken before it was read
    tensors: tuple[SourceTensor, ...]  # in the order of files and bytes; each name once
    gains: tuple[Gain, ...]
    not_finite: tuple[str, ...]  # gains and decay parameters with a NaN or an infinity
    head_equals_embeddings: bool | None  # None: no head, or nothing to compare with
    strays: tuple[str, ...]
    sidecars: tuple[Sidecar, ...]
    findings: tuple[Finding, ...]
    origin: Origin | None = None  # None: not from the Hub
    ignored_index: bool = False  # whether there is one, and it was not asked

    @property
    def n_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.header.n_bytes for shard in self.shards)


def parse_index(raw: bytes) -> Mapping[str, str]:
    """The index's map from tensor to file.

    Raises SourceError where it is no index, or names anything but plain files of its own folder.
    """
    weight_map = parse_json(INDEX, raw).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{INDEX}: no weight_map in it", hint="--ignore-index reads the shards by their headers")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not is_plain_name(file):
            raise SourceError(
                f"{INDEX}: {shown(name)}: expected a file name in the same folder, found {shown(str(file))!r}",
                hint="an index never names a path; do not trust this checkpoint",
            )
    return weight_map


def is_plain_name(file: str) -> bool:
    """Whether a file name stays in its folder on every platform."""
    return bool(file) and file not in (".", "..") and not any(c in file for c in "/\\:\0") and file.isprintable()


def choose_files(
    label: str,
    listing: Mapping[str, int],
    weight_map: Mapping[str, str] | None,
    *,
    check_sets: bool = True,
    listed_by_hub: bool = False,
) -> ShardSet:
    """The shards of a checkpoint: those that the index names, or without one all at the top of the folder.

    `check_sets` holds file names to their own word: of shards called 2 of 3 and 3 of 3 the first is missing.
    `listed_by_hub`: what is missing is missing upstream, and no download would bring it.

    Raises SourceError for an incomplete set, and says what was found instead of shards.
    """
    remedy = "finish the download"
    if listed_by_hub:
        remedy = "the repository itself lacks them: ask its owner for a whole one, try another --revision"
    stored = sorted(file for file in listing if file.endswith(SUFFIX))
    top = [file for file in stored if "/" not in file]
    if weight_map is None:
        if not top:
            raise _no_weights(label, listing)
        if check_sets and (absent := _absent_from_sets(top)):
            raise SourceError(
                f"{label}: incomplete: {len(absent)} shards that the others' names speak of are missing: {few(absent)}",
                hint=f"{remedy}, or use --ignore-index if these files hold a whole checkpoint",
            )
        return ShardSet(tuple(top), tuple(file for file in stored if "/" in file), None)
    wanted = sorted(set(weight_map.values()))
    missing = [file for file in wanted if file not in listing]
    if missing:
        partial = sorted(file for file in listing if file.endswith(_INCOMPLETE))
        unfinished = f" ({partial[0]} is an unfinished download)" if partial else ""
        raise SourceError(
            f"{label}: incomplete: {len(missing)} of {len(wanted)} shards that the index names are missing: "
            f"{few(missing)}{unfinished}",
            hint=f"{remedy}, or use --ignore-index if these files hold a whole checkpoint under other names",
        )
    return ShardSet(tuple(wanted), tuple(file for file in stored if file not in set(wanted)), weight_map)


def _absent_from_sets(files: Iterable[str]) -> list[str]:
    """The files that names like `model-00002-of-00003.safetensors` promise, and that are not there."""
    sets: dict[tuple[str, str], set[int]] = {}
    for file in files:
        if (match := SET_NAME.fullmatch(file)) is not None:
            sets.setdefault((match["stem"], match["n"]), set()).add(int(match["i"]))
    return [
        f"{stem}-{i:05d}-of-{n}{SUFFIX}"
        for (stem, n), found in sets.items()
        for i in range(1, int(n) + 1)
        if i not in found
    ]


def few(names: Iterable[str], n: int = 3) -> str:
    """At most `n` names for people, and how many more there are."""
    listed = [shown(name) for name in names]
    more = f" and {len(listed) - n} more" if len(listed) > n else ""
    return ", ".join(listed[:n]) + more


def _no_weights(label: str, listing: Mapping[str, int]) -> SourceError:
    if below := sorted(file.rpartition("/")[0] for file in listing if file.endswith(SUFFIX)):
        return SourceError(
            f"{label}: no {SUFFIX} file in it, only in folders below it ({few(dict.fromkeys(below))})",
            hint="give the checkpoint's own folder",
        )
    for suffix, what in ((".gguf", "GGUF"), (".bin", "PyTorch .bin"), (".pth", "PyTorch .pth"), (".pt", "PyTorch .pt")):
        if found := sorted(file for file in listing if file.endswith(suffix)):
            return SourceError(
                f"{label}: no {SUFFIX} file in it, only {what} ({found[0]})",
                hint="this tool reads safetensors; look for a repository that has them",
            )
    if partial := sorted(file for file in listing if file.endswith(_INCOMPLETE)):
        return SourceError(f"{label}: no {SUFFIX} file in it, only unfinished downloads ({partial[0]})")
    return SourceError(f"{label}: no {SUFFIX} file in it", hint="give the folder that holds the shards")


def locate(shards: Iterable[Shard], weight_map: Mapping[str, str] | None) -> tuple[list[SourceTensor], list[Finding]]:
    """Every tensor once, where the index says it is, and what the index got wrong.

    Raises SourceError for a name that the index promises and no shard holds. Without an index both copies of a tensor
    come back, for the caller to compare.
    """
    findings: list[Finding] = []
    found: dict[str, list[SourceTensor]] = {}
    for shard in shards:
        for info in shard.header.tensors:
            found.setdefault(info.name, []).append(_source_tensor(shard, info))
    if weight_map is None:
        return [tensor for copies in found.values() for tensor in copies], findings
    absent = [name for name in weight_map if name not in found]
    if absent:
        raise SourceError(
            f"{INDEX}: {len(absent)} tensors that it names stand in no shard: {few(absent)}",
            hint="the index is stale or a shard is not the right one; --ignore-index reads the shards by their headers",
        )
    chosen: list[SourceTensor] = []
    misplaced: list[str] = []
    twice: list[str] = []
    unlisted: list[str] = []
    for name, copies in found.items():
        wanted = weight_map.get(name)
        listed = next((tensor for tensor in copies if tensor.file == wanted), None)
        if len(copies) > 1:
            if listed is None:
                raise SourceError(
                    f"{shown(name)}: stands in {few(copy.file for copy in copies)}, and the index names none of them",
                    hint="rebuild the index, or remove the files that do not belong",
                )
            twice.append(name)
        elif listed is None:
            (misplaced if wanted is not None else unlisted).append(name)
        chosen.append(listed or copies[0])
    for code, names, text in (
        ("index-misplaced", misplaced, "the index names another shard than the one that holds them"),
        ("index-duplicate", twice, "stand in two listed shards; the copy that the index names is taken"),
        ("index-unlisted", unlisted, "stand in a listed shard but not in the index; they are read all the same"),
    ):
        if names:
            findings.append(Finding(code, f"{len(names)} tensors {text}: {few(names)}", Severity.WARNING))
    return chosen, findings


def _source_tensor(shard: Shard, info: TensorInfo) -> SourceTensor:
    offset = shard.header.data_begin
    return SourceTensor(
        info.name, info.dtype, info.shape, shard.file, offset + info.begin, offset + info.end, parse_name(info.name)
    )


def check_is_model(label: str, tensors: Iterable[SourceTensor]) -> None:
    """Raises CheckpointError for an adapter, and where no tensor of the text model was recognised."""
    tensors = tuple(tensors)
    adapters = [tensor.name for tensor in tensors if any(mark in tensor.name.split(".") for mark in _LORA)]
    if adapters:
        raise CheckpointError(
            f"{label}: {len(adapters)} adapter tensors ({few(adapters)}): an adapter is not a checkpoint",
            hint="merge the adapter into its base model first, then convert the merged folder",
        )
    if not any(tensor.place is not None and tensor.place.region is Region.TRUNK for tensor in tensors):
        raise CheckpointError(
            f"{label}: none of its {len(tensors)} tensors belongs to a Qwen3.5 text model: "
            f"{few(tensor.name for tensor in tensors)}",
            hint="is this the right folder?",
        )


def is_value(tensor: SourceTensor) -> bool:
    """Whether the tensor's values are read for the verdict: gains, the control, and the decay parameters."""
    place = tensor.place
    return (
        place is not None
        and place.role in (Role.GAIN, Role.CONTROL, Role.DECAY)
        and len(tensor.shape) == 1
        and tensor.dtype in (Dtype.BF16, Dtype.F16, Dtype.F32)
    )


def gain_name(place: Place) -> str:
    """The name of a gain without a generation's prefix, as the verdict uses it."""
    return f"mtp.{place.path}" if place.region is Region.MTP else place.path
