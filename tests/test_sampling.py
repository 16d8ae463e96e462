"""What sampling, generation, beam search and speculation promise."""

import itertools
import math

import pytest
import torch
from cache_oracle import SCHEMES, C, V, decoder, padded, prompts
from torch import nn
from torch.testing import assert_close

from transformer import sampling
from transformer.attention import padding_mask
from transformer.beams import beam_search
from transformer.cache import KVCache, RollingCache, StaticCache
from transformer.model import LanguageModel
from transformer.sampling import (
    draw,
    filter_logits,
    generate,
    prompt_lookup,
    residual,
    sample,
    speculate,
    stream,
    verify,
)

each_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


class Passing(nn.Module):
    """A block that changes nothing and tells the cache of its tokens."""

    def forward(self, x, *, prepare=None, mask=None, **how):
        """x, as it came."""
        if prepare is not None:
            prepare(*[x[:, None]] * 3, mask)
        return x


class Table(LanguageModel):
    """A stub whose logits depend on the last token only."""

    def __init__(self, rows):
        rows = torch.as_tensor(rows).float()
        super().__init__(rows.size(-1), len(rows), [Passing()], tie=False)
        self.embedding.weight.data = torch.eye(len(rows))
        self.head.weight.data = rows.T.contiguous()
        self.eval()


def chances(model, prompt, n):
    """The probability of every continuation of n tokens, one full pass for each."""
    found = {}
    for tail in itertools.product(range(model.embedding.num_embeddings), repeat=n):
        text = torch.tensor([[*prompt, *tail]])
        logp = model(text).double().log_softmax(-1)[0, len(prompt) - 1 : -1]
        found[tail] = logp.gather(-1, text[0, len(prompt) :, None]).sum().item()
    return found


@torch.no_grad()
def by_hand(model, tokens, n, **how):
    """Greedy, each step from the whole text."""
    for _ in range(n):
        best = model(tokens, **how)[:, -1].argmax(-1)
        tokens = torch.cat((tokens, best[:, None]), 1)
    return tokens


def filtered_by_hand(logits, temperature, top_k, top_p):
    """One number at a time, in Python's floats: probabilities."""
    best = max(logits)
    p = [math.exp((x - best) / temperature) for x in logits]
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    order = order if top_k is None else order[:top_k]
    total, kept, held = sum(p[i] for i in order), [], 0.0
    for i in order:
        if top_p is None or held < top_p:
            kept.append(i)
        held += p[i] / total
    total = sum(p[i] for i in kept)
    return [p[i] / total if i in kept else 0.0 for i in range(len(p))]


# --- filters ------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("top_k", [None, 1, 3, 99])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_filter_equals_loops(temperature, top_k, top_p, dtype):
    logits = torch.randn(2, 3, 11, generator=gen()).to(dtype)
    found = filter_logits(logits, temperature, top_k, top_p).softmax(-1)
    for at in itertools.product(range(2), range(3)):
        want = filtered_by_hand(logits[at].tolist(), temperature, top_k, top_p)
        assert_close(found[at].double(), torch.tensor(want).double(), rtol=0, atol=1e-6)


def test_filters_follow_a_new_order_of_the_vocabulary():
    logits, order = torch.randn(4, 9), torch.randperm(9)
    for how in ({"top_k": 3}, {"top_p": 0.7}, {"temperature": 0}):
        assert filter_logits(logits[:, order], **how).equal(
            filter_logits(logits, **how)[:, order]
        )


def test_filter_errors():
    logits = torch.zeros(1, 4)
    for bad in (-1, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"finite number from 0, got .*={bad}"):
            filter_logits(logits, bad)
        with pytest.raises(ValueError, match=r"temperature must be a finite"):
            sample(logits, bad)
    for bad in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=f"whole number from 1, got top_k={bad}"):
            filter_logits(logits, top_k=bad)
    for bad in (0, -0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=f"at most 1, got top_p={bad}"):
            filter_logits(logits, top_p=bad)
    for bad in ([math.nan, 1], [math.inf, 1], [-math.inf, -math.inf]):
        for temperature in (0, 1):
            with pytest.raises(ValueError, match=r"finite largest one"):
                sample(torch.tensor([bad]), temperature)


