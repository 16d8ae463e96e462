"""The page of claims says what the notebooks store, and nothing else."""

from __future__ import annotations

import importlib
import json
import re
import sys
from html import unescape

import checks
import pytest
from small_notebooks import ROOT, code, notebook, words, write

from transformer.experiments import VERDICTS, Difference, claims, verdict

sys.path.insert(0, str(ROOT / "site"))
pytest.importorskip("sphinx", reason="what builds the book is not installed")
ledger = importlib.import_module("ledger")

BOOK = ledger.read_ledger(ROOT)
LINES = {
    "MHA-1": "MHA-1: wrong - so\n  effect +0.2 nats [+0.1, +0.3], 5 seeds, cpu",
    "MHA-3": "MHA-3: imprecise - so\n  effect 0% to 7%, of all, 10 seeds, NVIDIA H200",
    "MHA-4": "MHA-4: holds - so\n  effect at most 1e-12 apart, cpu",
    "CON-2": "CON-2: not empirical - a slogan",
}


def judging(*names: str, **changed: str) -> list[dict]:
    """Cells that print a verdict each."""
    lines = {**LINES, **{name.replace("_", "-"): v for name, v in changed.items()}}
    return [
        code(
            f"assert found\nverdict({name!r}, ...)",
            f"verdict-{name}",
            prints=f"table\n{lines[name]}\n",
        )
        for name in names
    ]


def book(root, **chapters) -> ledger.Ledger:
    """A repository of these chapters, with the claims of the real one."""
    toc = ["format: jb-book", "root: index", "chapters:"]
    for name, cells in chapters.items():
        toc.append(f"  - file: chapters/{name[1:]}")
        start = words(f"# {name[1:]}", "title")
        write(notebook(start, *cells), root / "chapters" / f"{name[1:]}.ipynb")
    toc.append("  - file: claims")
    (root / "_toc.yml").write_text("\n".join(toc), encoding="utf-8")
    (root / "transformer").mkdir(exist_ok=True)
    text = json.dumps(claims())
    (root / "transformer/claims.json").write_text(text, encoding="utf-8")
    return ledger.read_ledger(root)


# --- the book --------------------------------------------------------------------


def test_the_book_s_ledger_has_no_fault():
    assert ledger.complaints(BOOK) == []


@pytest.mark.parametrize("chapter", BOOK.chapters)
def test_stored_verdicts_are_those_in_the_code(chapter):
    nb = checks.read(ROOT / "chapters" / f"{chapter}.ipynb")
    stored = [v.claim for v in BOOK.verdicts if v.chapter == chapter]
    assert stored == checks.verdict_ids(nb)


def entries(page: str) -> dict[str, str]:
    """The Markdown of each entry of a page."""
    found = re.findall(r"^\(claim-[\w-]+\)=\n(:::\{div\}.*?\n):::$", page, re.M | re.S)
    return {re.search(r"^\[([\w-]+)\]\{\.claim-id\}", e, re.M)[1]: e for e in found}


def test_page_holds_sixty_claims_in_the_order_of_the_source():
    page = ledger.page(BOOK)
    assert list(entries(page)) == list(claims())
    titles = re.findall(r"^## (.*)$", page, re.M)
    assert titles == list(dict.fromkeys(ledger.SECTIONS.values()))


def cells_of(chapter: str) -> list[dict]:
    """The code of a chapter, if the book has it."""
    if chapter not in BOOK.chapters:
        return []
    return checks.code_cells(checks.read(ROOT / "chapters" / f"{chapter}.ipynb"))


@pytest.mark.parametrize("name", claims())
def test_entry_says_what_the_notebook_printed(name):
    shown, claim = entries(ledger.page(BOOK))[name], claims()[name]
    assert claim["zh"] in shown.replace("\\", "")
    assert claim["en"] in shown.replace("\\", "")
    found = f"[{claim['literature']}]{{.verdict}}. {ledger.plain(claim['found'])}"
    assert found in shown
    assert f"{{cite:t}}`{','.join(claim['cite'])}`" in shown
    pattern = rf"^{name}: ([a-z ]+) - (.*)$(?:\n  effect (.*), ([^,]+)$)?"
    for cell in cells_of(claim["chapter"]):
        text = "\n".join(ledger.printed(cell))
        if said := re.search(pattern, text, re.M):
            word, because, effect, device = said.groups(default="")
            assert f"is-{word.replace(' ', '-')}" in shown.splitlines()[0]
            assert ledger.plain(because) in shown
            numbers = re.findall(r"\d+(?:\.\d+)?", effect)
            measured = shown[shown.find("Effect:") : shown.find("See {ref}")]
            assert re.findall(r"\d+(?:\.\d+)?", measured.replace("95 %", "")) == numbers
            assert (device == "cpu") == ("on a CPU" in measured)
            assert f"<chapters/{claim['chapter']}#cell-{cell['id'].lower()}>" in shown
            return
    assert ledger.NOT_YET in shown and "{ref}" not in shown


