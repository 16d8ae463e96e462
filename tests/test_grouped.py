"""What `GroupedQueryAttention` promises, and that others' models come out the same."""

import copy
import itertools
import re

import pytest
import torch
from attention_oracle import (
    DEVICES,
    HALF,
    assert_as_exact,
    by_hand,
    plain,
    with_gradients,
)
from blocks_oracle import randomise
from side_by_side import peak_bytes
from torch import nn
from torch.autograd import gradcheck
from torch.nn import functional as F
from torch.testing import assert_close

from transformer.attention import (
    MultiHeadAttention,
    attention,
    causal_mask,
    fused_attention,
    padding_mask,
    split_heads,
)
from transformer.blocks import PostNormBlock, PreNormBlock
from transformer.feedforward import FeedForward
from transformer.grouped import (
    GroupedQueryAttention,
    grouped_attention,
    kv_cache_bytes,
    pool_kv_heads,
)
from transformer.model import LanguageModel
from transformer.norms import LayerNorm
from transformer.positions import RoPE

each_device = pytest.mark.parametrize("device", DEVICES)
ATTENDS = [attention, fused_attention, grouped_attention]
each_attend = pytest.mark.parametrize("attend", ATTENDS, ids=lambda f: f.__name__)
MODULES = {  # d_model, n_heads, n_kv_heads, keywords
    "groups": (12, 4, 2, {}),
    "biased groups": (12, 6, 3, {"bias": True}),
    "one shared": (12, 6, 1, {"bias": True}),
    "none shared": (12, 3, 3, {}),
    "one head": (6, 1, 1, {}),
    "wide heads": (6, 4, 2, {"d_head": 5, "bias": True}),
    "odd width": (7, 4, 1, {"d_head": 3}),
}
INPUTS = {  # shapes of x and of context, without the features
    "self": ((2, 5), None),
    "one token": ((2, 1), None),
    "no batch": ((4,), None),
    "two batches": ((2, 1, 3), None),
    "context": ((2, 3), (2, 5)),
    "one token reads": ((3, 1), (3, 5)),
    "shared context": ((2, 3), (4,)),
}


def make(name: str, attend=fused_attention, dtype=torch.float64, seed=0):
    """A module with random weights, biases included."""
    *shape, how = MODULES[name]
    torch.manual_seed(seed)
    module = GroupedQueryAttention(*shape, attend=attend, **how)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.to(dtype)


def inputs_for(module, name: str):
    """x and context, in the dtype of the module."""
    torch.manual_seed(1)
    width, dtype = module.qkv.in_features, module.qkv.weight.dtype
    shapes = [None if shape is None else (*shape, width) for shape in INPUTS[name]]
    return [None if shape is None else torch.randn(shape).to(dtype) for shape in shapes]


def head_by_head(module, x, context=None, mask=None, causal=False):
    """The same, one query head after the other, each on its own rows of the weights."""
    context = x if context is None else context
    h_all, k_all = module.n_heads, module.n_kv_heads
    d, out = module.out.in_features // h_all, 0
    starts = 0, h_all * d, (h_all + k_all) * d  # rows of q, of k, of v
    for h in range(h_all):
        parts = []
        places = h, h // (h_all // k_all), h // (h_all // k_all)
        for start, place, source in zip(
            starts, places, (x, context, context), strict=True
        ):
            rows = slice(start + place * d, start + (place + 1) * d)
            part = source @ module.qkv.weight[rows].mT
            bias = module.qkv.bias
            parts.append(part if bias is None else part + bias[rows])
        of_head = mask
        if mask is not None and mask.dim() > 2:
            of_head = mask.select(-3, h if mask.size(-3) > 1 else 0).unsqueeze(-3)
        heads = (part.unsqueeze(-3) for part in parts)
        found = by_hand(*heads, of_head, causal)[0].squeeze(-3)
        out = out + found @ module.out.weight[:, h * d : (h + 1) * d].mT
    return out if module.out.bias is None else out + module.out.bias


def mask_for(module, x, context, kind: str):
    """A mask in which the first query sees nothing."""
    t, s = x.size(-2), (x if context is None else context).size(-2)
    torch.manual_seed(2)
    full = torch.rand(*x.shape[:-2], module.n_heads, t, s) < 0.6
    full[..., 0, :] = False
    shared = full[..., :1, :, :] if full.dim() > 3 else full
    masks = {"heads": full, "one for all": shared, "rows": full.flatten(0, -3)[0]}
    return masks.get(kind)


