"""What `attention` and its kin promise, over shapes, masks, dtypes and devices."""

import copy
import math
import re
from functools import partial

import pytest
import torch
from attention_oracle import (
    DEVICES,
    DTYPES,
    HALF,
    allowed_keys,
    assert_as_exact,
    by_hand,
    plain,
    repeat_heads,
    torchs,
    with_gradients,
)
from torch.autograd import gradcheck
from torch.testing import assert_close

from transformer.attention import (
    attention,
    attention_weights,
    causal_mask,
    fused_attention,
    merge_heads,
    padding_mask,
    share_heads,
    split_heads,
)
from transformer.flash import flash_attention

BOTH = [attention, fused_attention, flash_attention]
each_attend = pytest.mark.parametrize("attend", BOTH, ids=lambda f: f.__name__)
each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])

SHAPES = {  # of q, of k, and E
    "self": ((2, 3, 4, 8), (2, 3, 4, 8), 8),
    "fewer queries": ((2, 2, 3, 8), (2, 2, 5, 8), 8),
    "more queries": ((2, 2, 5, 8), (2, 2, 3, 8), 8),
    "wide values": ((2, 2, 3, 4), (2, 2, 4, 4), 9),
    "narrow values": ((2, 2, 4, 7), (2, 2, 4, 7), 3),
    "one query": ((2, 2, 1, 8), (2, 2, 5, 8), 8),
    "one token": ((2, 2, 1, 8), (2, 2, 1, 8), 8),
    "one feature": ((1, 2, 4, 1), (1, 2, 4, 1), 1),
    "no heads": ((4, 8), (5, 8), 6),
    "no batch": ((3, 4, 8), (3, 4, 8), 8),
    "no batch, shared": ((4, 3, 8), (2, 4, 8), 8),
    "five dimensions": ((2, 1, 2, 3, 8), (2, 1, 2, 3, 8), 8),
    "six dimensions": ((2, 1, 2, 2, 3, 4), (2, 1, 2, 2, 3, 4), 5),
    "grouped": ((2, 4, 3, 8), (2, 2, 4, 8), 8),
    "one shared head": ((2, 4, 3, 8), (2, 1, 3, 8), 5),
    "keys without batch": ((2, 2, 3, 8), (2, 4, 8), 8),
    "queries without batch": ((2, 3, 8), (2, 2, 4, 8), 8),
    "queries alone": ((3, 8), (2, 1, 4, 8), 8),
    "keys alone": ((2, 2, 3, 8), (4, 8), 8),
    "crossed batches": ((2, 1, 2, 3, 8), (1, 3, 2, 3, 8), 4),
    "more keys than a tile": ((1, 1, 2, 8), (1, 1, 130, 8), 8),
}
MASKS = ["none", "causal", "any", "any, causal", "keys", "queries", "shared", "nothing"]
LOOPS = "loops in float64"


def make_inputs(shape: str, dtype=torch.float64, device="cpu", seed=0):
    """q, k, v, and a gradient that arrives at the output."""
    at_q, at_k, e = SHAPES[shape]
    torch.manual_seed(seed)
    q, k, v = torch.randn(at_q), torch.randn(at_k), torch.randn(*at_k[:-1], e)
    upstream = torch.randn(plain(q, k, v).shape)
    return [x.to(device, dtype) for x in (q, k, v, upstream)]


def make_mask(q, k, kind: str):
    """A mask for these scores, and whether causal is set as well."""
    scores = (q.cpu().float() @ repeat_heads(q, k).cpu().float().mT).shape
    torch.manual_seed(1)
    full = torch.rand(scores) < 0.6
    full[..., 0, :] = False  # a query that sees nothing
    mask = {
        "any": full,
        "keys": full[..., -1:, :],
        "queries": full[..., :1] ^ True,
        "shared": full.flatten(0, -3)[0] if full.dim() > 2 else full,
        "nothing": torch.zeros(1, 1, dtype=torch.bool),
    }.get(kind.split(",")[0])
    return None if mask is None else mask.to(q.device), "causal" in kind


# --- values and gradients --------------------------------------------------------


