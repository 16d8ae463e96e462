"""What a notebook, the package and the tests must keep to, as functions that complain.

Each takes text or a parsed notebook and returns a list of complaints, one line each;
an empty list is good. tests/test_repository.py asks them about the real files and about
copies that were broken on purpose.

Usage: python tools/checks.py chapters/01_multi_head_attention.ipynb ...
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from pathlib import Path
from statistics import median, quantiles

ASSERTS = re.compile(r"(^|_)(assert|raises|warns|check|gradcheck|conform|fails?)(_|$)")
Notebook = dict
RANDOM_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f-]+)?")
DIRECTIVE = re.compile(r"^\s*#\s*\|\s*(\w+)\s*(.*?)\s*$")
DIRECTIVES = {"default_exp", "export", "exporti", "hide"}
UNTESTED = {"not empirical", "unsupported", "not assessable", "not measured here"}
HERE = re.compile(r"(?<![\w.~])/(?:home|root|tmp|work|Users)/[\w.-]+")


# --- reading ---------------------------------------------------------------------


def read(path: Path) -> Notebook:
    """The notebook as JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def source(cell: dict) -> str:
    """The text of a cell."""
    return "".join(cell["source"])


def code_cells(nb: Notebook) -> list[dict]:
    """The cells that run."""
    return [cell for cell in nb["cells"] if cell["cell_type"] == "code"]


def tags(cell: dict) -> list[str]:
    """The tags of a cell."""
    return cell["metadata"].get("tags", [])


def directives(cell: dict) -> dict[str, str]:
    """The exporter's directives that take effect: those on the first lines."""
    found = {}
    for line in source(cell).splitlines():
        match = DIRECTIVE.match(line)
        if not match:
            break
        found[match[1]] = match[2]
    return found


def plain(text: str) -> str:
    """The text of a cell with IPython's magics blanked."""
    return re.sub(r"^\s*[%!].*$", "pass", text, flags=re.M)


def parse(text: str) -> ast.Module:
    """The syntax tree of a cell."""
    return ast.parse(plain(text))


def title_and_promise(nb: Notebook) -> tuple[str, str]:
    """The heading and the quoted line of the first cell that starts with a heading."""
    for cell in nb["cells"]:
        text = source(cell)
        if cell["cell_type"] == "markdown" and text.startswith("# "):
            lines = text.splitlines()
            quote = [line[1:].strip() for line in lines if line.startswith(">")]
            return lines[0][2:].strip(), " ".join(quote)
    return "", ""


def toc_notebooks(toc: str) -> list[str]:
    """The stems of the notebooks of _toc.yml, in the order of the book."""
    return re.findall(r"^[\s-]*file:\s*chapters/([\w-]+)", toc, re.M)


def code_lines(text: str) -> list[int]:
    """The numbers of the lines that hold code: no docstring, comment or blank."""
    doc = set()
    for node in ast.walk(parse(text)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            doc |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
    skip += (tokenize.INDENT, tokenize.DEDENT)
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(plain(text)).readline):
        if token.type not in skip:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return sorted(lines - doc)


# --- one notebook ----------------------------------------------------------------


def export_losses(nb: Notebook) -> list[str]:
    """What nbdev would leave out of the package, or break, without a word."""
    complaints, targets, exports = [], [], 0
    for cell in code_cells(nb):
        name, active = cell["id"], directives(cell)
        for line in source(cell).splitlines()[len(active) :]:
            if DIRECTIVE.match(line):
                complaints.append(f"{name}: `{line.strip()}` is not on the first line")
        for word, argument in active.items():
            if word not in DIRECTIVES:
                complaints.append(f"{name}: unknown directive `#| {word}`")
            if word in ("export", "exporti"):
                exports += 1
                if argument:
                    complaints.append(f"{name}: `#| {word} {argument}` to another file")
        if "default_exp" in active:
            targets.append(active["default_exp"])
            if len(source(cell).strip().splitlines()) > 1:
                complaints.append(f"{name}: `#| default_exp` needs a cell of its own")
        if re.search(r"^\s*from \.", source(cell), re.M):
            complaints.append(f"{name}: a relative import cannot be exported")
    if exports and len(targets) != 1:
        complaints.append(f"`#| export` needs one `#| default_exp`, not {len(targets)}")
    if targets and not exports:
        complaints.append(f"`#| default_exp {targets[0]}` but nothing is exported")
    return complaints


def title_cell(nb: Notebook) -> list[str]:
    """The first heading and its one quoted line become the module's docstring."""
    title, promise = title_and_promise(nb)
    if not title:
        return ["no markdown cell starts with `# `: the module has no docstring"]
    if not promise:
        return ["no `> one line` under the title: the module has no docstring"]
    head = next(cell for cell in nb["cells"] if source(cell).startswith("# "))
    lines = [line for line in source(head).splitlines() if line.startswith(">")]
    return ["the quote under the title is longer than one line"] * (len(lines) > 1)


