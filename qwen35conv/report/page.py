"""A screen for people: headings, wrapped lines and tables, written once at the stream's width."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from qwen35conv.report.console import clean, emit, is_plain, n_columns

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Span = str | tuple[str, str]  # text, or text and its style
_INDENT = 2
_GAP = 2
_PICTURE_COLUMNS = 104


class Page:
    """Writes to a rich console; every text that comes in is cleaned of control characters."""

    def __init__(self, console: Console) -> None:
        """Write to `console`."""
        self._console = console
        self._is_empty = True

    @property
    def width(self) -> int:
        """Columns inside the indent."""
        return self._console.width - _INDENT

    def heading(self, title: Span, *more: Span) -> None:
        """A heading, with a blank line before all but the first."""
        if not self._is_empty:
            self._console.print()
        self._is_empty = False
        self._wrapped(assembled((title, "bold") if isinstance(title, str) else title, *more), 0, _INDENT)

    def line(self, *spans: Span, hang: int = 0) -> None:
        """A line under the heading; what is too long wraps, `hang` columns further in."""
        self._wrapped(assembled(*spans), _INDENT, _INDENT + hang)

    def table(self, rows: Sequence[Sequence[Span]], *, align: str, head: Sequence[str] = ()) -> None:
        """Rows in columns; `align` has an l or an r for each. A column of l gives way where the width is short."""
        from rich.padding import Padding
        from rich.table import Table

        cells = [[assembled(cell) for cell in row] for row in rows]
        shown = [i for i in range(len(align)) if (head and head[i]) or any(len(row[i]) for row in cells)]
        table = Table(box=None, show_header=bool(head), pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
        for i in shown:  # a column without a character would take one from another
            table.add_column(
                head[i] if head else "",
                justify="right" if align[i] == "r" else "left",
                no_wrap=align[i] == "r",
                overflow="fold",
            )
        for row in cells:
            table.add_row(*(row[i] for i in shown))
        self._console.print(Padding(table, (0, 0, 0, _INDENT), expand=False))

    def list(self, lines: Sequence[str]) -> None:
        """Long lists, a line each, never wrapped: names are to be searched and copied."""
        from rich.text import Text

        text = "\n".join(" " * _INDENT + clean(line) for line in lines)
        self._console.print(Text(text), soft_wrap=True)

    def _wrapped(self, text: Text, indent: int, hang: int) -> None:
        width = max(self._console.width - hang, 8)
        for i, line in enumerate(text.wrap(self._console, width)):
            line.rstrip()
            line.pad_left(hang if i else indent)
            self._console.print(line, soft_wrap=True)


def assembled(*spans: Span) -> Text:
    """Cleaned spans as one text."""
    from rich.text import Text

    text = Text()
    for span in spans:
        content, style = (span, "") if isinstance(span, str) else span
        text.append(clean(content), style or None)
    return text


def show_page(build: Callable[[Page], None], stream: TextIO) -> None:
    """Write a page to a stream, at its width and with colour where it may have any."""
    from rich.console import Console

    plain = is_plain(stream)
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        width=n_columns(stream),
        force_terminal=not plain,
        color_system=None if plain else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )
    build(Page(console))
    emit("".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines()), stream)


def build_picture(build: Callable[[Page], None], suffix: str, title: str) -> str:
    """A page as an HTML or SVG document that asks nothing of the network."""
    import re

    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        width=_PICTURE_COLUMNS,
        record=True,
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    build(Page(console))
    if suffix == ".html":
        return console.export_html(inline_styles=True)
    return re.sub(r"@font-face\s*\{.*?\}\s*", "", console.export_svg(title=clean(title)), flags=re.DOTALL)
