"""Faults of norms that users of other code reported, each with its right value."""

import pytest
import torch
from attention_oracle import DEVICES, HALF
from torch import nn
from torch.testing import assert_close

from transformer.norms import LayerNorm, RMSNorm

each_device = pytest.mark.parametrize("device", DEVICES)


@each_device
def test_case_14_layer_norm_divides_by_c_with_eps_inside_the_root(device):
    x = torch.tensor([1.0, 0, 0, 0], device=device)
    low = -0.5773349
    want = torch.tensor([1.7320046, low, low, low], device=device)
    assert_close(LayerNorm(4).to(device)(x), want, rtol=0, atol=2e-7)
    home_made = (x - x.mean()) / (x.std() + 1e-6)
    assert_close(
        home_made, torch.tensor([1.5, -0.5, -0.5, -0.5]).to(x), atol=1e-5, rtol=0
    )


@each_device
def test_case_14_constant_row_gives_zeros_and_finite_gradients(device):
    x = torch.full((2, 4), 1e4, device=device, requires_grad=True)
    out = LayerNorm(4).to(device)(x)
    (slope,) = torch.autograd.grad(out.sum(), x)
    assert_close(out, torch.zeros_like(x), rtol=0, atol=0)
    assert slope.isfinite().all()


@each_device
def test_case_14_one_feature_gives_the_bias(device):
    norm = LayerNorm(1).to(device)
    nn.init.constant_(norm.bias, 3)
    x = torch.randn(5, 1, device=device, requires_grad=True)
    out = norm(x)
    assert_close(out, torch.full_like(x, 3), rtol=0, atol=0)
    (slope,) = torch.autograd.grad(out.sum(), x)
    assert_close(slope, torch.zeros_like(x), rtol=0, atol=0)


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_case_14_small_spread_around_a_large_mean(dtype, device):
    torch.manual_seed(0)
    x = (1e4 + 1e-2 * torch.randn(20, 64)).to(device, dtype)
    if dtype == torch.bfloat16:
        x = (x[:, :1] + 64 * torch.randint(-2, 3, (20, 64), device=device)).to(dtype)
    exact = nn.LayerNorm(64, dtype=torch.float64, device=device)(x.double())
    plain = nn.LayerNorm(64, dtype=dtype, device=device)(x)
    got = LayerNorm(64).to(device, dtype)(x)
    off, theirs = ((y.double() - exact).abs().max() for y in (got, plain))
    assert got.dtype == dtype and off <= 2 * theirs + 1e-5
    assert exact.std() > 0.5 and off < 0.2  # float32 rounds the mean itself


@each_device
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_case_15_squares_do_not_overflow(dtype, device):
    x = torch.full((4,), 300.0, dtype=dtype, device=device)
    assert_close(RMSNorm(4).to(device, dtype)(x), torch.ones_like(x), rtol=0, atol=0)
    careless = x / (x.half().square().mean() + 1e-6).sqrt()
    assert (careless == 0).all()


@each_device
@pytest.mark.parametrize(
    "size, eps, want",
    [(1e-3, 1e-8, 0.99504), (1e-2, 1e-6, 0.995037), (1e-2, 1e-4, 0.707107)],
)
def test_case_15_eps_is_not_rounded_to_half(size, eps, want, device):
    x = torch.full((4,), size, dtype=torch.float16, device=device)
    got = RMSNorm(4, eps=eps).to(device, torch.float16)(x)
    assert_close(got, torch.full_like(x, want), rtol=0, atol=1e-3)


@each_device
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_case_15_row_of_zeros_has_finite_gradients(dtype, device):
    x = torch.zeros(2, 4, dtype=dtype, device=device, requires_grad=True)
    out = RMSNorm(4).to(device, dtype)(x)
    (slope,) = torch.autograd.grad(out.sum(), x)
    assert_close(out, torch.zeros_like(x), rtol=0, atol=0)
    assert slope.isfinite().all()


@each_device
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_case_15_gain_in_float32_is_rounded_once(dtype, device):
    torch.manual_seed(0)
    x, norm = torch.randn(50, 64).to(device, dtype), RMSNorm(64).to(device)
    nn.init.normal_(norm.weight)
    wide = x.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    exact = exact * norm.weight.detach().double()
    assert norm(x).dtype == dtype
    assert (norm(x) == exact.to(dtype)).double().mean() > 0.99


@pytest.mark.parametrize("n_layers", [2, 12, 48])
def test_case_16_last_norm_makes_the_variance_one_at_every_depth(n_layers):
    torch.manual_seed(0)
    x = torch.randn(200, 256, dtype=torch.float64)
    for _ in range(n_layers):
        x = x + torch.randn_like(x)
    with_norm = LayerNorm(256).double()(x).var(-1, correction=0).mean()
    assert_close(x.var().item(), 1.0 + n_layers, rtol=0.03, atol=0)
    assert_close(with_norm.item(), 1.0, rtol=0, atol=1e-4)