HEAD_BY_HEAD = {"reference": "loops in float64, head by head", "atol": 1e-10}


# --- values and gradients --------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "causal", "heads", "one for all", "rows"])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", MODULES)
@each_attend
def test_equals_query_heads_one_by_one(attend, name, inputs, kind, conform):
    module = make(name, attend)
    x, context = inputs_for(module, inputs)
    mask, causal = mask_for(module, x, context, kind), kind == "causal"
    leaves = [x, *([] if context is None else [context]), *module.parameters()]
    for leaf in leaves:
        leaf.requires_grad_()
    got = module(x, context, mask=mask, causal=causal)
    want = head_by_head(module, x, context, mask, causal)
    column = "forward" if kind == "none" else "mask"
    conform("GroupedQueryAttention", column, got, want, **HEAD_BY_HEAD)
    upstream = torch.randn_like(got)
    slopes = torch.autograd.grad(got, leaves, upstream)
    expected = torch.autograd.grad(want, leaves, upstream)
    conform("GroupedQueryAttention", "gradient", slopes, expected, **HEAD_BY_HEAD)


@each_attend
@pytest.mark.parametrize("inputs", ["self", "one token", "context"])
@pytest.mark.parametrize("bias", [False, True])
def test_as_many_heads_give_the_bits_of_multi_head_attention(bias, inputs, attend):
    torch.manual_seed(3)
    plain_one = MultiHeadAttention(12, 4, bias=bias, attend=attend)
    shared = GroupedQueryAttention(12, 4, 4, bias=bias, attend=attend)
    shared.load_state_dict(plain_one.state_dict(), strict=True)
    x, context = inputs_for(shared, inputs)
    outs = []
    for module in (plain_one, shared):
        out = module(x, context, causal=True)
        outs.append(
            [out, *torch.autograd.grad(out.square().sum(), module.parameters())]
        )
    assert all(a.equal(b) for a, b in zip(*outs, strict=True))


def test_as_many_heads_start_as_multi_head_attention():
    modules = []
    for kind, counts in ((MultiHeadAttention, (4,)), (GroupedQueryAttention, (4, 4))):
        torch.manual_seed(4)
        modules.append(kind(12, *counts, bias=True).state_dict())
    assert modules[0].keys() == modules[1].keys()
    assert all(modules[0][name].equal(modules[1][name]) for name in modules[0])


def test_gradcheck():
    module = make("biased groups")
    x = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: module(x, causal=True), x)


@pytest.mark.parametrize("name", MODULES)
def test_half_precision_is_as_exact_as_the_formula(name, conform):
    module = make(name, dtype=torch.float32)
    x = inputs_for(module, "self")[0]
    with torch.no_grad():
        want = copy.deepcopy(module).double()(x.double(), causal=True)
        got = module.bfloat16()(x.bfloat16(), causal=True)
    how = {"reference": "itself in float64", "rtol": 0.03, "atol": 0.1}
    conform("GroupedQueryAttention", "dtype", got.double(), want, **how)


# --- one new token ----------------------------------------------------------------


def some_heads(h, n_kv, t, s, lead=(3,), e=6):
    torch.manual_seed(5)
    how = {"dtype": torch.float64}
    q = torch.randn(*lead, h, t, 4, **how)
    return (
        q,
        torch.randn(*lead, n_kv, s, 4, **how),
        torch.randn(*lead, n_kv, s, e, **how),
    )


@each_device
@pytest.mark.parametrize("t", [0, 1, 2])
@pytest.mark.parametrize("s", [0, 1, 7])
@pytest.mark.parametrize("lead", [(3,), (), (2, 3), (0,)])
@pytest.mark.parametrize("counts", [(4, 4), (4, 2), (6, 2), (4, 1)])
def test_grouped_attention_equals_the_formula(counts, lead, s, t, device, conform):
    q, k, v = (x.to(device) for x in some_heads(*counts, t, s, lead))
    h, masks = counts[0], [None]
    for shape in [(*lead, h, t, s), (*lead, 1, t, s), (h, 1, s), (t, s)]:
        masks.append((torch.rand(shape) < 0.5).to(device))
    for mask, causal in itertools.product(masks, [False, True]):
        got = grouped_attention(q, k, v, mask, causal)
        want = plain(q, k, v, mask, causal)
        assert_close(got, want, rtol=0, atol=1e-12)
        column = "forward" if mask is None and not causal else "mask"
        how = {"reference": "the formula in float64", "atol": 1e-12}
        if got.numel():
            conform("grouped_attention", column, got, want, **how)


