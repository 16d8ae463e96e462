"""The package is what the notebooks export, and nothing is lost on the way."""

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import checks
import export
import pytest
from small_notebooks import CHAPTERS, ROOT, code, notebook, words, write

FIRST = (
    words("# First\n\n> “Quotes”, 注意力 and 🙂.", "first"),
    code("#| default_exp first", "default-exp"),
    code("#| export\nimport math", "import-math"),
    code("#| export\n__all__ = []\n\n\ndef double(x):\n    return 2 * x", "double"),
)


def project(folder: Path, **notebooks: dict) -> Path:
    """A project with these notebooks and the rest of this one's settings."""
    (folder / "transformer").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copy(ROOT / "transformer" / "__init__.py", folder / "transformer")
    for name, nb in notebooks.items():
        write(nb, folder / "chapters" / f"{name}.ipynb")
    return folder


def modules(folder: Path) -> dict[str, bytes]:
    """The modules of a project by name."""
    return {p.name: p.read_bytes() for p in (folder / "transformer").glob("*.py")}


def fresh_export(folder: Path) -> dict[str, bytes]:
    """The package that the chapters give when they are exported elsewhere."""
    project(folder)
    shutil.copytree(
        ROOT / "chapters", folder / "chapters", ignore=shutil.ignore_patterns(".*")
    )
    export.export(folder)
    return modules(folder)


