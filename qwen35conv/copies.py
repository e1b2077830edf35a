"""Tensors that may stand twice: of one name in two shards, and a head beside the embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qwen35conv.errors import SourceError
from qwen35conv.facts.checkpoint import Finding, Severity, SourceTensor, few
from qwen35conv.facts.header import shown
from qwen35conv.facts.layout import Region, Role
from qwen35conv.source import Source

_BLOCK = 1 << 20
_SAMPLES = 16  # places where a sampled comparison looks
_SAMPLE_BYTES = 4 << 10


def without_copies(
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


def compare_head(source: Source, tensors: Sequence[SourceTensor], sampled: bool) -> tuple[bool | None, list[Finding]]:
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