@each_device
@pytest.mark.parametrize("counts", [(4, 2), (8, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_grouped_attention_is_as_exact_as_its_peers(dtype, counts, device, conform):
    inputs = [x.to(device, dtype) for x in some_heads(*counts, 1, 65, e=4)]
    upstream = torch.randn(3, counts[0], 1, 4)
    exact = with_gradients(plain, [x.double() for x in inputs], upstream.to(device))
    found = [
        with_gradients(attend, inputs, upstream.to(device))
        for attend in (grouped_attention, plain, fused_attention)
    ]
    assert_as_exact(found[0], exact, *found[1:])
    column = "gradient" if dtype == torch.float32 else "dtype"
    how = {"reference": "the formula in float64"}
    conform.record("grouped_attention", column, found[0], exact, **how)


def test_grouped_attention_gives_zeros_and_finite_gradients_where_none_is_seen():
    inputs = [x.requires_grad_() for x in some_heads(4, 2, 1, 5)]
    mask = torch.zeros(3, 4, 1, 5, dtype=torch.bool)
    mask[:, 1] = True  # one head of the first group sees
    out = grouped_attention(*inputs, mask)
    assert (out[:, [0, 2, 3]] == 0).all() and (out[:, 1] != 0).all()
    slopes = torch.autograd.grad(out.sum(), inputs)
    assert all(slope.isfinite().all() for slope in slopes)


def test_heads_of_width_one_are_not_taken_for_one_query():
    q, k = (
        torch.randn(4, 3, 1),
        torch.randn(2, 5, 1),
    )
    assert_close(grouped_attention(q, k, k), attention(q, k, k))


def test_grouped_attention_refuses_what_attention_refuses():
    q, k, v = some_heads(4, 2, 1, 5)
    with pytest.raises(TypeError, match="mask must be bool"):
        grouped_attention(q, k, v, torch.ones(1, 5))
    with pytest.raises(ValueError, match="heads of q must be a multiple"):
        grouped_attention(q[:, :3], k, v)


@pytest.mark.parametrize("shape", [(2, 2, 1, 5), (2, 1, 5), (1, 4), (1, 2, 4, 1, 5)])
def test_grouped_attention_refuses_masks_that_do_not_broadcast(shape):
    """A mask for each key-value head is no mask for each query head."""
    q, k, v = some_heads(4, 2, 1, 5, (2,))
    with pytest.raises(ValueError, match="mask must broadcast to the scores"):
        grouped_attention(q, k, v, torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(), (5,), (1, 1, 5), (3, 1, 1, 5)])
def test_grouped_attention_of_queries_that_many_texts_share(shape):
    q, k, v = some_heads(4, 2, 1, 5)
    mask = torch.rand(shape) < 0.7
    got = grouped_attention(q[0], k, v, mask)
    assert_close(got, plain(q[0], k, v, mask), rtol=0, atol=1e-12)
    assert got.shape == (3, 4, 1, 6)


# --- memory -----------------------------------------------------------------------


@each_device
@pytest.mark.parametrize("attend", [fused_attention, grouped_attention])
@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_keys_and_values_are_not_copied_for_a_new_token(n_kv_heads, attend, device):
    module = GroupedQueryAttention(128, 16, n_kv_heads, d_head=64, attend=attend)
    module.to(device)
    k, v = torch.randn(2, 1, n_kv_heads, 8192, 64, device=device)
    x = torch.randn(1, 1, 128, device=device)

    @torch.no_grad()
    def step():
        return module(x, prepare=lambda q, *_: (q, k, v, None))

    one_copy = k.numel() * k.element_size()
    assert peak_bytes(step, device) < one_copy / 4
    module.attend = attention
    assert peak_bytes(step, device) > 16 / n_kv_heads * one_copy


@each_device
@pytest.mark.parametrize("backward", [False, True])
def test_sharing_does_not_add_memory_to_a_whole_text(backward, device):
    """With fewer key-value heads a pass holds less; with copies it would hold more."""
    found = {}
    for n_kv_heads in (8, 1):
        module = GroupedQueryAttention(64, 8, n_kv_heads, d_head=32).to(device)
        x = torch.randn(1, 2048, 64, device=device, requires_grad=backward)

        def run(module=module, x=x):
            with torch.set_grad_enabled(backward):
                out = module(x, causal=True)
                return torch.autograd.grad(out.sum(), x) if backward else out

        found[n_kv_heads] = peak_bytes(run, device)
    less = 2 * 7 * 2048 * 32 * 4  # keys and values that are not there
    assert found[1] <= found[8] - 0.9 * less


# --- in a model ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PreNormBlock, PostNormBlock])
def test_works_in_every_block_with_cross_attention(kind):
    attns = [GroupedQueryAttention(12, 4, n) for n in (2, 1)]
    block = kind(12, attns[0], FeedForward(12, 20), cross=attns[1])
    x, context = torch.randn(2, 5, 12), torch.randn(2, 3, 12)
    seen = []
    out = block(
        x,
        causal=True,
        context=context,
        context_mask=padding_mask(torch.tensor([3, 2]), 3),
        prepare=lambda q, k, v, mask: seen.append(k.shape) or (q, k, v, mask),
    )
    assert seen == [(2, 2, 5, 3)]
    changed = context.clone()
    changed[1, 2] += 1  # padding
    mask = padding_mask(torch.tensor([3, 2]), 3)
    again = block(x, causal=True, context=changed, context_mask=mask)
    assert again.equal(out)


@torch.no_grad()
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@each_attend
def test_a_cache_of_shared_heads_continues_a_text(attend, n_kv_heads, conform):
    torch.manual_seed(6)
    blocks = [
        PreNormBlock(
            16, GroupedQueryAttention(16, 4, n_kv_heads, attend=attend), FeedForward(16)
        )
        for _ in range(2)
    ]
    model = LanguageModel(30, 16, blocks, rope=RoPE(4), norm=LayerNorm).double()
    tokens = torch.randint(30, (2, 7))
    past = [None, None]

    def prepare(i):
        def append(q, k, v, mask):
            if past[i] is not None:
                k, v = (
                    torch.cat(pair, -2) for pair in zip(past[i], (k, v), strict=True)
                )
            past[i] = k, v
            return q, k, v, mask

        return append

    whole = model(tokens)
    steps = [range(0, 3), range(3, 4), range(4, 5), range(5, 7)]
    parts = [
        model(tokens[:, list(at)], positions=torch.tensor(at), prepare=prepare)
        for at in steps
    ]
    assert past[0][0].shape == (2, n_kv_heads, 7, 4)
    how = {"reference": "the whole text at once", "atol": 1e-12}
    conform("GroupedQueryAttention", "cached", torch.cat(parts, 1), whole, **how)


def test_compiles_whole(conform):
    torch.compiler.reset()
    module = make("groups", grouped_attention, torch.float32)
    whole = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, one = torch.randn(2, 5, 12), torch.randn(2, 1, 12)
    how = {"reference": "itself, not compiled", "atol": 1e-6}
    got = [whole(x, causal=True), whole(one)]
    want = [module(x, causal=True), module(one)]
    conform("GroupedQueryAttention", "compile", got, want, **how)


def test_ragged_texts_do_not_see_their_padding(conform):
    module = make("groups")
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    got = module(x, mask=padding_mask(torch.tensor([5, 3]), 5), causal=True)
    want = module(x[1:, :3], causal=True)
    how = {"reference": "the text alone", "atol": 1e-12}
    conform("GroupedQueryAttention", "ragged", got[1:, :3], want, **how)


# --- errors -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            (12, 6, 4),
            "n_heads must be a multiple of n_kv_heads, got n_heads=6, n_kv_he",
        ),
        (
            (12, 2, 4),
            "n_heads must be a multiple of n_kv_heads, got n_heads=2, n_kv_he",
        ),
        ((12, 4, 0), "n_kv_heads must be a whole number from 1, got n_kv_heads=0"),
        ((12, 4, -1), "n_kv_heads must be a whole number from 1, got n_kv_heads=-1"),
        ((12, 4, 2.0), "n_kv_heads must be a whole number from 1, got n_kv_heads=2.0"),
        (
            (12, 4, True),
            "n_kv_heads must be a whole number from 1, got n_kv_heads=True",
        ),
        ((12, 4.0, 2), "n_heads must be a whole number from 1, got n_heads=4.0"),
        ((12, True, 1), "n_heads must be a whole number from 1, got n_heads=True"),
        ((12.0, 4, 2), "d_model must be a whole number from 1, got d_model=12.0"),
        (
            (12, 5, 1),
            "d_model must be a multiple of n_heads, got d_model=12, n_heads=5",
        ),
    ],
)
def test_counts_that_do_not_fit_are_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as found:
        GroupedQueryAttention(*arguments)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("width", [0, 2.0, True, -3])
