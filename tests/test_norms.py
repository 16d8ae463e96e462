"""What the norms promise, over shapes, dtypes, layouts and devices."""

import copy
import io
import math
import pickle
import re
from functools import partial

import pytest
import torch
from attention_oracle import DEVICES, DTYPES, assert_as_exact, distance
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.functional import jacobian
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from transformer.norms import LayerNorm, RMSNorm

each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
NORMS = {
    "layer": LayerNorm,
    "layer without bias": partial(LayerNorm, bias=False),
    "rms": RMSNorm,
}
TORCHS = {
    "layer": nn.LayerNorm,
    "layer without bias": partial(nn.LayerNorm, bias=False),
    "rms": partial(nn.RMSNorm, eps=1e-6),
}
each_norm = pytest.mark.parametrize("name", NORMS)
SHAPES = [(8,), (1,), (3, 8), (2, 3, 8), (2, 1, 3, 5), (4, 257), (0, 8), (2, 0, 8)]


def make(name: str, d_model: int, dtype=torch.float64, device="cpu", **how):
    """A norm with random parameters."""
    torch.manual_seed(0)
    norm = NORMS[name](d_model, **how)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm.to(device, dtype)


def by_hand(norm, x):
    """One token after the other, in float64 on the CPU."""
    weight = norm.weight.detach().cpu().double()
    bias = getattr(norm, "bias", None)
    rows = []
    for row in x.detach().cpu().double().reshape(-1, x.size(-1)):
        if isinstance(norm, LayerNorm):
            row = row - sum(row) / len(row)
        square = sum(row**2) / len(row)
        row = weight * row / math.sqrt(square + norm.eps)
        rows.append(row if bias is None else row + bias.detach().cpu().double())
    return torch.stack(rows).reshape(x.shape) if rows else x.cpu().double()


