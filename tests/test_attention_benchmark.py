"""The benchmark measures what it says, and its table says what it measured."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import attention as benchmark
import pytest
import side_by_side
import torch
from side_by_side import Ratio
from torch.testing import assert_close

SCRIPT = Path(benchmark.__file__)
SMALL = benchmark.Case(2, 8, 16, 2, "float32")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The folder of a run with tiny sizes and one round."""
    out = tmp_path_factory.mktemp("results")
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--rounds=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(out)],
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert "times the better peer" in done.stdout.splitlines()[-1]
    return out


def test_run_writes_results_and_their_table(written):
    found = json.loads((written / "attention.cpu.json").read_text(encoding="utf-8"))
    text = (written / "attention.cpu.md").read_text(encoding="utf-8")
    assert {path.name for path in written.iterdir()} == {
        "attention.cpu.json",
        "attention.cpu.md",
    }
    assert benchmark.page(found, "cpu") == text
    assert found["rounds"] == 1 and found["torch"] == torch.__version__
    for word in (found["device"], found["date"], "1 rounds, seed 0", found["python"]):
        assert word in text
    one_thread = [row for row in found["rows"] if row["threads"] == 1]
    assert {row["clock"] for row in one_thread} == {"CPU time"}
    assert [benchmark.Case(*list(row.values())[:9]) for row in one_thread] == (
        benchmark.cases("tiny")
    )
    for row in found["rows"]:
        assert set(row["seconds"]) == {"ours", "hand-written SDPA", "torch.nn"}
        assert all(len(seconds) == 1 for seconds in row["seconds"].values())
        assert f"| {benchmark.gate(row):.2f} |" in text


def test_table_can_be_written_again_from_the_results(written):
    table = written / "attention.cpu.md"
    before = table.read_text(encoding="utf-8")
    table.unlink()
    assert not benchmark.main(["--device=cpu", "--table", "--out", str(written)])
    assert table.read_text(encoding="utf-8") == before


@pytest.mark.parametrize("case", benchmark.cases("tiny"), ids=str)
def test_contenders_give_the_same(case):
    outputs = {n: run() for n, run in benchmark.contenders(case, "cpu").items()}
    assert len(outputs) == 3
    n_tensors = 1 + case.backward * 3  # output; gradients of x and of two weights
    assert {len(tensors) for tensors in outputs.values()} == {n_tensors}
    tolerance = benchmark.TOLERANCE[case.dtype]
    assert side_by_side.assert_equal(outputs, tolerance) <= tolerance


@pytest.mark.parametrize("backward", [False, True])
def test_contender_that_computes_something_else_is_refused(backward, monkeypatch):
    class Other(benchmark.ByHand):
        def forward(self, x, causal=False):
            return super().forward(x, True)

    monkeypatch.setattr(benchmark, "ByHand", Other)
    monkeypatch.setattr(side_by_side, "interleave", None)  # nothing is timed
    case = SMALL._replace(backward=backward)
    with pytest.raises(AssertionError, match="hand-written SDPA computes something el"):
        benchmark.measure(case, "cpu", 1)


def test_wrong_gradient_is_refused():
    good = [torch.ones(2), torch.ones(3)]
    wrong = [torch.ones(2), torch.ones(3) * 1.01]
    assert side_by_side.assert_equal({"a": good, "b": good}, 1e-4) == 0
    with pytest.raises(AssertionError, match=r"b computes something else \(tensor 1\)"):
        side_by_side.assert_equal({"a": good, "b": wrong}, 1e-4)


def test_rounds_are_interleaved_and_warm_up_is_not_counted():
    calls = []
    contenders = {name: lambda name=name: calls.append(name) for name in "abc"}
    found = side_by_side.interleave(contenders, 3, "wall time", warm_up=1)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert [len(seconds) for seconds in found.values()] == [3, 3, 3]


def test_ratio_is_taken_round_by_round():
    ours, theirs = [1.0, 20.0, 3.0, 4.0], [2.0, 40.0, 6.0, 8.0]
    assert_close(torch.tensor(Ratio(ours, theirs)), torch.tensor([0.5, 0.5, 0.5]))
    assert str(Ratio([3.0], [2.0])) == "1.50 (1.50–1.50)"


def test_gate_compares_with_the_better_peer():
    seconds = {"ours": [1.0] * 3, "hand-written SDPA": [2.0] * 3, "torch.nn": [0.8] * 3}
    assert benchmark.gate({"seconds": seconds}) == 1.25


def test_cpu_time_does_not_count_waiting():
    assert side_by_side.wall_seconds(lambda: time.sleep(0.2)) > 0.19
    assert side_by_side.cpu_seconds(lambda: time.sleep(0.2)) < 0.1


@pytest.mark.parametrize("load, busy", [(0.3, False), (2.0, False), (2.1, True)])
def test_busy_machine_is_marked(load, busy, monkeypatch):
    monkeypatch.setattr(side_by_side, "load", lambda: load)
    monkeypatch.setattr(side_by_side, "cores", lambda: 2)
    found = side_by_side.facts("cpu", 15, 0)
    assert side_by_side.is_busy(found) is busy
    assert ("not to be trusted" in side_by_side.describe(found)) is busy
