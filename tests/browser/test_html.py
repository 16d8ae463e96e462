"""The built pages as files: where they link and what they load."""

from __future__ import annotations

import functools
import html
import json
import re
import subprocess
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest
import yaml
from bs4 import BeautifulSoup
from conftest import is_chapter, on

ROOT = Path(__file__).resolve().parents[2]
VIEW = "application/vnd.jupyter.widget-view+json"
LOADED = {"script": "src", "img": "src", "source": "src", "iframe": "src"}
LOADED_LINKS = {"stylesheet", "icon", "preload", "shortcut", "manifest"}


@functools.cache
def soup(path: Path) -> BeautifulSoup:
    """The parsed page."""
    return BeautifulSoup(path.read_text(encoding="utf-8"), "lxml")


@functools.cache
def ids(path: Path) -> set[str]:
    """The anchors of a page, which need not be parsed for them."""
    found = re.findall(r'<[^<>]*\sid="([^"]*)"', path.read_text(encoding="utf-8"))
    return set(map(html.unescape, found))


@functools.cache
def tracked() -> set[str]:
    """The paths in git at the present commit."""
    command = ["git", "ls-tree", "-r", "--name-only", "-z", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return set(done.stdout.decode("utf-8").split("\0"))


def loaded(page: BeautifulSoup) -> list[str]:
    """The addresses that a browser loads to show a page."""
    found = [tag.get(LOADED[tag.name], "") for tag in page.find_all(list(LOADED))]
    for link in page.find_all("link"):
        if LOADED_LINKS & set(link.get("rel", [])):
            found.append(link["href"])
    return [address for address in found if address]


def test_page_loads_nothing_from_another_host(book, page_path):
    addresses = loaded(soup(book / page_path))
    assert addresses
    assert [a for a in addresses if urlparse(a).netloc] == []


def test_style_sheets_and_own_scripts_name_no_other_host(book):
    checked = [*book.glob("_static/**/*.css"), book / "_static" / "page.js"]
    for path in checked:
        text = path.read_text(encoding="utf-8")
        for form in ("url(http", "url(//", 'url("http', "url('http", '@import "http'):
            at = text.find(form)
            assert at < 0, f"{path.name} has {text[at : at + 80]}"


def test_internal_links_lead_somewhere(book, page_path):
    path = book / page_path
    broken = []
    for tag in soup(path).find_all("a", href=True):
        address, anchor = urldefrag(tag["href"])
        if urlparse(address).scheme or address.startswith("//"):
            continue
        target = (path.parent / unquote(address)).resolve() if address else path
        lost = (
            target.suffix == ".html" and anchor and unquote(anchor) not in ids(target)
        )
        if not target.is_file() or lost:
            broken.append(tag["href"])
    assert broken == []


def config() -> dict:
    """The book's configuration."""
    return yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))


def colab_links(page: BeautifulSoup) -> set[str]:
    """Where the Colab buttons of a page lead."""
    links = (tag["href"] for tag in page.find_all("a", href=True))
    return {link for link in links if "//colab." in link}


def test_case_48_colab_button_opens_the_committed_notebook(book, page_path):
    links = colab_links(soup(book / page_path))
    source = page_path.removesuffix(".html") + ".ipynb"
    if not (ROOT / source).is_file():
        assert links == set(), "only notebooks can be opened in Colab"
        return
    place = config()["repository"]
    owner_and_name = urlparse(place["url"]).path.strip("/")
    host = config()["launch_buttons"]["colab_url"]
    branch = place["branch"]
    assert links == {f"{host}/github/{owner_and_name}/blob/{branch}/{source}"}
    assert source in tracked(), f"{source} is not committed"


def views(path: Path) -> int:
    """How many widgets a notebook shows."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return sum(VIEW in output.get("data", {}) for output in outputs)


@on(is_chapter)
def test_case_47_each_widget_is_a_figure_whose_frames_have_words(book, page_path):
    page = book / page_path
    figures = soup(page).select(".cell_output .explore")
    assert len(figures) == views(ROOT / "chapters" / f"{page.stem}.ipynb")
    for figure in figures:
        frames = json.loads(figure["data-frames"])
        assert all((page.parent / address).is_file() for address, _ in frames)
        words = [alt for _, alt in frames]
        assert all(words) and len(set(words)) == len(words)


def test_pictures_have_an_alternative_text(book, page_path):
    article = soup(book / page_path).find("article") or soup(book / page_path)
    silent = [
        tag.get("src", "")[:60]
        for tag in article.find_all("img")
        if tag.get("alt", "").strip() in ("", tag.get("src")) or "_images" in tag["alt"]
    ]
    assert silent == []


def test_directives_of_the_exporter_are_not_shown(book, page_path):
    shown = [pre.get_text() for pre in soup(book / page_path).select(".cell_input pre")]
    assert [code for code in shown if code.startswith("#|")] == []


def badges(page: BeautifulSoup) -> list[str]:
    """Where the lines above exported cells lead."""
    return [tag.a["href"] for tag in page.select(".export-badge")]


@pytest.mark.parametrize("module", sorted(p.stem for p in ROOT.glob("api/*.md")))
def test_module_and_its_sections_link_to_each_other(book, module):
    path = book / "api" / f"{module}.html"
    entries = soup(path).select("dl.py.function > dt, dl.py.class > dt")
    own = [dt for dt in entries if dt["id"].startswith(f"transformer.{module}.")]
    own = [dt for dt in own if dt["id"].count(".") == 2]
    assert own
    for dt in own:
        for link in dt.find_next_sibling("dd").find_all("a", class_="reference"):
            if link.parent.get_text().startswith("Explained in"):
                break
        else:
            pytest.fail(f"{dt['id']} leads to no section")
        address, anchor = urldefrag(link["href"])
        chapter = (path.parent / address).resolve()
        section = soup(chapter).find(id=unquote(anchor))
        back = {urldefrag(href)[1].split(".")[1] for href in badges(section)}
        assert back <= {module, f"module-transformer.{module}".split(".")[1]}
        name = dt["id"].rsplit(".", 1)[1]
        shown = [pre.get_text() for pre in section.select("pre")]
        assert any(f" {name}" in code or f"{name} =" in code for code in shown)
