"""Tests import the benchmarks as they import one another: by their file's name."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
