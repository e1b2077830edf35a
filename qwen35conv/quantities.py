"""Sizes and token ids as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_size(text: str) -> int:
    """Bytes, from a number with or without a unit: 500MB, 5GB, 2GiB. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?)\s*([KMGT]I?)?B?", text.strip().upper())
    if match is None or (n := int(float(match[1]) * _UNITS[match[2] or ""])) < 1:
        raise ValueError(f"expected a size such as 5GB, found {text[:60]!r}")
    return n


def parse_token_ids(text: str) -> tuple[int, ...]:
    """Token ids, from numbers with commas between them. Raises ValueError for anything else."""
    if re.fullmatch(r"\s*\d{1,9}(\s*,\s*\d{1,9})*\s*", text) is None:
        raise ValueError(f"expected numbers with commas between them, found {text[:60]!r}")
    return tuple(int(number) for number in text.split(","))


def parse_slice(text: str) -> tuple[int, int]:
    """Which of how many parts, from such as 3/10. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"expected a part of the whole such as 3/10, found {text[:60]!r}")
    return int(match[1]), int(match[2])


def parse_hub_id(text: str) -> str:
    """A repository's name on the Hub, `owner/name`. Raises ValueError for other texts."""
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text) is None:
        raise ValueError(f"expected a Hub id owner/name, found {text[:80]!r}")
    return text
