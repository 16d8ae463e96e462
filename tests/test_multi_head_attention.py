"""What `MultiHeadAttention` promises, over shapes, masks, dtypes and devices."""

import copy
import io
import re

import pytest
import torch
from attention_oracle import DEVICES, HALF, assert_as_exact, by_hand, plain
from torch import nn
from torch.autograd import gradcheck
from torch.testing import assert_close

from transformer.attention import (
    MultiHeadAttention,
    attention,
    causal_mask,
    fused_attention,
    padding_mask,
    project_heads,
)

each_attend = pytest.mark.parametrize(
    "attend", [attention, fused_attention], ids=lambda f: f.__name__
)
each_device = pytest.mark.parametrize("device", DEVICES)

MODULES = {  # d_model, n_heads, keywords
    "plain": (12, 3, {}),
    "biased": (12, 3, {"bias": True}),
    "one head": (6, 1, {}),
    "a head a feature": (6, 6, {"bias": True}),
    "wide heads": (6, 2, {"d_head": 5, "bias": True}),
    "narrow heads": (12, 2, {"d_head": 1}),
    "odd width": (7, 3, {"d_head": 2}),
}
INPUTS = {  # shapes of x and of context, without the features
    "self": ((2, 4), None),
    "one token": ((2, 1), None),
    "no batch": ((4,), None),
    "two batches": ((2, 2, 3), None),
    "context": ((2, 3), (2, 5)),
    "short context": ((2, 5), (2, 3)),
    "shared context": ((2, 3), (4,)),
}


def make_module(name: str, attend=fused_attention, dtype=torch.float64):
    """A module with random weights, biases included."""
    d_model, n_heads, how = MODULES[name]
    torch.manual_seed(0)
    module = MultiHeadAttention(d_model, n_heads, attend=attend, **how)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.to(dtype)


def make_inputs(module, name: str):
    """x and context, in the dtype of the module."""
    torch.manual_seed(1)
    width, dtype = module.qkv.in_features, module.qkv.weight.dtype
    shapes = [None if shape is None else (*shape, width) for shape in INPUTS[name]]
    return [None if shape is None else torch.randn(shape).to(dtype) for shape in shapes]


def head_by_head(module, x, context=None, mask=None, causal=False):
    """The same, each head on its own rows of the weights, added up through W_O."""
    context = x if context is None else context
    n_heads, out = module.n_heads, 0
    width = module.out.in_features  # H·D
    d = width // n_heads
    bias = module.qkv.bias
    for h in range(n_heads):
        parts = []
        for i, source in enumerate((x, context, context)):
            rows = slice(i * width + h * d, i * width + (h + 1) * d)
            part = source @ module.qkv.weight[rows].mT
            parts.append(part if bias is None else part + bias[rows])
        of_head = mask
        if mask is not None and mask.dim() > 2:
            of_head = mask.select(-3, h if mask.size(-3) > 1 else 0)
        found = plain_rows(*parts, of_head, causal)
        out = out + found @ module.out.weight[:, h * d : (h + 1) * d].mT
    return out if module.out.bias is None else out + module.out.bias


def plain_rows(q, k, v, mask, causal):
    """Attention without heads: every leading dimension is a batch."""
    heads = (x.unsqueeze(-3) for x in (q, k, v))
    mask = mask if mask is None or mask.dim() < 3 else mask.unsqueeze(-3)
    return by_hand(*heads, mask, causal)[0].squeeze(-3)


def make_mask(module, x, context, kind: str):
    """A mask for these tokens, and whether causal is set as well."""
    t, s = x.size(-2), (x if context is None else context).size(-2)
    torch.manual_seed(2)
    full = torch.rand(*x.shape[:-2], module.n_heads, t, s) < 0.6
    full[..., 0, :] = False
    shared = full[..., :1, :, :] if full.dim() > 3 else full
    mask = {"heads": full, "one for all": shared, "rows": full.flatten(0, -3)[0]}
    return mask.get(kind.split(",")[0]), "causal" in kind


# --- values and gradients --------------------------------------------------------

