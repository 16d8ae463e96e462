"""What `window_attention` and `window_mask` promise, over shapes, masks and dtypes."""

import itertools
from functools import partial
from unittest import mock

import pytest
import torch
from attention_oracle import (
    DEVICES,
    HALF,
    assert_as_exact,
    by_hand,
    plain,
    repeat_heads,
    torchs,
    with_gradients,
)
from side_by_side import peak_bytes
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from transformer import window as window_module
from transformer.attention import MultiHeadAttention, attention, padding_mask
from transformer.window import window_attention, window_mask

each_device = pytest.mark.parametrize("device", DEVICES)
LOOPS = "loops in float64"

SHAPES = {  # of q, of k, and E
    "self": ((2, 3, 6, 8), (2, 3, 6, 8), 8),
    "fewer queries": ((2, 2, 3, 8), (2, 2, 7, 8), 8),
    "more queries": ((2, 2, 7, 8), (2, 2, 4, 8), 8),
    "wide values": ((2, 2, 5, 4), (2, 2, 5, 4), 9),
    "one query": ((2, 2, 1, 8), (2, 2, 5, 8), 8),
    "one token": ((2, 2, 1, 8), (2, 2, 1, 8), 8),
    "no heads": ((6, 8), (6, 8), 6),
    "no batch, shared": ((4, 5, 8), (2, 5, 8), 8),
    "five dimensions": ((2, 1, 2, 5, 8), (2, 1, 2, 5, 8), 8),
    "grouped": ((2, 4, 5, 8), (2, 2, 6, 8), 8),
    "one shared head": ((2, 4, 5, 8), (2, 1, 5, 8), 5),
    "keys without batch": ((2, 2, 5, 8), (2, 6, 8), 8),
    "queries without batch": ((2, 5, 8), (2, 2, 6, 8), 8),
    "queries alone": ((5, 8), (2, 1, 6, 8), 8),
    "crossed batches": ((2, 1, 2, 5, 8), (1, 3, 2, 5, 8), 4),
}
MASKS = ["none", "any", "keys", "queries", "shared", "one for all", "nothing"]


def band_by_hand(n_queries: int, n_keys: int, window: int) -> torch.Tensor:
    """One query and one key at a time: 0 ≤ p − j < W, where p = S − T + i."""
    places = [n_keys - n_queries + i for i in range(n_queries)]
    rows = [[0 <= p - j < window for j in range(n_keys)] for p in places]
    return torch.tensor(rows, dtype=torch.bool).view(n_queries, n_keys)


def make_inputs(at_q, at_k, e: int, dtype=torch.float64, device="cpu", seed=0):
    """q, k, v, and a gradient that arrives at the output."""
    torch.manual_seed(seed)
    q, k, v = torch.randn(at_q), torch.randn(at_k), torch.randn(*at_k[:-1], e)
    upstream = torch.randn(plain(q, k, v).shape)
    return [x.to(device, dtype) for x in (q, k, v, upstream)]


def make_mask(q, k, kind: str) -> torch.Tensor | None:
    """A mask for these scores."""
    scores = (q.cpu().float() @ repeat_heads(q, k).cpu().float().mT).shape
    torch.manual_seed(1)
    full = torch.rand(scores) < 0.6
    full[..., 0, :] = False  # a query that sees nothing
    mask = {
        "any": full,
        "keys": full[..., -1:, :],
        "queries": full[..., :1] ^ True,
        "shared": full.flatten(0, -3)[0] if full.dim() > 2 else full,
        "one for all": torch.tensor(True),
        "nothing": torch.zeros(1, 1, dtype=torch.bool),
    }.get(kind)
    return None if mask is None else mask.to(q.device)


def in_band(function, window: int, mask, causal=False):
    """The function with the window as a mask, of q, k, v."""

    def run(q, k, v):
        band = band_by_hand(q.size(-2), k.size(-2), window).to(q.device)
        return function(q, k, v, band if mask is None else band & mask, causal)

    return run


# --- the mask ------------------------------------------------------------------------


@pytest.mark.parametrize("n_keys", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("n_queries", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 9, 100])
def test_mask_equals_loops(n_queries, n_keys, window):
    got = window_mask(n_queries, n_keys, window)
    assert got.dtype == torch.bool and got.shape == (n_queries, n_keys)
    assert got.equal(band_by_hand(n_queries, n_keys, window))


