"""Reported faults of sampling and speculation, as cases.md restates them."""

import math

import pytest
import torch
from cache_oracle import C, decoder, prompts
from test_sampling import (
    Table,
    by_hand,
    every_text,
    filtered_by_hand,
    gen,
    small_vocabulary,
)
from torch.testing import assert_close

from transformer import sampling
from transformer.beams import beam_search
from transformer.sampling import (
    filter_logits,
    generate,
    residual,
    sample,
    speculate,
    stream,
    verify,
)


@pytest.mark.parametrize("n_beams", [1, 3, 64])
@pytest.mark.parametrize("eos", [None, 1])
def test_case_32_beams_take_their_cache_along(n_beams, eos):
    model, tokens = small_vocabulary(), torch.tensor([[1, 0, 3], [2, 2, 1]])
    how = {"eos": eos, "length_penalty": 0.7}
    found = beam_search(model, tokens, 4, n_beams, **how)
    if n_beams == 64:
        for b in range(2):
            ends = () if eos is None else (eos,)
            want = every_text(model, tokens[b].tolist(), 4, ends, 0.7)
            assert tuple(found.tokens[b, 0, 3:].tolist()) == want[0][0]
            assert abs(found.scores[b, 0].item() - want[0][1]) < 1e-5
    if n_beams == 1:
        best = by_hand(model, tokens, 4)
        for b, text in enumerate(best[:, 3:].tolist()):
            n = text.index(eos) + 1 if eos in text else 4
            assert found.tokens[b, 0, 3 : 3 + n].tolist() == text[:n]
    assert found.scores.diff().max() <= 0 if n_beams > 1 else True


def beams_by_hand(model, prompt, n_new, n_beams, eos, penalty, **context):
    """A search that reads every text anew: (tokens, score), the best first."""
    beams = [(0.0, [])]  # sums of log-probabilities, new tokens

    def score(beam):
        return beam[0] / max(len(beam[1]), 1) ** penalty

    for _ in range(n_new):
        longer = [beam for beam in beams if eos in beam[1]]
        for total, tail in [beam for beam in beams if eos not in beam[1]]:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tail]), **context)[0, -1]
            logp = logits.double().log_softmax(-1).tolist()
            longer += [(total + x, [*tail, i]) for i, x in enumerate(logp)]
        beams = sorted(longer, key=score, reverse=True)[:n_beams]
    return [(tail, score((total, tail))) for total, tail in beams]


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("eos", [None, 1])
@pytest.mark.parametrize("n_beams", [2, 3, 5])
def test_case_32_narrow_beams_choose_what_a_search_without_a_cache_chooses(
    n_beams, eos, cross
):
    model = decoder(cross=True) if cross else small_vocabulary()
    tokens = torch.tensor([[1, 0, 3], [2, 2, 1]])
    context = {"context": torch.randn(2, 7, C)} if cross else {}
    how = {"eos": eos, "length_penalty": 0.7, **context}
    found = beam_search(model, tokens, 6, n_beams, **how)
    for b, prompt in enumerate(tokens.tolist()):
        own = {name: x[[b]] for name, x in context.items()}
        want = beams_by_hand(model, prompt, 6, n_beams, eos, 0.7, **own)
        for row, got, (tail, right) in zip(
            found.tokens[b, :, 3:].tolist(), found.scores[b].tolist(), want, strict=True
        ):
            assert row[: len(tail)] == tail and not any(row[len(tail) :])
            assert abs(got - right) < 1e-5


def test_case_32_scores_are_those_of_whole_passes():
    model, tokens = decoder(cross=True), prompts(2, 3)
    context = torch.randn(2, 7, C)
    found = beam_search(model, tokens, 5, 3, context=context)
    for beam in range(3):
        text = found.tokens[:, beam]
        with torch.no_grad():
            logp = model(text, context=context).double().log_softmax(-1)[:, 2:-1]
        sums = logp.gather(-1, text[:, 3:, None]).sum((1, 2))
        assert_close(found.scores[:, beam], sums, rtol=0, atol=1e-5)


def chain_of(*after):
    """A stub that follows i by after[i]."""
    return Table(torch.eye(len(after))[list(after)] * 9)


def test_case_34_finished_rows_get_padding_and_the_loop_ends():
    model = chain_of(1, 6, 3, 4, 5, 6, 0, 0)  # 0 → 1 → eos; 2 → 3 → 4 → 5 → eos
    tokens, asked = torch.tensor([[0], [2]]), []
    model.head.register_forward_hook(lambda *_: asked.append(1))
    found = generate(model, tokens, 10, eos=6, pad=7)
    assert found.tolist() == [[0, 1, 6, 7, 7], [2, 3, 4, 5, 6]] and len(asked) == 4
    alone = generate(model, tokens[:1], 10, eos=6, pad=7)
    assert alone.tolist() == [[0, 1, 6]]
    several = generate(model, tokens, 10, eos=[6, 4], pad=7)
    assert several.tolist() == [[0, 1, 6], [2, 3, 4]]
    assert generate(model, tokens, 4, eos=6, pad=6)[0].tolist() == [0, 1, 6, 6, 6]