@each_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@each_attend
def test_values_and_gradients_equal_loops(attend, shape, kind, dtype, device, conform):
    *inputs, upstream = make_inputs(shape, dtype, device)
    mask, causal = make_mask(*inputs[:2], kind)
    doubles = [x.cpu().double() for x in inputs]
    exact = with_gradients(
        lambda *x: by_hand(*x, mask, causal)[0], doubles, upstream.cpu()
    )
    functions = [attend, plain, *[torchs] * (attend is not attention)]
    got, *peers = (
        with_gradients(lambda *x: f(*x, mask, causal), inputs, upstream)  # noqa: B023
        for f in functions
    )
    assert got[0].dtype == dtype
    assert_as_exact(got, exact, *peers)
    column = "forward" if kind == "none" else "mask"
    name = attend.__name__
    conform.record(name, column, got[0], exact[0], reference=LOOPS)
    conform.record(name, "gradient", got[1:], exact[1:], reference=LOOPS)


@each_device
@pytest.mark.parametrize("kind", ["none", "causal", "any", "any, causal"])
@pytest.mark.parametrize("shape", SHAPES)
@each_attend
def test_values_and_gradients_equal_torchs(attend, shape, kind, device, conform):
    *inputs, upstream = make_inputs(shape, device=device)
    mask, causal = make_mask(*inputs[:2], kind)
    got, want = (
        with_gradients(lambda *x: f(*x, mask, causal), inputs, upstream)  # noqa: B023
        for f in (attend, torchs)
    )
    column, how = "forward" if kind == "none" else "mask", {"atol": 1e-10}
    how["reference"] = "torch.nn.functional.scaled_dot_product_attention"
    conform(attend.__name__, column, got[0], want[0], **how)
    conform(attend.__name__, "gradient", got[1:], want[1:], **how)


@each_device
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "any", "any, causal"])
@pytest.mark.parametrize("shape", SHAPES)
@each_attend
def test_half_precision_is_as_exact_as_its_peers(
    attend, shape, kind, dtype, device, conform
):
    functions = [plain, attend, plain, *[torchs] * (attend is not attention)]
    found = [[] for _ in functions]  # the first in float64: equals loops, see above
    for seed in range(8):
        *inputs, upstream = make_inputs(shape, dtype, device, seed)
        mask, causal = make_mask(*inputs[:2], kind)
        for i, f in enumerate(functions):
            these = inputs if i else [x.double() for x in inputs]
            run = partial(with_gradients, lambda *x: f(*x, mask, causal))  # noqa: B023
            found[i].append(run(these, upstream))
    exact, got, *peers = ([torch.stack(x) for x in zip(*f)] for f in found)  # noqa: B905
    assert got[0].dtype == dtype
    assert_as_exact(got, exact, *peers)
    conform.record(attend.__name__, "dtype", got, exact, reference="formula in float64")


@each_dtype
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_equal_loops_in_float64(shape, kind, dtype, conform):
    q, k, v, _ = make_inputs(shape, dtype)
    mask, causal = make_mask(q, k, kind)
    got = attention_weights(q, k, mask, causal)
    exact = by_hand(q, k, v, mask, causal)[1]
    # the plain formula with the identity as values gives its weights
    itself = torch.eye(k.size(-2), dtype=dtype).expand(*k.shape[:-1], -1)
    assert_as_exact([got], [exact], [plain(q, k, itself, mask, causal)])
    column = "forward" if kind == "none" else "mask"
    column = "dtype" if dtype in HALF else column
    conform.record("attention_weights", column, got, exact, reference=LOOPS)
    sums = got.double().sum(-1)
    assert_close(sums, exact.sum(-1).round(), rtol=0, atol=8 * torch.finfo(dtype).eps)


@each_device
@pytest.mark.parametrize("kind", ["none", "causal", "any", "any, causal", "keys"])
@pytest.mark.parametrize("shape", ["more queries", "wide values", "grouped"])
@each_attend
def test_gradcheck(attend, shape, kind, device):
    q, k, v, _ = make_inputs(shape, device=device)
    mask, causal = make_mask(q, k, kind)
    inputs = [x[:1].requires_grad_() for x in (q, k, v)]
    mask = mask[:1] if mask is not None and mask.dim() == 4 else mask
    assert gradcheck(partial(attend, mask=mask, causal=causal), inputs)


