"""CASE-21 to CASE-24: faults that users of tiled attention have reported."""

import itertools
import math
from functools import partial

import pytest
import torch
from attention_oracle import plain, with_gradients
from torch.testing import assert_close

from transformer.flash import flash_attention

LENGTHS = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 192, 200]
WIDTHS = [1, 8, 16, 30, 40, 63, 64, 72, 80, 96, 112, 128, 160, 256]
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def draw(*shapes, seed=0):
    """Random float64 tensors."""
    torch.manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def assert_equal_formula(inputs, up, mask=None, causal=False, **blocks):
    """Output and gradients equal those of the formula in float64."""
    ours = partial(flash_attention, mask=mask, causal=causal, **blocks)
    got = with_gradients(ours, inputs, up)
    want = with_gradients(lambda *x: plain(*x, mask, causal), inputs, up)
    for mine, true in zip(got, want, strict=True):
        assert_close(mine, true, **CLOSE)


def inside_nan(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in a larger buffer, NaN before and behind them on each axis."""
    buffer = x.new_full([n + 3 for n in x.shape], math.nan)
    view = buffer[tuple(slice(1, n + 1) for n in x.shape)]
    return view.copy_(x)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [64, 128])
def test_case_21_lengths_that_are_no_multiple_of_the_block(block, causal):
    pairs = list(itertools.product(LENGTHS, LENGTHS))
    for t, s in pairs[block // 64 - 1 + causal :: 3]:  # a third of them in each case
        *inputs, up = map(inside_nan, draw((1, t, 8), (1, s, 8), (1, s, 5), (1, t, 5)))
        how = {"block_q": block, "block_k": block}
        assert_equal_formula(inputs, up, causal=causal, **how)


def test_case_21_keys_of_zeros_would_count():
    q, k, v, _ = draw((1, 5, 4), (1, 5, 4), (1, 5, 4), (1, 5, 4))
    padded = [torch.cat([x, torch.zeros(1, 3, 4, dtype=x.dtype)], 1) for x in (k, v)]
    right = flash_attention(q, k, v, block_q=8, block_k=8)
    assert (plain(q, *padded) - right).abs().max() > 0.1
    assert_close(right, plain(q, k, v), **CLOSE)


@pytest.mark.parametrize("d", WIDTHS)
def test_case_22_any_head_width(d):
    for e in (WIDTHS[WIDTHS.index(d) - 3], d):
        *inputs, up = draw((1, 2, 33, d), (1, 2, 40, d), (1, 2, 40, e), (1, 2, 33, e))
        assert_equal_formula(inputs, up, causal=True, block_q=16, block_k=16)


@pytest.mark.parametrize("d", WIDTHS)
def test_case_22_last_channel_matters(d):
    q, k, v = draw((1, 9, d), (1, 9, d), (1, 9, 3))
    at_last = torch.ones(d, dtype=torch.float64)
    at_last[-1] = 10
    scaled = flash_attention(q * at_last, k * at_last, v, block_q=4, block_k=4)
    assert_close(scaled, plain(q * at_last, k * at_last, v), **CLOSE)
    assert (scaled - plain(q, k, v)).abs().max() > 1e-3


def test_case_22_scale_is_that_of_the_width_itself():
    q, k = torch.ones(1, 80), torch.stack([torch.zeros(80), torch.full((80,), 0.1)])
    got = flash_attention(q, k, torch.tensor([[0.0], [1.0]])).item()  # q·k = 8
    assert_close(got, 1 / (1 + math.exp(-8 * 0.111803)), rtol=0, atol=1e-6)
    padded = 1 / (1 + math.exp(-8 * 0.0883883))  # of a tile of 128
    assert abs(got - padded) > 0.03


SEEN = {  # mask of T × S, or None
    "all": lambda t, s: None,
    "window": lambda t, s: torch.ones(t, s).bool().tril(s - t).triu(s - t - 15),
    "any": lambda t, s: torch.rand(t, s) < 0.5,
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s", [80, 50, 111])
@pytest.mark.parametrize("kind", SEEN)
def test_case_23_backward_honours_mask_and_causal_switch(kind, s, causal):
    *inputs, up = draw((2, 3, 80, 32), (2, 3, s, 32), (2, 3, s, 32), (2, 3, 80, 32))
    mask = SEEN[kind](80, s)
    assert_equal_formula(inputs, up, mask, causal, block_q=32, block_k=32)


def test_case_23_last_key_is_taught_by_the_last_query_only():
    *inputs, up = draw(*[(1, 1, 20, 8)] * 4)
    how = {"causal": True, "block_q": 8, "block_k": 8}
    run = partial(flash_attention, **how)
    _, _, _, dv = with_gradients(run, inputs, up)
    q, k, _ = inputs
    weight = (q[0, 0, -1] @ k[0, 0].T / 8**0.5).softmax(-1)[-1]
    assert_close(dv[0, 0, -1], weight * up[0, 0, -1], **CLOSE)


VIEWS = {  # q, k, v (2, 4, 20, 8)
    "one projection": lambda: torch.randn(2, 20, 3, 4, 8).permute(2, 0, 3, 1, 4),
    "transposed": lambda: torch.randn(3, 2, 20, 4, 8).transpose(2, 3),
    "expanded heads": lambda: torch.randn(3, 2, 1, 20, 8).expand(3, 2, 4, 20, 8),
    "every second feature": lambda: torch.randn(3, 2, 4, 20, 16)[..., ::2],
    "features first": lambda: torch.randn(3, 2, 4, 8, 20).mT,
}
UPSTREAM = {
    "sum": lambda: torch.ones(()).expand(2, 4, 20, 8),
    "reshaped": lambda: torch.randn(2, 20, 4, 8).transpose(1, 2),
    "part of a cat": lambda: torch.cat([torch.randn(2, 4, 20, 8)] * 2, -1)[..., 8:],
}


@pytest.mark.parametrize("upstream", UPSTREAM)
@pytest.mark.parametrize("kind", VIEWS)
def test_case_24_layout_in_memory_does_not_matter(kind, upstream):
    torch.manual_seed(0)
    inputs, up = list(VIEWS[kind]()), UPSTREAM[upstream]()
    assert not any(x.is_contiguous() for x in (*inputs, up))
    for causal in (False, True):
        run = partial(flash_attention, causal=causal, block_q=8, block_k=8)
        leaves = [x.requires_grad_() for x in inputs]
        out = run(*leaves)
        got = [out, *torch.autograd.grad(out, leaves, up)]
        copies = [x.detach().contiguous() for x in inputs]
        want = with_gradients(run, copies, up.contiguous())
        for mine, theirs in zip(got, want, strict=True):
            assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
