"""The words that lead to the glossary: rare, legible, in reach of the keyboard."""

from __future__ import annotations

import re

from conftest import AT_ONCE, is_chapter, on
from test_html import soup  # parsed once for both

TERMS = ".bd-article a.glossary-term"
PLAIN = "h1 h2 h3 h4 figcaption pre code table blockquote".split()
PLAIN_CLASSES = {"cell", "admonition-title"}
RATIOS = """
links => {
  const numbers = c => c.match(/[\\d.]+/g).map(Number).slice(0, 3);
  const light = c => numbers(c).map(v => v / 255).map(
    v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4
  ).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = element => {
    const c = getComputedStyle(element).backgroundColor;
    const clear = c === "transparent" || /, 0\\)$/.test(c);
    return clear && element.parentElement ? ground(element.parentElement) : c;
  };
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  return links.map(link => {
    const style = getComputedStyle(link), below = ground(link);
    return [ratio(style.color, below), ratio(style.textDecorationColor, below)];
  });
}
"""


def terms(page) -> list:
    """The words of a page that lead to the glossary."""
    return page.find("article").find_all("a", class_="glossary-term")


def is_plain(place) -> bool:
    """Whether words in a place lead nowhere."""
    return place.name in PLAIN or bool(PLAIN_CLASSES & set(place.get("class", [])))


@on(is_chapter)
def test_page_links_a_term_once_and_not_every_word(book, page_path):
    page = soup(book / page_path)
    links = terms(page)
    targets = [link["href"] for link in links]
    assert len(targets) == len(set(targets))
    assert all(re.search("[\u4e00-\u9fff]", link["title"]) for link in links)
    paragraphs = page.find("article").find_all("p")
    words = sum(len(p.get_text().split()) for p in paragraphs)
    assert len(links) <= 5 + words / 40


@on(is_chapter)
def test_headings_figures_and_code_stay_plain(book, page_path):
    links = terms(soup(book / page_path))
    wrong = [link for link in links if any(map(is_plain, link.parents))]
    assert [link.get_text() for link in wrong] == []


def test_linked_words_are_legible_and_can_be_reached(browser, address):
    context = browser.new_context()
    page = context.new_page()
    page.goto(address + "chapters/00_experiments.html")
    links = page.locator(TERMS)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_selector(f"html[data-theme={scheme}]")
        page.add_style_tag(content=AT_ONCE)
        ratios = links.evaluate_all(RATIOS)
        assert ratios
        for text, line in ratios:
            assert text >= 4.5 and line >= 3, scheme
        link = links.first
        link.evaluate("link => { link.focus({ focusVisible: true }); }")
        assert link.evaluate("link => link.matches(':focus-visible')")
        ring = "link => { const s = getComputedStyle(link); "
        ring += "return s.outlineStyle !== 'none' || s.boxShadow !== 'none'; }"
        assert link.evaluate(ring), f"no visible focus, {scheme}"
        link.evaluate("link => { link.blur(); }")
    link.press("Enter")
    page.wait_for_url("**/glossary.html#*")
    context.close()
