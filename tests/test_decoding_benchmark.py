"""The benchmark of decoding measures what it says."""

import json
from pathlib import Path

import decoding as benchmark
import pytest
import torch
from torch.testing import assert_close

SCRIPT = Path(benchmark.__file__)
RESULTS = sorted((SCRIPT.parent / "results").glob("decoding.*.json"))


@pytest.fixture(scope="module")
def tiny() -> benchmark.Setting:
    """A tiny case, both models, a prompt whose tokens lead clearly."""
    shape = benchmark.SHAPES["tiny"]
    theirs = benchmark.draw(shape)
    model = benchmark.ours(theirs, shape)
    case = benchmark.Case("tiny", 1, 2, False)
    return benchmark.choose_prompt(theirs, model, case, 6)[0]


def test_run_writes_results_and_their_table(tmp_path, monkeypatch):
    case = benchmark.Case("tiny", 1, 1, False)
    monkeypatch.setitem(benchmark.CASES, "tiny", [case])
    threads = torch.get_num_threads()
    command = ["--device=cpu", "--tiny", "--rounds=2", "--out", str(tmp_path)]
    monkeypatch.setattr(benchmark, "summary", lambda found: "done")
    monkeypatch.setattr(benchmark, "PAUSE", 0.0)
    assert benchmark.main(command) == 0
    assert torch.get_num_threads() == threads
    found = json.loads((tmp_path / "decoding.cpu.json").read_text(encoding="utf-8"))
    text = (tmp_path / "decoding.cpu.md").read_text(encoding="utf-8")
    assert benchmark.page(found, "cpu") == text
    (row,) = found["rows"]
    assert row["margin"] > benchmark.MARGIN * row["apart"]
    assert {benchmark.EAGER, benchmark.THEIRS} <= set(row["seconds"])
    assert all(len(seconds) == 2 for seconds in row["seconds"].values())
    assert f"{benchmark.EAGER} | " in text and "| aim |" not in text
    exact = [name for name in row["same"] if name not in benchmark.BITS]
    assert all(row["same"][name] == 1 for name in exact)


def test_models_are_the_same(tiny):
    with torch.no_grad():
        mine, theirs = tiny.ours(tiny.prompt), tiny.theirs(tiny.prompt).logits
    assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_compiled_contenders_write_the_same(tiny):
    at = tiny._replace(prompt=tiny.prompt[:1])
    runs = benchmark.contenders(at, benchmark.Case("tiny", 1, 1, True))
    runs = {n: runs[n] for n in (benchmark.COMPILED, benchmark.STATIC)}
    wanted = benchmark.run_ours(at.ours, at)
    assert benchmark.same_tokens(runs, wanted) == dict.fromkeys(runs, 1.0)


def test_contender_that_writes_something_else_is_refused(tiny):
    wanted = benchmark.run_ours(tiny.ours, tiny)
    wrong = wanted.clone()
    wrong[1, 3] += 1
    with pytest.raises(AssertionError, match="ours, eager computes something else"):
        benchmark.same_tokens({benchmark.EAGER: lambda: wrong}, wanted)
    shares = benchmark.same_tokens({benchmark.INT8: lambda: wrong}, wanted)
    assert shares == {benchmark.INT8: 0.75}  # 6 of 6, and 3 of 6 before it differs


def test_bytes_count_what_a_token_reads(tiny):
    full = benchmark.bytes_read(tiny.ours)
    layers = 2 * (12 * 32 * 32 + (3 + 1 + 4 + 1) * 32 + 4 * 32) + 2 * 32
    assert full == 4 * (layers + 300 * 32)


def test_aims_are_held_against_two_threads_and_one_text():
    def row(model, threads):
        seconds = {benchmark.THEIRS: [6.0], benchmark.CT2: [4.0]}
        seconds |= {benchmark.CT2_INT8: [2.0], benchmark.EAGER: [3.0]}
        seconds |= {benchmark.COMPILED: [1.5], benchmark.INT8: [1.0]}
        size = {"model": model, "threads": threads, "batch": 1}
        return size | {"seconds": seconds}

    found = benchmark.reached([row("12M", 2), row("12M", 1), row("tiny", 2)])
    assert [value for _, value, _ in found] == [4.0, 6.0, 2.0, 4.0 / 1.5, 2.0]
    assert [aim for *_, aim in found] == [3.5, 5.0, 1.9, 1.0, 1.0]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_stored_table_is_that_of_the_stored_results(path):
    found = json.loads(path.read_text(encoding="utf-8"))
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert benchmark.page(found, path.stem.split(".")[1]) == text
    cases = [benchmark.Case(*list(row.values())[:4]) for row in found["rows"]]
    assert cases == benchmark.CASES["full"]
