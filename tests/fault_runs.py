"""Run tests on copies of the package, a forked process each.

Usage: python -P tests/fault_runs.py, with the folders of the copies and their tests as
JSON on the standard input. Each folder gets report.xml, and output.txt.
"""

import importlib
import json
import os
import sys

import pytest

SHARED = ("torch._dynamo", "hypothesis", "transformers.models.llama.modeling_llama")


def run(folder: str, tests: list[str]) -> None:
    """In a child: the tests on the package of a folder, up to the first that fails."""
    out = os.open(f"{folder}/output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = folder
    options = ["-q", "-x", "-p", "no:cacheprovider", f"--junitxml={folder}/report.xml"]
    pytest.main([*options, *(f"tests/{test}" for test in tests)])


if __name__ == "__main__":
    for name in SHARED:  # imported here, for all children
        importlib.import_module(name)
    for folder, tests in json.load(sys.stdin).items():
        pid = os.fork()
        if not pid:
            try:
                run(folder, tests)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