def execution_counts(nb: Notebook) -> list[str]:
    """Cells ran once each, in order."""
    counts = [cell["execution_count"] for cell in code_cells(nb)]
    wanted = list(range(1, len(counts) + 1))
    return [] if counts == wanted else [f"execution counts are not 1..n: {counts}"]


def semicolons(nb: Notebook) -> list[str]:
    """A trailing `;` hides an output here that nbval then sees."""
    ends = (cell["id"] for cell in code_cells(nb) if source(cell).rstrip()[-1:] == ";")
    return [f"{name}: ends with `;`" for name in ends]


def shown(cell: dict) -> bool:
    """Whether a page shows the cell as code to be read."""
    hidden = {"remove-cell", "hide-cell", "remove-input", "hide-input"} & set(
        tags(cell)
    )
    machinery = {"default_exp", "hide"} & set(directives(cell))
    return not hidden and not machinery and "google.colab" not in source(cell)


def is_kernel(node: ast.AST) -> bool:
    """Whether this is a Triton kernel: it cannot be cut without passing all it has."""
    decorators = getattr(node, "decorator_list", [])
    return any("jit" in ast.unparse(decorator) for decorator in decorators)


def cell_sizes(nb: Notebook) -> list[str]:
    """No code cell is long, most are short, and at most two stand in a row."""
    complaints, sizes, row = [], [], 0
    for cell in nb["cells"]:
        if cell["cell_type"] != "code":
            row = 0
            continue
        n_lines = len(code_lines(source(cell)))
        kernel = any(map(is_kernel, parse(source(cell)).body))
        most = 45 if kernel else 30
        if n_lines > most:
            complaints.append(f"{cell['id']}: {n_lines} lines of code, at most {most}")
        if n_lines == 0 and not directives(cell):
            complaints.append(f"{cell['id']}: an empty code cell")
        if shown(cell):
            sizes += [] if kernel else [n_lines]
            row += 1
            if row == 3:
                complaints.append(f"{cell['id']}: the third code cell in a row")
    if len(sizes) > 1:
        middle, ninth = median(sizes), quantiles(sizes, n=10, method="inclusive")[-1]
        if middle > 6:
            complaints.append(f"code cells have {middle:g} lines in the middle, not 6")
        if ninth > 15:
            complaints.append(f"90 % of the code cells have {ninth:g} lines, not 15")
    return complaints


def ignores_output(cell: dict) -> bool:
    """Whether nbval does not compare the outputs of this cell."""
    comments = re.search(r"#\s*NBVAL_IGNORE_OUTPUT", source(cell))
    return "nbval-ignore-output" in tags(cell) or bool(comments)


def ignored_outputs(nb: Notebook) -> list[str]:
    """What is not compared is asserted in the next cell."""
    complaints, cells = [], code_cells(nb)
    for cell, after in zip(cells, [*cells[1:], None], strict=True):
        if "nbval-skip" in tags(cell) or "NBVAL_SKIP" in source(cell):
            complaints.append(f"{cell['id']}: no cell may be skipped")
        if ignores_output(cell) and cell["outputs"]:
            if after is None or not asserts(parse(source(after))):
                complaints.append(
                    f"{cell['id']}: ignored, and the next asserts nothing"
                )
    return complaints


def stored_outputs(nb: Notebook) -> list[str]:
    """A page shows no warning, error, address or path of the machine it was made on."""
    complaints = []
    for cell in code_cells(nb):
        may_raise = {"raises-exception", "nbval-raises-exception"} & set(tags(cell))
        for output in cell["outputs"]:
            kind = output["output_type"]
            if kind == "stream" and output["name"] == "stderr":
                complaints.append(f"{cell['id']}: stderr is stored")
            if kind == "error" and not may_raise:
                complaints.append(f"{cell['id']}: an error is stored")
            words = "".join(output.get("text", ""))
            words += "".join(output.get("data", {}).get("text/plain", ""))
            if re.search(r"\b0x[0-9a-f]{6,}", words):
                complaints.append(f"{cell['id']}: a memory address is stored")
            if HERE.search(words):
                complaints.append(f"{cell['id']}: a path of this machine is stored")
    return complaints


def metadata(nb: Notebook) -> list[str]:
    """Nothing in the file that a run, an editor or a Python version would change."""
    complaints, top = [], dict(nb["metadata"])
    top.pop("widgets", None)
    wanted = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    if top != wanted:
        complaints.append(f"metadata is not the plain one: {sorted(top)}")
    for cell in nb["cells"]:
        extra = set(cell["metadata"]) - {"tags", "mystnb"}
        if extra:
            complaints.append(f"{cell['id']}: metadata {sorted(extra)}")
        if cell.get("attachments"):
            complaints.append(f"{cell['id']}: an attachment")
    return complaints


