"""The words that lead to the glossary: rare, legible, in reach of the keyboard."""

from __future__ import annotations

import re

import pytest
from test_html import soup  # parsed once for both

TERMS = ".bd-article a.glossary-term"
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


def chapters(book) -> list:
    """The built chapters."""
    found = sorted(book.glob("chapters/*.html"))
    assert found
    return found


def test_page_links_a_term_once_and_not_every_word(book):
    for path in chapters(book):
        page = soup(path)
        links = page.select(TERMS)
        targets = [link["href"] for link in links]
        assert len(targets) == len(set(targets)), path.name
        assert all(re.search("[\u4e00-\u9fff]", link["title"]) for link in links)
        words = sum(len(p.get_text().split()) for p in page.select("article p"))
        assert len(links) <= 5 + words / 40, f"{path.name}: {len(links)} links"


def test_headings_figures_and_code_stay_plain(book):
    plain = "h1 h2 h3 h4 figcaption pre code table blockquote .cell .admonition-title"
    wrong = ", ".join(f"{place} a.glossary-term" for place in plain.split())
    for path in chapters(book):
        page = soup(path)
        assert [link.get_text() for link in page.select(wrong)] == [], path.name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_linked_words_are_legible_and_can_be_reached(browser, address, book, scheme):
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto(address + "chapters/01_multi_head_attention.html")
    page.wait_for_selector(f"html[data-theme={scheme}]")
    links = page.locator(TERMS)
    for text, line in links.evaluate_all(RATIOS):
        assert text >= 4.5 and line >= 3
    link = links.first
    link.evaluate("link => { link.focus({ focusVisible: true }); }")
    assert link.evaluate("link => link.matches(':focus-visible')")
    ring = "link => { const s = getComputedStyle(link); "
    ring += "return s.outlineStyle !== 'none' || s.boxShadow !== 'none'; }"
    assert link.evaluate(ring), "no visible focus"
    page.keyboard.press("Enter")
    page.wait_for_url("**/glossary.html#*")
    context.close()
