"""Judge thousands of drawn checkpoints whose truth is known, and print how often the verdict is right, as Markdown.

    python scripts/measure_verdicts.py [--draws 24000] [--heads 3000] [--seed 0] [--jobs 2] [--show 5]

Exits 1 if any verdict is wrong: another clean generation than the truth. "mixed" and "unknown" stop a conversion, so
they are never wrong, but they are counted. One kind of training is counted apart and does not fail the run: its files
hold no evidence at all (see `_far` in tests/gain_draws.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from gain_draws import BEYOND, draw, draw_head  # noqa: E402  (the path must be set first)

from qwen35conv.generation.convention import Generation, judge, judge_head  # noqa: E402

STOPS = (Generation.MIXED, Generation.UNKNOWN)
Row = tuple[str, str, Generation, Generation, str, float]  # kind, where, truth, verdict, first reason, seconds


def judge_draws(seed: int, n_draws: int) -> list[Row]:
    """Draw and judge trunks."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(n_draws):
        d = draw(rng)
        begin = time.perf_counter()
        verdict = judge(d.facts, d.gains)
        where = f"{d.size} {d.facts.naming.value} {d.facts.conv.value} {d.facts.metadata_format} {d.gains[0].dtype}"
        rows.append(
            (
                d.kind,
                where,
                d.truth,
                verdict.generation,
                f"[{verdict.by}] {' | '.join(verdict.reasons)}",
                time.perf_counter() - begin,
            )
        )
    return rows


def judge_heads(seed: int, n_draws: int) -> list[Row]:
    """Draw and judge mtp heads."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(n_draws):
        kind, truth, trunk, gains = draw_head(rng)
        verdict = judge_head(gains, trunk)
        rows.append((kind, gains[0].dtype, truth, verdict.generation, " | ".join(verdict.reasons), 0.0))
    return rows


def table(rows: Iterable[Row], key: int) -> None:
    """Print verdicts against the truth (key 2) or the kind (key 0)."""
    counts: dict[str, Counter[Generation]] = defaultdict(Counter)
    wrong: Counter[str] = Counter()
    for row in rows:
        name = row[key] if isinstance(row[key], str) and key == 0 else row[2].value
        counts[str(name)][row[3]] += 1
        wrong[str(name)] += is_wrong(row)
    shown = [g for g in Generation if any(c[g] for c in counts.values())]
    print(f"| {'truth' if key == 2 else 'kind'} | draws | {' | '.join(g.value for g in shown)} | stopped | wrong |")
    print("|" + " --- |" * (len(shown) + 4))
    for name in sorted(counts):
        c, n = counts[name], counts[name].total()
        stopped = sum(c[g] for g in STOPS) / n
        print(f"| {name} | {n} | {' | '.join(str(c[g]) for g in shown)} | {stopped:.2%} | {wrong[name]} |")
    print()


def is_wrong(row: Row) -> bool:
    """Whether the verdict names a clean generation that is not the truth."""
    return row[3] is not row[2] and row[3] not in STOPS


def main() -> int:
    """Run, print, and say whether any verdict was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=24000)
    parser.add_argument("--heads", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--show", type=int, default=5, help="how many wrong verdicts to print")
    args = parser.parse_args()
    chunk = 500
    begin = time.perf_counter()
    with ProcessPoolExecutor(args.jobs) as pool:
        sizes = [min(chunk, args.draws - at) for at in range(0, args.draws, chunk)]
        seeds = [args.seed * 100_003 + i for i in range(len(sizes))]
        trunks = [row for rows in pool.map(judge_draws, seeds, sizes) for row in rows]
        heads = judge_heads(args.seed, args.heads)
    beyond = [r for r in trunks if r[0].startswith(BEYOND)]
    trunks = [r for r in trunks if not r[0].startswith(BEYOND)]
    print(f"## {len(trunks)} trunks\n")
    table(trunks, 2)
    table(trunks, 0)
    clean = [r for r in trunks if r[2] in (Generation.RAW, Generation.CANONICAL)]
    print("Of these, only the ones that should convert:\n")
    table(clean, 0)
    print("Those of them that lie within the published ranges, by size:\n")
    table([(r[1].split()[0], *r[1:]) for r in clean if r[0] == "published"], 0)
    print(f"## {len(beyond)} trunks beyond evidence\n")
    table(beyond, 2)
    print(f"## {len(heads)} mtp heads\n")
    table(heads, 2)
    table(heads, 0)
    times = np.array([r[5] for r in trunks]) * 1e3
    took = time.perf_counter() - begin
    print(f"judge: median {np.median(times):.1f} ms, longest {times.max():.0f} ms; all in {took:.0f} s")
    wrong = [r for r in [*trunks, *heads] if is_wrong(r)]
    print(f"{len(wrong)} wrong")
    for kind, where, truth, verdict, why, _ in wrong[: args.show]:
        print(f"- {kind} ({where}): is {truth.value}, called {verdict.value}: {why}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
