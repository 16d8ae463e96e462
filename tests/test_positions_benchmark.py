"""The benchmark of the rotation measures what it says."""

import json
from pathlib import Path

import positions as benchmark
import pytest
import side_by_side
import torch

SCRIPT = Path(benchmark.__file__)
RESULTS = sorted((SCRIPT.parent / "results").glob("positions.*.json"))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The folder of a run with tiny sizes and one round."""
    out, threads = tmp_path_factory.mktemp("results"), torch.get_num_threads()
    command = ["--device=cpu", "--tiny", "--rounds=1", "--out", str(out)]
    assert benchmark.main(command) == 0
    torch.set_num_threads(threads)
    return out


def test_run_writes_results_and_their_table(written):
    found = json.loads((written / "positions.cpu.json").read_text(encoding="utf-8"))
    text = (written / "positions.cpu.md").read_text(encoding="utf-8")
    assert benchmark.page(found, "cpu") == text
    assert found["rounds"] == 1 and found["torch"] == torch.__version__
    fields = len(benchmark.Case._fields)
    rows = [benchmark.Case(*list(row.values())[:fields]) for row in found["rows"]]
    assert rows == benchmark.cases("tiny")
    assert all(set(row["seconds"]) == {"ours", "Llama"} for row in found["rows"])


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_stored_table_is_that_of_the_stored_results(path):
    found = json.loads(path.read_text(encoding="utf-8"))
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert benchmark.page(found, path.stem.split(".")[1]) == text
    assert found["rounds"] >= 15 and len(found["rows"]) == len(benchmark.cases("full"))


@pytest.mark.parametrize("case", benchmark.cases("tiny"), ids=str)
def test_contenders_give_the_same(case):
    outputs = {n: run() for n, run in benchmark.contenders(case, "cpu").items()}
    n_tensors = 4 if case.work == "with backward" else 2
    assert {len(tensors) for tensors in outputs.values()} == {n_tensors}
    tolerance = benchmark.TOLERANCE[case.dtype]
    assert side_by_side.assert_equal(outputs, tolerance) <= tolerance


def test_contender_that_turns_the_other_pairs_is_refused(monkeypatch):
    other = lambda d: benchmark_rope(d, pairing="neighbours")  # noqa: E731
    benchmark_rope = benchmark.RoPE
    monkeypatch.setattr(benchmark, "RoPE", other)
    monkeypatch.setattr(side_by_side, "interleave", None)  # nothing is timed
    with pytest.raises(AssertionError, match="Llama computes something else"):
        benchmark.measure(benchmark.cases("tiny")[0], "cpu", 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_absent_device_is_one_line(capsys):
    assert benchmark.main(["--device", "cuda"]) == 1
    assert capsys.readouterr().out == "no CUDA device is available: --device cpu\n"
