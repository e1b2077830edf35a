"""One repository at one commit: what is in it, and which of its files lie in the local cache."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from qwen35conv.errors import DestinationError, SourceError
from qwen35conv.facts.checkpoint import CONFIG, INDEX, SUFFIX
from qwen35conv.hub.faults import RETRIED_STATUSES, explained, is_unreachable, seconds_to_wait, status_of
from qwen35conv.hub.transport import RemoteFile

_MAX_TRIES = 6
_WAIT = 0.5  # seconds
_LONGEST_ASKED = 330.0


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository as one commit has it."""

    repo: str
    revision: str
    commit: str
    files: Mapping[str, RemoteFile]
    cached: Mapping[str, Path]  # those whose bytes lie in the local cache, whole
    asked: bool  # whether the Hub said what `revision` is; else the local cache did


def open_repository(repo: str, revision: str | None = None) -> Repository:
    """The repository at a branch, tag or commit (its main branch without one), which is resolved once.

    Where the Hub can't be asked, what the local cache holds has to do. Raises SourceError where there is no such
    repository or revision, no access, or nothing in the cache.
    """
    wanted = revision or constants.DEFAULT_REVISION
    try:
        if constants.is_offline_mode():
            raise OfflineModeIsEnabled("offline")
        info = _ask(repo, wanted)
    except (httpx2.HTTPError, OfflineModeIsEnabled, HFValidationError) as error:
        found = _from_cache(repo, wanted) if is_unreachable(error) else None
        if found is None:
            raise explained(error, repo, revision=wanted) from error
        return found
    except (ValueError, KeyError, TypeError) as error:
        raise _no_hub(repo) from error
    if info.sha is None:
        raise _no_hub(repo)
    commit = info.sha
    files = {one.rfilename: _remote_file(one) for one in info.siblings or ()}
    return Repository(repo, wanted, commit, files, cached_files(repo, commit, files), asked=True)


def cached_files(repo: str, commit: str, files: Mapping[str, RemoteFile]) -> Mapping[str, Path]:
    """The files of a commit that lie in the local cache, whole."""
    found = {}
    for name, file in files.items():
        path = try_to_load_from_cache(repo, name, revision=commit)
        if isinstance(path, str) and Path(path).is_file() and Path(path).stat().st_size == file.n_bytes:
            found[name] = Path(path)
    return found


def cache_folder() -> Path:
    """The local cache, which need not exist."""
    return Path(constants.HF_HUB_CACHE)


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Whether the Hub's client draws its own progress inside the block."""
    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def download(repository: Repository, names: Iterable[str], *, progress: bool = False) -> Mapping[str, Path]:
    """The files that lie in the local cache once every named one was downloaded the ordinary way (Xet).

    `progress` lets the Hub's client draw bars. Raises SourceError where one can't be had, DestinationError where the
    cache can't be written.
    """
    missing = [re.sub(r"([\[*?])", r"[\1]", name) for name in names if name not in repository.cached]
    if missing:
        try:
            with progress_bars(progress):
                folder = snapshot_download(repository.repo, revision=repository.commit, allow_patterns=missing)
            if repository.revision != repository.commit:
                _note_revision(Path(folder).parents[1], repository)
        except EntryNotFoundError as error:
            raise explained(error.__cause__ or error, repository.repo, revision=repository.commit) from error
        except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
            raise explained(error, repository.repo, revision=repository.commit) from error
        except OSError as error:
            raise DestinationError(
                f"{cache_folder()}: the download fails: {error.strerror or error}",
                hint="free some space, or set HF_HOME to a folder that can be written",
            ) from error
        except RuntimeError as error:  # hf_xet raises nothing narrower
            raise SourceError(
                f"{repository.repo}: the download fails: {error}",
                hint="the same command resumes; or leave --via-cache out",
            ) from error
    return cached_files(repository.repo, repository.commit, repository.files)


def _note_revision(folder: Path, repository: Repository) -> None:
    """Let the cache know which commit a branch or tag is, so that it is found offline."""
    path = folder / "refs" / repository.revision
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(repository.commit)


def _ask(repo: str, revision: str) -> ModelInfo:
    """What the Hub says of a repository; asked again where it is busy. Raises what the Hub's client raises."""
    for attempt in range(_MAX_TRIES):
        try:
            return HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=30)
        except HfHubHTTPError as error:
            if status_of(error) not in RETRIED_STATUSES or attempt == _MAX_TRIES - 1:
                raise
            after = seconds_to_wait(error.response.headers)
            if after is not None and after > _LONGEST_ASKED:
                raise
            threading.Event().wait(_WAIT * 2**attempt if after is None else after)
        except (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.TimeoutException) as error:
            if isinstance(error, httpx2.ConnectError) or attempt == _MAX_TRIES - 1:
                raise
            threading.Event().wait(_WAIT * 2**attempt)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _no_hub(repo: str) -> SourceError:
    return SourceError(
        f"{repo}: {constants.ENDPOINT} answers, but not as the Hub does",
        hint="check HF_ENDPOINT, and the network's login",
    )


def _remote_file(one: RepoSibling) -> RemoteFile:
    n_bytes = one.size if one.size is not None or one.lfs is None else one.lfs.size
    if n_bytes is None:
        raise SourceError(f"{one.rfilename}: the Hub does not say how long it is", hint="check HF_ENDPOINT")
    return RemoteFile(one.rfilename, n_bytes, one.lfs.sha256 if one.lfs is not None else one.blob_id)


def _from_cache(repo: str, revision: str) -> Repository | None:
    """What the local cache knows as a revision; None where it holds no checkpoint's beginning of it."""
    anchors = (CONFIG, INDEX, f"model{SUFFIX}")
    paths = (try_to_load_from_cache(repo, name, revision=revision) for name in anchors)
    folder = next((Path(path).parent for path in paths if isinstance(path, str)), None)
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
