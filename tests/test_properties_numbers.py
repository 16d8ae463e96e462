"""What rounding, sampling, rates and losses keep for any numbers; what files keep."""

import json
import math
import tempfile
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import DTYPES, counts, double, dtypes, exact, often, randoms, seeds
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from transformer.attention import MultiHeadAttention
from transformer.blocks import PreNormBlock
from transformer.checkpoint import load_checkpoint, save_checkpoint
from transformer.data import IGNORED, read_tokens, write_tokens
from transformer.feedforward import FeedForward
from transformer.flash import io_bytes
from transformer.formats import open_weights
from transformer.grouped import kv_cache_bytes
from transformer.model import LanguageModel, count_parameters, resize_vocabulary
from transformer.norms import LayerNorm
from transformer.quantize import (
    BFloat16Linear,
    FloatLinear,
    Int4Linear,
    Int8Linear,
    quantize,
    round_rows,
)
from transformer.sampling import draw as draw_token
from transformer.sampling import filter_logits, residual, sample, verify
from transformer.storage import newest_checkpoint, read_checkpoint, write_checkpoint
from transformer.training import (
    cross_entropy,
    decay_groups,
    inverse_sqrt,
    warmup_cosine,
)

# --- weights of few bits -------------------------------------------------------------


@st.composite
def matrices(draw, dtype=dtypes, multiple=1):
    """(R, C) weights of very different sizes, some rows and columns 0."""
    n_rows, n_columns = draw(counts), multiple * draw(counts)
    made = randoms(draw(seeds))
    x = torch.randn(n_rows, n_columns, generator=made, dtype=double)
    x = x * 10.0 ** draw(st.sampled_from([-30, -5, 0, 3]))
    x = x * torch.logspace(0, draw(st.integers(-4, 0)), n_rows)[:, None]
    x = x * (torch.rand(n_columns, generator=made) < 0.8)
    kind = draw(dtype) if isinstance(dtype, st.SearchStrategy) else dtype
    return x.clamp(-6e4, 6e4).to(kind)


@often(60)
@given(matrices(), st.integers(2, 8))
def test_no_weight_moves_by_more_than_half_a_step(weight, bits):
    codes, scale = round_rows(weight, bits)
    off = (weight.double() - codes.double() * scale.double()).abs()
    assert (off <= scale.double() / 2 * (1 + 1e-12)).all()
    assert codes.abs().max() <= 2 ** (bits - 1) - 1
    assert not codes[weight == 0].any()


