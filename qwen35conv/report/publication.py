"""What goes to the Hub, and what went there."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

from qwen35conv.report.console import show_document
from qwen35conv.report.documents import schema
from qwen35conv.report.page import Page, show_page
from qwen35conv.report.words import counted, sized

if TYPE_CHECKING:
    from qwen35conv.push import Publication, Published


def show_push(publication: Publication, published: Published | None, *, as_json: bool) -> None:
    """Write what was sent to stdout, or, where nothing was `published`, what would be."""
    if as_json:
        show_document({"schema": schema("push"), **push_document(publication, published)})
    else:
        show_page(lambda page: build_push(page, publication, published), sys.stdout)


def push_document(publication: Publication, published: Published | None) -> dict[str, Any]:
    """A publication; `url` and `commit` are null where nothing was sent."""
    return {
        "dry_run": published is None,
        "repo": publication.repo,
        "private": publication.private,
        "folder": str(publication.folder),
        "url": None if published is None else published.url,
        "commit": None if published is None else published.commit,
        "files": [{"file": file, "n_bytes": n_bytes} for file, n_bytes in publication.files.items()],
        "card": publication.card,
    }


def build_push(page: Page, publication: Publication, published: Published | None) -> None:
    """The screen of a publication."""
    total = sum(n_bytes or 0 for n_bytes in publication.files.values())
    size = f"{counted(len(publication.files), 'file')} and the card, {sized(total)}"
    if published is not None:
        page.heading("Published ", (str(publication.folder), "cyan"), " → ", (published.url, "cyan"))
        page.line(f"{size}, commit ", (published.commit, "cyan"))
        page.heading("Next")
        page.line((shlex.join(["qwen35", "inspect", publication.repo]), "bold"), hang=4)
        return
    visible = "private" if publication.private else "public"
    page.heading("Would publish ", (publication.repo, "cyan"), f"  {visible}; nothing is sent")
    page.line(size)
    rows = [[file, "" if n is None else sized(n)] for file, n in publication.files.items()]
    page.table(rows, align="lr")
    page.heading("README.md")
    page.list(publication.card.splitlines())
