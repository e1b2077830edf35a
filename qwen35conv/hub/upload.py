"""A folder sent to the Hub as one commit: either all of it is there, or none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

from qwen35conv.errors import DestinationError, Qwen35ConvError
from qwen35conv.facts.checkpoint import few
from qwen35conv.facts.header import shown
from qwen35conv.hub.faults import LOGIN, StrangeAnswerError, explained, status_of, told
from qwen35conv.hub.repository import quietly
from qwen35conv.hub.settings import check_settings, endpoint

CARD = "README.md"
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".npz", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True, slots=True)
class Published:
    """A commit that holds a result."""

    url: str
    commit: str


def check_repository(repo: str, files: Collection[str] | None = None) -> None:
    """Raises DestinationError where a repository can't be written: no login, or it holds another model's weights.

    `files` are those to be sent; without them any weights are another model's.
    """
    check_settings(DestinationError)
    with told(repo, make=DestinationError), quietly():
        HfApi().whoami()
        try:
            found = HfApi().model_info(repo).siblings or []
        except RepositoryNotFoundError:
            return  # it will be made
    others = sorted(one.rfilename for one in found if one.rfilename.endswith(_WEIGHTS))
    if files is not None:
        others = [name for name in others if name not in files]
    if others:
        raise DestinationError(
            f"{repo}: exists, and holds other weights: {few(others)}",
            hint="choose another name, or remove the repository's files first",
        )


def upload(
    repo: str, files: Mapping[str, Path], card: str, *, private: bool, message: str, resume: str, progress: bool
) -> Published:
    """The commit that now holds `files` and the card, in a repository that is made where it does not exist.

    Raises DestinationError where it can't be written; the same call resumes, and `resume` says how a person does.
    """
    api = HfApi()
    operations = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
    operations.append(CommitOperationAdd(CARD, card.encode()))
    try:
        with quietly(progress):
            url = api.create_repo(repo, private=private or None, exist_ok=True)
            done = api.create_commit(repo, operations, commit_message=message)
    except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
        raise _refused(repo, error, resume) from error
    except (KeyError, TypeError, AttributeError) as error:  # what the client makes of odd answers
        raise DestinationError(str(explained(StrangeAnswerError(), repo)), hint=resume) from error
    except (OSError, RuntimeError, ValueError) as error:  # of files that can't be read, of hf_xet, of an odd answer
        cause = error.__cause__
        if isinstance(cause, (httpx2.HTTPError, OfflineModeIsEnabled)):
            raise _refused(repo, cause, resume) from error
        raise DestinationError(f"{repo}: the upload fails: {shown(str(error).strip())}", hint=resume) from error
    return Published(str(url), done.oid)


def _refused(repo: str, error: Exception, resume: str) -> Qwen35ConvError:
    if isinstance(error, RepositoryNotFoundError) or status_of(error) in (401, 403):
        said = error.server_message if isinstance(error, HfHubHTTPError) and error.server_message else "no right to it"
        return DestinationError(
            f"{repo}: can't be written at {endpoint()}: {said}",
            hint=f"use your own name or an organisation's that you may write to; {LOGIN}",
        )
    found = explained(error, repo, make=DestinationError)
    return DestinationError(str(found), hint=resume)
