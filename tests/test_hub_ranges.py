"""Byte ranges asked for together: nothing lost, nothing read twice, and answers read as the standard has them."""

from __future__ import annotations

from email.message import EmailMessage
from email.parser import BytesParser
from email.policy import HTTP
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35conv.hub.ranges import (
    boundary_of,
    merge,
    merge_within,
    parse_content_range,
    parse_parts,
    range_header,
)

RANGES = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 40)).map(lambda r: (r[0], r[0] + r[1])), max_size=30)


def covered(ranges: list[tuple[int, int]]) -> set[int]:
    return {at for begin, end in ranges for at in range(begin, end)}


@settings(deadline=None)
@given(RANGES, st.integers(0, 60))
def test_merged_ranges_hold_all_bytes_and_only_small_gaps(ranges: list[tuple[int, int]], gap: int) -> None:
    merged = merge(ranges, gap)
    assert covered(ranges) <= covered(merged)
    assert all(before[1] + gap < after[0] for before, after in pairwise(merged))
    if gap == 0:
        assert covered(merged) == covered(ranges)
    ends = {end for _, end in ranges}
    begins = {begin for begin, _ in ranges}
    assert all(begin in begins and end in ends for begin, end in merged)


@settings(deadline=None)
@given(RANGES, st.integers(0, 300))
def test_joining_within_an_allowance_reads_no_more_than_it_allows(ranges: list[tuple[int, int]], most: int) -> None:
    joined = merge_within(ranges, most)
    assert covered(ranges) <= covered(joined)
    assert len(covered(joined)) <= len(covered(ranges)) + most
    gaps = sorted(after[0] - before[1] for before, after in pairwise(merge(ranges)))
    n_joined = max((n for n in range(len(gaps) + 1) if sum(gaps[:n]) <= most), default=0)
    assert len(joined) == len(merge(ranges)) - n_joined


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=400), RANGES, st.booleans())
def test_the_parts_of_an_answer_are_the_ranges_of_the_file(
    content: bytes, ranges: list[tuple[int, int]], has_preamble: bool
) -> None:
    ranges = [one for one in merge(ranges) if one[1] <= len(content)]
    body = b"anything\r\n" if has_preamble else b""
    for begin, end in ranges:
        body += b"--x-y\r\nContent-type: application/octet-stream\r\n"
        body += f"content-range: bytes {begin}-{end - 1}/{len(content)}\r\n\r\n".encode()
        body += content[begin:end] + b"\r\n"
    body += b"--x-y--\r\n"
    assert list(parse_parts(body, b"--x-y")) == [(begin, content[begin:end]) for begin, end in ranges]
    for n_cut in (3, 20):
        whole = list(parse_parts(body[:-n_cut], b"--x-y"))
        assert all(content[at : at + len(raw)] == raw for at, raw in whole)
        assert len(whole) <= len(ranges)


@pytest.mark.parametrize(
    "content_type", ['multipart/byteranges; boundary="a=b_c"', "Multipart/ByteRanges; charset=x; boundary=a-b_c"]
)
def test_the_boundary_is_what_the_library_of_mail_takes_it_for(content_type: str) -> None:
    message = BytesParser(EmailMessage, policy=HTTP).parsebytes(f"Content-Type: {content_type}\r\n\r\n".encode())
    assert boundary_of(content_type) == b"--" + str(message.get_boundary()).encode()


def test_what_is_no_answer_with_ranges_is_none() -> None:
    assert boundary_of("application/octet-stream") is None
    assert boundary_of("multipart/byteranges") is None
    assert parse_content_range("bytes */5") is None
    assert parse_content_range("bytes 0-4/5") == ((0, 5), 5)
    assert parse_content_range("bytes 0-4/*") == ((0, 5), None)
    assert range_header([(0, 5), (7, 8)]) == "bytes=0-4,7-7"
