"""Sphinx extension: the page of the sixty claims, made from the verdicts in notebooks.

A verdict is what a cell printed when it called `verdict`; the notebook stores it. The
line ``% ledger`` of the page `claims` becomes one entry a claim, in the order of the
essay: the claim in English and Chinese, what was found here with a link to
the cell, and what papers found. ``{{ verdicts }}`` on any page becomes the counts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

PAGE, LAST_CHAPTER = "claims", "13_relations"
NOT_YET = "not measured yet"
ANSWERS = {"holds", "holds with conditions", "imprecise", "wrong"}
UNTESTED = {"unsupported", "not assessable", "not empirical", "not measured here"}
SECTIONS = {  # of the essay, by the prefix of a claim's id
    "MHA": "Multi-head attention",
    "PE": "Positional encoding",
    "LN": "Layer normalisation",
    "FFN": "Feed-forward network",
    "RES": "Residual connections",
    "FA": "Modern attention",
    "MQA": "Modern attention",
    "SWA": "Modern attention",
    "HP": "Practice",
    "LRD": "Practice",
    "INF": "Practice",
    "CON": "Conclusion",
}
CHAPTER = re.compile(r"^[\s-]*file:\s*chapters/([\w-]+)", re.M)
VERDICT = re.compile(r"([A-Z]+-\d+[a-z]?): ([a-z ]+) - (.+)")
EFFECT = re.compile(
    r"  effect (?P<effect>.+?)(?: (?P<interval>\[[^\[\]]*\]))?"
    r"(?:, (?P<seeds>\d+) seeds?)?, (?P<device>[^,]+)"
)


class Verdict(NamedTuple):
    """What a cell printed about a claim, and where; empty strings for what it lacks."""

    claim: str
    word: str
    because: str
    effect: str
    interval: str
    seeds: str
    device: str
    chapter: str
    cell: str


# --- reading ---------------------------------------------------------------------


def printed(cell: dict) -> list[str]:
    """The lines that a cell printed."""
    streams = [o for o in cell.get("outputs", []) if o.get("name") == "stdout"]
    return "".join("".join(stream["text"]) for stream in streams).splitlines()


def read_verdicts(chapter: str, notebook: dict) -> list[Verdict]:
    """The verdicts that a notebook stores, in its order."""
    found = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code" or "verdict(" not in "".join(cell["source"]):
            continue
        lines = printed(cell)
        for line, after in zip(lines, [*lines, ""][1:], strict=True):
            if said := VERDICT.fullmatch(line):
                effect = EFFECT.fullmatch(after)
                parts = effect.groupdict(default="") if effect else {}
                more = (parts.get(name, "") for name in Verdict._fields[3:7])
                found.append(Verdict(*said.groups(), *more, chapter, cell["id"]))
    return found


class Ledger(NamedTuple):
    """The claims by id in the source's order, all verdicts, the chapters there are."""

    claims: dict[str, dict]
    verdicts: list[Verdict]
    chapters: list[str]


def read_ledger(root: Path) -> Ledger:
    """The ledger of a repository, from the chapters in its table of contents."""
    claims = json.loads((root / "transformer/claims.json").read_text(encoding="utf-8"))
    chapters = CHAPTER.findall((root / "_toc.yml").read_text(encoding="utf-8"))
    verdicts = []
    for chapter in chapters:
        text = (root / f"chapters/{chapter}.ipynb").read_text(encoding="utf-8")
        verdicts += read_verdicts(chapter, json.loads(text))
    return Ledger(claims, verdicts, chapters)


def complaints(ledger: Ledger) -> list[str]:
    """What makes a page of this ledger wrong, one line each."""
    claims, verdicts, chapters = ledger
    found, times = [], Counter(verdict.claim for verdict in verdicts)
    found += [f"{name} is judged {n} times" for name, n in times.items() if n > 1]
    for verdict in verdicts:
        claim = claims.get(verdict.claim)
        if claim is None:
            found.append(f"{verdict.claim} is no claim of the source")
        elif claim["chapter"] != verdict.chapter:
            places = f"{verdict.chapter}, not in {claim['chapter']}"
            found.append(f"{verdict.claim} is judged in {places}")
        if not verdict.effect and verdict.word not in UNTESTED:
            found.append(f"{verdict.claim}: {verdict.word}, but by how much?")
    if LAST_CHAPTER in chapters:
        found += [f"{name} is not judged" for name in claims if name not in times]
    return found


# --- writing ---------------------------------------------------------------------


def plain(text: str) -> str:
    """Text as Markdown that means just that; a sign before a number is a minus."""
    text = re.sub(r"(?<![\w.])-(?=\d)", "−", text)
    return re.sub(r"([\\`*_{}\[\]<>$#|~^&])", r"\\\1", text)


def css_class(word: str) -> str:
    """The class of an entry with this verdict."""
    return "is-" + word.replace(" ", "-")


def differs(claim: dict, verdict: Verdict | None) -> bool:
    """Whether papers found another answer."""
    answered = verdict is not None and verdict.word in ANSWERS
    return answered and verdict.word != claim["literature"]


def counts(ledger: Ledger) -> str:
    """How many claims are judged, and how, in words."""
    words = Counter(verdict.word for verdict in ledger.verdicts)
    told = ", ".join(f"{n} *{word}*" for word, n in words.most_common())
    judged, total = len(ledger.verdicts), len(ledger.claims)
    so_far = f"{judged} of {total} claims are judged"
    if judged == total:
        so_far = f"The {total} verdicts"
    return f"{so_far}: {told}" if told else so_far


