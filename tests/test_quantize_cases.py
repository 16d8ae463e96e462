"""CASE-39: faults that users of 8-bit weights have reported."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from transformer.quantize import Int4Linear, Int8Linear, quantize, round_rows

ROWS = torch.tensor([[0.0, 0.0, 0.0], [1.0, -2.0, 0.5]])


def test_case_39_row_of_zeros_stays_zero_and_its_scale_is_finite():
    codes, scale = round_rows(ROWS)
    assert codes.tolist() == [[0, 0, 0], [64, -127, 32]]
    assert scale.isfinite().all() and (scale > 0).all()
    want = torch.tensor([[0.0, 0.0, 0.0], [1.007874, -2.0, 0.503937]])
    assert_close(codes * scale, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [Int8Linear, lambda w: Int4Linear(w, group=2)])
def test_case_39_pruned_channels_and_tokens_of_zeros_give_zeros(make):
    weight = torch.zeros(4, 8)
    weight[1, :2] = torch.tensor([1.0, -2.0])
    layer, x = make(weight), torch.randn(3, 8)
    x[1] = 0
    out = layer(x)
    assert out[1].eq(0).all() and out[:, [0, 2, 3]].eq(0).all()
    assert out.isfinite().all() and layer.weight.isfinite().all()


def test_case_39_tiny_rows_do_not_divide_by_zero():
    weight = torch.tensor([[1e-45, 0.0], [-1e-40, 1e-41]])
    codes, scale = round_rows(weight)
    assert (scale >= torch.finfo(torch.float32).tiny).all()
    assert (weight - codes * scale).abs().max() <= scale.max() / 2


def test_case_39_inputs_that_are_no_numbers_spoil_their_own_token_only():
    layer, x = Int8Linear(torch.randn(5, 8)), torch.randn(3, 8)
    x[1, 2] = math.nan
    out = layer(x)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_case_39_weights_that_are_no_numbers_are_refused_by_name(bad):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight[0, 1] = bad
    with pytest.raises(ValueError, match=r"^1: weight must be finite, got 1 that"):
        quantize(model)
    assert type(model[0]) is nn.Linear


def test_case_39_ties_go_to_the_even_integer_and_nothing_is_minus_128():
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0]])
    assert round_rows(weight)[0].tolist() == [[127, 0, 2, 2, 0, -2, -127]]


def test_case_39_wide_rows_do_not_overflow():
    layer = Int8Linear(torch.ones(1, 200_000))  # 127 · 200,000 · 127 exceeds int32
    assert_close(layer(torch.full((2, 200_000), 127.0)), torch.full((2, 1), 2.54e7))
