"""The kernels against float64: on a GPU, or in Triton's interpreter without one.

The interpreter is chosen when a kernel is made, so it needs a process of its own:

    TRITON_INTERPRET=1 pytest tests/kernels/test_triton.py
"""

import itertools
import os

import attention_oracle as oracle
import pytest
import torch
from torch.testing import assert_close

GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("without a GPU only with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from transformer import flash_triton  # noqa: E402
from transformer.attention import MultiHeadAttention, attention  # noqa: E402
from transformer.flash_triton import Tile, triton_attention  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * GPU
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200]
WIDTHS = [1, 8, 16, 30, 40, 63, 64, 72, 80, 96, 112, 128, 160, 256]
BLOCKS = [Tile(64, 64, 4, 1), Tile(16, 32, 4, 1), Tile(128, 64, 4, 1)]
HOW = [  # causal, window, whether some keys are padding, key-value heads of two
    (False, None, False, 2),
    (True, None, False, 1),
    (False, None, True, 1),
    (True, 20, False, 2),
    (True, None, True, 2),
    (False, 1, True, 1),
    (False, 300, False, 1),
]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def blocks(monkeypatch):
    """Choose the tile where the kernel is interpreted: any is as good there."""

    def choose(tile: Tile) -> None:
        if not GPU:
            monkeypatch.setattr(flash_triton, "choose_tile", lambda *key: tile)

    return choose


def draw(*shape: int, dtype=torch.float32) -> torch.Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(*shape).to(DEVICE, dtype)


def dense(mask, window, n_queries, n_keys):
    """What a mask and a window hide, as one mask; causality is not in it."""
    if window is None:
        return mask
    positions = torch.arange(n_queries, device=DEVICE)[:, None] + n_keys - n_queries
    distance = positions - torch.arange(n_keys, device=DEVICE)
    band = (distance >= 0) & (distance < window)
    return band if mask is None else band & mask


def compare(inputs, upstream, conform=None, column="forward", **how):
    """The kernel against the formula in float64, and in the same dtype as a peer.

    In float32 also against an absolute bound, which no peer can widen.
    """
    window = how.pop("window", None)
    n_queries, n_keys = inputs[0].size(-2), inputs[1].size(-2)
    causal, mask = how.get("causal", False), how.get("mask")
    seen = dense(mask, window, n_queries, n_keys)

    def ours(q, k, v):
        return triton_attention(q, k, v, mask, causal, window)

    def plain(q, k, v):
        return oracle.plain(q, k, v, seen, causal)

    got = oracle.with_gradients(ours, inputs, upstream)
    exact = oracle.with_gradients(plain, [x.double() for x in inputs], upstream)
    peer = oracle.with_gradients(plain, inputs, upstream)
    oracle.assert_as_exact(got, exact, peer)
    if inputs[0].dtype == torch.float32:
        for mine, true in zip(got, exact, strict=True):
            assert_close(mine.double(), true, rtol=1e-4, atol=2e-4)
    if conform is not None:
        name, words = "triton_attention", {"reference": "formula in float64"}
        conform.record(name, column, got[0], exact[0], **words)
        slopes = "gradient" if column == "forward" else column
        conform.record(name, slopes, got[1:], exact[1:], **words)
    return got


def example(n_queries, n_keys, d, e, n_shared, dtype):
    """q, k, v with two query heads, and a gradient from above that is not ones."""
    q = draw(1, 2, n_queries, d, dtype=dtype)
    k, v = (draw(1, n_shared, n_keys, w, dtype=dtype) for w in (d, e))
    return [q, k, v], draw(1, 2, n_queries, e)


PAIRS = list(itertools.product(LENGTHS, LENGTHS))


