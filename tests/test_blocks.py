"""What `PreNormBlock` and `PostNormBlock` promise."""

import copy
import re

import pytest
import torch
from attention_oracle import DEVICES
from blocks_oracle import (
    KINDS,
    float_tokens,
    make_block,
    names_in_torch,
    torch_layer,
)
from torch import nn
from torch.testing import assert_close

from transformer.attention import MultiHeadAttention, causal_mask, padding_mask
from transformer.blocks import PreNormBlock, residual_writers, scaled_init
from transformer.feedforward import FeedForward, GatedFeedForward
from transformer.norms import LayerNorm, RMSNorm

each_kind = pytest.mark.parametrize("kind", KINDS)
each_cross = pytest.mark.parametrize("cross", [False, True], ids=["plain", "cross"])
each_device = pytest.mark.parametrize("device", DEVICES)


def make_inputs(cross: bool):
    """Tokens, and a context where one is read, in float64."""
    torch.manual_seed(1)
    return float_tokens(2, 4, 12), float_tokens(2, 5, 12) if cross else None


# --- parity -----------------------------------------------------------------------


@each_kind
@each_cross
@pytest.mark.parametrize("masked", ["nothing", "padding", "the future"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_equals_torchs_layer(kind, cross, masked, activation, conform):
    torch.manual_seed(0)
    block = make_block(kind, cross, activation=activation).double()
    theirs = torch_layer(block, kind, cross, activation=activation)
    x, context = make_inputs(cross)
    own, read = (torch.tensor(n) for n in ([3, 4], [5, 2]))
    how, there = {"context": context}, {}
    if masked == "padding":
        how |= {"mask": padding_mask(own, 4)}
        name = "tgt_key_padding_mask" if cross else "src_key_padding_mask"
        there |= {name: ~how["mask"][:, 0, 0]}
        if cross:
            how |= {"context_mask": padding_mask(read, 5)}
            there |= {"memory_key_padding_mask": ~how["context_mask"][:, 0, 0]}
    if masked == "the future":
        how |= {"causal": True}
        there |= {"tgt_mask" if cross else "src_mask": ~causal_mask(4)}
    got = block(x, **how)
    want = theirs(x, *([context] if cross else []), **there)
    name, reference = type(block).__name__, f"torch.nn.{type(theirs).__name__}"
    column = "forward" if masked == "nothing" else "mask"
    conform(name, column, got, want, reference=reference, atol=1e-10)
    up = torch.randn_like(got)
    leaves = [x, *([context] if cross else [])]
    order = dict(theirs.named_parameters())
    places = names_in_torch(cross)
    mine = [p for _, p in block.named_parameters()]
    their = [order[places[n]] for n, _ in block.named_parameters()]
    slopes = torch.autograd.grad(got, [*leaves, *mine], up)
    expected = torch.autograd.grad(want, [*leaves, *their], up)
    for a, b in zip(slopes, expected, strict=True):
        conform(name, "gradient", a, b, reference=reference, atol=1e-10)


@each_kind
def test_equals_its_formula_written_out(kind):
    torch.manual_seed(0)
    block = make_block(kind, cross=True).double()
    x, context = make_inputs(cross=True)
    y = x
    for norm, part in (
        (block.attn_norm, block.attn),
        (block.cross_norm, lambda z: block.cross(z, context)),
        (block.ffn_norm, block.ffn),
    ):
        y = y + part(norm(y)) if kind == "pre" else norm(y + part(y))
    assert_close(block(x, context=context), y, rtol=0, atol=1e-12)


@each_kind
def test_prepare_reaches_attention_and_not_cross_attention(kind):
    block, calls = make_block(kind, cross=True).double(), []
    x, context = make_inputs(cross=True)

    def prepare(q, k, v, mask):
        calls.append(k.shape)
        return 2 * q, k, v, mask

    changed = block(x, context=context, prepare=prepare)
    assert calls == [(2, 3, 4, 4)]
    assert not changed.allclose(block(x, context=context))


class Cache:
    """Keys and values so far."""

    def __init__(self):
        self.k = self.v = None

    def __call__(self, q, k, v, mask):
        self.k = k if self.k is None else torch.cat([self.k, k], -2)
        self.v = v if self.v is None else torch.cat([self.v, v], -2)
        return q, self.k, self.v, mask


@each_kind
@pytest.mark.parametrize("pieces", [(1, 1, 1, 1), (3, 1), (1, 2, 1)], ids=str)
def test_pieces_with_a_cache_equal_the_whole(kind, pieces, conform):
    block, cache = make_block(kind).double(), Cache()
    x, _ = make_inputs(cross=False)
    parts = [block(y, causal=True, prepare=cache) for y in x.split(pieces, 1)]
    want = block(x, causal=True)
    name, reference = type(block).__name__, "all tokens at once"
    got = torch.cat(parts, 1)
    conform(name, "cached", got, want, reference=reference, atol=1e-10)


@each_kind
@each_cross
@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_runs_in_every_dtype(kind, cross, device, dtype, conform):
    torch.manual_seed(0)
    block = make_block(kind, cross)
    x, context = make_inputs(cross)
    given = [x] if context is None else [x, context]
    rounded = copy.deepcopy(block).to(device, dtype)
    x, *context = (y.detach().to(device, dtype) for y in given)
    got = rounded(x, context=context[0] if cross else None)
    exact = copy.deepcopy(rounded).double().cpu()
    x, *context = (y.double().cpu() for y in (x, *context))
    want = exact(x, context=context[0] if cross else None)
    assert got.dtype == dtype
    step = torch.finfo(dtype).eps  # values are below 8, and some ten roundings add up
    name = type(block).__name__
    how = {"reference": "itself in float64", "atol": 80 * step}
    conform(name, "dtype", got.cpu(), want, **how)


@each_device
@each_kind
def test_compiles_into_one_graph(kind, device, conform):
    torch.manual_seed(0)
    block = make_block(kind, cross=True).to(device)
    x, context = (y.detach().float().to(device) for y in make_inputs(cross=True))
    mask = padding_mask(torch.tensor([5, 2], device=device), 5)
    how = {"causal": True, "context": context, "context_mask": mask}
    torch.compiler.reset()
    got = torch.compile(block, fullgraph=True, backend="aot_eager")(x, **how)
    torch.compiler.reset()
    name, reference = type(block).__name__, "itself without compiling"
    conform(name, "compile", got, block(x, **how), reference=reference, atol=1e-5)


# --- dropout ----------------------------------------------------------------------


def silence(block: nn.Module) -> nn.Module:
    """A block whose parts return zeros."""
    for writer in residual_writers(block):
        for parameter in writer.parameters():
            nn.init.zeros_(parameter)
    return block


@each_kind
@each_cross
def test_case_18_dropout_is_off_in_eval(kind, cross):
    torch.manual_seed(0)
    block = make_block(kind, cross, dropout=0.5).double()
    x, context = make_inputs(cross)
    twin = make_block(kind, cross).double()
    twin.load_state_dict(block.state_dict())
    drawn = [block(x, context=context) for _ in range(2)]
    assert not drawn[0].equal(drawn[1])
    block.eval()
    quiet = [block(x, context=context) for _ in range(2)]
    assert quiet[0].equal(quiet[1]) and quiet[0].equal(twin(x, context=context))
    assert not block.train()(x, context=context).equal(quiet[0])


@each_kind
def test_nothing_is_dropped_unless_asked_for(kind):
    block, x = make_block(kind).train(), torch.randn(2, 4, 12)
    plain = type(block)(12, block.attn, block.ffn).train()
    plain.load_state_dict(block.state_dict())
    assert plain(x).equal(block.eval()(x))


def test_case_18_dropout_never_falls_on_the_sum():
    block = silence(make_block("pre", cross=True, dropout=0.9))
    x, context = torch.randn(2, 50, 12), torch.randn(2, 3, 12)
    assert block.train()(x, context=context).equal(x)


def test_case_18_dropout_keeps_the_mean():
    torch.manual_seed(0)
    block = make_block("pre", dropout=0.25).double()
    nn.init.zeros_(block.ffn.down.weight)
    nn.init.zeros_(block.ffn.down.bias)
    x, _ = make_inputs(cross=False)
    many = torch.stack([block(x) for _ in range(2000)]).detach()
    error = many.std(0) / 2000**0.5
    apart = (many.mean(0) - block.eval()(x)).abs() / error
    assert apart.max() < 4.5
    kept = (many != x).double().mean()
    assert abs(kept - 0.75) < 0.01


# --- initialisation ---------------------------------------------------------------


def gpt2_like(ffn, n_blocks=12, d=252):
    """A stack as deep as the small GPT-2."""
    return nn.ModuleList(
        PreNormBlock(d, MultiHeadAttention(d, 12, bias=True), ffn(d))
        for _ in range(n_blocks)
    )


@pytest.mark.parametrize("ffn", [FeedForward, GatedFeedForward])
@pytest.mark.parametrize("start", ["built", "drawn twice", "from meta"])
def test_case_19_writers_start_smaller_and_nothing_else(ffn, start):
    small = 0.02 / 24**0.5
    assert abs(small - 0.0040825) < 1e-7
    wanted = {"attn.qkv.weight": 0.02, "attn.out.weight": small}
    wanted |= {"ffn.up.weight": 0.02, "ffn.down.weight": small, "ffn.gate.weight": 0.02}
    with torch.device("meta" if start == "from meta" else "cpu"):
        stack = gpt2_like(ffn)
    if start == "from meta":
        stack = stack.to_empty(device="cpu")
    if start == "drawn twice":
        scaled_init(stack, std=1.0)
    scaled_init(stack)
    for block in (stack[0], stack[5], stack[11]):
        for name, p in block.named_parameters():
            if p.dim() > 1:
                assert abs(p.std() / wanted[name] - 1) < 0.02, name
                assert abs(p.mean()) < 0.01 * wanted[name]
            else:
                assert (p == float(name.endswith("norm.weight"))).all(), name


def test_case_19_each_stack_counts_its_own_writers():
    encoder = nn.ModuleList(make_block("post", d=240, d_ff=240) for _ in range(2))
    decoder = nn.ModuleList(make_block("post", True, d=240, d_ff=240) for _ in range(3))
    scaled_init(nn.ModuleDict({"encoder": encoder, "decoder": decoder}))
    for stack, n in ((encoder, 4), (decoder, 9)):
        writers = residual_writers(stack)
        assert len(writers) == n
        for writer in writers:
            assert abs(writer.weight.std() * n**0.5 / 0.02 - 1) < 0.03


def test_writers_are_the_last_matrices():
    block = make_block("pre", cross=True)
    wanted = [block.attn.out, block.cross.out, block.ffn.down]
    assert all(a is b for a, b in zip(residual_writers(block), wanted, strict=True))
    assert residual_writers(FeedForward(4)) == []


@pytest.mark.parametrize("wrap", [nn.Sequential, lambda block: block])
def test_blocks_whose_stack_cannot_be_counted_are_refused(wrap):
    rule = r"blocks must stand in an nn\.ModuleList, got len\(missed\)=2"
    with pytest.raises(ValueError, match=rule):
        scaled_init(wrap(make_block("pre")))


def test_draws_do_not_depend_on_what_stood_there():
    one, two = (nn.ModuleList([make_block("pre")]) for _ in range(2))
    for stack in (one, two):
        torch.manual_seed(5)
        scaled_init(stack)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert a.equal(b)


# --- parts ------------------------------------------------------------------------


@each_kind
def test_norm_is_made_for_each_part(kind):
    attn, ffn, cross = (nn.Identity() for _ in range(3))
    block = KINDS[kind](8, attn, ffn, cross=cross, norm=RMSNorm)
    norms = block.attn_norm, block.cross_norm, block.ffn_norm
    assert all(type(norm) is RMSNorm for norm in norms)
    assert len({id(norm) for norm in norms}) == 3
    assert type(KINDS[kind](8, attn, ffn).attn_norm) is LayerNorm


@each_kind
@pytest.mark.parametrize("shape", [(0, 4, 12), (2, 0, 12), (4, 12)], ids=str)
def test_shapes_come_back(kind, shape):
    x = torch.randn(*shape)
    assert make_block(kind)(x, causal=True).shape == x.shape


@each_kind
def test_state_is_named_by_part(kind):
    parts = {name.split(".")[0] for name in make_block(kind, True).state_dict()}
    assert parts == {"attn_norm", "attn", "cross_norm", "cross", "ffn_norm", "ffn"}


# --- errors -----------------------------------------------------------------------


@each_kind
@each_cross
def test_context_and_cross_attention_need_each_other(kind, cross):
    block, x = make_block(kind, cross), torch.randn(2, 3, 12)
    message = f"need each other, got self.cross is not None={cross}, context is not No"
    with pytest.raises(ValueError, match=re.escape(message)):
        block(x, context=None if cross else x)


@pytest.mark.parametrize("dropout", [-0.1, 1.5])
def test_dropout_is_a_share(dropout):
    with pytest.raises(
        ValueError, match="dropout must be a finite number in 0 … 1, got dropout="
    ):
        make_block("pre", dropout=dropout)


def test_part_without_a_last_matrix_is_refused():
    block = PreNormBlock(8, MultiHeadAttention(8, 2), nn.Linear(8, 8))
    with pytest.raises(ValueError, match="must end in `out` or `down`, got Linear"):
        residual_writers(block)
