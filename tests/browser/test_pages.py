"""The pages in a real browser, served from localhost, with no kernel behind them."""

from __future__ import annotations

import re

import pytest
from conftest import pages

# Console errors that are known and harmless: name, then pattern.
ALLOWED: dict[str, str] = {}

PHONE, DESK = {"width": 420, "height": 900}, {"width": 1280, "height": 900}
LATE = ".math"  # what scripts draw after the page is loaded
UNRENDERED_MATH = """
() => [...document.querySelectorAll(".math")]
  .filter(e => !e.querySelector("mjx-container") || e.querySelector("mjx-merror"))
  .map(e => e.textContent)
"""
TOO_WIDE = """
() => document.documentElement.scrollWidth > document.documentElement.clientWidth
  ? [...document.querySelectorAll("main :not(pre *)")]
      .filter(e => e.getBoundingClientRect().right > innerWidth)
      .map(e => e.tagName + "." + e.className).slice(0, 5)
  : null
"""
CONTRAST = """
() => {
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number);
                       return (0.3 * r + 0.6 * g + 0.1 * b) / 255; };
  const style = getComputedStyle(document.body);
  return light(style.color) - light(style.backgroundColor);
}
"""
SEEN = """
async e => {
  const image = e.querySelector("img");
  await image.decode();
  const said = [...e.querySelectorAll("output")].map(output => output.textContent);
  return [image.alt, image.src, ...said];
}
"""


class Watched:
    """A page that remembers what went wrong on it."""

    def __init__(self, browser, address: str, **how) -> None:
        self.address, self.wrong = address, []
        self.context = browser.new_context(viewport=DESK, **how)
        self.page = self.context.new_page()
        self.page.on("console", self.on_console)
        self.page.on("pageerror", lambda error: self.note(f"script: {error}"))
        self.page.on("request", self.on_request)
        self.page.on("response", self.on_response)

    def note(self, what: str) -> None:
        if not any(re.search(pattern, what) for pattern in ALLOWED.values()):
            self.wrong.append(what)

    def on_console(self, message) -> None:
        if message.type == "error":
            self.note(f"console: {message.text}")

    def on_request(self, request) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.note(f"request to another host: {request.url}")

    def on_response(self, response) -> None:
        if response.status >= 400:
            self.note(f"{response.status} for {response.url}")

    def open(self, path: str):
        self.page.goto(self.address + path)
        if self.page.locator(LATE).count():
            self.page.wait_for_load_state("networkidle")
        return self.page


@pytest.fixture
def watched(browser, address):
    page = Watched(browser, address)
    yield page
    page.context.close()


def test_page_is_whole(watched, page_path):
    page = watched.open(page_path)
    if page.locator(".math").count():
        page.wait_for_selector("mjx-container")
    assert page.evaluate(UNRENDERED_MATH) == []
    for size in (DESK, PHONE):
        page.set_viewport_size(size)
        for scheme, sign in (("light", -1), ("dark", 1)):
            page.emulate_media(color_scheme=scheme)
            page.wait_for_selector(f"html[data-theme={scheme}]")
            assert page.evaluate(TOO_WIDE) is None, f"{size['width']} px, {scheme}"
            assert sign * page.evaluate(CONTRAST) > 0.6, scheme
    assert watched.wrong == []


def with_figures(book) -> list[str]:
    """The pages that show a figure with sliders."""
    found = [
        p
        for p in pages()
        if 'class="explore"' in (book / p).read_text(encoding="utf-8")
    ]
    assert found, "no page has an interactive figure"
    return found


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_every_slider_moves_its_figure(watched, book, size):
    watched.page.set_viewport_size(size)
    for path in with_figures(book):
        page = watched.open(path)
        for figure in page.locator(".explore").all():
            for slider in figure.get_by_role("slider").all():
                before = figure.evaluate(SEEN)
                slider.press("ArrowRight")
                after = figure.evaluate(SEEN)
                assert before[0] and after[0] != before[0], "alternative text"
                assert after[1] != before[1], "picture"
                assert after[2:] != before[2:], "value"
                slider.press("ArrowLeft")
                assert figure.evaluate(SEEN) == before, "back again"
    assert watched.wrong == []


def test_figure_shows_its_first_state_without_scripts(browser, address, book):
    quiet = Watched(browser, address, java_script_enabled=False)
    for path in with_figures(book):
        figure = quiet.open(path).locator(".explore").first
        assert figure.locator("img").is_visible(), path
        assert figure.locator("img").get_attribute("alt"), path
        assert not figure.locator("input").first.is_visible(), path
    quiet.context.close()
    assert quiet.wrong == []


def test_search_finds_the_exported_class(watched):
    page = watched.open("search.html?q=MultiHeadAttention")
    page.wait_for_selector("#search-results li a")
    links = page.locator("#search-results li a").all_text_contents()
    assert any("attention" in link.lower() for link in links)
    assert watched.wrong == []
