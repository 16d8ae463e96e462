"""Training: what a run of one process on a short text does not show."""

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from test_training import STREAM, tiny
from torch import nn
from torch.testing import assert_close

import transformer
from transformer import training
from transformer.data import batches
from transformer.training import Recipe, cross_entropy, evaluate, read_log, train

# --- one of several processes ------------------------------------------------------


@pytest.fixture
def second_of_two(monkeypatch):
    """Let this process take itself for the second of two; sums stay its own."""
    monkeypatch.setattr(training, "rank", lambda: 1)
    monkeypatch.setattr(training, "n_ranks", lambda: 2)
    monkeypatch.setattr(training, "total", lambda value: value)
    monkeypatch.setattr(training, "check_wrapped", lambda model: None)


def test_each_process_trains_on_its_part_and_the_first_writes(second_of_two, tmp_path):
    seen, model = [], tiny()
    model.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    rows = train(model, batches(STREAM, 16, 4), Recipe(2), folder=tmp_path / "a/b")
    reader = batches(STREAM, 16, 4, rank=1, world_size=2)
    assert all(x.equal(next(reader)[0]) for x in seen) and len(seen) == 2
    assert seen[0].shape == (2, 16)
    assert len(rows) == 2 and (tmp_path / "a/b").is_dir()
    assert not (tmp_path / "a/b/log.csv").exists()


def test_gradients_count_for_as_many_as_average_them(second_of_two):
    batch = next(batches(STREAM, 16, 4))
    model, alone = tiny(), tiny()
    training.add_gradients(model, *batch, Recipe(1))
    cross_entropy(alone(batch[0]), batch[1]).backward()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert_close(mine.grad, 2 * other.grad)


def test_process_without_a_row_makes_as_many_passes(second_of_two):
    passes, model = [], tiny()
    model.register_forward_hook(lambda m, args, out: passes.append(len(out)))
    tokens, labels = next(batches(STREAM, 16, 4))
    training.add_gradients(model, tokens[:1], labels[:1], Recipe(1, pieces=3))
    assert passes == [1, 0, 0]


def test_each_process_evaluates_its_part(second_of_two):
    seen, model = [], tiny()
    model.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    data = batches(STREAM, 16, 4, seed=None, epochs=1)
    found = evaluate(model, data)
    reader = list(batches(STREAM, 16, 4, seed=None, epochs=1, rank=1, world_size=2))
    assert [x.tolist() for x in seen] == [x.tolist() for x, _ in reader]
    tokens, labels = (torch.cat(x) for x in zip(*reader, strict=True))
    assert found == pytest.approx(cross_entropy(model(tokens), labels).item(), rel=1e-6)


class Shared(nn.Module):
    """A model that notes when gradients would be exchanged."""

    def __init__(self):
        super().__init__()
        self.said = []

    @contextmanager
    def no_sync(self):
        """As in DistributedDataParallel."""
        self.said.append("apart")
        yield
        self.said.append("together")


class Sharded(Shared):
    """One of `fully_shard`, which has no `no_sync`."""

    no_sync = property()

    def set_requires_gradient_sync(self, last):
        """As in fully_shard."""
        self.said.append(last)


def test_gradients_are_exchanged_with_the_last_piece_only():
    shared, sharded = Shared(), Sharded()
    for last in (False, True):
        for model in (shared, sharded):
            with training.between(model, last):
                model.said.append("pass")
    assert shared.said == ["apart", "pass", "together", "pass"]
    assert sharded.said == [False, "pass", True, "pass"]


def test_last_piece_is_the_last_of_those_that_have_rows():
    said, model = [], tiny()
    model.set_requires_gradient_sync = said.append
    tokens, labels = next(batches(STREAM, 16, 4))
    training.add_gradients(model, tokens, labels, Recipe(1, pieces=3))
    assert said == [False, False, True]