@pytest.mark.parametrize("how", [{}, {"temperature": 0.5, "top_k": 4, "top_p": 0.8}])
def test_draws_follow_the_filtered_distribution(how):
    logits = torch.randn(1, 6, generator=gen(3))
    drawn = sample(logits.expand(100_000, 6), generator=gen(), **how)
    assert_distribution(drawn, filter_logits(logits[0], **how).double().softmax(-1))


def assert_distribution(drawn, probabilities):
    """Chi-square of counts against probabilities, p above 1e-4."""
    counts = drawn.bincount(minlength=len(probabilities)).double()
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * counts.sum()
    square = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((possible.sum().item() - 1) / 2).double()
    assert torch.special.gammaincc(freedom, square / 2) > 1e-4


def test_draws_repeat_with_a_seed_and_rows_have_their_own():
    logits = torch.randn(5, 50)
    assert sample(logits, generator=gen(1)).equal(sample(logits, generator=gen(1)))
    torch.manual_seed(4)
    first = sample(logits)
    torch.manual_seed(4)
    assert sample(logits).equal(first)
    together = sample(logits, generator=[gen(i) for i in range(5)])
    alone = [sample(logits[[i]], generator=[gen(i)]) for i in range(5)]
    assert together.equal(torch.cat(alone))
    with pytest.raises(ValueError, match=r"a generator for each text, got 4 for 5"):
        sample(logits, generator=[gen()] * 4)


def test_what_has_no_probability_is_never_drawn():
    p = torch.tensor([[0.0, 0.0, 1.0, 0.0]]).expand(10_000, 4)
    assert (draw(p, gen()) == 2).all()


# --- generate ------------------------------------------------------------


@each_scheme
@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_generate_equals_whole_passes(scheme, chunk, conform):
    model, tokens = decoder(scheme), prompts(2, 5)
    found = generate(model, tokens, 9, chunk=chunk)
    assert len(found.unique()) > 4
    want = by_hand(model, tokens, 9)
    conform("generate", "cached", found, want, reference="whole passes", atol=0)


@each_scheme
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_single_runs(scheme, side, conform):
    model, rows = decoder(scheme), [prompts(1, n, n)[0] for n in (3, 5, 1)]
    tokens, mask = padded(rows, 5, side)
    found = generate(model, tokens, 8, mask=mask)
    assert found[:, :5].equal(tokens)
    alone = torch.cat([by_hand(model, row[None], 8)[:, len(row) :] for row in rows])
    how = {"reference": "each text alone", "atol": 0}
    conform("generate", "ragged", found[:, 5:], alone, **how)
    assert generate(model, tokens, 8, mask=mask[:, 0, 0]).equal(found)


@each_scheme
def test_compiled_equals_eager_and_compiles_once(scheme, monkeypatch, conform):
    counter = watch_compilations(monkeypatch)
    model, tokens = decoder(scheme), prompts(2, 5)
    if scheme == "relative":
        with pytest.raises(ValueError, match=r"count from the last key.* got block 0"):
            generate(model, tokens, 9, compile=True)
        return
    found = generate(model, tokens, 9, compile=True)
    how = {"reference": "whole passes", "atol": 0}
    conform("generate", "compile", found, by_hand(model, tokens, 9), **how)
    generate(model, tokens[:, :2], 30, compile=True, temperature=1, eos=3)
    assert counter.frame_count == 1
    generate(model, tokens[:1], 4, compile=True)  # another number of texts
    generate(model, tokens, 70, compile=True) if scheme == "halves" else None
    assert counter.frame_count == (3 if scheme == "halves" else 2)


def watch_compilations(monkeypatch):
    """Count graphs, and compile them with nothing."""
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    counter, compile_it = CompileCounter(), torch.compile
    monkeypatch.setattr(sampling, "STEPS", type(sampling.STEPS)())

    def count(f, *, options, **how):  # the options are Inductor's
        return compile_it(f, backend=counter, **how)

    monkeypatch.setattr(torch, "compile", count)
    return counter