def test_case_34_an_end_in_the_prompt_and_nothing_to_write():
    model = chain_of(1, 2, 3, 6, 0, 0, 0)
    prompt = torch.tensor([[6, 0]])
    assert generate(model, prompt, 3, eos=6).tolist() == [[6, 0, 1, 2, 3]]
    assert generate(model, prompt, 0, eos=6).equal(prompt)
    assert list(stream(model, prompt, 0)) == []
    assert generate(model, prompt, 4, eos=6).tolist() == [[6, 0, 1, 2, 3, 6]]


def test_case_35_temperature_0():
    row = torch.tensor([[1.0, 2.0, 0.0]])
    for temperature in (0, 1e-8, 1e-3, 1e-45):
        for _ in range(5):
            assert sample(row, temperature).item() == 1
        assert filter_logits(row, temperature).softmax(-1).tolist() == [[0, 1, 0]]
    assert sample(torch.tensor([[2.0, 5.0, 5.0]]), 0).item() == 1
    for bad in (-0.1, math.inf, math.nan):
        with pytest.raises(ValueError, match="temperature must be a finite number"):
            sample(row, bad)
    half = torch.tensor([3e4, 2.9e4, -math.inf], dtype=torch.float16)
    found = filter_logits(half, 0.1)
    assert found.dtype == torch.float32 and found.softmax(-1).tolist() == [1, 0, 0]
    wide = torch.tensor([1.0, 0.5, -math.inf], dtype=torch.float16)
    want = (wide.double() / 0.7).softmax(-1)
    assert_close(filter_logits(wide, 0.7).softmax(-1).double(), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("shares", "p", "n"),
    [
        ([0.5, 0.41, 0.09], 0.9, 2),
        ([0.5, 0.35, 0.10, 0.05], 0.9, 3),
        ([0.4, 0.3, 0.2, 0.1], 0.8, 3),
        ([0.05, 0.5, 0.10, 0.35], 0.9, 3),
    ],
)
def test_case_36_the_token_that_crosses_the_line_stays(shares, p, n):
    logits = torch.tensor(shares).log()
    found = filter_logits(logits, top_p=p)
    assert (found > -math.inf).sum() == n
    want = torch.tensor(filtered_by_hand(logits.tolist(), 1.0, None, p))
    assert_close(found.softmax(-1), want)
    batch = torch.stack((logits, logits.flip(0)))
    both = filter_logits(batch, top_p=p)
    assert both[0].equal(found) and both[1].flip(0).equal(found)


def test_case_36_a_share_of_1_changes_nothing():
    logits = torch.randn(3, 1000) * 5
    assert filter_logits(logits, top_p=1.0).equal(filter_logits(logits))


def test_case_37_top_k_beyond_the_vocabulary_and_ties():
    row = torch.tensor([3.0, 2.0, 2.0, 1.0])
    kept = {k: (filter_logits(row, top_k=k) > -math.inf).tolist() for k in (1, 2, 4, 9)}
    assert kept[1] == [True, False, False, False]
    assert kept[2] == [True, True, False, False]
    assert all(kept[4]) and all(kept[9])
    assert filter_logits(row, top_k=None).equal(filter_logits(row, top_k=9))
    for bad in (0, -1, 2.0):
        with pytest.raises(ValueError, match="top_k must be a whole number from 1"):
            filter_logits(row, top_k=bad)


def one_hot(i):
    return torch.eye(3).double()[i]


@pytest.mark.parametrize(
    ("p", "q"),
    [
        (torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), None),
        (one_hot(1), one_hot(1)),
        (torch.tensor([1 - 1e-12, 1e-12, 0]).double(), one_hot(0)),
        (one_hot(2), one_hot(0)),
        (torch.tensor([0.5, 0.5, 0]).double(), torch.tensor([1, 0, 0]).double()),
    ],
)
def test_case_38_agreement_makes_no_nan(p, q):
    q = p if q is None else q
    kept = torch.minimum(p, q)
    rest = residual(p, q)
    assert rest.isfinite().all() and abs(rest.sum() - 1) < 1e-12
    assert_close(kept + (1 - kept.sum()) * rest, p, rtol=0, atol=1e-12)
    drafted = sampling.draw(q.expand(1000, 3), gen())[:, None]
    tokens, n = verify(p.expand(1000, 2, 3), q.expand(1000, 1, 3), drafted, gen(1))
    assert (tokens[:, 0] >= 0).all() and (p[tokens[:, 0]] > 0).all()
    if q.equal(p):
        assert (n == 1).all() and (tokens[:, 1] >= 0).all()  # and one more


def test_case_38_blocks_without_a_draft():
    p = torch.tensor([[[0.6, 0.3, 0.1]]]).double()
    none = torch.empty(1, 0, dtype=torch.int64)
    tokens, n = verify(p, torch.empty(1, 0, 3).double(), none, gen())
    assert tokens.shape == (1, 1) and n.item() == 0


def test_case_38_nearly_greedy_draws():
    model, draft = decoder(), decoder(seed=1)
    how = {"temperature": 0.01, "generator": gen()}
    found = speculate(model, prompts(1, 5), 20, draft, 4, **how)
    assert found.tokens.shape == (1, 25) and found.tokens.min() >= 0
