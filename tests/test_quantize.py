"""Layers with few bits a weight: their error, their shapes, and where they may go."""

import copy
import math
import pickle
import time

import pytest
import torch
from attention_oracle import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F
from torch.testing import assert_close

from transformer import quantize as own
from transformer.attention import MultiHeadAttention
from transformer.blocks import PreNormBlock
from transformer.feedforward import FeedForward, GatedFeedForward
from transformer.model import Encoder, EncoderDecoder, LanguageModel
from transformer.norms import LayerNorm, RMSNorm
from transformer.positions import LearnedPositions, RoPE
from transformer.quantize import (
    BFloat16Linear,
    FloatLinear,
    Int4Linear,
    Int8Linear,
    pack_nibbles,
    quantize,
    round_rows,
    slab_rows,
    sum_rows,
    unpack,
)

LOOPS, TORCH = "loops in float64", "torch.fake_quantize_per_channel_affine"
KINDS = {8: Int8Linear, 4: Int4Linear, 16: BFloat16Linear, 32: FloatLinear}
each_device = pytest.mark.parametrize("device", DEVICES)


def by_hand(row: list[float], largest: int) -> tuple[list[int], float]:
    """Integers and scale of one row, in Python's floats."""
    scale = max(map(abs, row)) / largest
    scale = min(max(scale, 2.0**-126), 3.4e38 / largest)
    scale = torch.tensor(scale, dtype=torch.float64).float().item()
    return [round(w / scale) for w in row], scale


def assert_bound(weight, codes, scale, bits):
    """Each weight lies within half a step; exact but for a last digit of float64."""
    error = (weight.double() - codes.double() * scale.double()).abs()
    assert (error <= scale.double() / 2 * (1 + 1e-12)).all()
    assert codes.numel() == 0 or codes.abs().max() <= 2 ** (bits - 1) - 1


# --- rounding ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_are_those_of_the_loop(bits, dtype, conform):
    torch.manual_seed(bits)
    weight = (torch.randn(7, 33, dtype=torch.float64) * 10).to(dtype)
    codes, scale = round_rows(weight, bits)
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32
    assert scale.shape == (7, 1)
    found = [by_hand(row, 2 ** (bits - 1) - 1) for row in weight.double().tolist()]
    assert codes.tolist() == [row for row, _ in found]
    want = torch.tensor([s for _, s in found], dtype=torch.float64)[:, None]
    how = {"reference": LOOPS, "atol": 0.0}
    conform("round_rows", "forward", codes * scale.double(), codes * want, **how)
    assert_bound(weight, codes, scale, bits)


@pytest.mark.parametrize("shape", [(5, 64), (1, 1), (300, 7)])
def test_restored_weights_are_those_of_torch(shape, conform):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    layer = Int8Linear(weight)
    zeros = torch.zeros(shape[0], dtype=torch.int32)
    scales = layer.scale.flatten()
    how = {"axis": 0, "quant_min": -127, "quant_max": 127}
    want = torch.fake_quantize_per_channel_affine(weight, scales, zeros, **how)
    # torch multiplies by 1 / s: where w / s is half-way it may take the other side
    half = ((weight / layer.scale).frac().abs() - 0.5).abs() < 1e-4
    got = layer.weight.where(~half, want)
    conform("Int8Linear", "forward", got, want, reference=TORCH, atol=0.0)
    assert half.float().mean() < 0.01


wide = st.floats(width=32, allow_nan=False, allow_infinity=False)
tiny = st.floats(-(2.0**-120), 2.0**-120, width=32)
row = st.lists(st.one_of(wide, tiny, st.just(0.0)), min_size=1, max_size=9)


@given(row, st.integers(2, 8))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_bound_holds_for_any_finite_weights(values, bits):
    weight = torch.tensor(values)
    codes, scale = round_rows(weight, bits)
    assert_bound(weight, codes, scale, bits)
    assert scale.isfinite().all() and (scale >= 2.0**-126).all()
    assert (codes * scale).isfinite().all()


