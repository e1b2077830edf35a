"""The streams: what may go to each, how wide it is, and how text and JSON get there whole."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from qwen35conv.errors import DestinationError, Qwen35ConvError
from qwen35conv.report.documents import error_document

PIPE_COLUMNS = 100  # where no terminal says how wide it is
_PATIENCE = 0.3  # seconds before a bar appears
_LEAST_COLUMNS = 24
# For streams that can't carry them: an ASCII look-alike of each sign that the screens use.
_ASCII = str.maketrans("▁▂▃▄▅▆▇█·→✓✗…", "_.-~=+*#.>+x~")


def is_plain(stream: TextIO) -> bool:
    """Whether a stream gets neither colour nor progress: no terminal, a dumb one, or NO_COLOR set."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb" or not stream.isatty()


def shows_progress() -> bool:
    """Whether people watch: stderr may get progress."""
    return not is_plain(sys.stderr)


def n_columns(stream: TextIO) -> int:
    """The width of a stream: COLUMNS, then the terminal's own."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return max(int(given), _LEAST_COLUMNS)
    try:
        return max(os.get_terminal_size(stream.fileno()).columns, _LEAST_COLUMNS)
    except (OSError, ValueError, AttributeError):  # no terminal, or no file behind the stream
        return PIPE_COLUMNS


def clean(text: str) -> str:
    """Text without control characters or terminal escapes: they stand as escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def emit(text: str, stream: TextIO) -> None:
    """Write text, with look-alikes where the stream's encoding lacks a sign.

    Raises DestinationError where standard output takes no more; what standard error does not take is lost.
    """
    encoding = stream.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # Python would fail once more when it closes it
        if stream is sys.stdout:
            text = f"standard output can't be written: {error.strerror or error}"
            raise DestinationError(text, hint="what was asked for is done; only its report is lost") from error


def show_document(document: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Write one JSON document to stdout, in ASCII, so that any encoding carries it; without an indent on one line."""
    emit(json.dumps(document, indent=indent, allow_nan=False) + "\n", sys.stdout)


def show_error(error: Qwen35ConvError, *, command: str = "", as_json: bool = False) -> None:
    """Write an error and its hint, a line each, to stderr; with `as_json` also the error document to stdout."""
    if as_json:
        show_document(error_document(error, command), indent=None if command == "batch" else 2)
    bold, cyan, off = ("", "", "") if is_plain(sys.stderr) else ("\x1b[1;31m", "\x1b[36m", "\x1b[0m")
    lines = [f"{bold}error:{off} {clean(str(error))}"]
    if error.hint:
        lines.append(f"{cyan}hint:{off} {clean(error.hint)}")
    emit("\n".join(lines) + "\n", sys.stderr)


@contextmanager
def progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A function to be told of bytes as they are done, from any thread; a bar on stderr where that is a terminal."""
    if is_plain(sys.stderr):
        yield lambda n_bytes: None
        return
    from tqdm import tqdm

    lock = threading.Lock()
    with tqdm(
        total=total_bytes,
        desc=clean(title),
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        leave=False,
        dynamic_ncols=True,
    ) as bar:

        def on_bytes(n_bytes: int) -> None:
            with lock:
                bar.update(n_bytes)

        yield on_bytes


@contextmanager
def steps(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """A function to be told what is done of how many, step after step; on a terminal a bar for each that takes long."""
    if is_plain(sys.stderr):
        yield lambda what, done, total: None
        return
    from tqdm import tqdm

    bars: dict[str, tqdm[Any]] = {}

    def on_progress(what: str, done: int, total: int) -> None:
        if what not in bars:
            for bar in bars.values():
                bar.close()
            bars[what] = tqdm(
                total=total,
                desc=clean(f"{title}: {what}"),
                file=sys.stderr,
                leave=False,
                dynamic_ncols=True,
                delay=_PATIENCE,
            )
        bars[what].update(done - bars[what].n)

    try:
        yield on_progress
    finally:
        for bar in bars.values():
            bar.close()
