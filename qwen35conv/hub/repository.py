"""One repository at one commit: what is in it, and which of its files lie in the local cache."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx2
from huggingface_hub import constants, get_session, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    hf_raise_for_status,
    validate_repo_id,
)

from qwen35conv.errors import DestinationError, SourceError
from qwen35conv.facts.checkpoint import CONFIG, INDEX, SUFFIX
from qwen35conv.facts.header import shown
from qwen35conv.hub.faults import (
    RETRIED_STATUSES,
    StrangeAnswerError,
    explained,
    is_unreachable,
    seconds_to_wait,
    status_of,
)
from qwen35conv.hub.settings import check_settings, request_headers
from qwen35conv.hub.transport import RemoteFile, StoppedError

_MAX_TRIES = 6
_WAIT = 0.5  # seconds
_LONGEST_ASKED = 330.0
_ANSWER_SECONDS = 60  # for one whole answer; after as long, no further one is waited for
_MOST_BYTES = 64 << 20  # of an answer: that of 60,000 files has 15 MB
_NO_FILE = 1 << 50  # bytes: no file is as long
_COMMIT = re.compile(r"[0-9A-Za-z][\w.-]*", re.ASCII)  # mirrors have commits of their own kinds


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository as one commit has it."""

    repo: str
    revision: str
    commit: str
    files: Mapping[str, RemoteFile]
    cached: Mapping[str, Path]  # those whose bytes lie in the local cache, whole
    asked: bool  # whether the Hub said what `revision` is; else the local cache did


def open_repository(repo: str, revision: str | None = None, stop: threading.Event | None = None) -> Repository:
    """The repository at a branch, tag or commit (its main branch without one), which is resolved once.

    Where the Hub can't be asked, what the local cache holds has to do. Raises SourceError where there is no such
    repository or revision, no access, or nothing in the cache; StoppedError soon after `stop` is set.
    """
    wanted = revision or constants.DEFAULT_REVISION
    if not _is_revision(wanted):
        raise SourceError(f"{repo}: no valid revision: {shown(wanted)}", hint="give a branch, a tag or a commit")
    check_settings()
    try:
        if constants.is_offline_mode():
            raise OfflineModeIsEnabled("offline")
        commit, files = _parse(_ask(repo, wanted, stop or threading.Event()))
    except (httpx2.HTTPError, OfflineModeIsEnabled, HFValidationError, StrangeAnswerError) as error:
        found = _from_cache(repo, wanted) if is_unreachable(error) else None
        if found is None:
            raise explained(error, repo, revision=wanted) from error
        return found
    return Repository(repo, wanted, commit, files, cached_files(repo, commit, files), asked=True)


def cached_files(repo: str, commit: str, files: Mapping[str, RemoteFile]) -> Mapping[str, Path]:
    """The files of a commit that lie in the local cache, whole."""
    found = {}
    for name, file in files.items():
        path = _look_up(repo, name, commit)
        if path is not None and path.stat().st_size == file.n_bytes:
            found[name] = path
    return found


def _look_up(repo: str, name: str, revision: str) -> Path | None:
    """A file in the local cache; None where it is not there, or the cache is in disorder."""
    try:
        found = try_to_load_from_cache(repo, name, revision=revision)
    except (OSError, ValueError):  # ValueError too for a name that the cache does not keep, such as a\\..\\b
        return None
    path = Path(found) if isinstance(found, str) else None
    return path if path is not None and path.is_file() else None


def cache_folder() -> Path:
    """The local cache, which need not exist."""
    return Path(constants.HF_HUB_CACHE)


@contextmanager
def quietly(progress: bool = False) -> Iterator[None]:
    """The Hub's client keeps its warnings to itself inside the block, and draws its own progress only if told."""
    log = logging.getLogger("huggingface_hub")
    before = log.level
    if before == logging.WARNING:  # nobody asked to hear more
        log.setLevel(logging.ERROR)
    hide = not progress and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        log.setLevel(before)
        if hide:
            enable_progress_bars()


def download(repository: Repository, names: Iterable[str], *, progress: bool = False) -> Mapping[str, Path]:
    """The files that lie in the local cache once every named one was downloaded the ordinary way (Xet).

    `progress` lets the Hub's client draw bars. Raises SourceError where one can't be had, DestinationError where the
    cache can't be written.
    """
    missing = [re.sub(r"([\[*?])", r"[\1]", name) for name in names if name not in repository.cached]
    if missing:
        try:
            with quietly(progress):
                folder = snapshot_download(repository.repo, revision=repository.commit, allow_patterns=missing)
            if repository.revision != repository.commit:
                _note_revision(Path(folder).parents[1], repository)
        except EntryNotFoundError as error:
            raise explained(error.__cause__ or error, repository.repo, revision=repository.commit) from error
        except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
            raise explained(error, repository.repo, revision=repository.commit) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # what its client makes of odd answers
            raise explained(StrangeAnswerError(), repository.repo) from error
        except OSError as error:
            if error.errno is None:  # of the download, not of the disk: of another length than was promised
                raise _broken(repository, error) from error
            raise DestinationError(
                f"{cache_folder()}: the download fails: {error.strerror or error}",
                hint="free some space, or set HF_HOME to a folder that can be written",
            ) from error
        except RuntimeError as error:  # hf_xet raises nothing narrower
            raise _broken(repository, error) from error
    return cached_files(repository.repo, repository.commit, repository.files)