def cell_ids(nb: Notebook) -> list[str]:
    """Ids are words, and each once: the package's comments carry them."""
    ids = [cell.get("id", "") for cell in nb["cells"]]
    repeated = sorted({name for name in ids if ids.count(name) > 1})
    random = [name for name in ids if not name or RANDOM_ID.fullmatch(name)]
    complaints = [f"id {name!r} stands twice" for name in repeated]
    return complaints + [f"id {name!r} is not readable" for name in random]


def verdicts(nb: Notebook) -> list[str]:
    """Each verdict on something measured has an effect, and an assertion above it."""
    complaints, before = [], ast.parse("")
    for cell in code_cells(nb):
        tree = parse(source(cell))
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or called(call) != "verdict":
                continue
            values = [getattr(arg, "value", None) for arg in call.args]
            if len(values) > 1 and values[1] in UNTESTED:
                continue
            sized = any(word.arg == "effect" for word in call.keywords)
            if isinstance(call.args[0], ast.Constant) and not sized:
                complaints.append(f"{cell['id']}: no effect of {values[:1]}")
            above = [node for node in tree.body if node.lineno < call.lineno]
            above = [node for node in above if not isinstance(node, ast.FunctionDef)]
            if not asserts(ast.Module(above, [])) and not asserts(before):
                complaints.append(f"{cell['id']}: no assertion above {values[:1]}")
        before = tree
    return complaints


def verdict_ids(nb: Notebook) -> list[str]:
    """The claims that a notebook judges."""
    return [
        call.args[0].value
        for cell in code_cells(nb)
        for call in ast.walk(parse(source(cell)))
        if isinstance(call, ast.Call) and called(call) == "verdict"
        if call.args and isinstance(call.args[0], ast.Constant)
    ]


# --- the cell that installs on Colab -----------------------------------------------


def colab_cell(nb: Notebook) -> dict | None:
    """The cell that installs the package, on Colab only."""
    found = (cell for cell in code_cells(nb) if "google.colab" in source(cell))
    return next(found, None)


def split_carriers(text: str) -> tuple[list[str], str]:
    """The carriers that a Colab cell names, and the rest of the cell."""
    lines = text.splitlines()
    for node in ast.parse(text).body:
        target = getattr(node, "targets", [None])[0]
        if isinstance(target, ast.Name) and target.id == "carriers":
            del lines[node.lineno - 1 : node.end_lineno]
            return ast.literal_eval(node.value), "\n".join(lines)
    return [], text


def colab_cells(notebooks: dict[str, Notebook], pins: str) -> list[str]:
    """One cell in all notebooks but for the carriers, pinned as in weights.txt."""
    complaints, seen, known = [], {}, pins.split()
    for name, nb in notebooks.items():
        cell = colab_cell(nb)
        runs = [c for c in code_cells(nb) if "default_exp" not in directives(c)]
        if cell is None or cell is not runs[0]:
            complaints.append(f"{name}: the first code cell is not the one for Colab")
            continue
        carriers, rest = split_carriers(source(cell))
        seen.setdefault(rest, []).append(name)
        strange = sorted(set(carriers) - set(known))
        complaints += [f"{name}: {pin} is not in weights.txt" for pin in strange]
    if len(seen) > 1:
        odd = min(seen.values(), key=len)
        complaints.append(f"the Colab cell differs in {', '.join(odd)}")
    return complaints


# --- tests and assertions ------------------------------------------------------------


def called(call: ast.Call) -> str:
    """The last name of what is called: `warns` of `pytest.warns`."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def is_constant(node: ast.AST) -> bool:
    """Whether an expression can only ever have one value."""
    names = (ast.Name, ast.Attribute, ast.Call, ast.Await, ast.Yield)
    return not any(isinstance(part, names) for part in ast.walk(node))


def asserts(tree: ast.AST, helpers: frozenset[str] = frozenset()) -> bool:
    """Whether the code asserts something that could be false."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and not is_constant(node.test):
            return True
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, ast.Call):
            name = called(node)
            values = [*node.args, *(word.value for word in node.keywords)]
            if name in helpers:
                return True
            if ASSERTS.search(name) and not all(map(is_constant, values)):
                return True
    return False