HEAD_BY_HEAD = {"reference": "loops in float64, head by head", "atol": 1e-10}


@pytest.mark.parametrize("kind", ["none", "causal", "heads", "one for all", "rows"])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", MODULES)
@each_attend
def test_equals_heads_one_by_one(attend, name, inputs, kind, conform):
    module = make_module(name, attend)
    x, context = make_inputs(module, inputs)
    mask, causal = make_mask(module, x, context, kind)
    leaves = [x, *([] if context is None else [context]), *module.parameters()]
    for leaf in leaves:
        leaf.requires_grad_()
    got = module(x, context, mask=mask, causal=causal)
    want = head_by_head(module, x, context, mask, causal)
    column = "forward" if kind == "none" else "mask"
    conform("MultiHeadAttention", column, got, want, **HEAD_BY_HEAD)
    upstream = torch.randn_like(got)
    slopes = torch.autograd.grad(got, leaves, upstream)
    expected = torch.autograd.grad(want, leaves, upstream)
    conform("MultiHeadAttention", "gradient", slopes, expected, **HEAD_BY_HEAD)


def copy_to_torch(module) -> nn.MultiheadAttention:
    """torch's module with the same weights."""
    bias, width = module.qkv.bias is not None, module.qkv.in_features
    theirs = nn.MultiheadAttention(width, module.n_heads, bias=bias, batch_first=True)
    state = {"in_proj_weight": module.qkv.weight, "out_proj.weight": module.out.weight}
    if bias:
        state |= {"in_proj_bias": module.qkv.bias, "out_proj.bias": module.out.bias}
    theirs.load_state_dict(state)
    return theirs.to(module.qkv.weight)


@each_device
@pytest.mark.parametrize("kind", ["none", "causal", "rows", "padding"])
@pytest.mark.parametrize("inputs", ["self", "one token", "no batch", "context"])
@pytest.mark.parametrize("name", ["plain", "biased", "one head", "a head a feature"])
@each_attend
def test_equals_torchs_module_with_the_same_weights(
    attend, name, inputs, kind, device, conform
):
    module = make_module(name, attend).to(device)
    theirs = copy_to_torch(module)
    x, context = (y if y is None else y.to(device) for y in make_inputs(module, inputs))
    seen = x if context is None else context
    mask, how = None, {}
    if kind == "padding" and x.dim() > 2:
        lengths = torch.tensor([1, seen.size(-2)], device=device)
        mask = padding_mask(lengths, seen.size(-2))
        how = {"key_padding_mask": ~mask[:, 0, 0]}  # theirs: True = blocked
    elif kind != "none":
        mask, _ = make_mask(module, x, context, "rows")
        mask[0, 0] = True  # torch's module gives NaN to a query that sees nothing
        if kind == "causal":
            mask = causal_mask(x.size(-2), seen.size(-2))
        mask = mask.to(device)
        how = {"attn_mask": ~mask}
    got = module(x, context, mask=mask)
    want = theirs(x, seen, seen, need_weights=False, **how)[0]
    upstream = torch.randn_like(got)
    slopes = torch.autograd.grad(got, list(module.parameters()), upstream)
    expected = torch.autograd.grad(want, list(theirs.parameters()), upstream)
    column = "forward" if mask is None else "ragged" if kind == "padding" else "mask"
    to = {"reference": "torch.nn.MultiheadAttention", "atol": 1e-10}
    conform("MultiHeadAttention", column, got, want, **to)
    conform("MultiHeadAttention", "gradient", slopes, expected, **to)


