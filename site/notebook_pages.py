"""Sphinx extension: what a notebook's directives mean on its page.

The file on disk, the download button and Colab keep every line. On the page
- cells that only steer the exporter are left out and ``#|`` lines are cut;
- an exported cell gets a badge that leads to the API entry of what it defines, and
  that entry gets a link back to the section which holds the cell;
- the cell that installs on Colab is folded;
- each code cell can be linked to, and a figure links to the cell that draws it;
- the page knows the minutes it takes to read, from which reading.js counts down.
"""

from __future__ import annotations

import ast
import html
import json
import re
from itertools import chain
from pathlib import Path

import yaml
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import transformer

PACKAGE = transformer.__name__
DIRECTIVE = re.compile(r"#\s*\|\s*(?P<name>\w+)\s*:?\s*(?P<value>.*)")
MINUTES = re.compile(r"\{\{ minutes (?P<what>[\w/ ]+) \}\}")
CHAPTERS = re.compile(r"\{\{ chapters (?P<part>[\w ]+) \}\}")
SLIDERS = 'class="explore"'  # of a figure as light_pages draws it
SVG_TEXT = re.compile(r"<text\b[^>]*>([^<]+)</text>")


def split_directives(source: str) -> tuple[dict[str, str], str]:
    """The directives at the top of a cell, and the code below them."""
    lines = source.splitlines(keepends=True)
    found = {}
    while lines and (match := DIRECTIVE.match(lines[0].strip())):
        found[match["name"]] = match["value"].strip()
        lines.pop(0)
    return found, "".join(lines)


def public_names(source: str) -> list[str]:
    """The public names that a cell defines: functions and classes, then the rest."""
    body = ast.parse(source).body
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = [node.name for node in body if isinstance(node, kinds)]
    for node in body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_")]


