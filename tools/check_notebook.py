"""Run a notebook alone in an empty folder and compare its outputs with the stored ones.

Like a reader's who opened this one file: nothing else of the repository is there.
What a library writes to stderr is not compared: warnings differ between machines.
`--measured FILE` writes what was compared and how long it took, if all went well.

Usage: python tools/check_notebook.py NOTEBOOK [--measured FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import measured
import pytest

SANITIZE = Path(__file__).resolve().with_name("nbval_sanitize.cfg")
TIMEOUT = 300  # seconds a cell


class Quiet:
    """A pytest plugin: leave stderr out of nbval's comparison."""

    def pytest_collection_modifyitems(self, items) -> None:
        """nbval keeps what it does not compare in its file collector."""
        for notebook in {item.parent for item in items}:
            notebook.skip_compare += ("stderr",)


def counts(path: Path) -> dict[str, int]:
    """How many cells run, and how many of those with an output are compared or not."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    ignored = [
        "nbval-ignore-output" in cell["metadata"].get("tags", [])
        for cell in code
        if cell["outputs"]
    ]
    compared = ignored.count(False)
    return {"cells": len(code), "compared": compared, "ignored": ignored.count(True)}


def check(path: Path, timeout: float = TIMEOUT) -> int:
    """nbval's verdict on the notebook: 0 if every cell gives its stored output."""
    os.environ.pop("MPLBACKEND", None)  # the kernel's inline figures
    os.environ.setdefault("TQDM_DISABLE", "1")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, folder)
        options = ["--nbval", "--nbval-current-env", f"--nbval-cell-timeout={timeout}"]
        options += [f"--nbval-sanitize-with={SANITIZE}", "--color=no", "-q"]
        options += ["--no-header", "-pno:cacheprovider", f"-c{os.devnull}"]
        options += [f"--rootdir={folder}", str(Path(folder) / path.name)]
        return int(pytest.main(options, plugins=[Quiet()]))


def main(arguments: list[str]) -> int:
    """Check one notebook; the last line says what was compared and how long it took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--measured", type=Path, metavar="FILE")
    wanted = parser.parse_args(arguments)
    path, start = wanted.notebook, time.perf_counter()
    status = check(path)
    seconds = time.perf_counter() - start
    found = counts(path)
    said = "{cells} cells run, {compared} outputs compared, {ignored} ignored"
    print(f"{path.stem}: {said.format(**found)}, {seconds:.0f} s")
    if wanted.measured and not status:
        found |= {"seconds": round(seconds, 1), "facts": measured.facts()}
        measured.write(wanted.measured, found)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