@pytest.mark.parametrize("name", claims())
def test_what_papers_found_has_a_source(name):
    bibliography = (ROOT / "references.bib").read_text(encoding="utf-8")
    known = re.findall(r"^@\w+\{([^,\s]+),", bibliography, re.M)
    cited = claims()[name]["cite"]
    assert cited and set(cited) <= set(known)
    assert all(known.count(key) == 1 for key in cited)


def test_each_word_of_a_verdict_can_be_chosen():
    style = (ROOT / "site/styles/ledger.css").read_text(encoding="utf-8")
    classes = {ledger.css_class(word) for word in (*VERDICTS, ledger.NOT_YET)}
    for name in classes | {"differs"}:
        assert f":has(#show-{name}:checked) .claim:not(.{name})" in style
        assert f":has(#show-{name}:checked) section section:not(:has(.{name}))" in style
    assert set(re.findall(r"#show-([\w-]+)", style)) == classes | {"differs"}
    assert ledger.UNTESTED == checks.UNTESTED


# --- what a verdict prints is read back --------------------------------------------


@pytest.mark.parametrize(
    "effect, more, read",
    [
        (
            Difference(-0.37, -0.4, -0.34, 0.03, 5),
            {"unit": "nats/byte, a above b"},
            ("-0.370 nats/byte, a above b", "[-0.400, -0.340]", "5", "cpu"),
        ),
        (
            Difference(0.37, 0.35, 0.4, 0.03, 5),
            {"seeds": 1, "device": "NVIDIA H200"},
            ("+0.370", "[+0.350, +0.400]", "1", "NVIDIA H200"),
        ),
        ("exact", {}, ("exact", "", "", "cpu")),
        ("2, 3 or 4 of 8", {"seeds": 8}, ("2, 3 or 4 of 8", "", "8", "cpu")),
        (None, {}, ("", "", "", "")),
    ],
)
def test_verdict_is_read_back(effect, more, read, capsys):
    verdict(
        "MHA-9", "holds with conditions", "it - so to say: yes", effect=effect, **more
    )
    cell = code("verdict('MHA-9', ...)", "here", prints=capsys.readouterr().out)
    (found,) = ledger.read_verdicts("01_a", notebook(cell))
    said = ("MHA-9", "holds with conditions", "it - so to say: yes")
    assert found == (*said, *read, "01_a", "here")


def test_only_cells_that_call_verdict_are_read():
    cell = code("print('MHA-9: holds - so')", "a", prints="MHA-9: holds - so\n")
    assert ledger.read_verdicts("01_a", notebook(cell, words("verdict(1)", "b"))) == []


# --- faults ----------------------------------------------------------------------

FIRST = "_01_multi_head_attention"


@pytest.mark.parametrize(
    "chapters, complaint",
    [
        ({FIRST: judging("MHA-1", "MHA-1")}, "MHA-1 is judged 2 times"),
        (
            {FIRST: judging("MHA-1"), "_02_b": judging("MHA-1")},
            "MHA-1 is judged 2 times",
        ),
        (
            {"_02_b": judging("MHA-1")},
            "MHA-1 is judged in 02_b, not in 01_multi_head_attention",
        ),
        (
            {FIRST: judging("MHA-1", MHA_1="XX-1: wrong - so\n  effect 1, cpu")},
            "XX-1 is no claim of the source",
        ),
        (
            {FIRST: judging("MHA-1", MHA_1="MHA-1: wrong - so")},
            "MHA-1: wrong, but by how much?",
        ),
        (
            {FIRST: judging("MHA-1", MHA_1="MHA-1: inconclusive - so")},
            "MHA-1: inconclusive, but by how much?",
        ),
    ],
)
def test_faulty_ledger_is_refused(tmp_path, chapters, complaint):
    found = book(tmp_path, **chapters)
    assert complaint in ledger.complaints(found)
    with pytest.raises(
        ledger.ExtensionError, match="the ledger of claims: .*" + complaint
    ):
        fill(tmp_path, "% ledger\n")


def fill(root, text: str) -> str:
    """The text of a page, filled in."""
    content = [text]
    app = type("App", (), {"srcdir": str(root)})
    ledger.on_source_read(app, "claims", content)
    return content[0]


def test_claim_without_a_measurement_needs_no_effect(tmp_path):
    found = book(tmp_path, _13_relations=judging("CON-2"))
    assert not any(
        complaint.startswith("CON-2") for complaint in ledger.complaints(found)
    )