@pytest.mark.parametrize("n_queries", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_length_forward_and_backward(n_queries, dtype, blocks, conform):
    half = dtype == torch.float16 and not GPU  # every second length is enough there
    skip = LENGTHS.index(n_queries) % 2 if half else 0
    for n_keys in LENGTHS[skip :: 1 + half]:
        case = PAIRS.index((n_queries, n_keys)) + (dtype == torch.float16)
        settings = HOW if GPU else [HOW[case % len(HOW)]]
        for causal, window, padded, n_shared in settings:
            blocks(BLOCKS[case % len(BLOCKS)])
            inputs, upstream = example(n_queries, n_keys, 16, 16, n_shared, dtype)
            mask = torch.rand(1, 1, 1, n_keys).to(DEVICE) < 0.7 if padded else None
            how = {"causal": causal, "window": window, "mask": mask}
            column = "forward" if dtype == torch.float32 else "dtype"
            compare(inputs, upstream, conform, column, **how)


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width_of_keys_and_of_values(d, dtype, blocks):
    for e in (d, WIDTHS[(WIDTHS.index(d) + 5) % len(WIDTHS)]):
        blocks(Tile(32, 32, 4, 1))
        inputs, upstream = example(33, 40, d, e, 1, dtype)
        compare(inputs, upstream, causal=True)


def test_last_feature_counts_and_scale_is_of_the_width(blocks):
    blocks(Tile(32, 32, 4, 1))
    (q, k, v), _ = example(5, 7, 80, 80, 2, torch.float32)
    q[..., -1], k[..., -1] = 10 * q[..., -1], 10 * k[..., -1]
    assert_close(triton_attention(q, k, v), attention(q, k, v), rtol=0, atol=1e-4)
    wrong = attention(q * (80 / 128) ** 0.5, k, v)
    assert (wrong - triton_attention(q, k, v)).abs().max() > 0.01


def test_nothing_behind_a_tensor_is_read_or_written(blocks):
    blocks(Tile(32, 32, 4, 1))
    wide = [torch.full((1, 2, 40, 24), torch.nan, device=DEVICE) for _ in "qkv"]
    (q, k, v), upstream = example(17, 19, 16, 16, 2, torch.float32)
    views = []
    for room, x in zip(wide, (q, k, v), strict=True):
        view = room[:, :, 3 : 3 + x.size(2), 4:20]
        views.append(view.copy_(x))
    got = compare(views, upstream, causal=True)
    assert all(x.isfinite().all() for x in got)
    for room, x in zip(wide, (q, k, v), strict=True):
        assert room.isnan().sum() == room.numel() - x.numel()


@pytest.mark.parametrize("layout", ["fused", "transposed", "expanded", "step"])
def test_views_and_upstream_of_any_layout(layout, blocks):
    blocks(Tile(32, 32, 4, 1))
    if layout == "fused":
        q, k, v = draw(2, 21, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind()
    elif layout == "transposed":
        q, k, v = (draw(2, 21, 2, 8).transpose(1, 2) for _ in "qkv")
    elif layout == "expanded":
        q, k, v = (draw(2, 1, 21, 8).expand(2, 2, 21, 8) for _ in "qkv")
    else:
        q, k, v = (draw(2, 2, 21, 16)[..., ::2] for _ in "qkv")
    ups = [torch.ones((), device=DEVICE).expand(2, 2, 21, 8)]
    ups += [draw(2, 21, 2, 8).transpose(1, 2), draw(2, 2, 8, 21).mT]

    def attend(q, k, v):
        return triton_attention(q, k, v, causal=True)

    for up in ups:
        got = oracle.with_gradients(attend, [q, k, v], up)
        flat = [x.contiguous() for x in (q, k, v)]
        again = oracle.with_gradients(attend, flat, up.contiguous())
        assert_close(got, again, rtol=0, atol=0)
        compare([q, k, v], up, causal=True)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)])
def test_nothing_to_attend_to_gives_zeros_and_zero_gradients(shape):
    n_batch, n_heads, n_queries, n_keys = shape
    inputs = [draw(n_batch, n_heads, n, 16) for n in (n_queries, n_keys, n_keys)]
    upstream = draw(n_batch, n_heads, n_queries, 16)
    out, *grads = oracle.with_gradients(triton_attention, inputs, upstream)
    assert out.shape == (n_batch, n_heads, n_queries, 16) and (out == 0).all()
    assert [x.shape for x in grads] == [x.shape for x in inputs]
    assert all((x == 0).all() for x in grads)


def test_query_that_sees_nothing_gets_zeros_and_finite_gradients(blocks):
    blocks(Tile(16, 16, 4, 1))
    inputs, upstream = example(40, 20, 16, 16, 2, torch.float32)
    inputs = [100 * x for x in inputs]  # where exp would overflow
    mask = torch.arange(20, device=DEVICE)[None, None, None] >= 5
    for how in ({"causal": True}, {"mask": mask, "causal": True, "window": 3}):
        out, *grads = oracle.with_gradients(
            lambda q, k, v, how=how: triton_attention(q, k, v, **how), inputs, upstream
        )
        assert (out[:, :, :20] == 0).all() and (out[:, :, -1] != 0).any()
        assert all(x.isfinite().all() for x in (out, *grads))
        assert (grads[0][:, :, :20] == 0).all()
    assert all((x[:, :, :5] == 0).all() for x in grads[1:])  # keys that are hidden


