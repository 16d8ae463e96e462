"""The benchmark of a step of training measures what it says."""

import pytest
import side_by_side
import torch
import training as benchmark
from torch.testing import assert_close

TINY = benchmark.SHAPES["tiny"]


def test_run_writes_results_and_their_table(tiny_run):
    found, text = tiny_run
    rows = [(row["name"], row["dtype"]) for row in found["rows"]]
    names = [*benchmark.MAKE, benchmark.PRODUCT]
    assert sorted(rows) == sorted((n, d) for n in names for d in benchmark.DTYPES)
    assert all(len(row["seconds"]) == 1 for row in found["rows"])
    assert set(found["apart"]) == set(benchmark.DTYPES)
    for what, ratio, aim in benchmark.speeds(found):
        assert f"| {what} | {aim} | {ratio} |" in text


def test_all_decoders_have_the_same_weights_and_give_the_same_logits():
    tokens = torch.randint(TINY.v, (TINY.b, TINY.t))
    models = benchmark.make_models(TINY, "cpu")
    counts = {sum(p.numel() for p in m.parameters()) for m in models.values()}
    assert len(models) == 4 and len(counts) == 1
    expected = models[benchmark.OURS](tokens)
    for model in models.values():
        assert_close(model(tokens), expected, rtol=0, atol=1e-5)


def test_losses_are_the_same_before_a_step_and_after_it():
    runs = benchmark.contenders(TINY, "cpu")
    apart = benchmark.check_losses(runs)
    assert all(apart[d] <= benchmark.TOLERANCE[d] for d in benchmark.DTYPES)
    first, second = (runs[benchmark.OURS, "float32"]()[0] for _ in range(2))
    assert second < first  # it learns


@pytest.mark.parametrize("wrong", ["weights", "slope"])
def test_contender_that_computes_something_else_is_refused(wrong, monkeypatch):
    class Other(benchmark.Nano):
        def forward(self, tokens):
            logits = super().forward(tokens)
            # The same numbers with another gradient differ after a step only.
            return logits * 1.01 if wrong == "weights" else logits.detach() + logits * 0

    monkeypatch.setitem(benchmark.MAKE, benchmark.NANO, Other)
    monkeypatch.setattr(side_by_side, "interleave", None)  # nothing is timed
    found = r"nanoGPT's style computes something else \(tensor {}\)"
    with pytest.raises(AssertionError, match=found.format(int(wrong == "slope"))):
        benchmark.measure_all("cpu", 1, "tiny")


def test_products_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    shape = TINY._replace(t=1)  # one token sees all there is: nothing is left out
    model = benchmark.Nano(shape)
    tokens = torch.zeros(shape.b, 1, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    scores = 4 * shape.c * shape.b * shape.n_layers  # and weights times values
    # Torch does not count what attention's kernel for the CPU does.
    assert counter.get_total_flops() + 3 * scores == benchmark.products(shape)


def made_up(**seconds: float) -> dict:
    """Results in which bfloat16 takes half the time, and a product a tenth."""
    rows = []
    for dtype, share in (("float32", 1.0), ("bfloat16", 0.5)):
        for name, value in seconds.items():
            rows.append({"name": name, "dtype": dtype, "seconds": [share * value] * 3})
    return {"rows": rows, "shape": benchmark.SHAPES["full"]}


def test_speeds_are_against_the_fastest_peer_and_our_float32():
    times = {"ours": 2.0, benchmark.NANO: 2.5, "GPT-2": 3.0, "torch.nn": 4.0}
    found = made_up(**times)
    lines = benchmark.speeds(found)
    assert [ratio[0] for _, ratio, _ in lines] == [1.25, 1.25, 2.0]
    assert [aim for *_, aim in lines] == [1.0, 1.2, 1.9]
    assert "against nanoGPT's style" in lines[0][0]


def test_share_of_the_peak_compares_with_products_alone():
    shape = benchmark.SHAPES["full"]
    whole = benchmark.products(shape) / (2 * shape.edge**3)  # squares that it equals
    found = made_up(**{"ours": 2 * whole, benchmark.PRODUCT: 1.0})
    assert benchmark.share(found, "ours", "float32") == pytest.approx(0.5)
    assert 150e9 < benchmark.products(shape) < 170e9
