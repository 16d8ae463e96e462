"""Stored outputs are proven: noise of a machine passes, a change of a value fails."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import checks
import pytest
import run_notebooks
from small_notebooks import ROOT, code, notebook, words, write

FIGURES = """\
import matplotlib.pyplot as plt
import matplotlib_inline.backend_inline as inline

inline.set_matplotlib_formats("svg", metadata={"Date": None})
plt.rcParams.update({"svg.hashsalt": "small", "svg.fonttype": "none"})"""
SLIDER = """\
import ipywidgets

frames = [ipywidgets.HTML(f"<b>frame {i}</b>") for i in range(3)]
stack, head = ipywidgets.Stack(frames), ipywidgets.IntSlider(max=2)
ipywidgets.jslink((head, "value"), (stack, "selected_index"))
ipywidgets.VBox([head, stack])"""
NOISY = notebook(
    words("# Noise\n\n> What differs between two runs.", "noise"),
    code("from tqdm import tqdm\n\nprint('after tqdm')", "after-tqdm"),
    code("for step in tqdm(range(3)):\n    pass", "bar"),
    code("for step in tqdm(range(3), disable=False):\n    pass", "forced-bar"),
    code("import warnings\n\nwarnings.warn('on this machine')\nprint(1)", "warn"),
    code(FIGURES, "figures"),
    code("plt.plot([1, 3, 2])\nplt.title('Loss')", "axes"),
    code("plt.imshow([[0, 1], [1, 0]])\nplt.show()", "image"),
    code("import time\n\nprint(time.perf_counter_ns())", "time", "nbval-ignore-output"),
    code("object()", "address"),
    code("print()", "blank"),
    code("print(f'loss {1 / 3:.4f}')", "loss"),
    code("1 / 3", "digits"),
    code("'<b>words</b>'", "repr"),
    code("'warn' in globals()", "state"),
    code(SLIDER, "slider"),
    code("1 / 0", "raises", "raises-exception"),
)


def run(path: Path, **environment: str) -> str:
    """Call `make run`'s script on a notebook; what it says."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "run_notebooks.py"), str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[0]


