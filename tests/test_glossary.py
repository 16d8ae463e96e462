"""The glossary: what it must hold, and how the pages of chapters lead to it."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from urllib.parse import urldefrag

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("myst_parser", reason="what builds the book is not installed")
sys.path.insert(0, str(ROOT / "site"))
glossary_links = importlib.import_module("glossary_links")
from bs4 import BeautifulSoup  # noqa: E402
from docutils import nodes  # noqa: E402
from sphinx.environment.adapters.indexentries import IndexEntries  # noqa: E402
from sphinx.testing.util import SphinxTestApp  # noqa: E402

TEXT = (ROOT / "glossary.md").read_text(encoding="utf-8")
LETTERS = (ROOT / "letters.md").read_text(encoding="utf-8")
HAN = re.compile(r"[\u4e00-\u9fff]")
ENTRY = re.compile(
    r"^(?P<names>(?:\S.*\n)+)  (?P<says>\S.*)\n\n  (?P<homes>\{home\}.*)\n", re.M
)


def chinese_first(line: str) -> bool:
    """Whether a line of names is a Chinese one."""
    return line.endswith(f" : {glossary_links.CHINESE}")


def read_entries() -> dict[str, dict]:
    """The entries by their first name."""
    found = {}
    for block in re.findall(r"^```\{glossary\}\n(.*?)^```$", TEXT, re.M | re.S):
        matches = [*ENTRY.finditer(block + "\n")]
        assert "".join(m[0] for m in matches).split() == block.split(), "misformatted"
        for match in matches:
            lines = match["names"].splitlines()
            english = [line for line in lines if not chinese_first(line)]
            found[english[0]] = {
                "english": english,
                "chinese": [line.split(" : ")[0] for line in lines if HAN.search(line)],
                "says": match["says"],
                "homes": re.findall(r"\{home\}`([\w.]+)`", match["homes"]),
            }
    return found


ENTRIES = read_entries()
EACH = pytest.mark.parametrize("name", ENTRIES)


# --- what the glossary holds ---------------------------------------------------------


def test_glossary_covers_the_book():
    assert 80 <= len(ENTRIES) <= 120
    names = " ".join(name for entry in ENTRIES.values() for name in entry["chinese"])
    source = "多头注意力 位置编码 旋转位置编码 层归一化 前馈网络 残差连接 多查询注意力"
    source += " 滑动窗口注意力 层级表示压缩 记忆 稀疏 学习率 预热 平方根 梯度消失 外推"
    assert [term for term in source.split() if term not in names] == []


@EACH
def test_entry_is_whole(name):
    entry = ENTRIES[name]
    assert len(entry["chinese"]) == 1 and not HAN.search(" ".join(entry["english"]))
    assert entry["homes"]
    assert entry["says"].endswith(".") and len(entry["says"].split()) <= 60
    assert not re.search(r"\b(simply|just|obviously)\b", entry["says"])


def test_no_two_entries_share_a_name():
    english = [
        {form for name in entry["english"] for form in glossary_links.forms(name)}
        for entry in ENTRIES.values()
    ]
    assert sum(map(len, english)) == len(set().union(*english))
    chinese = [entry["chinese"][0] for entry in ENTRIES.values()]
    assert len(chinese) == len(set(chinese))


@EACH
def test_home_of_a_term_exists_once_its_module_does(name):
    finished = any(ROOT.glob("chapters/13_*.ipynb"))
    for home in ENTRIES[name]["homes"]:
        module, _, attribute = home.partition(".")
        if not (ROOT / "transformer" / f"{module}.py").is_file():
            assert not finished, f"{module} is no module of the package"
            continue
        public = importlib.import_module(f"transformer.{module}").__all__
        assert not attribute or attribute in public


def test_each_term_that_is_not_linked_is_one_and_has_a_reason():
    names = {name for entry in ENTRIES.values() for name in entry["english"]}
    assert glossary_links.NOT_LINKED.keys() <= names
    assert all(glossary_links.NOT_LINKED.values())


def cells(notebook: str) -> str:
    """The prose of a notebook."""
    text = (ROOT / "chapters" / f"{notebook}.ipynb").read_text(encoding="utf-8")
    found = json.loads(text)["cells"]
    prose = ["".join(c["source"]) for c in found if c["cell_type"] == "markdown"]
    return "\n\n".join(prose)


def rows(text: str, head: str) -> list[list[str]]:
    """The rows of the table that begins with this head."""
    lines = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_verdicts_mean_the_same_in_preface_and_glossary():
    from transformer.experiments import VERDICTS

    preface = dict(rows(cells("00_preface"), "| verdict | what it says |"))
    assert preface == {word: ENTRIES[word]["says"] for word in VERDICTS}


def test_letters_mean_the_same_in_preface_and_table():
    table = {row[0]: row[1:3] for row in rows(LETTERS, "| letter | counts | in the")}
    assert "".join(table) == "BTSCHKDEFLVWGM"
    for letter, says in rows(cells("00_preface"), "| letter | counts |"):
        meaning, _, code = says.partition(", ")
        assert meaning == table[letter][0]
        assert code in ("", table[letter][1])


def test_sizes_of_the_bench_model_are_its_own():
    from torch.nn import Identity

    from transformer.experiments import bench_model

    sizes = {row[0]: row[1] for row in rows(LETTERS, "| letter | bench |")}
    model = bench_model(Identity)
    assert model.embedding.weight.shape == (int(sizes["V"]), int(sizes["C"]))
    assert len(model.blocks) == int(sizes["L"])
    assert model.blocks[0].ffn[0].out_features == int(sizes["F"])


# --- how pages lead to it ----------------------------------------------------------


@pytest.mark.parametrize(
    "name, form",
    [
        ("Causal mask", "causal masks"),
        ("cross-entropy", "cross entropies"),
        ("learned positions", "learned position"),
        ("softmax", "softmaxes"),
        ("bias", "biases"),
    ],
)
def test_plural_and_singular_are_one_term(name, form):
    assert form in glossary_links.forms(name)
    assert re.sub("-", " ", name.lower()) in glossary_links.forms(name)


GLOSSARY = """
# Glossary

