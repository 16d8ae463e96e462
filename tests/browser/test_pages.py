"""The pages in a real browser, served from localhost, with no kernel behind them.

Each page is loaded once, into an empty cache, and its tests share it. What depends on
the width is seen at both widths, what depends on colours in both themes.
"""

from __future__ import annotations

import json
import re
from collections import Counter

import lxml.html
import pytest
from conftest import DESK, HTML, PHONE, ROOT, Watched, on, pages
from playwright.sync_api import expect

AXE = ROOT / "site" / "vendor" / "tests" / "axe.min.js"
COLOURS, SIZES = ["color-contrast", "link-in-text-block"], ["target-size"]
AROUND = [(DESK, "light"), (DESK, "dark"), (PHONE, "dark"), (PHONE, "light")]
SHEET = {"width": 718, "height": 1047}  # A4 without margins of 1 cm
HEAVIEST = 1.5e6  # bytes of a page with all that it loads
SLOWEST = 1000  # milliseconds until text is seen
SENTENCE = 100  # milliseconds in which one sentence alone is seen, on an idle machine
# What axe-core finds and we cannot mend: a rule and a selector, with the reason.
AXE_ALLOWED: dict[tuple[str, str], str] = {}


def test_nothing_goes_wrong_on_a_page(opened):
    for size, scheme in AROUND:
        opened.show(size, scheme)
        wide, contrast = opened.page.evaluate("[checks.tooWide(), checks.contrast()]")
        assert wide is None, f"{size['width']} px, {scheme}"
        assert (contrast if scheme == "dark" else -contrast) > 0.6, scheme
    assert opened.wrong == []


def test_math_is_typeset(opened):
    assert opened.page.evaluate("checks.unsetMath()") == [[], 0]
    assert opened.page.evaluate("checks.rawMath()") == []


def test_pictures_have_words(opened):
    assert opened.page.evaluate("checks.silentPictures()") == []


def axe(page, known: set[str] | None = None, **options) -> list[list[str]]:
    """The serious and critical violations that are not allowed.

    Where known kinds of words are given, only words of other kinds are looked at, which
    are then known too.
    """
    listed = None if known is None else sorted(known)
    faults, kinds = page.evaluate(
        "args => checks.axe(args)", [list(AXE_ALLOWED), options, listed]
    )
    if known is not None and not faults:
        known.update(kinds)
    return faults


DARK_WORDS: set[str] = set()  # the kinds that were found good in this process
PHONE_WORDS: set[str] = set()


def test_axe_finds_nothing_grave(opened):
    """All rules at 1280 pixels in light.

    Dark changes only colours, and 420 pixels only what is seen, its colours and sizes.
    There the colours of each kind of words are looked at once, on whatever page: those
    of a kind have the same colour, size and weight, and lie on the same grounds.
    """
    opened.show(DESK)
    opened.page.evaluate(AXE.read_text(encoding="utf-8"))
    opened.page.evaluate("checks.cut()")
    assert axe(opened.page) == []
    opened.show(DESK, "dark")
    assert axe(opened.page, DARK_WORDS, runOnly=COLOURS) == [], "dark"
    opened.show(PHONE)
    assert axe(opened.page, PHONE_WORDS, runOnly=COLOURS) == [], "420 pixels"
    assert axe(opened.page, runOnly=SIZES) == [], "420 pixels"
    opened.page.evaluate("uncut()")


ONE_OF_EACH_KIND = {
    "index.html",
    "claims.html",
    "search.html",
    "api/attention.html",
    "chapters/01_multi_head_attention.html",
}


def test_every_control_takes_the_focus(opened):
    """At 420 pixels those that are seen only there."""
    for size in (DESK, PHONE):
        opened.show(size)
        n, faults = opened.page.evaluate("checks.focused()")
        assert n and faults == [], f"{size['width']} pixels"


@on(ONE_OF_EACH_KIND.__contains__)
def test_tab_key_reaches_every_control(opened):
    """Once around, from anywhere; what scrolls gets the focus too."""
    for size in (DESK, PHONE):
        opened.show(size)
        waiting = opened.page.evaluate("checks.listen()")
        for _ in range(6 + waiting // 4):
            for _ in range(20):
                opened.page.keyboard.press("Tab")
            if not (missed := opened.page.evaluate("missed()")):
                break
        assert waiting and missed == [], f"{size['width']} pixels"


def test_page_can_be_printed(opened):
    """On A4, from a dark page as from a light one."""
    for scheme in ("light", "dark"):
        opened.show(SHEET, scheme, media="print")
        ground, faults = opened.page.evaluate("checks.printed()")
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
    assert opened.n_bytes <= HEAVIEST
    first = opened.page.evaluate("checks.firstText()")
    for _ in range(4):  # the best of five: a slow page is always late
        if first > SLOWEST:
            first = min(first, wait_for_text(browser, address, page_path))
    assert first <= SLOWEST


def has_figure(path: str) -> bool:
    """Whether a page shows a figure with sliders."""
    return 'class="explore"' in (HTML / path).read_text(encoding="utf-8")


@on(has_figure)
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


def test_case_47_figure_shows_its_first_state_without_scripts(browser, address):
    quiet = Watched(browser, address, java_script_enabled=False)
    for path in filter(has_figure, pages()):
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


UNSEARCHED = "headerlink", "math", "output"


def words(path) -> Counter[str]:
    """The words of a page's text, and how often each is there."""
    article = lxml.html.parse(path).find(".//article")
    for tag in [*article.iter("pre", "script", "style")]:
        tag.drop_tree()
    for name in UNSEARCHED:
        for tag in article.find_class(name):
            tag.drop_tree()
    return Counter(re.findall(r"\b[a-z]{5,}\b", " ".join(article.itertext())))


def test_search_finds_a_term_of_each_page(watched, book):
    """The rarest word of each page that is searched, which leads to it.

    Listings of other pages, such as the index, and sources are not searched. One word
    is typed; the function that looks it up is asked for all.
    """
    index = (book / "searchindex.js").read_text(encoding="utf-8")
    searched = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))
    names = sorted(set(searched["docnames"]) - {"genindex"})
    found = {name: words(book / f"{name}.html") for name in names}
    spread = Counter(word for page in found.values() for word in page)
    terms = {
        name: min(own, key=lambda word: (spread[word], -own[word], word))
        for name, own in found.items()
    }
    page = watched.open("search.html")
    box = page.locator("main input[name=q]")
    box.fill(terms[names[-1]])
    box.press("Enter")
    page.wait_for_url(f"**/search.html?q={terms[names[-1]]}*")
    page.locator(f"#search-results a[href*='{names[-1]}.html']").first.wait_for()
    listed = page.evaluate("terms => terms.map(checks.search)", list(terms.values()))
    missed = [n for n, pages in zip(names, listed, strict=True) if n not in pages]
    assert [(name, terms[name]) for name in missed] == []
    assert watched.wrong == []