def entry(source: str, module: str) -> tuple[str, str]:
    """The API entry of what a cell defines first, with its kind, or of its module."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    for node in ast.parse(source).body:
        if isinstance(node, kinds) and not node.name.startswith("_"):
            return f"{module}.{node.name}", "obj"
    return module, "mod"


def words_in_figure(cell: dict) -> str | None:
    """A text that stands for a drawn figure: its titles and labels, without numbers."""
    for output in cell.get("outputs", []):
        if drawing := output.get("data", {}).get("image/svg+xml"):
            found = SVG_TEXT.findall("".join(drawing))
            words = [html.unescape(text).strip() for text in found]
            named = [word for word in words if any(c.isalpha() for c in word)]
            return "Figure: " + "; ".join(dict.fromkeys(named))
    return None


def name_fold(metadata: dict, words: str) -> None:
    """Say what opens when the folded code of a cell is opened."""
    prompts = {"code_prompt_show": f"Show {words}", "code_prompt_hide": f"Hide {words}"}
    metadata.setdefault("mystnb", {}).update(prompts)


def mark(cell: dict, module: str | None) -> str | None:
    """Turn the directives of one code cell into tags and metadata for the page.

    Returns:
        The module that the cells from here on export to.
    """
    directives, code = split_directives("".join(cell["source"]))
    module = directives.get("default_exp", module)
    cell["source"] = code.splitlines(keepends=True)
    metadata = cell["metadata"]
    metadata["anchor"] = f"cell-{cell['id']}" if "id" in cell else None
    tags = metadata.setdefault("tags", [])
    if not code.strip() or {"hide", "default_exp"} & directives.keys():
        tags.append("remove-cell")
    elif '"google.colab" in sys.modules' in code:
        tags.append("hide-input")
        name_fold(metadata, "what this cell installs on Colab")
    elif "hide-input" in tags and "def check_" in code:
        name_fold(metadata, "the checker")
    for kind in ("export", "exporti", "exports"):
        if kind in directives:
            to = f"{PACKAGE}.{directives[kind] or module}"
            private = kind == "exporti"
            metadata["module"] = to
            metadata["names"] = [] if private else public_names(code)
            metadata["entry"] = (to, "mod") if private else entry(code, to)
    if alt := words_in_figure(cell):
        metadata.setdefault("mystnb", {}).setdefault("image", {"alt": alt})
    return module


def read_notebook(text: str) -> str:
    """The notebook as the page shows it."""
    notebook = json.loads(text)
    module = None
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            module = mark(cell, module)
    return json.dumps(notebook)


def table_of_modules(root: Path) -> str:
    """One row a module, in the order of the chapters: its page, its docstring."""
    toc = (root / "_toc.yml").read_text(encoding="utf-8")
    rows = ["| module | what it holds |", "| --- | --- |"]
    for name in re.findall(r"file: api/(\w+)", toc):
        source = (root / PACKAGE / f"{name}.py").read_text(encoding="utf-8")
        summary = ast.get_docstring(ast.parse(source))
        rows.append(f"| [`{PACKAGE}.{name}`](api/{name}.md) | {summary} |")
    return "\n".join(rows)


def tables(root: Path) -> str:
    """The measured tables, as `make bench` left them."""
    folder = root / "benchmarks"
    files = sorted([*folder.glob("*.md"), *folder.glob("results/*.md")])
    texts = [file.read_text(encoding="utf-8") for file in files]
    return "\n\n".join(texts) or "No table yet: `make bench` measures and writes them."


def parts(root: Path) -> dict[str, list[str]]:
    """The pages of the chapters in each part of the book, in order."""
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    found = {}
    for part in toc["parts"]:
        files = []
        for chapter in part["chapters"]:
            sections = chapter.get("sections", [])
            files += [entry["file"] for entry in (chapter, *sections)]
        found[part["caption"]] = [f for f in files if f.startswith("chapters/")]
    return found


def pages(root: Path, what: str) -> list[str]:
    """The chapters that are meant: named, or those of a part, or all."""
    if "/" in what:
        return what.split()
    known = parts(root)
    return [*chain.from_iterable(known.values())] if what == "all" else known[what]


def links(root: Path, part: str) -> str:
    """The chapters of a part, linked."""
    *most, last = (f"{{doc}}`{page}`" for page in pages(root, part))
    return f"{', '.join(most)} and {last}" if most else last


def minutes(root: Path, pages: str) -> int:
    """Minutes to read some chapters: 200 words or 40 lines of code a minute."""
    words = lines = 0
    for page in pages.split():
        text = (root / f"{page}.ipynb").read_text(encoding="utf-8")
        for cell in json.loads(text)["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                words += len(source.split())
            else:
                lines += len(list(filter(str.strip, source.splitlines())))
    return 5 * max(1, round((words / 200 + lines / 40) / 5))


def total(root: Path, what: str) -> str:
    """The minutes of the chapters that are meant."""
    return str(minutes(root, " ".join(pages(root, what))))


def read_markdown(app: Sphinx, text: str) -> str:
    """Fill in what a page takes from elsewhere."""
    root = Path(app.srcdir)
    text = CHAPTERS.sub(lambda match: links(root, match["part"]), text)
    text = MINUTES.sub(lambda match: total(root, match["what"]), text)
    address = app.config.html_theme_options["repository_url"]
    text = text.replace("{{ repository }}", address)
    text = text.replace("{{ version }}", transformer.__version__)
    if "% modules\n" in text:
        text = text.replace("% modules\n", table_of_modules(root) + "\n")
    if "% tables\n" in text:
        text = text.replace("% tables\n", tables(root) + "\n")
    return text


def on_source_read(app: Sphinx, docname: str, content: list[str]) -> None:
    """Rewrite a page's source before it is parsed."""
    if app.env.doc2path(docname).endswith(".ipynb"):
        content[0] = read_notebook(content[0])
    else:
        content[0] = read_markdown(app, content[0])


def badge(module: str, target: str, kind: str) -> nodes.container:
    """A line above a cell that names its module and links to the API entry."""
    link = addnodes.pending_xref(
        "",
        nodes.literal(module, module, classes=["xref"]),
        refdomain="py",
        reftype=kind,
        reftarget=target,
        refexplicit=True,
        refwarn=True,
    )
    words = nodes.paragraph("", "", nodes.Text("exported to "), link)
    return nodes.container("", words, classes=["export-badge"])