@given(st.lists(st.integers(-8, 7), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_packed_codes_come_back(values):
    codes = torch.tensor([values, values[::-1]], dtype=torch.int8).T.contiguous()
    packed = pack_nibbles(codes)
    assert packed.dtype == torch.uint8 and packed.shape == (len(values), 1)
    assert unpack(packed).equal(codes)


def test_first_half_of_a_group_lies_in_the_low_bits():
    codes = torch.tensor([[1, 2, -7, 7]], dtype=torch.int8)
    assert pack_nibbles(codes).tolist() == [[9 | 1 << 4, 10 | 15 << 4]]


@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1.2e-38, 1e-30, 1.0, 1e30, 3.4e38])
def test_bound_holds_at_the_ends_of_the_range(scale):
    torch.manual_seed(0)
    weight = torch.rand(4, 16) * 2 - 1
    weight = (weight.double() * scale).float()
    for bits in range(2, 9):
        codes, scales = round_rows(weight, bits)
        assert_bound(weight, codes, scales, bits)
        assert (codes * scales).isfinite().all()


def test_outlier_coarsens_its_own_row_only():
    torch.manual_seed(0)
    weight = torch.randn(4, 32)
    spiked = weight.clone()
    spiked[2, 5] = 1e4
    errors = (Int8Linear(spiked).weight - spiked).abs().amax(1)
    assert errors[[0, 1, 3]].max() < 0.02 < 1 < errors[2]
    group = (Int4Linear(spiked, group=16).weight - spiked).abs()
    assert group[2, 16:].max() < 0.3 < group[2, :16].max()


def test_multiples_of_the_scale_are_exact():
    codes = torch.randint(-127, 128, (6, 20))
    codes[:, 0] = 127
    weight = codes * 2.0 ** torch.randint(-20, 20, (6, 1))
    assert Int8Linear(weight).weight.equal(weight)