def test_compiled_padded_rows(monkeypatch):
    watch_compilations(monkeypatch)
    model, rows = decoder(), [prompts(1, n, n)[0] for n in (3, 5, 1)]
    tokens, mask = padded(rows, 5)
    found = generate(model, tokens, 8, mask=mask, compile=True)
    assert found.equal(generate(model, tokens, 8, mask=mask))


def test_a_window_is_not_compiled(monkeypatch):
    watch_compilations(monkeypatch)
    with pytest.raises(ValueError, match=r"use compile=False, got block 0"):
        generate(decoder(window=4), prompts(1, 3), 4, compile=True)
    with pytest.raises(ValueError, match=r"needs a StaticCache, got KVCache"):
        generate(decoder(), prompts(1, 3), 4, compile=True, cache=KVCache())


def test_models_are_forgotten_with_their_code(monkeypatch):
    watch_compilations(monkeypatch)
    model = decoder()
    generate(model, prompts(1, 3), 3, compile=True)
    assert len(sampling.STEPS) == 1
    del model
    torch.compiler.reset()
    import gc

    gc.collect()
    assert not len(sampling.STEPS)


def test_caches_given_by_hand():
    model, tokens = decoder(), prompts(2, 9)
    want = by_hand(model, tokens, 6)
    assert generate(model, tokens, 6, cache=StaticCache(14)).equal(want)
    cache = KVCache()
    generate(model, tokens[:, :4], 0, cache=cache)
    assert cache.length == 0
    first = generate(model, tokens, 3, cache=cache)
    assert cache.length == 11  # the last token is not read
    assert generate(model, first[:, -1:], 3, cache=cache)[:, 1:].equal(want[:, -3:])
    windowed = decoder(window=4)
    found = generate(windowed, tokens, 6, cache=RollingCache(4, n_spare=2))
    assert found.equal(by_hand(windowed, tokens, 6))
    with pytest.raises(ValueError, match=r"holds 64 tokens, got 73 more after 0"):
        generate(model, tokens, 65, cache=StaticCache(64))


def test_cross_attention():
    model, tokens = decoder(cross=True), prompts(2, 3)
    context = torch.randn(2, 7, C)
    mask = padding_mask(torch.tensor([7, 4]), 7)
    how = {"context": context, "context_mask": mask}
    assert generate(model, tokens, 8, **how).equal(by_hand(model, tokens, 8, **how))


def test_stream_gives_tokens_as_they_come():
    model, tokens = decoder(), prompts(2, 5)
    asked = []
    model.head.register_forward_hook(lambda *_: asked.append(1))
    tokens_of = stream(model, tokens, 4)
    assert not asked
    first = next(tokens_of)
    assert len(asked) == 1 and first.shape == (2,)
    rest = torch.stack([first, *tokens_of], 1)
    assert rest.equal(generate(model, tokens, 4)[:, 5:])


def test_only_the_last_position_meets_the_vocabulary():
    model, shapes = decoder(), []
    model.head.register_forward_hook(lambda *x: shapes.append(x[2].shape))
    generate(model, prompts(2, 9), 3)
    assert set(shapes) == {(2, 1, V)}


def test_sampled_rows_do_not_depend_on_neighbours():
    model, tokens = decoder(), prompts(3, 5)
    how = {"temperature": 1.0, "top_p": 0.9}
    seeds = [gen(i) for i in range(3)]
    together = generate(model, tokens, 8, generator=seeds, **how)
    for i in range(3):
        alone = generate(model, tokens[[i]], 8, generator=[gen(i)], **how)
        assert together[[i]].equal(alone)


def test_generate_errors():
    model, tokens = decoder(), prompts(2, 3)
    with pytest.raises(TypeError, match=r"got Linear"):
        generate(nn.Linear(2, 2), tokens, 1)
    with pytest.raises(
        ValueError, match=r"n_new must be a whole number from 0, got .*-1"
    ):
        generate(model, tokens, -1)
    with pytest.raises(ValueError, match=r"chunk must be a whole number from 1"):
        generate(model, tokens, 1, chunk=0)
    for bad in (tokens[0], tokens[:, :0]):
        with pytest.raises(ValueError, match=r"\(B, T\) with at least one token, got"):
            generate(model, bad, 1)
    with pytest.raises(ValueError, match=r"none in rows=.1"):
        generate(model, tokens, 1, mask=torch.tensor([[True] * 3, [False] * 3]))
    with pytest.raises(TypeError, match=r"mask.dtype=torch.int64"):
        generate(model, tokens, 1, mask=torch.ones_like(tokens))
    with pytest.raises(ValueError, match=r"each token .*got .*\(2, 2\)"):
        generate(model, tokens, 1, mask=torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"positions must lie in .* 40"):
        generate(decoder("learned"), tokens, 60)


