"""What holds for every benchmark: its stored page, and a device that is not there."""

import importlib
import json
from pathlib import Path

import pytest
import side_by_side
import torch

FOLDER = Path(side_by_side.__file__).parent.parent
RESULTS = sorted((FOLDER / "results").glob("*.json"))
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_stored_table_is_that_of_the_stored_results(path):
    name, device = path.stem.split(".")
    benchmark = importlib.import_module(name)
    found = json.loads(path.read_text(encoding="utf-8"))
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert benchmark.page(found, device) == text
    assert found["rounds"] >= getattr(benchmark, "ROUNDS", 15)
    if hasattr(benchmark, "cases"):  # all sizes were measured
        assert len(found["rows"]) >= len(benchmark.cases("full"))


def test_every_stored_result_has_its_table():
    tables = sorted((FOLDER / "results").glob("*.md"))
    assert [path.stem for path in tables] == [path.stem for path in RESULTS]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", sorted({*NAMES} - {"triton_kernel"}))
def test_absent_device_is_one_line(name, capsys):
    assert importlib.import_module(name).main(["--device", "cuda"]) == 1
    assert capsys.readouterr().out == "no CUDA device is available: --device cpu\n"
