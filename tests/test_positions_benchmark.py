"""The benchmark of the rotation measures what it says."""

import positions as benchmark
import pytest
import side_by_side


def test_run_writes_results_and_their_table(tiny_run):
    found, _ = tiny_run
    fields = len(benchmark.Case._fields)
    rows = [benchmark.Case(*list(row.values())[:fields]) for row in found["rows"]]
    assert rows == benchmark.cases("tiny")
    assert all(set(row["seconds"]) == {"ours", "Llama"} for row in found["rows"])


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
