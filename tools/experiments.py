"""Run the recorded experiments that are missing or stale, two at a time.

An experiment is a function under `@recorded("name", ...)` in a chapter. Its hash is
taken from the text of the notebook, so that nothing runs that need not run.

Usage: python tools/experiments.py [--list] [--device cuda] [name ...]
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbclient import NotebookClient

from transformer import records

CHAPTERS = Path(__file__).resolve().parent.parent / "chapters"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Experiment(NamedTuple):
    """A recorded function, as the text of its notebook has it."""

    notebook: Path
    name: str
    function: str
    hash: str
    takes_device: bool

    def path(self, device: str) -> Path:
        """Where its result lies."""
        kind = "" if device == "cpu" else f".{device}"
        return records._results_folder() / f"{self.name}{kind}.json"

    def trouble(self, device: str) -> str:
        """Why it has to run, in a word or two; empty if it need not."""
        try:
            records._read_record(self.path(device), self.hash)
        except RuntimeError as error:
            return re.sub(r"^recorded result \S+ (is |was )?|:.*$", "", str(error))
        return ""


def definitions(nb) -> dict[str, ast.AST]:
    """The functions and classes of a notebook by name; of equal names the last."""
    found = {}
    for cell in nb.cells:
        if cell.cell_type == "code":
            text = re.sub(r"^\s*[%!].*$", "pass", cell.source, flags=re.M)
            nodes = ast.parse(text).body
            found |= {
                node.name: node for node in nodes if isinstance(node, DEFINITIONS)
            }
    return found


def recorded_name(node: ast.AST) -> str | None:
    """The name that `@recorded("name", ...)` above a definition gives."""
    for call in getattr(node, "decorator_list", []):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "recorded":
            return ast.literal_eval(call.args[0])
    return None


def find_all(folder: Path = CHAPTERS) -> list[Experiment]:
    """Every recorded experiment, in the order of the chapters.

    Raises:
        ValueError: Two experiments have one name, hence one file.
    """
    found: list[Experiment] = []
    for path in sorted(folder.glob("*.ipynb")):
        nodes = definitions(nbformat.read(path, as_version=4))
        for function, node in nodes.items():
            name = recorded_name(node)
            if name in [experiment.name for experiment in found]:
                raise ValueError(f"two experiments are recorded as {name!r}")
            if name:
                code = records.experiment_hash(function, nodes.get)
                arguments = [*node.args.args, *node.args.kwonlyargs]
                device = "device" in [argument.arg for argument in arguments]
                found.append(Experiment(path, name, function, code, device))
    return found


def measure(experiment: Experiment, device: str) -> str:
    """Run cells of the notebook until the result is there; why not, if it is not."""
    nb = nbformat.read(experiment.notebook, as_version=4)
    call = nbformat.v4.new_code_cell(f"{experiment.function}()")
    nb.cells = [*(c for c in nb.cells if c.cell_type == "code"), call]
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            nb,
            kernel_name="python3",
            timeout=None,
            allow_errors=True,
            resources={"metadata": {"path": folder}},
        )
        with client.setup_kernel():
            for index, cell in enumerate(nb.cells):
                client.execute_cell(cell, index)
                if not experiment.trouble(device):
                    return ""
    errors = [out for out in call.outputs if out.output_type == "error"]
    words = [f"{error.ename}: {error.evalue}" for error in errors]
    return words[0] if words else "the notebook and its text disagree about the hash"


def measure_apart(experiment: Experiment, device: str) -> bool:
    """Measure in a process of its own, and say how it went and how long it took."""
    print(f"{experiment.name}: running", flush=True)
    start = time.perf_counter()
    command = [sys.executable, __file__, "--device", device, "--here", experiment.name]
    variables = {
        "RECORDED": f"run:{experiment.name}",
        "RECORDED_DEVICE": device,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    lines = done.stdout.strip().splitlines()
    result = "FAILED: " + lines[-1] if done.returncode and lines else "done"
    seconds = time.perf_counter() - start
    print(f"{experiment.name}: {result} ({seconds:.0f} s)", flush=True)
    return not done.returncode


def main(words: list[str]) -> int:
    """List or run what is missing or stale; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these (default: all)")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args(words)
    found = [e for e in find_all() if wanted.device == "cpu" or e.takes_device]
    unknown = sorted(set(wanted.names) - {e.name for e in found})
    if unknown:
        print(f"no recorded experiment is called {unknown[0]!r}", file=sys.stderr)
        return 1
    found = [e for e in found if e.name in (wanted.names or [e.name])]
    if wanted.here:
        failure = measure(found[0], wanted.device)
        print(failure)
        return int(bool(failure))
    todo = [e for e in found if e.trouble(wanted.device)]
    for e in found:
        state = e.trouble(wanted.device) or "up to date"
        print(f"{e.notebook.stem}: {e.name}: {state}", flush=True)
    if wanted.list:
        return 0
    with ThreadPoolExecutor(2) as two:
        good = list(two.map(lambda e: measure_apart(e, wanted.device), todo))
    failed = [e.name for e, ok in zip(todo, good, strict=True) if not ok]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
