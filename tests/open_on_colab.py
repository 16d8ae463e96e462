"""Open notebooks as Colab does; run by the Python of an environment like Colab's.

Each notebook lies alone in an empty folder and gets a process of its own. Its cells up
to the last of the first imports are run. The first notebook that shows a figure with
sliders goes on to this figure. The cell that installs is run once for each list of
carriers; where it would only find everything in place, it is left out.

Usage: python open_on_colab.py result.json notebook.ipynb ...
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path


def code_cells(path: Path) -> list[str]:
    """The text of each cell that runs."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]


def imports(cell: str) -> bool:
    """Whether a cell imports something, or has no code at all."""
    body = ast.parse(cell).body
    kinds = (ast.Import, ast.ImportFrom)
    return not body or any(isinstance(node, kinds) for node in body)


def opening(cells: list[str]) -> list[str]:
    """The cells from the first to the last that does nothing but set up."""
    ends = [i for i, cell in enumerate(cells) if not imports(cell)]
    return cells[: ends[0]] if ends else cells


def shows_figure(cell: str) -> bool:
    """Whether a cell ends with a call of `explore`."""
    last = (ast.parse(cell).body or [None])[-1]
    call = getattr(last, "value", None)
    return isinstance(last, ast.Expr) and ast.unparse(call).startswith("explore(")


def figure_at(cells: list[str]) -> int:
    """The place of the first cell that shows a figure with sliders."""
    shown = (i for i, cell in enumerate(cells) if shows_figure(cell))
    return next(shown, len(cells) + 10**6)


def figure(box) -> dict:
    """What a saved page would hold of a figure with sliders."""
    import ipywidgets
    from ipywidgets.embed import embed_data

    models = embed_data([box])["manager_state"]["state"].values()
    pages = [m["state"].get("value", "") for m in models]
    return {
        "ipywidgets": ipywidgets.__version__,
        "models": sorted({m["model_name"] for m in models}),
        "frames": [p for p in pages if str(p).startswith("<img alt=")],
    }


def run(cells: list[str], installed: set[str]) -> dict:
    """Run cells in this process; what the last one shows, if it is a figure."""
    names: dict = {"__name__": "__main__"}
    for cell in cells:
        if cell in installed:
            continue
        tree = ast.parse(cell)
        shown = tree.body.pop() if shows_figure(cell) else None
        exec(compile(tree, "cell", "exec"), names)
    transformer = sys.modules.get("transformer")
    found = {"package": transformer and transformer.__file__}
    if shown:
        box = eval(compile(ast.Expression(shown.value), "cell", "eval"), names)
        found["figure"] = figure(box)
    return found


def apart(path: Path, cells: list[str], installed: set[str]) -> dict:
    """Run cells of a notebook in a process of its own, in a folder with it alone."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, folder)
        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.chdir(folder)
            try:
                found = run(cells, installed)
            except BaseException:
                found = {"error": traceback.format_exc()[-2000:]}
            with open(writer, "w", encoding="utf-8") as out:
                json.dump(found, out)
            os._exit(0)
        os.close(writer)
        with open(reader, encoding="utf-8") as text:
            said = text.read()
        os.waitpid(child, 0)
    return json.loads(said) if said else {"error": "the process died"}


def main(result: str, *paths: str) -> None:
    """Open each notebook and write what was found."""
    sys.modules["google.colab"] = types.ModuleType("google.colab")
    cells = {Path(path): code_cells(Path(path)) for path in paths}
    installs = {c for found in cells.values() for c in found if "google.colab" in c}
    calls: set[str] = set()  # the commands that were run
    call = subprocess.run

    def once(command, **how):
        if str(command) in calls:
            return subprocess.CompletedProcess(command, 0)
        calls.add(str(command))
        return call(command, **how)

    subprocess.run = once
    for cell in installs:
        exec(compile(cell, "cell", "exec"), {})
    subprocess.run = call
    import matplotlib.pyplot  # noqa: F401  here once, instead of in each process
    import torch  # noqa: F401

    firsts = {path: figure_at(wanted) for path, wanted in cells.items()}
    shown = min(firsts, key=firsts.__getitem__)
    found = {}
    for path, wanted in cells.items():
        first = wanted[: firsts[path] + 1] if path == shown else opening(wanted)
        found[path.stem] = apart(path, first, installs)
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
