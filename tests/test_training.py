"""Training: rates, the loss, accumulation, resuming, logs, and every refusal."""

import math
import re
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from transformer import training
from transformer.data import IGNORED, batches
from transformer.training import (
    Recipe,
    cross_entropy,
    decay_groups,
    evaluate,
    inverse_sqrt,
    read_log,
    recompute,
    small_decoder,
    train,
    warmup_cosine,
)

STREAM = torch.arange(600) * 7 % 50


def tiny(dropout=0.0):
    """A model of tokens that sees one token only, drawn from seed 0."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 8), nn.Dropout(dropout), nn.Linear(8, 50))


def same(model, other):
    """Whether two models have the same weights, to the last bit."""
    mine, theirs = model.state_dict(), other.state_dict()
    return all(mine[name].equal(theirs[name]) for name in theirs)


# --- rates -----------------------------------------------------------------------


def test_inverse_root_at_values_worked_out_by_hand():
    assert inverse_sqrt(4000, 512, 4000) == pytest.approx(6.9877e-4, rel=1e-4)
    assert inverse_sqrt(1, 16, 4) == 1 / 4 * 1 / 8
    assert inverse_sqrt(4, 16, 4) == 1 / 4 * 1 / 2
    assert inverse_sqrt(16, 16, 4) == 1 / 4 * 1 / 4


@pytest.mark.parametrize("warmup", [1, 7, 100])
def test_inverse_root_is_that_of_transformers(warmup, conform):
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    make = transformers.get_inverse_sqrt_schedule
    theirs = make(optimizer, num_warmup_steps=warmup).lr_lambdas[0]
    steps = range(1, 300)
    mine = [inverse_sqrt(s, 64, warmup) for s in steps]
    wanted = [theirs(s) * (64 * warmup) ** -0.5 for s in steps]
    conform(
        "inverse_sqrt",
        "forward",
        torch.tensor(mine, dtype=torch.float64),
        torch.tensor(wanted, dtype=torch.float64),
        reference="transformers.get_inverse_sqrt_schedule",
        atol=1e-15,
    )


@pytest.mark.parametrize("warmup", [1, 10, 99])
def test_cosine_is_that_of_transformers(warmup, conform):
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    make = transformers.get_cosine_schedule_with_warmup
    theirs = make(optimizer, warmup, 100).lr_lambdas[0]
    mine = [warmup_cosine(s, 100, warmup, 0.5) for s in range(1, 101)]
    conform(
        "warmup_cosine",
        "forward",
        torch.tensor(mine, dtype=torch.float64),
        torch.tensor([theirs(s) / 2 for s in range(1, 101)], dtype=torch.float64),
        reference="transformers.get_cosine_schedule_with_warmup",
        atol=1e-15,
    )


def test_cosine_without_warmup_is_that_of_torch():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30, eta_min=0.5)
    for step in range(1, 32):
        mine = warmup_cosine(step, 31, 0, 2.0, 0.5)
        assert mine == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        theirs.step()


def test_peak_is_reached_exactly():  # 3.8… * 19 / 19 is more than 3.8…
    for peak in (3.8023270340437403, 0.1, 1e-3):
        rates = [warmup_cosine(n, n, n, peak) for n in range(1, 200)]
        assert {*rates} == {peak}


@pytest.mark.parametrize(
    "call, error",
    [
        (
            lambda: inverse_sqrt(0, 8, 4),
            "step must be a whole number from 1, got step=0",
        ),
        (
            lambda: inverse_sqrt(1.0, 8, 4),
            "step must be a whole number from 1, got step=1.0",
        ),
        (
            lambda: inverse_sqrt(1, 8, -1),
            "warmup must be a whole number from 0, got warmup=-1",
        ),
        (
            lambda: warmup_cosine(0, 9, 4, 1),
            "step must be a whole number from 1, got step=0",
        ),
        (
            lambda: warmup_cosine(1, 9, 10, 1.0),
            "warmup must be a finite number in 0 … 9, got warmup=10",
        ),
    ],
)
def test_schedules_refuse(call, error):
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        call()


# --- the loss --------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n_ignored", [0, 3, 11])
def test_loss_is_that_of_torch(smoothing, dtype, n_ignored, conform):
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 9).to(dtype).requires_grad_()
    labels = torch.randint(9, (3, 4))
    labels.view(-1)[:n_ignored] = IGNORED
    mine = cross_entropy(logits, labels, smoothing=smoothing)
    (mine_grad,) = torch.autograd.grad(mine, logits)
    exact = logits.detach().double().requires_grad_()
    flat = exact.flatten(0, 1), labels.flatten()
    wanted = F.cross_entropy(*flat, ignore_index=IGNORED, label_smoothing=smoothing)
    (wanted_grad,) = torch.autograd.grad(wanted, exact)
    how = {"reference": "torch.nn.functional.cross_entropy in float64"}
    column = "dtype" if dtype == torch.bfloat16 else "forward"
    conform("cross_entropy", column, mine, wanted, atol=1e-6, **how)
    column = "dtype" if dtype == torch.bfloat16 else "gradient"
    atol = 2e-3 if dtype == torch.bfloat16 else 1e-6
    conform("cross_entropy", column, mine_grad, wanted_grad, atol=atol, **how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_taken_a_few_at_a_time_and_only_the_scores_are_kept(dtype):
    torch.manual_seed(0)
    logits = torch.randn(7, 2**17).to(dtype).requires_grad_()  # three rows, three, one
    labels = torch.tensor([0, 5, IGNORED, 2**17 - 1, 3, IGNORED, 9])
    kept = []
    keep = lambda x: kept.append(x.numel()) or x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        mine = cross_entropy(logits, labels, smoothing=0.1)
    assert sum(kept) < logits.numel() + 20
    (mine_grad,) = torch.autograd.grad(3 * mine, logits)
    exact = logits.detach().double().requires_grad_()
    wanted = F.cross_entropy(exact, labels, label_smoothing=0.1)
    (wanted_grad,) = torch.autograd.grad(3 * wanted, exact)
    assert_close(mine.double(), wanted, rtol=1e-6, atol=0)
    rtol = 1e-4 if dtype == torch.float32 else 1e-2
    assert_close(mine_grad.double(), wanted_grad, rtol=rtol, atol=1e-9)
    assert mine_grad.dtype == dtype and (mine_grad[2] == 0).all()


def test_smoothing_by_the_formula():
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 7, dtype=torch.float64), torch.arange(5)
    target = torch.full((5, 7), 0.2 / 7, dtype=torch.float64)
    target[torch.arange(5), labels] += 0.8
    by_hand = -(target * logits.log_softmax(-1)).sum(-1).mean()
    assert_close(cross_entropy(logits, labels, smoothing=0.2), by_hand)


@pytest.mark.parametrize(
    "logits, labels, how, error",
    [
        (
            torch.zeros(2, 3, 5),
            torch.zeros(3, 2, dtype=torch.long),
            {},
            "logits must be labels' shape and V, got logits (2, 3, 5) of torch.float32"
            " on cpu, labels (3, 2) of torch.int64 on cpu",
        ),
        (
            torch.zeros(2, 5),
            torch.zeros(2, dtype=torch.long),
            {"smoothing": 1.5},
            "smoothing must be a finite number in 0 … 1, got smoothing=1.5",
        ),
    ],
)
def test_loss_refuses(logits, labels, how, error):
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        cross_entropy(logits, labels, **how)


# --- gradients of a step -----------------------------------------------------------


@pytest.mark.parametrize("pieces", [2, 3, 7, 20])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_pieces_change_nothing_where_labels_are_ragged(pieces, smoothing):
    torch.manual_seed(1)
    tokens, labels = torch.randint(50, (2, 7, 12))
    for row, n in zip(labels, (12, 0, 5, 1, 9, 0, 3), strict=True):
        row[n:] = IGNORED
    whole, cut = tiny().double(), tiny().double()
    recipe = Recipe(1, smoothing=smoothing)
    loss, count = training.add_gradients(whole, tokens, labels, recipe)
    how = replace(recipe, pieces=pieces)
    assert_close(training.add_gradients(cut, tokens, labels, how)[0], loss)
    assert count == 30
    for a, b in zip(cut.parameters(), whole.parameters(), strict=True):
        assert_close(a.grad, b.grad, rtol=0, atol=1e-6)


def test_clipping_acts_on_the_whole_gradient():
    models = [tiny().double() for _ in "12"]
    batch = torch.randint(50, (2, 6, 12)).unbind()
    rows = []
    for model, pieces in zip(models, (1, 4), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        recipe = Recipe(1, clip=1e-3, pieces=pieces)
        rows.append(training.make_step(model, optimizer, 1.0, batch, recipe))
    moved = [nn.utils.parameters_to_vector(m.parameters()) for m in models]
    moved = [x - nn.utils.parameters_to_vector(tiny().parameters()) for x in moved]
    assert moved[0].norm().item() == pytest.approx(1e-3, rel=1e-3)
    assert_close(*moved, rtol=0, atol=1e-10)
    assert rows[0]["norm"] == pytest.approx(rows[1]["norm"])
    assert rows[0]["norm"] > 1e-2  # what is logged is the length before


def test_no_clipping_where_none_is_asked_for():
    model, start = tiny(), tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batch = torch.randint(50, (2, 6, 12)).unbind()
    row = training.make_step(model, optimizer, 1.0, batch, Recipe(1, clip=None))
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    moved = torch.cat([(p - q).flatten() for p, q in pairs])
    assert moved.norm().item() == pytest.approx(row["norm"], rel=1e-4)


def test_recomputed_blocks_give_the_same_gradients():
    tokens, found = torch.randint(50, (2, 9)), []
    for again in (False, True):
        torch.manual_seed(0)
        model = small_decoder(50, 3, 16, 2)
        for block in model.blocks:
            block.dropout.p = 0.3
        names = list(model.state_dict())
        if again:
            recompute(model.blocks)
            recompute(model.blocks)  # a second time changes nothing
            assert list(model.state_dict()) == names
        torch.manual_seed(1)
        model.train()(tokens).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_recomputing_keeps_fewer_tensors():
    def kept(model):
        sizes = []
        note = lambda x: sizes.append(x.numel()) or x  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            model(torch.randint(50, (2, 32)))
        return sum(sizes)

    model = small_decoder(50, 3, 16, 2)
    before = kept(model)
    recompute(model.blocks)
    assert kept(model) < before / 2


def test_autocast_computes_products_in_bfloat16_and_the_loss_in_float32():
    seen = []
    model = tiny()
    model[2].register_forward_hook(lambda m, i, out: seen.append(out.dtype))
    rows = train(model, batches(STREAM, 16, 4), Recipe(2, bfloat16=True))
    assert seen == [torch.bfloat16] * 2
    plain = train(tiny(), batches(STREAM, 16, 4), Recipe(2))
    assert rows[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-2)
    assert all(p.dtype == torch.float32 for p in model.parameters())


# --- groups ----------------------------------------------------------------------


def test_norms_and_offsets_do_not_decay():
    model = small_decoder(50, 2, 16, 2)
    decayed, others = decay_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0
    assert all(p.dim() > 1 for p in decayed["params"])
    assert len(others["params"]) == 5  # two norms a block, and the last one


def test_groups_refuse():
    frozen = tiny().requires_grad_(False)
    with pytest.raises(
        ValueError, match="model must have parameters to train, got none"
    ):
        decay_groups(frozen, 0.1)
    error = "^weight_decay must be a finite number from 0, got weight_decay=-1$"
    with pytest.raises(ValueError, match=error):
        decay_groups(tiny(), -1)


# --- the recipe --------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, error",
    [
        ({"steps": 0}, "steps must be a whole number from 1, got steps=0"),
        ({"steps": 2.0}, "steps must be a whole number from 1, got steps=2.0"),
        ({"warmup": -1}, "warmup must be a whole number from 0, got warmup=-1"),
        ({"warmup": 11}, "warmup must be a finite number in 0 … 10, got warmup=11"),
        ({"pieces": 0}, "pieces must be a whole number from 1, got pieces=0"),
        ({"save_every": -1}, "save_every must be a whole number from 0, got"),
        ({"rate": 0}, "rate must be a positive finite number, got rate=0"),
        ({"rate": math.nan}, "rate must be a positive finite number, got rate=nan"),
        ({"floor": 1.0}, "floor must be a finite number in 0 … 0.001, got floor=1.0"),
        ({"weight_decay": -0.1}, "weight_decay must be a finite number from 0, got"),
        ({"clip": 0}, "clip must be a positive finite number, got clip=0"),
        (
            {"smoothing": 1.1},
            "smoothing must be a finite number in 0 … 1, got smoothing=1.1",
        ),
    ],
)
def test_recipe_refuses(settings, error):
    with pytest.raises(ValueError, match=f"^{re.escape(error)}"):
        Recipe(**{"steps": 10} | settings)


# --- whole runs ----------------------------------------------------------------------


def test_training_learns_what_can_be_learned():
    torch.manual_seed(0)
    model, data = small_decoder(50, 1, 16, 2), batches(STREAM, 16, 8)
    rows = train(model, data, Recipe(150, rate=1e-2, warmup=5))
    assert rows[0]["loss"] == pytest.approx(math.log(50), abs=0.3)
    assert rows[-1]["loss"] < 0.5
    assert [row["step"] for row in rows] == list(range(1, 151))
    assert rows[0]["tokens"] == 128 and data.n_read == 0


def test_rates_are_those_of_the_schedule():
    recipe = Recipe(6, rate=0.5, warmup=2, floor=0.1)
    rows = train(tiny(), batches(STREAM, 16, 4), recipe)
    wanted = [warmup_cosine(s, 6, 2, 0.5, 0.1) for s in range(1, 7)]
    assert [row["rate"] for row in rows] == wanted
    schedule = partial(inverse_sqrt, d_model=8, warmup=3)
    rows = train(tiny(), batches(STREAM, 16, 4), recipe, schedule=schedule)
    assert [row["rate"] for row in rows] == [inverse_sqrt(s, 8, 3) for s in range(1, 7)]


@pytest.mark.parametrize("stop", [1, 4, 5])
def test_resumed_run_ends_with_the_same_bits(tmp_path, stop):
    recipe = Recipe(9, rate=0.05, warmup=2, pieces=2, save_every=2)
    whole, data = tiny(dropout=0.2), batches(STREAM, 16, 4)
    rows = train(whole, data, recipe, folder=tmp_path / "whole")
    train(tiny(dropout=0.2), data, recipe, folder=tmp_path / "cut", until=stop)
    resumed = tiny(dropout=0.2)
    torch.manual_seed(99)
    more = train(resumed, data, recipe, folder=tmp_path / "cut")
    assert same(resumed, whole)
    assert [row["loss"] for row in more] == [row["loss"] for row in rows]
    assert [row["step"] for row in read_log(tmp_path / "cut/log.csv")] == [
        *range(1, 10)
    ]
    assert train(tiny(), data, recipe, folder=tmp_path / "cut") == more  # all is done


def test_other_ways_to_compute_may_resume(tmp_path):
    data, recipe = batches(STREAM, 16, 4), Recipe(4, rate=0.05)
    train(tiny(), data, recipe, folder=tmp_path, until=2)
    other = replace(recipe, pieces=4, save_every=1, bfloat16=False)
    assert len(train(tiny(), data, other, folder=tmp_path)) == 4


@pytest.mark.parametrize("change", [{"rate": 0.1}, {"steps": 5}, {"betas": (0.8, 0.9)}])
def test_another_recipe_is_refused_before_anything_changes(tmp_path, change):
    data, recipe = batches(STREAM, 16, 4), Recipe(4, rate=0.05)
    train(tiny(), data, recipe, folder=tmp_path, until=2)
    model, name = tiny(), next(iter(change))
    with pytest.raises(ValueError, match=f"the run so far, got {name}=.*saved with"):
        train(model, data, replace(recipe, **change), folder=tmp_path)
    assert same(model, tiny())


def test_another_text_is_refused(tmp_path):
    recipe = Recipe(4)
    train(tiny(), batches(STREAM, 16, 4), recipe, folder=tmp_path, until=2)
    with pytest.raises(ValueError, match="resume must be of the same reading"):
        train(tiny(), batches(STREAM.flip(0), 16, 4), recipe, folder=tmp_path)


def test_a_reader_that_has_begun_goes_on_where_it_stands():
    ahead = batches(STREAM, 16, 4)
    next(ahead)
    first = next(batches(STREAM, 16, 4, resume=ahead.state()))[0]
    seen = []
    model = tiny()
    model.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    train(model, ahead, Recipe(1))
    assert seen[0].equal(first)


def test_log_of_a_run_that_writes_is_read_up_to_its_last_whole_line(tmp_path):
    train(tiny(), batches(STREAM, 16, 4), Recipe(3), folder=tmp_path)
    log = tmp_path / "log.csv"
    rows = read_log(log)
    assert list(rows[0]) == ["step", "tokens", "loss", "norm", "rate", "seconds"]
    with open(log, "a", encoding="utf-8") as file:
        file.write("4,64,3.1")
    assert read_log(log) == rows
    log.write_text("step,tokens,lo", encoding="utf-8")
    assert read_log(log) == []


def test_watch_sees_each_row():
    seen = []
    rows = train(tiny(), batches(STREAM, 16, 4), Recipe(3), watch=seen.append)
    assert seen == rows and len(rows) == 3


def test_weights_stay_where_the_loss_is_not_finite():
    model = tiny()
    with torch.no_grad():
        model[2].bias[0] = math.inf
    before = {name: x.clone() for name, x in model.state_dict().items()}
    error = r"^loss and gradient must be finite, got loss=nan, norm=nan$"
    with pytest.raises(FloatingPointError, match=error):
        train(model, batches(STREAM, 16, 4), Recipe(3))
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])


def test_train_refuses_what_is_no_reader():
    with pytest.raises(TypeError, match=r"^data must be batches, got data=\["):
        train(tiny(), [], Recipe(1))


def test_train_refuses_data_that_ends_too_early():
    data = batches(STREAM, 16, 4, epochs=1)
    rows = train(tiny(), data, Recipe(10))
    assert len(rows) == 10 and sum(row["tokens"] for row in rows) == 599
    error = "^data must have a batch for each step, got 10 batches, steps=11$"
    with pytest.raises(ValueError, match=error):
        train(tiny(), data, Recipe(11))


def test_several_processes_need_a_wrapped_model(monkeypatch):
    monkeypatch.setattr(training, "n_ranks", lambda: 2)
    rule = (
        "^model must be in DistributedDataParallel or fully_shard, got Sequential in 2"
    )
    with pytest.raises(ValueError, match=rule):
        train(tiny(), batches(STREAM, 16, 4), Recipe(1))


def test_optimizer_of_the_caller_is_used():
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0)
    train(model, batches(STREAM, 16, 4), Recipe(1, rate=0.5), optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not same(model, tiny())


def test_progress_is_shown_where_someone_looks(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    always = partial(training.tqdm, mininterval=0)
    monkeypatch.setattr(training, "tqdm", always)
    train(tiny(), batches(STREAM, 16, 4), Recipe(2))
    assert "tokens/s" in capsys.readouterr().err


# --- evaluation --------------------------------------------------------------------


def test_evaluation_counts_each_label_once():
    model = tiny(dropout=0.5)
    data = batches(STREAM, 16, 5, seed=None, epochs=1)
    model.eval()
    with torch.no_grad():
        wanted = F.cross_entropy(model(STREAM[:-1]), STREAM[1:]).item()
    model.train()
    assert evaluate(model, data) == pytest.approx(wanted, rel=1e-5)
    assert model.training and data.n_read == 0


def test_evaluation_refuses_a_reader_without_end():
    error = r"^data must end, with epochs=1, got data.epochs=None$"
    with pytest.raises(ValueError, match=error):
        evaluate(tiny(), batches(STREAM, 16, 4))
