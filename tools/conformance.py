"""How far each component is from its references: the largest errors over the tests.

The tests give them through the fixture `conform` of tests/conftest.py.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import math
from pathlib import Path

import measured
import torch

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("forward", "gradient", "mask", "dtype", "ragged", "compile", "cached")
HALF = (torch.bfloat16, torch.float16)


@functools.cache
def public_names() -> dict[str, str]:
    """The public names of the package, each with its module."""
    found = {}
    for path in sorted((ROOT / "transformer").glob("[!_]*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "__all__":
                found |= dict.fromkeys(ast.literal_eval(node.value), path.stem)
    return found


@functools.cache
def with_version(reference: str) -> str:
    """The reference, with its package's version if it is a name like torch.nn.GELU.

    Raises:
        ValueError: The package is not installed.
    """
    package, dot, _ = reference.split()[0].partition(".")
    if not dot:
        return reference
    try:
        version = importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        message = f"reference names no installed package, got {reference!r}"
        raise ValueError(message) from None
    return f"{reference}, {package} {version}"


def pairs(actual, expected) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors to compare, one by one.

    Raises:
        ValueError: There are more on one side than on the other.
    """
    if not isinstance(actual, (list, tuple)):
        return [(torch.as_tensor(actual), torch.as_tensor(expected))]
    if len(actual) != len(expected):
        found = f"got {len(actual)} and {len(expected)}"
        raise ValueError(f"actual and expected must be as many, {found}")
    both = zip(actual, expected, strict=True)
    return [pair for one in both for pair in pairs(*one)]


def largest_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest absolute difference; 0 where there is nothing to compare."""
    exact = torch.complex128 if actual.is_complex() else torch.float64
    mine, theirs = (x.detach().cpu().to(exact) for x in (actual, expected))
    off = (mine - theirs).abs().masked_fill(mine == theirs, 0)  # also for infinities
    return off.max().item() if off.numel() else 0.0


class Conformance:
    """The largest errors so far, by component, column, reference and dtype."""

    def __init__(self) -> None:
        self.found: dict[str, dict] = {}

    def record(self, component, column, actual, expected, *, reference: str) -> None:
        """Keep the largest errors of a comparison that has been asserted.

        Raises:
            ValueError: The component, column or reference is not known, or half
                precision is recorded in another column than dtype, or an error is
                not finite.
        """
        if column not in COLUMNS:
            known = ", ".join(COLUMNS)
            raise ValueError(f"column must be one of {known}, got {column!r}")
        if component.partition(".")[0] not in public_names():
            raise ValueError(f"component must be a public name, got {component!r}")
        named = with_version(reference)
        for mine, theirs in pairs(actual, expected):
            if mine.dtype in HALF and column != "dtype":
                found = f"got {mine.dtype} in column {column!r}"
                raise ValueError(f"half precision goes in column 'dtype', {found}")
            error = largest_error(mine, theirs)
            if not math.isfinite(error):
                raise ValueError(f"error must be finite, got {error=}")
            entry = {"error": error, "comparisons": 1}
            dtype = str(mine.dtype).removeprefix("torch.")
            self.merge({component: {named: {column: {dtype: entry}}}})

    def merge(self, other: dict) -> None:
        """Take in what another process found."""
        measured.add(self.found, other)
