"""Drawn norm gains with a known truth: every model size, published means with a spread over layers that nobody has
measured (so it varies widely), many ways to store a gain, and the ways in which files are known to go wrong.

Nothing here is tuned to the detector: kinds that it cannot tell apart are drawn too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from qwen35conv.generation.convention import ConvLayout, Facts, Gain, Generation, Naming

Rng = np.random.Generator

SIZES = {  # layers, hidden
    "0.8B": (24, 1024),
    "2B": (24, 2048),
    "4B": (32, 2560),
    "9B": (32, 4096),
    "27B": (64, 5120),
    "35B-A3B": (40, 2048),
    "122B-A10B": (48, 3072),
    "397B-A17B": (60, 4096),
    "tiny-2": (2, 64),
    "tiny-4": (4, 64),
    "tiny-8": (8, 96),
}
TYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
RAW_FACTS = (Naming.RAW, ConvLayout.RAW)
CANONICAL_FACTS = (Naming.CANONICAL, ConvLayout.CANONICAL)


@dataclass(frozen=True, slots=True)
class Draw:
    """One drawn checkpoint: its gains, its facts, and what it is."""

    kind: str
    size: str
    truth: Generation
    facts: Facts
    gains: tuple[Gain, ...]


@dataclass(slots=True)
class Trunk:
    """Deltas of one trunk, before they are stored. Rows of `anchors` are input, post, input, post, ..."""

    size: str
    anchors: np.ndarray  # [2 L, n] float32, gamma - 1
    qk: np.ndarray  # [2 F, d] float32
    final: np.ndarray  # [n] float32
    control: np.ndarray  # [L - F, 128] float32: gamma already
    files: list[str] = field(default_factory=list)  # one per anchor


def cast(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values rounded to a storage type, read back as float32."""
    with np.errstate(over="ignore"):
        return values.astype(TYPES[dtype]).astype(np.float32)


