"""Sphinx extension: what the theme and Sphinx write amiss is mended on each page.

For ears and keyboards:
- a control is called by the words that are seen on it, not by others;
- what unfolds the pages below an entry of the sidebar has a name;
- the bibliography is no list, for its entries are no items of one;
- parameters on lines of their own are no list of definitions without terms.

For the scale: the icons come as fonts and again as a script of 1.5 MB; the fonts stay.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

LINES = re.compile(r'<dl>\n(<dd><em class="sig-param">.*?)</dl>\n', re.DOTALL)
MENDED = [
    (r"<(?:script|link)\b[^>]*/fontawesome/[^>]*\.js\b[^>]*>(?:</script>)?", ""),
    (r'(<button class="[^"]*search-button-field[^>]*?) title="Search"[^>]*>', r"\1>"),
    (r'<div role="list" class="citation-list">', '<div class="citation-list">'),
    (r'<summary aria-label="Toggle hidden content">', "<summary>"),
    (
        r'(<a class="(?:current )?reference internal"[^>]*>([^<]*)</a>'
        r"<details[^>]*><summary)>",
        r'\1 aria-label="Pages of \2">',
    ),
]


def on_lines(signature: re.Match) -> str:
    """The parameters of a signature, each on a line."""
    lines = signature[1].replace("<dd>", '<span class="sig-line">')
    return lines.replace("</dd>", "</span>")


def mended(page: str) -> str:
    """The page as it ought to be."""
    for pattern, better in MENDED:
        page = re.sub(pattern, better, page)
    return LINES.sub(on_lines, page)


def mend_pages(app: Sphinx, error: Exception | None) -> None:
    """Mend every page of a finished book."""
    if error is None and app.builder.format == "html":
        for path in Path(app.outdir).rglob("*.html"):
            page = path.read_text(encoding="utf-8")
            path.write_text(mended(page), encoding="utf-8")


def setup(app: Sphinx) -> dict:
    """Connect the extension."""
    app.connect("build-finished", mend_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