@each_attend
def test_gradcheck(attend):
    module = make_module("wide heads", attend)
    x, context = make_inputs(module, "context")
    mask, _ = make_mask(module, x, context, "heads")
    leaves = [x, context, *module.parameters()]
    names = [name for name, _ in module.named_parameters()]

    def run(x, context, *parameters):
        values = dict(zip(names, parameters, strict=True))
        how = {"mask": mask, "causal": True}
        return torch.func.functional_call(module, values, (x, context), how)

    assert gradcheck(run, [leaf.detach().requires_grad_() for leaf in leaves])


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("inputs", ["self", "context"])
@each_attend
def test_low_precision_is_as_exact_as_the_formula(
    attend, inputs, dtype, device, conform
):
    torch.manual_seed(0)
    module = MultiHeadAttention(64, 4, bias=True, attend=attend).to(device, dtype)
    formula = copy.deepcopy(module)
    formula.attend = plain
    exact = copy.deepcopy(module).double()
    exact.attend = plain  # equals loops in float64: test_attention_contract.py
    x, context = make_inputs(module, inputs)
    x, context = (y if y is None else y.to(device) for y in (x, context))
    mask, _ = make_mask(module, x, context, "heads")
    found = []
    for one in (module, exact, formula):
        like = one.qkv.weight
        y = x.detach().to(like).requires_grad_()
        z = context if context is None else context.to(like)
        out = one(y, z, mask=mask.to(device))
        out.sum().backward()
        found.append([out, y.grad, *(p.grad for p in one.parameters())])
    assert found[0][0].dtype == dtype
    assert_as_exact(*found)
    to = {"reference": "formula in float64"}
    conform.record("MultiHeadAttention", "dtype", *found[:2], **to)


# --- its parts ------------------------------------------------------------------


def test_rows_of_the_projection_are_queries_keys_values():
    module = make_module("biased")
    x, context = make_inputs(module, "context")
    w, b = module.qkv.weight, module.qkv.bias
    assert w.shape == (36, 12) and module.out.weight.shape == (12, 12)
    for sources in ((x, x, x), (x, context, context)):
        parts = project_heads(module.qkv, 3, x, None if sources[1] is x else context)
        for i, (part, source) in enumerate(zip(parts, sources, strict=True)):
            rows = slice(12 * i, 12 * i + 12)
            want = source @ w[rows].mT + b[rows]
            for h in range(3):  # feature 4·h … of a token belongs to head h
                assert_close(part[:, h], want[..., 4 * h : 4 * h + 4])