def draws_figure(cell: nodes.container) -> bool:
    """Whether the outputs of a cell hold a figure."""
    drawn = any(True for _ in cell.findall(nodes.image))
    return drawn or any(SLIDERS in raw.astext() for raw in cell.findall(nodes.raw))


def link_to_cell(anchor: str) -> nodes.container:
    """A line below a figure that leads to the cell which draws it."""
    link = nodes.reference("", "the cell that draws this", refid=anchor, internal=True)
    words = nodes.paragraph("", "", link)
    return nodes.container("", words, classes=["figure-link"])


class CellMarks(SphinxTransform):
    """Put the anchors, the badges and the links of figures on the page."""

    default_priority = 400

    def apply(self, **kwargs) -> None:
        for cell in list(self.document.findall(nodes.container)):
            metadata = cell.get("cell_metadata") or {}
            if anchor := metadata.get("anchor"):
                cell["ids"].append(anchor)
                if draws_figure(cell):
                    cell.append(link_to_cell(anchor))
            if "module" in metadata:
                cell.insert(0, badge(metadata["module"], *metadata["entry"]))


def register_sections(app: Sphinx, document: nodes.document) -> None:
    """Note which section explains each exported name."""
    labels = app.env.get_domain("std").labels
    docname = app.env.docname
    for cell in document.findall(nodes.container):
        metadata = cell.get("cell_metadata") or {}
        if "module" not in metadata:
            continue
        section = cell.parent
        while not isinstance(section, nodes.section):
            section = section.parent
        chapter = document.next_node(nodes.title).astext()
        title = section.next_node(nodes.title).astext()
        title = chapter if title == chapter else f"{chapter}: {title}"
        module = metadata["module"]
        top = document.next_node(nodes.section)["ids"][0]
        labels.setdefault(f"home-{module}".lower(), (docname, top, chapter))
        for name in metadata["names"]:
            place = (docname, section["ids"][0], title)
            labels[f"home-{module}.{name}".lower()] = place


def link_back(app, what, name, obj, options, lines) -> None:
    """Lead from an API entry to the section that explains it."""
    # A letter and a full stop would begin a list: "n_queries: T."
    lines[:] = [re.sub(r"^(\s+)([A-Z]\.)$", r"\1\\\2", line) for line in lines]
    if what in {"module", "class", "function", "data"}:
        lines += ["", f"Explained in :ref:`home-{name.lower()}`.", ""]


def drop_unused_scripts(app, pagename, templatename, context, doctree) -> None:
    """Leave out thebe, which is off and whose scripts name another host."""

    def wanted(script) -> bool:
        attributes = getattr(script, "attributes", {})
        return "thebe" not in f"{script.filename} {attributes.get('body')}"

    context["script_files"] = [s for s in context["script_files"] if wanted(s)]


def describe_reading(app, pagename, templatename, context, doctree) -> None:
    """Name the table of contents of a chapter and say how long it takes to read."""
    root = Path(app.srcdir)
    if (root / f"{pagename}.ipynb").is_file():
        context["theme_toc_title"] = "In this chapter"
        tag = f'<meta name="minutes" content="{minutes(root, pagename)}">'
        context["metatags"] = context.get("metatags", "") + tag


def drop_unused_configuration(app, doctree, docname) -> None:
    """Leave out what thebe, which is off, adds to the end of every page."""
    for raw in list(doctree.findall(nodes.raw)):
        if raw.parent is doctree and re.search("thebe|kernelName", raw.astext()):
            doctree.remove(raw)


def setup(app: Sphinx) -> dict:
    """Connect the extension."""
    app.connect("source-read", on_source_read)
    app.add_transform(CellMarks)
    app.connect("doctree-read", register_sections)
    app.connect("autodoc-process-docstring", link_back, priority=900)
    app.connect("doctree-resolved", drop_unused_configuration, priority=900)
    app.connect("html-page-context", drop_unused_scripts, priority=900)
    app.connect("html-page-context", describe_reading)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
