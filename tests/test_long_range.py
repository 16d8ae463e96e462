"""What the parts of `long_range` promise, each against loops or a brute-force mask."""

import itertools
import math
from functools import partial

import pytest
import torch
from attention_oracle import (
    DEVICES,
    HALF,
    assert_as_exact,
    by_hand,
    dense_mask,
    plain,
    repeat_heads,
    with_gradients,
)
from side_by_side import peak_bytes
from test_window import MASKS, SHAPES, LargestMade, make_inputs, make_mask
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F
from torch.testing import assert_close

from transformer.attention import (
    MultiHeadAttention,
    attention,
    causal_mask,
    padding_mask,
)
from transformer.blocks import PostNormBlock, PreNormBlock
from transformer.feedforward import FeedForward
from transformer.grouped import GroupedQueryAttention
from transformer.long_range import (
    ExternalMemory,
    HierarchicalEncoder,
    KeyValueStore,
    MemoryTokens,
    SegmentMemory,
    top_k_attention,
)
from transformer.model import Encoder, LanguageModel
from transformer.norms import LayerNorm
from transformer.positions import RelativeAttention, RoPE

each_device = pytest.mark.parametrize("device", DEVICES)
LOOPS = "loops in float64"
BEST = "formula over the best keys"
NO_COUNTS = [0, -1, 2.0, True, "3"]


def best_of(q, k, mask, causal: bool, top: int) -> torch.Tensor:
    """One score at a time: the keys in sight that fewer than top others exceed."""
    scores = (q @ repeat_heads(q, k).mT).detach()
    seen = dense_mask(q, k, mask, causal).expand(scores.shape)
    rows = []
    for row, allowed in zip(
        scores.reshape(-1, scores.size(-1)).tolist(),
        seen.reshape(-1, scores.size(-1)).tolist(),
        strict=True,
    ):
        known = [s for s, may in zip(row, allowed, strict=True) if may]
        pairs = zip(row, allowed, strict=True)
        rows.append([may and sum(x > s for x in known) < top for s, may in pairs])
    return torch.tensor(rows, dtype=torch.bool).view(scores.shape).to(q.device)


def over_best(function, top: int, mask=None, causal=False):
    """The function, with its keys cut down to the best ones by loops."""
    return lambda q, k, v: function(q, k, v, best_of(q, k, mask, causal, top))


def changed_one_by_one(model, x: torch.Tensor) -> torch.Tensor:
    """(T, T) bool: whether output i (rows) moves when token j (columns) changes."""
    n = x.size(-2)
    changed = x.repeat(n, 1, 1)
    changed[range(n), range(n)] += 1
    before = model(x.repeat(n, 1, 1))
    return (model(changed) != before).any(-1).mT


def make_block(d=8, n_heads=2, kind=PreNormBlock, **how) -> nn.Module:
    """A block, in float64."""
    attn = MultiHeadAttention(d, n_heads, **how)
    return kind(d, attn, FeedForward(d, 16)).double()


# --- top-k ---------------------------------------------------------------------------


@each_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("top", [1, 2, 4, 50])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_equal_loops(
    shape, kind, top, causal, dtype, device, conform
):
    *inputs, upstream = make_inputs(*SHAPES[shape], dtype, device)
    mask = make_mask(*inputs[:2], kind)
    on_cpu = mask if mask is None else mask.cpu()
    loops = over_best(lambda *x: by_hand(*x)[0], top, on_cpu, causal)
    exact = with_gradients(loops, [x.cpu().double() for x in inputs], upstream.cpu())
    ours = partial(top_k_attention(top), mask=mask, causal=causal)
    got = with_gradients(ours, inputs, upstream)
    peer = with_gradients(over_best(plain, top, mask, causal), inputs, upstream)
    assert got[0].dtype == dtype
    assert_as_exact(got, exact, peer)
    column = "forward" if kind == "none" else "mask"
    conform.record("top_k_attention", column, got[0], exact[0], reference=LOOPS)
    conform.record("top_k_attention", "gradient", got[1:], exact[1:], reference=LOOPS)


LENGTHS = [(1, 1), (63, 63), (64, 64), (65, 65), (150, 150), (1, 150), (150, 70)]