@pytest.mark.parametrize("name", MODULES)
def test_parameters_are_named_and_sized_as_written(name):
    d_model, n_heads, how = MODULES[name]
    module = make_module(name)
    width = n_heads * how.get("d_head", d_model // n_heads)
    want = {"qkv.weight": (3 * width, d_model), "out.weight": (d_model, width)}
    if how.get("bias"):
        want |= {"qkv.bias": (3 * width,), "out.bias": (d_model,)}
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == want
    assert list(module.state_dict()) == [n for n, _ in module.named_parameters()]


def test_number_of_heads_does_not_change_the_number_of_parameters():
    counts = {
        sum(p.numel() for p in MultiHeadAttention(24, n_heads).parameters())
        for n_heads in (1, 2, 3, 24)
    }
    assert counts == {4 * 24 * 24}


def test_fused_attention_is_the_default():
    assert MultiHeadAttention(4, 2).attend is fused_attention


@pytest.mark.parametrize("causal", [False, True])
def test_attend_is_called_with_five_positions(causal):
    calls = []

    def attend(*args, **how):
        calls.append((args, how))
        return args[0]

    module = make_module("plain", attend)
    x, context = make_inputs(module, "context")
    mask = torch.ones(3, 5, dtype=torch.bool)
    module(x, context, mask=mask, causal=causal)
    (args, how), *more = calls
    assert not how and not more and len(args) == 5
    assert [tuple(y.shape) for y in args[:3]] == [(2, 3, 3, 4), *[(2, 3, 5, 4)] * 2]
    assert args[3] is mask and args[4] is causal


def test_prepare_gets_four_positions_and_its_answer_is_used():
    module = make_module("plain")
    x, context = make_inputs(module, "context")
    given, other = (torch.rand(3, 5) < 0.5 for _ in range(2))
    calls = []

    def prepare(*args, **how):
        calls.append((args, how))
        q, k, v, _ = args
        return 2 * q, k - 1, v + 3, other

    got = module(x, context, mask=given, prepare=prepare)
    (args, how), *more = calls
    assert not how and not more and len(args) == 4 and args[3] is given
    q, k, v = project_heads(module.qkv, module.n_heads, x, context)
    for mine, part in zip(args, (q, k, v), strict=False):
        assert_close(mine, part)
    heads = attention(2 * q, k - 1, v + 3, other)
    assert_close(got, module.out(heads.transpose(1, 2).flatten(-2)))
    no_mask = module(x, context, mask=given, prepare=lambda q, k, v, _: (q, k, v, None))
    assert_close(no_mask, module(x, context))


class Cache:
    """Keys and values so far: the smallest `prepare` that widens them."""

    def __init__(self):
        self.k = self.v = None

    def __call__(self, q, k, v, mask):
        self.k = k if self.k is None else torch.cat([self.k, k], -2)
        self.v = v if self.v is None else torch.cat([self.v, v], -2)
        return q, self.k, self.v, mask


@each_attend
@pytest.mark.parametrize("pieces", [(1, 1, 1, 1, 1), (3, 2), (2, 1, 2)], ids=str)
def test_pieces_with_a_cache_equal_the_whole(attend, pieces, conform):
    module = make_module("biased", attend)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    cache = Cache()
    parts = [module(y, causal=True, prepare=cache) for y in x.split(pieces, 1)]
    got, whole = torch.cat(parts, 1), module(x, causal=True)
    to = {"reference": "itself, all tokens at once", "atol": 1e-10}
    conform("MultiHeadAttention", "cached", got, whole, **to)


# --- what follows from the formula --------------------------------------------------


@each_attend
def test_order_of_tokens_only_reorders_the_outputs(attend):
    module = make_module("biased", attend)
    x, _ = make_inputs(module, "self")
    order = torch.tensor([2, 0, 3, 1])
    assert_close(module(x[:, order]), module(x)[:, order])


@each_attend
def test_context_of_itself_is_self_attention(attend):
    module = make_module("biased", attend)
    x, _ = make_inputs(module, "self")
    assert_close(module(x, x.clone(), causal=True), module(x, causal=True))


@each_device
@each_attend
def test_token_that_sees_nothing_gets_the_offset_alone(attend, device):
    module = make_module("biased", attend).to(device)
    x, _ = make_inputs(module, "self")
    x = x.to(device).requires_grad_()
    mask = padding_mask(torch.tensor([0, 4], device=device), 4)
    out = module(x, mask=mask)
    assert_close(out[0], module.out.bias.expand(4, 12), rtol=0, atol=0)
    out[1].sum().backward()
    assert all(y.grad.isfinite().all() for y in (x, *module.parameters()))
    assert_close(x.grad[0], torch.zeros_like(x.grad[0]), rtol=0, atol=0)


@each_attend
@pytest.mark.parametrize("lead", [(0,), (2,), (2, 0), ()], ids=str)
@pytest.mark.parametrize("t, s", [(0, None), (3, None), (0, 2), (2, 0)])
def test_nothing_in_gives_a_tensor_of_the_right_shape(attend, lead, t, s):
    module = make_module("plain", attend)
    x = torch.randn(*lead, t, 12, dtype=torch.float64, requires_grad=True)
    context = None if s is None else torch.randn(*lead, s, 12, dtype=torch.float64)
    for causal in (False, True):
        out = module(x, context, causal=causal)
        assert out.shape == x.shape and out.isfinite().all()
        assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()
        if s == 0:
            assert_close(out, torch.zeros_like(out), rtol=0, atol=0)


@each_device
@each_attend
def test_layout_in_memory_does_not_matter(attend, device):
    module = make_module("biased", attend).to(device)
    x = torch.randn(12, 4, 2, dtype=torch.float64, device=device).permute(2, 1, 0)
    context = torch.randn(2, 5, 24, dtype=torch.float64, device=device)[..., ::2]
    up = torch.randn(4, 2, 12, dtype=torch.float64, device=device).transpose(0, 1)
    leaves = list(module.parameters())
    laid = module(x, context, causal=True)
    copied = module(x.contiguous(), context.contiguous(), causal=True)
    assert not any(y.is_contiguous() for y in (x, context, up))
    assert_close(laid, copied)
    got = torch.autograd.grad(laid, leaves, up)
    want = torch.autograd.grad(copied, leaves, up.contiguous())
    for mine, theirs in zip(got, want, strict=True):
        assert_close(mine, theirs)


# --- errors -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "how, message",
    [
        (
            {"d_model": 512, "n_heads": 7},
            "d_model must be a multiple of n_heads, got d_model=512, n_heads=7",
        ),
        (
            {"d_model": 4, "n_heads": 8},
            "d_model must be a multiple of n_heads, got d_model=4, n_heads=8",
        ),
        (
            {"d_model": 0, "n_heads": 1},
            "widths and counts must be positive, got d_model=0, n_heads=1, d_head=None",
        ),
        (
            {"d_model": 8, "n_heads": 0},
            "widths and counts must be positive, got d_model=8, n_heads=0, d_head=None",
        ),
        (
            {"d_model": 8, "n_heads": -2},
            "widths and counts must be positive, got d_model=8, n_heads=-2, d_head=Non",
        ),
        (
            {"d_model": 8, "n_heads": 2, "d_head": 0},
            "widths and counts must be positive, got d_model=8, n_heads=2, d_head=0",
        ),
    ],
)
def test_wrong_counts_are_refused(how, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MultiHeadAttention(**how)


def see(*shape: int) -> torch.Tensor:
    """A mask of this shape."""
    return torch.ones(shape, dtype=torch.bool)


@each_attend
@pytest.mark.parametrize(
    "mask, error, message",
    [
        (
            see(2, 4, 4),
            ValueError,
            "mask needs a heads dimension, (B, 1, T, S), got tuple(mask.shape)=(2, 4, ",
        ),
        (
            see(1, 4, 4),
            ValueError,
            "mask needs a heads dimension, (B, 1, T, S), got tuple(mask.shape)=(1, 4, ",
        ),
        (
            see(2, 4),
            ValueError,
            "mask must broadcast to the scores (..., T, S), (2, 3, 4, 4), got ",
        ),
        (see(4, 5), ValueError, "got tuple(mask.shape)=(4, 5)"),
        (see(2, 2, 4, 4), ValueError, "got tuple(mask.shape)=(2, 2, 4, 4)"),
        (see(4, 4).float(), TypeError, "mask must be bool (True = may look), got "),
        (see(2, 1, 1, 4).long(), TypeError, "mask.dtype=torch.int64"),
    ],
)
def test_wrong_mask_is_refused_in_one_line(attend, mask, error, message):
    module = make_module("plain", attend)
    x, _ = make_inputs(module, "self")
    for causal in (False, True):
        with pytest.raises(error, match=re.escape(message)) as caught:
            module(x, mask=mask, causal=causal)
        assert "\n" not in str(caught.value)


@each_attend
def test_context_of_another_batch_is_refused(attend):
    module = make_module("plain", attend)
    x = torch.zeros(2, 3, 12, dtype=torch.float64)
    message = "leading dimensions of q and k must broadcast, got tuple(q.shape)=(2, 3,"
    with pytest.raises(ValueError, match=re.escape(message)):
        module(x, torch.zeros(3, 3, 12, dtype=torch.float64))


@each_attend
def test_mask_of_batches_is_refused_also_where_only_the_context_has_them(attend):
    module = make_module("wide heads", attend)  # two heads, and two contexts
    x = torch.zeros(4, 6, dtype=torch.float64)
    context = torch.zeros(2, 5, 6, dtype=torch.float64)
    with pytest.raises(ValueError, match="mask needs a heads dimension"):
        module(x, context, mask=see(2, 4, 5))


# --- torch's tools --------------------------------------------------------------------


def test_copy_is_equal_and_on_its_own():
    module = make_module("biased")
    x, _ = make_inputs(module, "self")
    before = module(x)
    twin = copy.deepcopy(module)
    assert_close(twin(x), before, rtol=0, atol=0)
    nn.init.zeros_(twin.qkv.weight)
    assert_close(module(x), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODULES)
def test_state_goes_through_a_file(name):
    module = make_module(name)
    d_model, n_heads, how = MODULES[name]
    other = MultiHeadAttention(d_model, n_heads, **how).double()
    x, _ = make_inputs(module, "self")
    with io.BytesIO() as file:
        torch.save(module.state_dict(), file)
        file.seek(0)
        result = other.load_state_dict(torch.load(file, weights_only=True))
    assert not result.missing_keys and not result.unexpected_keys
    assert_close(other(x), module(x), rtol=0, atol=0)


def test_moves_to_another_dtype_and_the_meta_device():
    module = make_module("biased")
    x, context = make_inputs(module, "context")
    assert module.bfloat16()(x.bfloat16(), context.bfloat16()).dtype == torch.bfloat16
    module = module.double().to("meta")
    mask = see(2, 1, 1, 5).to("meta")
    out = module(x.to("meta"), context.to("meta"), mask=mask, causal=True)
    assert out.device.type == "meta" and out.shape == x.shape


@each_attend
def test_vmap_equals_a_loop_over_modules(attend):
    modules = [make_module("biased", attend) for _ in range(3)]
    for scale, module in enumerate(modules, 1):
        nn.init.normal_(module.qkv.weight, std=0.1 * scale)
    parameters, buffers = torch.func.stack_module_state(modules)
    x, _ = make_inputs(modules[0], "self")
    mask = padding_mask(torch.tensor([2, 4]), 4)

    def run(parameters, buffers, x):
        values = (parameters, buffers)
        how = {"mask": mask, "causal": True}
        return torch.func.functional_call(modules[0], values, (x,), how)

    got = torch.vmap(run, in_dims=(0, 0, None))(parameters, buffers, x)
    want = torch.stack([one(x, mask=mask, causal=True) for one in modules])
    assert_close(got, want)


@each_device
@pytest.mark.parametrize("dtype", HALF, ids=str)
@each_attend
def test_autocast_is_as_exact_as_the_formula(attend, dtype, device):
    module = make_module("biased", attend, torch.float32).to(device)
    formula = copy.deepcopy(module)
    formula.attend = plain
    exact = copy.deepcopy(formula).double()
    torch.manual_seed(3)
    x = torch.randn(16, 4, 12, device=device)
    mask = padding_mask(torch.arange(16, device=device) % 5, 4)
    found = []
    for one in (module, exact, formula):
        like = one.qkv.weight
        with torch.autocast(device, dtype, enabled=like.dtype == torch.float32):
            out = one(x.to(like), mask=mask, causal=True)
        out.float().sum().backward()
        found.append([out, *(p.grad for p in one.parameters())])
    assert found[0][0].dtype == dtype
    mine, true, theirs = found
    rough = [[y.to(dtype) for y in tensors] for tensors in (mine, theirs)]
    assert_as_exact(rough[0], true, rough[1])


@each_device
def test_compiles_into_one_graph(device, conform):
    module = make_module("biased", dtype=torch.float32).to(device)
    x, context = (y.to(device) for y in make_inputs(module, "context"))
    mask = padding_mask(torch.tensor([2, 5], device=device), 5)

    def rotate(q, k, v, mask):
        return q.flip(-1), k.flip(-1), v, mask

    def run(x, context, mask):
        first = module(x, causal=True)
        return module(first, context, mask=mask, causal=True, prepare=rotate)

    torch.compiler.reset()
    results = []
    for one in (torch.compile(run, fullgraph=True, backend="aot_eager"), run):
        out = one(x, context, mask)
        slopes = torch.autograd.grad(out.square().sum(), list(module.parameters()))
        results.append([out, *slopes])
    torch.compiler.reset()
    to = {"reference": "itself uncompiled", "rtol": 1e-4, "atol": 1e-4}
    conform("MultiHeadAttention", "compile", *results, **to)