def test_wrapped_models_may_train_together(monkeypatch):
    monkeypatch.setattr(training, "n_ranks", lambda: 2)
    sharded = tiny()
    sharded[2].bias.full_tensor = None  # as parameters of fully_shard have it
    training.check_wrapped(sharded)
    wrapped = tiny()
    monkeypatch.setattr(training, "DistributedDataParallel", nn.Dropout)
    training.check_wrapped(wrapped)
    monkeypatch.setattr(training, "DistributedDataParallel", nn.GELU)
    with pytest.raises(ValueError, match=r"got Sequential in 2 processes$"):
        training.check_wrapped(wrapped)


@pytest.fixture
def alone_in_a_group(tmp_path):
    """A process group of one process, without a network."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_group_of_one_trains_as_none_does(alone_in_a_group, tmp_path):
    rows = train(tiny(), batches(STREAM, 16, 4), Recipe(2), folder=tmp_path / "run")
    assert len(rows) == 2 and len(read_log(tmp_path / "run/log.csv")) == 2
    assert training.n_ranks() == 1


def test_sum_over_processes_leaves_what_each_has(monkeypatch):
    monkeypatch.setattr(training, "n_ranks", lambda: 3)
    monkeypatch.setattr(training.distributed, "all_reduce", lambda x: x.mul_(3))
    mine = torch.tensor([1.0, 2.0])
    assert training.total(mine).tolist() == [3, 6] and mine.tolist() == [1, 2]


def test_number_of_processes_is_the_size_of_the_group(monkeypatch):
    for name, value in (("available", True), ("initialized", True)):
        monkeypatch.setattr(training.distributed, f"is_{name}", lambda v=value: v)
    monkeypatch.setattr(training.distributed, "get_world_size", lambda: 3)
    assert training.n_ranks() == 3
    for name in ("available", "initialized"):
        with monkeypatch.context() as without:
            without.setattr(training.distributed, f"is_{name}", lambda: False)
            assert training.n_ranks() == 1


# --- what is seen of a run ------------------------------------------------------------


class Bar:
    """A bar of progress that keeps what it is told."""

    def __init__(self, **how):
        self.how, self.said, self.n = how, [], 0
        Bar.last = self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.how["closed"] = True

    def set_postfix_str(self, text, refresh):
        """What stands behind the bar."""
        self.said.append((text, refresh))

    def update(self):
        """One step more."""
        self.n += 1


@pytest.mark.parametrize("rank, disable", [(0, None), (1, True)])
def test_bar_begins_where_the_run_does_and_tells_loss_and_speed(
    monkeypatch, rank, disable
):
    monkeypatch.setattr(training, "tqdm", Bar)
    monkeypatch.setattr(training, "rank", lambda: rank)
    rows, steps = [], []
    for step in training.shown(range(4, 7), rows):
        steps.append(step)
        rows.append({"tokens": 100, "seconds": 8, "loss": step / 4})
    assert steps == [4, 5, 6] and Bar.last.n == 3
    how = {"total": 6, "initial": 3, "disable": disable, "leave": False}
    assert Bar.last.how == how | {"closed": True}
    texts = [f"loss {x}, 12 tokens/s" for x in ("1.000", "1.250", "1.500")]
    assert Bar.last.said == [(text, False) for text in texts]


def test_log_is_written_as_the_run_goes(tmp_path):
    seen = []
    look = lambda row: seen.append(len(read_log(tmp_path / "log.csv")))  # noqa: E731
    train(tiny(), batches(STREAM, 16, 4), Recipe(3), folder=tmp_path, watch=look)
    assert seen == [1, 2, 3]


def test_line_of_the_log_has_the_time_of_the_step(monkeypatch):
    clock = iter([5.0, 7.5, 20.0, 21.0])
    monkeypatch.setattr(training.time, "perf_counter", partial(next, clock))
    rows = train(tiny(), batches(STREAM, 16, 4), Recipe(2))
    assert [row["seconds"] for row in rows] == [2.5, 1.0]


def test_log_that_is_none_is_refused_in_one_line_that_names_its_columns(tmp_path):
    path = tmp_path / "log.csv"
    columns = "step, tokens, loss, norm, rate, seconds"
    for text in ("a,b\n1,2\n\n", "step,tokens,loss,norm,rate,seconds\nx,1,1,1,1,1\n"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError) as caught:
            read_log(path)
        assert str(caught.value) == f"{path} must have numbers: {columns}"


# --- how things are computed ---------------------------------------------------------


def test_loss_on_a_cpu_takes_a_quarter_of_a_million_scores_at_a_time(monkeypatch):
    taken, plain = [], training.F.cross_entropy

    def look(x, y, **how):
        taken.append(len(x))
        return plain(x, y, **how)

    monkeypatch.setattr(training.F, "cross_entropy", look)
    cross_entropy(torch.zeros(7, 2**17), torch.zeros(7, dtype=torch.long))
    assert taken == [3, 3, 1]


def test_blocks_are_made_to_recompute_once():
    model = training.small_decoder(50, 1, 16, 2)
    training.recompute(model.blocks)
    forward = model.blocks[0].forward
    training.recompute(model.blocks)
    assert model.blocks[0].forward is forward


def test_small_decoder_is_llamas():
    model = training.small_decoder(50, 2, 24, 3)
    assert model.rope.d_rotary == 8
    assert {m.eps for m in model.modules() if isinstance(m, training.RMSNorm)} == {1e-6}
    shapes = {tuple(p.shape) for p in model.blocks[0].ffn.parameters()}
    assert shapes == {(64, 24), (24, 64)} and model.head is None


def test_optimizer_is_one_fused_adamw_as_the_recipe_says():
    recipe = Recipe(9, rate=0.5, betas=(0.5, 0.75), weight_decay=0.25)
    optimizer = training.optimizer_of(recipe, tiny())
    assert type(optimizer) is torch.optim.AdamW
    for group, decay in zip(optimizer.param_groups, (0.25, 0), strict=True):
        found = [group[name] for name in ("lr", "betas", "weight_decay", "fused")]
        assert found == [0.5, (0.5, 0.75), decay, True]


# --- numbers -----------------------------------------------------------------------


def test_evaluation_adds_in_float64():
    model, data = tiny().double(), batches(STREAM, 16, 4, seed=None, epochs=1)
    wanted = cross_entropy(model(STREAM[:-1]), STREAM[1:]).item()
    assert evaluate(model, data) == pytest.approx(wanted, rel=1e-13)


def test_rates_without_warmup_and_at_the_peak_are_exact():
    assert training.inverse_sqrt(1, 16, 0) == 1 / 4
    peak, floor = 0.9, 0.2
    assert floor + (peak - floor) != peak
    assert training.warmup_cosine(3, 9, 3, peak, floor) == peak


def test_recipe_that_is_another_is_refused_with_both_values(tmp_path):
    data, recipe = batches(STREAM, 16, 4), Recipe(4, rate=0.05)
    train(tiny(), data, recipe, folder=tmp_path, until=2)
    rule = r"the run so far, got rate=0\.5, saved with 0\.05$"
    with pytest.raises(ValueError, match=rule):
        train(tiny(), data, replace(recipe, rate=0.5), folder=tmp_path)


# --- the model that comes with the package -----------------------------------------


def test_trained_model_knows_the_tongue_and_draws_nothing():
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    model, tokenizer = training.trained_language_model()
    assert torch.rand(3).equal(wanted)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    ids = torch.tensor(tokenizer.encode("My lord, I know not what to say to him.\n"))
    loss = cross_entropy(model(ids[None, :-1])[0], ids[1:])
    assert loss < 3.5  # as likely as one of 1,024: 6.9


def test_trained_model_with_other_weights_is_refused(monkeypatch, tmp_path):
    results = Path(transformer.__file__).parent / "results"
    (tmp_path / "results").mkdir()
    for kind in ("json", "safetensors"):
        shutil.copy(results / f"language-model.{kind}", tmp_path / "results")
    record = tmp_path / "results/language-model.json"
    monkeypatch.setattr(training.resources, "files", {"transformer": tmp_path}.get)
    training.trained_language_model()
    stored = json.loads(record.read_text(encoding="utf-8"))
    stored["result"]["sha256"] = "0"
    record.write_text(json.dumps(stored), encoding="utf-8")
    rule = "^language-model.safetensors must be as recorded, got another digest$"
    with pytest.raises(ValueError, match=rule):
        training.trained_language_model()