def draw_trunk(
    rng: Rng,
    size: str,
    *,
    centre: float = 0.0,
    scale: float = 1.0,
    floor: float | None = -0.75,
) -> Trunk:
    """Deltas around the published means (input -0.03, post -0.22), moved by `centre`, with a random spread."""
    n_layers, n = SIZES[size]
    between = float(np.exp(rng.uniform(np.log(0.01), np.log(0.2))))  # spread of the means over layers
    means = np.empty(2 * n_layers, np.float32)
    means[0::2] = -0.03 + centre + between * rng.standard_normal(n_layers)
    means[1::2] = -0.22 + centre + between * rng.standard_normal(n_layers)
    spread = np.exp(rng.uniform(np.log(0.04), np.log(0.2), (2 * n_layers, 1))).astype(np.float32)
    anchors = rng.standard_normal((2 * n_layers, n), dtype=np.float32) * spread + means[:, None]
    if rng.random() < 0.4:  # trained gains have a few entries far out
        far = rng.random((2 * n_layers, n), dtype=np.float32) < 0.004
        anchors = np.where(far, anchors + rng.uniform(0.3, 1.5), anchors)
    if floor is not None:
        anchors = np.maximum(anchors, floor)
    d = 32 if n < 200 else 256
    full = max(1, n_layers // 4)
    qk = np.clip(0.77 + 0.35 * rng.standard_normal((2 * full, d)), -0.57, 2).astype(np.float32)
    final = np.clip(rng.uniform(0.8, 2.0) + 0.4 * rng.standard_normal(n), -0.5, 4).astype(np.float32)
    control = (0.87 + 0.03 * rng.standard_normal((n_layers - full, 128))).astype(np.float32)
    files = ["model.safetensors"] * (2 * n_layers)
    return Trunk(size, (anchors * np.float32(scale)).astype(np.float32), qk, final, control, files)


@dataclass(frozen=True, slots=True)
class Storage:
    """How a gain came to be stored: the type of the deltas, the type that sums were made in, the type on disk."""

    source: str
    sum: str
    disk: str

    def store(self, delta: np.ndarray, shift: int) -> np.ndarray:
        """The stored values of gains shifted 0, 1 or 2 times."""
        values = cast(delta, self.source)
        for _ in range(shift):
            values = cast(values + np.float32(1), self.sum)
        return cast(values, self.disk)


PLAIN = Storage("BF16", "BF16", "BF16")


def draw_storage(rng: Rng) -> Storage:
    """Mostly bfloat16 throughout; otherwise any types, up-casts and down-casts among them."""
    if rng.random() < 0.5:
        return PLAIN
    source, total, disk = (str(t) for t in rng.choice(["BF16", "F16", "F32"], 3))
    return Storage(source, total, disk)


def make_gains(
    trunk: Trunk,
    storage: Storage,
    shifts: np.ndarray,  # [2 L]: how often each anchor was shifted
    naming: Naming,
) -> tuple[Gain, ...]:
    """The gains as a file holds them; q, k and final norms follow the most common shift."""
    prefix = {Naming.RAW: "model.language_model.", Naming.CANONICAL: "language_model.model."}.get(naming, "model.")
    most = int(np.bincount(shifts).argmax())
    stored = np.empty_like(trunk.anchors)
    for k in np.unique(shifts):
        stored[shifts == k] = storage.store(trunk.anchors[shifts == k], int(k))
    found = []
    for i, row in enumerate(stored):
        name = f"layers.{i // 2}.{('input_layernorm', 'post_attention_layernorm')[i % 2]}.weight"
        found.append(Gain(prefix + name, name, trunk.files[i], storage.disk, row))
    for i, row in enumerate(storage.store(trunk.qk, most)):
        name = f"layers.{4 * (i // 2) + 3}.self_attn.{'qk'[i % 2]}_norm.weight"
        found.append(Gain(prefix + name, name, trunk.files[-1], storage.disk, row))
    found.append(
        Gain(prefix + "norm.weight", "norm.weight", trunk.files[-1], storage.disk, storage.store(trunk.final, most))
    )
    for i, row in enumerate(trunk.control):
        name = f"layers.{i + i // 3}.linear_attn.norm.weight"
        found.append(Gain(prefix + name, name, trunk.files[0], "F32", cast(row, "BF16")))
    return tuple(found)


def make_facts(rng: Rng, trunk: Trunk, naming: Naming, conv: ConvLayout, *, liar: bool = False) -> Facts:
    """Facts of a file with these names and this conv; a liar's metadata says the opposite."""
    honest = "pt" if conv is ConvLayout.RAW else "mlx"
    other = "mlx" if honest == "pt" else "pt"
    said = other if liar else (honest if rng.random() < 0.7 else None)
    markers = (("norm_convention", "zorb-7"),) if rng.random() < 0.05 else ()
    return Facts(naming, conv, bool(rng.random() < 0.5), said, markers, SIZES[trunk.size][0])


def _uniform(trunk: Trunk, shift: int) -> np.ndarray:
    return np.full(len(trunk.anchors), shift)


# --- deltas of odd trainings -----------------------------------------------------------------------------------------


def _published(rng: Rng, size: str) -> Trunk:
    return draw_trunk(rng, size)


def _positive(rng: Rng, size: str) -> Trunk:
    """All layers a good way above zero, as one 4B head is."""
    return draw_trunk(rng, size, centre=float(rng.uniform(0.2, 0.5)))


def _far(rng: Rng, size: str) -> Trunk:
    """All layers far above zero, further than any seen, and hardly a negative: raw then is what gamma is elsewhere,
    and gamma what a gain shifted twice is. Nothing in such a file tells, so these are counted apart.
    """
    return draw_trunk(rng, size, centre=float(rng.uniform(0.6, 1.1)))


def _scaled(rng: Rng, size: str) -> Trunk:
    scale = float(np.exp(rng.uniform(np.log(0.01), np.log(10))))
    return draw_trunk(rng, size, scale=scale, floor=None)


def _outliers(rng: Rng, size: str) -> Trunk:
    """Up to 8 % of the anchors at a mean near 0.7."""
    trunk = draw_trunk(rng, size)
    n = len(trunk.anchors)
    rows = rng.choice(n, max(1, int(rng.uniform(0.01, 0.08) * n)), replace=False)
    wide = rng.uniform(0.05, 0.15)
    trunk.anchors[rows] = rng.normal(0.7, wide, (len(rows), trunk.anchors.shape[1])).astype(np.float32)
    return trunk


def _odd_layers(rng: Rng, size: str) -> Trunk:
    """Both norms of up to 8 % of the layers at a mean near 0.7."""
    trunk = draw_trunk(rng, size)
    n = len(trunk.anchors) // 2
    layers = rng.choice(n, max(1, int(rng.uniform(0.01, 0.08) * n)), replace=False)
    rows = np.sort(np.concatenate([2 * layers, 2 * layers + 1]))
    trunk.anchors[rows] = rng.normal(0.7, rng.uniform(0.05, 0.15), (len(rows), trunk.anchors.shape[1]))
    return trunk


def _low_layer(rng: Rng, size: str) -> Trunk:
    """One layer whose gamma averages 0.3."""
    trunk = draw_trunk(rng, size)
    layer = int(rng.integers(len(trunk.anchors) // 2))
    low = rng.normal(-0.7, 0.08, (2, trunk.anchors.shape[1]))
    trunk.anchors[2 * layer : 2 * layer + 2] = np.maximum(low, -0.97)
    return trunk


def _constant_layer(rng: Rng, size: str) -> Trunk:
    """Layer 0's input norm untouched by training, as in one rotated build."""
    trunk = draw_trunk(rng, size)
    trunk.anchors[0] = 0
    return trunk


def _constant(rng: Rng, size: str) -> Trunk:
    """A fresh model."""
    trunk = draw_trunk(rng, size)
    for rows in (trunk.anchors, trunk.qk, trunk.final):
        rows[...] = 0
    trunk.control[...] = 1
    return trunk


BEYOND = "far"  # the training whose files hold no evidence
TRAININGS: dict[str, tuple[Callable[[Rng, str], Trunk], float]] = {
    "published": (_published, 6),
    "outliers": (_outliers, 2),
    "odd layers": (_odd_layers, 1),
    "low layer": (_low_layer, 1),
    "constant layer": (_constant_layer, 1),
    "constant": (_constant, 0.5),
    "positive": (_positive, 1),
    "scaled": (_scaled, 2),
    "far": (_far, 0.5),
}

# --- what was done to them -------------------------------------------------------------------------------------------

LAYOUTS: dict[int, tuple[tuple[Naming, ConvLayout, Generation], ...]] = {
    0: (
        (*RAW_FACTS, Generation.RAW),
        (*RAW_FACTS, Generation.RAW),
        (*RAW_FACTS, Generation.RAW),
        (Naming.NEUTRAL, ConvLayout.RAW, Generation.RAW),
        (Naming.CANONICAL, ConvLayout.RAW, Generation.RAW),
        (*CANONICAL_FACTS, Generation.NEVER_SHIFTED),
        (Naming.RAW, ConvLayout.CANONICAL, Generation.NEVER_SHIFTED),
    ),
    1: (
        (*CANONICAL_FACTS, Generation.CANONICAL),
        (*CANONICAL_FACTS, Generation.CANONICAL),
        (*CANONICAL_FACTS, Generation.CANONICAL),
        (Naming.NEUTRAL, ConvLayout.CANONICAL, Generation.CANONICAL),
        (Naming.RAW, ConvLayout.CANONICAL, Generation.CANONICAL),
        (*RAW_FACTS, Generation.SHIFTED_RAW),
        (Naming.CANONICAL, ConvLayout.RAW, Generation.SHIFTED_RAW),
    ),
    2: (
        (*CANONICAL_FACTS, Generation.DOUBLE_SHIFTED),
        (*CANONICAL_FACTS, Generation.DOUBLE_SHIFTED),
        (*RAW_FACTS, Generation.DOUBLE_SHIFTED),
        (Naming.NEUTRAL, ConvLayout.CANONICAL, Generation.DOUBLE_SHIFTED),
    ),
}


def _rewrite(rng: Rng, gains: tuple[Gain, ...], change: Callable[[np.ndarray], np.ndarray]) -> tuple[Gain, ...]:
    """Gains with every shifted one changed and rounded to its type again."""
    return tuple(
        g if "linear_attn" in g.canonical_name else replace(g, values=cast(change(g.values), g.dtype)) for g in gains
    )


def draw_uniform(rng: Rng, size: str, training: str) -> Draw:
    """One generation throughout, perhaps fine-tuned, rescaled by a quantiser, or made from another generation."""
    trunk = TRAININGS[training][0](rng, size)
    if rng.random() < 0.4:
        _cut(rng, trunk, interleaved=bool(rng.random() < 0.1))
    shift = int(rng.choice(3, p=[0.43, 0.43, 0.14]))
    naming, conv, truth = LAYOUTS[shift][rng.integers(len(LAYOUTS[shift]))]
    storage = draw_storage(rng)
    gains = make_gains(trunk, storage, _uniform(trunk, shift), naming)
    kind, roll = training, rng.random()
    if training == "constant":
        pass
    elif roll < 0.06:
        kind = f"{training}, fine-tuned"
        noise = float(np.exp(rng.uniform(np.log(1e-4), np.log(3e-2))))
        gains = _rewrite(rng, gains, lambda v: v + noise * rng.standard_normal(v.shape, dtype=np.float32))
    elif roll < 0.12:
        kind = f"{training}, rescaled"
        width = rng.uniform(0.05, 0.5)
        gains = _rewrite(
            rng,
            gains,
            lambda v: (v + 1 - shift) * np.exp(width * rng.standard_normal(v.shape, dtype=np.float32)) + shift - 1,
        )
    elif roll < 0.2 and shift == 0:
        kind = f"{training}, unshifted again"  # a converted file carried back
        stored = PLAIN.store(trunk.anchors, 1) - 1
        trunk.anchors[...] = stored
        trunk.qk[...] = PLAIN.store(trunk.qk, 1) - 1
        trunk.final[...] = PLAIN.store(trunk.final, 1) - 1
        gains = make_gains(trunk, storage, _uniform(trunk, 0), naming)
    liar = bool(rng.random() < 0.05)
    return Draw(kind, size, truth, make_facts(rng, trunk, naming, conv, liar=liar), gains)


def _cut(rng: Rng, trunk: Trunk, *, interleaved: bool) -> tuple[int, np.ndarray]:
    """Spread the anchors over shards, few or up to one for each: how many, and which one holds each anchor."""
    n = len(trunk.anchors)
    n_shards = int(rng.integers(2, min(n, 95) + 1)) if rng.random() < 0.5 else int(rng.integers(2, min(n, 14) + 1))
    of = np.arange(n) % n_shards if interleaved else np.arange(n) * n_shards // n
    trunk.files = [f"model-{s + 1:05d}-of-{n_shards:05d}.safetensors" for s in of]
    return n_shards, of


def draw_mixed(rng: Rng, size: str) -> Draw:
    """Two generations in one file set: a shard set converted in part, layers of one file, or one role.

    Small models have no low layer here: one at 0.3 that was shifted twice is a layer at 1.3, as a sound one may be.
    """
    trainings = ["published", "outliers", "positive", "low layer"][: 4 if SIZES[size][0] >= 24 else 3]
    trunk = TRAININGS[str(rng.choice(trainings))][0](rng, size)
    n = len(trunk.anchors)
    low, high = [(0, 1), (1, 2), (0, 2)][int(rng.choice(3, p=[0.6, 0.3, 0.1]))]
    shifts = np.full(n, low)
    how = str(rng.choice(["shards", "interleaved shards", "layers", "role"], p=[0.4, 0.2, 0.3, 0.1]))
    if how in ("shards", "interleaved shards"):
        n_shards, of = _cut(rng, trunk, interleaved=how != "shards")
        done = rng.choice(n_shards, int(rng.integers(1, n_shards)) if rng.random() < 0.6 else 1, replace=False)
        shifts[np.isin(of, done)] = high
        if rng.random() < 0.3:
            shifts = low + high - shifts
    elif how == "layers":
        begin = int(rng.integers(n // 2))
        end = int(rng.integers(begin + 1, n // 2 + 1))
        if (begin, end) == (0, n // 2):
            end -= 1
        shifts[2 * begin : 2 * end] = high
    else:
        shifts[int(rng.integers(2)) :: 2] = high
    naming, conv = RAW_FACTS if rng.random() < 0.5 else CANONICAL_FACTS
    if how.endswith("shards") and rng.random() < 0.5:
        conv = ConvLayout.MIXED
    gains = make_gains(trunk, draw_storage(rng), shifts, naming)
    return Draw(f"mixed: {how}", size, Generation.MIXED, make_facts(rng, trunk, naming, conv), gains)


def draw(rng: Rng) -> Draw:
    """One checkpoint of a random kind and size."""
    weights = np.array([1.5, 1.5, 1.2, 1, 0.6, 1.2, 0.8, 0.5, 1.2, 1, 1])
    size = str(rng.choice(list(SIZES), p=weights / weights.sum()))
    if rng.random() < 0.2:
        return draw_mixed(rng, size)
    odds = np.array([w for _, w in TRAININGS.values()])
    return draw_uniform(rng, size, str(rng.choice(list(TRAININGS), p=odds / odds.sum())))


# --- mtp heads -------------------------------------------------------------------------------------------------------

HEADS: dict[str, dict[str, tuple[float, float, float, float]]] = {  # mean, spread, minimum, maximum of gamma - 1
    "27B": {
        "pre_fc_norm_embedding": (-0.4606, 0.08, -0.75, -0.1855),
        "pre_fc_norm_hidden": (-0.1572, 0.08, -0.375, 0.4551),
        "layers.0.input_layernorm": (0.0361, 0.12, -0.2256, 0.9531),
        "layers.0.post_attention_layernorm": (0.21, 0.12, -0.3, 1.2),
        "layers.0.self_attn.q_norm": (0.7906, 0.35, -0.5547, 1.9688),
        "layers.0.self_attn.k_norm": (0.78, 0.35, -0.55, 2.0),
        "norm": (1.252, 0.4, -0.2246, 1.9297),
    },
    "4B": {
        "pre_fc_norm_embedding": (-0.41, 0.08, -0.75, -0.1),
        "pre_fc_norm_hidden": (-0.16, 0.08, -0.4, 0.4),
        "layers.0.input_layernorm": (0.303, 0.15, -0.2, 1.2),
        "layers.0.post_attention_layernorm": (0.387, 0.15, -0.2, 1.2),
        "layers.0.self_attn.q_norm": (0.746, 0.35, -0.5, 2.0),
        "layers.0.self_attn.k_norm": (0.734, 0.35, -0.5, 2.0),
        "norm": (2.58, 0.4, 0.5, 4.0),
    },
    "35B-A3B": {
        "pre_fc_norm_embedding": (-0.7266, 0.06, -0.9, -0.5),
        "pre_fc_norm_hidden": (-0.5063, 0.08, -0.75, 0.0),
        "layers.0.input_layernorm": (-0.0951, 0.1, -0.5, 0.6),
        "layers.0.post_attention_layernorm": (0.21, 0.12, -0.3, 1.2),
        "layers.0.self_attn.q_norm": (-0.2328, 0.3, -0.8, 1.0),
        "layers.0.self_attn.k_norm": (-0.2, 0.3, -0.8, 1.0),
        "norm": (1.9253, 0.4, 0.3, 3.5),
    },
}
TELLING = (
    "pre_fc_norm_embedding",
    "pre_fc_norm_hidden",
    "layers.0.input_layernorm",
    "layers.0.post_attention_layernorm",
)


def make_head(
    rng: Rng, like: str, shifts: dict[str, int] | int, *, n: int = 2048, storage: Storage = PLAIN
) -> tuple[Gain, ...]:
    """The seven gains of an mtp head, each shifted as told."""
    found = []
    for stem, (mean, spread, low, high) in HEADS[like].items():
        delta = np.clip(mean + spread * rng.standard_normal(256 if "self_attn" in stem else n), low, high)
        shift = shifts if isinstance(shifts, int) else shifts[stem]
        values = storage.store(delta.astype(np.float32), shift)
        found.append(Gain(f"mtp.{stem}.weight", f"mtp.{stem}.weight", "mtp.safetensors", storage.disk, values))
    return tuple(found)


def draw_head(rng: Rng) -> tuple[str, Generation, Generation, tuple[Gain, ...]]:
    """A head of a random kind: its kind, what it is, what its trunk is, its gains.

    Where the final norm is the odd one the others are raw, as in the known bundles: a raw final norm among gamma
    ones has the mean and the signs of a gamma one, so no evidence is left in the file.
    """
    like, storage, n = str(rng.choice(list(HEADS))), draw_storage(rng), int(rng.choice([64, 1024, 2048, 5120]))
    roll = rng.random()
    if roll < 0.6:
        shift = int(rng.choice(3, p=[0.45, 0.45, 0.1]))
        truth = (Generation.RAW, Generation.CANONICAL, Generation.DOUBLE_SHIFTED)[shift]
        trunk = Generation.RAW if shift == 0 and rng.random() < 0.5 else Generation.CANONICAL
        kind = f"{like} head beside a {trunk.value} trunk"
        return kind, truth, trunk, make_head(rng, like, shift, n=n, storage=storage)
    ways = {
        "final norm apart": ("norm",),
        "q, k and final apart": ("norm", "layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm"),
        "pre-fc apart": TELLING[:2],
        "layer norms apart": TELLING[2:],
        "one pre-fc apart": TELLING[:1],
    }
    how = str(rng.choice(list(ways)))
    base = 0 if "norm" in ways[how] else int(rng.integers(2))
    shifts = dict.fromkeys(HEADS[like], base)
    for stem in ways[how]:
        shifts[stem] = 1 - base
    gains = make_head(rng, like, shifts, n=n, storage=storage)
    return f"{like} head, {how}", Generation.MIXED, Generation.CANONICAL, gains
