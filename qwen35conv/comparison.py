"""Two checkpoints compared under their canonical names: each through its own plan, and streamed."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from qwen35conv.errors import ConventionError
from qwen35conv.facts.checkpoint import Checkpoint
from qwen35conv.facts.header import Dtype
from qwen35conv.facts.layout import Region, Role, parse_name
from qwen35conv.generation.convention import Generation, repair_shift
from qwen35conv.planning.inventory import DraftHeadError
from qwen35conv.planning.pieces import Fix, Write
from qwen35conv.planning.plan import Mtp, NormDtype, Options, Plan, make_plan
from qwen35conv.planning.scheme import find_schemes
from qwen35conv.planning.verdicts import Verdicts, judge_checkpoint
from qwen35conv.source import Source
from qwen35conv.view import View, open_view

_CHUNK_BYTES = 1 << 22
_READERS = 4
# Left out by a conversion that is not told otherwise, so that a source has them and its result does not.
_OPTIONAL = {Region.VISION: "vision tower", Region.MTP: "draft head (mtp)"}


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: its plan, and `problem` where its generation allows none and its gains are taken as stored."""

    source: Source
    checkpoint: Checkpoint
    plan: Plan
    problem: ConventionError | None


@dataclass(frozen=True, slots=True)
class Left:
    """A part that is not compared, and why."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class OtherForm:
    """A tensor of two dtypes or shapes."""

    name: str
    dtypes: tuple[Dtype, Dtype]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class OtherValues:
    """A tensor whose values differ. NaN equals NaN, and 0 does not equal -0 where both sides have one dtype."""

    name: str
    n: int  # elements
    n_differ: int
    max_abs: float | None  # largest finite difference; None where there is none, or the dtype is no float
    n_not_finite: int  # elements that differ where a side holds NaN or infinity


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two checkpoints have in common, and what they have not."""

    a: Side
    b: Side
    left: tuple[Left, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    forms: tuple[OtherForm, ...]
    values: tuple[OtherValues, ...]  # the worst first
    n_compared: int  # tensors
    n_bytes: int  # of them, on the side of A

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs, and the gains of both mean the same.

        They do where one side at least has a plan of its own, which vouches for the other; and where nobody can tell
        what they are, but both sides are laid out alike.
        """
        if self.only_a or self.only_b or self.forms or self.values:
            return False
        if self.a.problem is None or self.b.problem is None:
            return True
        x, y = self.a.plan.verdict, self.b.plan.verdict
        return x.generation is y.generation is Generation.UNKNOWN and x.facts == y.facts

    @property
    def exit_code(self) -> int:
        """What the command returns."""
        return 0 if self.is_equal else 1


@dataclass(frozen=True, slots=True)
class Pair:
    """Two sides that can be compared, and the parts that are not."""

    a: Side
    b: Side
    left: tuple[Left, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of A that will be compared, which progress counts."""
        other = {write.name: write for write in self.b.plan.writes()}
        return sum(w.n_bytes for w in self.a.plan.writes() if w.name in other and _are_comparable(w, other[w.name]))


def make_pair(
    a: tuple[Source, Checkpoint],
    b: tuple[Source, Checkpoint],
    *,
    assume: tuple[Generation | None, Generation | None] = (None, None),
    repair: bool = False,
) -> Pair:
    """Both sides under their own plans, with all that both of them hold.

    FP8 in blocks is taken as the bfloat16 that it stands for. Vision tower and draft head are left out where only one
    side has them, as a conversion leaves them out. Where one side stores the gains in float32 and the other's are
    computed, they are computed in float32. A generation that does not convert is noted, and its gains are taken as they
    are stored: that tells what is wrong with them, and where they equal what the other side's plan gives, they are
    right. Raises CheckpointError for any other fault.
    """
    verdicts = (judge_checkpoint(a[1]), judge_checkpoint(b[1]))
    held = [{tensor.place.region for tensor in side[1].tensors if tensor.place is not None} for side in (a, b)]
    left = [
        Left(what, f"only {'A' if region in held[0] else 'B'} has one")
        for region, what in _OPTIONAL.items()
        if (region in held[0]) != (region in held[1])
    ]
    options = Options(
        keep_vision=Region.VISION in held[0] & held[1],
        mtp=Mtp.KEEP if Region.MTP in held[0] & held[1] else Mtp.DROP,
        tie=True,  # a missing head is a difference to be told, not a fault to stop at
    )
    both = ((*a, assume[0], verdicts[0]), (*b, assume[1], verdicts[1]))
    try:
        sides = [_side(*one, options, repair=repair) for one in both]
    except (ConventionError, DraftHeadError) as error:  # its own gains tell nothing, or it is not whole
        left.append(Left(_OPTIONAL[Region.MTP], str(error)))
        sides = [_side(*one, replace(options, mtp=Mtp.DROP), repair=repair) for one in both]
    first, second = _with_exact_gains(sides[0], sides[1]), _with_exact_gains(sides[1], sides[0])
    return Pair(first, second, tuple(left))


def compare(pair: Pair, on_bytes: Callable[[int], None] = lambda n: None) -> Comparison:
    """The differences of a pair. `on_bytes` is told of compared bytes of A, from several threads.

    Raises SourceError where a side can't be read.
    """
    a, b = open_view(pair.a.source, pair.a.plan), open_view(pair.b.source, pair.b.plan)
    shared = [name for name in a if name in b]
    forms = [
        OtherForm(name, (x.dtype, y.dtype), (x.shape, y.shape))
        for name in shared
        if ((x := a.write(name)).dtype, x.shape) != ((y := b.write(name)).dtype, y.shape)
    ]
    comparable = [name for name in shared if _are_comparable(a.write(name), b.write(name))]
    values = [found for found in _compare_all(a, b, comparable, on_bytes) if found.n_differ]
    return Comparison(
        a=pair.a,
        b=pair.b,
        left=pair.left,
        only_a=tuple(sorted(a.keys() - b.keys())),
        only_b=tuple(sorted(b.keys() - a.keys())),
        forms=tuple(forms),
        values=tuple(sorted(values, key=_badness)),
        n_compared=len(comparable),
        n_bytes=sum(a.write(name).n_bytes for name in comparable),
    )


def _side(
    source: Source,
    checkpoint: Checkpoint,
    assume: Generation | None,
    verdicts: Verdicts,
    options: Options,
    *,
    repair: bool,
) -> Side:
    """Raises ConventionError or DraftHeadError where the draft head, not the trunk, allows no plan."""
    trunk, problem = verdicts.trunk, None
    if assume is None and trunk.shift is None and not (repair and repair_shift(trunk.generation) is not None):
        reason = trunk.reasons[0] if trunk.reasons else "no evidence"
        problem = ConventionError(
            f"{checkpoint.label}: the norm gains are {trunk.generation.value}: {reason}",
            hint="they are compared as they are stored; --assume-a, --assume-b or --repair say how to take them",
        )
        assume = Generation.CANONICAL
    coded = any(scheme.can_dequantize for scheme in find_schemes(checkpoint.tensors, checkpoint.config))
    told = replace(options, assume=assume, repair=repair and assume is None, dequantize=coded)
    return Side(source, checkpoint, make_plan(checkpoint, told, verdicts), problem)


def _with_exact_gains(side: Side, other: Side) -> Side:
    """The side with gains computed in float32, where the other stores them so: that is what `--norm-dtype` writes."""
    if side.plan.shift == 0 or other.plan.shift != 0 or _gain_dtypes(other.plan) != {Dtype.F32}:
        return side
    options = replace(side.plan.options, norm_dtype=NormDtype.FLOAT32)
    return replace(side, plan=make_plan(side.checkpoint, options, side.plan.verdicts))


def _gain_dtypes(plan: Plan) -> set[Dtype]:
    return {w.dtype for w in plan.writes() if (place := parse_name(w.name)) is not None and place.role is Role.GAIN}


_FLOATS = {Dtype.F64, Dtype.F32, Dtype.F16, Dtype.BF16}
_SMALL_FLOATS = {
    Dtype.F8_E4M3: "float8_e4m3fn",
    Dtype.F8_E5M2: "float8_e5m2",
    Dtype.F8_E8M0: "float8_e8m0fnu",
    Dtype.F8_E4M3FNUZ: "float8_e4m3fnuz",
    Dtype.F8_E5M2FNUZ: "float8_e5m2fnuz",
}
_WHOLE = {Dtype.F32: "<f4", Dtype.F64: "<f8", Dtype.F16: "<f2"}


def _are_comparable(a: Write, b: Write) -> bool:
    """Whether values can be set against each other: one shape, and one dtype or two floats."""
    are_floats = {a.dtype, b.dtype} <= _FLOATS | _SMALL_FLOATS.keys()
    return a.shape == b.shape and (a.dtype is b.dtype or are_floats)


def _compare_all(a: View, b: View, names: Sequence[str], on_bytes: Callable[[int], None]) -> Iterator[OtherValues]:
    """What differs in each tensor, in order; a few tensors are read at once, a chunk of each in hand."""
    stop = threading.Event()
    crew = ThreadPoolExecutor(max(1, min(_READERS, os.cpu_count() or 1)), thread_name_prefix="reader")
    try:
        yield from crew.map(lambda name: _compare(a, b, name, on_bytes, stop), names)
    finally:
        stop.set()
        crew.shutdown(cancel_futures=True)


def _compare(a: View, b: View, name: str, on_bytes: Callable[[int], None], stop: threading.Event) -> OtherValues:
    first, second = a.write(name), b.write(name)
    n = math.prod(first.shape)
    n_differ, n_not_finite, largest = 0, 0, -1.0
    per_chunk = _CHUNK_BYTES * 8 // max(first.dtype.n_bits, second.dtype.n_bits)
    for x, y in zip(_cut(a, first, per_chunk), _cut(b, second, per_chunk), strict=True):
        if stop.is_set():
            break
        if first.dtype is not second.dtype or x != y:
            found = _differences(first.dtype, x, second.dtype, y)
            n_differ, n_not_finite, largest = n_differ + found[0], n_not_finite + found[1], max(largest, found[2])
        on_bytes(len(x))
    return OtherValues(name, n, n_differ, None if largest < 0 else largest, n_not_finite)


def _cut(view: View, write: Write, n_elements: int) -> Iterator[bytes]:
    """A tensor's bytes, so many elements at a time, whether they are computed or stored."""
    n_bytes = max(1, n_elements * write.dtype.n_bits // 8)
    if write.fix is Fix.NONE:
        yield from view.chunks(write.name, n_bytes)
        return
    whole = b"".join(view.chunks(write.name))
    for begin in range(0, len(whole), n_bytes):
        yield whole[begin : begin + n_bytes]


def _differences(x_dtype: Dtype, x: bytes, y_dtype: Dtype, y: bytes) -> tuple[int, int, float]:
    """Elements that differ, those of them that are not finite, and the largest difference of the others, or -1."""
    if x_dtype not in _FLOATS | _SMALL_FLOATS.keys():
        return _count_bits(x_dtype, x, y), 0, -1.0
    p, q = _values(x_dtype, x), _values(y_dtype, y)
    differ = (p != q) & ~(np.isnan(p) & np.isnan(q))
    if x_dtype is y_dtype:
        differ |= (p == 0) & (q == 0) & (np.signbit(p) != np.signbit(q))
    if not differ.any():
        return 0, 0, -1.0
    finite = differ & np.isfinite(p) & np.isfinite(q)
    n_differ, n_finite = int(np.count_nonzero(differ)), int(np.count_nonzero(finite))
    largest = float(np.abs(p[finite] - q[finite]).max()) if n_finite else -1.0
    return n_differ, n_differ - n_finite, largest


def _values(dtype: Dtype, raw: bytes) -> np.ndarray:
    """Stored floats as float64, exactly."""
    if dtype is Dtype.BF16:
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    if dtype in _WHOLE:
        return np.frombuffer(raw, _WHOLE[dtype]).astype(np.float64)
    import ml_dtypes  # slow to import, and hardly ever needed

    return np.frombuffer(raw, getattr(ml_dtypes, _SMALL_FLOATS[dtype])).astype(np.float64)


def _count_bits(dtype: Dtype, x: bytes, y: bytes) -> int:
    """Elements of other bits; of elements smaller than a byte, the bytes that hold them."""
    n_bytes = max(1, dtype.n_bits // 8)
    p = np.frombuffer(x, np.uint8).reshape(-1, n_bytes)
    return int(np.count_nonzero((p != np.frombuffer(y, np.uint8).reshape(-1, n_bytes)).any(axis=1)))


def _badness(found: OtherValues) -> tuple[bool, float, int, str]:
    largest = -1.0 if found.max_abs is None else found.max_abs
    return (not found.n_not_finite, -largest, -found.n_differ, found.name)
