"""Faults that people met when they trained: cases 40 to 45."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.testing import assert_close

from transformer import training
from transformer.attention import MultiHeadAttention
from transformer.blocks import PostNormBlock, PreNormBlock
from transformer.checkpoint import load_checkpoint, save_checkpoint
from transformer.data import IGNORED, batches
from transformer.feedforward import FeedForward
from transformer.model import Encoder, EncoderDecoder, LanguageModel, count_parameters
from transformer.norms import LayerNorm, RMSNorm
from transformer.positions import LearnedPositions, RoPE, SinusoidalPositions
from transformer.training import (
    Recipe,
    cross_entropy,
    decay_groups,
    evaluate,
    inverse_sqrt,
    small_decoder,
    train,
    warmup_cosine,
)


def logits_with_loss(nats: float) -> list[float]:
    """Two logits, the first of which has this cross-entropy."""
    p = math.exp(-nats)
    return [math.log(p), math.log(1 - p)]


def decoder():
    """A tied decoder, drawn from seed 0, in float64."""
    torch.manual_seed(0)
    return small_decoder(20, 2, 8, 2).double()


def test_case_40_loss_of_a_step_is_a_mean_over_its_labels():
    logits = torch.tensor([logits_with_loss(1)] * 2 + [logits_with_loss(3)] * 10)
    labels = torch.zeros(12, dtype=torch.long)
    parts = [(logits[:2], labels[:2]), (logits[2:], labels[2:])]
    total = sum(cross_entropy(*part, count=12) for part in parts)
    assert total.item() == pytest.approx(32 / 12, rel=1e-6)
    means = sum(cross_entropy(*part) for part in parts) / 2
    assert means.item() == pytest.approx(2.0, rel=1e-6)  # what the fault gives


@pytest.mark.parametrize("pieces", [2, 3, 4])
def test_case_40_any_cut_gives_the_step_of_one_batch(pieces):
    torch.manual_seed(1)
    tokens, labels = torch.randint(20, (2, 4, 10))
    for row, n in zip(labels, (2, 10, 5, 0), strict=True):  # the last has no label
        row[n:] = IGNORED
    models = decoder(), decoder()
    for model, n in zip(models, (1, pieces), strict=True):
        optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=0.01)
        recipe = Recipe(1, pieces=n, clip=0.1)
        row = training.make_step(model, optimizer, 0.01, (tokens, labels), recipe)
        flat = decoder()(tokens).flatten(0, 1), labels.flatten()
        wanted = F.cross_entropy(*flat, ignore_index=IGNORED).item()
        assert row["loss"] == pytest.approx(wanted, rel=1e-6) and row["tokens"] == 17
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        assert_close(a.grad, b.grad, rtol=0, atol=1e-10)
        assert_close(a, b, rtol=0, atol=1e-10)


def test_case_40_the_last_partial_batch_counts():
    stream = torch.randint(20, (100,))
    rows = train(decoder(), batches(stream, 10, 4, epochs=1), Recipe(3, pieces=2))
    assert [row["tokens"] for row in rows] in ([40, 40, 19], [40, 39, 20], [39, 40, 20])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_case_41_batch_without_labels_gives_zero_and_zero_gradients(smoothing):
    logits = torch.randn(3, 4, 5, requires_grad=True)
    labels = torch.full((3, 4), IGNORED)
    loss = cross_entropy(logits, labels, smoothing=smoothing)
    loss.backward()
    assert loss.item() == 0 and logits.grad.count_nonzero() == 0
    assert F.cross_entropy(logits.flatten(0, 1), labels.flatten()).isnan()
    empty = cross_entropy(torch.zeros(2, 0, 5), torch.zeros(2, 0, dtype=torch.long))
    assert empty.item() == 0


def test_case_41_weights_stay_but_for_decay():
    model, start = decoder(), decoder()
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=0.1)
    batch = torch.zeros(2, 3, dtype=torch.long), torch.full((2, 3), IGNORED)
    row = training.make_step(model, optimizer, 0.1, batch, Recipe(1))
    assert row["loss"] == 0 and row["tokens"] == 0 and row["norm"] == 0
    for p, q in zip(model.parameters(), start.parameters(), strict=True):
        assert_close(p, q * (0.99 if q.dim() > 1 else 1))


@dataclass(eq=False)
class Prompts(batches):
    """A reader in which no one is asked to predict."""

    def __next__(self):
        tokens, labels = super().__next__()
        return tokens, labels.fill_(IGNORED)


def test_case_41_loss_over_no_labels_is_undefined():
    reader = Prompts(torch.zeros(50, dtype=torch.long), 4, 2, epochs=1)
    assert math.isnan(evaluate(decoder(), reader))


def test_case_42_edges_of_schedules():
    rise = [warmup_cosine(s, 12, 4, 1.0) for s in range(1, 6)]
    assert rise[:4] == [0.25, 0.5, 0.75, 1.0] and rise[4] < 1  # no idle first step
    for warmup, steps in itertools.product((0, 1, 4, 12), (12,)):
        rates = [warmup_cosine(s, steps, warmup, 1.0, 0.1) for s in range(1, 18)]
        assert rates.count(1.0) == 1 and max(rates) == 1.0
        assert min(rates[warmup:]) == 0.1 and rates[-5:] == [0.1] * 5
    assert warmup_cosine(1, 1, 1, 1.0) == warmup_cosine(1, 1, 0, 1.0) == 1.0
    joint = [warmup_cosine(s, 10_000, 5000, 1.0) for s in (4999, 5000, 5001)]
    assert max(joint) - min(joint) < 1e-3


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_case_42_inverse_root_at_its_first_call(warmup):
    first = inverse_sqrt(1, 16, warmup)
    assert first == 0.25 * min(1, max(warmup, 1) ** -1.5)
    rates = [inverse_sqrt(s, 16, warmup) for s in range(1, 50)]
    assert max(rates) == rates[max(warmup, 1) - 1] and rates.count(max(rates)) == 1


def test_case_43_matrices_decay_and_gains_do_not():
    model, start = decoder(), decoder()
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, q in zip(model.parameters(), start.parameters(), strict=True):
        assert torch.equal(p, q * (1 - 0.1 * 0.1) if q.dim() > 1 else q)


def test_case_43_each_trainable_parameter_is_in_one_group():
    model = decoder()
    frozen = model.blocks[0].ffn.up.weight.requires_grad_(False)
    held = [p for group in decay_groups(model, 0.1) for p in group["params"]]
    assert len({*map(id, held)}) == len(held)  # the tied matrix stands once
    assert all(p is not frozen for p in held)
    assert sum(p.numel() for p in held) == count_parameters(model) - frozen.numel()
    assert any(p is model.embedding.weight for p in decay_groups(model, 1)[0]["params"])


class Wrapper(nn.Module):
    """What DDP does to names."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, tokens):
        return self.module(tokens)


