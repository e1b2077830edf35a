"""Every error raised on purpose."""

from __future__ import annotations


class Qwen35ConvError(Exception):
    """A problem with what we were given; `hint` says what to do next, `exit_code` what the command returns."""

    exit_code = 1
    usual_hint: str | None = None  # where nothing better is known

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint or self.usual_hint


class CheckpointError(Qwen35ConvError):
    """A readable checkpoint that is wrong or not for us: an unknown name, a missing expert, another architecture."""

    usual_hint = "export the checkpoint again, or fetch it anew"


class ConventionError(CheckpointError):
    """A checkpoint whose generation is broken, mixed or unknown, so that converting it would be a guess."""


class SourceError(Qwen35ConvError):
    """A source that can't be read as a checkpoint: missing, incomplete or changing files, no access."""

    exit_code = 3
    usual_hint = "check that it is there, whole and readable, or fetch it again"


class HeaderError(SourceError):
    """A file that is no valid safetensors file."""

    usual_hint = "the file is damaged or was written by a broken exporter: fetch or export it again"


class DestinationError(Qwen35ConvError):
    """A destination that can't be written: it exists, is the source, is full, or is not ours to write."""

    exit_code = 4
    usual_hint = "run the same command again, or choose another destination"


class BusyError(DestinationError):
    """A destination that another process is writing."""