```{glossary}
causal mask
因果掩码 : 中文
  Hides what is to come.

  {home}`attention.causal_mask`

key
键 : 中文
  What a query meets.

  {home}`attention`

key-value head
键值头 : 中文
  Two in one.

  {home}`grouped.share`

query
查询 : 中文
  What looks.

  {home}`attention`

value
值 : 中文
  What comes back.

  {home}`attention`
```
"""
ATTENTION = """
(home-transformer.attention)=

# The causal mask

> A causal mask is promised.

```{margin-note}
```

| causal mask |
| --- |
| causal mask |

:::{admonition} A causal mask
:class: dropdown
A causal mask in a solution.
:::

```python
causal mask
```

No `causal mask` in code, in $causal mask$, in [a causal mask](https://a.b/c), nor
unmasked keyboards, key_a, key-b; the value stays. *About a causal mask.* **Two keys.**

(home-transformer.attention.causal_mask)=

## Causal mask

:::{admonition} On a causal mask
Many Causal
masks hide each key-value head; a causal mask hides keys; each key matters.
:::

A **query** asks, and queries are not linked.

```{py:function} transformer.attention.causal_mask()
A triangle.
```
"""
LATER = "# Later\n\nNo query and no causal mask is new."


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A small book, built twice."""
    source = tmp_path_factory.mktemp("book")
    toc = "# Book\n\n```{toctree}\nchapters/a\nchapters/b\nglossary\n```\n"
    pages = {
        "conf.py": "extensions = ['myst_parser', 'glossary_links']\n"
        "myst_enable_extensions = ['colon_fence', 'dollarmath']\n"
        "html_theme = 'basic'\n",
        "index.md": toc,
        "glossary.md": GLOSSARY,
        "chapters/a.md": ATTENTION.replace("```{margin-note}\n```\n\n", ""),
        "chapters/b.md": LATER,
    }
    for name, text in pages.items():
        path = source / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for _ in range(2):
        app = SphinxTestApp("html", srcdir=source, freshenv=False)
        app.build()
        assert "WARNING" not in app.warning.getvalue()
        (source / "glossary.md").touch()
        index = {
            name: [address for _, address in links]
            for _, group in IndexEntries(app.env).create_index(app.builder)
            for name, (links, *_) in group
        }
        app.cleanup()
    return Path(app.outdir), index


def soup(site, page: str) -> BeautifulSoup:
    """A page of the small book."""
    text = (site[0] / f"{page}.html").read_text(encoding="utf-8")
    return BeautifulSoup(text, "html.parser")


def linked(site, page: str) -> list[str]:
    """The words of a page that lead to the glossary."""
    links = soup(site, page).select("a.glossary-term")
    return [re.sub(r"\s+", " ", link.get_text()) for link in links]


def test_first_place_in_running_text_is_linked_once(site):
    assert linked(site, "chapters/a") == ["Causal masks", "key-value head", "keys"]
    assert linked(site, "chapters/b") == ["query", "causal mask"]


def test_link_shows_the_chinese_term_and_leads_to_the_entry(site):
    link = soup(site, "chapters/b").select("a.glossary-term")[1]
    assert link["title"] == "因果掩码"
    page, anchor = urldefrag(link["href"])
    assert page == "../glossary.html"
    entry = soup(site, "glossary").find(id=anchor)
    assert entry.name == "dt" and entry.get_text().startswith("causal mask")


def where(site, term: str) -> BeautifulSoup:
    """The last line of an entry."""
    entry = soup(site, "glossary").find(id=f"term-{term}")
    return entry.find_next("dd").select_one(".glossary-where")


def test_entry_leads_to_what_treats_it_and_to_what_uses_it(site):
    line = where(site, "causal-mask")
    said = re.sub(r"\s+", " ", line.get_text())
    assert said == (
        "Treated in Causal mask, causal_mask. Used in The causal mask, Later."
    )
    for link in line.select("a"):
        page, anchor = urldefrag(link["href"])
        assert soup(site, page.removesuffix(".html")).find(id=anchor), link
    assert where(site, "key-value-head").get_text().startswith("Treated in a chapter")


def test_word_in_bold_is_the_definition_that_the_entry_leads_to(site):
    href = where(site, "query").select("a")[1]["href"]
    target = soup(site, "chapters/a").find(id=urldefrag(href)[1])
    assert target.name == "strong" and target.get_text() == "query"


def test_chinese_names_are_marked_as_chinese(site):
    names = soup(site, "glossary").select("dl.glossary dt[lang=zh]")
    assert [name.contents[0].strip() for name in names][:2] == ["因果掩码", "键"]
    assert not [
        n
        for n in soup(site, "glossary").select("dt:not([lang])")
        if HAN.search(n.get_text())
    ]


def test_index_has_both_languages_and_leads_to_the_chapter(site):
    entries = site[1]
    assert entries["因果掩码"] == ["glossary.html#term-0"]
    assert entries["causal mask"] == [
        "glossary.html#term-causal-mask",
        "chapters/a.html#use-causal-mask",
    ]
    assert entries["query"][1:] == ["chapters/a.html#use-query"]
    text = (site[0] / "genindex.html").read_text(encoding="utf-8")
    assert 'id="中文"' in text and 'id="因"' not in text


def test_terms_are_found_in_the_order_of_their_length():
    terms = [
        glossary_links.Term("a", ["key"], "键", []),
        glossary_links.Term("b", ["key value head"], "头", []),
    ]
    text = nodes.Text("a key value head and its key")
    document = nodes.paragraph("", "", text)
    _, ((_, found),) = glossary_links.Finder(terms).find(document)
    assert [(match[0], term.anchor) for match, term in found] == [
        ("key value head", "b"),
        ("key", "a"),
    ]
