"""What the feed-forward networks promise, against loops, torch and transformers."""

import copy
import io
import math
import re

import pytest
import torch
from attention_oracle import DEVICES, DTYPES, HALF, assert_as_exact
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.nn import functional as F
from torch.testing import assert_close

from transformer.feedforward import FeedForward, GatedFeedForward, gelu

each_device = pytest.mark.parametrize("device", DEVICES)
each_kind = pytest.mark.parametrize("kind", [FeedForward, GatedFeedForward])

SCALARS = {  # float64, one number at a time
    "relu": lambda x: max(0.0, x),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: (
        x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "gelu_quick": lambda x: x / (1 + math.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "identity": lambda x: x,
}
TORCHS = {  # the same by torch's own functions, differentiable
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}
APPROXIMATE = {"none": "gelu", "tanh": "gelu_tanh", "quick": "gelu_quick"}
each_activation = pytest.mark.parametrize("activation", SCALARS)
each_form = pytest.mark.parametrize("approximate", APPROXIMATE)


def make(kind, d_model=6, d_ff=9, dtype=torch.float64, **how):
    """A module whose weights and biases are all random and not small."""
    torch.manual_seed(0)
    module = kind(d_model, d_ff, **how)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.7)
    return module.to(dtype)


def by_loops(module, x: Tensor, activation: str) -> Tensor:
    """One token, one feature at a time, in float64."""
    f = SCALARS[activation]

    def product(part: str, token: list) -> list:
        layer = getattr(module, part)
        rows = layer.weight.double().tolist()
        offsets = [0.0] * len(rows) if layer.bias is None else layer.bias.tolist()
        return [
            sum(w * t for w, t in zip(row, token, strict=True)) + b
            for row, b in zip(rows, offsets, strict=True)
        ]

    outs = []
    for token in x.double().flatten(0, -2).tolist():
        wide = product("up", token)
        if isinstance(module, GatedFeedForward):
            gates = product("gate", token)
            wide = [f(g) * u for g, u in zip(gates, wide, strict=True)]
        else:
            wide = [f(u) for u in wide]
        outs.append(product("down", wide))
    return torch.tensor(outs, dtype=torch.float64).view(*x.shape[:-1], -1)


def by_torch(module, activation: str, x: Tensor, *parameters: Tensor) -> Tensor:
    """The formula, differentiable, in the dtype of its inputs."""
    names = [name for name, _ in module.named_parameters()]
    p, f = dict(zip(names, parameters, strict=True)), TORCHS[activation]
    up = F.linear(x, p["up.weight"], p.get("up.bias"))
    if isinstance(module, GatedFeedForward):
        wide = f(F.linear(x, p["gate.weight"], p.get("gate.bias"))) * up
    else:
        wide = f(up)
    return F.linear(wide, p["down.weight"], p.get("down.bias"))


def outputs_and_slopes(function, leaves: list[Tensor]) -> list[Tensor]:
    """What function gives, and the gradients of a fixed mixture of it."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    upstream = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def run(module):
    """The module as a function of its input and its parameters."""
    names = [name for name, _ in module.named_parameters()]

    def function(x, *parameters):
        values = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(module, values, (x,))

    return function


# --- the curve --------------------------------------------------------------------


@each_form
def test_gelu_equals_loops_in_float64(approximate, conform):
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    scalar = SCALARS[APPROXIMATE[approximate]]
    want = torch.tensor([scalar(number) for number in x.tolist()], dtype=torch.float64)
    reference = "loops in float64"
    got = gelu(x, approximate)
    conform("gelu", "forward", got, want, reference=reference, atol=1e-10)
    got = gelu(x.float(), approximate)
    conform("gelu", "dtype", got, want, reference=reference, atol=1e-5)


@each_form
def test_gelu_equals_the_references(approximate, conform):
    from transformers.activations import ACT2FN

    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    names = {"none": "gelu", "tanh": "gelu_new", "quick": "quick_gelu"}
    theirs = {"transformers.ACT2FN": ACT2FN[names[approximate]]}
    if approximate != "quick":
        theirs["torch.nn.GELU"] = nn.GELU(approximate=approximate)
    for reference, function in theirs.items():
        for dtype, atol in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
            got = outputs_and_slopes(lambda y: gelu(y, approximate), [x.to(dtype)])
            want = outputs_and_slopes(function, [x.to(dtype)])
            columns = ("forward", "gradient")
            for column, mine, other in zip(columns, got, want, strict=True):
                conform("gelu", column, mine, other, reference=reference, atol=atol)


def test_gelu_is_exact_unless_asked():
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    assert_close(gelu(x), gelu(x, approximate="none"), rtol=0, atol=0)
    assert_close(FeedForward(4).activation(x), gelu(x), rtol=0, atol=0)


def test_case_17_gelu_variants_are_told_apart():
    x = torch.tensor([1.0, -3.0], dtype=torch.float64)
    known = {
        "none": [0.8413447, -0.0040497],
        "tanh": [0.8411920, -0.0036374],
        "quick": [0.8457958, -3 / (1 + math.exp(5.106))],
    }
    for approximate, values in known.items():
        want = torch.tensor(values, dtype=torch.float64)
        assert_close(gelu(x, approximate), want, rtol=0, atol=5e-8)
    far = torch.linspace(-6, 6, 1_200_001, dtype=torch.float64)
    gap = (gelu(far, "tanh") - gelu(far)).abs()
    assert abs(gap.max() - 4.732e-4) < 1e-7
    assert abs(far[gap.argmax()].abs() - 2.699) < 1e-3
    assert gap.max() > 40 * 1e-5  # a parity test at 1e-5 sees the swap


def test_case_17_unknown_name_is_never_a_silent_default():
    for name in ("gelu_new", "GELU", "swiglu", "", "quick_gelu", None):
        for kind in (FeedForward, GatedFeedForward):
            with pytest.raises(ValueError, match="activation must be one of") as caught:
                kind(4, activation=name)
            message = str(caught.value)
            assert all(known in message for known in SCALARS) and "\n" not in message
            assert f"got activation={name!r}" in message


def test_case_17_weights_of_one_form_fail_in_the_other():
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    torch.manual_seed(0)
    theirs = GPT2MLP(256, GPT2Config(n_embd=64)).eval()
    x = 3 * torch.randn(50, 64)
    errors = {}
    for name in ("gelu", "gelu_tanh", "gelu_quick"):
        mine = FeedForward(64, activation=name)
        load_gpt2(mine, theirs)
        errors[name] = (mine(x) - theirs(x)).abs().max().item()
    assert errors["gelu_tanh"] < 1e-6 < 1e-5 < errors["gelu"] < errors["gelu_quick"]


@each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_activation
def test_extreme_numbers_stay_finite(activation, dtype, device):
    curve = FeedForward(1, activation=activation).activation
    steps = [0.0, 1e-7, 1e-3, 1.0, 5.0, 11.0, 88.0, 300.0, 1e3, 1e4, 6e4]
    x = torch.tensor([*steps, *[-s for s in steps]], dtype=dtype, device=device)
    x.requires_grad_()
    y = curve(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert y.dtype == dtype and y.isfinite().all() and slope.isfinite().all()
    if activation != "sigmoid":
        big = x.detach() >= 300
        assert_close(y[big], x[big], rtol=0, atol=0)  # the curve ends on a line
        zero = 0 * x.detach()[x <= -1e3]
        if activation != "identity":
            assert_close(y[x <= -1e3], zero, rtol=0, atol=0)


@each_device
@pytest.mark.parametrize("dtype", HALF, ids=str)
@each_form
def test_gelu_in_half_precision_is_as_exact_as_the_formula(approximate, dtype, device):
    torch.manual_seed(0)
    x = (3 * torch.randn(4000)).to(device, dtype)
    name = APPROXIMATE[approximate]
    exact = outputs_and_slopes(TORCHS[name], [x.double()])
    plain = outputs_and_slopes(TORCHS[name], [x])
    mine = outputs_and_slopes(lambda y: gelu(y, approximate), [x])
    assert mine[0].dtype == dtype
    assert_as_exact(mine, exact, plain)


@each_form
def test_gelu_gradcheck(approximate):
    x = torch.linspace(-6, 6, 49, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda y: gelu(y, approximate), x)


@pytest.mark.parametrize("name", ["exact", "erf", "", "Tanh", None])
def test_unknown_form_of_gelu_is_refused(name):
    message = f"approximate must be none, tanh or quick, got approximate={name!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        gelu(torch.zeros(2), approximate=name)


# --- values and gradients of the modules ------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@each_activation
@each_kind
def test_equals_loops(kind, activation, bias, conform):
    module = make(kind, activation=activation, bias=bias)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    want = by_loops(module, x, activation)
    how = {"reference": "loops in float64"}
    conform(kind.__name__, "forward", module(x), want, **how, atol=1e-10)
    got = module.float()(x.float())
    conform(kind.__name__, "dtype", got, want, **how, rtol=1e-5, atol=1e-5)


@each_device
@pytest.mark.parametrize("bias", [False, True])
@each_activation
@each_kind
def test_gradients_equal_the_formulas(kind, activation, bias, device):
    module = make(kind, activation=activation, bias=bias).to(device)
    x = torch.randn(2, 3, 6, dtype=torch.float64).to(device)
    leaves = [x, *module.parameters()]
    got = outputs_and_slopes(run(module), leaves)
    want = outputs_and_slopes(lambda *a: by_torch(module, activation, *a), leaves)
    for mine, theirs in zip(got, want, strict=True):
        assert_close(mine, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_torchs_sequential_with_the_same_weights(activation, bias, conform):
    middle = {
        "relu": nn.ReLU(),
        "gelu": nn.GELU(),
        "gelu_tanh": nn.GELU(approximate="tanh"),
        "silu": nn.SiLU(),
    }[activation]
    for dtype, atol in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        mine = make(FeedForward, 12, 48, dtype, activation=activation, bias=bias)
        parts = (copy.deepcopy(mine.up), middle, copy.deepcopy(mine.down))
        theirs = nn.Sequential(*parts)
        leaves = [torch.randn(3, 5, 12).to(dtype), *mine.parameters()]
        found = outputs_and_slopes(run(mine), leaves)
        wanted = outputs_and_slopes(run(theirs), leaves)
        how = {"reference": "torch.nn.Sequential", "atol": atol}
        conform("FeedForward", "forward", found[0], wanted[0], **how)
        conform("FeedForward", "gradient", found[1:], wanted[1:], **how)


def load_gpt2(mine, theirs):
    """Copy a GPT-2 MLP, whose matrices are stored transposed."""
    pairs = {"up": theirs.c_fc, "down": theirs.c_proj}
    state = {f"{name}.weight": part.weight.T for name, part in pairs.items()}
    state |= {f"{name}.bias": part.bias for name, part in pairs.items()}
    mine.load_state_dict(state)


def gpt2():
    """Our module, theirs, the reference's name."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    theirs = GPT2MLP(96, GPT2Config(n_embd=24, activation_function="gelu_new"))
    mine = FeedForward(24, activation="gelu_tanh")
    load_gpt2(mine, theirs)
    return mine, theirs, "transformers.GPT2MLP"


def bert():
    """The two halves of BERT's feed-forward, with its sum and norm around ours."""
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertIntermediate, BertOutput

    config = BertConfig(hidden_size=24, intermediate_size=96, hidden_act="gelu")
    first, second = BertIntermediate(config), BertOutput(config).eval()
    mine = FeedForward(24)
    mine.up.load_state_dict(first.dense.state_dict())
    mine.down.load_state_dict(second.dense.state_dict())

    class Theirs(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x):
            return second(first(x), x)

    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.ffn = mine

        def forward(self, x):
            return F.layer_norm(x + mine(x), (24,), eps=config.layer_norm_eps)

    return Ours(), Theirs(), "transformers.BertIntermediate"


def clip():
    """The quick curve."""
    from transformers import CLIPTextConfig
    from transformers.models.clip.modeling_clip import CLIPMLP

    sizes = {"hidden_size": 24, "intermediate_size": 96}
    theirs = CLIPMLP(CLIPTextConfig(**sizes, hidden_act="quick_gelu"))
    mine = FeedForward(24, activation="gelu_quick")
    mine.up.load_state_dict(theirs.fc1.state_dict())
    mine.down.load_state_dict(theirs.fc2.state_dict())
    return mine, theirs, "transformers.CLIPMLP"


def gated_like(theirs, activation):
    """Ours with the weights of a Llama-like MLP."""
    has_bias = theirs.gate_proj.bias is not None
    width = theirs.gate_proj.out_features
    mine = GatedFeedForward(24, width, activation, bias=has_bias)
    for part in ("gate", "up", "down"):
        layer = getattr(theirs, f"{part}_proj")
        getattr(mine, part).load_state_dict(layer.state_dict())
    return mine


def llama(bias=False):
    """SwiGLU."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    sizes = {"hidden_size": 24, "intermediate_size": 70}
    config = LlamaConfig(**sizes, num_attention_heads=2, mlp_bias=bias)
    theirs = LlamaMLP(config)
    return gated_like(theirs, "silu"), theirs, "transformers.LlamaMLP"


def llama_with_bias():
    """SwiGLU with offsets."""
    return llama(bias=True)


def gemma():
    """GEGLU, with the tanh form."""
    from transformers import GemmaConfig
    from transformers.models.gemma.modeling_gemma import GemmaMLP

    config = GemmaConfig(
        hidden_size=24, intermediate_size=70, hidden_act="gelu_pytorch_tanh"
    )
    theirs = GemmaMLP(config)
    return gated_like(theirs, "gelu_tanh"), theirs, "transformers.GemmaMLP"


def phi3():
    """SwiGLU in one matrix: gate above up."""
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3MLP

    config = Phi3Config(hidden_size=24, intermediate_size=70, pad_token_id=0)
    theirs = Phi3MLP(config)
    mine = GatedFeedForward(24, 70)
    gate, up = theirs.gate_up_proj.weight.chunk(2)
    state = {"gate.weight": gate, "up.weight": up}
    mine.load_state_dict({**state, "down.weight": theirs.down_proj.weight})
    return mine, theirs, "transformers.Phi3MLP"


@pytest.mark.parametrize(
    "dtype, atol", [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str
)
@pytest.mark.parametrize(
    "family", [gpt2, bert, clip, llama, llama_with_bias, gemma, phi3]
)
def test_equals_transformers_with_the_same_weights(family, dtype, atol, conform):
    torch.manual_seed(1)
    mine, theirs, reference = family()
    mine, theirs = mine.to(dtype), theirs.eval().to(dtype)
    x = (2 * torch.randn(3, 5, 24)).to(dtype)
    found = outputs_and_slopes(mine, [x])
    wanted = outputs_and_slopes(theirs, [x])
    gated = any(isinstance(part, GatedFeedForward) for part in mine.modules())
    name = "GatedFeedForward" if gated else "FeedForward"
    how = {"reference": reference, "atol": atol}
    conform(name, "forward", found[0], wanted[0], **how)
    conform(name, "gradient", found[1], wanted[1], **how)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity"])
@each_kind
def test_gradcheck(kind, activation):
    module = make(kind, 3, 4, activation=activation, bias=True)
    x = torch.randn(2, 3, dtype=torch.float64)
    leaves = [leaf.detach().requires_grad_() for leaf in (x, *module.parameters())]
    assert gradcheck(run(module), leaves)


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@each_activation
@each_kind
def test_low_precision_is_as_exact_as_the_formula(kind, activation, dtype, device):
    torch.manual_seed(0)
    module = kind(64, 96, activation, bias=True).to(device, dtype)
    x = torch.randn(40, 64).to(device, dtype)
    leaves = [x, *module.parameters()]

    def formula(*inputs):
        return by_torch(module, activation, *inputs)

    exact = outputs_and_slopes(formula, [leaf.double() for leaf in leaves])
    plain = outputs_and_slopes(formula, leaves)
    mine = outputs_and_slopes(run(module), leaves)
    assert mine[0].dtype == dtype
    assert_as_exact(mine, exact, plain)


@each_device
@pytest.mark.parametrize("dtype", HALF, ids=str)
@each_kind
def test_autocast_gives_the_dtype_and_stays_close(kind, dtype, device):
    module = make(kind, 16, 24, torch.float32).to(device)
    x = torch.randn(5, 16).to(device)
    with torch.autocast(device, dtype):
        found = module(x)
    assert found.dtype == dtype
    assert_close(found.float(), module(x), rtol=0.03, atol=0.3)


# --- what follows from the formulas -----------------------------------------------


@each_kind
def test_each_token_is_on_its_own(kind):
    module = make(kind)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    changed = x.clone()
    changed[:, 3] += 1
    moved = (module(x) != module(changed)).any(-1).any(0)
    assert moved.tolist() == [False, False, False, True, False]


@each_kind
def test_shuffled_hidden_features_change_nothing(kind):
    module = make(kind, bias=True)
    twin, order = copy.deepcopy(module), torch.randperm(9)
    for part in [twin.up, *([twin.gate] if kind is GatedFeedForward else [])]:
        part.weight.data, part.bias.data = part.weight[order], part.bias[order]
    twin.down.weight.data = twin.down.weight[:, order]
    x = torch.randn(4, 6, dtype=torch.float64)
    assert_close(twin(x), module(x))


def test_degree_of_the_map():
    x = torch.randn(7, 6, dtype=torch.float64)
    relu = make(FeedForward, activation="relu", bias=False)
    linear = make(FeedForward, activation="identity", bias=False)
    bilinear = make(GatedFeedForward, activation="identity")
    reglu = make(GatedFeedForward, activation="relu")
    assert_close(relu(3 * x), 3 * relu(x))
    assert_close(linear(x - x.flip(0)), linear(x) - linear(x.flip(0)))
    assert_close(bilinear(3 * x), 9 * bilinear(x))
    assert_close(bilinear(-x), bilinear(x))
    assert_close(reglu(3 * x), 9 * reglu(x))
    assert not torch.allclose(relu(-x), -relu(x))


@pytest.mark.parametrize("activation", sorted(set(SCALARS) - {"identity"}))
def test_curve_bends_the_gate_and_not_the_other(activation):
    module = make(GatedFeedForward, activation=activation)
    swapped = copy.deepcopy(module)
    swapped.gate, swapped.up = swapped.up, swapped.gate
    x = torch.randn(4, 6, dtype=torch.float64)
    assert not torch.allclose(swapped(x), module(x))
    doubled = copy.deepcopy(module)
    doubled.up.weight.data *= 2  # linear in up
    assert_close(doubled(x), 2 * module(x))


def test_bilinear_unit_does_not_tell_gate_from_up():
    module = make(GatedFeedForward, activation="identity")
    swapped = copy.deepcopy(module)
    swapped.gate, swapped.up = swapped.up, swapped.gate
    x = torch.randn(4, 6, dtype=torch.float64)
    assert_close(swapped(x), module(x))


# --- widths, names, errors --------------------------------------------------------


def shapes(module) -> dict[str, tuple]:
    """Names and shapes of all parameters."""
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def test_parameters_are_named_and_sized_as_written():
    assert shapes(FeedForward(6)) == {
        "up.weight": (24, 6),
        "up.bias": (24,),
        "down.weight": (6, 24),
        "down.bias": (6,),
    }
    assert shapes(FeedForward(6, 5, bias=False)) == {
        "up.weight": (5, 6),
        "down.weight": (6, 5),
    }
    gated = {"gate.weight": (7, 6), "up.weight": (7, 6), "down.weight": (6, 7)}
    assert shapes(GatedFeedForward(6, 7)) == gated
    biases = {"gate.bias": (7,), "up.bias": (7,), "down.bias": (6,)}
    assert shapes(GatedFeedForward(6, 7, bias=True)) == gated | biases
    for module in (FeedForward(6), GatedFeedForward(6)):
        assert list(module.state_dict()) == list(shapes(module))


def test_default_gated_width_is_llamas():
    def llamas(d_model, multiple_of=256):  # as its authors write it
        hidden = int(2 * (4 * d_model) / 3)
        return multiple_of * ((hidden + multiple_of - 1) // multiple_of)

    for d_model in (1, 63, 64, 95, 96, 97, 289, 512, 1000, 4096, 5120, 6656, 8192):
        with torch.device("meta"):
            module = GatedFeedForward(d_model)
        assert module.up.out_features == llamas(d_model)
        assert module.gate.out_features == module.down.in_features == llamas(d_model)
    widths = {4096: 11008, 5120: 13824, 6656: 17920, 8192: 22016}
    for d_model, d_ff in widths.items():
        with torch.device("meta"):
            assert GatedFeedForward(d_model).up.out_features == d_ff


def test_gated_network_has_the_parameters_of_an_ungated_one():
    def count(module):
        return sum(p.numel() for p in module.parameters())

    with torch.device("meta"):
        for d_model in (768, 1536, 4096, 12288):
            plain = count(FeedForward(d_model, bias=False))
            assert 1 <= count(GatedFeedForward(d_model)) / plain < 1 + 96 / d_model
        assert count(GatedFeedForward(96, 256)) == count(FeedForward(96, bias=False))


@pytest.mark.parametrize("d_ff", [1, 5, 170, 257])
def test_given_width_is_used_unchanged(d_ff):
    assert GatedFeedForward(8, d_ff).up.out_features == d_ff
    assert FeedForward(8, d_ff).up.out_features == d_ff


@pytest.mark.parametrize(
    "d_model, d_ff",
    [(0, None), (-3, None), (8, 0), (8, -1), (8, 8 / 3 * 8), (8.0, None), ("8", 4)],
)
@each_kind
def test_wrong_widths_are_refused(kind, d_model, d_ff):
    message = f"widths must be positive whole numbers, got {d_model=}, {d_ff=}"
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(d_model, d_ff)


@pytest.mark.parametrize("shape", [(2, 5), (2, 3, 7), (5,), (), (6, 1), (0,)])
@each_kind
def test_wrong_features_are_refused_in_one_line(kind, shape):
    message = f"features must be 6, got x {shape}"
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        kind(6, 9)(torch.zeros(shape))
    assert "\n" not in str(caught.value)


@each_activation
@each_kind
def test_print_shows_the_curve(kind, activation):
    assert f"activation={activation}\n" in repr(kind(4, 4, activation))


# --- shapes, layouts, torch's tools -----------------------------------------------


@pytest.mark.parametrize("lead", [(), (0,), (1,), (4,), (2, 0), (0, 3), (2, 1, 3)])
@each_kind
def test_any_leading_dimensions_also_none(kind, lead):
    module = make(kind)
    x = torch.randn(*lead, 6, dtype=torch.float64, requires_grad=True)
    out = module(x)
    assert out.shape == x.shape
    slopes = torch.autograd.grad(out.sum(), [x, *module.parameters()])
    assert all(slope.isfinite().all() for slope in slopes)
    one_by_one = [module(token) for token in x.reshape(-1, 6)]
    if one_by_one:
        assert_close(out.reshape(-1, 6), torch.stack(one_by_one))


@each_kind
def test_layout_in_memory_does_not_matter(kind):
    module = make(kind)
    x = torch.randn(6, 5, 2, dtype=torch.float64).permute(2, 1, 0)
    y = torch.randn(2, 5, 12, dtype=torch.float64)[..., ::2]
    for laid in (x, y):
        assert not laid.is_contiguous()
        assert_close(module(laid), module(laid.contiguous()))


@each_kind
def test_input_is_left_as_it_was(kind):
    module = make(kind, activation="relu")
    x = torch.randn(3, 6, dtype=torch.float64)
    before = x.clone()
    module(x)
    assert_close(x, before, rtol=0, atol=0)


@each_activation
@each_kind
def test_state_and_copy_go_through_a_file(kind, activation):
    module = make(kind, activation=activation)
    x = torch.randn(3, 6, dtype=torch.float64)
    with io.BytesIO() as file:
        torch.save(module.state_dict(), file)
        file.seek(0)
        other = kind(6, 9, activation).double()
        other.load_state_dict(torch.load(file, weights_only=True))
    with io.BytesIO() as file:
        torch.save(module, file)
        file.seek(0)
        whole = torch.load(file, weights_only=False)
    for twin in (other, whole, copy.deepcopy(module)):
        assert_close(twin(x), module(x), rtol=0, atol=0)


@each_kind
def test_moves_to_another_dtype_and_the_meta_device(kind):
    module = make(kind)
    half = copy.deepcopy(module).bfloat16()
    assert half(torch.randn(2, 6).bfloat16()).dtype == torch.bfloat16
    out = module.to("meta")(torch.zeros(2, 6, device="meta", dtype=torch.float64))
    assert out.device.type == "meta" and out.shape == (2, 6)


@each_kind
def test_vmap_equals_a_loop_over_modules(kind):
    modules = [make(kind) for _ in range(3)]
    for scale, module in enumerate(modules, 1):
        nn.init.normal_(module.up.weight, std=0.1 * scale)
    parameters, buffers = torch.func.stack_module_state(modules)
    x = torch.randn(4, 6, dtype=torch.float64)

    def call(parameters, buffers, x):
        return torch.func.functional_call(modules[0], (parameters, buffers), (x,))

    got = torch.vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
    assert_close(got, torch.stack([one(x) for one in modules]))


@each_device
@pytest.mark.parametrize("activation", ["gelu", "gelu_quick", "silu"])
@each_kind
def test_compiles_into_one_graph(kind, activation, device, conform):
    module = make(kind, dtype=torch.float32, activation=activation).to(device)
    x = torch.randn(2, 5, 6).to(device)
    torch.compiler.reset()
    results = []
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for one in (compiled, module):
        results.append(outputs_and_slopes(one, [x]))
    torch.compiler.reset()
    how = {"reference": "eager", "rtol": 1e-4, "atol": 1e-4}
    conform(kind.__name__, "compile", results[0], results[1], **how)
