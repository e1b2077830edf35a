"""Byte ranges of a repository's files at one commit: resumed where a connection drops, checked where they come from."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import httpx2
from huggingface_hub import constants, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import hf_raise_for_status

from qwen35conv.errors import SourceError
from qwen35conv.facts.header import shown
from qwen35conv.hub.faults import RESUMES, RETRIED_STATUSES, explained, seconds_to_wait
from qwen35conv.hub.ranges import (
    Range,
    boundary_of,
    merge_within,
    parse_content_range,
    parse_count,
    parse_parts,
    range_header,
)
from qwen35conv.hub.settings import request_headers

MAX_RANGES = 200  # of one request; web servers refuse more
_MAX_REDIRECTS = 8
_MAX_TRIES = 6  # in a row, without a byte between them
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 20.0  # seconds
_LONGEST_ASKED = 330.0  # seconds: the Hub's rate limits reset every five minutes
_PROGRESS_BYTES = 1 << 16  # a connection that brought fewer is one more failure in a row
_SLOWEST_BYTES = 1 << 10  # within the client's timeout, of which the last may be the end of a file
_MOST_SKIPPED = 32 << 20  # bytes: of a longer file the beginning is not read only to get past it
_PART_OVERHEAD = 1 << 10  # bytes: the head of a part


class StoppedError(Exception):
    """The caller asked to stop."""


class ChangedError(SourceError):
    """A file is not the one that was listed."""


class _TryAgainError(Exception):
    """One attempt failed in a way that another may not; `after` is how long the server asks to wait."""

    def __init__(self, cause: Exception, after: float | None = None) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.after = after


class _RangesRefusedError(Exception):
    """The server does not give several ranges at once."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository: its bytes, and its ETag (a LFS file's SHA-256, a small file's Git blob)."""

    name: str
    n_bytes: int
    etag: str | None


