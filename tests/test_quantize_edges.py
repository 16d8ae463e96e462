"""Layers of few bits: what they compute under a compiler, without one; edges."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from transformer import quantize
from transformer.quantize import BFloat16Linear, FloatLinear, Int4Linear, Int8Linear

KINDS = {
    "int8": Int8Linear,
    "int4": partial(Int4Linear, group=4),
    "bfloat16": BFloat16Linear,
}


def layer_of(kind, n_columns=12, bias=True):
    """A layer of five rows, and the same as a plain product."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, n_columns))
    offsets = torch.nn.Parameter(torch.randn(5)) if bias else None
    return kind(weight, offsets)


def plain(layer, x):
    """The product in float64 with the weights that the layer has."""
    bias = None if layer.bias is None else layer.bias.double()
    return F.linear(x.double(), layer.weight.double(), bias)


@pytest.fixture(params=[False, True], ids=["eager", "compiling"])
def compiling(request, monkeypatch):
    """Let layers take the way that a compiler is given, and walk it."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: request.param)
    return request.param


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(12,), (1, 12), (1, 1, 12), (2, 12), (0, 12)])
@pytest.mark.parametrize("kind", [*KINDS.values(), FloatLinear], ids=[*KINDS, "float"])
def test_each_way_gives_the_product(kind, shape, bias, compiling):
    layer, x = layer_of(kind, bias=bias), torch.randn(*shape)
    y = layer(x)
    assert y.shape == (*shape[:-1], 5) and y.dtype == torch.float32
    assert_close(y.double(), plain(layer, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [*KINDS.values()], ids=[*KINDS])
def test_one_row_is_computed_in_float32_or_wider_and_comes_back(kind, dtype, compiling):
    layer, x = layer_of(kind, bias=False), torch.randn(12).to(dtype)
    y = layer(x)
    assert y.dtype == dtype
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6  # weights are float32's
    atol = 5e-2 if dtype == torch.bfloat16 and not compiling else tolerance
    assert_close(y.double(), plain(layer, x), rtol=tolerance, atol=atol)


def test_rows_of_another_dtype_than_the_weights_are_refused_as_torch_does():
    layer = layer_of(FloatLinear)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(torch.randn(12, dtype=torch.float64))


@pytest.mark.parametrize("n_columns", [8, 7])
def test_sum_of_a_row_is_the_product_in_float32(n_columns):
    weight = torch.randn(5, n_columns).bfloat16()
    x = torch.randn(n_columns).bfloat16()
    y = quantize.sum_rows(weight, x)
    assert y.dtype == torch.bfloat16
    wanted = (weight.double() @ x.double()).bfloat16()
    assert_close(y, wanted, rtol=2**-8, atol=1e-6)
    half = quantize.multiply_rows(weight, x.float())
    assert half.dtype == torch.float32
    assert_close(half.double(), weight.double() @ x.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slabs, whole, wins", [(1, 2, True), (2, 1, False)])
def test_slabs_are_taken_where_their_best_of_thirty_is_shorter(
    monkeypatch, slabs, whole, wins
):
    timed = {"slabs": [], "whole": []}

    def timeit(way, number):
        assert number == 1
        name = "slabs" if way.func is quantize.slab_rows else "whole"
        assert_close(way(), torch.full((1024,), 1024.0))
        timed[name].append(way)
        seconds = {"slabs": slabs, "whole": whole}[name]
        return seconds if len(timed[name]) == 7 else 9  # the others are disturbed

    monkeypatch.setattr(quantize, "timeit", timeit)
    assert quantize.slabs_win.__wrapped__(1) is wins
    assert len(timed["slabs"]) == len(timed["whole"]) == 30
    monkeypatch.setattr(quantize, "timeit", lambda way, number: 1.0)
    assert not quantize.slabs_win.__wrapped__(1)


@pytest.mark.parametrize("wins", [True, False])
def test_float_layer_takes_slabs_for_one_row_where_they_win(monkeypatch, wins):
    asked, taken, plain_slabs = [], [], quantize.slab_rows
    monkeypatch.setattr(quantize, "slabs_win", lambda n: asked.append(n) or wins)
    look = lambda weight, x: taken.append(x) or plain_slabs(weight, x)  # noqa: E731
    monkeypatch.setattr(quantize, "slab_rows", look)
    layer, x = layer_of(FloatLinear), torch.randn(1, 1, 12)
    assert_close(layer(x).double(), plain(layer, x), rtol=1e-5, atol=1e-5)
    layer(torch.randn(2, 12))
    assert asked == [torch.get_num_threads()]
    assert [part.shape for part in taken] == [(12,)] * wins


@pytest.mark.parametrize("n_threads", [1, 2, 3, 9])
def test_slabs_are_as_many_as_threads_and_rows_that_are_left_over(
    monkeypatch, n_threads
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    made, plain_bmm = [], torch.bmm
    look = lambda a, b: made.append(len(a)) or plain_bmm(a, b)  # noqa: E731
    monkeypatch.setattr(torch, "bmm", look)
    weight, x = torch.randn(5, 8), torch.randn(8)
    assert_close(quantize.slab_rows(weight, x), weight @ x)
    assert made == [min(n_threads, 5)]


def test_largest_weights_have_a_scale_that_gives_them_back_finite():
    largest = torch.finfo(torch.float32).max
    for bits in range(2, 9):
        weight = torch.tensor([[largest, -largest, 0.0], [0.0, 0.0, 0.0]])
        codes, scale = quantize.round_rows(weight, bits)
        top = 2 ** (bits - 1) - 1
        assert codes.tolist() == [[top, -top, 0], [0, 0, 0]]
        assert (codes * scale).isfinite().all()
        assert scale[1].item() == torch.finfo(torch.float32).tiny
    wide = torch.tensor([[largest * 1.5]], dtype=torch.float64)
    codes, scale = quantize.round_rows(wide)
    assert (codes.float() * scale).isfinite().all()


def test_rows_are_cut_into_slabs_that_fit():
    n = quantize.IN_CACHE
    assert quantize.slabs_in_cache(5, n // 2) == [slice(0, 2), slice(2, 4), slice(4, 6)]
    assert quantize.slabs_in_cache(2, 3 * n) == [slice(0, 1), slice(1, 2)]
    assert quantize.slabs_in_cache(0, 4) == [slice(0, n // 4)]


@pytest.mark.parametrize("kind", [*KINDS.values()], ids=[*KINDS])
def test_state_holds_codes_and_no_trace_of_the_dtype(kind):
    layer = layer_of(kind, bias=False)
    assert (
        "like" not in layer.state_dict() and layer.double().weight.dtype.itemsize == 8
    )
