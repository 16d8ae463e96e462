"""Without Triton or a GPU the package imports, and the kernel says why it cannot run.

What the kernels compute is tested in tests/kernels, in a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from transformer import flash_triton
from transformer.flash_triton import choose_tile, triton_attention

ROOT = Path(__file__).resolve().parent.parent
IMPORT_ALL = """
import pkgutil, sys
import torch, transformer
{before}
for module in pkgutil.iter_modules(transformer.__path__):
    __import__("transformer." + module.name)
from transformer.attention import attention
from transformer.flash_triton import triton_attention
x = torch.ones(1, 1, 2, 16)
assert attention(x, x, x).equal(x)
try:
    triton_attention(x, x, x)
except RuntimeError as error:
    print(error)
"""
# What takes Triton away: nothing of it, a version before 3.5, and no GPU.
HIDDEN = 'sys.modules["triton"] = None'
OLD = """
import types
old = types.ModuleType("triton")
old.jit, old.__version__ = None, "2.0.0"
sys.modules["triton"] = old
"""


def said(before: str) -> str:
    """What asking for the kernel says in a fresh process, where no GPU is seen."""
    known = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    known.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL.format(before=before)],
        env=known,
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("before", [HIDDEN, OLD], ids=["hidden", "old"])
def test_case_27_package_works_without_triton_and_says_why_the_kernel_does_not(before):
    words = said(before)
    assert words.startswith("triton_attention cannot run: it needs Triton 3.5 or newer")
    assert words.count("\n") == 1


@pytest.mark.skipif(flash_triton.why_not is not None, reason="Triton is absent")
def test_kernel_says_that_it_needs_a_gpu():
    words = said("")
    assert words.startswith("triton_attention needs a GPU, got q.device=device(type='c")
    assert words.count("\n") == 1


def test_shapes_and_masks_are_refused_before_a_device_is_asked_for():
    x = torch.ones(1, 2, 4, 16)
    with pytest.raises(ValueError, match="same width"):
        triton_attention(x, x[..., :8], x)
    with pytest.raises(TypeError, match="mask must be bool"):
        triton_attention(x, x, x, torch.ones(1, 1, 1, 4))


def test_tile_is_that_of_the_target_the_dtype_and_the_wider_head():
    name = "forward_kernel"
    wide, narrow = (choose_tile(name, (9, 0), 2, d) for d in (128, 64))
    assert wide != narrow and narrow == choose_tile(name, (9, 0), 2, 1)
    assert choose_tile(name, (8, 0), 2, 128) != wide
    assert choose_tile(name, (8, 6), 2, 128) == choose_tile(name, (12, 0), 2, 128)
    assert choose_tile(name, (8, 0), 4, 65) == choose_tile(name, (9, 0), 4, 128)


def test_every_tile_is_made_of_powers_of_two():
    tables = (flash_triton.FORWARD, flash_triton.QUERY_GRADIENT)
    for table in (*tables, flash_triton.KEY_GRADIENT):
        assert set(table) == {"9.0", "8.0", "other", "float32"}
        sizes = [n for tiles in table.values() for tile in tiles for n in tile[:3]]
        assert len(sizes) == 36 and all(n & (n - 1) == 0 for n in sizes)


def test_table_of_figures_is_packaged_and_fits():
    path = ROOT / "transformer" / "kernels.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    shared = {"8.0": 166_912, "9.0": 232_448}
    assert {row["target"] for row in rows} == set(shared)
    assert all(row["spilled"] == 0 for row in rows)
    assert all(row["shared"] <= shared[row["target"]] for row in rows)
