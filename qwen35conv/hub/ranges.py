"""Byte ranges that are asked for together, and the answer that holds several. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

Range = tuple[int, int]  # begin, and end (one past)

_NUMBER = "[0-9]{1,18}"
_CONTENT_RANGE = re.compile(rf"bytes ({_NUMBER})-({_NUMBER})/({_NUMBER}|\*)", re.IGNORECASE)
_PART_RANGE = re.compile(rf"content-range:\s*bytes ({_NUMBER})-({_NUMBER})/".encode(), re.IGNORECASE)
_BOUNDARY = re.compile(r'boundary="?([^";,]+)"?', re.IGNORECASE)


def merge(ranges: Iterable[Range], gap: int = 0) -> list[Range]:
    """The ranges in order, those no more than `gap` bytes apart as one; empty ones are gone."""
    merged: list[Range] = []
    for begin, end in sorted(one for one in ranges if one[0] < one[1]):
        if merged and begin - merged[-1][1] <= gap:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def merge_within(ranges: Iterable[Range], allowance: int) -> list[Range]:
    """The ranges in order, the nearest of them joined as long as the bytes between add up to no more than allowed."""
    merged = merge(ranges)
    gaps = sorted((after[0] - before[1], i) for i, (before, after) in enumerate(pairwise(merged)))
    joined = set()
    for gap, i in gaps:
        allowance -= gap
        if allowance < 0:
            break
        joined.add(i)
    found: list[Range] = []
    for i, (begin, end) in enumerate(merged):
        if i and i - 1 in joined:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return found


def range_header(ranges: Sequence[Range]) -> str:
    """The Range header that asks for non-empty ranges."""
    return "bytes=" + ",".join(f"{begin}-{end - 1}" for begin, end in ranges)


def parse_count(text: str | None) -> int | None:
    """The number of bytes that a header names; None where it names none."""
    return int(text) if text is not None and re.fullmatch(_NUMBER, text) else None


def parse_content_range(header: str) -> tuple[Range, int | None] | None:
    """The range that a Content-Range header names, and the file's bytes; None where it names none."""
    match = _CONTENT_RANGE.fullmatch(header.strip())
    if match is None:
        return None
    begin, end = int(match[1]), int(match[2]) + 1
    return (begin, end), None if match[3] == "*" else int(match[3])


def boundary_of(content_type: str) -> bytes | None:
    """What parts the answer with several ranges; None where the answer is none."""
    if not content_type.lower().startswith("multipart/byteranges"):
        return None
    match = _BOUNDARY.search(content_type)
    return None if match is None else b"--" + match[1].encode()


def parse_parts(body: bytes, boundary: bytes) -> Iterator[tuple[int, bytes]]:
    """Where each whole part begins in the file, and its bytes. Ends at the first thing that is no part."""
    at = body.find(boundary)
    while at >= 0:
        at += len(boundary)
        end_of_head = body.find(b"\r\n\r\n", at)
        match = _PART_RANGE.search(body, at, end_of_head) if end_of_head >= 0 else None
        if match is None:
            return
        begin, end = int(match[1]), int(match[2]) + 1
        at = end_of_head + 4
        part = body[at : at + end - begin]
        if len(part) != end - begin:
            return
        yield begin, part
        at = body.find(boundary, at + len(part))
