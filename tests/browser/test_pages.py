"""The pages in a real browser, served from localhost, with no kernel behind them.

Each page is loaded once, into an empty cache, and its tests share it. What depends on
the width is seen at both widths, what depends on colours in both themes.
"""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from bs4 import BeautifulSoup
from conftest import DESK, PHONE, ROOT, Watched, pages
from playwright.sync_api import expect

AXE = ROOT / "site" / "vendor" / "tests" / "axe.min.js"
COLOURS, SIZES = ["color-contrast", "link-in-text-block"], ["target-size"]
SHEET = {"width": 718, "height": 1047}  # A4 without margins of 1 cm
HEAVIEST = 1.5e6  # bytes of a page with all that it loads
SLOWEST = 1000  # milliseconds until text is seen
SENTENCE = 100  # milliseconds in which one sentence alone is seen, on an idle machine
# What axe-core finds and we cannot mend: a rule and a selector, with the reason.
AXE_ALLOWED: dict[tuple[str, str], str] = {}


def test_nothing_goes_wrong_on_a_page(opened):
    for size in (DESK, PHONE):
        for scheme, sign in (("light", -1), ("dark", 1)):
            opened.show(size, scheme)
            wide = opened.page.evaluate("checks.tooWide()")
            assert wide is None, f"{size['width']} px, {scheme}"
            assert sign * opened.page.evaluate("checks.contrast()") > 0.6, scheme
    assert opened.wrong == []


def test_math_is_typeset(opened):
    assert opened.page.evaluate("checks.unsetMath()") == [[], 0]
    assert opened.page.evaluate("checks.rawMath()") == []


def test_pictures_have_words(opened):
    assert opened.page.evaluate("checks.silentPictures()") == []


def axe(page, **options) -> list[list[str]]:
    """The serious and critical violations that are not allowed."""
    return page.evaluate("args => checks.axe(args)", [list(AXE_ALLOWED), options])


def test_axe_finds_nothing_grave(opened):
    """All rules at 1280 pixels.

    At 420 the sizes and colours of what is seen only there; dark changes only colours.
    """
    opened.show(DESK)
    opened.page.evaluate(AXE.read_text(encoding="utf-8"))
    opened.page.evaluate("checks.cut()")
    assert axe(opened.page) == []
    opened.show(DESK, "dark")
    assert axe(opened.page, runOnly=COLOURS) == [], "dark"
    opened.show(PHONE)
    assert axe(opened.page, runOnly=[*COLOURS, *SIZES]) == [], "420 pixels"
    opened.page.evaluate("uncut()")


ONE_OF_EACH_KIND = {
    "index.html",
    "claims.html",
    "search.html",
    "api/attention.html",
    "chapters/01_multi_head_attention.html",
}


