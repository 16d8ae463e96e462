"""Sphinx extension: a chapter leads to the glossary, and the glossary back to it.

The notebooks stay plain. On the page of a chapter
- the first place where running text names a term becomes a link to its entry, with
  the Chinese term as hover text;
- a term in bold or italics is defined there, so it is no link; its entry leads there.

On the page of the glossary the role ``home`` leads to the section that treats a term
and to its API entry, once there is one, and a line names the pages that use the term.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxRole

GLOSSARY, CHAPTERS, PACKAGE = "glossary", "chapters/", "transformer"
CHINESE = "中文"  # the index lists Chinese terms under this heading

# Terms with an entry that no word of a chapter is linked to, and why.
NOT_LINKED = {
    "arm": "a part of the body elsewhere; the bench chapter defines it",
    "block": "also a block of code, and a tile of a matrix",
    "holds": "an everyday verb",
    "imprecise": "an everyday word; the preface lists the verdicts",
    "kernel": "also what runs a notebook",
    "margin": "also the margin of the page",
    "score": "also a verb",
    "value": "also the value of any variable",
    "wrong": "an everyday word",
}
RUNNING_TEXT = (nodes.paragraph, nodes.inline)
STRESSED = (nodes.strong, nodes.emphasis)
NOT_RUNNING_TEXT = (
    nodes.TextElement,  # headings, captions, code, math, links: all but those above
    addnodes.pending_xref,
    nodes.block_quote,
    nodes.figure,
    nodes.sidebar,  # notes in the margin
    nodes.table,
)
FOLDED = {"cell", "dropdown"}  # a cell's outputs, a solution


class Term(NamedTuple):
    """An entry of the glossary."""

    anchor: str  # of its first name
    names: list[str]  # in English
    chinese: str
    homes: list[str]  # what the role `home` names: modules, functions and classes


Definitions = dict[str, nodes.Element]  # by the term's anchor
Links = list[tuple[nodes.Text, list[tuple[re.Match, Term]]]]


def entries(doctree: nodes.document) -> Iterator[nodes.definition_list_item]:
    """The entries of the glossary's page."""
    for glossary in doctree.findall(addnodes.glossary):
        yield from glossary.findall(nodes.definition_list_item)


def is_chinese(term: nodes.term) -> bool:
    """Whether the index lists a name of an entry with the Chinese ones."""
    return any(i["entries"][0][4] == CHINESE for i in term.findall(addnodes.index))


def read_term(entry: nodes.definition_list_item) -> Term:
    """What an entry says about its names."""
    names: dict[bool, list[nodes.term]] = {False: [], True: []}
    for name in entry.findall(nodes.term):
        names[is_chinese(name)].append(name)
    english, chinese = names.values()
    homes = [node["home"] for node in entry.findall(nodes.inline) if "home" in node]
    return Term(
        english[0]["ids"][0],
        [name.astext() for name in english],
        ", ".join(name.astext() for name in chinese),
        homes,
    )


def forms(name: str) -> set[str]:
    """A name in singular and plural, in lower case, with blanks for hyphens."""
    name = re.sub(r"[\s-]+", " ", name.lower())
    plural = name + ("es" if name.endswith(("s", "x", "ch")) else "s")
    found = {name, plural}
    if name.endswith("y") and name[-2:-1] not in set("aeiou"):
        found.add(name[:-1] + "ies")
    if name.endswith("s") and not name.endswith(("ss", "us", "is")):
        found.add(name[:-1])
    return found


