"""The package with nothing beside it but torch, safetensors and tqdm."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from test_export import MODULES

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
BARE = """
import importlib
import torch
for name in {modules!r}:
    importlib.import_module("transformer." + name)

from transformer.attention import attention, fused_attention
from transformer.cache import KVCache
from transformer.flash import flash_attention
from transformer.quantize import quantize
from transformer.sampling import generate
from transformer.training import Recipe, small_decoder, train
from transformer.data import batches
from transformer.window import window_attention

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 2, 9, 8).requires_grad_()
want = attention(q, k, v, causal=True)
for attend in (fused_attention, flash_attention, window_attention(9)):
    got = attend(q, k, v, causal=True)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    got.square().sum().backward()
model = small_decoder(17, 1, 16, 2)
train(model, batches(torch.arange(200) % 17, 8, 4), Recipe(2, rate=0.01))
print(generate(model.eval(), torch.tensor([[1, 2]]), 3, temperature=0).shape)
quantize(model)
"""


def plain(name: str) -> str:
    """The name of a package as its index spells it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", name)[0]).lower()


def needed(names: list[str]) -> set[str]:
    """These packages, and those that they cannot be installed without."""
    found, rest = set(), [plain(name) for name in names]
    while rest:
        if (name := rest.pop()) in found:
            continue
        found.add(name)
        try:
            asked = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # for another system
            continue
        rest += [plain(line) for line in asked if "extra ==" not in line]
    return found


def alone(folder: Path, names: set[str]) -> None:
    """Link to what these packages have installed here, and to nothing else."""
    for name in names:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        tops = {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}
        for top in tops:
            if not (folder / top).exists():
                (folder / top).symlink_to(found.locate_file(top))


def test_package_needs_no_package_but_its_three_and_no_compiler(tmp_path):
    allowed = needed(PROJECT["dependencies"])
    assert {"torch", "safetensors", "tqdm"} <= allowed
    assert not allowed & {"triton", "matplotlib", "ipywidgets", "numpy", "tokenizers"}
    (tmp_path / "bin").mkdir()
    (tmp_path / "site").mkdir()
    alone(tmp_path / "site", allowed)
    env = {"PATH": str(tmp_path / "bin"), "CC": "/bin/false", "CXX": "/bin/false"}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-S", "-c", BARE.format(modules=MODULES)],
        cwd=tmp_path,
        env={**os.environ, **env, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert (done.returncode, done.stdout) == (0, "torch.Size([1, 5])\n"), done.stderr


def test_lowest_torch_and_pythons_are_those_that_the_readme_states():
    (bound,) = [line for line in PROJECT["dependencies"] if line.startswith("torch")]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"torch {bound.removeprefix('torch>=')} or newer" in readme
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')}" in readme