def test_keyboard_reaches_every_control(opened, page_path):
    """At 420 pixels those that are seen only there: the theme's, alike on all pages."""
    for size in (DESK, PHONE) if page_path in ONE_OF_EACH_KIND else (DESK,):
        opened.show(size)
        left = opened.page.evaluate("checks.listen()")
        # Once around, from anywhere; what scrolls gets the focus too.
        for _ in range(6 + left // 4):
            for _ in range(20):
                opened.page.keyboard.press("Tab")
            left, faults, missed = opened.page.evaluate("tabbed()")
            if not left:
                break
        opened.page.evaluate("stopListening()")
        assert missed == [], f"{size['width']} pixels: not reached"
        assert faults == [], f"{size['width']} pixels"


def test_page_can_be_printed(opened):
    """On A4, from a dark page as from a light one."""
    for scheme in ("light", "dark"):
        opened.show(SHEET, scheme, media="print")
        opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        ground, faults = opened.page.evaluate("checks.printed()")
        opened.page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert faults == [], scheme
        assert ground in {"rgb(255, 255, 255)", "rgba(0, 0, 0, 0)"}, scheme


def wait_for_text(browser, address: str, path: str) -> float:
    """Milliseconds until a page shows text, on a machine with nothing else to do.

    One sentence alone, shown just before, says how busy this one is.
    """
    fresh = Watched(browser, address)
    fresh.page.goto("data:text/html,<p>One sentence alone.")
    busy = max(1, fresh.page.evaluate("checks.firstText()") / SENTENCE)
    fresh.page.goto(address + path)
    late = fresh.page.evaluate("checks.firstText()") / busy
    fresh.context.close()
    return late


def test_page_is_light_and_soon_shows_text(opened, browser, address, page_path):
    assert opened.n_bytes_first <= HEAVIEST
    first = opened.page.evaluate("checks.firstText()")
    for _ in range(4):  # the best of five: a slow page is always late
        if first > SLOWEST:
            first = min(first, wait_for_text(browser, address, page_path))
    assert first <= SLOWEST


def with_figures(book) -> list[str]:
    """The pages that show a figure with sliders."""
    mark = 'class="explore"'
    found = [p for p in pages() if mark in (book / p).read_text(encoding="utf-8")]
    assert found, "no page has an interactive figure"
    return found


def test_every_slider_moves_its_figure(opened):
    for size in (DESK, PHONE):
        opened.show(size)
        for figure in opened.page.locator(".explore").all():
            sliders = figure.get_by_role("slider").all()
            assert sliders and len(sliders) == figure.locator("input").count()
            for slider in sliders:
                before = figure.evaluate("e => checks.seen(e)")
                slider.press("ArrowRight")
                after = figure.evaluate("e => checks.seen(e)")
                assert before[0] and after[0] != before[0], "alternative text"
                assert after[1] != before[1], "picture"
                assert after[2:] != before[2:], "value"
                slider.press("ArrowLeft")
                assert figure.evaluate("e => checks.seen(e)") == before, "back again"
    assert opened.wrong == []


def test_figure_shows_its_first_state_without_scripts(browser, address, book):
    quiet = Watched(browser, address, java_script_enabled=False)
    for path in with_figures(book):
        figure = quiet.open(path).locator(".explore").first
        assert figure.locator("img").is_visible(), path
        assert figure.locator("img").get_attribute("alt"), path
        assert not figure.locator("input").first.is_visible(), path
    quiet.context.close()
    assert quiet.wrong == []


@pytest.mark.parametrize("name", ["primary", "secondary"])
def test_sidebars_open_and_close_with_the_keyboard(watched, name):
    page = watched.open("index.html")
    watched.show(PHONE)
    button = page.locator(f".{name}-toggle").first
    button.press("Enter")
    link = page.locator(f".bd-sidebar-{name} a[href]").first
    expect(link).to_be_focused()
    expect(link).to_be_in_viewport()
    link.press("Escape")
    expect(button).to_be_focused()
    expect(link).not_to_be_in_viewport()
    assert watched.wrong == []


def words(path) -> Counter[str]:
    """The words of a page's text, and how often each is there."""
    page = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
    article = page.find("article")
    for tag in article.find_all(["pre", "script", "style"]):
        tag.decompose()
    for tag in article.select(".headerlink, .math, .output"):
        tag.decompose()
    return Counter(re.findall(r"\b[a-z]{5,}\b", article.get_text(" ")))


def test_search_finds_a_term_of_each_page(watched, book):
    """The rarest word of each page that is searched, which leads to it.

    Listings of other pages, such as the index, and sources are not searched.
    """
    index = (book / "searchindex.js").read_text(encoding="utf-8")
    searched = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))
    names = set(searched["docnames"]) - {"genindex"}
    found = {name: words(book / f"{name}.html") for name in names}
    spread = Counter(word for page in found.values() for word in page)
    page = watched.open("search.html")
    box = page.locator("main input[name=q]")
    for name, own in sorted(found.items()):
        term = min(own, key=lambda word: (spread[word], -own[word], word))
        box.fill(term)
        box.press("Enter")
        listed = page.locator(f"#search-results a[href*='{name}.html']")
        page.wait_for_url(f"**/search.html?q={term}*")
        listed.first.wait_for(timeout=5000)
    assert watched.wrong == []
