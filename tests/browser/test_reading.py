"""What helps a reader to carry on: where one is, what is left, where to go next."""

from __future__ import annotations

import json

import pytest
from conftest import is_chapter, on
from test_html import soup  # parsed once for both

CHAPTER = "chapters/00_sources.html"  # light, with all that a chapter has


@pytest.fixture
def chapter(browser, address):
    """The chapter in a fresh browser profile."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(address + CHAPTER)
    yield page
    context.close()


def left(page) -> int:
    """The minutes that the page says are left."""
    words = page.locator(".minutes-left").inner_text().split()
    return 0 if words == ["read"] else int(words[0])


def scroll(page, share: float) -> None:
    """Scroll to a share of the page's height and let it notice."""
    page.evaluate(f"scrollTo(0, {share} * document.documentElement.scrollHeight)")
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => done()))")
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => done()))")


def test_minutes_left_count_down(chapter):
    whole = left(chapter)
    scroll(chapter, 0.5)
    assert 0.3 * whole < left(chapter) < 0.7 * whole
    scroll(chapter, 1)
    assert left(chapter) <= 1
    assert "In this chapter" in chapter.locator(".onthispage").inner_text()


def test_progress_is_kept_in_this_browser_and_can_be_forgotten(chapter, address):
    scroll(chapter, 0.5)
    chapter.goto(address + "index.html")
    mark = chapter.locator(".bd-links .read-mark")
    assert mark.count() == 1 and 40 <= int(mark.inner_text().split()[0]) <= 60
    assert mark.get_attribute("aria-label").endswith("% read")
    chapter.get_by_role("button", name="Forget what I have read").click()
    chapter.reload()
    assert mark.count() == 0
    assert json.loads(chapter.evaluate("localStorage.getItem('chapters read')")) == {}


def test_mark_says_read_at_the_end_and_never_goes_back(chapter, address):
    scroll(chapter, 1)
    scroll(chapter, 0)
    chapter.goto(address + "index.html")
    assert chapter.locator(".bd-links .read-mark").inner_text() == "✓"


@pytest.mark.parametrize("kept", ["not JSON", "null", '{"gone.html": 1}'])
def test_foreign_storage_does_no_harm(chapter, kept):
    errors = []
    chapter.on("pageerror", lambda error: errors.append(error))
    chapter.evaluate("text => localStorage.setItem('chapters read', text)", kept)
    chapter.reload()
    assert left(chapter) > 1 and errors == []


def draws(output) -> bool:
    """Whether an output of a cell is a picture or a figure with sliders."""
    return bool(output.find(["img", "svg"]) or output.find(class_="explore"))


@on(is_chapter)
def test_every_figure_links_to_the_cell_that_draws_it(book, page_path):
    page = soup(book / page_path)
    outputs = filter(draws, page.find_all("div", class_="cell_output"))
    cells = [output.find_parent("div", class_="cell") for output in outputs]
    shown = {cell["id"]: cell for cell in cells}
    for name, cell in shown.items():
        (link,) = cell.find_all(class_="figure-link")
        assert link.a["href"] == f"#{name}"
    assert len(page.find_all(class_="figure-link")) == len(shown)


def test_chapters_have_figures_that_link_to_their_cells(book):
    texts = (path.read_text(encoding="utf-8") for path in book.glob("chapters/*.html"))
    assert sum("figure-link" in text for text in texts) >= 10


def test_link_to_a_folded_cell_opens_it(chapter):
    folded = chapter.locator("div.cell:has(details.hide)").first
    assert folded.locator("details").get_attribute("open") is None
    chapter.evaluate("id => { location.hash = id; }", folded.get_attribute("id"))
    chapter.wait_for_function(
        "() => document.querySelector('div.cell details.hide').open"
    )


def test_chapters_lead_on_code_copies_and_solutions_fold(chapter):
    for way in (".left-prev", ".right-next"):
        assert chapter.locator(f".prev-next-area {way}").count() == 1
    cells = chapter.locator("div.cell .cell_input pre").count()
    chapter.wait_for_function(
        f"() => document.querySelectorAll('.cell_input .copybtn').length === {cells}"
    )
    solution = chapter.locator(".solution.admonition").first
    assert "toggle-hidden" in solution.get_attribute("class")
    solution.locator("button.toggle-button").click()
    assert "toggle-hidden" not in solution.get_attribute("class")
