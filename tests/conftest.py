"""What all tests need before the first of them is imported.

Tests import the benchmarks as they import one another: by their file's name. And
setuptools comes before anything that imports distutils: torch.compile imports it late,
and it refuses to load once the standard library's distutils is there.
"""

import sys
from pathlib import Path

import setuptools  # noqa: F401

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