def test_no_key_at_all_is_seen(blocks):
    blocks(Tile(16, 16, 4, 1))
    inputs, upstream = example(20, 18, 16, 16, 1, torch.float32)
    hidden = torch.zeros(1, 1, 1, 18, dtype=torch.bool, device=DEVICE)
    got = oracle.with_gradients(
        lambda q, k, v: triton_attention(q, k, v, hidden), inputs, upstream
    )
    assert all((x == 0).all() for x in got)


def test_leading_dimensions_as_in_chapter_1(blocks):
    blocks(Tile(16, 16, 4, 1))
    shapes = [((5, 8), (7, 8)), ((2, 5, 8), (2, 7, 8)), ((2, 2, 2, 5, 8), (2, 7, 8))]
    for q_shape, k_shape in shapes:
        q, k, v = draw(*q_shape), draw(*k_shape), draw(*k_shape)
        compare([q, k, v], draw(*q_shape), causal=True)
        assert triton_attention(q, k, v).shape == q.shape
    mask = torch.rand(2, 1, 1, 1, 7).to(DEVICE) < 0.7
    inputs = [draw(2, 2, 2, 5, 8), draw(2, 7, 8), draw(2, 7, 8)]
    compare(inputs, draw(2, 2, 2, 5, 8), mask=mask)


def test_group_reads_its_head_in_order_and_gets_the_sum_of_gradients(blocks):
    blocks(Tile(16, 16, 4, 1))
    q, k = draw(1, 6, 9, 16), draw(1, 2, 9, 16)
    v = torch.arange(2.0, device=DEVICE)[None, :, None, None].expand(1, 2, 9, 16)
    out = triton_attention(q, k, v.contiguous())
    assert out.mean((0, 2, 3)).round().tolist() == [0, 0, 0, 1, 1, 1]
    inputs, upstream = [q, k, draw(1, 2, 9, 16)], draw(1, 6, 9, 16)
    got = compare(inputs, upstream)
    apart = oracle.with_gradients(
        triton_attention,
        [q, *(x.repeat_interleave(3, 1) for x in inputs[1:])],
        upstream,
    )
    for mine, theirs in zip(got[2:], apart[2:], strict=True):
        assert_close(mine, theirs.view(1, 2, 3, 9, 16).sum(2), rtol=0, atol=1e-5)


def test_backward_honours_what_forward_does_not_hide(blocks):
    blocks(Tile(16, 16, 4, 1))
    inputs, upstream = example(20, 20, 16, 16, 2, torch.float32)
    v_grads = {}
    for causal in (False, True):
        got = compare(inputs, upstream, causal=causal)
        v_grads[causal] = got[3][:, :, -1]
    q, k, _ = (x.double() for x in inputs)
    last = (q @ k.mT / 4).softmax(-1)[:, :, -1, -1, None] * upstream[:, :, -1]
    assert_close(v_grads[True].double(), last.double(), rtol=0, atol=1e-5)
    assert not v_grads[False].allclose(v_grads[True])


def test_case_26_two_runs_give_the_same_bits(blocks):
    blocks(Tile(32, 32, 4, 1))
    size, dtype = (2048, torch.bfloat16) if GPU else (70, torch.float32)
    inputs, upstream = example(size, size, 64, 64, 1, dtype)

    def run():
        return oracle.with_gradients(
            lambda q, k, v: triton_attention(q, k, v, causal=True), inputs, upstream
        )

    first = run()
    for _ in range(30 if GPU else 2):
        assert all(a.equal(b) for a, b in zip(run(), first, strict=True))


