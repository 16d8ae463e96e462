"""What is mended on finished pages."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("myst_nb", reason="what builds the book is not installed")
from bs4 import BeautifulSoup

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "site"))
mended_pages = importlib.import_module("mended_pages")


def test_icons_are_loaded_once():
    icons = "_static/vendor/fontawesome/6.5.2"
    kept = f'<link href="{icons}/css/all.min.css" rel="stylesheet" />'
    script = f'<script src="{icons}/js/all.min.js?digest=1"></script>'
    early = f'<link rel="preload" as="script" href="{icons}/js/all.min.js?digest=1" />'
    assert mended_pages.mended(kept + early + script + "<p>") == kept + "<p>"


def test_controls_are_called_by_what_is_seen_on_them():
    page = """
    <button class="btn search-button-field" title="Search" aria-label="Search"
     data-bs-placement="bottom"><span>Search</span><kbd>K</kbd></button>
    <summary aria-label="Toggle hidden content"><p>Show code</p></summary>
    """
    shown = BeautifulSoup(mended_pages.mended(page), "html.parser")
    assert shown.button.attrs == {"class": ["btn", "search-button-field"]}
    assert shown.summary.attrs == {}


@pytest.mark.parametrize("kind", ["reference internal", "current reference internal"])
def test_toggle_in_the_sidebar_is_named_after_its_entry(kind):
    link = f'<a class="{kind}" href="api.html">Package reference</a>'
    page = f"{link}<details><summary><span></span></summary></details>"
    shown = BeautifulSoup(mended_pages.mended(page), "html.parser")
    assert shown.summary["aria-label"] == "Pages of Package reference"


def test_list_without_items_is_none():
    page = '<div role="list" class="citation-list"><div role="doc-biblioentry">'
    shown = BeautifulSoup(mended_pages.mended(page), "html.parser")
    assert shown.div.attrs == {"class": ["citation-list"]}


def test_parameters_are_lines_not_definitions():
    name = '<em class="sig-param">{}</em>,'
    lines = "".join(f"<dd>{name.format(n)}</dd>\n" for n in "ab")
    field = "<dl><dt>Returns</dt><dd>c</dd></dl>"
    page = f"<dl><dt>f(\n\n<dl>\n{lines}</dl>\n)</dt><dd>{field}</dd></dl>"
    shown = BeautifulSoup(mended_pages.mended(page), "html.parser")
    assert [line.em.text for line in shown.select("dt .sig-line")] == ["a", "b"]
    assert not shown.select("dt dl") and len(shown.select("dd dl dd")) == 1


def test_every_page_of_the_book_is_mended(tmp_path):
    page = tmp_path / "api" / "a.html"
    page.parent.mkdir()
    page.write_text('<summary aria-label="Toggle hidden content">', encoding="utf-8")
    app = SimpleNamespace(builder=SimpleNamespace(format="html"), outdir=tmp_path)
    mended_pages.mend_pages(app, None)
    assert page.read_text(encoding="utf-8") == "<summary>"
