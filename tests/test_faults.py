"""Twelve faults that people make, each put into the package: named tests must see it.

`make mutants` tries thousands of small changes and takes hours; these few are tried
each time. A fault is a change of text in a copy of the package. The test that is named
runs on the copy, in a process of its own, and must fail by an assertion.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ASSERTED = ("AssertionError", "assert ")  # how a failure by an assertion begins


@dataclass(frozen=True)
class Fault:
    """A text of a module, what a mistake makes of it, and the test that must fail."""

    module: str
    right: str
    wrong: str
    test: str


TOP_K = """\
    if top_k is not None and top_k < x.size(-1):
        x = x.masked_fill(~keep_largest(x, top_k), -math.inf)
"""
TOP_P = """\
    if top_p is not None and top_p < 1:
        x = x.masked_fill(~keep_nucleus(x, top_p), -math.inf)
"""
FAULTS = {
    "mask means hidden": Fault(
        "attention",
        "scores.masked_fill(~mask, torch.finfo(scores.dtype).min)",
        "scores.masked_fill(mask, torch.finfo(scores.dtype).min)",
        "test_attention_contract.py::test_one_key_in_sight_gives_its_value",
    ),
    "scores are not scaled": Fault(
        "attention",
        "scores = (q / math.sqrt(q.size(-1))) @ k.mT",
        "scores = q @ k.mT",
        "test_attention_contract.py::test_scores_are_divided_by_the_root_of_the_width",
    ),
    "causal is aligned to the first key": Fault(
        "attention",
        "ones.tril(n_keys - n_queries)",
        "ones.tril()",
        "test_attention_contract.py::test_causal_mask_is_aligned_to_the_last_key",
    ),
    "heads are tiled": Fault(
        "attention",
        "k.repeat_interleave(n_readers, -3), v.repeat_interleave(n_readers, -3)",
        "torch.cat([k] * n_readers, -3), torch.cat([v] * n_readers, -3)",
        "test_attention_contract.py::test_shared_heads_are_repeated_in_order",
    ),
    "sine and cosine change places": Fault(
        "positions",
        "torch.stack((angles.sin(), angles.cos()), -1)",
        "torch.stack((angles.cos(), angles.sin()), -1)",
        "test_positions.py::test_table_equals_loops",
    ),
    "variance is unbiased": Fault(
        "norms",
        "return F.layer_norm(x.to(dtype), shape, weight, bias, self.eps).to(x.dtype)",
        "wide = x.to(dtype)\n"
        "        size = (wide.var(-1, keepdim=True) + self.eps).sqrt()\n"
        "        wide = (wide - wide.mean(-1, keepdim=True)) / size * weight\n"
        "        return (wide if bias is None else wide + bias).to(x.dtype)",
        "test_norms.py::test_mean_is_zero_and_variance_is_one_but_for_eps",
    ),
    "last norm is missing": Fault(
        "model",
        'where the model says so."""\n'
        "        return x if self.norm is None else self.norm(x)",
        'where the model says so."""\n        return x',
        "test_model.py::test_language_model_is_its_parts_one_after_the_other",
    ),
    "window holds one key more": Fault(
        "window",
        ".triu(place - window + 1)",
        ".triu(place - window)",
        "test_window.py::test_case_29_window_counts_the_query_itself",
    ),
    "cache counts from one": Fault(
        "cache",
        "self.count(tokens.device) + torch.arange(n, device=tokens.device)",
        "self.count(tokens.device) + 1 + torch.arange(n, device=tokens.device)",
        "test_cache.py::test_positions_of_padded_prompts",
    ),
    "top-p comes before top-k": Fault(
        "sampling",
        TOP_K + TOP_P,
        TOP_P + TOP_K,
        "test_sampling.py::test_filter_equals_loops",
    ),
    "int8 scale is of another range": Fault(
        "quantize",
        "2 ** (bits - 1) - 1",
        "2 ** (bits - 1) - 2",
        "test_quantize.py::test_multiples_of_the_scale_are_exact",
    ),
    "warm-up starts at nothing": Fault(
        "training",
        "return peak * (step / top)",
        "return peak * ((step - 1) / top)",
        "test_training.py::test_cosine_is_that_of_transformers",
    ),
}


def with_fault(source: str, fault: Fault) -> str:
    """The module with the fault.

    Raises:
        ValueError: The text to change is not there once.
    """
    if (n := source.count(fault.right)) != 1:
        raise ValueError(f"text of {fault.module} must occur once, got {n}")
    return source.replace(fault.right, fault.wrong)


def copy_package(folder: Path, fault: Fault | None = None) -> None:
    """Lay the package into a folder: links, but for the module with the fault."""
    (folder / "transformer").mkdir(parents=True)
    for path in (ROOT / "transformer").iterdir():
        copy = folder / "transformer" / path.name
        if fault and path.name == f"{fault.module}.py":
            text = with_fault(path.read_text(encoding="utf-8"), fault)
            copy.write_text(text, encoding="utf-8")
        elif path.name != "__pycache__":
            copy.symlink_to(path)


def outcomes(runs: dict[Path, list[str]]) -> dict[Path, dict[str, str]]:
    """Run tests on the packages of folders, each up to the first that fails.

    Returns:
        Of each folder and each test that ran, `name` of `file.py::name[case]` and how
        its failure begins, "" for none.
    """
    done = subprocess.run(
        # -P: the package of the current folder is not to be found
        [sys.executable, "-P", "tests/fault_runs.py"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        input=json.dumps({str(folder): tests for folder, tests in runs.items()}),
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return {folder: reported(folder) for folder in runs}


def reported(folder: Path) -> dict[str, str]:
    """What the report of a run says of each test."""
    cases = [*ElementTree.parse(folder / "report.xml").iter("testcase")]
    assert cases, (folder / "output.txt").read_text(encoding="utf-8")
    found = {}
    for case in cases:
        failures = [*case.iter("failure"), *case.iter("error")]
        begins = failures[0].get("message", "") if failures else ""
        name = case.get("name", "").partition("[")[0]
        found[name] = found.get(name) or begins
    return found


def test_every_fault_is_seen_and_nothing_where_nothing_is_wrong(tmp_path):
    runs = {}
    for name, fault in FAULTS.items():
        runs[folder := tmp_path / name] = [fault.test]
        copy_package(folder, fault)
    copy_package(right := tmp_path / "right")
    found = outcomes(runs | {right: [fault.test for fault in FAULTS.values()]})
    named = {name: fault.test.rpartition("::")[2] for name, fault in FAULTS.items()}
    assert found.pop(right) == dict.fromkeys(named.values(), "")
    said = {folder.name: tests for folder, tests in found.items()}
    unseen = {
        name: said[name]
        for name, test in named.items()
        if not said[name].get(test, "").startswith(ASSERTED)
    }
    assert not unseen


def test_copy_is_what_runs(tmp_path):
    copy_package(copy := tmp_path / "copy")
    (copy / "transformer" / "norms.py").unlink()
    (copy / "transformer" / "norms.py").write_text(
        "raise OSError('of the copy')\n", encoding="utf-8"
    )
    (found,) = outcomes(
        {copy: ["test_norms.py::test_print_shows_the_settings"]}
    ).values()
    assert list(found.values()) == ["collection failure"]
    assert "of the copy" in (copy / "output.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("n", [0, 2])
def test_fault_whose_text_is_not_there_once_is_an_error(n):
    fault = Fault("norms", "x + 1", "x + 2", "test_norms.py")
    with pytest.raises(ValueError, match=f"text of norms must occur once, got {n}"):
        with_fault("y = x + 1\n" * n, fault)