@pytest.mark.parametrize("window", [0, -1, 2.0, True, None, "3"], ids=repr)
def test_window_that_is_no_count_is_refused(window):
    message = f"window must be a whole number from 1, got window={window!r}"
    for make in (lambda: window_mask(3, 3, window), lambda: window_attention(window)):
        with pytest.raises(ValueError, match=f"^{message}$"):
            make()


@each_device
def test_mask_is_made_on_the_device_that_is_asked_for(device):
    assert window_mask(2, 2, 1, torch.device(device)).device.type == device


# --- values and gradients ------------------------------------------------------------


@each_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("window", [1, 2, 4, 50])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_equal_loops(shape, kind, window, dtype, device, conform):
    *inputs, upstream = make_inputs(*SHAPES[shape], dtype, device)
    mask = make_mask(*inputs[:2], kind)
    on_cpu = mask if mask is None else mask.cpu()
    loops = in_band(lambda *x: by_hand(*x)[0], window, on_cpu)
    doubles = [x.cpu().double() for x in inputs]
    exact = with_gradients(loops, doubles, upstream.cpu())
    ours = partial(window_attention(window), mask=mask)
    got = with_gradients(ours, inputs, upstream)
    peer = with_gradients(in_band(plain, window, mask), inputs, upstream)
    assert got[0].dtype == dtype
    assert_as_exact(got, exact, peer)
    column = "forward" if kind == "none" else "mask"
    conform.record("window_attention", column, got[0], exact[0], reference=LOOPS)
    conform.record("window_attention", "gradient", got[1:], exact[1:], reference=LOOPS)


LENGTHS = [(1, 1), (127, 127), (128, 128), (129, 129), (300, 300)]
LENGTHS += [(1, 300), (5, 300), (130, 300), (300, 130), (300, 5), (257, 1)]


