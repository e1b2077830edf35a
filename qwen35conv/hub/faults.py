"""What goes wrong with the Hub, in the words of the person whom it meets."""

from __future__ import annotations

import email.utils
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import httpx2
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import parse_ratelimit_headers

from qwen35conv.errors import Qwen35ConvError, SourceError
from qwen35conv.facts.header import shown
from qwen35conv.hub.settings import endpoint

LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)
RESUMES = "what is finished is kept; the same command resumes"
_NETWORK = (httpx2.HTTPError, HfHubHTTPError, OfflineModeIsEnabled, HFValidationError, LocalTokenNotFoundError)

MakeError = Callable[..., Qwen35ConvError]


class StrangeAnswerError(Exception):
    """An answer that the Hub never gives; `str` says why, where that helps."""


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error speaks of."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def seconds_to_wait(headers: Mapping[str, str]) -> float | None:
    """How long the server asks to wait: Retry-After, as seconds or a date, or its own rate limit's reset."""
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def is_unreachable(error: BaseException) -> bool:
    """Whether the Hub could not be asked at all, so that what is known already has to do."""
    if isinstance(error, httpx2.ProxyError) or _tls(error) is not None:
        return False
    return isinstance(error, (httpx2.TransportError, OfflineModeIsEnabled)) or (status_of(error) or 0) >= 500


@contextmanager
def told(where: str, *, revision: str | None = None, make: MakeError = SourceError) -> Iterator[None]:
    """Turns what the Hub's client raises into an error of ours that `make` makes."""
    try:
        yield
    except _NETWORK as error:
        raise explained(error, where, revision=revision, make=make) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # what the client makes of odd answers
        raise explained(StrangeAnswerError(), where, make=make) from error


def explained(
    error: BaseException, where: str, *, revision: str | None = None, make: MakeError = SourceError
) -> Qwen35ConvError:
    """What to tell of an error of the Hub's client."""
    status = status_of(error)
    if isinstance(error, StrangeAnswerError):
        return make(
            f"{where}: {endpoint()} answers, but not as the Hub does{f': {error}' if str(error) else ''}",
            hint="check HF_ENDPOINT, and the network's login",
        )
    if isinstance(error, OfflineModeIsEnabled):
        return make(
            f"{where}: not in the local cache, and the Hub is not asked: HF_HUB_OFFLINE is set",
            hint="unset HF_HUB_OFFLINE, or download the repository first",
        )
    if isinstance(error, HFValidationError):
        return make(f"{where}: no valid name of a repository: {error}", hint="expected owner/name")
    if isinstance(error, GatedRepoError):
        return make(
            f"{where}: gated: its licence must be accepted before it can be read",
            hint=f"accept it at {endpoint()}/{where}, then {LOGIN}",
        )
    if isinstance(error, DisabledRepoError):
        return make(f"{where}: the repository was disabled", hint=f"see {endpoint()}/{where}")
    if isinstance(error, RevisionNotFoundError):
        return make(f"{where}: no revision {shown(revision or 'main')} in it", hint="give a branch, a tag or a commit")
    if isinstance(error, RepositoryNotFoundError):
        return make(
            f"{where}: no such repository at {endpoint()}, or a private one",
            hint=f"check the name; a folder of this name was not found either. Where it is private, {LOGIN}",
        )
    if isinstance(error, EntryNotFoundError):
        return make(f"{where}: no such file in the repository", hint="the repository changed; run the command again")
    if isinstance(error, LocalTokenNotFoundError):
        return make(f"{where}: you are not logged in to {endpoint()}", hint=LOGIN)
    if status == 401:
        return make(f"{where}: the Hub does not accept your token", hint=LOGIN)
    if status == 403:
        return make(f"{where}: access is forbidden{_said(error)}", hint=f"your token lacks the right to it; {LOGIN}")
    if status == 429:
        return make(f"{where}: the Hub's rate limit is reached", hint=f"wait some minutes, or {LOGIN}; {RESUMES}")
    if status is not None and status >= 500:
        return make(f"{where}: the Hub is out of order (HTTP {status})", hint=f"try again later; {RESUMES}")
    if status is not None:
        return make(f"{where}: the Hub refuses (HTTP {status}{_said(error)})", hint=f"see {endpoint()}/{where}")
    if isinstance(error, httpx2.ProxyError):
        return make(f"{where}: the proxy fails: {_text(error)}", hint="check HTTPS_PROXY and NO_PROXY")
    if (tls := _tls(error)) is not None:
        return make(
            f"{where}: {endpoint()} can't be trusted: TLS fails: {tls}",
            hint="check the clock and certificates; SSL_CERT_FILE names those of a company's proxy",
        )
    if isinstance(error, httpx2.TimeoutException):
        return make(f"{where}: the Hub does not answer in time", hint=f"check the network; {RESUMES}")
    return make(f"{where}: {endpoint()} can't be reached: {_text(error)}", hint=f"check the network; {RESUMES}")


def _said(error: BaseException) -> str:
    text = getattr(error, "server_message", None)
    return f": {shown(text)}" if isinstance(text, str) and text else ""


def _text(error: BaseException) -> str:
    return shown(str(error).strip() or type(error).__name__)


def _tls(error: BaseException) -> str | None:
    """What TLS has against the other side, where that is what failed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return _text(cause)
        cause = cause.__cause__ or cause.__context__
    return _text(error) if isinstance(error, httpx2.ConnectError) and "CERTIFICATE" in str(error).upper() else None