def compiled_blocks(model):
    """A model whose blocks are compiled one by one."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block)
    return model


WRAPS = {
    "compile": torch.compile,
    "wrapper": Wrapper,
    "compile(wrapper)": lambda model: torch.compile(Wrapper(model)),
    "wrapper(compile)": lambda model: Wrapper(torch.compile(model)),
    "blocks": compiled_blocks,
    "plain": lambda model: model,
}


@pytest.mark.parametrize("loaded", ["plain", "compile"])
@pytest.mark.parametrize("saved", WRAPS)
def test_case_44_prefixes_do_not_matter(tmp_path, saved, loaded):
    model = decoder()
    tokens = torch.randint(20, (1, 5))
    wanted = model(tokens)
    save_checkpoint(tmp_path, WRAPS[saved](model), step=0)
    torch.manual_seed(5)
    other = small_decoder(20, 2, 8, 2).double()
    load_checkpoint(tmp_path, WRAPS[loaded](other))
    assert torch.equal(other(tokens), wanted)


def test_case_44_a_child_called_module_keeps_its_name(tmp_path):
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    save_checkpoint(tmp_path, Wrapper(model), step=0)
    found = nn.ModuleDict({"module": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    load_checkpoint(tmp_path, found)
    assert torch.equal(found["module"].weight, model["module"].weight)


def test_case_44_a_load_that_matches_nothing_is_refused(tmp_path):
    save_checkpoint(tmp_path, decoder(), step=0)
    with pytest.raises(ValueError, match="the checkpoint must be of the model here"):
        load_checkpoint(tmp_path, nn.Linear(2, 2))


POSITIONS = {
    "none": lambda: {},
    "learned": lambda: {"positions": LearnedPositions(6, 8)},
    "sinusoids": lambda: {"positions": SinusoidalPositions(8)},
    "rope": lambda: {"rope": RoPE(4)},
}


def blocks(block, norm, cross=False):
    """Two blocks of any kind."""
    for _ in "12":
        other = MultiHeadAttention(8, 2) if cross else None
        parts = MultiHeadAttention(8, 2), FeedForward(8)
        yield block(8, *parts, cross=other, norm=norm)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("block", [PreNormBlock, PostNormBlock])
@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("kind", ["tied", "untied", "encoder", "both"])
def test_case_45_every_parameter_gets_a_gradient(positions, block, norm, kind):
    last = norm if block is PreNormBlock else None
    where, tokens = POSITIONS[positions](), torch.randint(9, (2, 6))
    how = {"norm": last, **where}
    if kind in ("encoder", "both"):
        how.pop("rope", None)
        model = Encoder(9, 8, blocks(block, norm), **how)
    if kind != "encoder":
        inner = blocks(block, norm, cross=kind == "both")
        writer = LanguageModel(
            9, 8, inner, norm=last, tie=kind != "untied", **POSITIONS[positions]()
        )
        model = EncoderDecoder(model, writer) if kind == "both" else writer
    out = model(tokens, tokens) if kind == "both" else model(tokens)
    out.square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_case_45_ddp_makes_three_steps_without_looking_for_unused_parameters():
    store = distributed.HashStore()
    distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        model = nn.parallel.DistributedDataParallel(decoder())
        rows = train(model, batches(torch.randint(20, (100,)), 5, 4), Recipe(3))
        assert len(rows) == 3
        bad = nn.parallel.DistributedDataParallel(Unused())
        with pytest.raises(RuntimeError, match="not used in producing loss"):
            train(bad, batches(torch.randint(20, (100,)), 5, 4), Recipe(3))
    finally:
        distributed.destroy_process_group()


class Unused(nn.Module):
    """A model with a matrix that is made and skipped."""

    def __init__(self):
        super().__init__()
        self.table, self.pooler = nn.Embedding(20, 20), nn.Linear(20, 20)

    def forward(self, tokens):
        return self.table(tokens)