def test_weights_pass_gradcheck():
    q, k, _, _ = make_inputs("grouped")
    mask, _ = make_mask(q, k, "any")
    inputs = [x.requires_grad_() for x in (q, k)]
    assert gradcheck(partial(attention_weights, mask=mask), inputs)


@each_attend
@pytest.mark.parametrize("at_k", [(), (1,), (2,), (3, 1), (1, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("at_q", [(), (1,), (2,), (3, 1), (1, 2), (3, 2)], ids=str)
def test_leading_dimensions_broadcast(attend, at_q, at_k):
    torch.manual_seed(0)
    q, k = torch.randn(*at_q, 4, 3, 5), torch.randn(*at_k, 2, 4, 5)
    v = torch.randn(*at_k, 2, 4, 7)
    for mask in (None, torch.rand(2, 1, 1, 4) < 0.7, torch.rand(3, 1, 4, 3, 4) < 0.7):
        lead = torch.broadcast_shapes(at_q, at_k)
        wide = torch.broadcast_shapes(lead, () if mask is None else mask.shape[:-3])
        if wide == lead:
            out = attend(q, k, v, mask)
            assert out.shape == (*lead, 4, 3, 7)
            assert_close(out, plain(q, k, v, mask))


@each_device
@each_dtype
@each_attend
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "b, t, s", [(2, 0, 3), (2, 3, 0), (2, 0, 0), (0, 3, 3), (0, 0, 0)]
)
def test_nothing_in_gives_zeros_or_nothing(attend, b, t, s, causal, dtype, device):
    for mask in (None, torch.ones(t, s, dtype=torch.bool, device=device)):
        q, k, v = (torch.ones(b, 2, n, 4, device=device) for n in (t, s, s))
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = attend(*inputs, mask, causal)
        assert_close(out, torch.zeros_like(q).to(dtype))
        for x, slope in zip(
            inputs, torch.autograd.grad(out.sum(), inputs), strict=True
        ):
            assert_close(slope, torch.zeros_like(x))


# --- what follows from the formula ------------------------------------------------


@each_device
@each_dtype
@each_attend
def test_query_that_sees_nothing_gets_zeros(attend, dtype, device):
    q, k, v, _ = make_inputs("self", dtype, device)
    mask = torch.ones(4, 4, dtype=torch.bool, device=device)
    mask[2] = False
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*inputs, mask)
    assert_close(out[..., 2, :], torch.zeros_like(out[..., 2, :]), rtol=0, atol=0)
    weights = attention_weights(q, k, mask)[..., 2, :]
    assert_close(weights, torch.zeros_like(weights), rtol=0, atol=0)
    slopes = torch.autograd.grad(out.sum(), inputs)
    assert all(slope.isfinite().all() for slope in slopes)
    at_empty = slopes[0][..., 2, :]
    assert_close(at_empty, torch.zeros_like(at_empty), rtol=0, atol=0)


@each_attend
def test_no_nan_arises_on_the_way_to_zeros(attend):
    q, k, v, _ = make_inputs("self")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    with torch.autograd.set_detect_anomaly(True):  # raises at the first NaN
        out = attend(*inputs, torch.zeros(4, 4, dtype=torch.bool))
        slopes = torch.autograd.grad(out.sum(), inputs)
    assert not any(slope.any() for slope in slopes)


@each_dtype
@each_attend
def test_one_key_in_sight_gives_its_value(attend, dtype):
    q, k, v, _ = make_inputs("self", dtype)
    assert_close(attend(q, k, v, torch.eye(4, dtype=torch.bool)), v, rtol=0, atol=0)


@each_attend
def test_equal_keys_share_the_weight(attend):
    q, k, v, _ = make_inputs("fewer queries")
    mean = v.mean(-2, keepdim=True).expand(*q.shape)
    assert_close(attend(q, k[..., :1, :].expand_as(k), v), mean)


@each_attend
def test_order_of_keys_does_not_matter(attend):
    q, k, v, _ = make_inputs("fewer queries")
    order = torch.tensor([3, 0, 4, 2, 1])
    mask, _ = make_mask(q, k, "any")
    shuffled = attend(q, k[..., order, :], v[..., order, :], mask[..., order])
    assert_close(shuffled, attend(q, k, v, mask))


@each_attend
def test_scores_are_divided_by_the_root_of_the_width(attend):
    q, k = torch.full((1, 16), 2.0), torch.stack([torch.zeros(16), torch.ones(16)])
    share = 1 / (1 + math.exp(-32 / 4))  # of the second key: q·k = 32, √D = 4
    got = attend(q, k, torch.tensor([[0.0], [1.0]]))
    assert_close(got, torch.tensor([[share]]))


@each_dtype
@each_attend
def test_blocked_key_leaves_no_trace(attend, dtype):
    q, k, v, _ = make_inputs("self", dtype)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[:, 1] = False
    other = [x.index_fill(-2, torch.tensor([1]), 99) for x in (k, v)]
    assert_close(attend(q, *other, mask), attend(q, k, v, mask), rtol=0, atol=0)


@each_attend
def test_huge_scores_pick_the_best_key(attend):
    q, k = torch.tensor([[1e4]]), torch.tensor([[-1e4], [1e4], [0.0]])
    v = torch.tensor([[1.0], [2.0], [3.0]])
    assert_close(attend(q, k, v), torch.tensor([[2.0]]))
    assert_close(attend(-q, k, v), torch.tensor([[1.0]]))


@each_attend
def test_mask_of_true_is_no_mask(attend):
    q, k, v, _ = make_inputs("grouped")
    assert_close(attend(q, k, v, torch.ones(3, 4, dtype=torch.bool)), attend(q, k, v))


@each_attend
def test_causal_is_the_causal_mask(attend):
    for shape in ("self", "fewer queries", "more queries", "one query"):
        q, k, v, _ = make_inputs(shape)
        mask = causal_mask(q.size(-2), k.size(-2))
        assert_close(attend(q, k, v, causal=True), attend(q, k, v, mask))


@each_attend
def test_mask_of_keys_alone_is_accepted(attend):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 4), torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 6)
    mask = torch.tensor([True, False, True, True, False])
    assert_close(attend(q, k, v, mask), attend(q, k, v, mask.expand(3, 5)))
    assert_close(attend(q, k, v, torch.tensor(True)), attend(q, k, v))