def test_width_of_a_head_must_be_a_whole_number(width):
    with pytest.raises(ValueError, match=f"d_head must be .*{re.escape(repr(width))}"):
        GroupedQueryAttention(12, 4, 2, d_head=width)


def test_inputs_that_do_not_fit_are_refused():
    module = make("groups", dtype=torch.float32)
    x = torch.randn(2, 5, 12)
    for given, name in (((x[..., :7],), "x"), ((x, x[..., :7]), "context")):
        with pytest.raises(ValueError, match=f"features must be 12, got {name}"):
            module(*given)
    with pytest.raises(ValueError, match="mask needs a heads dimension"):
        module(x, mask=causal_mask(5).expand(2, 5, 5))
    with pytest.raises(TypeError, match="mask must be bool"):
        module(x, mask=torch.ones(5, 5))


# --- fewer heads from many ----------------------------------------------------------


def projected(module, x):
    """Keys and values of a layer, heads split."""
    h, n = module.n_heads, getattr(module, "n_kv_heads", module.n_heads)
    d = module.out.in_features // h
    _, k, v = module.qkv(x).split([h * d, n * d, n * d], -1)
    return split_heads(k, n), split_heads(v, n)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 3, 6])
def test_pooled_heads_give_the_mean_key_and_value_of_their_group(n_kv_heads, bias):
    plain_one = randomise(MultiHeadAttention(12, 6, bias=bias)).double()
    pooled = pool_kv_heads(plain_one, n_kv_heads)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    pairs = zip(projected(plain_one, x), projected(pooled, x), strict=True)
    for many, few in pairs:
        groups = many.unflatten(1, (n_kv_heads, 6 // n_kv_heads))
        assert_close(few, groups.mean(2), rtol=0, atol=1e-12)
    q_rows = 12
    assert pooled.qkv.weight[:q_rows].equal(plain_one.qkv.weight[:q_rows])
    assert pooled.out.weight.equal(plain_one.out.weight)


def test_pooling_equal_heads_changes_nothing():
    shared = make("one shared", seed=7)
    d, h = 2, 6
    state = shared.state_dict()
    for name in ("qkv.weight", "qkv.bias"):
        q, k, v = state[name].split([h * d, d, d])
        tile = [h, *[1] * (k.dim() - 1)]
        state[name] = torch.cat([q, k.repeat(tile), v.repeat(tile)])
    copies = MultiHeadAttention(12, 6, bias=True).double()
    copies.load_state_dict(state)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    for n_kv_heads in (1, 2, 3):
        pooled = pool_kv_heads(copies, n_kv_heads)
        assert_close(pooled(x, causal=True), shared(x, causal=True), rtol=0, atol=1e-12)


def test_pooling_to_as_many_heads_keeps_the_bits_and_shares_no_memory():
    plain_one = MultiHeadAttention(12, 4, bias=True)
    pooled = pool_kv_heads(plain_one, 4)
    x = torch.randn(2, 5, 12)
    want = plain_one(x)
    assert pooled(x).equal(want)
    with torch.no_grad():
        for parameter in pooled.parameters():
            parameter.zero_()
    assert plain_one(x).equal(want)


def test_pooling_keeps_what_the_layer_is():
    plain_one = MultiHeadAttention(12, 4, d_head=5, attend=attention).bfloat16().eval()
    before = torch.get_rng_state()
    pooled = pool_kv_heads(plain_one, 2)
    assert torch.get_rng_state().equal(before)
    assert pooled.attend is attention and not pooled.training
    assert {p.dtype for p in pooled.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad and p.is_leaf for p in pooled.parameters())
    assert pooled.qkv.out_features == (4 + 2 + 2) * 5 and pooled.qkv.bias is None
    pooled(torch.randn(2, 3, 12).bfloat16()).sum().backward()


def test_grouped_heads_can_be_pooled_again():
    module = make("biased groups")  # six heads, three shared
    twice = pool_kv_heads(module, 1)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    for many, few in zip(projected(module, x), projected(twice, x), strict=True):
        assert_close(few, many.mean(1, keepdim=True), rtol=0, atol=1e-12)


def test_another_way_to_pool_can_be_given():
    plain_one = MultiHeadAttention(12, 6)
    first = pool_kv_heads(plain_one, 2, lambda rows: rows[:, 0])
    rows = plain_one.qkv.weight[12:24].unflatten(0, (6, 2))
    assert first.qkv.weight[12:16].equal(rows[[0, 3]].flatten(0, 1))


@pytest.mark.parametrize("wanted, message", [(3, "of 4"), (8, "of 4"), (2.0, "=2.0")])
def test_heads_that_cannot_be_pooled_are_refused(wanted, message):
    with pytest.raises(ValueError, match=f"n_kv_heads must .*{message}$"):
        pool_kv_heads(MultiHeadAttention(12, 4), wanted)


# --- bytes --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("n_kv_heads", [1, 4])
def test_cache_bytes_are_those_of_tensors(n_kv_heads, dtype):
    layers = [torch.zeros(2, 3, n_kv_heads, 7, 5, dtype=dtype) for _ in range(6)]
    stored = sum(x.numel() * x.element_size() for x in layers)
    assert kv_cache_bytes(6, n_kv_heads, 5, 7, 3, dtype) == stored


def test_cache_of_llama_2_7b_takes_half_a_mebibyte_a_token():
    assert kv_cache_bytes(32, 32, 128, 1) == 2**19
    assert kv_cache_bytes(32, 32, 128, 4096) == 2 * 2**30
    assert kv_cache_bytes(32, 1, 128, 4096) * 32 == 2 * 2**30
    assert kv_cache_bytes(32, 32, 128, 0) == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((32, 0, 128, 9), "n_kv_heads must be a whole number from 1, got n_kv_heads=0"),
        (
            (32, 8, 4096 / 32, 9),
            "d_head must be a whole number from 1, got d_head=128.0",
        ),
        ((32, 8, 128, -1), "n_tokens must be a whole number from 0, got n_tokens=-1"),
        ((32, 8, 128, 9, True), "n_sequences must be a whole number from 0, got n_seq"),
    ],
)
def test_cache_bytes_refuse_counts_that_are_none(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        kv_cache_bytes(*arguments)


@pytest.mark.parametrize("dtype", ["bfloat16", None, 2])
def test_cache_bytes_refuse_what_is_no_dtype(dtype):
    with pytest.raises(TypeError, match=f"^dtype must be a torch.dtype, got {dtype=}$"):
        kv_cache_bytes(32, 8, 128, 9, dtype=dtype)


# --- case 28 ------------------------------------------------------------------------


@each_attend
@pytest.mark.parametrize("t", [1, 3])
def test_case_28_neighbouring_heads_share(attend, t):
    q, k = torch.randn(1, 4, t, 8), torch.randn(1, 2, 5, 8)
    v = torch.arange(2.0).view(1, 2, 1, 1).expand(1, 2, 5, 8)
    heads = attend(q, k, v)[0, :, 0, 0]
    assert_close(heads, torch.tensor([0.0, 0, 1, 1]), rtol=0, atol=1e-6)
    tiled = attend(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))[0, :, 0, 0]
    assert_close(tiled, torch.tensor([0.0, 1, 0, 1]), rtol=0, atol=1e-6)


