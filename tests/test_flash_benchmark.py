"""The benchmark of tiled attention measures what it says."""

from functools import partial

import flash as benchmark
import pytest
import side_by_side


def test_run_writes_results_and_their_table(tiny_run):
    found, text = tiny_run
    rows = [benchmark.Case(*list(row.values())[:3]) for row in found["rows"]]
    assert rows == benchmark.cases("tiny")
    for row in found["rows"]:
        both = {"ours", "SDPA"} | ({"formula"} if row["t"] <= 32 else set())
        assert set(row["seconds"]) == both
        assert f"| {benchmark.speed(row):.2f} |" in text
    assert [row["t"] for row in found["memory"]] == [32, 48]
    assert found["memory"][1]["formula, forward"] is None


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
