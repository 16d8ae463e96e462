"""`row_attention`, forward and backward, against the formula in float64."""

import itertools

import attention_oracle as oracle
import pytest
import torch
from attention_oracle import DEVICES
from torch.autograd import gradcheck
from torch.testing import assert_close

from transformer import flash
from transformer.attention import MultiHeadAttention, attention
from transformer.flash import row_attention

LENGTHS = [1, 2, 63, 64, 65, 129]
SHARED = [(1, 1), (4, 4), (4, 2), (6, 1)]  # query heads, key-value heads
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def draw(*shape: int, dtype=torch.float32, device="cpu") -> torch.Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(*shape).to(device, dtype)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_every_length_forward_and_backward(device, dtype, causal, conform):
    pairs = itertools.product(LENGTHS, LENGTHS)
    for i, (n_queries, n_keys) in enumerate(pairs):
        (n_heads, n_shared), block_q = SHARED[i % 4], [64, 16, 1000][i % 3]
        q = draw(2, n_heads, n_queries, 8, dtype=dtype, device=device)
        k = draw(2, n_shared, n_keys, 8, dtype=dtype, device=device)
        v = draw(2, n_shared, n_keys, 12, dtype=dtype, device=device)
        up = draw(2, n_heads, n_queries, 12, dtype=dtype, device=device)

        def ours(q, k, v, block_q=block_q):
            return row_attention(q, k, v, causal=causal, block_q=block_q)

        def plain(q, k, v):
            return oracle.plain(q, k, v, None, causal)

        got = oracle.with_gradients(ours, [q, k, v], up)
        exact = oracle.with_gradients(plain, [x.double() for x in (q, k, v)], up)
        oracle.assert_as_exact(got, exact, oracle.with_gradients(plain, [q, k, v], up))
        words = {"reference": "formula in float64"}
        column = "forward" if dtype == torch.float32 else "dtype"
        conform.record("row_attention", column, got[0], exact[0], **words)
        slopes = "gradient" if column == "forward" else column
        conform.record("row_attention", slopes, got[1:], exact[1:], **words)


@pytest.mark.parametrize("n_queries, n_keys", [(5, 5), (3, 7), (7, 3)])
def test_gradcheck(n_queries, n_keys):
    q, k, v = (
        torch.randn(1, h, n, d, dtype=torch.float64, requires_grad=True)
        for h, n, d in ((4, n_queries, 3), (2, n_keys, 3), (2, n_keys, 2))
    )
    for causal in (False, True):
        run = lambda q, k, v, c=causal: row_attention(q, k, v, causal=c, block_q=2)  # noqa: E731
        assert gradcheck(run, (q, k, v))


def test_query_that_sees_nothing_gets_zeros_and_finite_gradients():
    inputs, up = [draw(1, 2, n, 8) for n in (9, 4, 4)], draw(1, 2, 9, 8)
    out, *grads = oracle.with_gradients(
        lambda q, k, v: row_attention(q, k, v, causal=True, block_q=3), inputs, up
    )
    assert (out[:, :, :5] == 0).all() and (out[:, :, 5:] != 0).all()
    assert (grads[0][:, :, :5] == 0).all()
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_to_attend_to_gives_zeros(shape, causal):
    n_batch, n_heads, n_queries, n_keys = shape
    inputs = [draw(n_batch, n_heads, n, 8) for n in (n_queries, n_keys, n_keys)]
    up = draw(n_batch, n_heads, n_queries, 8)
    run = lambda q, k, v: row_attention(q, k, v, causal=causal)  # noqa: E731
    out, *grads = oracle.with_gradients(run, inputs, up)
    assert out.shape == (n_batch, n_heads, n_queries, 8) and (out == 0).all()
    assert [x.shape for x in grads] == [x.shape for x in inputs]


def test_leading_dimensions_as_in_chapter_1():
    shapes = [((5, 8), (7, 8)), ((2, 5, 8), (2, 7, 8)), ((2, 2, 2, 5, 8), (2, 7, 8))]
    for q_shape, k_shape in shapes:
        q, k, v = draw(*q_shape), draw(*k_shape), draw(*k_shape)
        got = row_attention(q, k, v, causal=True)
        assert_close(got, attention(q, k, v, causal=True))


def test_mask_goes_to_the_fused_kernel(monkeypatch):
    q, k, v = (draw(1, 2, 5, 8) for _ in range(3))
    mask = torch.rand(1, 1, 5, 5) < 0.6
    assert_close(
        row_attention(q, k, v, mask, causal=True), attention(q, k, v, mask, causal=True)
    )
    given = []
    fused = lambda *what: given.append(what) or what[0]  # noqa: E731
    monkeypatch.setattr(flash, "fused_attention", fused)
    row_attention(q, k, v, mask)
    row_attention(*(x.to("meta") for x in (q, k, v)), causal=True)
    row_attention(q, k, v, causal=True)
    assert len(given) == 2 and given[0][3] is mask


def test_layer_under_autocast_computes_in_bfloat16():
    layer = MultiHeadAttention(16, 2, attend=row_attention)
    x = draw(2, 70, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, causal=True)
        given = row_attention(*(draw(1, 1, 4, 8) for _ in range(3)))
    assert out.dtype == given.dtype == torch.bfloat16
    out.float().sum().backward()
    assert_close(out.float(), layer(x, causal=True), rtol=0, atol=3e-2)
    assert layer.qkv.weight.grad.isfinite().all()


def test_weights_are_kept_only_for_a_backward_pass():
    def kept(inputs) -> int:
        numbers = []
        keep = lambda x: numbers.append(x.numel())  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            row_attention(*inputs, causal=True)
        return sum(numbers)

    inputs = torch.randn(3, 1, 2, 256, 8).unbind()
    assert kept(inputs) == 0
    leaves = [x.clone().requires_grad_() for x in inputs]
    weights = 2 * sum(64 * 64 * n for n in (1, 2, 3, 4))
    assert kept(leaves) == 3 * 2 * 256 * 8 + weights
    with torch.no_grad():
        assert kept(leaves) == 0


@pytest.mark.parametrize(
    "error, message, change",
    [
        (ValueError, "q and k must have the same width", {"k": draw(1, 2, 5, 7)}),
        (TypeError, "one floating-point dtype", {"q": draw(1, 2, 5, 8).double()}),
        (ValueError, "must be on one device", {"k": draw(1, 2, 5, 8).to("meta")}),
        (ValueError, "block_q must be a whole number from 1", {"block_q": 0}),
        (TypeError, "mask must be bool", {"mask": torch.ones(5, 5)}),
    ],
)
def test_refusals_are_one_line(error, message, change):
    inputs = {name: draw(1, 2, 5, 8) for name in "qkv"} | change
    with pytest.raises(error, match=message) as caught:
        row_attention(**inputs)
    assert "\n" not in str(caught.value)