def measured(verdict: Verdict) -> str:
    """The effect with its interval, how often it was repeated, and where."""
    sure = f"95 % interval {plain(verdict.interval)}" if verdict.interval else ""
    seeds = f"{verdict.seeds} seeds" if verdict.seeds else ""
    seeds = "1 seed" if verdict.seeds == "1" else seeds
    device = "on a CPU" if verdict.device == "cpu" else f"on {plain(verdict.device)}"
    return ", ".join(filter(None, (plain(verdict.effect), sure, seeds, device)))


def number(chapter: str) -> int:
    """The number of a chapter."""
    return int(chapter.split("_")[0])


def label(chapter: str, cell: str) -> str:
    """The name under which Sphinx finds a cell."""
    return f"chapters/{chapter}#cell-{cell}".lower()


def entry(name: str, claim: dict, verdict: Verdict | None) -> str:
    """A claim as the page shows it, in Markdown."""
    word = verdict.word if verdict else NOT_YET
    other = differs(claim, verdict)
    classes = f"claim {css_class(word)}{' differs' * other}"
    lines = [f"(claim-{name.lower()})=", f":::{{div}} {classes}", "{.claim-itself}"]
    lines += [f"[{name}]{{.claim-id}} {plain(claim['en'])}", ""]
    lines += ["{.chinese}", plain(claim["zh"]), "", "Here"]
    if verdict is None:
        lines += [f": [{NOT_YET}]{{.verdict}}, for chapter {number(claim['chapter'])}"]
    else:
        mark = " [≠ papers]{.not-as-papers}" * other
        lines += [f": [{word}]{{.verdict}}: {plain(verdict.because)}{mark}"]
        where = f"{name} in chapter {number(verdict.chapter)}"
        link = f"{{ref}}`{where} <{label(verdict.chapter, verdict.cell)}>`"
        effect = f"Effect: {measured(verdict)}. " if verdict.effect else ""
        lines += [f": {effect}See {link}."]
    cited = f"{{cite:t}}`{','.join(claim['cite'])}`"
    papers = f": [{claim['literature']}]{{.verdict}}. {plain(claim['found'])}"
    return "\n".join([*lines, "", "Papers", papers, f": {cited}", ":::", ""])


def choice(name: str, label: str, checked: bool = False) -> str:
    """One way to filter the page: a radio button, so that arrow keys reach it."""
    state = " checked" if checked else ""
    button = f'<input type="radio" name="shown" id="show-{name}"{state}>'
    return f"<label>{button} {label}</label>"


def filters(ledger: Ledger) -> str:
    """Buttons for the words that occur; the style sheet hides the other entries."""
    judged = {verdict.claim: verdict for verdict in ledger.verdicts}
    rows = [(claim, judged.get(name)) for name, claim in ledger.claims.items()]
    words = Counter(verdict.word if verdict else NOT_YET for _, verdict in rows)
    others = sum(differs(*row) for row in rows)
    buttons = [choice("all", f"all {len(rows)}", checked=True)]
    buttons += [choice(css_class(w), f"{w} ({n})") for w, n in words.most_common()]
    if others:
        buttons.append(choice("differs", f"≠ papers ({others})"))
    start = '```{raw} html\n<fieldset class="claim-filter"><legend>Show</legend>'
    return "\n".join([start, *buttons, "</fieldset>", "```", ""])


def page(ledger: Ledger) -> str:
    """All entries under the sections of the source, in Markdown."""
    judged = {verdict.claim: verdict for verdict in ledger.verdicts}
    lines, section = [filters(ledger)], ""
    for name, claim in ledger.claims.items():
        if (title := SECTIONS[name.split("-")[0]]) != section:
            section = title
            lines.append(f"## {title}\n")
        lines.append(entry(name, claim, judged.get(name)))
    return "\n".join(lines)


# --- Sphinx ----------------------------------------------------------------------


def on_source_read(app: Sphinx, docname: str, content: list[str]) -> None:
    """Fill in the entries and the counts.

    Raises:
        ExtensionError: A verdict stands twice, or where it should not, or lacks its
            effect; or one is missing and the last chapter is there.
    """
    if "% ledger\n" not in content[0] and "{{ verdicts }}" not in content[0]:
        return
    ledger = read_ledger(Path(app.srcdir))
    if found := complaints(ledger):
        raise ExtensionError("the ledger of claims: " + "; ".join(found))
    content[0] = content[0].replace("{{ verdicts }}", counts(ledger))
    content[0] = content[0].replace("% ledger\n", page(ledger) + "\n")


def register_cells(app: Sphinx, document: nodes.document) -> None:
    """Let the page of claims refer to the cells that judge."""
    docname, labels = app.env.docname, app.env.get_domain("std").anonlabels
    for cell in document.findall(nodes.container):
        if anchor := (cell.get("cell_metadata") or {}).get("anchor"):
            labels[f"{docname}#{anchor}".lower()] = (docname, anchor)


def name_language(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Tell browsers which words are Chinese; earlier, Sphinx asks for their quotes."""
    if docname == PAGE:
        for words in doctree.findall(nodes.paragraph):
            if "chinese" in words["classes"]:
                words["classes"].append("language-zh")


def add_style(app, pagename, templatename, context, doctree) -> None:
    """The page's own style sheet."""
    if pagename == PAGE:
        app.add_css_file("ledger.css")


def setup(app: Sphinx) -> dict:
    """Connect the extension."""
    app.connect("source-read", on_source_read)
    app.connect("doctree-read", register_cells)
    app.connect("doctree-resolved", name_language)
    app.connect("html-page-context", add_style)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
