"""Sphinx extension: the tables of the status and conformance pages.

They are made of site/measured/*.json, which `make test` writes and `make measured`
accepts, of site/measured/mutants/*.json, which `make mutants` writes, and of
site/cases.json; nothing is executed. A page asks for its tables by a line ``% status``,
``% conformance``, ``% mutants`` or ``% cases``.
"""

from __future__ import annotations

import ast
import hashlib
import html
import json
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import notebook_pages
import yaml
from sphinx.application import Sphinx

COLUMNS = {
    "forward": "forward",
    "gradient": "gradient",
    "mask": "mask",
    "dtype": "dtype",
    "ragged": "ragged length",
    "compile": "compile",
    "cached": "cached = uncached",
}
HEADS = ["reference", *COLUMNS.values()]
EMPTY = "–"
# Said again to who reads aloud: on a phone the style sheet makes cards of the rows.
ROLES = {"table": "table", "thead": "rowgroup", "tbody": "rowgroup"}
ROLES |= {"tfoot": "rowgroup", "tr": "row", "td": "cell"}
NOTHING = "Nothing is measured yet: `make test` measures, `make measured` accepts.\n"
Link = Callable[[str], str]  # the address of a page, seen from this one

# --- reading ---------------------------------------------------------------------


def stored(root: Path, name: str) -> dict:
    """What was measured, empty if it was not."""
    path = root / "site" / "measured" / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def listed(root: Path, folder: str) -> list[str]:
    """The pages of a folder, in the order of the book."""
    toc = (root / "_toc.yml").read_text(encoding="utf-8")
    return re.findall(rf"^[\s-]*file: ({folder}/\w+)", toc, re.M)


