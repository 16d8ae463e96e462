"""The benchmark of the window measures what it says."""

import pytest
import side_by_side
import torch
import window as benchmark
from torch.testing import assert_close


def test_run_writes_results_and_their_table(tiny_run):
    found, _ = tiny_run
    fields = len(benchmark.Case._fields)
    rows = [benchmark.Case(*list(row.values())[:fields]) for row in found["rows"]]
    assert rows == benchmark.cases("tiny")
    names = {benchmark.OURS, benchmark.DENSE, benchmark.MASKED}
    assert all(set(row["seconds"]) == names for row in found["rows"])


@pytest.mark.parametrize("case", benchmark.cases("tiny"), ids=str)
def test_contenders_with_a_window_give_the_same(case):
    runs = benchmark.contenders(case, "cpu", flex=False)
    outputs = {n: run() for n, run in runs.items() if n != benchmark.DENSE}
    assert {len(tensors) for tensors in outputs.values()} == {1 + 3 * case.backward}
    tolerance = benchmark.TOLERANCE[case.dtype]
    assert side_by_side.assert_equal(outputs, tolerance) <= tolerance


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_given_the_same_window():
    case = benchmark.cases("tiny")[0]
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, case.t, 64).unbind()
    flex = benchmark.flexed(case, "cpu", compiled=False)
    assert_close(flex(q, k, v), benchmark.window_attention(case.w)(q, k, v))


def test_contender_with_another_window_is_refused(monkeypatch):
    wider = benchmark.window_mask
    other = lambda t, s, w, device: wider(t, s, w + 1, device)  # noqa: E731
    monkeypatch.setattr(benchmark, "window_mask", other)
    monkeypatch.setattr(side_by_side, "interleave", None)  # nothing is timed
    with pytest.raises(AssertionError, match="as mask computes something else"):
        benchmark.measure(benchmark.cases("tiny")[0], "cpu", 1, flex=False)


def rows(times: dict[int, float], name=benchmark.OURS) -> list[dict]:
    """Rows with these seconds at these lengths."""
    return [{"t": t, "seconds": {name: [s, s]}} for t, s in times.items()]


def test_slope_is_the_power_of_the_length():
    linear = rows({t: 3e-6 * t for t in (2048, 4096, 16384)})
    square = rows({t: 2e-9 * t * t for t in (2048, 4096, 16384)})
    assert benchmark.slope(linear, benchmark.OURS) == pytest.approx(1)
    assert benchmark.slope(square, benchmark.OURS) == pytest.approx(2)


def test_excess_over_linear_memory():
    memory = [
        {"t": 10, "forward": 7},
        {"t": 20, "forward": 21},
        {"t": 40, "forward": 28},
    ]
    assert benchmark.linear_excess(memory, "forward") == 1.5


def test_faster_means_that_the_peer_takes_longer():
    row = {"seconds": {benchmark.OURS: [1.0, 1.0], benchmark.DENSE: [3.0, 3.0]}}
    assert benchmark.faster(row, benchmark.DENSE) == 3
    assert benchmark.peers(row) == [benchmark.DENSE]


def test_aims_stand_beside_what_was_found(tiny_run):
    assert benchmark.aims(tiny_run[0]) == []  # no row of the tiny sizes has an aim
    row = {"dtype": "float32", "t": 16384, "backward": False}
    row["seconds"] = {benchmark.OURS: [1.0], benchmark.DENSE: [13.0]}
    lines = benchmark.aims({"rows": [row]})
    assert ["16384", "float32", benchmark.DENSE, "12", "13.00"] in lines
    assert ["16384", "float32", benchmark.FLEX, "0.95", "–"] in lines