@each_device
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("top", [1, 8, 64, 149, 150])
@pytest.mark.parametrize("n_queries, n_keys", LENGTHS)
def test_every_block_equals_the_formula(
    n_queries, n_keys, top, causal, device, conform
):
    shape = (2, 4, n_queries, 8), (2, 2, n_keys, 8), 6
    *inputs, upstream = make_inputs(*shape, device=device)
    torch.manual_seed(2)
    masks = [None, torch.rand(2, 4, n_queries, n_keys) < 0.5]
    masks += [padding_mask(torch.tensor([n_keys, n_keys // 2]), n_keys)]
    for mask in masks:
        mask = mask if mask is None else mask.to(device)
        ours = partial(top_k_attention(top), mask=mask, causal=causal)
        got = with_gradients(ours, inputs, upstream)
        scores = inputs[0] @ repeat_heads(*inputs[:2]).mT
        seen = dense_mask(*inputs[:2], mask, causal).expand(scores.shape)
        scores = scores.masked_fill(~seen, -math.inf)
        edge = scores.topk(min(top, n_keys)).values[..., -1:]
        formula = partial(plain, mask=seen & (scores >= edge))
        want = with_gradients(formula, inputs, upstream)
        column = "forward" if mask is None else "mask"
        how = {"reference": BEST, "atol": 1e-10}
        conform("top_k_attention", column, got[0], want[0], **how)
        conform("top_k_attention", "gradient", got[1:], want[1:], **how)


@each_device
@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck_away_from_ties(causal, device):
    *inputs, _ = make_inputs((1, 4, 5, 3), (1, 2, 6, 3), 4, device=device)
    mask = torch.rand(1, 4, 5, 6, device=device) < 0.8
    scores = (inputs[0] @ repeat_heads(*inputs[:2]).mT).flatten(0, 2)
    apart = scores.sort(-1).values.diff(dim=-1).min()
    assert apart > 1e-4  # far more than gradcheck moves them
    inputs = [x.requires_grad_() for x in inputs]
    ours = partial(top_k_attention(3), mask=mask, causal=causal)
    assert gradcheck(ours, inputs) and gradgradcheck(ours, inputs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("top", [70, 71, 10**9])
def test_as_many_as_there_are_keys_is_attention(top, causal):
    q, k, v, _ = make_inputs((2, 4, 70, 8), (2, 2, 70, 8), 6)
    got = top_k_attention(top)(q, k, v, causal=causal)
    assert_close(got, attention(q, k, v, causal=causal), rtol=0, atol=1e-12)


def test_keys_that_tie_for_the_last_place_are_all_kept():
    q = torch.tensor([[[1.0]]])
    k = torch.tensor([[[3.0], [2.0], [2.0], [1.0]]])
    v = torch.eye(4)[None]
    kept = [(top_k_attention(n)(q, k, v)[0, 0] > 0).tolist() for n in (1, 2, 3, 4)]
    assert kept[0] == [True, False, False, False]
    assert kept[1] == kept[2] == [True, True, True, False]
    assert all(kept[3])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF], ids=str)
def test_order_of_keys_does_not_matter_even_with_ties(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randint(-1, 2, (1, 2, 40, 3)).to(dtype) for _ in range(3))
    order = torch.randperm(40)
    got = top_k_attention(4)(q, k[:, :, order], v[:, :, order])
    atol = 1e-6 if dtype.itemsize > 2 else 0.02
    assert_close(got, top_k_attention(4)(q, k, v), rtol=0, atol=atol)


def test_no_weight_beyond_the_best():
    q, k, _, _ = make_inputs((1, 2, 90, 8), (1, 2, 90, 8), 8)
    weights = top_k_attention(5)(q, k, torch.eye(90).double().expand(1, 2, 90, 90))
    assert ((weights > 0).sum(-1) == 5).all()
    assert_close(weights.sum(-1), torch.ones(1, 2, 90).double())
    weights = top_k_attention(5)(
        q, k, torch.eye(90).double().expand(1, 2, 90, 90), causal=True
    )
    assert (weights > 0).sum(-1)[0, 0].tolist() == [1, 2, 3, 4, *[5] * 86]


@each_device
def test_hidden_keys_are_not_among_the_best(device):
    """The best keys lie in the future or in the padding."""
    q, v = torch.ones(1, 1, 6, 4), torch.randn(1, 1, 6, 4)
    k = torch.arange(6.0)[:, None].expand(1, 1, 6, 4)
    q, k, v = (x.to(device) for x in (q, k, v))
    got = top_k_attention(1)(q, k, v, causal=True)
    assert_close(got, v)
    pad = padding_mask(torch.tensor([3], device=device), 6)
    got = top_k_attention(1)(q, k, v, pad)
    assert_close(got, v[:, :, 2:3].expand_as(v))


@pytest.mark.parametrize("top", [1, 3, 20])
def test_no_query_learns_of_a_later_key(top):
    q, k, v, _ = make_inputs((1, 2, 70, 4), (1, 2, 70, 4), 4)
    attend = top_k_attention(top)
    before = attend(q, k, v, causal=True)
    for j in range(1, 70):
        other_k, other_v = k.clone(), v.clone()
        other_k[:, :, j] *= 9
        other_v[:, :, j] += 1
        after = attend(q, other_k, other_v, causal=True)
        assert after[:, :, :j].equal(before[:, :, :j])


@each_device
def test_query_that_sees_nothing_gets_zeros_and_finite_gradients(device):
    *inputs, upstream = make_inputs((1, 2, 100, 8), (1, 2, 70, 8), 8, device=device)
    lengths = torch.tensor([20], device=device)
    for top in (2, 30):
        pad = padding_mask(lengths, 70)
        ours = partial(top_k_attention(top), mask=pad, causal=True)
        out, *grads = with_gradients(ours, inputs, upstream)
        assert (out[:, :, :30] == 0).all() and (out[:, :, 30:] != 0).any(-1).all()
        assert (grads[0][:, :, :30] == 0).all()
        assert all(grad.isfinite().all() for grad in grads)
        assert all((grad[:, :, 20:] == 0).all() for grad in grads[1:])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_queries, n_keys", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("batch", [0, 2])
def test_nothing_in_nothing_out(batch, n_queries, n_keys, causal):
    shape = (batch, 4, n_queries, 8), (batch, 2, n_keys, 8), 6
    *inputs, upstream = make_inputs(*shape)
    for mask in (None, torch.ones(n_queries, n_keys, dtype=torch.bool)):
        ours = partial(top_k_attention(3), mask=mask, causal=causal)
        out, *grads = with_gradients(ours, inputs, upstream)
        assert out.shape == (batch, 4, n_queries, 6) and (out == 0).all()
        assert all((grad == 0).all() for grad in grads)


@each_device
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("kind", ["none", "any"])
def test_half_precision_is_as_exact_as_the_formula(kind, dtype, device, conform):
    *inputs, upstream = make_inputs((2, 4, 70, 8), (2, 2, 70, 8), 8, dtype, device)
    mask = make_mask(*inputs[:2], kind)
    ours = partial(top_k_attention(70), mask=mask)
    got = with_gradients(ours, inputs, upstream)
    exact = with_gradients(
        partial(plain, mask=mask), [x.double() for x in inputs], upstream
    )
    peer = with_gradients(partial(plain, mask=mask), inputs, upstream)
    assert got[0].dtype == dtype
    assert_as_exact(got, exact, peer)
    reference = "formula in float64"
    conform.record("top_k_attention", "dtype", got, exact, reference=reference)
    assert top_k_attention(8)(*inputs, mask).isfinite().all()


@each_device
def test_layout_in_memory_does_not_matter(device):
    *wanted, upstream = make_inputs((2, 4, 80, 8), (2, 2, 80, 8), 8, device=device)
    exact = with_gradients(top_k_attention(9), wanted, upstream)
    tokens_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in wanted]
    every_second = [x.repeat_interleave(2, -1)[..., ::2] for x in wanted]
    for inputs in (tokens_first, every_second):
        assert not any(x.is_contiguous() for x in inputs)
        got = with_gradients(top_k_attention(9), inputs, upstream.mT.clone().mT)
        assert_close(got, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [*NO_COUNTS, None], ids=repr)
def test_k_that_is_no_count_is_refused(k):
    with pytest.raises(
        ValueError, match=f"^k must be a whole number from 1, got {k=}$"
    ):
        top_k_attention(k)


def test_refuses_what_attention_refuses():
    q, k, v, _ = make_inputs(*SHAPES["self"])
    attend = top_k_attention(3)
    with pytest.raises(TypeError, match="mask must be bool"):
        attend(q, k, v, torch.ones(6, 6))
    with pytest.raises(ValueError, match="mask must broadcast"):
        attend(q, k, v, torch.ones(6, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="same width"):
        attend(q, k[..., :4], v)
    with pytest.raises(ValueError, match="multiple of those of k"):
        attend(q, k[:, :2], v[:, :2])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("one_thread")
def test_memory_is_linear_in_the_length(causal, backward):
    def run(attend, inputs):
        out = attend(*inputs, None, causal)
        return torch.autograd.grad(out.sum(), inputs) if backward else out

    found, lengths = [], [1024, 2048, 4096]
    for t in lengths:
        inputs = [x.requires_grad_(backward) for x in torch.randn(3, 1, 2, t, 16)]
        found.append(peak_bytes(partial(run, top_k_attention(32), inputs)))
    first, second = (b - a for a, b in itertools.pairwise(found))
    assert 0 < second <= 1.1 * 2 * first  # twice as many tokens, twice as much
    assert found[-1] < lengths[-1] ** 2  # not a byte for each pair


def test_shared_heads_are_not_copied():
    q, k, v = torch.randn(1, 8, 2048, 16), *torch.randn(2, 1, 1, 2048, 64)
    with LargestMade(q, k, v) as watch:
        top_k_attention(8)(q, k[..., :16], v[..., :1])
    assert watch.most <= 8 * 64 * 2048 * 4  # scores of one block
    many = torch.randn(1, 64, 1, 64)
    with LargestMade(many, k, v) as watch:
        top_k_attention(8)(many, k, v)
    assert watch.most < 2 * 4 * k.numel()  # 64 rows of scores, not 64 copies


def test_block_shrinks_where_rows_are_long():
    q, k = torch.randn(1, 1, 64, 4), torch.randn(1, 1, 2**17, 4)
    with LargestMade(q, k) as watch:
        top_k_attention(2)(q, k, k)
    assert watch.most <= 4 * 2**22


@each_device
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_autocast_casts_like_a_product(dtype, device):
    q, k, v, _ = make_inputs(*SHAPES["grouped"], torch.float32, device)
    with torch.autocast(device, dtype):
        got = top_k_attention(3)(q, k, v)
    assert got.equal(top_k_attention(3)(*(x.to(dtype) for x in (q, k, v))))


def test_compiles_into_one_graph(conform):
    *inputs, upstream = make_inputs((2, 4, 70, 8), (2, 2, 70, 8), 8, torch.float32)
    mask = make_mask(*inputs[:2], "any")
    torch.compiler.reset()
    run = partial(top_k_attention(5), mask=mask, causal=True)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    got = with_gradients(compiled, inputs, upstream)
    want = with_gradients(run, inputs, upstream)
    of = {"reference": "itself uncompiled", "rtol": 1e-6, "atol": 1e-5}
    conform("top_k_attention", "compile", got, want, **of)
    torch.compiler.reset()


def test_is_an_attend_of_multi_head_attention():
    torch.manual_seed(3)
    layer = MultiHeadAttention(16, 4, attend=top_k_attention(9))
    peer = MultiHeadAttention(16, 4, attend=attention)
    peer.load_state_dict(layer.state_dict())
    x, mask = torch.randn(2, 9, 16), padding_mask(torch.tensor([9, 4]), 9)
    assert_close(layer(x, mask=mask, causal=True), peer(x, mask=mask, causal=True))


# --- the hierarchy -------------------------------------------------------------------


def shorten_by_hand(conv, x, causal):
    """One short token after the other: weights times neighbours that exist."""
    size, stride = conv.kernel_size[0], conv.stride[0]
    before = size - 1 if causal else (size - 1) // 2
    outs = []
    for place in range(0, len(x), stride):
        out = conv.bias.clone()
        for i in range(size):
            j = place - before + i
            if 0 <= j < len(x):
                out = out + conv.weight[:, :, i] @ x[j]
        outs.append(out)
    return torch.stack(outs)


def hierarchy_by_hand(encoder, x, causal):
    """The blocks of one text (T, C), token by token between them."""
    finer = []
    for i, block in enumerate(encoder.blocks):
        if i and i % encoder.every == 0:
            finer.append(x)
            x = shorten_by_hand(encoder.shrink[i // encoder.every - 1], x, causal)
        x = block(x[None], causal=causal)[0]
    for level in reversed(finer):
        x = torch.stack([y + x[t // encoder.stride] for t, y in enumerate(level)])
    return x


HIERARCHIES = [(3, 1, 2, 3), (5, 2, 2, 2), (4, 1, 3, 4), (2, 2, 2, 3), (3, 1, 1, 1)]


def make_hierarchy(n_blocks, every, stride, kernel, d=8):
    """An encoder of small blocks in float64."""
    torch.manual_seed(7)
    blocks = [make_block(d) for _ in range(n_blocks)]
    how = {"every": every, "stride": stride, "kernel": kernel}
    return HierarchicalEncoder(d, blocks, **how).double()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("shape", HIERARCHIES)
def test_hierarchy_equals_loops(shape, n_tokens, causal, conform):
    encoder = make_hierarchy(*shape)
    x = torch.randn(2, n_tokens, 8, dtype=torch.float64)
    got = encoder(x, causal=causal)
    want = torch.stack([hierarchy_by_hand(encoder, row, causal) for row in x])
    how = {"reference": LOOPS, "atol": 1e-10}
    conform("HierarchicalEncoder", "forward", got, want, **how)
    up = torch.randn_like(got)
    parameters = list(encoder.parameters())
    slopes = [torch.autograd.grad(y, parameters, up) for y in (got, want)]
    conform("HierarchicalEncoder", "gradient", *slopes, **how)


@pytest.mark.parametrize("n_tokens", [1, 2, 9, 16])
@pytest.mark.parametrize("shape", HIERARCHIES)
def test_causal_hierarchy_does_not_leak(shape, n_tokens):
    encoder = make_hierarchy(*shape)
    x = torch.randn(1, n_tokens, 8, dtype=torch.float64)
    moves = changed_one_by_one(partial(encoder, causal=True), x)
    assert not moves.triu(1).any()
    assert moves.diagonal().all()
    x.requires_grad_()
    for t in range(n_tokens):
        (slope,) = torch.autograd.grad(encoder(x, causal=True)[0, t].sum(), x)
        assert (slope[0, t + 1 :] == 0).all()


def test_encoder_sees_both_sides():
    encoder = make_hierarchy(3, 1, 2, 3)
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    assert changed_one_by_one(encoder, x).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", HIERARCHIES)
def test_ragged_batch_equals_each_text_alone(shape, causal, conform):
    encoder, n = make_hierarchy(*shape), 12
    lengths = torch.tensor([12, 7, 6, 1])
    x = torch.randn(4, n, 8, dtype=torch.float64)
    got = encoder(x, mask=padding_mask(lengths, n), causal=causal)
    for row, text, length in zip(got, x, lengths.tolist(), strict=True):
        alone = encoder(text[None, :length], causal=causal)[0]
        how = {"reference": "each text alone", "atol": 1e-10}
        conform("HierarchicalEncoder", "ragged", row[:length], alone, **how)
    assert got.isfinite().all()


def test_what_stands_in_the_padding_does_not_matter():
    encoder = make_hierarchy(5, 2, 2, 3)
    x, mask = torch.randn(1, 9, 8).double(), padding_mask(torch.tensor([5]), 9)
    other = x.clone()
    other[:, 5:] = 1e3
    got = [encoder(y, mask=mask)[:, :5] for y in (x, other)]
    assert got[0].equal(got[1])


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_number_of_tokens_and_convolutions(stride):
    seen = []

    class Watch(nn.Module):
        def forward(self, x, **how):
            seen.append(x.size(1))
            return x

    for n_blocks, every in ((1, 1), (4, 2), (5, 2), (6, 4), (3, 9)):
        blocks = [Watch() for _ in range(n_blocks)]
        encoder = HierarchicalEncoder(4, blocks, every=every, stride=stride)
        seen.clear()
        assert encoder(torch.randn(2, 11, 4), causal=True).shape == (2, 11, 4)
        assert len(encoder.shrink) == (n_blocks - 1) // every
        assert seen == [math.ceil(11 / stride ** (i // every)) for i in range(n_blocks)]


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8)])
def test_hierarchy_of_nothing(shape):
    encoder = make_hierarchy(3, 1, 2, 3)
    for causal in (False, True):
        assert encoder(torch.randn(shape).double(), causal=causal).shape == shape


def test_hierarchy_stands_for_blocks_of_whole_models():
    torch.manual_seed(1)
    inner = [make_block() for _ in range(3)]
    encoder = HierarchicalEncoder(8, inner, every=1).double()
    tokens = torch.randint(20, (2, 7))
    mask = padding_mask(torch.tensor([7, 4]), 7)
    reader = Encoder(20, 8, [encoder], norm=LayerNorm).double()
    assert reader(tokens, mask=mask).shape == (2, 7, 8)
    writer = LanguageModel(20, 8, [encoder], norm=LayerNorm).double()
    logits = writer(tokens)
    other = tokens.clone()
    other[:, 5] = (other[:, 5] + 1) % 20
    assert writer(other)[:, :5].equal(logits[:, :5])
    assert not writer(other)[:, 5:].equal(logits[:, 5:])


def test_hierarchy_reads_a_context_at_every_level():
    def crossed():
        attns = MultiHeadAttention(8, 2), MultiHeadAttention(8, 2)
        return PostNormBlock(8, attns[0], FeedForward(8, 16), cross=attns[1])

    encoder = HierarchicalEncoder(8, [crossed(), crossed()], every=1).double()
    x, context = torch.randn(2, 5, 8).double(), torch.randn(2, 6, 8).double()
    mask = padding_mask(torch.tensor([6, 3]), 6)
    got = encoder(x, context=context, context_mask=mask)
    alone = encoder(x[1:], context=context[1:, :3])
    assert_close(got[1:], alone, rtol=0, atol=1e-12)


def test_hierarchy_refuses_what_it_cannot_shorten():
    encoder, x = make_hierarchy(2, 1, 2, 3), torch.randn(2, 6, 8).double()
    with pytest.raises(ValueError, match=r"x must be \(B, T, C\), got .*=\(6, 8\)"):
        encoder(x[0])
    for shape in (
        (6, 6),
        (2, 6),
        (2, 1, 6, 6),
        (2, 2, 1, 6),
        (2, 1, 1, 5),
        (3, 1, 1, 6),
    ):
        with pytest.raises(ValueError, match=r"mask must be one of padding, \(B, 1, 1"):
            encoder(x, mask=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(TypeError, match="mask must be bool"):
        encoder(x, mask=torch.ones(2, 1, 1, 6))
    with pytest.raises(ValueError, match="positions that a shortened text does not"):
        encoder(x, prepare=lambda *given: given)


def test_hierarchy_refuses_counts():
    with pytest.raises(ValueError, match=r"^n_blocks must be a whole number from 1"):
        HierarchicalEncoder(8, [])
    with pytest.raises(ValueError, match=r"over the stride, got kernel=2, stride"):
        HierarchicalEncoder(8, [make_block()], stride=3, kernel=2)
    for name in ("every", "stride", "kernel"):
        with pytest.raises(ValueError, match=rf"^{name} must be a whole number from 1"):
            HierarchicalEncoder(8, [make_block()], **{name: 0})


# --- memory tokens -------------------------------------------------------------------


def test_memory_tokens_stand_in_front():
    memory = MemoryTokens(3, 8)
    assert memory.weight.shape == (3, 8) and memory.count == 3
    for shape in ((5, 8), (2, 5, 8), (2, 3, 5, 8), (2, 0, 8)):
        x = torch.randn(shape)
        front, text = memory.split(memory(x))
        assert text.equal(x) and front.equal(memory.weight.expand_as(front))
    up = torch.randn(2, 8, 8)
    (slope,) = torch.autograd.grad(memory(torch.randn(2, 5, 8)), memory.weight, up)
    assert_close(slope, up[:, :3].sum(0))  # every text teaches them


@pytest.mark.parametrize("shape", [(5, 5), (2, 1, 1, 5), (2, 3, 5, 5), (1, 5)])
def test_widened_mask_equals_loops(shape):
    torch.manual_seed(0)
    mask, memory = torch.rand(shape) < 0.5, MemoryTokens(3, 8)
    got = memory.widen(mask)
    n_rows = shape[-2]
    assert got.shape == (*shape[:-2], n_rows + 3 * (n_rows > 1), 8)
    for old, new in zip(
        mask.reshape(-1, n_rows, 5), got.reshape(-1, got.size(-2), 8), strict=True
    ):
        for row in range(new.size(0)):
            for column in range(8):
                if column < 3:
                    want = True
                elif n_rows > 1 and row < 3:
                    want = bool(old[:, column - 3].any())
                else:
                    want = bool(old[row - 3 * (n_rows > 1), column - 3])
                assert new[row, column] == want


@pytest.mark.parametrize("kind", [PreNormBlock, PostNormBlock])
def test_memory_with_padding_equals_each_text_alone(kind, conform):
    torch.manual_seed(2)
    memory, block = MemoryTokens(3, 8).double(), make_block(kind=kind)
    x, lengths = torch.randn(3, 6, 8).double(), torch.tensor([6, 4, 1])
    got = block(memory(x), mask=memory.widen(padding_mask(lengths, 6)))
    for row, text, n in zip(got, x, lengths.tolist(), strict=True):
        alone = block(memory(text[None, :n]))[0]
        how = {"reference": "each text alone", "atol": 1e-10}
        conform("MemoryTokens", "ragged", row[: n + 3], alone, **how)


def test_memory_is_a_models_positions_and_causal_memory_reads_nothing():
    torch.manual_seed(2)
    blocks = [make_block(), make_block()]
    memory = MemoryTokens(3, 8)
    model = LanguageModel(20, 8, blocks, positions=memory, norm=LayerNorm).double()
    first, second = (model(torch.randint(20, (2, 5))) for _ in range(2))
    assert first.shape == (2, 8, 20)
    assert first[:, :3].equal(second[:, :3]) and not first.equal(second)


def test_memory_tokens_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match=r"^n_tokens must be a whole number from 1"):
        MemoryTokens(0, 8)
    with pytest.raises(ValueError, match=r"^x must have 8 features, got"):
        MemoryTokens(2, 8)(torch.randn(2, 5, 7))
    with pytest.raises(TypeError, match=r"^mask must be bool"):
        MemoryTokens(2, 8).widen(torch.ones(5, 5))


# --- recurrence ----------------------------------------------------------------------


def seen_in_segments(lengths: list[int], kept: int) -> torch.Tensor:
    """(n, n) bool: a segment up to the query, and `kept` tokens before the segment."""
    rows, n = [], sum(lengths)
    starts = [0, *itertools.accumulate(lengths)]
    for start, length in zip(starts, lengths, strict=False):
        for i in range(start, start + length):
            rows.append([start - kept <= j <= i for j in range(n)])
    return torch.tensor(rows)


def in_segments(blocks, x, lengths, kept, mask=None):
    """What blocks give for x (B, T, C), read in segments."""
    memories, outs = [SegmentMemory(kept) for _ in blocks], []
    masks = [None] * len(lengths) if mask is None else mask.split(lengths, -1)
    for part, seen in zip(x.split(lengths, 1), masks, strict=True):
        for block, memory in zip(blocks, memories, strict=True):
            part = block(part, mask=seen, causal=True, prepare=memory)
        outs.append(part)
    return torch.cat(outs, 1)


CUTS = [([4, 4, 4], 4), ([4, 4, 4], 100), ([1] * 12, 3), ([5, 3, 4], 6), ([12], 2)]


@pytest.mark.parametrize("layer", ["plain", "grouped", "relative"])
@pytest.mark.parametrize("lengths, kept", CUTS)
def test_segments_equal_one_pass_with_their_mask(lengths, kept, layer, conform):
    torch.manual_seed(4)
    make = {
        "plain": lambda: MultiHeadAttention(8, 2),
        "grouped": lambda: GroupedQueryAttention(8, 4, 2),
        "relative": lambda: RelativeAttention(8, 2),
    }[layer]
    blocks = [PreNormBlock(8, make(), FeedForward(8, 16)).double() for _ in range(3)]
    x = torch.randn(2, 12, 8, dtype=torch.float64)
    got = in_segments(blocks, x, lengths, kept)
    for block in blocks:
        x = block(x, mask=seen_in_segments(lengths, kept), causal=True)
    how = {"reference": "one pass with a mask", "atol": 1e-10}
    conform("SegmentMemory", "cached", got, x, **how)


@pytest.mark.parametrize("lengths, kept", CUTS)
def test_segments_of_padded_texts_equal_one_pass(lengths, kept, conform):
    torch.manual_seed(4)
    blocks = [make_block() for _ in range(2)]
    x, mask = torch.randn(3, 12, 8).double(), torch.rand(3, 1, 1, 12) < 0.7
    got = in_segments(blocks, x, lengths, kept, mask)
    for block in blocks:
        x = block(x, mask=mask & seen_in_segments(lengths, kept), causal=True)
    how = {"reference": "one pass with a mask", "atol": 1e-10}
    conform("SegmentMemory", "mask", got, x, **how)


def test_masks_may_come_and_go():
    torch.manual_seed(4)
    block, x = make_block(), torch.randn(2, 9, 8).double()
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[:, :, :, 3:5] = False
    for shown in ((True, False, True), (False, True, False)):
        memory, outs = SegmentMemory(100), []
        whole = torch.ones_like(mask)
        for i, (part, seen, show) in enumerate(
            zip(x.split(3, 1), mask.split(3, -1), shown, strict=True)
        ):
            if show:
                whole[..., 3 * i : 3 * i + 3] = seen
            how = {"mask": seen if show else None, "causal": True}
            outs.append(block(part, **how, prepare=memory))
        assert_close(torch.cat(outs, 1), block(x, mask=whole, causal=True))


def test_segments_of_a_model_with_rotations_equal_one_pass():
    torch.manual_seed(4)
    blocks = [make_block() for _ in range(2)]
    how = {"rope": RoPE(4), "norm": LayerNorm}
    model, tokens = (
        LanguageModel(20, 8, blocks, **how).double(),
        torch.randint(20, (2, 11)),
    )
    memories, outs = [SegmentMemory(100) for _ in blocks], []
    for places in torch.arange(11).split(4):
        prepare = memories.__getitem__
        outs.append(model(tokens[:, places], positions=places, prepare=prepare))
    assert_close(torch.cat(outs, 1), model(tokens), rtol=0, atol=1e-10)


def test_equals_the_layers_inputs_in_memory_but_for_one_gradient():
    torch.manual_seed(5)
    layer = RelativeAttention(8, 2).double()
    old, new = torch.randn(2, 3, 4, 8, dtype=torch.float64).unbind()
    memory = SegmentMemory(4)
    layer(old, causal=True, prepare=memory)
    here = layer(new, causal=True, prepare=memory)
    there = layer(new, causal=True, memory=old)
    assert_close(here, there, rtol=0, atol=1e-12)
    slopes = [torch.autograd.grad(y.sum(), layer.qkv.weight)[0] for y in (here, there)]
    assert_close(slopes[0][:8], slopes[1][:8])  # queries
    assert not slopes[0][8:16].allclose(slopes[1][8:16])  # keys of the memory


def test_no_gradient_into_memory():
    torch.manual_seed(5)
    block, memory = make_block(), SegmentMemory(4)
    first, second = torch.randn(2, 1, 4, 8, dtype=torch.float64).unbind()
    block(first.requires_grad_(), causal=True, prepare=memory)
    assert not any(x.requires_grad for x in memory.kept[:2])
    out = block(second.requires_grad_(), causal=True, prepare=memory)
    assert torch.autograd.grad(out.sum(), first, allow_unused=True) == (None,)
    alone = block(second, causal=True)
    assert not alone.allclose(out)


def test_memory_keeps_no_more_than_it_may():
    memory = SegmentMemory(5)
    for n, want in ((3, 3), (3, 5), (9, 5), (1, 5), (0, 5)):
        k = torch.randn(1, 2, n, 4)
        _, wide, _, _ = memory(k, k, k, None)
        assert memory.kept[0].size(-2) == want and wide.size(-2) >= n
    memory.clear()
    assert memory(k, k, k, None)[1].size(-2) == 0


def test_memory_of_other_texts_is_refused():
    memory = SegmentMemory(5)
    x = torch.randn(2, 2, 3, 4)
    memory(x, x, x, None)
    for other in (x[:1], x[:, :1], x[..., :3]):
        with pytest.raises(ValueError, match=r"other texts, clear\(\) it first, kept"):
            memory(other, other, other, None)
    with pytest.raises(ValueError, match=r"^n_tokens must be a whole number from 1"):
        SegmentMemory(0)


# --- the store -----------------------------------------------------------------------


def store_by_hand(memory, q, k, v, lengths, top, mask=None):
    """Causal attention in each segment, the best keys of all earlier ones, the gate."""
    outs, start = [], 0
    gate = memory.gate.sigmoid()[:, None, None]
    for n in lengths:
        here, before = slice(start, start + n), slice(0, start)
        seen = causal_mask(n)
        seen = seen if mask is None else seen & mask[..., here]
        own = plain(q[:, :, here], k[:, :, here], v[:, :, here], seen)
        if start:
            old = None if mask is None else mask[..., before]
            of = q[:, :, here], k[:, :, before].detach()
            best = best_of(*of, old, False, top)
            found = plain(*of, v[:, :, before].detach(), best)
            share = gate if old is None else gate * old.any(-1, keepdim=True)
            own = share * found + (1 - share) * own
        outs.append(own)
        start += n
    return torch.cat(outs, 2)


def read_in_segments(memory, q, k, v, lengths, mask=None):
    """What the store's `attend` gives, segment by segment."""
    memory.store.clear()
    masks = [None] * len(lengths) if mask is None else mask.split(lengths, -1)
    parts = zip(*(x.split(lengths, 2) for x in (q, k, v)), masks, strict=True)
    return torch.cat([memory(*part, causal=True) for part in parts], 2)


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("top", [1, 3, 100])
@pytest.mark.parametrize("lengths", [[4, 4, 4], [1, 8, 3], [12]])
def test_store_equals_loops(lengths, top, masked, n_kv_heads, conform):
    torch.manual_seed(6)
    memory = ExternalMemory(4, top).double()
    memory.gate.data.normal_()
    shape = (3, 4, 12, 8), (3, n_kv_heads, 12, 8), 5
    *inputs, upstream = make_inputs(*shape)
    mask = None
    if masked:
        mask = torch.rand(3, 1, 1, 12) < 0.6
        mask[2, ..., :8] = False  # a text of padding, as far as the store goes
    got = with_gradients(
        lambda *x: read_in_segments(memory, *x, lengths, mask), inputs, upstream
    )
    want = with_gradients(
        lambda *x: store_by_hand(memory, *x, lengths, top, mask), inputs, upstream
    )
    column, how = "mask" if masked else "forward", {"reference": LOOPS, "atol": 1e-10}
    conform("ExternalMemory", column, got[0], want[0], **how)
    conform("ExternalMemory", "gradient", got[1:], want[1:], **how)


def test_gate_learns_and_the_store_does_not():
    torch.manual_seed(6)
    memory = ExternalMemory(2, 3).double()
    q, k, v = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64).unbind()
    first = [x[:, :, :4].clone().requires_grad_() for x in (q, k, v)]
    memory(*first, causal=True)
    out = memory(*(x[:, :, 4:] for x in (q, k, v)), causal=True)
    assert torch.autograd.grad(out.sum(), memory.gate, retain_graph=True)[0].all()
    slopes = torch.autograd.grad(out.sum(), first, allow_unused=True)
    assert slopes == (None, None, None)
    assert list(memory.state_dict()) == ["gate"]


def test_empty_store_changes_nothing():
    memory = ExternalMemory(2, 3)
    memory.gate.data.fill_(9)
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    assert memory(q, k, v, causal=True).equal(memory.attend(q, k, v, None, True))
    assert len(memory.store) == 8
    memory.store.clear()
    assert len(memory.store) == 0


@pytest.mark.parametrize("capacity", [1, 5, 8, 100])
def test_store_keeps_the_newest(capacity):
    store = KeyValueStore(capacity)
    k, v = torch.randn(2, 1, 2, 12, 4).unbind()
    mask = torch.rand(1, 1, 1, 12) < 0.5
    for part in zip(k.split(5, 2), v.split(5, 2), mask.split(5, -1), strict=True):
        store.write(*part)
    n, kept = min(capacity, 12), store.kept
    assert len(store) == n and kept[0].equal(k[:, :, -n:])
    assert kept[1].equal(v[:, :, -n:]) and kept[2].equal(mask[..., -n:])


def test_share_of_one_is_the_store_alone_and_finds_the_one_key():
    memory = ExternalMemory(2, 1)
    memory.gate.data.fill_(100)
    k, v = F.normalize(torch.randn(2, 1, 2, 500, 16), dim=-1).unbind()
    memory.store.write(k, v)
    q = 50 * k[:, :, [3, 250, 499]]
    assert_close(memory(q, q, q, causal=True), v[:, :, [3, 250, 499]])


def test_store_without_batch_and_with_masks_that_come_late():
    memory = ExternalMemory(2, 2)
    q, k, v = torch.randn(3, 2, 6, 4).unbind()
    first, second = ([x[:, i : i + 3] for x in (q, k, v)] for i in (0, 3))
    memory(*first, causal=True)
    hidden = torch.tensor([[True, True, False]])
    out = memory(*second, hidden, causal=True)
    assert out.shape == (2, 3, 4) and len(memory.store) == 6
    found = memory.search(100 * k[:, 5:], *memory.store.kept)  # its own key is hidden
    assert not found[:, 0].allclose(v[:, 5])


def test_store_is_an_attend_of_whole_models():
    torch.manual_seed(7)
    attns = [
        MultiHeadAttention(8, 2),
        MultiHeadAttention(8, 2, attend=ExternalMemory(2, 3)),
        GroupedQueryAttention(8, 2, 1, attend=ExternalMemory(2, 3)),
    ]
    blocks = [PreNormBlock(8, attn, FeedForward(8, 16)) for attn in attns]
    model = LanguageModel(20, 8, blocks, norm=LayerNorm).double()
    names = [name for name, _ in model.named_parameters() if "gate" in name]
    assert names == ["blocks.1.attn.attend.gate", "blocks.2.attn.attend.gate"]
    tokens = torch.randint(20, (2, 12))
    outs = [model(part) for part in tokens.split(4, 1)]
    assert len(attns[1].attend.store) == 12 and not torch.cat(outs, 1).isnan().any()
    attns[1].attend.store.clear()
    attns[2].attend.store.clear()
    other = tokens.clone()
    other[:, 0] += 1
    others = [model(part % 20) for part in other.split(4, 1)]
    assert not others[2].equal(outs[2])  # the first token is heard in the last segment


def test_store_refuses_what_does_not_fit():
    for name in ("n_heads", "k", "capacity"):
        how = {"n_heads": 2, "k": 3} | {name: 0}
        with pytest.raises(ValueError, match=rf"^{name} must be a whole number from 1"):
            ExternalMemory(**how)
    memory, x = ExternalMemory(2, 3), torch.randn(2, 2, 3, 4)
    with pytest.raises(ValueError, match=r"^queries must have 2 heads, got"):
        memory(x[:, :1], x[:, :1], x[:, :1])
    memory(x, x, x)
    with pytest.raises(ValueError, match=r"other texts, clear\(\) it first"):
        memory(x[:1], x[:1], x[:1])


def test_search_equals_a_nearest_neighbour_search():
    """Of unit vectors the largest product is the smallest distance."""
    torch.manual_seed(8)
    k = F.normalize(torch.randn(1, 1, 300, 8, dtype=torch.float64), dim=-1)
    q = F.normalize(torch.randn(1, 1, 20, 8, dtype=torch.float64), dim=-1)
    weights = top_k_attention(4)(q, k, torch.eye(300).double()[None, None])
    near = torch.cdist(q[0, 0], k[0, 0]).topk(4, largest=False).indices
    found = (weights[0, 0] > 0).nonzero()[:, 1].view(20, 4)
    assert found.equal(near.sort(-1).values)
