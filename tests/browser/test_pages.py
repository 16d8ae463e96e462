"""The pages in a real browser, served from localhost, with no kernel behind them.

Each page is loaded once, into an empty cache, and visited once, for all its tests: to
change the window or the theme costs more than most checks. What depends on the width
is seen at both widths, what depends on colours in both themes.
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
FOCUS = "checks.focused()"
LAYOUT = "[checks.tooWide(), checks.contrast()]"
SHEET = {"width": 718, "height": 1047}  # A4 without margins of 1 cm
HEAVIEST = 1.5e6  # bytes of a page with all that it loads
SLOWEST = 1000  # milliseconds until text is seen
# What axe-core finds and we cannot mend: a rule and a selector, with the reason.
AXE_ALLOWED: dict[tuple[str, str], str] = {}


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


def slide(page) -> list[str]:
    """What does not change when a slider is moved, and not back when it is moved back.

    The alternative text, the picture and the slider's value.
    """
    faults = []
    for figure in page.locator(".explore").element_handles():
        sliders = page.evaluate("e => e.querySelectorAll('input').length", figure)
        found = figure.query_selector_all("role=slider")
        if not found or len(found) != sliders:
            faults.append(f"{len(found)} sliders, {sliders} inputs")
        for slider in found:
            before = figure.evaluate("e => checks.seen(e)")
            slider.press("ArrowRight")
            after = figure.evaluate("e => checks.seen(e)")
            same = [before[0] and after[0] != before[0], after[1] != before[1]]
            same.append(after[2:] != before[2:])
            names = ("alternative text", "picture", "value")
            faults += [n for n, good in zip(names, same, strict=True) if not good]
            slider.press("ArrowLeft")
            if figure.evaluate("e => checks.seen(e)") != before:
                faults.append("back again")
    return faults


def walk(page) -> list[str]:
    """The controls that the Tab key does not reach, once around, from anywhere."""
    waiting = page.evaluate("checks.listen()")
    missed = ["no control"] * (not waiting)
    for _ in range(6 + waiting // 4):
        for _ in range(20):
            page.keyboard.press("Tab")
        if not (missed := page.evaluate("missed()")):
            break
    return missed


ONE_OF_EACH_KIND = {
    "index.html",
    "claims.html",
    "search.html",
    "api/attention.html",
    "chapters/01_multi_head_attention.html",
}


def has_figure(path: str) -> bool:
    """Whether a page shows a figure with sliders."""
    return 'class="explore"' in (HTML / path).read_text(encoding="utf-8")


def handle(page, path: str) -> dict:
    """What a reader's hands find at one width."""
    found = {"layout": page.evaluate(LAYOUT), "focus": page.evaluate(FOCUS)}
    found["tab"] = walk(page) if path in ONE_OF_EACH_KIND else None
    found["sliders"] = slide(page) if has_figure(path) else None
    return found


@pytest.fixture(scope="session")
def seen(opened, page_path) -> dict[str, dict]:
    """What all checks find on a page: wide in light and dark, narrow in dark and light,
    printed from light and dark."""
    page = opened.page
    wide = handle(page, page_path) | page.evaluate("checks.texts()")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    page.evaluate("checks.cut()")
    wide["axe"] = axe(page)
    opened.show(DESK, "dark")
    dark = {"axe": axe(page, DARK_WORDS, runOnly=COLOURS)}
    page.evaluate("uncut()")
    dark["layout"] = page.evaluate(LAYOUT)
    opened.show(PHONE, "dark")
    small_dark = {"layout": page.evaluate(LAYOUT)}
    opened.show(PHONE)
    small = handle(page, page_path)
    page.evaluate("checks.cut()")
    small["axe"] = axe(page, PHONE_WORDS, runOnly=COLOURS) + axe(page, runOnly=SIZES)
    page.evaluate("uncut()")
    found = {"1280, light": wide, "1280, dark": dark, "420, dark": small_dark}
    found["420, light"] = small
    for scheme in ("light", "dark"):
        opened.show(SHEET, scheme, media="print")
        found[f"print, {scheme}"] = {"print": page.evaluate("checks.printed()")}
    return found


def found(seen: dict[str, dict], check: str) -> dict:
    """What a check has found, by where it looked."""
    return {where: one[check] for where, one in seen.items() if check in one}


def test_nothing_goes_wrong_on_a_page(opened, seen):
    layouts = found(seen, "layout")
    assert len(layouts) == 4
    for where, (wide, contrast) in layouts.items():
        assert wide is None, where
        assert (contrast if "dark" in where else -contrast) > 0.6, where
    assert opened.wrong == []


def test_math_is_typeset(seen):
    assert found(seen, "unsetMath") == {"1280, light": [[], 0]}
    assert found(seen, "rawMath") == {"1280, light": []}


def test_pictures_have_words(seen):
    assert found(seen, "silentPictures") == {"1280, light": []}


def test_axe_finds_nothing_grave(seen):
    """All rules at 1280 pixels in light.

    Dark changes only colours, and 420 pixels only what is seen, its colours and sizes.
    There the colours of each kind of words are looked at once, on whatever page: those
    of a kind have the same colour, size and weight, and lie on the same grounds.
    """
    places = ("1280, light", "1280, dark", "420, light")
    assert found(seen, "axe") == {where: [] for where in places}


def test_every_control_takes_the_focus(seen):
    """At 420 pixels those that are seen only there."""
    for where, (n, faults) in found(seen, "focus").items():
        assert n and faults == [], where


@on(ONE_OF_EACH_KIND.__contains__)
def test_tab_key_reaches_every_control(seen):
    """Once around, from anywhere; what scrolls gets the focus too."""
    assert found(seen, "tab") == {"1280, light": [], "420, light": []}


def test_page_can_be_printed(seen):
    """On A4, from a dark page as from a light one."""
    sheets = found(seen, "print")
    assert len(sheets) == 2
    for scheme, (ground, faults) in sheets.items():
        assert faults == [], scheme
        assert ground in {"rgb(255, 255, 255)", "rgba(0, 0, 0, 0)"}, scheme


@on(has_figure)
def test_every_slider_moves_its_figure(opened, seen):
    assert found(seen, "sliders") == {"1280, light": [], "420, light": []}
    assert opened.wrong == []


def wait_for_text(browser, address: str, path: str) -> float:
    """Milliseconds until a page shows text, on a machine with nothing else to do."""
    fresh = Watched(browser, address)
    busy = fresh.leave()
    fresh.page.goto(address + path, wait_until="commit")
    late = fresh.page.evaluate("checks.firstText()") / busy
    fresh.context.close()
    return late


def test_page_is_light_and_soon_shows_text(opened, browser, address, page_path):
    assert opened.n_bytes <= HEAVIEST
    first = opened.page.evaluate("checks.firstText()") / opened.busy
    for _ in range(4):  # the best of five: a slow page is always late
        if first > SLOWEST:
            first = min(first, wait_for_text(browser, address, page_path))
    assert first <= SLOWEST


def test_case_47_figure_shows_its_first_state_without_scripts(browser, address):
    quiet = Watched(browser, address, java_script_enabled=False)
    for path in filter(has_figure, pages()):
        quiet.page.goto(address + path, wait_until="domcontentloaded")
        figure = quiet.page.locator(".explore").first
        expect(figure.locator("img")).to_be_visible()
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