@each_attend
def test_query_heads_read_the_head_of_their_group(attend):
    v = torch.arange(2.0)[:, None, None].expand(2, 3, 1)  # head g holds g
    out = attend(torch.randn(4, 2, 5), torch.randn(2, 3, 5), v)
    assert_close(out[:, 0, 0], torch.tensor([0.0, 0, 1, 1]))


@each_attend
def test_inputs_are_left_as_they_were(attend):
    q, k, v, _ = make_inputs("grouped")
    mask, _ = make_mask(q, k, "any")
    before = copy.deepcopy((q, k, v, mask))
    attend(q, k, v, mask, True)
    for now, then in zip((q, k, v, mask), before, strict=True):
        assert_close(now, then, rtol=0, atol=0)


# --- layouts in memory (CASE-24) ---------------------------------------------------


VIEWS = {  # q, k, v (2, 4, 6, 8) as views of other tensors, not contiguous
    "one projection": lambda draw: draw(2, 6, 3, 4, 8).permute(2, 0, 3, 1, 4),
    "transposed": lambda draw: draw(3, 2, 6, 4, 8).transpose(2, 3),
    "features first": lambda draw: draw(3, 2, 4, 8, 6).mT,
    "expanded heads": lambda draw: draw(3, 2, 1, 6, 8).expand(3, 2, 4, 6, 8),
    "every second feature": lambda draw: draw(3, 2, 4, 6, 16)[..., ::2],
    "every second token": lambda draw: draw(3, 2, 4, 12, 8)[..., ::2, :],
}
UPSTREAM = {
    "sum": lambda x: torch.ones((), dtype=x.dtype, device=x.device).expand(x.shape),
    "transposed": lambda x: torch.randn(2, 6, 4, 8).transpose(1, 2).to(x),
    "part": lambda x: torch.randn(2, 4, 6, 16).to(x)[..., ::2],
}


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("upstream", UPSTREAM)
@pytest.mark.parametrize("kind", VIEWS)
@each_attend
def test_layout_in_memory_does_not_matter(attend, kind, upstream, dtype, device):
    torch.manual_seed(0)
    inputs = list(VIEWS[kind](lambda *shape: torch.randn(shape).to(device, dtype)))
    up = UPSTREAM[upstream](inputs[0])
    assert not any(x.is_contiguous() for x in (*inputs, up))
    for causal in (False, True):
        run = partial(attend, causal=causal)
        laid = [x.requires_grad_() for x in inputs]
        out = run(*laid)
        got = [out, *torch.autograd.grad(out, laid, up)]
        copies = [x.detach().contiguous() for x in inputs]
        want = with_gradients(run, copies, up.contiguous())
        for mine, theirs in zip(got, want, strict=True):
            exactly = attend is attention and device == "cpu"
            assert_close(mine, theirs, **({"rtol": 0, "atol": 0} if exactly else {}))


