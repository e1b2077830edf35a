"""The Hugging Face Hub: repositories read by byte ranges, and results published."""

from __future__ import annotations

from qwen35conv.errors import SourceError

try:
    from huggingface_hub import get_session  # noqa: F401
except ValueError as error:  # it reads addresses and numbers from the environment as soon as it is imported
    raise SourceError(
        f"a setting of the Hub's client can't be used: {error}",
        hint="check HF_ENDPOINT, HF_HUB_DOWNLOAD_TIMEOUT, and the other variables whose names begin with HF_",
    ) from error
