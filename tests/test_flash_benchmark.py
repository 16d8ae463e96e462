"""The benchmark of tiled attention measures what it says."""

import json
from functools import partial
from pathlib import Path

import flash as benchmark
import pytest
import side_by_side
import torch

SCRIPT = Path(benchmark.__file__)
RESULTS = sorted((SCRIPT.parent / "results").glob("flash.*.json"))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The folder of a run with tiny sizes and one round."""
    out, threads = tmp_path_factory.mktemp("results"), torch.get_num_threads()
    command = ["--device=cpu", "--tiny", "--rounds=1", "--out", str(out)]
    assert benchmark.main(command) == 0
    torch.set_num_threads(threads)
    return out


def test_run_writes_results_and_their_table(written):
    found = json.loads((written / "flash.cpu.json").read_text(encoding="utf-8"))
    text = (written / "flash.cpu.md").read_text(encoding="utf-8")
    assert benchmark.page(found, "cpu") == text
    assert found["rounds"] == 1 and found["torch"] == torch.__version__
    rows = [benchmark.Case(*list(row.values())[:3]) for row in found["rows"]]
    assert rows == benchmark.cases("tiny")
    for row in found["rows"]:
        both = {"ours", "SDPA"} | ({"formula"} if row["t"] <= 32 else set())
        assert set(row["seconds"]) == both
        assert f"| {benchmark.speed(row):.2f} |" in text
    assert [row["t"] for row in found["memory"]] == [32, 48]
    assert found["memory"][1]["formula, forward"] is None


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_stored_table_is_that_of_the_stored_results(path):
    found = json.loads(path.read_text(encoding="utf-8"))
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert benchmark.page(found, path.stem.split(".")[1]) == text
    assert found["rounds"] >= 15 and len(found["rows"]) == len(benchmark.cases("full"))


@pytest.mark.parametrize("case", benchmark.cases("tiny"), ids=str)
def test_contenders_give_the_same(case):
    runs = benchmark.contenders(case, "cpu", most=99)
    outputs = {name: run() for name, run in runs.items()}
    n_tensors = 4 if case.backward else 1
    assert len(outputs) == 3
    assert {len(tensors) for tensors in outputs.values()} == {n_tensors}
    tolerance = benchmark.TOLERANCE[case.dtype]
    assert side_by_side.assert_equal(outputs, tolerance) <= tolerance


@pytest.mark.parametrize("backward", [False, True])
def test_contender_that_computes_something_else_is_refused(backward, monkeypatch):
    wrong = partial(benchmark.flash_attention, causal=False)
    monkeypatch.setitem(benchmark.ATTENDS, "SDPA", wrong)
    monkeypatch.setattr(side_by_side, "interleave", None)  # nothing is timed
    case = benchmark.Case(32, "float32", backward)
    with pytest.raises(AssertionError, match="SDPA computes something else"):
        benchmark.measure(case, "cpu", 1, 0)


def test_aims_are_held_against_the_slowest_of_the_long_rows():
    def row(t, dtype, ours, backward=False):
        seconds = {"ours": [ours], "SDPA": [1.0]}
        return {"t": t, "dtype": dtype, "backward": backward, "seconds": seconds}

    rows = [row(t, d, 1.0) for t in (1024, 4096) for d in benchmark.SPEED]
    rows += [row(512, "float32", 9.0), row(4096, "float32", 9.0, backward=True)]
    rows += [row(4096, "bfloat16", 2.0)]
    assert benchmark.reached(rows) == {"float32": 1.0, "bfloat16": 0.5}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_absent_device_is_one_line(capsys):
    assert benchmark.main(["--device", "cuda"]) == 1
    assert capsys.readouterr().out == "no CUDA device is available: --device cpu\n"