# --- masks and heads -----------------------------------------------------------------


@each_device
@pytest.mark.parametrize("n_queries", [0, 1, 2, 5])
@pytest.mark.parametrize("n_keys", [None, 0, 1, 2, 5, 7])
def test_causal_mask_is_aligned_to_the_last_key(n_queries, n_keys, device):
    got = causal_mask(n_queries, n_keys, torch.device(device))
    s = n_queries if n_keys is None else n_keys
    want = torch.zeros(n_queries, s, dtype=torch.bool)
    for t in range(n_queries):
        want[t, allowed_keys(None, True, t, n_queries, s)] = True
    assert got.device.type == device
    assert_close(got.cpu(), want)


@each_device
def test_padding_mask_shows_the_first_keys(device):
    lengths = torch.tensor([0, 2, 3, 9], device=device)
    got = padding_mask(lengths, 3)
    assert got.shape == (4, 1, 1, 3) and got.device.type == device
    want = torch.tensor([[0, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]]).bool()
    assert_close(got[:, 0, 0].cpu(), want)
    assert padding_mask(lengths[:0], 3).shape == (0, 1, 1, 3)


@each_attend
def test_padding_does_not_change_the_real_tokens(attend, conform):
    q, k, v, _ = make_inputs("self")
    out = attend(q, k, v, padding_mask(torch.tensor([2, 4]), 4), causal=True)
    short = attend(*(x[:1, :, :2] for x in (q, k, v)), causal=True)
    how = {"reference": "itself without padding", "atol": 1e-10}
    conform(attend.__name__, "ragged", out[:1, :, :2], short, **how)


def test_shared_heads_are_repeated_in_order():
    k = torch.arange(2.0).reshape(1, 2, 1, 1).requires_grad_()
    q = torch.zeros(1, 6, 1, 1)
    keys, values = share_heads(q, k, 10 * k)
    assert_close(keys.flatten(), torch.tensor([0.0, 0, 0, 1, 1, 1]))
    assert_close(values.flatten(), torch.tensor([0.0, 0, 0, 10, 10, 10]))
    keys.backward(torch.arange(6.0).reshape(1, 6, 1, 1))
    assert_close(k.grad.flatten(), torch.tensor([3.0, 12.0]))  # summed over readers


def test_heads_that_are_not_shared_are_not_copied():
    q, k, v, _ = make_inputs("self")
    assert all(a is b for a, b in zip(share_heads(q, k, v), (k, v), strict=True))


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
def test_heads_are_cut_side_by_side_and_put_back(lead):
    x = torch.randn(*lead, 5, 12)
    heads = split_heads(x, 3)
    assert heads.shape == (*lead, 3, 5, 4)
    for h in range(3):
        assert_close(heads[..., h, :, :], x[..., 4 * h : 4 * h + 4], rtol=0, atol=0)
    assert_close(merge_heads(heads), x, rtol=0, atol=0)


# --- errors -----------------------------------------------------------------------