@each_device
@pytest.mark.parametrize("window", [1, 2, 127, 128, 129, 200, 300, 1000])
@pytest.mark.parametrize("n_queries, n_keys", LENGTHS)
def test_every_length_and_window_equals_the_dense_mask(
    n_queries, n_keys, window, device, conform
):
    shape = (2, 4, n_queries, 8), (2, 2, n_keys, 8), 6
    *inputs, upstream = make_inputs(*shape, device=device)
    torch.manual_seed(2)
    masks = [None, torch.rand(2, 4, n_queries, n_keys) < 0.5]
    masks += [padding_mask(torch.tensor([n_keys, n_keys // 2]), n_keys)]
    for mask in masks:
        mask = mask if mask is None else mask.to(device)
        ours = partial(window_attention(window), mask=mask)
        got = with_gradients(ours, inputs, upstream)
        want = with_gradients(in_band(torchs, window, mask), inputs, upstream)
        how = {"reference": "torch.nn.functional.scaled_dot_product_attention"}
        column = "forward" if mask is None else "mask"
        conform("window_attention", column, got[0], want[0], atol=1e-10, **how)
        conform("window_attention", "gradient", got[1:], want[1:], atol=1e-10, **how)


@each_device
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("kind", ["none", "any"])
@pytest.mark.parametrize("n_queries, n_keys", [(150, 150), (7, 150), (150, 7)])
def test_half_precision_is_as_exact_as_the_formula(
    n_queries, n_keys, kind, dtype, device, conform
):
    shape, window = ((2, 4, n_queries, 8), (2, 2, n_keys, 8), 8), 40
    *inputs, upstream = make_inputs(*shape, dtype, device)
    mask = make_mask(*inputs[:2], kind)
    ours = partial(window_attention(window), mask=mask)
    doubles = [x.double() for x in inputs]
    exact = with_gradients(in_band(plain, window, mask), doubles, upstream)
    got = with_gradients(ours, inputs, upstream)
    peer = with_gradients(in_band(plain, window, mask), inputs, upstream)
    assert got[0].dtype == dtype
    assert_as_exact(got, exact, peer)
    reference = "formula in float64"
    conform.record("window_attention", "dtype", got, exact, reference=reference)


@each_device
@pytest.mark.parametrize("kind", ["none", "any", "keys"])
@pytest.mark.parametrize("shape", ["self", "more queries", "wide values", "grouped"])
def test_gradcheck_also_of_the_gradient(shape, kind, device):
    q, k, v, _ = make_inputs(*SHAPES[shape], device=device)
    mask = make_mask(q, k, kind)
    mask = mask[:1] if mask is not None and mask.dim() == 4 else mask
    inputs = [x[:1].requires_grad_() for x in (q, k, v)]
    ours = partial(window_attention(3), mask=mask)
    assert gradcheck(ours, inputs) and gradgradcheck(ours, inputs)


def test_gradients_of_some_inputs_only():
    *inputs, upstream = make_inputs(*SHAPES["grouped"])
    q, k, v = (x.requires_grad_() for x in inputs)
    whole = torch.autograd.grad(window_attention(3)(q, k, v), (q, k, v), upstream)
    for i, x in enumerate((q, k, v)):
        others = [y if y is x else y.detach() for y in (q, k, v)]
        (got,) = torch.autograd.grad(window_attention(3)(*others), x, upstream)
        assert_close(got, whole[i])


@each_device
def test_query_that_sees_nothing_gets_zeros_and_finite_gradients(device):
    *inputs, upstream = make_inputs((1, 2, 300, 8), (1, 2, 200, 8), 8, device=device)
    lengths = torch.tensor([20], device=device)
    for mask in (None, padding_mask(lengths, 200)):
        ours = partial(window_attention(64), mask=mask)
        out, *grads = with_gradients(ours, inputs, upstream)
        assert (out[:, :, :100] == 0).all() and (out[:, :, 100:120] != 0).all()
        assert (grads[0][:, :, :100] == 0).all()
        assert all(grad.isfinite().all() for grad in grads)
    assert (out[:, :, 183:] == 0).all()  # keys 120 and later are padding


@pytest.mark.parametrize("n_queries, n_keys", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("batch", [0, 2])
def test_nothing_in_nothing_out(batch, n_queries, n_keys):
    shape = (batch, 4, n_queries, 8), (batch, 2, n_keys, 8), 6
    *inputs, upstream = make_inputs(*shape)
    for mask in (None, torch.ones(n_queries, n_keys, dtype=torch.bool)):
        ours = partial(window_attention(3), mask=mask)
        out, *grads = with_gradients(ours, inputs, upstream)
        assert out.shape == (batch, 4, n_queries, 6) and (out == 0).all()
        assert all((grad == 0).all() for grad in grads)


def test_empty_batch_with_a_mask_of_its_own():
    q, k, v = torch.randn(0, 4, 5, 8), torch.randn(0, 2, 5, 8), torch.randn(0, 2, 5, 6)
    mask = torch.ones(0, 4, 5, 5, dtype=torch.bool)
    assert window_attention(3)(q, k, v, mask).shape == (0, 4, 5, 6)


def test_causal_changes_nothing():
    q, k, v, _ = make_inputs(*SHAPES["grouped"])
    mask = make_mask(q, k, "any")
    attend = window_attention(3)
    assert attend(q, k, v, mask, True).equal(attend(q, k, v, mask, False))


@each_device
def test_layout_in_memory_does_not_matter(device):
    *wanted, upstream = make_inputs((2, 4, 140, 8), (2, 2, 140, 8), 8, device=device)
    exact = with_gradients(window_attention(30), wanted, upstream)
    tokens_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in wanted]
    features_first = [x.mT.contiguous().mT for x in wanted]
    every_second = [x.repeat_interleave(2, -1)[..., ::2] for x in wanted]
    for inputs in (tokens_first, features_first, every_second):
        assert not any(x.is_contiguous() for x in inputs)
        got = with_gradients(window_attention(30), inputs, upstream.mT.clone().mT)
        assert_close(got, exact, rtol=0, atol=1e-12)


def test_refuses_what_attention_refuses():
    q, k, v, _ = make_inputs(*SHAPES["self"])
    attend = window_attention(3)
    with pytest.raises(TypeError, match="mask must be bool"):
        attend(q, k, v, torch.ones(6, 6))
    with pytest.raises(ValueError, match="mask must broadcast"):
        attend(q, k, v, torch.ones(6, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="same width"):
        attend(q, k[..., :4], v)
    with pytest.raises(ValueError, match="multiple of those of k"):
        attend(q, k[:, :2], v[:, :2])


# --- case 29: off by one -------------------------------------------------------------


def test_case_29_window_counts_the_query_itself():
    assert window_mask(6, 6, 3).sum(1).tolist() == [1, 2, 3, 3, 3, 3]
    assert window_mask(3, 6, 3).sum(1).tolist() == [3, 3, 3]
    assert window_mask(6, 3, 2).sum(1).tolist() == [0, 0, 0, 1, 2, 2]


@each_device
@pytest.mark.parametrize("window", [1, 3, 128, 140])
def test_case_29_key_at_the_edge_counts_and_the_one_before_does_not(window, device):
    q, k, v, _ = make_inputs((1, 1, 300, 8), (1, 1, 300, 8), 8, device=device)
    attend, i = window_attention(window), 290
    before = attend(q, k, v)[0, 0, i]
    for place, moves in ((i - window, False), (i - window + 1, True), (i + 1, False)):
        other_k, other_v = k.clone(), v.clone()
        other_k[..., place, :] += 1
        other_v[..., place, :] += 1
        after = attend(q, other_k, other_v)[0, 0, i]
        assert after.equal(before) != moves


def test_case_29_window_of_one_gives_the_values():
    q, k, v, _ = make_inputs((2, 4, 300, 8), (2, 2, 300, 8), 6)
    assert_close(window_attention(1)(q, k, v), v.repeat_interleave(2, 1))


@pytest.mark.parametrize("window", [140, 141, 10**9])
def test_case_29_window_that_holds_everything_is_causal_attention(window):
    q, k, v, _ = make_inputs((2, 2, 140, 8), (2, 2, 140, 8), 8)
    assert window_mask(140, 140, window).equal(window_mask(140, 140, 140))
    got = window_attention(window)(q, k, v)
    assert got.equal(window_attention(140)(q, k, v))
    assert_close(got, attention(q, k, v, causal=True))


def test_one_token_at_a_time_equals_all_at_once():
    q, k, v, _ = make_inputs((1, 2, 150, 8), (1, 2, 150, 8), 8)
    attend = window_attention(7)
    whole = attend(q, k, v)
    for n in (1, 6, 7, 8, 129, 150):
        last = attend(q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n])
        assert_close(last, whole[:, :, n - 1 : n])


# --- cost ----------------------------------------------------------------------------


def run(attend, inputs, mask, backward: bool):
    """Attend, and go back where asked."""
    out = attend(*inputs, mask)
    return torch.autograd.grad(out.sum(), inputs) if backward else out


def peaks(lengths, attend, backward: bool, n_kv_heads=2, mask=None) -> list[int]:
    """Most bytes held at a time for each length, inputs not counted."""
    found = []
    for t in lengths:
        q, k, v = (torch.randn(1, h, t, 16) for h in (2, n_kv_heads, n_kv_heads))
        inputs = [x.requires_grad_(backward) for x in (q, k, v)]
        seen = None if mask is None else mask(t)
        found.append(peak_bytes(partial(run, attend, inputs, seen, backward)))
    return found


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.usefixtures("one_thread")
def test_memory_is_linear_in_the_length(backward):
    lengths = [4096, 8192, 16384]
    found = peaks(lengths, window_attention(64), backward)
    first, second = (b - a for a, b in itertools.pairwise(found))
    assert 0 < second <= 1.1 * 2 * first  # twice as many tokens, twice as much
    assert found[-1] < lengths[-1] ** 2 / 8  # not a bit for each pair


@pytest.mark.usefixtures("one_thread")
def test_mask_is_cut_and_not_widened():
    lengths, pad = [2048, 4096], lambda t: padding_mask(torch.tensor([t - 9]), t)
    without = peaks(lengths, window_attention(64), True)
    with_mask = peaks(lengths, window_attention(64), True, mask=pad)
    assert with_mask[1] - without[1] < 4 * 2 * 128 * 192 * 4  # blocks, not T × S
    assert with_mask[1] < 2.05 * with_mask[0]


class LargestMade(TorchDispatchMode):
    """Remembers the most bytes of any tensor that was made, views left out."""

    def __init__(self, *given: torch.Tensor):
        super().__init__()
        self.given, self.most = {self.place(x) for x in given}, 0

    @staticmethod
    def place(x: torch.Tensor) -> int:
        return x.untyped_storage().data_ptr()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and self.place(made) not in self.given:
            self.most = max(self.most, made.untyped_storage().nbytes())
        return made


def test_shared_heads_are_not_copied():
    q, k, v = torch.randn(1, 8, 4096, 16), *torch.randn(2, 1, 1, 4096, 16)
    with LargestMade(q, k, v) as watch:
        window_attention(16)(q, k, v[..., :1])
    block = 4 * 8 * 64 * (64 + 15)  # bytes of its weights
    assert watch.most == block < 4 * k.numel()


def test_heads_laid_side_by_side_are_not_copied_whole():
    tokens = torch.randn(2, 4096, 3, 4, 16)
    q, k, v = tokens.permute(2, 0, 3, 1, 4)
    with LargestMade(tokens) as watch:
        window_attention(16)(q, k, v[..., :1])
    assert watch.most < 4 * k.numel()


# --- torch's transformations ---------------------------------------------------------


@each_device
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_autocast_is_as_exact_as_its_dtype(dtype, device):
    *inputs, upstream = make_inputs(*SHAPES["self"], torch.float32, device)
    mask = make_mask(*inputs[:2], "any")
    with torch.autocast(device, dtype):
        ours = partial(window_attention(3), mask=mask)
        got = with_gradients(ours, inputs, upstream)
        peer = with_gradients(in_band(plain, 3, mask), inputs, upstream)
    loops = in_band(lambda *x: by_hand(*x)[0], 3, None if mask is None else mask.cpu())
    exact = with_gradients(loops, [x.cpu().double() for x in inputs], upstream.cpu())
    assert got[0].dtype == dtype
    assert_as_exact(got, exact, peer)


@each_device
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_autocast_may_end_before_the_backward_pass(dtype, device):
    q, k, v, up = make_inputs(*SHAPES["grouped"], torch.float32, device)
    inputs, up = [x.requires_grad_() for x in (q, k, v)], up.to(dtype)
    with torch.autocast(device, dtype):
        out = window_attention(3)(*inputs)
    grads = torch.autograd.grad(out, inputs, up)
    cast = [x.detach().to(dtype).requires_grad_() for x in inputs]
    want = torch.autograd.grad(window_attention(3)(*cast), cast, up)
    assert_close(grads, tuple(x.float() for x in want))


@pytest.mark.parametrize("n_tokens", [7, 150])
def test_compiles_into_one_graph(n_tokens, conform):
    shape = (2, 4, n_tokens, 8), (2, 2, n_tokens, 8), 8
    *inputs, upstream = make_inputs(*shape, torch.float32)
    mask = make_mask(*inputs[:2], "any")
    torch.compiler.reset()
    for how in ({}, {"mask": mask}):
        run = partial(window_attention(5), **how)
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        got = with_gradients(compiled, inputs, upstream)
        want = with_gradients(run, inputs, upstream)
        of = {"reference": "itself uncompiled", "rtol": 1e-6, "atol": 1e-5}
        conform("window_attention", "compile", got, want, **of)
    torch.compiler.reset()


def test_is_an_attend_of_multi_head_attention():
    torch.manual_seed(3)
    layer = MultiHeadAttention(16, 4, attend=window_attention(3))
    peer = MultiHeadAttention(16, 4, attend=attention)
    peer.load_state_dict(layer.state_dict())
    x = torch.randn(2, 9, 16)
    mask = padding_mask(torch.tensor([9, 4]), 9)
    want = peer(x, mask=mask & band_by_hand(9, 9, 3))
    assert_close(layer(x, mask=mask, causal=True), want)


# --- the kernel of a GPU -------------------------------------------------------------


def test_kernel_takes_over_where_it_can(monkeypatch):
    q, k, v, _ = make_inputs(*SHAPES["grouped"])
    pad, calls = padding_mask(torch.tensor([6, 2]), 6), []

    def kernel(*given, **how):
        calls.append((given, how))
        return given[0]

    monkeypatch.setattr(window_module, "has_kernel", lambda *given: given[3] is pad)
    monkeypatch.setattr(window_module, "triton_attention", kernel)
    assert window_attention(3)(q, k, v, pad).equal(q)
    assert window_attention(3)(q, k, v).shape == q.shape and len(calls) == 1
    given, how = calls[0]
    assert all(a is b for a, b in zip(given, (q, k, v, pad), strict=True))
    assert how == {"window": 3}


def test_kernel_is_asked_only_for_what_it_takes(monkeypatch):
    class OnGpu:  # as far as the question goes
        is_cuda = True

    x, pad = OnGpu(), torch.ones(2, 1, 1, 6, dtype=torch.bool)
    check = mock.create_autospec(window_module.check_kernel)  # called as it is
    monkeypatch.setattr(window_module, "check_kernel", check)
    assert window_module.has_kernel(x, x, x, None)
    assert window_module.has_kernel(x, x, x, pad)
    assert window_module.has_kernel(x, x, x, pad[0, 0, 0])
    assert not window_module.has_kernel(x, x, x, pad.expand(2, 4, 1, 6))
    assert not window_module.has_kernel(x, x, x, pad.expand(2, 1, 5, 6))
    assert not window_module.has_kernel(torch.zeros(1), x, x, None)
    for error in (RuntimeError, TypeError, ValueError):

        def refuse(*given, error=error):
            raise error("not this")

        monkeypatch.setattr(window_module, "check_kernel", refuse)
        assert not window_module.has_kernel(x, x, x, None)
