"""Where links and buttons for the repository lead on the pages, beside what git has."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urldefrag

import pytest
import repository_links
from bs4 import BeautifulSoup
from test_html import soup  # parsed once for both

ROOT = Path(__file__).resolve().parents[2]


def links(page: BeautifulSoup) -> list[str]:
    """Where a page leads, to other hosts too; forms count as links."""
    found = [tag["href"] for tag in page.find_all(["a", "link"], href=True)]
    return found + [tag["action"] for tag in page.find_all("form", action=True)]


def test_links_to_the_repository_lead_to_what_git_has(book, page_path):
    found = links(soup(book / page_path))
    assert any(map(repository_links.is_own, found)), "no button for the repository"
    assert repository_links.complaints(found) == []


def test_buttons_open_the_source_of_the_page(book, page_path):
    place = repository_links.config()["repository"]
    stem = page_path.removesuffix(".html")
    sources = {f"{stem}.md", f"{stem}.ipynb"} & repository_links.tracked()
    edits = {link for link in links(soup(book / page_path)) if "/edit/" in link}
    assert edits <= {f"{place['url']}/edit/{place['branch']}/{s}" for s in sources}
    assert edits or not sources or stem == "genindex"  # which is no source of its own


@pytest.mark.parametrize("module", sorted(p.stem for p in ROOT.glob("api/*.md")))
def test_source_links_land_on_the_definition(book, module):
    page = soup(book / "api" / f"{module}.html")
    found = 0
    for entry in page.select("dl.py.function > dt, dl.py.class > dt"):
        link = entry.find("a", href=re.compile("_modules/"))
        if link is None:
            continue
        address, anchor = urldefrag(link["href"])
        block = soup((book / "api" / address).resolve()).find(id=anchor)
        name = entry["id"].rpartition(".")[2]
        defined = re.search(rf"^\s*(def|class) {name}\b", block.get_text(), re.M)
        assert defined, f"{link['href']} lands elsewhere"
        found += 1
    assert found or not page.select("dl.py.function, dl.py.class")