# --- beam search ---------------------------------------------------------


def every_text(model, prompt, n, ends, penalty, pad=0):
    """All texts of up to n tokens that end in an end or at n, the best first."""
    found = {}
    for tail, _ in chances(model, prompt, n).items():
        stop = next((i + 1 for i, x in enumerate(tail) if x in ends), n)
        found.setdefault(tail[:stop])
    for tail in found:
        text = torch.tensor([[*prompt, *tail]])
        logp = model(text).double().log_softmax(-1)[0, len(prompt) - 1 : -1]
        total = logp.gather(-1, text[0, len(prompt) :, None]).sum().item()
        found[tail] = total / len(tail) ** penalty
    ranked = sorted(found.items(), key=lambda pair: -pair[1])
    return [((*t, *[pad] * (n - len(t))), score) for t, score in ranked]


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("eos", [None, 2])
@pytest.mark.parametrize("n_beams", [16, 64])
def test_wide_beams_equal_exhaustive_search(penalty, eos, n_beams):
    torch.manual_seed(3)
    model, tokens = small_vocabulary(), torch.tensor([[1, 0, 3], [2, 2, 1]])
    how = {"eos": eos, "length_penalty": penalty, "pad": 3}
    found = beam_search(model, tokens, 3, n_beams, **how)
    for b in range(2):
        ends = () if eos is None else (eos,)
        want = every_text(model, tokens[b].tolist(), 3, ends, penalty, pad=3)
        rows = found.tokens[b, :, 3:].tolist()
        got = list(zip(rows, found.scores[b].tolist(), strict=True))
        assert tuple(got[0][0]) == want[0][0]
        if n_beams == 64:
            for (tail, score), (right, best) in zip(got, want, strict=False):
                assert tuple(tail) == right and abs(score - best) < 1e-5
            assert found.scores[b].isfinite().sum() == len(want)


def small_vocabulary(seed=0, vocab=4):
    """A decoder of four tokens."""
    model = decoder(seed=seed)
    torch.manual_seed(seed + 9)
    model.embedding = nn.Embedding(vocab, C)
    model.head = nn.Linear(C, vocab, bias=False)
    nn.init.normal_(model.head.weight, std=0.5)
    return model


@each_scheme
def test_one_beam_is_greedy(scheme):
    model, tokens = decoder(scheme), prompts(2, 5)
    found = beam_search(model, tokens, 8, 1)
    assert found.tokens[:, 0].equal(by_hand(model, tokens, 8))


def test_beams_of_padded_prompts_with_context():
    model, rows = decoder(cross=True), [prompts(1, n, n)[0] for n in (3, 5)]
    tokens, mask = padded(rows, 5)
    context = torch.randn(2, 7, C)
    found = beam_search(model, tokens, 6, 3, mask=mask, context=context)
    for b, row in enumerate(rows):
        alone = beam_search(model, row[None], 6, 3, context=context[[b]])
        assert found.tokens[b, :, 5:].equal(alone.tokens[0, :, len(row) :])
        assert_close(found.scores[b], alone.scores[0], rtol=0, atol=1e-5)


def test_beam_errors():
    with pytest.raises(ValueError, match=r"n_beams must be a whole number from 1"):
        beam_search(decoder(), prompts(1, 3), 3, 0)
    with pytest.raises(ValueError, match=r"n_new must be a whole number from 1"):
        beam_search(decoder(), prompts(1, 3), 0, 2)


# --- speculation ---------------------------------------------------------