def test_empty_matrices_stay_empty():
    assert Int8Linear(torch.empty(0, 4)).weight.shape == (0, 4)
    assert Int8Linear(torch.empty(0, 4))(torch.ones(3, 4)).shape == (3, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("make", [round_rows, Int8Linear, Int4Linear])
def test_weights_without_a_number_are_one_line(make, bad):
    weight = torch.ones(2, 64)
    weight[1, 3] = bad
    with pytest.raises(ValueError, match=r"got 1 that are not, the first at \[1, "):
        make(weight)


def test_whole_numbers_are_no_weights():
    with pytest.raises(TypeError, match=r"got weight.dtype=torch.int64"):
        round_rows(torch.ones(2, 2, dtype=torch.long))


@pytest.mark.parametrize("bits", [0, 1, 9, 16, 2.5, True])
def test_odd_counts_of_bits_are_one_line(bits):
    with pytest.raises(ValueError, match=f"from 2 to 8, got bits={bits}$"):
        round_rows(torch.ones(2, 2), bits)


@pytest.mark.parametrize("group", [0, -2, 3, 7, 2.0, True])
def test_groups_that_cannot_be_packed_are_one_line(group):
    with pytest.raises(ValueError, match=f"whole number from 2, got group={group}$"):
        Int4Linear(torch.ones(2, 12), group=group)


def test_groups_that_leave_inputs_over_are_one_line():
    with pytest.raises(ValueError, match=r"got group=8, n_features=12$"):
        Int4Linear(torch.ones(2, 12), group=8)


# --- layers --------------------------------------------------------------------------


def layers(n_in=64, n_out=37, bias=True, device="cpu"):
    """A plain layer and the layers that stand for it."""
    torch.manual_seed(0)
    plain = nn.Linear(n_in, n_out, bias=bias, device=device)
    pair = plain.weight, plain.bias
    made = [Int8Linear(*pair), Int4Linear(*pair, group=16), FloatLinear(*pair)]
    return plain, [*made, BFloat16Linear(*pair)]


@each_device
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lead", [(), (1,), (1, 1), (5,), (2, 3), (0,), (2, 0)])
def test_layers_are_products_with_their_weights(lead, bias, device, conform):
    plain, made = layers(bias=bias, device=device)
    x = torch.randn(*lead, 64).to(device)
    for layer in made:
        want = x.double() @ layer.weight.double().mT
        want = want + plain.bias.double() if bias else want
        assert layer(x).dtype == torch.float32 and layer(x).shape == (*lead, 37)
        name = type(layer).__name__
        how = {"reference": "float64 product with the weights", "atol": 1e-5}
        if want.numel():
            conform(name, "forward", layer(x), want, **how)


@pytest.mark.parametrize("n_threads", [1, 2, 3, 64])
@pytest.mark.parametrize("n_rows", [1, 2, 37, 128])
def test_slabs_give_the_product_for_any_count_of_threads(
    n_rows, n_threads, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    weight, x = torch.randn(n_rows, 24), torch.randn(24)
    assert_close(slab_rows(weight, x), weight @ x)
    assert_close(sum_rows(weight, x), weight @ x)
    assert_close(slab_rows(weight.T.contiguous().T, x), weight @ x)


@pytest.mark.parametrize("kind", range(4))
def test_one_row_of_integers_is_the_same_product(kind):
    layer = layers()[1][kind]
    if isinstance(layer, FloatLinear):
        return
    x = torch.randn(64)
    assert_close(layer.multiply(x) + layer.bias, layer(x))


@pytest.mark.parametrize("slow", ["slabs", "whole"])
def test_one_row_takes_the_faster_of_two_products(slow, monkeypatch):
    slabs, whole = own.slab_rows, F.linear

    def late(way):
        def run(*arguments):
            time.sleep(0.01)
            return way(*arguments)

        return run

    own.slabs_win.cache_clear()
    monkeypatch.setattr(own, "slab_rows", late(slabs) if slow == "slabs" else slabs)
    monkeypatch.setattr(F, "linear", late(whole) if slow == "whole" else whole)
    assert own.slabs_win(torch.get_num_threads()) == (slow == "whole")
    weight = nn.Parameter(torch.randn(7, 6))
    x = torch.randn(1, 6)
    assert_close(FloatLinear(weight)(x), x @ weight.mT)
    own.slabs_win.cache_clear()


@torch.no_grad()
@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_a_compiler_computes_the_input_once_not_once_for_each_row(bits):
    torch.compiler.reset()
    layer = layers()[1][{8: 0, 4: 1, 32: 2, 16: 3}[bits]]
    step = torch.compile(lambda x: layer(torch.erf(x)), fullgraph=True)
    _, codes = run_and_get_code(step, torch.randn(1, 64))
    before, *loops = codes[0].split(f"static_cast<int64_t>({layer.out_features}L)")
    assert "erf(" in before and loops
    assert not any("erf(" in loop for loop in loops)


@pytest.mark.parametrize("n_rows", [1, 100, 101, 4097])
def test_slabs_of_restored_rows_are_joined_in_order(n_rows, monkeypatch):
    monkeypatch.setattr("transformer.quantize.IN_CACHE", 640)
    for make in (Int8Linear, lambda w: Int4Linear(w, group=32)):
        layer = make(torch.randn(n_rows, 64))
        x = torch.randn(3, 64)
        assert_close(layer(x), x @ layer.weight.mT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_casts_leave_codes_and_scales_alone(dtype, conform):
    plain, (eight, four, _, sixteen) = layers()
    for layer in (eight, four, sixteen):
        before = {name: x.clone() for name, x in layer.named_buffers()}
        restored = layer.restore()
        layer.to(dtype)
        for name, x in layer.named_buffers():
            if name != "like":
                assert x.dtype == before[name].dtype and x.equal(before[name])
        x = torch.randn(5, 64).to(dtype)
        assert layer.weight.dtype == layer(x).dtype == layer.bias.dtype == dtype
        plain.to(dtype)
        want = F.linear(x.double(), layer.weight.double(), layer.bias.double())
        how = {"reference": "float64 product with the weights", "atol": 2e-2}
        conform(type(layer).__name__, "dtype", layer(x), want, **how)
        assert layer.float().restore().equal(restored)


def test_halves_do_not_overflow_though_codes_are_large():
    layer = Int8Linear(torch.full((2, 4096), 0.01)).half()
    assert_close(layer(torch.ones(1, 4096).half()), torch.full((1, 2), 40.96).half())


def test_layer_made_on_meta_takes_a_state_on_the_cpu():
    layer = Int8Linear(torch.randn(3, 4))
    empty = copy.deepcopy(layer).to("meta")
    assert empty.codes.is_meta and empty.scale.is_meta
    real = empty.to_empty(device="cpu")
    real.load_state_dict(layer.state_dict())
    assert real.scale.dtype == torch.float32 and real.weight.equal(layer.weight)


@pytest.mark.parametrize("kind", range(4))
def test_states_go_around(kind):
    layer, other = layers()[1][kind], layers()[1][kind]
    for x in other.state_dict().values():
        x.zero_()
    other.load_state_dict(layer.state_dict())
    assert other.weight.equal(layer.weight) and other.bias.equal(layer.bias)
    for again in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert again.weight.equal(layer.weight) and again.weight is not layer.weight


def test_float_layers_read_and_write_the_state_of_a_plain_one():
    plain, (_, _, layer, _) = layers()
    assert layer.weight is plain.weight and list(layer.state_dict()) == [
        "weight",
        "bias",
    ]
    nn.Linear(64, 37).load_state_dict(layer.state_dict())


def test_codes_are_as_many_bytes_as_bits_say():
    def held(layer):
        return sum(x.nbytes for x in layer.buffers())

    assert held(Int8Linear(torch.randn(48, 64))) == 48 * (64 + 4)
    assert held(Int4Linear(torch.randn(48, 64), group=32)) == 48 * (32 + 2 * 4)


def test_gradients_flow_to_inputs_and_biases(conform):
    _, made = layers()
    for layer in made:
        for shape in ((1, 64), (5, 64)):
            x = torch.randn(shape, requires_grad=True)
            up = torch.randn(shape[0], 37)
            got = torch.autograd.grad(layer(x), [x, layer.bias], up)
            want = [up.double() @ layer.weight.detach().double(), up.double().sum(0)]
            how = {"reference": "float64 product with the weights", "atol": 1e-5}
            conform(type(layer).__name__, "gradient", list(got), want, **how)


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize(
    "shape, backend", [((1, 1, 64), "inductor"), ((2, 3, 64), "aot_eager")]
)
def test_compiled_layers_give_the_same(shape, backend, kind, conform):
    torch.compiler.reset()
    layer = layers()[1][kind]
    x = torch.randn(shape)
    with torch.no_grad():
        got = torch.compile(layer, fullgraph=True, backend=backend)(x)
        want = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    how = {"reference": "float64 product with the weights", "atol": 1e-5}
    conform(type(layer).__name__, "compile", got, want, **how)
    assert got.dtype == x.dtype and got.shape == (*shape[:-1], 37)


# --- models --------------------------------------------------------------------------


def block(cross=None):
    """One block of 16 features."""
    ffn = FeedForward(16)
    return PreNormBlock(16, MultiHeadAttention(16, 2), ffn, cross=cross)


def gpt(tie=True):
    """A model in the manner of GPT-2."""
    torch.manual_seed(0)
    positions = LearnedPositions(20, 16)
    how = {"positions": positions, "norm": LayerNorm, "tie": tie}
    return LanguageModel(50, 16, [block(), block()], **how).eval()


def llama():
    """A model in the manner of Llama."""
    torch.manual_seed(0)
    blocks = [
        PreNormBlock(
            16, MultiHeadAttention(16, 2), GatedFeedForward(16, 32), norm=RMSNorm
        )
    ]
    return LanguageModel(50, 16, blocks, rope=RoPE(8), norm=RMSNorm).eval()


def translator():
    """An encoder and a decoder that reads it."""
    torch.manual_seed(0)
    encoder = Encoder(50, 16, [block()], norm=LayerNorm)
    cross = block(MultiHeadAttention(16, 2))
    return EncoderDecoder(
        encoder, LanguageModel(50, 16, [cross], norm=LayerNorm)
    ).eval()


def logits(model):
    """What a model says of fixed tokens."""
    tokens = torch.arange(10).view(2, 5)
    with torch.no_grad():
        return model(*([tokens] * (1 + isinstance(model, EncoderDecoder))))


MODELS = {"gpt": gpt, "untied": lambda: gpt(False), "llama": llama, "pair": translator}


@pytest.mark.parametrize("bits, apart", [(32, 1e-5), (16, 0.02), (8, 0.03), (4, 0.4)])
@pytest.mark.parametrize("name", MODELS)
def test_models_go_on_saying_nearly_the_same(name, bits, apart):
    before = logits(MODELS[name]())
    model = MODELS[name]()
    assert quantize(model, bits, group=8) is model
    kinds = {type(part) for part in model.modules()}
    assert KINDS[bits] in kinds and nn.Linear not in kinds
    error = (logits(model) - before).norm() / before.norm()
    assert 0 <= error < apart and (bits == 32 or error > apart / 50)


@pytest.mark.parametrize("bits", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_plain_ones_with_restored_weights(name, bits):
    model = quantize(MODELS[name](), bits, group=8)
    plain = MODELS[name]()
    base = plain.decoder if name == "pair" else plain
    base.head = nn.Linear(16, 50, bias=False)
    with torch.no_grad():
        for path, part in plain.named_modules():
            if type(part) is nn.Linear:
                part.weight.copy_(model.get_submodule(path).weight)
    assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)


def test_tied_head_becomes_a_layer_and_the_embedding_stays():
    model = gpt()
    table = model.embedding.weight
    quantize(model)
    assert isinstance(model.head, Int8Linear) and model.embedding.weight is table
    assert_close(model.head.weight, table.detach(), rtol=0, atol=0.01)
    model = quantize(gpt(), 32)
    assert model.head.weight is model.embedding.weight


def test_other_parts_do_not_change():
    model, plain = quantize(gpt()), gpt()
    state, before = model.state_dict(), plain.state_dict()
    kept = [name for name in before if "norm" in name or "embedding" in name]
    kept += [name for name in before if name.endswith("bias") or "positions" in name]
    assert len(kept) > 10
    for name in kept:
        assert state[name].equal(before[name])


def test_state_of_a_quantised_model_goes_around():
    model = quantize(gpt(), 4, group=8)
    other = gpt()
    nn.init.normal_(other.embedding.weight)
    quantize(other, 4, group=8).load_state_dict(model.state_dict())
    assert logits(other).equal(logits(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_cast_models_run(dtype):
    for make in (gpt, translator):
        model = quantize(make()).to(dtype)
        want = logits(quantize(make()))
        assert logits(model).dtype == dtype
        assert (logits(model) - want).norm() / want.norm() < 0.02


def test_layer_in_two_places_stays_one():
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    quantize(model)
    assert model[0] is model[2] and isinstance(model[0], Int8Linear)


def test_kept_layers_stay():
    model = quantize(gpt(), keep=["head", "blocks.0", "blocks.1.ffn.up"])
    assert model.head is None and type(model.blocks[0].attn.qkv) is nn.Linear
    assert type(model.blocks[1].ffn.up) is nn.Linear
    assert isinstance(model.blocks[1].ffn.down, Int8Linear)


def test_layers_of_other_kinds_are_left_to_their_owners():
    model = nn.ModuleList([nn.MultiheadAttention(8, 2), nn.Linear(8, 8)])
    quantize(model)
    x = torch.randn(3, 1, 8)
    assert model[0](x, x, x)[0].shape == x.shape
    assert isinstance(model[1], Int8Linear)


def test_training_flag_is_kept():
    assert not quantize(gpt()).blocks[0].ffn.up.training
    assert quantize(gpt().train()).blocks[0].ffn.up.training


@pytest.mark.parametrize("bits", [0, 5, 64, True, "8", None])
def test_counts_of_bits_without_a_layer_are_one_line(bits):
    with pytest.raises(ValueError, match="bits must be 4, 8, 16 or 32, got bits="):
        quantize(gpt(), bits)


def test_model_that_cannot_be_changed_is_left_as_it_was():
    model = gpt()
    with torch.no_grad():
        model.blocks[1].ffn.down.weight[2, 3] = math.nan
    with pytest.raises(ValueError, match=r"^blocks.1.ffn.down: .* first at \[2, 3\]$"):
        quantize(model)
    with pytest.raises(ValueError, match=r"^head: group .*group=10, n_features=16$"):
        quantize(gpt(), 4, group=10)
    assert model.head is None and type(model.blocks[0].attn.qkv) is nn.Linear


def test_nothing_to_replace_is_one_line():
    for model in (nn.ReLU(), quantize(gpt())):
        with pytest.raises(ValueError, match=r"must hold an nn.Linear to replace"):
            quantize(model)
    with pytest.raises(
        ValueError, match=r"keep must name layers of the model, got 'x'"
    ):
        quantize(gpt(), keep=["x"])
    with pytest.raises(ValueError, match=r"got 'blocks.0.ff'"):
        quantize(gpt(), keep=["blocks.0.ff"])