def zeros(*shape: int) -> torch.Tensor:
    """A float tensor of this shape."""
    return torch.zeros(shape)


def see(*shape: int) -> torch.Tensor:
    """A mask of this shape."""
    return torch.ones(shape, dtype=torch.bool)


QKV = [(2, 4, 3, 8)] * 3
BROADCAST = "mask must broadcast to the scores (..., T, S), (2, 4, 3, 3), got "
WRONG = [  # shapes of q, k, v; mask; error; message
    (QKV, zeros(3, 3), TypeError, "mask must be bool (True = may look), got "),
    (QKV, zeros(3, 3), TypeError, "mask.dtype=torch.float32"),
    (QKV, zeros(3, 3).int(), TypeError, "mask.dtype=torch.int32"),
    (QKV, zeros(3, 3).long(), TypeError, "mask.dtype=torch.int64"),
    (QKV, zeros(3, 3).byte(), TypeError, "mask.dtype=torch.uint8"),
    (QKV, see(3, 4), ValueError, BROADCAST + "tuple(mask.shape)=(3, 4)"),
    (QKV, see(2, 3), ValueError, BROADCAST + "tuple(mask.shape)=(2, 3)"),
    (QKV, see(2, 3, 3), ValueError, BROADCAST + "tuple(mask.shape)=(2, 3, 3)"),
    (QKV, see(3, 1, 1, 3), ValueError, BROADCAST + "tuple(mask.shape)=(3, 1, 1, 3)"),
    (QKV, see(2, 3, 1, 3), ValueError, BROADCAST + "tuple(mask.shape)=(2, 3, 1, 3)"),
    (
        QKV,
        see(1, 1, 1, 1, 3),
        ValueError,
        BROADCAST + "tuple(mask.shape)=(1, 1, 1, 1, 3)",
    ),
    ([(3, 8)] * 3, see(1, 3, 3), ValueError, "(..., T, S), (3, 3), got "),
    (
        [(2, 4, 3, 8), (2, 4, 3, 6), (2, 4, 3, 6)],
        None,
        ValueError,
        "q and k must have the same width, got tuple(q.shape)=(2, 4, 3, 8), "
        "tuple(k.shape)=(2, 4, 3, 6), tuple(v.shape)=(2, 4, 3, 6)",
    ),
    (
        [(2, 4, 3, 8), (2, 4, 3, 1), (2, 4, 3, 1)],
        None,
        ValueError,
        "q and k must have the same width",
    ),
    (
        [(2, 4, 3, 8), (2, 4, 3, 8), (2, 4, 5, 8)],
        None,
        ValueError,
        "k and v may differ in width only, got tuple(q.shape)=(2, 4, 3, 8), "
        "tuple(k.shape)=(2, 4, 3, 8), tuple(v.shape)=(2, 4, 5, 8)",
    ),
    (
        [(2, 4, 3, 8), (2, 4, 3, 8), (2, 4, 1, 8)],
        None,
        ValueError,
        "k and v may differ in width only",
    ),
    (
        [(2, 4, 3, 8), (2, 4, 3, 8), (4, 3, 8)],
        None,
        ValueError,
        "k and v may differ in width only",
    ),
    (
        [(2, 6, 3, 8), (2, 4, 3, 8), (2, 4, 3, 8)],
        None,
        ValueError,
        "heads of q must be a multiple of those of k, got tuple(q.shape)=(2, 6, 3, 8)",
    ),
    (
        [(2, 1, 3, 8), (2, 4, 3, 8), (2, 4, 3, 8)],
        None,
        ValueError,
        "heads of q must be a multiple of those of k",
    ),
    (
        [(3, 8), (2, 3, 8), (2, 3, 8)],
        None,
        ValueError,
        "heads of q must be a multiple of those of k",
    ),
    (
        [(2, 4, 3, 8), (2, 0, 3, 8), (2, 0, 3, 8)],
        None,
        ValueError,
        "heads of q must be a multiple of those of k",
    ),
    (
        [(2, 4, 3, 8), (3, 4, 3, 8), (3, 4, 3, 8)],
        None,
        ValueError,
        "leading dimensions of q and k must broadcast, got tuple(q.shape)=(2, 4, 3, 8)",
    ),
]