@pytest.mark.parametrize("length", [1, 33])
def test_layer_with_the_kernel_equals_layer_with_the_formula(length, blocks):
    blocks(Tile(16, 16, 4, 1))
    layers = [
        MultiHeadAttention(32, 4, attend=attend).to(DEVICE)
        for attend in (triton_attention, attention)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    x = draw(2, length, 32)
    mine, theirs = (layer(x, causal=True) for layer in layers)
    assert_close(mine, theirs, rtol=0, atol=1e-5)
    grads = [
        torch.autograd.grad(out.square().sum(), layer.parameters())
        for out, layer in zip((mine, theirs), layers, strict=True)
    ]
    assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_float32_is_not_tf32_unless_asked():
    seen = []
    kernel = flash_triton.forward_kernel

    class Spy:
        __name__ = kernel.__name__

        def __getitem__(self, grid):
            return lambda *given, **constants: seen.append(constants["PRECISION"])

    q = draw(1, 1, 4, 16)
    inputs = [flash_triton.strided(x) for x in (q, q)]
    how = {"mask": None, "causal": False, "window": None}
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        try:
            flash_triton.launch(Spy(), q, q, q, *inputs, **how)
        finally:
            torch.set_float32_matmul_precision("highest")
    assert seen == ["ieee", "tf32"]


@pytest.mark.parametrize("window", [40, 2**31 - 1, 2**63])
def test_window_that_hides_no_key_is_none(window, blocks):
    blocks(Tile(16, 16, 4, 1))
    inputs, upstream = example(33, 40, 16, 16, 1, torch.float32)
    got, expected = (
        oracle.with_gradients(
            lambda q, k, v, w=w: triton_attention(q, k, v, causal=True, window=w),
            inputs,
            upstream,
        )
        for w in (window, None)
    )
    assert_close(got, expected, rtol=0, atol=0)


def test_refusals_are_one_line():
    q, k, v = (draw(1, 2, n, 16) for n in (4, 6, 6))
    causal = torch.ones(4, 6, dtype=torch.bool, device=DEVICE).tril()
    per_head = torch.ones(1, 2, 1, 6, dtype=torch.bool, device=DEVICE)
    cases = [
        (ValueError, r"padding masks only.*\(4, 6\)", (q, k, v, causal)),
        (ValueError, r"padding masks only.*\(1, 2, 1, 6\)", (q, k, v, per_head)),
        (TypeError, "mask must be bool", (q, k, v, per_head.float())),
        (ValueError, "window must be at least 1, got window=0", (q, k, v, None, 1, 0)),
        (TypeError, r"a whole number, got window=2\.5", (q, k, v, None, True, 2.5)),
        (TypeError, "a whole number, got window=True", (q, k, v, None, True, True)),
        (ValueError, "on one device.*k.device=.*meta", (q, k.to("meta"), v)),
        (ValueError, "on one device.*v.device=.*meta", (q, k, v.to("meta"))),
        (TypeError, "float64", (q.double(), k.double(), v.double())),
        (TypeError, "one floating-point dtype.*q.dtype=", (q.half(), k, v)),
    ]
    wide = [draw(1, 1, 2, 257)] * 3
    cases += [(ValueError, r"between 1 and 256, got q.size\(-1\)=257", wide)]
    if not GPU:
        half = [x.bfloat16() for x in (q, k, v)]
        cases += [(TypeError, "interpreter gets bfloat16 wrong", half)]
    for error, words, given in cases:
        with pytest.raises(error, match=words) as caught:
            triton_attention(*given)
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(not GPU, reason="7 GB of a GPU's memory")
def test_case_25_batch_further_away_than_32_bits_reach():
    if torch.cuda.mem_get_info()[0] < 9 * 2**30:
        pytest.skip("less than 9 GB of memory are free")
    stride = 1_200_000_000
    flat = torch.empty(2 * stride + 2 * 32 * 64, dtype=torch.bfloat16, device=DEVICE)
    x = flat.as_strided((3, 2, 32, 64), (stride, 32 * 64, 64, 1))
    x.copy_(draw(3, 2, 32, 64))
    got = triton_attention(x, x, x, causal=True)
    alone = x.contiguous()
    assert_close(
        got, triton_attention(alone, alone, alone, causal=True), rtol=0, atol=0
    )


@pytest.mark.skipif(not GPU, reason="70,000 programs are too many for the interpreter")
def test_case_25_more_heads_than_a_grid_is_wide():
    q = draw(70_000, 1, 16, 16, dtype=torch.float16)
    got = triton_attention(q, q, q)
    assert_close(got[-1:], triton_attention(q[-1:], q[-1:], q[-1:]), rtol=0, atol=0)