@often(60)
@given(matrices(multiple=4), st.sampled_from([4, 8, 16]), st.data())
def test_outputs_move_by_no_more_than_their_weights_do(weight, bits, data):
    weight = weight.float()
    kinds = {4: Int4Linear, 8: Int8Linear, 16: BFloat16Linear}
    how = {"group": 4} if bits == 4 else {}
    layer = kinds[bits](weight, **how)
    lead = data.draw(st.lists(st.integers(0, 3), max_size=2))
    made = randoms(data.draw(seeds))
    x = torch.randn(*lead, weight.size(1), generator=made)
    if bits == 16:
        step = weight.double().abs() * 2**-8
    else:
        steps = layer.scale.double().flatten(1)  # (R, 1), or one for each group
        step = steps.repeat_interleave(weight.size(1) // steps.size(1), 1) / 2
    x64, restored = x.double(), layer.restore().double()
    assert ((restored - weight.double()).abs() <= step * (1 + 1e-6) + 2e-38).all()
    allowed = x64.abs() @ (step.T + weight.double().abs().T * 2**-18) + 1e-37
    off = (layer(x).double() - x64 @ weight.double().T).abs()
    assert off.shape == (*lead, len(weight)) and (off <= allowed).all()


@often(40)
@given(matrices(), st.booleans(), st.lists(st.integers(0, 3), max_size=2), seeds)
def test_faster_layer_gives_what_torch_gives(weight, bias, lead, seed):
    layer = nn.Linear(weight.size(1), len(weight), bias=bias).to(weight)
    layer.weight.data = weight.clone()
    mine = FloatLinear(layer.weight, layer.bias)
    x = torch.randn(*lead, weight.size(1), generator=randoms(seed)).to(weight)
    size = x.double().abs() @ weight.double().abs().T + 1
    want, eps = layer.double()(x.double()), torch.finfo(weight.dtype).eps
    mine.to(weight.dtype)
    off = (mine(x).double() - want).abs()
    assert (off <= (weight.size(1) + 4) * eps * size).all()


@often(20)
@given(st.sampled_from([4, 8, 16]), st.booleans(), seeds)
def test_rounding_rounded_weights_changes_nothing(bits, tie, seed):
    torch.manual_seed(seed)
    block = PreNormBlock(8, MultiHeadAttention(8, 2), FeedForward(8, 16))
    model = LanguageModel(11, 8, [block], norm=LayerNorm, tie=tie).eval()
    tokens = torch.randint(11, (2, 5), generator=randoms(seed))
    once = quantize(model, bits, group=8)
    before = once(tokens)
    names = [n for n, m in once.named_modules() if hasattr(m, "restore")]
    assert len(names) == 5  # qkv, out, up, down, head
    for name in names:
        layer = once.get_submodule(name)
        new = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
        new.weight.data, new.bias = layer.weight.clone(), layer.bias
        once.set_submodule(name, new)
    assert_close(quantize(once, bits, group=8)(tokens), before, rtol=1e-5, atol=1e-6)


# --- sampling ------------------------------------------------------------------------


@st.composite
def logits(draw, dtype=dtypes):
    """(B, V) with ties, excluded tokens, and one finite number at least in a row."""
    n_rows, vocab_size = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    made = randoms(draw(seeds))
    x = torch.randn(n_rows, vocab_size, generator=made)
    x = x * draw(st.sampled_from([0.0, 0.1, 1.0, 30.0, 1e3]))
    x = x.round() if draw(st.booleans()) else x
    out = torch.rand(n_rows, vocab_size, generator=made) < draw(
        st.sampled_from([0.0, 0.5, 1.0])
    )
    out.scatter_(1, torch.randint(vocab_size, (n_rows, 1), generator=made), False)
    return x.masked_fill(out, -math.inf).to(draw(dtype))


temperatures = st.one_of(st.just(0.0), st.floats(0.01, 100), st.floats(1e-320, 1e-300))
top_ks = st.one_of(st.none(), st.integers(1, 15))
top_ps = st.one_of(st.none(), st.floats(1e-9, 1.0))


def support(x, temperature, top_k, top_p) -> set[int]:
    """Which tokens may come, by sorting in Python; x one row of floats."""
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    order = [i for i in order if x[i] > -math.inf][:top_k]
    grown = [math.exp(max((x[i] - x[order[0]]) / temperature, -745)) for i in order]
    total, kept, held = sum(grown), set(), 0.0
    for i, share in zip(order, grown, strict=True):
        if top_p is not None and held / total >= top_p:
            break
        kept.add(i)
        held += share
    return kept


@often(100)
@given(logits(), temperatures, top_ks, top_ps)
def test_filter_leaves_those_whom_the_rule_leaves(x, temperature, top_k, top_p):
    kept = filter_logits(x, temperature, top_k, top_p)
    assert kept.shape == x.shape and (kept.amax(-1) == 0).all()
    assert not kept.isnan().any()
    if temperature < torch.finfo(kept.dtype).tiny:
        assert (kept > -math.inf).int().argmax(-1).equal(x.argmax(-1))
        assert (kept > -math.inf).sum(-1).eq(1).all()
        return
    for row, left in zip(x.double().tolist(), kept, strict=True):
        # A share as near to top_p as rounding goes may fall to either side.
        shares = (None,) if top_p in (None, 1) else (top_p - 2e-6, top_p + 2e-6)
        few, many = (support(row, temperature, top_k, p) for p in (shares * 2)[:2])
        here = {*(left > -math.inf).nonzero().flatten().tolist()}
        # What is too far below the best for the dtype has probability 0 all the same.
        far = {i for i in few if (row[i] - max(row)) / temperature < -1e38}
        assert few - far <= here <= many


@often(100)
@given(logits(), temperatures, top_ks, top_ps, seeds)
def test_no_token_is_drawn_outside_the_filter(x, temperature, top_k, top_p, seed):
    kept = filter_logits(x, temperature, top_k, top_p)
    token = sample(x, temperature, top_k, top_p, randoms(seed))
    assert (kept.gather(-1, token[:, None]) > -math.inf).all()
    assert (kept.double().softmax(-1).gather(-1, token[:, None]) > 0).all()


@often(60)
@given(logits(), st.floats(0.05, 20), top_ks, st.floats(0.01, 0.999))
def test_fewest_tokens_hold_the_share(x, temperature, top_k, top_p):
    whole = filter_logits(x, temperature, top_k).double().softmax(-1)
    kept = filter_logits(x, temperature, top_k, top_p) > -math.inf
    held = (whole * kept).sum(-1)
    least = whole.masked_fill(~kept, 2).amin(-1)
    assert (held >= top_p - 1e-6).all()
    assert ((held - least < top_p + 1e-6) | (kept.sum(-1) == 1)).all()


@often(60)
@given(logits(), st.data())
def test_draws_follow_their_running_sum(x, data):
    chances = x.double().softmax(-1)
    token = draw_token(chances, randoms(data.draw(seeds)))
    assert (chances.gather(-1, token[:, None]) > 0).all()


@st.composite
def drafts(draw):
    """p (B, g + 1, V), q (B, g, V), and tokens that q can draw."""
    batch, g, vocab_size = (
        draw(st.integers(a, b)) for a, b in ((1, 3), (0, 4), (1, 6))
    )
    made = randoms(draw(seeds))
    p, q = (
        torch.randn(batch, n, vocab_size, generator=made, dtype=double) * 3
        for n in (g + 1, g)
    )
    out = torch.rand(p.shape, generator=made) < 0.3
    out[..., 0] = False
    p, q = p.masked_fill(out, -math.inf).softmax(-1), q.softmax(-1)
    drafted = torch.zeros(batch, g, dtype=torch.int64)
    if g:
        drafted = torch.multinomial(q.flatten(0, 1), 1, generator=made).view(batch, g)
    return p, q, drafted


@often(60)
@given(drafts(), seeds)
def test_verified_tokens_can_come_from_the_target(given, seed):
    p, q, drafted = given
    tokens, n = verify(p, q, drafted, randoms(seed))
    assert tokens.shape == (len(p), p.size(1))
    for b, n_accepted in enumerate(n.tolist()):
        assert tokens[b, :n_accepted].equal(drafted[b, :n_accepted])
        assert (tokens[b, n_accepted + 1 :] == -1).all()
        for i, token in enumerate(tokens[b, : n_accepted + 1].tolist()):
            assert p[b, i, token] > 0


@often(60)
@given(drafts())
def test_accepted_and_redrawn_together_give_the_target(given):
    p, q, _ = given
    p = p[:, :-1]
    accepted = torch.minimum(p, q)
    again = 1 - accepted.sum(-1, keepdim=True)
    assert_close(accepted + again * residual(p, q), p, rtol=1e-7, atol=1e-9)


# --- rates and losses ----------------------------------------------------------------


@often(60)
@given(st.integers(1, 5000), st.integers(0, 2000), st.integers(1, 4096))
def test_rate_of_2017_peaks_after_warmup(step, warmup, d_model):
    rate, after = (inverse_sqrt(s, d_model, warmup) for s in (step, step + 1))
    peak = inverse_sqrt(max(warmup, 1), d_model, warmup)
    assert 0 < rate <= peak * (1 + 1e-12)
    assert math.isclose(peak, (d_model * max(warmup, 1)) ** -0.5)
    assert (after > rate) == (step < warmup)


@often(60)
@given(
    st.integers(1, 300),
    st.integers(1, 200),
    st.data(),
    st.floats(1e-6, 10),
    st.floats(0, 1),
)
def test_cosine_rises_to_a_peak_and_falls_to_a_floor(step, steps, data, peak, share):
    warmup, floor = data.draw(st.integers(0, steps)), share * peak
    rate, after = (
        warmup_cosine(s, steps, warmup, peak, floor) for s in (step, step + 1)
    )
    top = max(warmup, 1)
    slack = 1e-12 * peak
    assert min(floor, peak / top) - slack <= rate <= peak + slack
    if step < top:
        assert after > rate
    else:
        assert floor - slack <= after <= rate + slack
    assert warmup_cosine(top, steps, warmup, peak, floor) == peak
    if steps > top:
        end = warmup_cosine(steps, steps, warmup, peak, floor)
        assert math.isclose(end, floor, abs_tol=slack)
        beyond = warmup_cosine(steps + step, steps, warmup, peak, floor)
        assert math.isclose(beyond, floor, abs_tol=slack)


@st.composite
def labelled(draw):
    """(N, V) logits and their labels, some ignored."""
    n, vocab_size = draw(st.integers(0, 9)), draw(st.integers(1, 7))
    made = randoms(draw(seeds))
    x = 5 * torch.randn(n, vocab_size, generator=made, dtype=double)
    labels = torch.randint(vocab_size, (n,), generator=made)
    ignored = torch.rand(n, generator=made) < draw(st.sampled_from([0.0, 0.4, 1.0]))
    return x, labels.masked_fill(ignored, IGNORED)


@often(60)
@given(labelled(), st.sampled_from([0.0, 0.1, 1.0]), st.lists(counts, max_size=3))
def test_any_cut_has_the_loss_and_the_gradients_of_the_whole(given, smoothing, cuts):
    (x, labels), n = given, int(given[1].ne(IGNORED).sum())
    x.requires_grad_()
    where = sorted({min(c, len(x)) for c in cuts})
    pieces = zip(x.tensor_split(where), labels.tensor_split(where), strict=True)
    parts = [cross_entropy(*p, smoothing=smoothing, count=n) for p in pieces]
    (cut,) = torch.autograd.grad(sum(parts), x)
    whole = cross_entropy(x, labels, smoothing=smoothing)
    assert_close(sum(parts), whole, **exact)
    (grad,) = torch.autograd.grad(whole, x)
    assert_close(cut, grad, **exact)
    if n:
        want = F.cross_entropy(x, labels, label_smoothing=smoothing)
        assert_close(whole, want, **exact)
        assert_close(grad, torch.autograd.grad(want, x)[0], **exact)
    else:
        assert whole == 0 and not grad.any()


@often(30)
@given(st.booleans(), st.booleans(), st.floats(0, 1), seeds)
def test_each_trained_number_is_in_one_group(tie, freeze, decay, seed):
    torch.manual_seed(seed)
    block = PreNormBlock(8, MultiHeadAttention(8, 2, bias=True), FeedForward(8, 16))
    model = LanguageModel(11, 8, [block], norm=LayerNorm, tie=tie)
    if freeze:
        model.embedding.requires_grad_(False)
    groups = decay_groups(model, decay)
    chosen = [p for group in groups for p in group["params"]]
    assert len({*map(id, chosen)}) == len(chosen)
    wanted = {id(p) for p in model.parameters() if p.requires_grad}
    assert {*map(id, chosen)} == wanted
    for group in groups:
        wide = {p.dim() > 1 for p in group["params"]}
        assert (wide == {True} and group["weight_decay"] == decay) or wide == {False}


@often(30)
@given(st.booleans(), st.integers(1, 15), st.integers(1, 15), seeds)
def test_first_tokens_keep_their_vectors(tie, before, after, seed):
    torch.manual_seed(seed)
    block = PreNormBlock(8, MultiHeadAttention(8, 2), FeedForward(8, 16))
    model = LanguageModel(before, 8, [block], norm=LayerNorm, tie=tie).eval()
    kept, size = min(before, after), count_parameters(model)
    tokens = torch.randint(kept, (2, 4), generator=randoms(seed))
    old = model(tokens)
    resize_vocabulary(model, after)
    new = model(tokens)
    assert new.shape == (2, 4, after)
    assert_close(new[..., :kept], old[..., :kept], rtol=1e-5, atol=1e-6)
    assert count_parameters(model) - size == 8 * (after - before) * (1 + (not tie))


@often(30)
@given(*[counts] * 5)
def test_counts_of_bytes_are_those_of_the_tensors(n_layers, n_kv, d, n_tokens, batch):
    cache = torch.zeros(2, n_layers, batch, n_kv, n_tokens, d, dtype=torch.bfloat16)
    assert kv_cache_bytes(n_layers, n_kv, d, n_tokens, batch) == cache.nbytes
    read, written = io_bytes(n_tokens, n_tokens, d, block_q=1)
    assert read == n_tokens * d * (1 + 2 * n_tokens) * 2
    assert written == n_tokens * d * 2 + 4 * n_tokens


# --- files ---------------------------------------------------------------------------

KINDS = [*DTYPES, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
KINDS += [torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16]
characters = st.characters(codec="utf-8", exclude_categories=("Cs",))
names = st.text(characters, max_size=9).filter(lambda name: name != "__metadata__")


@st.composite
def tensors(draw) -> torch.Tensor:
    """Any bits as numbers of any kind, of any shape, also not contiguous."""
    kind, shape = (
        draw(st.sampled_from(KINDS)),
        draw(st.lists(st.integers(0, 3), max_size=3)),
    )
    n_bytes = math.prod(shape) * kind.itemsize
    raw = torch.randint(256, (n_bytes,), generator=randoms(draw(seeds)))
    raw = raw % 2 if kind == torch.bool else raw
    made = raw.to(torch.uint8).view(kind).view(shape)
    return made.mT if made.dim() > 1 and draw(st.booleans()) else made


plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(characters, max_size=9),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(characters, max_size=5), inner, max_size=3),
    ),
    max_leaves=8,
)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal kinds, shapes and bytes, NaN or not."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    flat = (x.contiguous().view(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(*flat)


