"""The Hugging Face Hub: repositories read by byte ranges, and results published."""

from __future__ import annotations

from qwen35conv.errors import SourceError

try:
    import huggingface_hub.constants  # noqa: F401
except ValueError as error:  # it reads its numbers from the environment as soon as it is imported
    raise SourceError(
        f"a setting of the Hub's client can't be used: {error}",
        hint="check the variables whose names begin with HF_, such as HF_HUB_DOWNLOAD_TIMEOUT",
    ) from error
