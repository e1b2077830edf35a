"""How much memory a model may take."""

from __future__ import annotations

import os
from pathlib import Path

from qwen35conv.facts.header import Dtype
from qwen35conv.planning.plan import Plan
from qwen35conv.verify.check import RunDtype

_SHARE = 0.5  # of the memory that is free
_FLOATS = {Dtype.BF16, Dtype.F16, Dtype.F32}


def allowed_memory(max_memory: int | None) -> int:
    """Bytes that layers may take in memory: as asked, else a share of what is free."""
    return int(_SHARE * _free_memory()) if max_memory is None else max_memory


def model_bytes(plan: Plan, dtype: RunDtype) -> int:
    """Bytes of the whole text model in memory; the embeddings, which are read by rows, count only where tied."""
    wanted = dtype.array_dtype
    total = 0
    for write in plan.writes():
        if ".embed_tokens." in write.name and not plan.tied:
            continue
        if wanted is not None and write.dtype in _FLOATS:
            total += write.n_bytes * wanted.size * 8 // write.dtype.n_bits
        else:
            total += write.n_bytes
    return total


def _free_memory() -> int:
    """Bytes that are free or can be freed at once; where the system does not say, half of all there is."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