def _broken(repository: Repository, error: Exception) -> SourceError:
    told = shown(str(error).partition("\n")[0])
    return SourceError(
        f"{repository.repo}: the download fails: {told}", hint="the same command resumes; or leave --via-cache out"
    )


def _note_revision(folder: Path, repository: Repository) -> None:
    """Let the cache know which commit a branch or tag is, so that it is found offline."""
    path = folder / "refs" / repository.revision
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(repository.commit)


def _ask(repo: str, revision: str, stop: threading.Event) -> object:
    """What the Hub says of a repository; asked again where it is busy.

    Raises what the Hub's client raises, StrangeAnswerError for what is no JSON, StoppedError on `stop`.
    """
    validate_repo_id(repo)
    url = f"{constants.ENDPOINT}/api/models/{repo}/revision/{quote(revision, safe='')}"
    begun = time.monotonic()
    for attempt in range(1, _MAX_TRIES + 1):
        wait = _WAIT * 2 ** (attempt - 1)
        try:
            return _answer(url, stop)
        except HfHubHTTPError as error:
            after = seconds_to_wait(error.response.headers)
            if status_of(error) not in RETRIED_STATUSES or attempt == _MAX_TRIES or (after or 0) > _LONGEST_ASKED:
                raise
            wait = wait if after is None else after
        except (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.TimeoutException) as error:
            is_late = time.monotonic() - begun > _ANSWER_SECONDS
            if isinstance(error, httpx2.ConnectError) or attempt == _MAX_TRIES or is_late:
                raise
        if stop.wait(wait):
            raise StoppedError
    raise AssertionError("unreachable: the last attempt returns or raises")


def _answer(url: str, stop: threading.Event) -> object:
    """One answer of the Hub's API. However slowly it comes, and however long it is, there is an end to it."""
    begun = time.monotonic()
    body = bytearray()
    with get_session().stream(
        "GET", url, params={"blobs": True}, headers=request_headers(), timeout=30,
        follow_redirects=True,  # a repository that was renamed has another address
    ) as response:  # fmt: skip
        hf_raise_for_status(response)
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) > _MOST_BYTES:
                raise StrangeAnswerError(f"with more than {_MOST_BYTES} bytes")
            if stop.is_set():
                raise StoppedError
            if time.monotonic() - begun > _ANSWER_SECONDS:
                raise httpx2.ReadTimeout(f"no whole answer within {_ANSWER_SECONDS} seconds")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise StrangeAnswerError from error


def _parse(found: object) -> tuple[str, Mapping[str, RemoteFile]]:
    """The commit and the files of it. Raises StrangeAnswerError for what says neither."""
    if not isinstance(found, dict) or not isinstance(listed := found.get("siblings"), list):
        raise StrangeAnswerError
    commit = found.get("sha")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise StrangeAnswerError
    files: dict[str, RemoteFile] = {}
    for one in listed:
        file = _parse_file(one)
        if file.name in files:
            raise StrangeAnswerError(f"it lists {shown(file.name)} twice")
        files[file.name] = file
    return commit, files


def _parse_file(one: object) -> RemoteFile:
    name = one.get("rfilename") if isinstance(one, dict) else None
    if not isinstance(one, dict) or not isinstance(name, str):
        raise StrangeAnswerError
    if not _is_path(name):
        raise StrangeAnswerError(f"no repository holds a file {shown(name)!r}")
    lfs = one.get("lfs") or {}
    if not isinstance(lfs, dict):
        raise StrangeAnswerError
    n_bytes = one.get("size") if one.get("size") is not None else lfs.get("size")
    etag = lfs.get("sha256") if lfs else one.get("blobId")
    if type(n_bytes) is not int or not 0 <= n_bytes < _NO_FILE:
        raise StrangeAnswerError(f"it does not say how long {shown(name)} is")
    if etag is not None and not isinstance(etag, str):
        raise StrangeAnswerError
    return RemoteFile(name, n_bytes, etag)


def _is_path(name: str) -> bool:
    """Whether a name is one that Git could hold, and that a document could name."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in name and not {"", ".", ".."} & set(name.split("/"))


def _is_revision(revision: str) -> bool:
    """Whether a text may be a branch, tag or commit: Git has none that leads out of its folder."""
    return revision.isprintable() and not revision.startswith("/") and ".." not in revision


def _from_cache(repo: str, revision: str) -> Repository | None:
    """What the local cache knows as a revision; None where it holds no checkpoint's beginning of it."""
    anchors = (CONFIG, INDEX, f"model{SUFFIX}")
    paths = (_look_up(repo, name, revision) for name in anchors)
    folder = next((path.parent for path in paths if path is not None), None)
    if folder is None:
        return None
    cached = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }  # links that lead nowhere are no files
    files = {name: RemoteFile(name, path.stat().st_size, _etag_of(path)) for name, path in cached.items()}
    return Repository(repo, revision, folder.name, files, cached, asked=False)


def _etag_of(path: Path) -> str | None:
    """The ETag that a cached file is kept under; None where the cache holds plain files."""
    return path.resolve().name if path.is_symlink() else None
