"""`flash_attention` equals float64 for every length, width, block size and mask."""

import itertools
import math
import re
from functools import partial

import pytest
import torch
from attention_oracle import (
    DEVICES,
    HALF,
    assert_as_exact,
    dense_mask,
    plain,
    repeat_heads,
    torchs,
    with_gradients,
)
from side_by_side import peak_bytes
from torch.autograd import gradcheck
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from transformer.attention import MultiHeadAttention, attention, causal_mask
from transformer.flash import (
    TiledAttention,
    flash_attention,
    io_bytes,
    online_softmax,
)

each_device = pytest.mark.parametrize("device", DEVICES)
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200]
WIDTHS = [1, 8, 40, 64, 80, 96, 128, 160, 256]
BLOCKS = [(16, 16), (64, 64), (1, 300), (300, 33), (128, 64), (300, 300), (37, 128)]
MASKS = ["none", "causal", "any", "keys", "any, causal", "queries", "heads"]
PAIRS = [(t, s) for t in LENGTHS for s in LENGTHS]


def make_mask(kind: str, b: int, h: int, t: int, s: int) -> torch.Tensor | None:
    """A mask that hides half of what it can, from the first query everything."""
    shape = {
        "any": (b, h, t, s),
        "keys": (b, 1, 1, s),
        "queries": (t, 1),
        "heads": (h, 1, s),
    }.get(kind.split(",")[0])
    if shape is None:
        return None
    mask = torch.rand(shape) < 0.5
    if shape[-2] == t > 1:
        mask[..., 0, :] = False
    return mask