def failing_cells(nb: dict, folder: Path) -> list[str]:
    """The ids of the cells whose outputs are not the stored ones, by nbval."""
    path = write(nb, folder / "small.ipynb")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "check_notebook.py"), str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    numbers = map(int, re.findall(r"^FAILED .*::Cell (\d+)", done.stdout, re.M))
    failed = [checks.code_cells(nb)[number]["id"] for number in numbers]
    assert bool(failed) == bool(done.returncode), done.stdout + done.stderr
    return failed


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A notebook with every kind of noise, executed as the chapters are."""
    path = write(NOISY, tmp_path_factory.mktemp("noisy é") / "noisy.ipynb")
    assert run(path) == "updated"
    return path


def output(nb: dict, name: str) -> dict:
    """The last output of the cell with this id."""
    return next(c for c in nb["cells"] if c["id"] == name)["outputs"][-1]


def alter(nb: dict, name: str, old: str, new: str) -> None:
    """Change one stored text."""
    found = output(nb, name)
    text = json.dumps(found)
    assert old in text
    found.update(json.loads(text.replace(old, new)))


def test_case_46_noise_passes_twice(stored, tmp_path):
    nb = checks.read(stored)
    assert failing_cells(nb, tmp_path) == []
    assert failing_cells(nb, tmp_path) == []


def test_case_46_what_another_machine_changes_passes(stored, tmp_path):
    nb = checks.read(stored)
    svg = output(nb, "image")["data"]["image/svg+xml"]
    text = "".join(svg)
    text = re.sub(r'd="M [\d.]+', 'd="M 1.5', text)
    text = re.sub(r'xlink:href="data[^"]+', 'xlink:href="data:,', text)
    text = text.replace("Matplotlib v", "Matplotlib v0.")
    output(nb, "image")["data"]["image/svg+xml"] = text
    alter(nb, "address", "0x", "0xabc")
    for cell in nb["cells"]:
        if cell["id"] == "warn":
            cell["outputs"] = [o for o in cell["outputs"] if o["name"] == "stdout"]
    assert failing_cells(nb, tmp_path) == []


def test_case_46_every_real_change_fails(stored, tmp_path):
    nb = checks.read(stored)
    alter(nb, "loss", "0.3333", "0.3334")
    alter(nb, "digits", "0.3333333333333333", "0.3333333433333333")
    alter(nb, "axes", ">Loss<", ">Lost<")
    alter(nb, "repr", "<b>", "<i>")
    alter(nb, "state", "False", "True")
    alter(nb, "raises", "division by zero", "no division")
    image = next(cell for cell in nb["cells"] if cell["id"] == "image")
    image["outputs"] = []
    wanted = ["axes", "image", "loss", "digits", "repr", "state", "raises"]
    assert failing_cells(nb, tmp_path) == wanted


def test_ignored_cell_that_raises_fails(tmp_path):
    nb = notebook(code("assert not []\n1 / 0", "raises", "nbval-ignore-output"))
    assert failing_cells(nb, tmp_path) == ["raises"]


def test_notebook_sees_nothing_of_the_repository(tmp_path):
    text = "import os\n\nassert os.listdir() == ['small.ipynb'], os.listdir()"
    assert failing_cells(notebook(code(text, "alone")), tmp_path) == []


# --- make run ------------------------------------------------------------------


def test_second_run_leaves_the_same_bytes(stored):
    nb = checks.read(stored)
    kinds = {
        kind
        for c in nb["cells"]
        for o in c.get("outputs", [])
        for kind in o.get("data", {})
    }
    assert {"image/svg+xml", "application/vnd.jupyter.widget-view+json"} <= kinds
    nb["cells"] = [c for c in nb["cells"] if c["id"] not in ("warn", "address", "time")]
    path = write(nb, stored.parent / "again.ipynb")
    run(path, FRESH="1")
    once = path.read_bytes()
    assert run(path, FRESH="1") == "unchanged" and path.read_bytes() == once


def test_ignored_output_alone_does_not_change_the_file(tmp_path):
    clock = "import time\n\nprint(time.perf_counter_ns())"
    nb = notebook(code(clock, "time", "nbval-ignore-output"))
    path = write(nb, tmp_path / "small.ipynb")
    run(path, FRESH="1")
    once = path.read_bytes()
    assert run(path) == "unchanged" and path.read_bytes() == once
    assert run(path, FRESH="1") == "updated" and path.read_bytes() != once


def test_new_output_changes_the_file():
    old = notebook(code("print(1)", "one", prints="1\n"))
    new = notebook(code("print(1)", "one", prints="2\n"))
    tell = run_notebooks.compared
    assert tell(json.dumps(old)) != tell(json.dumps(new))


def test_run_keeps_what_the_checks_ask_for(stored):
    nb = checks.read(stored)
    assert checks.metadata(nb) == [] and checks.cell_ids(nb) == []
    assert checks.execution_counts(nb) == []


def test_progress_bar_is_not_stored(stored):
    cells = {cell["id"]: cell for cell in checks.read(stored)["cells"]}
    assert cells["bar"]["outputs"] == [] and cells["forced-bar"]["outputs"] == []


def test_cells_get_readable_ids():
    nb = copy.deepcopy(notebook(*(code("#| export\ndef f(): pass", i) for i in "ab")))
    cells = [*nb["cells"], *notebook(code("verdict('A-1', 'holds', '')", "c"))["cells"]]
    for number, cell in enumerate(cells):
        cell["id"] = f"0000000{number}"
    nb = run_notebooks.nbformat.from_dict({**nb, "cells": cells})
    run_notebooks.name_cells(nb)
    assert [cell.id for cell in nb.cells] == ["f", "f-2", "verdict-A-1"]


def test_sanitize_file_can_be_read_anywhere():
    text = (ROOT / "tools" / "nbval_sanitize.cfg").read_bytes().decode("ascii")
    rules = re.findall(r"^regex: (.*)$\n^replace: (.*)$", text, re.M)
    assert len(rules) == text.count("regex: ") == text.count("replace: ")
    assert all(regex and replace for regex, replace in rules)


@pytest.mark.parametrize(
    "cuda, cpu",
    [
        ("tensor([1, 2], device='cuda:0')", "tensor([1, 2])"),
        ("tensor(1., device='cuda:0', dtype=x)", "tensor(1., dtype=x)"),
        (
            "tensor([[1.],\n        [2.]],\n       device='cuda:0')",
            "tensor([[1.],\n        [2.]])",
        ),
    ],
)
def test_device_is_blanked(cuda, cpu):
    text = (ROOT / "tools" / "nbval_sanitize.cfg").read_text(encoding="ascii")
    for regex, replace in re.findall(r"^regex: (.*)$\n^replace: (.*)$", text, re.M):
        cuda = re.sub(regex, replace, cuda)
    assert cuda == cpu