class Finder:
    """Finds the terms in the running text of a page."""

    def __init__(self, terms: list[Term]) -> None:
        self.terms: dict[str, Term] = {}
        for term in terms:
            for name in term.names:
                self.terms |= {form: term for form in forms(name)}
        linked = [
            re.escape(form).replace(r"\ ", r"[\s-]+")
            for form in sorted(self.terms, key=len, reverse=True)
            if not forms(form) & NOT_LINKED.keys()
        ]
        words = "|".join(linked) or r"(?!)"
        self.words = re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", re.I)

    def named(self, text: str) -> Term | None:
        """The term that a text names, if it is nothing but a term."""
        return self.terms.get(re.sub(r"[\s-]+", " ", text.strip().lower()))

    def find(self, doctree: nodes.document) -> tuple[Definitions, Links]:
        """The stressed words that define a term, and the first places of the others."""
        defined: Definitions = {}
        links: Links = []
        seen: set[str] = set()
        for node in running_text(doctree):
            if isinstance(node, STRESSED):
                if term := self.named(node.astext()):
                    defined.setdefault(term.anchor, node)
                    seen.add(term.anchor)
                continue
            found = []
            for match in self.words.finditer(node.astext()):
                term = self.named(match[0])
                if term and term.anchor not in seen:
                    seen.add(term.anchor)
                    found.append((match, term))
            if found:
                links.append((node, found))
        return defined, links


def is_running_text(node: nodes.Node) -> bool:
    """Whether a reader meets what a node holds as plain sentences."""
    if isinstance(node, RUNNING_TEXT):
        return True
    classes = node["classes"] if isinstance(node, nodes.Element) else []
    return not (FOLDED & set(classes) or isinstance(node, NOT_RUNNING_TEXT))


def join_texts(node: nodes.Element) -> None:
    """Make one text of several side by side: the parser cuts them at line ends."""
    joined: list[nodes.Node] = []
    for child in node.children:
        before = joined[-1] if joined else None
        if isinstance(child, nodes.Text) and isinstance(before, nodes.Text):
            joined[-1] = nodes.Text(before + child)
        else:
            joined.append(child)
    if len(joined) < len(node.children):
        node.clear()
        node.extend(joined)


def running_text(node: nodes.Node) -> Iterator[nodes.Node]:
    """The plain text of a page, and its words in bold or italics, in order."""
    if isinstance(node, nodes.TextElement):
        join_texts(node)
    for child in node.children:
        if isinstance(child, (nodes.Text, *STRESSED)):
            yield child
        elif is_running_text(child):
            yield from running_text(child)