def make_case(number: int, t: int, s: int, dtype, device="cpu"):
    """q, k, v, an upstream gradient, and how to call: everything varies with number."""
    torch.manual_seed(number)
    d, e = WIDTHS[number % 9], WIDTHS[(number // 9 + 4 * number) % 9]
    b, h, shared = [(1, 2, 1), (2, 1, 1), (1, 2, 2), (1, 3, 1)][number % 4]
    shapes = [(b, h, t, d), (b, shared, s, d), (b, shared, s, e), (b, h, t, e)]
    q, k, v, up = (torch.randn(shape).to(device, dtype) for shape in shapes)
    up /= math.sqrt(e)  # so that slopes of scores are as large as scores
    kind = MASKS[number % 7]
    mask = make_mask(kind, b, h, t, s)
    block_q, block_k = BLOCKS[(number // 7) % 7]
    if t * s < 300 and number % 3 == 0:
        block_q, block_k = 1, 1
    mask = mask if mask is None else mask.to(device)
    return (q, k, v), up, (mask, "causal" in kind), (block_q, block_k)


def log_sum_exp(q, k, mask, causal) -> torch.Tensor:
    """That of the scores which each query may look at, in float64."""
    q, k = q.double(), repeat_heads(q, k).double()
    scores = q @ k.mT / math.sqrt(q.size(-1))
    see = dense_mask(q, k, mask, causal)
    return scores.masked_fill(~see, -math.inf).logsumexp(-1)


def saved_log_sum_exp(q, k, v, mask, causal, block_q, block_k) -> torch.Tensor:
    """What the forward pass keeps for the backward, (B, H, T)."""
    cut = k.size(1), q.size(1) // k.size(1)
    if mask is not None:
        mask = mask.expand(*q.shape[:-1], k.size(2)).unflatten(1, cut)
    past = k.size(2) - q.size(2) if causal else k.size(2)
    how = past, block_q, block_k, True
    return TiledAttention.apply(q.unflatten(1, cut), k, v, mask, *how)[1].flatten(1, 2)


def run(function, inputs, up, mask, causal, **blocks):
    """Output and gradients."""
    call = partial(function, mask=mask, causal=causal, **blocks)
    return with_gradients(call, inputs, up)


# --- the grid: every pair of lengths, with what varies beside it -------------------


@each_device
@pytest.mark.parametrize("t", LENGTHS)
def test_values_and_gradients_equal_float64(t, device, conform):
    for number, (_, s) in enumerate((pair for pair in PAIRS if pair[0] == t), 11 * t):
        inputs, up, how, (bq, bk) = make_case(number, t, s, torch.float64, device)
        got = run(flash_attention, inputs, up, *how, block_q=bq, block_k=bk)
        want = run(plain, inputs, up, *how)
        kept = saved_log_sum_exp(*inputs, *how, bq, bk)
        of = {"reference": "formula in float64", "rtol": 1e-10, "atol": 1e-10}
        column = "ragged" if how == (None, False) else "mask"
        conform("flash_attention", column, got[0], want[0], **of)
        conform("flash_attention", "gradient", got[1:], want[1:], **of)
        assert_close(kept, log_sum_exp(*inputs[:2], *how), rtol=1e-10, atol=1e-10)


@each_device
@pytest.mark.parametrize("t", LENGTHS)
def test_float32_is_as_exact_as_its_peers(t, device):
    for number, (_, s) in enumerate((pair for pair in PAIRS if pair[0] == t), 11 * t):
        inputs, up, how, (bq, bk) = make_case(number + 5, t, s, torch.float32, device)
        got = run(flash_attention, inputs, up, *how, block_q=bq, block_k=bk)
        exact = run(plain, [x.double() for x in inputs], up.double(), *how)
        peers = [run(f, inputs, up, *how) for f in (plain, torchs)]
        assert_as_exact(got, exact, *peers)
        kept = saved_log_sum_exp(*inputs, *how, bq, bk)
        right = log_sum_exp(*inputs[:2], *how)
        seen = right.isfinite()
        assert_close(kept.isfinite(), seen)
        assert_close(kept[seen].double(), right[seen], rtol=1e-5, atol=1e-4)


@each_device
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("blocks", [(256, 8192), (64, 64), (1, 300)], ids=str)
def test_half_precision_is_as_exact_as_its_peers(blocks, dtype, device, conform):
    how = dict(zip(("block_q", "block_k"), blocks, strict=True))
    for number, (t, s) in enumerate([(127, 129), (200, 65), (64, 200), (1, 128)]):
        for seed in (1, 2):
            inputs, up, see, _ = make_case(16 * seed + number, t, s, dtype, device)
            got = run(flash_attention, inputs, up, *see, **how)
            exact = run(plain, [x.double() for x in inputs], up.double(), *see)
            peers = [run(f, inputs, up, *see) for f in (plain, torchs)]
            assert_as_exact(got, exact, *peers)
            of = {"reference": "formula in float64"}
            conform.record("flash_attention", "dtype", got, exact, **of)


@each_device
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("t, s", [(1024, 1024), (200, 1500), (64, 200)])
def test_inference_in_half_precision_is_as_exact_as_its_peers(t, s, dtype, device):
    for causal in (False, True):
        inputs = [torch.randn(1, 4, n, 64).to(device, dtype) for n in (t, s, s)]
        doubles = [x.double() for x in inputs]
        exact = plain(*doubles, causal=causal)
        peers = [f(*inputs, causal=causal) for f in (plain, torchs)]
        got = flash_attention(*inputs, causal=causal)
        assert_as_exact([got], [exact], *([x] for x in peers))


# --- what is not in the grid ---------------------------------------------------------


@pytest.mark.parametrize("blocks", [(1, 1), (2, 3), (3, 2), (9, 9)], ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "any, causal", "keys"])
def test_gradcheck_for_several_blocks(kind, blocks):
    torch.manual_seed(0)
    shapes = (1, 2, 4, 3), (1, 1, 5, 3), (1, 1, 5, 2)
    inputs = [torch.randn(x, dtype=torch.float64, requires_grad=True) for x in shapes]
    mask = make_mask(kind, 1, 2, 4, 5)
    how = dict(zip(("block_q", "block_k"), blocks, strict=True))
    call = partial(flash_attention, mask=mask, causal="causal" in kind, **how)
    assert gradcheck(call, inputs)


@each_device
@pytest.mark.parametrize("blocks", [(2, 3), (9, 9)], ids=str)
@pytest.mark.parametrize("b, t, s", [(2, 0, 3), (2, 3, 0), (0, 3, 3), (2, 0, 0)])
def test_empty_lengths_and_batches(b, t, s, blocks, device):
    how = dict(zip(("block_q", "block_k"), blocks, strict=True))
    for causal in (False, True):
        inputs = [torch.ones(b, 2, n, 4, device=device) for n in (t, s, s)]
        up = torch.ones_like(inputs[0])
        out, *slopes = run(flash_attention, inputs, up, None, causal, **how)
        assert_close(out, torch.zeros_like(up))
        for slope, x in zip(slopes, inputs, strict=True):
            assert_close(slope, torch.zeros_like(x))


@each_device
def test_module_takes_it_as_attend(device):
    torch.manual_seed(0)
    ours, formula = (
        MultiHeadAttention(12, 3, attend=f) for f in (flash_attention, attention)
    )
    ours.load_state_dict(formula.state_dict())
    x, mask = torch.randn(2, 7, 12), causal_mask(7)
    x, mask, ours, formula = (y.to(device) for y in (x, mask, ours, formula))
    for how in ({}, {"causal": True}, {"mask": mask}):
        assert_close(ours(x, **how), formula(x, **how))


@pytest.mark.parametrize("block", [0, -1, True, 2.0, 2.5, None, "8"], ids=repr)
@pytest.mark.parametrize("name", ["block_q", "block_k"])
def test_blocks_that_are_not_positive_whole_numbers_are_refused(name, block):
    q = torch.randn(4, 2)
    message = f"{name} must be a whole number from 1, got {name}={block!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attention(q, q, q, **{name: block})


@pytest.mark.parametrize("index", [0, 1, 2])
def test_mixed_dtypes_are_refused(index):
    inputs = [torch.randn(2, 4, 3) for _ in range(3)]
    inputs[index] = inputs[index].bfloat16()
    with pytest.raises(
        TypeError, match="q, k and v must have one floating-point dtype"
    ):
        flash_attention(*inputs)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool], ids=str)
def test_inputs_that_are_no_real_numbers_are_refused(dtype):
    q = torch.ones(2, 4, 3, dtype=dtype)
    with pytest.raises(TypeError, match="one floating-point dtype"):
        flash_attention(q, q, q)


@pytest.mark.parametrize("index", [1, 2])
def test_mixed_devices_are_refused(index):
    inputs = [torch.randn(2, 4, 3) for _ in range(3)]
    inputs[index] = inputs[index].to("meta")
    with pytest.raises(ValueError, match="q, k and v must be on one device"):
        flash_attention(*inputs)


@pytest.mark.parametrize("count", [0, -1, True, 2.5], ids=repr)
@pytest.mark.parametrize(
    "name", ["n_queries", "n_keys", "d_head", "block_q", "bytes_each"]
)
def test_bytes_of_what_is_no_count_are_refused(name, count):
    counts = {"n_queries": 8, "n_keys": 8, "d_head": 4, name: count}
    message = f"{name} must be a whole number from 1, got {name}={count!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        io_bytes(**counts)


@pytest.mark.parametrize("causal", [False, True])
def test_flops_of_both_passes(causal):
    t, d = 64, 8
    inputs = [torch.randn(1, 1, t, d, requires_grad=True) for _ in range(3)]
    with FlopCounterMode(display=False) as forward:
        out = flash_attention(*inputs, causal=causal, block_q=16, block_k=16)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    tiles = 4 * 5 // 2 if causal else 16  # tiles beyond the diagonal are skipped
    assert forward.get_total_flops() == 4 * d * 16 * 16 * tiles
    assert backward.get_total_flops() == 10 * d * 16 * 16 * tiles


def test_tiles_that_the_mask_hides_are_skipped():
    q = torch.randn(1, 1, 64, 8)
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[:16, 48:] = True  # one tile of sixteen
    with FlopCounterMode(display=False) as counter:
        out = flash_attention(q, q, q, mask, block_q=16, block_k=16)
    assert counter.get_total_flops() == 4 * 8 * 16 * 16
    assert_close(out, attention(q, q, q, mask))


# --- online softmax ------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[7], [3, 4], [1] * 7, [1, 5, 1]], ids=str)
def test_online_softmax_does_not_depend_on_the_blocks(cuts):
    torch.manual_seed(0)
    scores = 30 * torch.randn(2, 5, 7, dtype=torch.float64)
    scores[:, 0] = scores[0, 1, :3] = scores[1, 2, 4:] = -math.inf
    values = torch.randn(2, 7, 3, dtype=torch.float64)
    running = None
    blocks = zip(scores.split(cuts, -1), values.split(cuts, -2), strict=True)
    for block in blocks:
        running = online_softmax(*block, running)
    want = scores.softmax(-1).nan_to_num() @ values
    assert_close(running[0], want, rtol=0, atol=1e-12)
    assert_close(running[1], scores.logsumexp(-1, keepdim=True), rtol=0, atol=1e-12)


def test_online_softmax_of_half_precision_is_kept_in_float32():
    scores, values = torch.randn(4, 6).bfloat16(), torch.randn(6, 2).bfloat16()
    out, total = online_softmax(scores, values)
    assert out.dtype == total.dtype == torch.float32
    assert_close(total, scores.float().logsumexp(-1, keepdim=True))


# --- memory --------------------------------------------------------------------------


def peak(attend, t, backward=True, shapes=None, device="cpu", **how) -> int:
    """Most bytes held at a time, inputs not counted."""
    shapes = shapes or [(1, 1, t, 16)] * 3
    inputs = [torch.randn(x, device=device, requires_grad=backward) for x in shapes]

    def call():
        out = attend(*inputs, **how)
        return torch.autograd.grad(out.sum(), inputs) if backward else out

    return peak_bytes(call, device)


@each_device
@pytest.mark.usefixtures("one_thread")
def test_extra_memory_is_linear_from_1k_to_16k(device):
    lengths = 1024, 2048, 4096, 8192, 16384
    found = [peak(flash_attention, t, causal=True, device=device) for t in lengths]
    added = [b - a for a, b in itertools.pairwise(found)]
    for first, second in itertools.pairwise(added):
        assert 0 < second <= 2.05 * first  # twice as many tokens, twice as much
    assert found[-1] < 16384 * 16384  # not a byte for each pair
    formula = [peak(attention, t, causal=True, device=device) for t in (512, 2048)]
    assert formula[1] >= 15 * formula[0]


@each_device
@pytest.mark.parametrize("kind", ["padding", "triangle"])
@pytest.mark.usefixtures("one_thread")
def test_mask_is_not_widened(kind, device):
    t = 4096
    mask = torch.ones(1, 1, 1, t, dtype=torch.bool, device=device)
    mask = mask if kind == "padding" else torch.ones_like(mask).expand(1, 1, t, t)
    blocks = {"block_q": 64, "block_k": 1024}
    found = peak(flash_attention, t, mask=mask, device=device, **blocks)
    assert found < t * t  # not a byte for each pair


@each_device
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.usefixtures("one_thread")
def test_shared_heads_are_not_copied(backward, device):
    shapes = [(1, 16, 1, 64), (1, 1, 8192, 64), (1, 1, 8192, 64)]
    one_copy = 8192 * 64 * 4
    found = peak(flash_attention, 0, backward, shapes, device)
    # gradients of k and v are as large as one copy each, once more while they are added
    assert found < (4 * one_copy if backward else one_copy)
    assert peak(attention, 0, backward, shapes, device) > 16 * one_copy