def public_names(root: Path, module: str) -> list[str]:
    """What a module exports."""
    source = (root / "transformer" / f"{module}.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "__all__":
            return ast.literal_eval(node.value)
    return []


def title_and_module(path: Path) -> tuple[str, str | None]:
    """The heading of a notebook, and the module that it exports."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    title = next(text for text in texts if text.startswith("# ")).splitlines()[0][2:]
    directives = [notebook_pages.split_directives(text)[0] for text in texts]
    exported = [found["default_exp"] for found in directives if "default_exp" in found]
    return title, next(iter(exported), None)


# --- words and cells -------------------------------------------------------------


def conditions(facts: dict) -> str:
    """What was measured on, when and with what."""
    cores = f", {facts['cores']} cores" if "cores" in facts else ""
    machine = facts["device"] + cores
    versions = f"Python {facts['python']}, torch {facts['torch']}"
    return f"{machine}; {facts['date']}; {versions}"


def duration(seconds: float | None) -> str:
    """Seconds, in minutes where there are many."""
    if seconds is None:
        return EMPTY
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def percent(module: dict | None) -> str:
    """The share of statements that ran; cut, so that 100 % is all of them."""
    if not module:
        return EMPTY
    return f"{100 * module['covered'] // max(1, module['statements'])} %"


def element(tag: str, content: str, **attributes: str) -> str:
    """An HTML element; a trailing _ of a name is dropped."""
    if tag in ROLES:
        attributes["role"] = ROLES[tag]
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{given}>{content}</{tag}>"


def row(head: str, heads: list[str], cells: Iterable[str]) -> str:
    """A row of a table: its head, then its cells, which know their columns."""
    first = element("th", head, scope="row", role="rowheader")
    rest = ""
    for name, cell in zip(heads[1:], cells, strict=True):
        kind = "empty" if cell == EMPTY else "full"
        rest += element("td", cell, data_column=name, class_=kind)
    return element("tr", first + rest)


def table(caption: str, heads: list[str], bodies: str, kind: str) -> str:
    """A table that scrolls in its own box, as MyST."""
    column = {"scope": "col", "role": "columnheader"}
    top = element("tr", "".join(element("th", name, **column) for name in heads))
    words = element("caption", caption, class_="visually-hidden")
    inside = words + element("thead", top) + bodies
    whole = element("table", inside, class_=kind)
    box = {"class_": "measured", "role": "region", "tabindex": "0"}
    box |= {"aria_label": caption}
    return f"```{{raw}} html\n{element('div', whole, **box)}\n```\n"


# --- the status page -------------------------------------------------------------


def status_rows(root: Path) -> list[dict]:
    """What is known of each notebook."""
    found = stored(root, "notebooks.json").get("notebooks", {})
    on_gpu = stored(root, "notebooks.cuda.json").get("notebooks", {})
    coverage = stored(root, "tests.json").get("coverage", {})
    rows = []
    for page in listed(root, "chapters"):
        name = Path(page).name
        title, module = title_and_module(root / f"{page}.ipynb")
        rows.append(
            {
                "page": page,
                "title": title,
                "minutes": notebook_pages.minutes(root, page),
                "gpu": on_gpu.get(name, {}).get("seconds"),
                "module": coverage.get(module),
                **{"seconds": None, "compared": None, "ignored": None},
                **found.get(name, {}),
            }
        )
    return rows


def total(rows: list[dict], key: str) -> int | float | None:
    """The sum of what is known, None if nothing is."""
    known = [row[key] for row in rows if row[key] is not None]
    return sum(known) if known else None


def status_cells(row: dict) -> list[str]:
    """The cells behind the name of a notebook, or of all together."""
    counts = [row["compared"], row["ignored"]]
    return [
        f"{row['minutes']} min",
        duration(row["seconds"]),
        duration(row["gpu"]),
        *(EMPTY if count is None else f"{count}" for count in counts),
        percent(row["module"]),
    ]


def all_together(rows: list[dict]) -> dict:
    """The totals of the rows."""
    keys = ("minutes", "seconds", "gpu", "compared", "ignored")
    modules = [row["module"] for row in rows if row["module"]]
    parts = ("statements", "covered")
    sums = {part: sum(module[part] for module in modules) for part in parts}
    return {key: total(rows, key) for key in keys} | {"module": modules and sums}


def status(root: Path, link: Link) -> str:
    """The table of the notebooks, as MyST."""
    measured = stored(root, "notebooks.json") or stored(root, "tests.json")
    if not measured:
        return NOTHING
    rows = status_rows(root)
    heads = ["notebook", "reading", "run on CPU", "run on GPU"]
    heads += ["outputs compared", "outputs ignored", "module tested"]
    body = ""
    for one in rows:
        name = element("a", html.escape(one["title"]), href=link(one["page"]))
        body += row(name, heads, status_cells(one))
    foot = row(f"all {len(rows)}", heads, status_cells(all_together(rows)))
    bodies = element("tbody", body) + element("tfoot", foot)
    gpu = stored(root, "notebooks.cuda.json")
    on_gpu = f"GPU: {conditions(gpu['facts'])}." if gpu else "GPU: not measured here."
    said = f"CPU: {conditions(measured['facts'])}. {on_gpu}\n\n"
    return said + table("What is known of each notebook", heads, bodies, "status")


# --- the conformance page --------------------------------------------------------


def reference(text: str) -> str:
    """A reference; a dotted name is code and may break behind dots and lines."""
    name, comma, rest = text.partition(",")
    if "." in name.split()[0]:
        name = element("code", re.sub("([._])", r"\1<wbr>", html.escape(name)))
    else:
        name = html.escape(name)
    return name + comma + html.escape(rest)


def order(text: str) -> tuple[int, str]:
    """Other packages first, then loops and formulas, then a component itself."""
    kind = 2 if text.startswith("itself") else "." not in text.split()[0]
    return int(kind), text


def with_itself_in_one(references: dict[str, dict]) -> dict[str, dict]:
    """The rows of a component; what it is compared with of itself makes one row."""
    rows, own, names = {}, {}, []
    for text in sorted(references, key=order):
        if text.startswith("itself"):
            names.append(text.removeprefix("itself").strip(" ,"))
            for column, dtypes in references[text].items():
                own.setdefault(column, {}).update(dtypes)
        else:
            rows[text] = references[text]
    return rows | ({f"itself: {'; '.join(sorted(names))}": own} if own else {})


def errors(dtypes: dict[str, dict] | None) -> str:
    """The largest error in each dtype, one below the other."""
    if not dtypes:
        return EMPTY
    lines = []
    for dtype, entry in sorted(dtypes.items(), reverse=True):
        size = f"{entry['error']:.1e}" if entry["error"] else "0"
        lines.append(f"{size} {element('small', dtype)}")
    return "<br>".join(lines)


def count(references: dict[str, dict]) -> int:
    """How many comparisons a component went through."""
    return sum(
        entry["comparisons"]
        for columns in references.values()
        for dtypes in columns.values()
        for entry in dtypes.values()
    )


def component_rows(name: str, references: dict, address: str) -> str:
    """The rows of a component: its name, then one for each reference."""
    words = element("a", element("code", name), href=address)
    comparisons = f"{count(references):,} comparisons"
    words = element("span", f"{words} {element('small', comparisons)}")
    span = {"scope": "rowgroup", "role": "rowheader", "colspan": str(len(HEADS))}
    rows = element("tr", element("th", words, **span))
    for text, columns in with_itself_in_one(references).items():
        cells = (errors(columns.get(column)) for column in COLUMNS)
        rows += row(reference(text), HEADS, cells)
    return element("tbody", rows)


def module_section(root: Path, module: str, found: dict, link: Link) -> str:
    """A heading, the table of a module, and the names that are not in it."""
    page, body = link(f"api/{module}"), ""
    public = public_names(root, module)
    known = {name.partition(".")[0]: name for name in found}
    for name in sorted(found, key=lambda name: public.index(name.partition(".")[0])):
        anchor = f"{page}#transformer.{module}.{name.partition('.')[0]}"
        body += component_rows(name, found[name], anchor)
    caption = f"Largest errors of transformer.{module}"
    text = f"## `transformer.{module}`\n\n"
    text += table(caption, HEADS, body, "conformance") + "\n"
    rest = ", ".join(f"`{name}`" for name in public if name not in known)
    return text + (f"No error is recorded for {rest}.\n\n" if rest else "")


def conformance(root: Path, link: Link) -> str:
    """The tables of the components, one a module, as MyST."""
    measured = stored(root, "tests.json")
    if not measured:
        return NOTHING
    found, text = measured["components"], ""
    modules = [Path(page).name for page in listed(root, "api")]
    for module in modules:
        public = public_names(root, module)
        own = {k: v for k, v in found.items() if k.partition(".")[0] in public}
        if own:
            text += module_section(root, module, own, link)
    n = sum(map(count, found.values()))
    said = f"{len(found)} components, {n:,} comparisons. "
    return f"{said}{conditions(measured['facts'])}.\n\n{text}"


# --- the faults that tests find ---------------------------------------------------


def mutant_counts(found: dict) -> dict[str, int]:
    """How many mutants a module has, and what came of those that ran."""
    killed = sum(
        len(functions.split()) - 1
        for texts in found["killed"].values()
        for functions in texts.split("; ")
    )
    kinds = ("survived", "early", "later")  # not killed, or not yet
    survived = sum(len(found.get(kind, [])) for kind in kinds)
    timeouts = len(found["timeout"])
    ran = killed + survived + timeouts
    counts = {"mutants": found["mutants"], "run": ran, "killed": killed}
    return counts | {"timeouts": timeouts, "survived": survived}


def share_killed(counts: dict[str, int]) -> str:
    """The share of mutants that were killed, of those that took no timeout; cut."""
    ended = counts["killed"] + counts["survived"]
    return f"{1000 * counts['killed'] // ended / 10} %" if ended else EMPTY


def is_counted(root: Path, module: str, found: dict) -> bool:
    """Whether a module is as it was when its mutants ran."""
    source = (root / "transformer" / f"{module}.py").read_bytes()
    return hashlib.sha256(source).hexdigest()[:16] == found["source"]


def survivors(root: Path, module: str) -> str:
    """What no test saw, and why it stays, as a list that can be unfolded."""
    path = root / "tests" / "survivors.toml"
    reasons = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    items = ""
    for one in reasons.get(module, []):
        was, now = (element("code", html.escape(one[side])) for side in ("was", "now"))
        name = element("code", one["function"])
        because = html.escape(one["because"])
        items += element("li", f"{name}: {was or EMPTY} → {now or EMPTY}. {because}")
    if not items:
        return ""
    head = element("summary", f"Survivors of {element('code', module)}")
    folded = element("details", head + element("ul", items), class_="survivors")
    return f"```{{raw}} html\n{folded}\n```\n"


def mutants(root: Path, link: Link) -> str:
    """The table of the faults that tests find, and of those that they do not."""
    files = sorted((root / "site" / "measured" / "mutants").glob("*.json"))
    if not files:
        return "Nothing is measured yet: `make mutants` measures.\n"
    heads = ["module", "mutants", "run", "killed", "timeouts", "survived"]
    heads += ["share killed"]
    total, body, folded, facts = dict.fromkeys(heads[1:-1], 0), "", "", {}
    since = []
    order = [Path(page).name for page in listed(root, "api")]
    for path in sorted(files, key=lambda path: order.index(path.stem)):
        found = stored(root, f"mutants/{path.name}")
        facts = max(facts, found["facts"], key=lambda one: one.get("date", ""))
        counts = mutant_counts(found)
        total = {name: total[name] + counts[name] for name in total}
        name = element("code", path.stem)
        if counts["run"] and not is_counted(root, path.stem, found):
            since.append(name)
        head = element("a", name, href=link(f"api/{path.stem}"))
        body += row(head, heads, [*map(str, counts.values()), share_killed(counts)])
        folded += survivors(root, path.stem)
    foot = row("all", heads, [*map(str, total.values()), share_killed(total)])
    bodies = element("tbody", body) + element("tfoot", foot)
    said = f"{conditions(facts)}, mutmut {facts['mutmut']}."
    said += f" Changed since they ran: {', '.join(since)}." if since else ""
    said += "\n\n"
    return said + table("Faults that tests find", heads, bodies, "status") + folded


# --- faults that others reported ------------------------------------------------


def case_row(case: dict, heads: list[str], home: str) -> str:
    """The row of a fault: what it is, and the test that would catch it, with a link."""
    path, _, name = case["test"].partition("::")
    shown = element("code", re.sub("_", "_<wbr>", html.escape(name)))
    test = element("a", shown, href=f"{home}/{path}")
    return row(html.escape(case["title"]), heads, [str(case["case"]), test])


def cases(root: Path, link: Link) -> str:
    """The table of the faults that users of other code reported, as MyST."""
    found = json.loads((root / "site" / "cases.json").read_text(encoding="utf-8"))
    config = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))
    place, heads = config["repository"], ["fault", "case", "test"]
    home = f"{place['url']}/blob/{place['branch']}"
    body = "".join(case_row(case, heads, home) for case in found)
    caption = "Faults reported elsewhere, and the tests that would catch them"
    return table(caption, heads, element("tbody", body), "cases")


# --- Sphinx ----------------------------------------------------------------------


def on_source_read(app: Sphinx, docname: str, content: list[str]) -> None:
    """Put the tables where a page asks for them."""

    def link(page: str) -> str:
        return app.builder.get_relative_uri(docname, page)

    pages = {"status": status, "conformance": conformance, "cases": cases}
    pages["mutants"] = mutants
    for name, make in pages.items():
        line = f"% {name}\n"
        if line in content[0]:
            text = make(Path(app.srcdir), link)
            content[0] = content[0].replace(line, text + "\n")


def setup(app: Sphinx) -> dict:
    """Connect the extension."""
    app.connect("source-read", on_source_read)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