def asserting_functions(tree: ast.AST) -> frozenset[str]:
    """The functions of a file that assert, or call one that does."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    found: frozenset[str] = frozenset()
    while True:
        now = frozenset(f.name for f in functions if asserts(f, found))
        if now == found:
            return found
        found = now


def empty_tests(text: str) -> list[str]:
    """Tests that assert nothing, or nothing but constants."""
    tree = parse(text)
    helpers = asserting_functions(tree)
    return [
        f"{node.name}: asserts nothing"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.startswith("test_") and node.name not in helpers
    ]


def constant_asserts(nb: Notebook) -> list[str]:
    """Assertions in a notebook that cannot fail."""
    return [
        f"{cell['id']}: `{ast.unparse(node)}` cannot fail"
        for cell in code_cells(nb)
        for node in ast.walk(parse(source(cell)))
        if isinstance(node, ast.Assert) and is_constant(node.test)
    ]


# --- the package -----------------------------------------------------------------


def imported_modules(tree: ast.AST, package: str = "transformer") -> list[str]:
    """The modules of the package that a piece of code imports."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            stem = f"{package}." if node.level else ""
            names = [(stem + (node.module or "")).rstrip(".")]
            if names[0] == package:
                names = [f"{package}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [n.split(".")[1] for n in names if n.startswith(package + ".")]
    return found


def forward_imports(notebooks: dict[str, Notebook], order: list[str]) -> list[str]:
    """Imports of a module that the reader has not met yet.

    Args:
        notebooks: By stem.
        order: The stems in the order of the book.
    """
    complaints, known = [], set()
    complaints += [
        f"{name}: not in _toc.yml" for name in notebooks if name not in order
    ]
    complaints += [
        f"{name}: in _toc.yml only" for name in order if name not in notebooks
    ]
    for name in order:
        if name not in notebooks:
            continue
        own = ""
        for cell in code_cells(notebooks[name]):
            own = directives(cell).get("default_exp", own)
            for module in imported_modules(parse(source(cell))):
                if module not in known and not module.startswith("__"):
                    complaints.append(f"{name}: imports {module} before it is written")
        known.add(own)
    return complaints


def top_level(tree: ast.Module) -> list[str]:
    """The names that a module defines itself."""
    names = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        if isinstance(node, ast.Assign):
            names += [t.id for t in node.targets if isinstance(t, ast.Name)]
    return names


def repeated_names(modules: dict[str, str]) -> list[str]:
    """Public names and classes that stand in more than one module."""
    places: dict[str, list[str]] = {}
    for module, text in modules.items():
        tree = ast.parse(text)
        classes = {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
        for name in {n for n in top_level(tree) if n[0] != "_"} | classes:
            places.setdefault(name, []).append(module)
        own = [n.name for n in tree.body if isinstance(n, ast.ClassDef)]
        for name in sorted({name for name in own if own.count(name) > 1}):
            places[name].append(module)
    return [f"{n}: in {', '.join(p)}" for n, p in sorted(places.items()) if len(p) > 1]


def code_sizes(text: str) -> list[str]:
    """Functions, constructors and the module stay within what one can read at once."""
    complaints, tree, lines = [], ast.parse(text), code_lines(text)
    for node in filter(is_kernel, tree.body):  # they count as what one reads alone
        lines = [n for n in lines if not node.lineno <= n <= node.end_lineno]
    if len(lines) > 300:
        complaints.append(f"the module has {len(lines)} lines of code, at most 300")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        n_lines = sum(node.lineno <= line <= node.end_lineno for line in lines)
        if n_lines > 40:
            complaints.append(f"{node.name}: {n_lines} lines of code, at most 40")
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if node.name == "__init__" and len(given) - 1 > 8:
            complaints.append(
                f"a constructor has {len(given) - 1} arguments, at most 8"
            )
    return complaints


def unknown_citations(nb: Notebook, bibliography: str) -> list[str]:
    """Citation keys that references.bib does not hold."""
    known = set(re.findall(r"^\s*@\w+\{\s*([^,\s]+)", bibliography, re.M))
    text = "\n".join(source(c) for c in nb["cells"] if c["cell_type"] == "markdown")
    used = re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", text)
    keys = {key.strip() for group in used for key in group.split(",")}
    return [f"{key}: not in references.bib" for key in sorted(keys - known)]


ONE_NOTEBOOK = (
    export_losses,
    title_cell,
    execution_counts,
    semicolons,
    cell_sizes,
    ignored_outputs,
    stored_outputs,
    metadata,
    cell_ids,
    verdicts,
    constant_asserts,
)


def main(paths: list[str]) -> int:
    """Print what is wrong with each notebook."""
    n_complaints = 0
    for path in map(Path, paths):
        for check in ONE_NOTEBOOK:
            for complaint in check(read(path)):
                n_complaints += 1
                print(f"{path.stem}: {check.__name__}: {complaint}")
    return min(n_complaints, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