def formula(norm, x):
    """The plain formula in the dtype of x, but for a half: that goes by float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y, weight = x.to(wide), norm.weight.to(wide)
    if isinstance(norm, LayerNorm):
        y = y - y.mean(-1, keepdim=True)
    y = weight * y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    bias = getattr(norm, "bias", None)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


def with_gradients(norm, x, upstream):
    """What the norm gives, then the gradients of x and of its parameters."""
    x = x.detach().requires_grad_()
    leaves = [x, *norm.parameters()]
    out = norm(x)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out))]


# --- values and gradients --------------------------------------------------------


@each_device
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_norm
def test_values_equal_loops(name, shape, device, conform):
    norm = make(name, shape[-1], device=device)
    x = torch.randn(shape, dtype=torch.float64, device=device)
    how = {"reference": "loops in float64", "atol": 1e-10}
    want = by_hand(norm, x).to(device)
    conform(type(norm).__name__, "forward", norm(x), want, **how)


@each_device
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_norm
def test_equals_torchs_module_with_its_state(name, shape, device, conform):
    theirs = TORCHS[name](shape[-1]).to(device, torch.float64)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    norm = make(name, shape[-1], device=device)
    norm.load_state_dict(theirs.state_dict())
    x = torch.randn(shape, dtype=torch.float64, device=device)
    upstream = torch.randn_like(x)
    got, *slopes = with_gradients(norm, x, upstream)
    want, *expected = with_gradients(theirs, x, upstream)
    kind = type(norm).__name__
    how = {"reference": f"torch.nn.{kind}", "atol": 1e-10}
    conform(kind, "forward", got, want, **how)
    conform(kind, "gradient", slopes, expected, **how)


@each_device
@each_dtype
@pytest.mark.parametrize("size", [1e-3, 1, 100])
@each_norm
def test_every_dtype_is_as_exact_as_the_formula_and_torch(
    name, size, dtype, device, conform
):
    norm = make(name, 64, dtype, device)
    theirs = TORCHS[name](64).to(device, dtype)
    theirs.load_state_dict(norm.state_dict())
    x = (size * torch.randn(4, 9, 64) + size / 2).to(device, dtype)
    upstream = torch.randn(4, 9, 64).to(device, dtype)
    got = with_gradients(norm, x, upstream)
    exact = with_gradients(
        copy.deepcopy(norm).double(), x.double(), upstream.double()
    )  # equals loops: see above
    peer = with_gradients(theirs, x, upstream)
    assert all(mine.dtype == dtype for mine in got)
    assert_as_exact(got, exact, peer)
    assert_as_exact(got[:1], [by_hand(norm, x)], peer[:1], [formula(norm, x)])
    kind = type(norm).__name__
    conform.record(kind, "dtype", got[0], exact[0], reference="loops in float64")


@each_device
@pytest.mark.parametrize("eps", [0, 1e-6, 0.5])
@each_norm
def test_gradcheck(name, eps, device):
    norm = make(name, 5, device=device, eps=eps)
    x = torch.randn(2, 3, 5, dtype=torch.float64, device=device, requires_grad=True)
    names = [name for name, _ in norm.named_parameters()]

    def run(x, *parameters):
        values = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(norm, values, (x,))

    assert gradcheck(run, (x, *norm.parameters()))
    assert gradgradcheck(run, (x, *norm.parameters()))


@pytest.mark.parametrize("d", [2, 7, 64])
@each_norm
def test_jacobian_is_a_projection_over_the_size(name, d):
    norm = make(name, d)
    x = torch.randn(d, dtype=torch.float64)
    centred = x - x.mean() if isinstance(norm, LayerNorm) else x
    size = (centred.square().mean() + norm.eps).sqrt()
    y = centred / size
    want = torch.eye(d, dtype=x.dtype) - y.outer(y) / d
    if isinstance(norm, LayerNorm):
        want = want - 1 / d
    want = norm.weight.detach()[:, None] * want / size
    assert_close(jacobian(norm, x), want, rtol=0, atol=1e-10)


@each_device
@pytest.mark.parametrize("theirs", [LlamaRMSNorm, T5LayerNorm])
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_rms_norm_equals_that_of_real_models(theirs, eps, device, conform):
    torch.manual_seed(0)
    other = theirs(48, eps=eps).to(device)
    nn.init.normal_(other.weight)
    norm = RMSNorm(48, eps=eps).to(device)
    norm.load_state_dict(other.state_dict())
    x, upstream = torch.randn(2, 3, 5, 48, device=device).unbind()
    got, *slopes = with_gradients(norm, x, upstream)
    want, *expected = with_gradients(other, x, upstream)
    how = {"reference": f"transformers.{theirs.__name__}", "atol": 1e-5}
    conform("RMSNorm", "forward", got, want, **how)
    conform("RMSNorm", "gradient", slopes, expected, **how)


@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_in_half_precision_is_no_farther_off_than_llamas(dtype, device):
    torch.manual_seed(0)
    x = torch.randn(100, 256).to(device, dtype)
    other = LlamaRMSNorm(256).to(device, dtype)
    nn.init.normal_(other.weight)
    norm = RMSNorm(256).to(device, dtype)
    norm.load_state_dict(other.state_dict())
    exact = by_hand(norm, x)
    assert 1.1 * distance(norm(x), exact) < distance(other(x), exact)


# --- what follows from the formula --------------------------------------------------


@each_device
@each_dtype
@each_norm
def test_one_rounding_in_half_precision(name, dtype, device):
    norm = make(name, 64, dtype, device)
    x = torch.randn(50, 64).to(device, dtype)
    exact = by_hand(norm, x)
    rounded = exact.to(dtype)  # the closest that this dtype can hold
    same = (norm(x).cpu() == rounded).double().mean().item()
    wide = dtype in (torch.float32, torch.float64)
    assert same > (0 if wide else 0.99)
    off = (norm(x).cpu().double() - exact).abs()
    ulps = off / (torch.finfo(dtype).eps * (exact.abs() + 1))
    assert ulps.max() <= (16 if wide else 1.01)


@each_norm
def test_token_does_not_see_its_neighbours(name):
    norm, x = make(name, 8), torch.randn(4, 6, 8, dtype=torch.float64)
    other = torch.randn_like(x)
    other[1, 2] = x[1, 2]
    assert_close(norm(other)[1, 2], norm(x)[1, 2], rtol=0, atol=1e-14)
    assert_close(norm(x)[1, 2], norm(x[1, 2]), rtol=0, atol=1e-14)


@each_norm
def test_stretching_changes_nothing_and_shifting_only_rms_norm(name):
    norm, x = make(name, 8, eps=0), torch.randn(4, 8, dtype=torch.float64)
    assert_close(norm(3 * x), norm(x))
    shifted = (norm(x + 5) - norm(x)).abs().max()
    assert (shifted < 1e-12) == isinstance(norm, LayerNorm)


def test_layer_norm_is_rms_norm_without_the_mean():
    x = torch.randn(4, 8, dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True)
    layer, rms = LayerNorm(8, eps=1e-3).double(), RMSNorm(8, eps=1e-3).double()
    assert_close(layer(x), rms(centred), rtol=0, atol=1e-12)


def test_mean_is_zero_and_variance_is_one_but_for_eps():
    x = torch.randn(50, 16, dtype=torch.float64)
    y, variance = LayerNorm(16).double()(x), x.var(-1, correction=0)
    assert_close(y.mean(-1), torch.zeros(50, dtype=x.dtype), rtol=0, atol=1e-12)
    assert_close(y.var(-1, correction=0), variance / (variance + 1e-5))


@each_device
@each_dtype
@each_norm
def test_zeros_give_the_bias_with_finite_gradients(name, dtype, device):
    norm = make(name, 8, dtype, device)
    x = torch.zeros(3, 8, dtype=dtype, device=device)
    out, *slopes = with_gradients(norm, x, torch.ones_like(x))
    bias = getattr(norm, "bias", None)
    want = torch.zeros_like(x) if bias is None else bias.detach().expand_as(x)
    assert_close(out, want, rtol=0, atol=0)
    assert all(slope.isfinite().all() for slope in slopes)


@each_device
@each_norm
def test_gradient_is_orthogonal_to_the_token(name, device):
    norm = make(name, 16, device=device, eps=0)
    x = torch.randn(5, 16, dtype=torch.float64, device=device)
    _, slope, *_ = with_gradients(norm, x, torch.randn_like(x))
    nothing = torch.zeros(5, dtype=x.dtype, device=device)
    assert_close((slope * x).sum(-1), nothing, rtol=0, atol=1e-10)
    if isinstance(norm, LayerNorm):
        assert_close(slope.sum(-1), nothing, rtol=0, atol=1e-10)
    _, half, *_ = with_gradients(norm, 2 * x, torch.ones_like(x))
    _, whole, *_ = with_gradients(norm, x, torch.ones_like(x))
    assert_close(2 * half, whole)


def test_parameters_are_vectors_named_as_in_torch():
    for name, norm in NORMS.items():
        mine, theirs = norm(6).state_dict(), TORCHS[name](6).state_dict()
        assert list(mine) == list(theirs)
        for key in mine:  # vectors: what weight decay leaves alone
            assert_close(mine[key], theirs[key], rtol=0, atol=0)
            assert mine[key].shape == (6,)


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_default_eps_is_the_one_of_the_docstring(norm):
    assert norm(4).eps == {LayerNorm: 1e-5, RMSNorm: 1e-6}[norm]


def test_print_shows_the_settings():
    assert str(LayerNorm(6, bias=False)) == "LayerNorm(6, eps=1e-05, bias=False)"
    assert str(LayerNorm(6, 1e-6)) == "LayerNorm(6, eps=1e-06, bias=True)"
    assert str(RMSNorm(6)) == "RMSNorm(6, eps=1e-06)"


# --- dtypes, devices, copies -------------------------------------------------------


@each_device
@pytest.mark.parametrize("weights", DTYPES, ids=lambda d: f"weights {str(d)[6:]}")
@each_dtype
@each_norm
@pytest.mark.filterwarnings("error")
def test_mixed_dtypes_give_the_dtype_of_x(name, dtype, weights, device):
    norm = make(name, 16, weights, device)
    x = torch.randn(4, 16).to(device, dtype)
    out, *slopes = with_gradients(norm, x, torch.randn(4, 16).to(x))
    assert out.dtype == dtype
    assert [slope.dtype for slope in slopes[1:]] == [weights] * (len(slopes) - 1)
    off = (out.cpu().double() - by_hand(norm, x)).abs().max()
    narrow = max(torch.finfo(dtype).eps, 1e-6 if weights == torch.float32 else 0)
    assert off <= 4 * max(narrow, torch.finfo(torch.float64).eps)


@each_norm
def test_wider_weights_widen_the_computation(name):
    norm, x = make(name, 33, torch.float64), torch.randn(200, 33)
    assert_close(norm(x), by_hand(norm, x).float(), rtol=0, atol=0)


@each_device
@each_norm
def test_autocast_keeps_the_dtype_of_x(name, device):
    norm, x = make(name, 16, torch.float32, device), torch.randn(4, 16, device=device)
    with torch.autocast(device, torch.bfloat16):
        for y in (x, x.bfloat16()):
            assert norm(y).dtype == y.dtype
            assert_as_exact([norm(y)], [by_hand(norm, y)], [formula(norm, y)])


@each_norm
def test_survives_copy_pickle_meta_and_assignment(name):
    norm, x = make(name, 6, torch.float32), torch.randn(3, 6)
    file = io.BytesIO()
    torch.save(norm.state_dict(), file)
    file.seek(0)
    with torch.device("meta"):
        empty = NORMS[name](6)
        assert empty(torch.randn(2, 6)).device.type == "meta"
    empty.load_state_dict(torch.load(file), assign=True)
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)), empty):
        assert_close(twin(x), norm(x), rtol=0, atol=0)
        assert twin.weight is not norm.weight


LAYOUTS = {
    "transposed": lambda draw: draw(6, 4, 8).transpose(0, 1),
    "features first": lambda draw: draw(4, 8, 6).mT,
    "every second feature": lambda draw: draw(4, 6, 16)[..., ::2],
    "expanded": lambda draw: draw(1, 6, 8).expand(4, 6, 8),
}


@each_device
@pytest.mark.parametrize("layout", LAYOUTS)
@each_norm
def test_layout_in_memory_does_not_matter(name, layout, device):
    norm = make(name, 8, device=device)
    x = LAYOUTS[layout](lambda *s: torch.randn(s, dtype=torch.float64).to(device))
    upstream = torch.randn(6, 4, 8, dtype=torch.float64).to(device).transpose(0, 1)
    got = with_gradients(norm, x, upstream)
    want = with_gradients(norm, x.contiguous(), upstream.contiguous())
    for mine, theirs in zip(got, want, strict=True):
        assert_close(mine, theirs)


@each_norm
def test_input_is_left_as_it_was(name):
    norm, x = make(name, 8), torch.randn(4, 8, dtype=torch.float64)
    before = x.clone()
    assert norm(x) is not x
    assert_close(x, before, rtol=0, atol=0)


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_norm
def test_compiles_in_one_graph(name, dtype, device, conform):
    torch.compiler.reset()
    norm = make(name, 32, dtype, device)
    x = torch.randn(2, 5, 32).to(device, dtype)
    compiled = torch.compile(norm, fullgraph=True)
    upstream = torch.randn(2, 5, 32).to(device, dtype)
    got, want = (with_gradients(n, x, upstream) for n in (compiled, norm))
    assert all(mine.dtype == dtype for mine in got)
    if dtype == torch.float32:
        kind, how = type(norm).__name__, {"reference": "itself, not compiled"}
        conform(kind, "compile", got, want, **how, atol=1e-5)
    for mine, theirs in zip(got, want, strict=True):
        wide = {} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.05}
        assert_close(mine, theirs, **wide)
    torch.compiler.reset()


@each_norm
def test_works_under_vmap(name):
    norm, x = make(name, 8), torch.randn(3, 4, 8, dtype=torch.float64)
    assert_close(torch.vmap(norm)(x), norm(x))


# --- errors --------------------------------------------------------------------------


def refuses(error, message, call, *args, **how):
    """The call raises this error, in one line."""
    with pytest.raises(error, match=re.escape(message)) as caught:
        call(*args, **how)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("d_model", [0, -1, 8.0, (4, 8), "8", None], ids=str)
def test_width_must_be_a_count(norm, d_model):
    message = f"d_model must be a whole number from 1, got {d_model=}"
    refuses(ValueError, message, norm, d_model)


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("eps", [-1e-6, math.nan, None, "1e-5", True, False], ids=str)
def test_eps_must_be_a_number_from_zero(norm, eps):
    refuses(ValueError, f"eps must be a finite number from 0, got {eps=}", norm, 8, eps)


@each_norm
@pytest.mark.parametrize("shape", [(7,), (8, 7), (2, 8, 1), (0,), ()], ids=str)
def test_features_must_be_as_many_as_the_weights(name, shape):
    message = f"features must be 8, got x {shape}"
    refuses(ValueError, message, make(name, 8, torch.float32), torch.ones(shape))


@each_norm
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_input_must_be_floating(name, dtype):
    message = f"x must hold floating-point numbers, got x.dtype={dtype}"
    x = torch.ones(2, 8, dtype=dtype)
    refuses(TypeError, message, make(name, 8, torch.float32), x)