class Transport:
    """The connections to one repository at one commit; any thread may use it."""

    def __init__(self, repo: str, commit: str) -> None:
        self.repo = repo
        self.commit = commit
        self._headers = request_headers()
        self._lock = threading.Lock()
        self._locations: dict[str, str] = {}  # where the Hub sent us for a file, as long as that works
        self._served: dict[str, str] = {}  # the ETag of each file at the place that serves its bytes
        self._doubted: set[str] = set()  # files that were served with another ETag once
        self._gives_several: bool | None = None  # ranges in one request; None: not asked yet
        self._first_asks = threading.Lock()

    def stream(self, file: RemoteFile, begin: int, end: int, stop: threading.Event) -> Iterator[bytes]:
        """The bytes of a range, as they come.

        A dropped or short answer is taken up where it ended. Raises SourceError where that does not help, ChangedError
        where the file is not the one that was listed, StoppedError soon after `stop` is set.
        """
        patience = _Patience(f"{self.repo}/{file.name}", stop)
        while begin < end:
            n_got = 0
            try:
                with self._answer(file, [(begin, end)]) as response:
                    n_skipped = begin if response.status_code == 200 else 0
                    pace = _Pace(f"{self.repo}/{file.name}")
                    for chunk in response.iter_raw():
                        if stop.is_set():
                            raise StoppedError
                        pace.check(len(chunk))
                        if len(chunk) <= n_skipped:
                            n_skipped -= len(chunk)
                            continue
                        part, n_skipped = chunk[n_skipped : n_skipped + end - begin], 0
                        if not part:
                            break  # more than was asked for
                        begin, n_got = begin + len(part), n_got + len(part)
                        yield part
                if begin == end:
                    return  # after the last read, which gives the connection back for the next request
                raise _TryAgainError(SourceError(f"{self.repo}/{file.name}: the answer ends {end - begin} bytes early"))
            except httpx2.TransportError as error:
                patience.wait(_TryAgainError(error), n_got)
            except _TryAgainError as error:
                patience.wait(error, n_got)

    def read(self, file: RemoteFile, ranges: Sequence[Range], stop: threading.Event) -> list[tuple[int, bytes]]:
        """Where each stretch begins and its bytes; the stretches hold all of `ranges`, which are in order and apart.

        Several ranges are one request where the server can do that; where it can't, the nearest are joined.
        """
        found: list[tuple[int, bytes]] = []
        if len(ranges) > 1:
            for at in range(0, len(ranges), MAX_RANGES):
                found += self._read_several(file, ranges[at : at + MAX_RANGES], stop)
        missing = [one for one in ranges if not any(at <= one[0] and one[1] <= at + len(raw) for at, raw in found)]
        for begin, end in merge_within(missing, file.n_bytes // 400):
            found.append((begin, b"".join(self.stream(file, begin, end, stop))))
        return found

    def _read_several(
        self, file: RemoteFile, ranges: Sequence[Range], stop: threading.Event
    ) -> list[tuple[int, bytes]]:
        """What the server gives of several ranges in one request; nothing where it gives them only one by one."""
        if len(ranges) == 1 or self._gives_several is False:
            return []
        if self._gives_several is None:
            with self._first_asks:  # one thread finds out, the others wait for what it finds
                return self._ask_several(file, ranges, stop)
        return self._ask_several(file, ranges, stop)

    def _ask_several(self, file: RemoteFile, ranges: Sequence[Range], stop: threading.Event) -> list[tuple[int, bytes]]:
        if self._gives_several is False:
            return []
        patience = _Patience(f"{self.repo}/{file.name}", stop)
        most = sum(end - begin + _PART_OVERHEAD for begin, end in ranges) + _PART_OVERHEAD
        while True:
            try:
                with self._answer(file, ranges) as response:
                    boundary = boundary_of(response.headers.get("content-type", ""))
                    if boundary is None:
                        raise _RangesRefusedError
                    body = bytearray()
                    pace = _Pace(f"{self.repo}/{file.name}")
                    for chunk in response.iter_raw():
                        pace.check(len(chunk))
                        body += chunk
                        if len(body) > most or stop.is_set():
                            break
                if stop.is_set():
                    raise StoppedError
                self._gives_several = True
                return list(parse_parts(bytes(body), boundary))
            except _RangesRefusedError:
                self._gives_several = False
                return []
            except httpx2.TransportError as error:
                patience.wait(_TryAgainError(error), 0)
            except _TryAgainError as error:
                patience.wait(error, 0)

    @contextmanager
    def _answer(self, file: RemoteFile, ranges: Sequence[Range]) -> Iterator[httpx2.Response]:
        """One attempt: the response with the ranges' bytes still to be read, after redirects and all checks."""
        url = self._locations.get(file.name) or self._url(file)
        for _ in range(_MAX_REDIRECTS):
            at_hub = _is_hub(url)
            headers = dict(self._headers) | {"Range": range_header(ranges), "Accept-Encoding": "identity"}
            if not at_hub:
                headers.pop("authorization", None)  # the token is for the Hub alone
            with get_session().stream(
                "GET", url, headers=headers, follow_redirects=False, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
            ) as response:
                self._check_status(file, response, at_hub, n_ranges=len(ranges))
                if at_hub:
                    self._check_identity(file, response)
                if response.has_redirect_location:
                    url = self._redirected(file, url, response.headers["location"])
                    if parse_count(response.headers.get("content-length")) is not None:
                        response.read()  # a word or two: then the connection serves the next request
                    continue
                if not at_hub:
                    with self._lock:
                        self._locations[file.name] = url
                self._check_served(file, response, ranges)
                yield response
                return
        raise SourceError(f"{self.repo}/{file.name}: the Hub redirects without end")

    def _url(self, file: RemoteFile) -> str:
        return hf_hub_url(self.repo, file.name, revision=self.commit)

    def _check_status(self, file: RemoteFile, response: httpx2.Response, at_hub: bool, *, n_ranges: int) -> None:
        if response.status_code < 400:
            return
        if response.status_code == 416:
            if n_ranges > 1:
                raise _RangesRefusedError
            raise self._changed(file, "it is shorter than it was listed")
        try:
            hf_raise_for_status(response)
        except HfHubHTTPError as error:
            if response.status_code in RETRIED_STATUSES:
                raise _TryAgainError(error, seconds_to_wait(response.headers)) from error
            if not at_hub and self._forget(file):
                raise _TryAgainError(error, 0.0) from error  # the address we were sent to has run out
            if n_ranges > 1 and response.status_code in (400, 405, 501):
                raise _RangesRefusedError from error
            raise explained(error, self.repo, revision=self.commit) from error

    def _check_identity(self, file: RemoteFile, response: httpx2.Response) -> None:
        """Raises ChangedError where the Hub's answer is about another commit, file or length."""
        commit = response.headers.get(constants.HUGGINGFACE_HEADER_X_REPO_COMMIT)
        if commit is not None and commit != self.commit:
            raise self._changed(file, f"it comes from commit {commit}, not {self.commit}")
        linked = _plain(response.headers.get(constants.HUGGINGFACE_HEADER_X_LINKED_ETAG))
        own = None if response.has_redirect_location else _plain(response.headers.get("etag"))
        etag = linked or own
        # A mirror may name a file by another kind of digest: of another length, it says nothing.
        if etag is not None and file.etag is not None and len(etag) == len(file.etag) and etag != file.etag:
            raise self._changed(file, f"its ETag is {etag}, not {file.etag}")
        n_bytes = parse_count(response.headers.get(constants.HUGGINGFACE_HEADER_X_LINKED_SIZE))
        if n_bytes is not None and n_bytes != file.n_bytes:
            raise self._changed(file, f"it has {n_bytes} bytes, not {file.n_bytes}")

    def _check_served(self, file: RemoteFile, response: httpx2.Response, ranges: Sequence[Range]) -> None:
        """Raises where the bytes to come are not those that were asked for."""
        if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise _TryAgainError(  # its bytes are not the file's, whatever range it names
                SourceError(
                    f"{self.repo}/{file.name}: the answer is compressed, though it was asked for as it is",
                    hint="a proxy may do that: check HTTPS_PROXY, HF_ENDPOINT, and the network",
                )
            )
        etag = _plain(response.headers.get("etag"))
        if etag is not None:
            with self._lock:
                first = self._served.setdefault(file.name, etag)
            if etag != first:
                changed = self._changed(file, f"its ETag changed from {first} to {etag}")
                if file.name in self._doubted or not self._forget(file):
                    raise changed
                self._doubted.add(file.name)  # the Hub is asked once more where it is
                raise _TryAgainError(changed)
        if response.status_code == 200:
            if len(ranges) > 1:
                raise _RangesRefusedError
            n_bytes = parse_count(response.headers.get("content-length"))
            if n_bytes is not None and n_bytes != file.n_bytes:
                raise self._changed(file, f"it has {n_bytes} bytes, not {file.n_bytes}")
            if ranges[0][0] and file.n_bytes > _MOST_SKIPPED:
                raise SourceError(
                    f"{self.repo}/{file.name}: the server gives whole files only, no ranges of them",
                    hint="--via-cache downloads the files first",
                )
            return
        if len(ranges) > 1:
            if boundary_of(response.headers.get("content-type", "")) is None:
                raise _RangesRefusedError
            return
        found = parse_content_range(response.headers.get("content-range", ""))
        if found is None:
            raise _TryAgainError(SourceError(f"{self.repo}/{file.name}: an answer that names no range"))
        given, n_bytes_in_all = found
        if n_bytes_in_all is not None and n_bytes_in_all != file.n_bytes:
            raise self._changed(file, f"it has {n_bytes_in_all} bytes, not {file.n_bytes}")
        if given[0] != ranges[0][0]:
            raise _TryAgainError(SourceError(f"{self.repo}/{file.name}: an answer with another range"))

    def _redirected(self, file: RemoteFile, url: str, location: str) -> str:
        """Where a redirect leads. Raises SourceError where that is nowhere on the web."""
        try:
            target = urljoin(url, location)
            parts = urlsplit(target)
            httpx2.URL(target)
            if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
                return target
        except (ValueError, httpx2.InvalidURL):
            pass
        raise SourceError(
            f"{self.repo}/{file.name}: the Hub sends us to {shown(location)}, which is no web address",
            hint="check HF_ENDPOINT, and the network",
        )

    def _forget(self, file: RemoteFile) -> bool:
        """Ask the Hub again where a file is; whether there was anything to forget."""
        with self._lock:
            return self._locations.pop(file.name, None) is not None

    def _changed(self, file: RemoteFile, how: str) -> ChangedError:
        return ChangedError(
            f"{self.repo}/{file.name}: the file changed while it was read: {how}",
            hint="run the same command again; it starts from what is there now",
        )


class _Pace:
    """Whether an answer still comes: a byte now and then keeps a connection open, and brings no file."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._begun = time.monotonic()
        self._n_bytes = 0

    def check(self, n_bytes: int) -> None:
        """Count what came. Raises _TryAgainError where hardly anything has within the client's own timeout."""
        self._n_bytes += n_bytes
        if self._n_bytes >= _SLOWEST_BYTES:
            self._begun, self._n_bytes = time.monotonic(), 0
        elif time.monotonic() - self._begun > constants.HF_HUB_DOWNLOAD_TIMEOUT:
            raise _TryAgainError(
                SourceError(f"{self._where}: the answer hardly comes any more", hint=f"check the network; {RESUMES}")
            )


class _Patience:
    """How often, and after how long, an attempt is made again."""

    def __init__(self, where: str, stop: threading.Event) -> None:
        self._where = where
        self._stop = stop
        self._n_failures = 0

    def wait(self, error: _TryAgainError, n_got: int) -> None:
        """Wait before the next attempt. Raises what to tell where there have been enough, StoppedError on `stop`."""
        if n_got >= _PROGRESS_BYTES:
            self._n_failures = 0
        self._n_failures += 1
        longest = error.after is not None and error.after > _LONGEST_ASKED
        if self._n_failures >= _MAX_TRIES or longest:
            cause = error.cause
            if isinstance(cause, SourceError):
                raise cause
            raise explained(cause, self._where) from cause
        seconds = min(_FIRST_WAIT * 2 ** (self._n_failures - 1), _LONGEST_WAIT) * random.uniform(0.75, 1.25)
        if error.after is not None:
            seconds = error.after
        if self._stop.wait(seconds):
            raise StoppedError


def _plain(etag: str | None) -> str | None:
    """An ETag without its quotes and its mark of weakness."""
    return None if etag is None else etag.removeprefix("W/").strip('"')


def _is_hub(url: str) -> bool:
    """Whether a URL leads to the Hub itself, which the token is for."""
    parts, endpoint = urlsplit(url), urlsplit(constants.ENDPOINT)
    if (parts.scheme, parts.netloc) == (endpoint.scheme, endpoint.netloc):
        return True
    return parts.scheme == "https" and parts.hostname in constants.HF_URL_HOSTS
