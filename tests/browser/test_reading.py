"""What helps a reader to carry on: where one is, what is left, where to go next."""

from __future__ import annotations

import json

import pytest
from bs4 import BeautifulSoup
from conftest import ROOT

CHAPTER = "chapters/01_multi_head_attention.html"


@pytest.fixture
def chapter(browser, address):
    """Chapter 1 in a fresh browser profile."""
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


def test_every_figure_links_to_the_cell_that_draws_it(book):
    drawn = 0
    for path in sorted((ROOT / "chapters").glob("*.ipynb")):
        page = (book / "chapters" / f"{path.stem}.html").read_text(encoding="utf-8")
        cells = BeautifulSoup(page, "html.parser").select("div.cell")
        shown = [
            c for c in cells if c.select_one(".cell_output :is(img, svg, .explore)")
        ]
        links = [cell.select_one(".figure-link a") for cell in shown]
        assert [link and link["href"] for link in links] == [
            f"#{c['id']}" for c in shown
        ]
        drawn += len(shown)
    assert drawn >= 10


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