@often(60)
@given(st.dictionaries(names, tensors(), max_size=4), plain)
def test_checkpoints_give_back_bits_and_states(stored, state):
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(folder, stored, {"state": state})
        for found in (read_checkpoint(path), newest_checkpoint(folder)):
            assert found.state["state"] == state
            assert found.tensors.keys() == stored.keys()
            assert all(same_bits(found.tensors[n], stored[n]) for n in stored)
        opened = open_weights(path.with_suffix(".safetensors"))
        assert all(same_bits(opened[n], stored[n]) for n in stored)
        theirs = load_file(path.with_suffix(".safetensors"))
        assert all(same_bits(theirs[n], stored[n]) for n in stored)


@often(40)
@given(st.dictionaries(names, tensors(), max_size=4))
def test_files_of_the_library_give_back_bits(stored):
    stored = {name: x.contiguous() for name, x in stored.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(stored, path)
        for found in (open_weights(path), open_weights(folder)):
            assert found.keys() == stored.keys()
            assert all(same_bits(found[n], stored[n]) for n in stored)
            found.check({name: x.shape for name, x in stored.items()})


@st.composite
def runs(draw):
    """How a model is made and trained for a few steps."""
    how = {"tie": draw(st.booleans()), "bias": draw(st.booleans())}
    kind = draw(st.sampled_from([torch.optim.AdamW, torch.optim.SGD]))
    return how, kind, draw(st.integers(0, 3)), draw(seeds)


def make(how, kind, seed):
    """A model and its optimizer."""
    torch.manual_seed(seed)
    attn = MultiHeadAttention(8, 2, bias=how["bias"])
    block = PreNormBlock(8, attn, FeedForward(8, 16), dropout=0.1)
    model = LanguageModel(11, 8, [block], norm=LayerNorm, tie=how["tie"])
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    return model, kind(decay_groups(model, 0.1), lr=0.1, **more)


def step(model, optimizer):
    """One update on random tokens."""
    tokens = torch.randint(11, (2, 5))
    loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@often(20)
@given(runs(), st.integers(1, 3), plain)
def test_a_loaded_run_goes_on_as_the_saved_one(run, more, config):
    (how, kind, n, seed), config = run, {"anything": config}
    model, optimizer = make(how, kind, seed)
    for _ in range(n):
        step(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(folder, model, optimizer, step=n, config=config)
        losses = [step(model, optimizer) for _ in range(more)]
        other, its = make(how, kind, seed + 1)
        found = load_checkpoint(folder, other, its)
    assert found["step"] == n and found["config"] == config
    assert [step(other, its) for _ in range(more)] == losses
    for name, p in model.state_dict().items():
        assert other.state_dict()[name].equal(p)


@often(40)
@given(st.sampled_from([3, 300, 2**16, 2**16 + 1, 2**32]), st.data())
def test_tokens_come_back_from_their_file(vocab_size, data):
    ids = st.lists(st.integers(0, vocab_size - 1), max_size=6)
    documents = data.draw(st.lists(ids, max_size=4))
    end = data.draw(st.one_of(st.none(), st.integers(0, vocab_size - 1)))
    want = [] if end is None else [end]
    for document in documents:
        want += document if end is None else [*document, end]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.safetensors"
        n = write_tokens(path, documents, vocab_size, end)
        found = read_tokens(path, vocab_size)
        assert n == len(want) and found.long().tolist() == want
        opened = open_weights(path)
        assert opened["tokens"].long().tolist() == want
        assert json.loads(json.dumps(opened.metadata)) == {
            "vocab_size": str(vocab_size)
        }