def differences(found: dict[str, bytes], wanted: dict[str, bytes]) -> list[str]:
    """Modules that are missing, left over, or not the same."""
    names = sorted(found | wanted)
    return [name for name in names if found.get(name) != wanted.get(name)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A fresh export of the chapters, in a path with a blank and other letters."""
    return fresh_export(tmp_path_factory.mktemp("a b") / "Ünï \\Users 注意")


def test_case_51_package_equals_a_fresh_export_both_ways(exported):
    assert CHAPTERS and differences(modules(ROOT), exported) == []


@pytest.mark.parametrize("change", ["edited", "stale", "missing"])
def test_package_that_differs_is_noticed(exported, change):
    found, name = dict(exported), "attention.py"
    if change == "edited":
        found[name] = found[name].replace(b"return", b"return  ", 1)
    elif change == "stale":
        found["gone.py"] = b""
    else:
        del found[name]
    assert len(differences(found, exported)) == 1


def test_broken_exported_line_is_noticed(tmp_path, exported):
    folder = project(tmp_path / "x")
    shutil.copytree(ROOT / "chapters", folder / "chapters")
    path = folder / "chapters" / CHAPTERS[0].name
    text = path.read_text(encoding="utf-8")
    assert "return " in text
    path.write_text(text.replace("return ", "return not "), encoding="utf-8")
    export.export(folder)
    assert differences(modules(folder), exported)


def test_exporting_twice_changes_nothing(tmp_path):
    folder = project(tmp_path / "x", **{"1_first": notebook(*FIRST)})
    export.export(folder)
    once = modules(folder)
    export.export(folder)
    assert modules(folder) == once and "first.py" in once


def test_exported_files_have_unix_line_ends(exported):
    assert exported and not [n for n, text in exported.items() if b"\r" in text]


def test_case_52_windows_line_ends_of_a_notebook_do_not_reach_the_module(tmp_path):
    first, other = tmp_path / "one", tmp_path / "other"
    for folder, end in ((first, "\n"), (other, "\r\n")):
        path = write(notebook(*FIRST), project(folder) / "chapters" / "1_first.ipynb")
        text = path.read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8", newline=end)
        export.export(folder)
    assert modules(first) == modules(other)


def test_case_52_export_does_not_depend_on_the_locale(tmp_path, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("PYTHONUTF8", "0")
    folder = project(tmp_path / "x", **{"1_first": notebook(*FIRST)})
    export.export(folder)
    text = (folder / "transformer" / "first.py").read_bytes().decode("utf-8")
    assert "“Quotes”, 注意力 and 🙂." in text


def test_case_52_folder_may_have_any_name(tmp_path):
    plain, odd = tmp_path / "plain", tmp_path / "été 注意力" / r"\Users\new {x}"
    for folder in (plain, odd):
        export.export(project(folder, **{"1_first": notebook(*FIRST)}))
    assert modules(odd) == modules(plain) and "first.py" in modules(odd)


def test_nothing_is_written_beside_the_notebooks(tmp_path):
    nb = notebook(*FIRST)
    folder = project(tmp_path / "x", **{"1_first": nb})
    export.export(folder)
    assert [path.name for path in (folder / "chapters").iterdir()] == ["1_first.ipynb"]


# --- what nbdev loses in silence -------------------------------------------------


def test_in_test_does_not_stop_the_export(tmp_path, monkeypatch):
    monkeypatch.setenv("IN_TEST", "1")  # alone, nbdev does nothing and exits with 0
    folder = project(tmp_path / "x", **{"1_first": notebook(*FIRST)})
    export.export(folder)
    assert "first.py" in modules(folder)


def losing(cells: tuple, tmp_path, monkeypatch, capsys) -> tuple[int, str, Path]:
    """What our export says to a notebook of which nbdev would lose something."""
    folder = project(tmp_path / "x", **{"1_first": notebook(*cells)})
    monkeypatch.setattr(export, "ROOT", folder)
    return export.main(), capsys.readouterr().err, folder


@pytest.mark.parametrize(
    "lost, complaint",
    [
        ("# words\n#| export\nLOST = 1", "not on the first line"),
        ("x = 1\n#| export\nLOST = 1", "not on the first line"),
        ("#| exprot\nLOST = 1", "unknown directive"),
    ],
)
def test_cell_that_would_be_lost_stops_the_export(
    lost, complaint, tmp_path, monkeypatch, capsys
):
    cells = (*FIRST, code(lost, "lost"))
    status, said, folder = losing(cells, tmp_path, monkeypatch, capsys)
    assert status == 1 and complaint in said and "first.py" not in modules(folder)
    export.export(folder)  # nbdev alone: no word, and no LOST
    assert b"LOST" not in modules(folder)["first.py"]


def test_export_without_a_module_name_stops_the_export(tmp_path, monkeypatch, capsys):
    cells = [cell for cell in FIRST if cell["id"] != "default-exp"]
    status, said, folder = losing(cells, tmp_path, monkeypatch, capsys)
    assert status == 1 and "default_exp" in said
    export.export(folder)
    assert "first.py" not in modules(folder)


def test_case_51_relative_import_stops_the_export(tmp_path, monkeypatch, capsys):
    cells = (*FIRST, code("#| export\nfrom .other import x", "relative"))
    status, said, _ = losing(cells, tmp_path, monkeypatch, capsys)
    assert status == 1 and "a relative import cannot be exported" in said


def test_module_whose_notebook_is_gone_is_removed(tmp_path, monkeypatch, capsys):
    both = {"1_first": notebook(*FIRST), "2_again": notebook(*FIRST)}
    both["2_again"]["cells"][1]["source"] = "#| default_exp again"
    folder = project(tmp_path / "x", **both)
    export.export(folder)
    (folder / "chapters" / "2_again.ipynb").unlink()
    export.export(folder)
    assert "again.py" in modules(folder)  # nbdev alone leaves it
    monkeypatch.setattr(export, "ROOT", folder)
    monkeypatch.setattr(export.readme, "main", lambda: None)
    assert export.main() == 0 and "again.py" not in modules(folder)
    assert "first.py" in modules(folder) and "removed" in capsys.readouterr().out


def undefined_names(text: str) -> str:
    """Names that a module uses and nobody gave it."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "-q"]
    done = subprocess.run(
        [*command, "--select=F821,F822", "--output-format=concise", "-"],
        input=text,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    return done.stdout


def test_every_name_of_a_module_is_imported_in_an_exported_cell(exported):
    texts = {name: text.decode("utf-8") for name, text in exported.items()}
    assert {
        name: undefined_names(text) for name, text in texts.items()
    } == dict.fromkeys(texts, "")


def test_name_imported_in_a_cell_that_is_not_exported_is_noticed(tmp_path):
    cells = [*FIRST, code("#| export\ndef root(x):\n    return math.sqrt(x)", "root")]
    cells[2] = code("import math", "import-math")
    folder = project(tmp_path / "x", **{"1_first": notebook(*cells)})
    export.export(folder)
    text = (folder / "transformer" / "first.py").read_text(encoding="utf-8")
    assert "`math`" in undefined_names(text)


# --- names and imports -------------------------------------------------------------


MODULES = sorted(p.stem for p in (ROOT / "transformer").glob("[!_]*.py"))


def defined(text: str) -> set[str]:
    """The public names that a cell defines."""
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        parts = [part for t in targets for part in getattr(t, "elts", [t])]
        names |= {part.id for part in parts if isinstance(part, ast.Name)}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_case_51_all_lists_exactly_what_the_exported_cells_define(path):
    cells = checks.code_cells(checks.read(path))
    found = [checks.directives(cell) for cell in cells]
    wanted = [
        defined(checks.source(cell))
        for cell, active in zip(cells, found, strict=True)
        if "export" in active
    ]
    target = next(
        (active["default_exp"] for active in found if "default_exp" in active), None
    )
    listed = []
    if target:
        listed = importlib.import_module(f"transformer.{target}").__all__
    assert sorted(listed) == sorted(set().union(*wanted))


FORKS = """
import importlib, json, os, sys, torch
early, orders = json.loads(sys.argv[1])
def fork(name, later=()):
    if child := os.fork():
        return os.waitpid(child, 0)[1] != 0
    try:
        importlib.import_module("transformer." + name)
        new = [other for other in later if "transformer." + other not in sys.modules]
        failed = any([fork(other) for other in new])
    except BaseException as error:
        failed = not print(name, repr(error), flush=True)
    os._exit(failed)
for name in early:
    try: importlib.import_module(name)
    except ImportError: pass
sys.exit(any([fork(*order) for order in orders.items()]))
"""


def failed_imports(orders: dict[str, list[str]], early: tuple[str, ...] = ()) -> str:
    """What goes wrong where each module is imported first, and then each of others.

    Torch is imported once, and after it what is named early; each first module then
    has a process of its own, and from there each second one.
    """
    words = json.dumps([early, orders])
    command = [sys.executable, "-c", FORKS, words]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert bool(done.returncode) == bool(done.stdout), done.stderr
    return done.stdout


def test_case_51_modules_import_alone_and_in_every_order():
    assert failed_imports({name: [] for name in MODULES}) == ""
    others = {name: [m for m in MODULES if m != name] for name in MODULES}
    assert failed_imports(others, ("triton", "safetensors.torch")) == ""


def test_module_that_cannot_be_imported_is_noticed():
    said = failed_imports({"attention": ["blocks"], "no_such_module": []})
    assert said.startswith("no_such_module ModuleNotFoundError(") and "\n" in said
    said = failed_imports({"attention": ["blocks", "no_such_module"]})
    assert said.count("\n") == 1 and said.startswith("no_such_module ")


def test_module_that_needs_another_imports_it_itself():
    for name in MODULES:
        text = (ROOT / "transformer" / f"{name}.py").read_text(encoding="utf-8")
        assert "from transformer" not in text, "a notebook's import was not rewritten"


@pytest.mark.skipif(
    not sys.executable.isascii(), reason="torch's own import needs an ASCII path here"
)
def test_case_52_import_of_the_package_is_silent_in_any_locale(tmp_path):
    names = ", ".join(f"transformer.{name}" for name in MODULES)
    options = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning"]
    done = subprocess.run(
        [sys.executable, *options, "-c", f"import torch, {names}"],
        cwd=tmp_path,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- encodings ---------------------------------------------------------------------


def unnamed_encodings(text: str) -> list[int]:
    """Lines that read or write text in whatever encoding the machine prefers."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        words = {word.arg: word.value for word in node.keywords}
        mode = words.get("mode", node.args[1] if len(node.args) > 1 else None)
        binary = isinstance(mode, ast.Constant) and "b" in str(mode.value)
        plain = isinstance(node.func, ast.Name) and name == "open" and not binary
        reads = name == "read_text" and not node.args
        writes = name == "write_text" and len(node.args) < 2
        if (plain or reads or writes) and "encoding" not in words:
            lines.append(node.lineno)
    return lines


OURS = sorted(
    path
    for folder in ("transformer", "tools", "site", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if "node_modules" not in path.parts
)


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_case_52_every_file_is_read_as_utf8(path):
    assert unnamed_encodings(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line", ["open('x')", "open('x', 'w')", "p.read_text()", "p.write_text('x')"]
)
def test_file_read_in_the_encoding_of_the_machine_is_noticed(line):
    assert unnamed_encodings(line) == [1]
    named = line.replace("(", "(**{}, encoding='utf-8', ", 1).replace("'x'", "file='x'")
    assert unnamed_encodings(named.replace("'w'", "mode='w'")) == []


def test_encoding_warnings_are_errors_in_these_tests():
    with pytest.raises(EncodingWarning):
        warnings.warn("no encoding named", EncodingWarning, stacklevel=1)