@each_attend
@pytest.mark.parametrize("shapes, mask, error, message", WRONG)
def test_wrong_input_is_refused_in_one_line(attend, shapes, mask, error, message):
    q, k, v = (zeros(*shape) for shape in shapes)
    for causal in (False, True):
        with pytest.raises(error, match=re.escape(message)) as caught:
            attend(q, k, v, mask, causal)
        assert "\n" not in str(caught.value)
    if k.shape[:-1] == v.shape[:-1]:
        with pytest.raises(error, match=re.escape(message.split(", got")[0])):
            attention_weights(q, k, mask)


@pytest.mark.parametrize(
    "lengths", [torch.tensor(3), torch.ones(2, 2).long(), torch.ones(2)], ids=str
)
def test_padding_mask_refuses_other_lengths(lengths):
    found = re.escape(f"got {tuple(lengths.shape)} of {lengths.dtype}")
    with pytest.raises(ValueError, match=f"lengths must be a row of integers, {found}"):
        padding_mask(lengths, 4)


@pytest.mark.parametrize("n_heads", [5, 0, -2])
def test_split_heads_refuses_parts_that_are_not_equal(n_heads):
    found = f"got tuple(x.shape)=(3, 12), n_heads={n_heads}"
    message = re.escape(f"features must be a multiple of n_heads, {found}")
    with pytest.raises(ValueError, match=message):
        split_heads(zeros(3, 12), n_heads)


# --- torch's transformations ---------------------------------------------------------


@each_attend
@pytest.mark.parametrize("causal", [False, True])
def test_vmap_equals_a_batch(attend, causal):
    q, k, v, _ = make_inputs("grouped")
    mask, _ = make_mask(q, k, "any")
    run = torch.vmap(partial(attend, causal=causal))
    assert_close(run(q, k, v, mask), attend(q, k, v, mask, causal))
    assert_close(run(q, k, v), attend(q, k, v, None, causal))
    over_q = torch.vmap(partial(attend, causal=causal), in_dims=(0, None, None))
    assert_close(over_q(q, k[0], v[0]), attend(q, k[0], v[0], None, causal))


@each_attend
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", ["self", "wide values", "grouped", "more queries"])
def test_meta_device_gives_the_shape(attend, shape, kind):
    q, k, v, _ = make_inputs(shape)
    mask, causal = make_mask(q, k, kind)
    want = attend(q, k, v, mask, causal)
    mask = mask if mask is None else mask.to("meta")
    got = attend(*(x.to("meta") for x in (q, k, v)), mask, causal)
    assert got.device.type == "meta" and got.shape == want.shape


@each_device
@pytest.mark.parametrize("dtype", HALF, ids=str)
@each_attend
def test_autocast_is_as_exact_as_its_dtype(attend, dtype, device):
    q, k, v, upstream = make_inputs("self", torch.float32, device)
    mask, _ = make_mask(q, k, "any")
    with torch.autocast(device, dtype):
        got = with_gradients(partial(attend, mask=mask), [q, k, v], upstream)
        peer = with_gradients(partial(plain, mask=mask), [q, k, v], upstream)
    exact = with_gradients(
        lambda *x: by_hand(*x, mask=mask)[0],
        [x.cpu().double() for x in (q, k, v)],
        upstream.cpu(),
    )
    assert_as_exact(got, exact, peer)


@each_attend
def test_compiles_into_one_graph(attend, conform):
    q, k, v, upstream = make_inputs("grouped", torch.float32)
    mask, _ = make_mask(q, k, "any")
    torch.compiler.reset()
    for how in ({}, {"mask": mask}, {"causal": True}, {"mask": mask, "causal": True}):
        run = partial(attend, **how)
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        got = with_gradients(compiled, [q, k, v], upstream)
        want = with_gradients(run, [q, k, v], upstream)
        of = {"reference": "itself uncompiled", "rtol": 1e-6, "atol": 1e-5}
        conform(attend.__name__, "compile", got, want, **of)
    torch.compiler.reset()
