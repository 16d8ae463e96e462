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
# What axe-core finds and we cannot mend: a rule and a selector, with the reason.
AXE_ALLOWED: dict[tuple[str, str], str] = {}

MATH = """
() => {
  const marked = [...document.querySelectorAll(".math")];
  const bad = marked.filter(e => e.querySelectorAll("mjx-container").length != 1
                                 || e.querySelector("mjx-merror"));
  const stray = document.querySelectorAll("mjx-container").length - marked.length;
  return [bad.map(e => e.textContent), stray];
}
"""
RAW_MATH = r"""
() => {
  const raw = /\\[([]|\\begin\{|\$\$|\$[^\s$][^$\n]*\$/;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = raw.test(document.title) ? [document.title] : [];
  while (walk.nextNode()) {
    const inside = walk.currentNode.parentElement;
    if (!inside.closest("pre, code, script, style, mjx-container, .sig")
        && raw.test(walk.currentNode.data)) found.push(walk.currentNode.data);
  }
  return found;
}
"""
TOO_WIDE = """
() => document.documentElement.scrollWidth > document.documentElement.clientWidth
  ? [...document.querySelectorAll("body :not(pre *)")]
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
# An empty alternative is right only where words stand beside the picture in its link.
SILENT_PICTURES = """
() => [...document.querySelectorAll("img, svg, [role=img]")].filter(e => {
  if (e.closest("[aria-hidden=true], mjx-container, svg svg, [role=img] svg"))
    return false;
  const words = [e.getAttribute("alt"), e.getAttribute("aria-label"),
                 e.querySelector(":scope > title")?.textContent];
  if (words.some(word => word?.trim())) return false;
  const control = e.closest("a, button, summary, label");
  return !(control?.textContent.trim() || control?.getAttribute("aria-label"));
}).map(e => e.outerHTML.slice(0, 200))
"""
SEEN = """
async e => {
  const image = e.querySelector("img");
  await image.decode();
  const said = [...e.querySelectorAll("output")].map(output => output.textContent);
  return [image.alt, image.src, ...said];
}
"""
# Most nodes of a chapter are tokens of code and parts of formulas: axe-core sees each
# kind of token once, which holds its colours, and formulas as text.
CUT = """
() => {
  const seen = new Set(), cut = [];
  for (const e of document.querySelectorAll(".highlight pre, mjx-container")) {
    const whole = document.createDocumentFragment();
    whole.append(...e.childNodes);
    cut.push([e, whole]);
    e.append(whole.textContent.slice(0, 20));
    for (const token of whole.querySelectorAll("span[class]")) {
      const kind = token.className + !!e.closest(".cell_output");
      if (!seen.has(kind)) e.append("\\n", token.cloneNode(true));
      seen.add(kind);
    }
  }
  window.uncut = () => cut.forEach(([e, whole]) => e.replaceChildren(whole));
}
"""
AXE_RUN = """
async ([allowed, options]) => {
  const found = await axe.run(document, {resultTypes: ["violations"], ...options});
  const fault = ([rule, selector], v, n) =>
    rule == v.id && document.querySelector(n.target.join(" ")).matches(selector);
  return found.violations
    .filter(v => ["serious", "critical"].includes(v.impact))
    .flatMap(v => v.nodes.filter(n => !allowed.some(a => fault(a, v, n)))
                         .map(n => [v.id, n.target.join(" "), n.html.slice(0, 150)]));
}
"""
# Every control that is seen: what it looks like without the focus is kept, and what
# it looks like with it is noted each time that the focus comes.
LISTEN = """
() => {
  const controls = "a[href], button, input:not([type=hidden]), select, textarea, " +
                   "summary, audio[controls], video[controls], [tabindex]";
  const look = e => {
    const {outlineStyle, outlineWidth, outlineColor, boxShadow, borderColor,
           borderWidth, backgroundColor, textDecorationLine} = getComputedStyle(e);
    const outline = outlineStyle == "none" ? "" : outlineWidth + outlineColor;
    return [outline, boxShadow, borderColor, borderWidth, backgroundColor,
            textDecorationLine].join();
  };
  document.activeElement.blur();
  scrollTo(0, 0);
  // The way back to the top is there only while the reader scrolls up; arrow keys move
  // between the radio buttons of a group.
  const other = e => e.id == "pst-back-to-top" || (e.type == "radio" && !e.checked);
  const seen = e => e.tabIndex >= 0 && !e.disabled && !other(e)
                    && e.getClientRects().length
                    && e.checkVisibility({visibilityProperty: true});
  const waiting = new Map([...document.querySelectorAll(controls)]
    .filter(seen).map(e => [e, look(e)]));
  const faults = [], name = e => e.outerHTML.slice(0, 150);
  const shown = e => {
    const {left, right} = e.getBoundingClientRect();  // the page scrolls up and down
    return e.checkVisibility({opacityProperty: true}) && right > 0 && left < innerWidth;
  };
  const note = ({target: e}) => {
    if (!waiting.has(e)) return;
    if (look(e) == waiting.get(e)) faults.push("no visible focus: " + name(e));
    if (!shown(e)) faults.push("hidden with the focus: " + name(e));
    waiting.delete(e);
  };
  document.addEventListener("focusin", note);
  window.stopListening = () => {
    document.removeEventListener("focusin", note);
    document.activeElement.blur();
  };
  const missed = () => [...waiting.keys()].filter(seen).slice(0, 5).map(name);
  window.tabbed = () => [waiting.size, faults, missed()];
  return waiting.size;
}
"""
PRINTED = """
() => {
  const faults = [], name = e => e.outerHTML.slice(0, 150);
  const seen = e => e.checkVisibility({visibilityProperty: true});
  const check = (fault, selector, test = () => true) => {
    for (const e of document.querySelectorAll(selector))
      if (seen(e) && test(e)) faults.push(fault + ": " + name(e));
  };
  const style = getComputedStyle;
  check("beside the text", ".bd-sidebar-primary, .bd-sidebar-secondary, .bd-header, " +
        ".bd-header-article, .prev-next-area, .copybtn, #pst-back-to-top, .skip-link");
  check("stays on each sheet", "body *", e =>
        ["fixed", "sticky"].includes(style(e).position) && e.offsetHeight);
  check("cut", "main :is(pre, table, div, dt, p, mjx-container)", e =>
        style(e).overflowX != "visible" && e.scrollWidth > e.clientWidth + 1);
  check("folded without a mark", "main details:not([open])", e =>
        !e.querySelector("summary").textContent.trim());
  check("folded", "main .toggle-hidden");
  check("pale", "main :is(p, li, a, code, td, dt, pre, figcaption)", e =>
        Math.min(...style(e).color.match(/[\\d.]+/g).slice(0, 3).map(Number)) > 140);
  if (document.documentElement.scrollWidth > innerWidth) faults.push("too wide");
  return [style(document.body).backgroundColor, faults];
}
"""
FIRST_TEXT = """
() => new Promise(done => new PerformanceObserver(list => {
  for (const paint of list.getEntries())
    if (paint.name == "first-contentful-paint") done(paint.startTime);
}).observe({type: "paint", buffered: true}))
"""


def test_nothing_goes_wrong_on_a_page(opened):
    for size in (DESK, PHONE):
        for scheme, sign in (("light", -1), ("dark", 1)):
            opened.show(size, scheme)
            wide = opened.page.evaluate(TOO_WIDE)
            assert wide is None, f"{size['width']} px, {scheme}"
            assert sign * opened.page.evaluate(CONTRAST) > 0.6, scheme
    assert opened.wrong == []


def test_math_is_typeset(opened):
    assert opened.page.evaluate(MATH) == [[], 0]
    assert opened.page.evaluate(RAW_MATH) == []


def test_pictures_have_words(opened):
    assert opened.page.evaluate(SILENT_PICTURES) == []


def axe(page, **options) -> list[list[str]]:
    """The serious and critical violations that are not allowed."""
    return page.evaluate(AXE_RUN, [list(AXE_ALLOWED), options])


def test_axe_finds_nothing_grave(opened):
    """All rules at 1280 pixels.

    At 420 the sizes and colours of what is seen only there; dark changes only colours.
    """
    opened.show(DESK)
    opened.page.evaluate(AXE.read_text(encoding="utf-8"))
    opened.page.evaluate(CUT)
    assert axe(opened.page) == []
    opened.show(DESK, "dark")
    assert axe(opened.page, runOnly=COLOURS) == [], "dark"
    opened.show(PHONE)
    assert axe(opened.page, runOnly=[*COLOURS, *SIZES]) == [], "420 pixels"
    opened.page.evaluate("uncut()")


def test_keyboard_reaches_every_control(opened):
    for size in (DESK, PHONE):
        opened.show(size)
        left = opened.page.evaluate(LISTEN)
        assert left, "a page without a link"
        for _ in range(3 + left // 10):  # and what scrolls, which gets the focus too
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
        ground, faults = opened.page.evaluate(PRINTED)
        opened.page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert faults == [], scheme
        assert ground in {"rgb(255, 255, 255)", "rgba(0, 0, 0, 0)"}, scheme


def test_page_is_light_and_soon_shows_text(opened, browser, address, page_path):
    assert opened.n_bytes_first <= HEAVIEST
    first = opened.page.evaluate(FIRST_TEXT)
    for _ in range(2):  # a busy machine may be late, a slow page always is
        if first > SLOWEST:
            again = Watched(browser, address)
            again.page.goto(address + page_path)
            first = min(first, again.page.evaluate(FIRST_TEXT))
            again.context.close()
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
            for slider in figure.get_by_role("slider").all():
                before = figure.evaluate(SEEN)
                slider.press("ArrowRight")
                after = figure.evaluate(SEEN)
                assert before[0] and after[0] != before[0], "alternative text"
                assert after[1] != before[1], "picture"
                assert after[2:] != before[2:], "value"
                slider.press("ArrowLeft")
                assert figure.evaluate(SEEN) == before, "back again"
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