@each_scheme
@pytest.mark.parametrize("n_draft", [0, 1, 4, 30])
def test_greedy_speculation_is_greedy(scheme, n_draft, conform):
    model, tokens = decoder(scheme), prompts(1, 5)
    want = by_hand(model, tokens, 14)
    for draft in (decoder(seed=1), model, prompt_lookup(), prompt_lookup(1)):
        found = speculate(model, tokens, 14, draft, n_draft)
        how = {"reference": "whole passes", "atol": 0}
        conform("speculate", "cached", found.tokens, want, **how)
        assert found.n_accepted <= found.n_drafted
        assert found.n_calls + found.n_accepted == 14
    alone = speculate(model, tokens, 14, model, n_draft)
    assert alone.n_calls == math.ceil(14 / (n_draft + 1))


def test_speculation_stops_at_eos():
    model, tokens = decoder(), prompts(1, 5)
    text = by_hand(model, tokens, 14)[0]
    eos = int(text[9])
    stop = (text[5:] == eos).nonzero()[0].item() + 6
    for draft in (model, prompt_lookup(1)):
        found = speculate(model, tokens, 14, draft, eos=eos).tokens
        assert found[0].equal(text[:stop])
    assert speculate(model, tokens, 0, model).tokens.equal(tokens)


@pytest.mark.parametrize("drafter", ["model", "table", "function"])
def test_speculation_keeps_the_distribution_of_two_tokens(drafter):
    """Whole runs of a tiny model, against exact enumeration."""
    torch.manual_seed(0)
    tables = [torch.randn(3, 3) * 1.5 for _ in range(2)]
    model, other = (Table(t) for t in tables)
    draft = {
        "model": other,
        "table": Table(tables[0]),
        "function": lambda text, n: (text[-1:] + 1).repeat(n) % 3,
    }[drafter]
    exact = chances(model, [1], 2)
    p = torch.tensor([math.exp(x) for x in exact.values()]).double()
    start, g = torch.tensor([[1]]), gen()
    drawn = [
        speculate(model, start, 2, draft, 2, temperature=1, generator=g).tokens[0, 1:]
        for _ in range(2000)
    ]
    assert_distribution(torch.stack(drawn) @ torch.tensor([3, 1]), p)


def test_lookup_finds_the_last_place():
    draft = prompt_lookup(2)
    text = torch.tensor([1, 2, 3, 9, 1, 2, 4, 5, 1, 2])
    assert draft(text, 3).tolist() == [4, 5, 1]
    assert draft(text, 9).tolist() == [4, 5, 1, 2]
    assert draft(torch.tensor([7, 3, 8, 3]), 2).tolist() == [8, 3]  # one token only
    assert draft(torch.tensor([1, 2, 3]), 2).tolist() == []
    assert draft(torch.tensor([1]), 2).tolist() == []
    with pytest.raises(ValueError, match=r"n_gram must be a whole number from 1"):
        prompt_lookup(0)


def test_speculation_errors():
    model = decoder()
    with pytest.raises(ValueError, match=r"one prompt .*got tuple\(tokens.shape\)=\(2"):
        speculate(model, prompts(2, 3), 3, model)
    with pytest.raises(ValueError, match=r"vocabulary of its target, got 4 for 17"):
        speculate(model, prompts(1, 3), 3, small_vocabulary())
    with pytest.raises(TypeError, match=r"got Linear"):
        speculate(model, prompts(1, 3), 3, nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"n_draft must be a whole number from 0"):
        speculate(model, prompts(1, 3), 3, model, -1)


def test_residual_and_verify_by_enumeration():
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    p, q = p.double(), q.double()
    kept = torch.minimum(p, q)
    assert_close(kept.sum().item(), 0.6)
    rest = residual(p, q)
    assert_close(rest, torch.tensor([1.0, 0, 0]).double())
    assert_close(kept + (1 - kept.sum()) * rest, p)
    assert residual(p, p).equal(p)
    rows = 100_000
    drafted = draw(q.expand(rows, 3), gen())[:, None]
    tokens, n = verify(p.expand(rows, 2, 3), q.expand(rows, 1, 3), drafted, gen(1))
    assert_distribution(tokens[:, 0], p)
    assert abs(n.double().mean().item() - 0.6) < 0.01