def test_rows_may_be_empty_until_the_last_chapter_stands(tmp_path):
    assert ledger.complaints(book(tmp_path, **{FIRST: judging("MHA-1")})) == []
    found = ledger.complaints(book(tmp_path, _13_relations=judging("CON-2")))
    assert found == [f"{name} is not judged" for name in claims() if name != "CON-2"]


# --- the page --------------------------------------------------------------------


def test_counts_come_from_the_notebooks(tmp_path):
    book(tmp_path, _13_relations=[])
    found = book(tmp_path, **{FIRST: judging("MHA-1", "MHA-3", "MHA-4")})
    told = "3 of 60 claims are judged: 1 *wrong*, 1 *imprecise*, 1 *holds*"
    assert ledger.counts(found) == told
    assert fill(tmp_path, "So far {{ verdicts }}.") == f"So far {told}."
    assert fill(tmp_path, "Nothing to fill in.") == "Nothing to fill in."


def test_counts_of_a_whole_ledger_name_no_part():
    assert len(BOOK.verdicts) == len(BOOK.claims)
    assert ledger.counts(BOOK).startswith(f"The {len(BOOK.claims)} verdicts: ")


def test_filter_offers_the_words_there_are(tmp_path):
    text = ledger.filters(book(tmp_path, **{FIRST: judging("MHA-1", "MHA-3", "MHA-4")}))
    labels = re.findall(r"> ([^<]+)</label>", text)
    told = [
        "all 60",
        "not measured yet (57)",
        "wrong (1)",
        "imprecise (1)",
        "holds (1)",
    ]
    assert labels == [*told, "≠ papers (1)"]  # MHA-1: papers say imprecise


def test_other_word_than_papers_is_said(tmp_path):
    shown = entries(ledger.page(book(tmp_path, **{FIRST: judging("MHA-1", "MHA-3")})))
    assert "≠ papers" in shown["MHA-1"] and "≠ papers" not in shown["MHA-3"]
    assert "≠ papers" not in shown["MHA-2"]


def test_words_mean_just_that():
    assert ledger.plain("a*b_c [x](y) $5$ -0.5, 1e-5, x-1") == (
        r"a\*b\_c \[x\](y) \$5\$ −0.5, 1e-5, x-1"
    )


def test_site_links_each_verdict_to_its_cell(tmp_path):
    pytest.importorskip("myst_nb", reason="what builds the book is not installed")
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace

    cells = judging("MHA-1", "MHA-3", "MHA-4")
    book(tmp_path, **{FIRST: cells})
    title = "# Claims\n\n"
    (tmp_path / "claims.md").write_text(f"{title}% ledger\n", encoding="utf-8")
    index = "# Book\n\n```{toctree}\nclaims\nchapters/01_multi_head_attention\n```\n"
    (tmp_path / "index.md").write_text(index, encoding="utf-8")
    bibliography = (ROOT / "references.bib").read_text(encoding="utf-8")
    (tmp_path / "references.bib").write_text(bibliography, encoding="utf-8")
    settings = {
        "extensions": ["myst_nb", "sphinx_design", "sphinxcontrib.bibtex"],
        "html_theme": "sphinx_book_theme",
        "html_theme_options": {
            "repository_url": "https://example.org/a/b",
            "repository_provider": "github",
        },
        "myst_enable_extensions": [
            "attrs_block",
            "attrs_inline",
            "colon_fence",
            "deflist",
        ],
        "nb_execution_mode": "off",
        # Stated, for Sphinx writes what another test's build added into its default.
        "source_suffix": {".md": "myst-nb", ".ipynb": "myst-nb"},
        "bibtex_bibfiles": ["references.bib"],
        "html_static_path": [str(ROOT / "site/styles")],
    }
    settings["extensions"] += ["sphinx.ext.autodoc", "notebook_pages", "ledger"]
    out = tmp_path / "out"
    with docutils_namespace():  # for the builds of other tests
        Sphinx(
            tmp_path,
            None,
            out,
            tmp_path / "trees",
            "html",
            confoverrides=settings,
            status=None,
            warning=sys.stderr,
        ).build()
    page = (out / "claims.html").read_text(encoding="utf-8")
    chapter = (out / f"chapters/{FIRST[1:]}.html").read_text(encoding="utf-8")
    for cell in cells:
        anchor = f"cell-{cell['id']}"
        assert f'href="chapters/{FIRST[1:]}.html#{anchor}"' in page
        assert f'id="{anchor}"' in chapter
    assert len(re.findall(r'id="claim-[\w-]+"', page)) == 60
    assert len(re.findall(r'<p class="chinese" lang="zh">', page)) == 60
    assert claims()["PE-3"]["zh"] in unescape(page)
    assert "_static/ledger.css" in page and "_static/ledger.css" not in chapter
