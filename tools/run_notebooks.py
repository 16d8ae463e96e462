"""Execute notebooks in place so that a second run leaves the same bytes.

Nothing in the file may change from run to run: no times, no random widget ids, no
random cell ids. Cells whose id is random get a readable one: what the cell defines,
or the words it starts with.

Usage: python tools/run_notebooks.py chapters/01_multi_head_attention.ipynb ...
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
WIDGETS = "application/vnd.jupyter.widget-state+json"
RANDOM_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f-]+)?")
MODEL_ID = re.compile(r"[0-9a-f]{32}")
BAR = re.compile(r"[^\r\n]*\d+%\|[^\r\n]*[\r\n]*")


def defined_name(source: str) -> str | None:
    """The first function or class that a cell defines."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # a magic, for example
        return None
    kinds = (ast.FunctionDef, ast.ClassDef)
    return next((node.name for node in body if isinstance(node, kinds)), None)


def readable_id(cell) -> str:
    """What an exported cell defines, a verdict's claim, or the first words."""
    source = cell.source
    if '"google.colab"' in source:
        return "colab"
    claim = re.search(r"^verdict\(\s*[\"']([\w-]+)", source, re.M)
    words = "verdict-" + claim[1] if claim else None
    if cell.cell_type == "code" and not words:
        words = defined_name(source)
    if not words:
        lines = [line for line in source.splitlines() if not line.startswith("#|")]
        if cell.cell_type == "code" and re.match(r"(import|from) ", " ".join(lines)):
            return "imports"
        words = " ".join(re.findall(r"[A-Za-z0-9_]+", " ".join(lines))[:5])
    return re.sub(r"[^A-Za-z0-9_]+", "-", words).strip("-")[:40] or cell.cell_type


def name_cells(nb) -> None:
    """Give a readable, unique id to each cell that has none."""
    taken = {cell.id for cell in nb.cells if not RANDOM_ID.fullmatch(cell.id)}
    for cell in nb.cells:
        if not RANDOM_ID.fullmatch(cell.id):
            continue
        name = stem = readable_id(cell)
        count = 1
        while name in taken:
            count += 1
            name = f"{stem}-{count}"
        taken.add(name)
        cell.id = name


def widget_order(nb, state: dict) -> list[str]:
    """Widget models in the order in which the notebook shows them, then the rest.

    Links between widgets are shown by no cell, yet the page needs them.
    """
    order: list[str] = []

    def visit(model: str) -> None:
        if model in state and model not in order:
            order.append(model)
            for child in MODEL_ID.findall(json.dumps(state[model], sort_keys=True)):
                visit(child)

    for model in MODEL_ID.findall(json.dumps(nb.cells)):
        visit(model)
    rest = (model for model in state if model not in order)
    return order + sorted(rest, key=lambda m: MODEL_ID.sub("", json.dumps(state[m])))


def name_widgets(nb):
    """Number the widget models, whose ids are random, in the order of appearance."""
    state = nb.metadata.get("widgets", {}).get(WIDGETS, {}).get("state", {})
    if not state:
        nb.metadata.pop("widgets", None)
        return nb
    text = json.dumps(nb)
    for number, old in enumerate(widget_order(nb, state), 1):
        text = text.replace(old, f"{number:032x}")
    nb = nbformat.from_dict(json.loads(text))
    models = nb.metadata["widgets"][WIDGETS]["state"]
    nb.metadata["widgets"][WIDGETS]["state"] = dict(sorted(models.items()))
    return nb


def tidy(nb):
    """Keep what a reader sees and drop what changes from run to run."""
    kept = {key: nb.metadata[key] for key in ("widgets",) if key in nb.metadata}
    nb.metadata = nbformat.from_dict(
        {"kernelspec": KERNEL, "language_info": {"name": "python"}, **kept}
    )
    for cell in nb.cells:
        cell.metadata.pop("execution", None)
    name_cells(nb)
    return name_widgets(nb)


def join_streams(nb) -> None:
    """One output per stream: how a kernel cuts its prints into pieces is chance.

    Progress bars, which tell the reader of a page nothing, are dropped.
    """
    for cell in nb.cells:
        joined = []
        for output in cell.get("outputs", []):
            last = joined[-1] if joined else {}
            same = output.get("name", 0) == last.get("name", 1)
            if output.output_type == "stream" and same:
                last.text += output.text
            else:
                joined.append(output)
        for output in [o for o in joined if o.get("name") == "stderr"]:
            output.text = BAR.sub("", output.text)
            if not output.text.strip():
                joined.remove(output)
        if "outputs" in cell:
            cell.outputs = joined


def execute(path: Path) -> str:
    """The text of the notebook after a run in an empty folder, as a lone reader has it.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised.
    """
    nb = nbformat.read(path, as_version=4)
    nb.metadata.pop("widgets", None)
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            nb,
            kernel_name="python3",
            timeout=3600,
            record_timing=False,
            resources={"metadata": {"path": folder}},
        ).execute()
    join_streams(nb)
    nb = tidy(nb)
    nbformat.validate(nb)
    return nbformat.writes(nb) + "\n"


def compared(text: str) -> dict:
    """The notebook without the outputs that may change: those tagged as ignored."""
    nb = json.loads(text)
    for cell in nb["cells"]:
        if "nbval-ignore-output" in cell["metadata"].get("tags", []):
            cell["outputs"] = []
    return nb


def main(paths: list[str]) -> None:
    """Execute each notebook and say whether its bytes changed.

    A file whose new run differs in nothing but ignored outputs (timings) stays as it
    is, unless FRESH is set in the environment.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    for path in map(Path, paths):
        new, old = execute(path), path.read_text(encoding="utf-8")
        same = new == old if "FRESH" in os.environ else compared(new) == compared(old)
        changed = not same
        if changed:
            path.write_text(new, encoding="utf-8", newline="\n")
        print("updated" if changed else "unchanged", path)


if __name__ == "__main__":
    main(sys.argv[1:])