@each_attend
@pytest.mark.parametrize("counts", [(4, 2), (4, 1), (6, 3)])
def test_case_28_gradient_of_a_shared_head_is_the_sum_over_its_group(counts, attend):
    q, k, v = some_heads(*counts, 1, 5)
    n_readers = counts[0] // counts[1]
    shared = [x.clone().requires_grad_() for x in (k, v)]
    copies = [x.repeat_interleave(n_readers, 1).requires_grad_() for x in (k, v)]
    upstream = torch.randn(3, counts[0], 1, 6, dtype=torch.float64)
    slopes = torch.autograd.grad(attend(q, *shared), shared, upstream)
    many = torch.autograd.grad(attend(q, *copies), copies, upstream)
    for one, each in zip(slopes, many, strict=True):
        want = each.unflatten(1, (counts[1], n_readers)).sum(2)
        assert_close(one, want, rtol=0, atol=1e-12)


def test_case_28_queries_are_not_summed_and_tokens_not_repeated():
    module = make("groups")
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    seen = []
    module(x, prepare=lambda *given: seen.extend(given) or given)
    q, k, v, _ = seen
    assert q.shape == (1, 4, 5, 3) and k.shape == v.shape == (1, 2, 5, 3)
    rows = F.linear(x, module.qkv.weight[:12])
    assert_close(q, split_heads(rows, 4), rtol=0, atol=1e-12)