def read_pages(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Note the terms and which page uses which, before any page is written.

    Returns:
        The pages to write again.
    """
    env.glossary_terms, env.glossary_uses = [], {}
    if GLOSSARY not in env.found_docs:
        return []
    env.glossary_terms = [*map(read_term, entries(env.get_doctree(GLOSSARY)))]
    finder = Finder(env.glossary_terms)
    chapters = sorted(name for name in env.found_docs if name.startswith(CHAPTERS))
    for docname in chapters:
        defined, links = finder.find(env.get_doctree(docname))
        linked = [term.anchor for _, found in links for _, term in found]
        env.glossary_uses[docname] = {*defined, *linked}
        note_index(env, docname, set(defined))
    return [GLOSSARY, *chapters]


def note_index(env: BuildEnvironment, docname: str, defined: set[str]) -> None:
    """Let the index lead to where a chapter defines a term or treats it."""
    index = env.get_domain("index").entries
    kept = [e for e in index.get(docname, []) if not e[2].startswith("use-")]
    for term in env.glossary_terms:
        used = term.anchor in env.glossary_uses[docname]
        homes = {place[0] for home in term.homes if (place := section_of(env, home))}
        if term.anchor in defined or (used and docname in homes):
            kept.append(("single", term.names[0], use(term.anchor), "", None))
    index[docname] = kept


def use(anchor: str) -> str:
    """The anchor of the place where a page uses a term."""
    return "use-" + anchor.removeprefix("term-")


def section_of(env: BuildEnvironment, home: str) -> tuple[str, str, str] | None:
    """Page, anchor and title of the section that treats something, if it is there."""
    labels = env.get_domain("std").labels
    return labels.get(f"home-{PACKAGE}.{home}".lower())


def pages_in_order(env: BuildEnvironment) -> list[str]:
    """The pages as the table of contents has them."""
    return [page for page in env.collect_relations() if page in env.glossary_uses]


class TermLinks(SphinxPostTransform):
    """Put the links on the pages."""

    default_priority = 2  # before references are resolved: as the pages were read

    def run(self, **kwargs) -> None:
        """Handle one page."""
        if self.env.docname == GLOSSARY:
            pages = pages_in_order(self.env)
            for entry in entries(self.document):
                self.finish(entry, pages)
        elif self.env.docname in self.env.glossary_uses:
            self.link_terms()
        for node in list(self.document.findall(nodes.inline)):
            if "home" in node:
                node.replace_self(self.homes(node["home"]))

    def link(self, page: str, anchor: str, *text: nodes.Node, **more) -> nodes.Node:
        """A link to a place in the book."""
        address = self.app.builder.get_relative_uri(self.env.docname, page)
        where = f"{address}#{anchor}" if anchor else address
        return nodes.reference("", "", *text, internal=True, refuri=where, **more)

    def link_terms(self) -> None:
        """Link the first place of each term to the glossary."""
        defined, links = Finder(self.env.glossary_terms).find(self.document)
        for anchor, stressed in defined.items():
            stressed["ids"].append(use(anchor))
        done = set(defined)
        for text, found in links:
            new, end, whole = [], 0, text.astext()
            for match, term in found:
                new.append(nodes.Text(whole[end : match.start()]))
                how = {"classes": ["glossary-term"], "reftitle": term.chinese}
                words = nodes.Text(match[0])
                new.append(self.link(GLOSSARY, term.anchor, words, **how))
                if term.anchor not in done:  # else the definition has the anchor
                    new[-1]["ids"].append(use(term.anchor))
                end = match.end()
            text.parent.replace(text, [*new, nodes.Text(whole[end:])])

    def homes(self, *homes: str) -> list[nodes.Node]:
        """Links to the sections that treat something and to their API entries."""
        found: list[nodes.Node] = []
        for home in homes:
            if place := section_of(self.env, home):
                page, anchor, title = place
                found += [nodes.Text(", "), self.link(page, anchor, nodes.Text(title))]
            _, _, name = home.partition(".")
            if name and (api := self.api(home)):
                code = nodes.literal("", name)
                found += [nodes.Text(", "), self.link(*api, code)]
        return found[1:] or [nodes.Text("a chapter to come")]

    def api(self, home: str) -> tuple[str, str] | None:
        """Page and anchor of the API entry of a function or a class, if it is there."""
        entry = self.env.get_domain("py").objects.get(f"{PACKAGE}.{home}")
        return entry and (entry.docname, entry.node_id)

    def finish(self, entry: nodes.definition_list_item, pages: list[str]) -> None:
        """Mark the Chinese names, and say where a term is treated and used."""
        term = read_term(entry)
        for name in entry.findall(nodes.term):
            if is_chinese(name):
                name["classes"].append("language-zh")
        *_, last = entry.findall(nodes.paragraph)
        last["classes"].append("glossary-where")
        last.clear()
        last.extend([nodes.Text("Treated in "), *self.homes(*term.homes)])
        between = ". Used in "
        for page in pages:
            if term.anchor in self.env.glossary_uses[page]:
                title = nodes.Text(self.env.titles[page].astext())
                last += nodes.Text(between)
                last += self.link(page, use(term.anchor), title)
                between = ", "
        last += nodes.Text(".")


class Home(SphinxRole):
    """`module` or `module.name` of the package: where a term is treated."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """A place for the links, which are known when all pages are read."""
        return [nodes.inline("", "", home=self.text)], []


def setup(app: Sphinx) -> dict:
    """Connect the extension."""
    app.add_role("home", Home())
    app.connect("env-updated", read_pages)
    app.add_post_transform(TermLinks)
    app.add_css_file("glossary.css")
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
