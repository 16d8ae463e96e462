"""What `positions` promises, over shapes, dtypes and devices."""

import copy
import pickle
import re
from functools import partial

import pytest
import torch
from attention_oracle import HALF, assert_as_exact, with_gradients
from positions_oracle import (
    alibi_by_hand,
    draw,
    each_device,
    each_dtype,
    each_pairing,
    relative,
    relative_by_hand,
    sinusoid_by_hand,
    slopes_by_hand,
    turn_rows,
)
from torch.autograd import gradcheck
from torch.testing import assert_close

from transformer.attention import MultiHeadAttention, attention, causal_mask
from transformer.positions import (
    LearnedPositions,
    RelativeAttention,
    RoPE,
    SinusoidalPositions,
    alibi_attention,
    alibi_slopes,
    neighbours_to_halves,
    ntk_base,
    pair_frequencies,
    relative_shift,
    sinusoids,
    yarn_frequencies,
    yarn_scale,
)

LOOPS = {"reference": "loops in float64"}
EXACT = {torch.float64: 1e-10, torch.float32: 1e-5}


# --- sinusoids and learned vectors -------------------------------------------------


@pytest.mark.parametrize("base", [10000.0, 100.0])
@pytest.mark.parametrize("d_model", [1, 2, 7, 16])
def test_table_equals_loops(d_model, base, conform):
    expected = torch.stack([sinusoid_by_hand(p, d_model, base) for p in range(70)])
    found = sinusoids(70, d_model, base)
    conform("sinusoids", "forward", found, expected, **LOOPS, atol=1e-6)
    assert sinusoids(0, d_model).shape == (0, d_model)


@each_device
@each_dtype
@pytest.mark.parametrize("lead, at", [((), (3,)), ((2,), (3,)), ((2,), (2, 3))])
def test_sinusoids_are_added_at_any_positions(lead, at, dtype, device, conform):
    x = draw(*lead, 3, 6, dtype=dtype, device=device)
    positions = torch.randint(10**6, at, device=device)
    found = SinusoidalPositions(6)(x, positions)
    rows = [sinusoid_by_hand(p, 6) for p in positions.flatten().tolist()]
    exact = torch.stack(rows).view(*at, 6)
    assert found.dtype == dtype
    expected = x.cpu().double() + exact
    atol = {**EXACT, torch.bfloat16: 4e-2, torch.float16: 4e-3}[dtype]
    column = "forward" if dtype in EXACT else "dtype"
    conform("SinusoidalPositions", column, found.cpu(), expected, **LOOPS, atol=atol)


def test_positions_count_from_zero_by_default():
    x, at = draw(2, 5, 8), torch.arange(5)
    learned = LearnedPositions(9, 8).double()
    for layer in (SinusoidalPositions(8), learned):
        assert_close(layer(x), layer(x, at), rtol=0, atol=0)
    assert_close(learned(x), x + learned.weight[:5], rtol=0, atol=0)
    assert_close(SinusoidalPositions(8)(0 * x)[0].float(), sinusoids(5, 8))


@each_device
def test_learned_vectors_are_added_where_they_are_asked_for(device):
    layer, x = LearnedPositions(9, 4).to(device), draw(2, 3, 4, device=device).float()
    at = torch.tensor([[0, 8, 3], [3, 3, 1]], device=device)
    assert_close(layer(x, at), x + layer.weight[at], rtol=0, atol=0)
    layer(x, at).sum().backward()
    counted = torch.bincount(at.flatten(), minlength=9).to(x)
    assert_close(layer.weight.grad, counted[:, None].expand(9, 4))


def test_learned_vectors_have_length_one_on_average():
    torch.manual_seed(0)
    assert abs(LearnedPositions(1000, 64).weight.norm(dim=-1).mean() - 1) < 0.02


# --- rotations ---------------------------------------------------------------------


ROPE_SHAPES = {  # of x and of positions
    "a row": ((5, 8), (5,)),
    "heads": ((2, 3, 5, 8), (5,)),
    "other positions in each sequence": ((2, 3, 5, 8), (2, 1, 5)),
    "no heads": ((2, 5, 8), (2, 5)),
    "one token": ((2, 3, 1, 8), (1,)),
    "one position for all": ((3, 5, 8), ()),
    "no token": ((2, 0, 8), (0,)),
}


@each_device
@each_dtype
@each_pairing
@pytest.mark.parametrize("d_rotary", [None, 2, 6])
@pytest.mark.parametrize("shape", ROPE_SHAPES)
def test_turning_equals_loops(shape, d_rotary, pairing, dtype, device, conform):
    at_x, at_p = ROPE_SHAPES[shape]
    x, up = (draw(*at_x, seed=i, dtype=dtype, device=device) for i in (0, 1))
    positions = torch.randint(5000, at_p, device=device)
    rope = RoPE(8, pairing=pairing, d_rotary=d_rotary)
    found, slope = with_gradients(lambda x: rope(x, positions), [x], up)
    assert found.dtype == dtype and found.device == x.device
    if not x.numel():
        assert found.shape == x.shape
        return
    how = {"pairing": pairing, "width": d_rotary}
    exact = turn_rows(x.cpu(), positions.cpu(), **how)
    back = turn_rows(up.cpu(), -positions.cpu(), **how)  # a turn's gradient turns back
    atol = {**EXACT, torch.bfloat16: 5e-2, torch.float16: 7e-3}[dtype]
    column = "forward" if dtype in EXACT else "dtype"
    conform("RoPE", column, found.cpu(), exact, **LOOPS, atol=atol)
    column = "gradient" if dtype in EXACT else "dtype"
    conform("RoPE", column, slope.cpu(), back, **LOOPS, atol=atol)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@each_pairing
def test_half_precision_is_as_exact_as_the_formula(pairing, dtype):
    x, at = draw(4, 64, 32, dtype=dtype), torch.arange(4000, 4064)
    angles = at[:, None].double() * pair_frequencies(32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    halves = pairing == "halves"
    a, b = x.chunk(2, -1) if halves else (x[..., ::2], x[..., 1::2])
    both = (a * cos - b * sin, b * cos + a * sin)
    plain = torch.cat(both, -1) if halves else torch.stack(both, -1).flatten(-2)
    exact = turn_rows(x, at, pairing=pairing)
    assert_as_exact([RoPE(32, pairing=pairing)(x, at)], [exact], [plain])


def test_frequencies_and_scale_can_be_given():
    x, at, own = draw(3, 6), torch.tensor([1, 5, 9]), torch.tensor([0.5, 0.25, 2.0])
    found = RoPE(6, frequencies=own, scale=3)(x, at)
    assert_close(found, 3 * turn_rows(x, at, frequencies=own.tolist()))
    exact = yarn_frequencies(6, 4, 100)
    assert_close(
        RoPE(6, frequencies=exact)(x, at),
        turn_rows(x, at, frequencies=exact.tolist()),
    )


def test_interpolated_frequencies_are_divided_positions():
    x, at = draw(4, 8), torch.tensor([0, 4, 8, 40])
    found = RoPE(8, frequencies=pair_frequencies(8) / 4)(x, at)
    assert_close(found, RoPE(8)(x, at // 4))
    assert_close(found, RoPE(8)(x, at / 4.0), rtol=1e-6, atol=1e-6)  # float32 positions


def test_position_zero_changes_nothing_and_turns_add_up():
    x, rope = draw(2, 4, 8), RoPE(8, pairing="neighbours")
    assert_close(rope(x, torch.zeros(4).long()), x, rtol=0, atol=0)
    a, b = torch.tensor([1, 2, 3, 4]), torch.tensor([9, 0, 5, 2])
    assert_close(rope(rope(x, a), b), rope(x, a + b))


def test_module_holds_nothing_and_can_be_copied():
    rope = RoPE(8, frequencies=yarn_frequencies(8, 2, 64), scale=1.1)
    for layer in (rope, SinusoidalPositions(8)):
        assert not list(layer.parameters()) and not list(layer.buffers())
        assert not layer.state_dict()
    x, at = draw(3, 8), torch.arange(3)
    for other in (copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))):
        assert_close(other(x, at), rope(x, at), rtol=0, atol=0)


def test_tables_are_made_once_and_shared(monkeypatch):
    calls, cos = [], torch.Tensor.cos
    monkeypatch.setattr(torch.Tensor, "cos", lambda x: calls.append(x) or cos(x))
    turn, x = RoPE(8).at(torch.arange(4)), draw(1, 2, 4, 8)
    for _layer in range(3):
        turn(x), turn(x.float())
    assert len(calls) == 1


def test_every_angle_is_exact_where_float32_angles_are_not():
    at = torch.tensor([10**6])
    angles = at[:, None].float() * pair_frequencies(64).float()
    off = (angles.cos() - (at[:, None] * pair_frequencies(64)).cos()).abs().max()
    assert 0.005 < off < 0.05
    ones = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), -1)
    found = RoPE(64)(ones, at)[:, :32].double()
    assert_close(found, (at[:, None] * pair_frequencies(64)).cos(), rtol=0, atol=1e-7)


# --- longer than trained -----------------------------------------------------------


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    old, new = pair_frequencies(64), yarn_frequencies(64, 8, 2048)
    turned = old * 2048 / (2 * torch.pi)
    ratio = old / new
    assert_close(ratio[turned > 40], torch.ones_like(ratio[turned > 40]))
    assert_close(ratio[turned < 0.7], torch.full_like(ratio[turned < 0.7], 8))
    assert (ratio.diff() >= -1e-12).all() and ((ratio > 1.01) & (ratio < 7.9)).any()


def test_nothing_to_stretch_changes_nothing():
    assert_close(yarn_frequencies(64, 1, 2048), pair_frequencies(64))
    assert yarn_scale(1) == yarn_scale(0.5) == 1
    assert ntk_base(64, 2048, 2048, 4, 500.0) == 500.0


# --- ALiBi -------------------------------------------------------------------------


@pytest.mark.parametrize("n_heads", range(1, 34))
def test_slopes_equal_the_authors_code(n_heads, conform):
    expected = torch.tensor(slopes_by_hand(n_heads), dtype=torch.float64)
    found = alibi_slopes(n_heads)
    conform("alibi_slopes", "forward", found, expected, **LOOPS, atol=1e-7)


ALIBI_SHAPES = {  # heads of q, heads of k, T, S, E
    "self": (4, 4, 5, 5, 6),
    "cached": (4, 4, 2, 6, 6),
    "more queries": (2, 2, 5, 3, 4),
    "grouped": (6, 2, 4, 4, 3),
    "one head": (1, 1, 3, 4, 5),
}


@each_device
@each_dtype
@pytest.mark.parametrize("kind", ["none", "causal", "mask", "mask, causal"])
@pytest.mark.parametrize("shape", ALIBI_SHAPES)
def test_alibi_equals_loops(shape, kind, dtype, device, conform):
    h, g, t, s, e = ALIBI_SHAPES[shape]
    b = 2 if dtype in EXACT else 16  # half precision needs many numbers to be no luck
    shapes = ((b, h, t, 8), (b, g, s, 8), (b, g, s, e), (b, h, t, e))
    *inputs, up = (
        draw(*at, seed=i, dtype=dtype, device=device) for i, at in enumerate(shapes)
    )
    mask = None
    if "mask" in kind:
        mask = draw(b, h, t, s, seed=9, device=device) > 0
        mask[:, :, 0] = False  # a query that sees nothing
    how = {"mask": mask, "causal": "causal" in kind}
    got = with_gradients(partial(alibi_attention(h), **how), inputs, up)
    doubles = [x.cpu().double() for x in inputs]
    exact = with_gradients(partial(alibi_by_hand, **how), doubles, up.cpu())
    assert got[0].dtype == dtype and all(x.isfinite().all() for x in got)
    if dtype in EXACT:
        column = "mask" if mask is not None else "forward"
        atol = EXACT[dtype]
        conform("alibi_attention", column, got[0].cpu(), exact[0], **LOOPS, atol=atol)
        slopes = [x.cpu() for x in got[1:]]
        conform("alibi_attention", "gradient", slopes, exact[1:], **LOOPS, atol=atol)
    else:
        peer = with_gradients(partial(plain_alibi, **how), inputs, up)
        assert_as_exact(got, exact, peer)


def plain_alibi(q, k, v, mask=None, causal=False):
    """The formula in the dtype of its inputs, as a textbook has it."""
    t, s, h = q.size(-2), k.size(-2), q.size(1)
    k, v = (x.repeat_interleave(h // x.size(1), 1) for x in (k, v))
    distance = torch.arange(t, device=q.device)[:, None] + s - t
    distance = (distance - torch.arange(s, device=q.device)).abs()
    slopes = torch.tensor(slopes_by_hand(h), device=q.device)
    bias = (-slopes[:, None, None] * distance).to(q)
    see = torch.ones(t, s, dtype=torch.bool, device=q.device)
    see = see.tril(s - t) if causal else see
    see = see if mask is None else see & mask
    empty = ~see.any(-1, keepdim=True)
    scores = (q @ k.mT / q.size(-1) ** 0.5 + bias).masked_fill(~see, -torch.inf)
    return scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0) @ v


@pytest.mark.parametrize("causal", [False, True])
def test_alibi_takes_other_dimensions(causal):
    q, k, v = (draw(2, 3, 4, 5, 6, seed=i) for i in range(3))
    attend = alibi_attention(4)
    whole = attend(q, k, v, causal=causal)
    for b in range(2):
        assert_close(attend(q[b, 1], k[b, 1], v[b, 1], causal=causal), whole[b, 1])
    one = alibi_attention(1)
    flat = one(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0], causal=causal)
    assert flat.shape == (5, 6)
    with_heads = one(q[0, 0, :1], k[0, 0, :1], v[0, 0, :1], causal=causal)
    assert_close(flat, with_heads[0])


@each_dtype
@pytest.mark.parametrize("b, t, s", [(2, 0, 3), (2, 3, 0), (2, 0, 0), (0, 3, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_in_gives_zeros_or_nothing(b, t, s, causal, dtype):
    q, k, v = (torch.ones(b, 2, n, 4, dtype=dtype) for n in (t, s, s))
    found = alibi_attention(2)(q, k, v, causal=causal)
    assert_close(found, torch.zeros_like(q))
    module, x = relative(8, 2).to(dtype), torch.ones(b, t, 8, dtype=dtype)
    context = torch.ones(b, s, 8, dtype=dtype)
    assert module(x, context, causal=causal).shape == (b, t, 8)
    if not s:
        assert_close(module(x, context), torch.zeros_like(x))


# --- Transformer-XL ----------------------------------------------------------------


@each_device
@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("m", [None, 3])
def test_relative_attention_equals_loops(m, causal, masked, dtype, device, conform):
    module = relative().to(device, dtype)
    x, up = (draw(2, 4, 12, seed=i, dtype=dtype, device=device) for i in (0, 1))
    memory = None if m is None else draw(2, m, 12, seed=2, dtype=dtype, device=device)
    mask = None
    if masked:
        mask = draw(2, 1, 4, 4 + (m or 0), seed=3, device=device) > 0
        mask[:, :, 1] = False
    how = {"mask": mask, "causal": causal}
    got = with_gradients(lambda x: module(x, memory=memory, **how), [x], up)
    twin = copy.deepcopy(module).cpu().double()
    kept = None if memory is None else memory.cpu().double()
    by_hand = lambda x: relative_by_hand(twin, x, kept, **how)  # noqa: E731
    exact = with_gradients(by_hand, [x.cpu().double()], up.cpu())
    column, atol = "mask" if masked else "forward", EXACT[dtype]
    conform("RelativeAttention", column, got[0].cpu(), exact[0], **LOOPS, atol=atol)
    gradients = (got[1].cpu(), exact[1])
    conform("RelativeAttention", "gradient", *gradients, **LOOPS, atol=atol)


def test_memory_is_what_a_longer_segment_would_have_seen():
    module, x = relative().double(), draw(2, 9, 12)
    whole = module(x, causal=True)
    parts = [
        module(x[:, i : i + 3], causal=True, memory=x[:, :i] if i else None)
        for i in (0, 3, 6)
    ]
    assert_close(torch.cat(parts, 1), whole)
    token = module(x[:, 8:], causal=True, memory=x[:, :8])
    assert_close(token, whole[:, 8:])


def test_memory_may_be_a_cache_of_keys():
    module, x = relative().double(), draw(2, 6, 12)
    kept = {}

    def prepare(q, k, v, mask):
        for name, new in (("k", k), ("v", v)):
            kept[name] = torch.cat((kept[name], new), -2) if name in kept else new
        return q, kept["k"], kept["v"], mask

    steps = [module(x[:, i : i + 1], causal=True, prepare=prepare) for i in range(6)]
    assert_close(torch.cat(steps, 1), module(x, causal=True))


def test_context_with_memory_equals_one_long_context():
    module, x, source = relative().double(), draw(2, 3, 12), draw(2, 7, 12, seed=1)
    split = module(x, source[:, 4:], memory=source[:, :4])
    assert_close(split, module(x, source), rtol=0, atol=0)


def test_scores_without_positions_are_plain_attention():
    torch.manual_seed(0)
    module, plain = (
        RelativeAttention(12, 3).double(),
        MultiHeadAttention(12, 3).double(),
    )
    module.distance.weight.data.zero_()
    plain.load_state_dict(
        {
            k: v
            for k, v in module.state_dict().items()
            if "." in k and "distance" not in k
        }
    )
    x = draw(2, 5, 12)
    assert_close(module(x, causal=True), plain(x, causal=True))


@pytest.mark.parametrize(
    "scheme", ["RoPE", "alibi", "relative", "sinusoids", "learned"]
)
def test_only_distances_count(scheme):
    """Later by 50: relative schemes give the same, the added vectors do not."""
    x, late = draw(1, 6, 12), torch.arange(50, 56)
    torch.manual_seed(0)
    attend = alibi_attention(3) if scheme == "alibi" else attention
    attn = MultiHeadAttention(12, 3, attend=attend).double()
    if scheme == "relative":
        module, pad = relative().double(), torch.ones(1, 50, 12)
        shown = torch.arange(56) >= 50
        found = module(
            torch.cat((pad.double(), x), 1), mask=shown[None, :], causal=True
        )
        assert_close(found[:, 50:], module(x, causal=True), rtol=0, atol=1e-10)
        return
    if scheme == "alibi":  # nothing but T and S decides; keys in front may be hidden
        q, k, v = (draw(1, 3, 6, 4, seed=i) for i in range(3))
        front = [torch.cat((draw(1, 3, 50, 4, seed=7), y), -2) for y in (k, v)]
        shown = (torch.arange(56) >= 50)[None, :]
        found = attend(q, *front, shown, causal=True)
        assert_close(found, attend(q, k, v, causal=True), rtol=0, atol=1e-10)
        return

    def run(at):
        if scheme == "RoPE":
            turn = RoPE(4).at(at)
            turned = lambda q, k, v, m: (turn(q), turn(k), v, m)  # noqa: E731
            return attn(x, causal=True, prepare=turned)
        layers = {"sinusoids": SinusoidalPositions(12)}
        torch.manual_seed(0)
        layers["learned"] = LearnedPositions(60, 12).double()
        return attn(layers[scheme](x, at), causal=True)

    moved = (run(torch.arange(6)) - run(late)).abs().max()
    if scheme == "RoPE":
        assert_close(moved, torch.zeros_like(moved), rtol=0, atol=1e-10)
    else:
        assert moved > 1e-2


# --- derivatives and torch's transformations ---------------------------------------


def test_gradcheck():
    x, at = draw(2, 3, 4).requires_grad_(), torch.tensor([5, 0, 7])
    for pairing in ("halves", "neighbours"):
        assert gradcheck(lambda x: RoPE(4, pairing=pairing, d_rotary=2)(x, at), x)  # noqa: B023
    inputs = [draw(1, 2, 3, 4, seed=i).requires_grad_() for i in range(3)]
    assert gradcheck(partial(alibi_attention(2), causal=True), inputs)
    module, memory = relative(4, 2).double(), draw(1, 2, 4, seed=1).requires_grad_()
    y = draw(1, 3, 4).requires_grad_()
    run = lambda y, memory: module(y, causal=True, memory=memory)  # noqa: E731
    assert gradcheck(run, (y, memory))
    parameters = dict(module.named_parameters())
    names = ["distance.weight", "content_bias", "position_bias"]

    def of_parameters(*values):
        state = parameters | dict(zip(names, values, strict=True))
        return torch.func.functional_call(module, state, (y.detach(),))

    assert gradcheck(of_parameters, [parameters[name] for name in names])


def everything(x: torch.Tensor, at: torch.Tensor, modules) -> list[torch.Tensor]:
    """One call of each: x (2, 4, 5, 8)."""
    rope, sines, learned, related = modules
    turn = rope.at(at)
    flat = x[:, 0]
    return [
        turn(x),
        sines(flat, at),
        learned(flat),
        alibi_attention(4)(turn(x), x, x, causal=True),
        related(flat, causal=True, memory=flat[:, :2]),
        related(flat),
    ]


def modules():
    """One of each."""
    torch.manual_seed(0)
    rope = RoPE(8, d_rotary=6, frequencies=yarn_frequencies(6, 4, 32), scale=1.1)
    return [rope, SinusoidalPositions(8), LearnedPositions(9, 8), relative(8, 2)]


def test_compiles_into_one_graph(conform):
    torch.compiler.reset()
    parts, at = modules(), torch.arange(3, 8)
    x = draw(2, 4, 5, 8, dtype=torch.float32)
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    names = ["RoPE", "SinusoidalPositions", "LearnedPositions", "alibi_attention"]
    names += ["RelativeAttention"] * 2
    how = {"reference": "itself, not compiled", "atol": 1e-6}
    found, want = compiled(x, at, parts), everything(x, at, parts)
    for name, mine, eager in zip(names, found, want, strict=True):
        conform(name, "compile", mine, eager, **how)
    given = torch.compile(parts[2], fullgraph=True, backend="aot_eager")
    assert_close(given(x[:, 0], at), parts[2](x[:, 0], at))
    torch.compiler.reset()


def test_meta_device_gives_the_shapes():
    x, at = draw(2, 4, 5, 8, dtype=torch.float32), torch.arange(3, 8)
    want = everything(x, at, modules())
    parts = [part.to("meta") for part in modules()]
    for found, real in zip(
        everything(x.to("meta"), at.to("meta"), parts), want, strict=True
    ):
        assert found.is_meta and found.shape == real.shape
    assert RoPE(8).at(at)(x.to("meta")).is_meta  # positions of the CPU will do


def test_vmap_equals_a_batch():
    x, at = draw(3, 2, 5, 8), torch.arange(5)
    rope = RoPE(8)
    assert_close(torch.vmap(lambda x: rope(x, at))(x), rope(x, at))
    attend = partial(alibi_attention(2), causal=True)
    assert_close(torch.vmap(attend)(x, x, x), attend(x, x, x))
    module = relative(8, 2).double()
    assert_close(torch.vmap(module)(x), module(x))
    assert_close(torch.vmap(relative_shift)(x), relative_shift(x))


@each_device
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_of_relative_attention_is_near(dtype, device):
    module, x = relative().to(device), draw(2, 6, 12, device=device).float()
    want = module(x, causal=True)
    found = copy.deepcopy(module).to(dtype)(x.to(dtype), causal=True)
    assert found.dtype == dtype
    assert (found.float() - want).abs().max() < 0.05 * want.abs().max()
    with torch.autocast(device, dtype):
        mixed = module(x, causal=True)
    assert (mixed.float() - want).abs().max() < 0.05 * want.abs().max()


def test_module_moves_with_its_parameters():
    module = relative()
    names = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert names == {
        "content_bias": (3, 4),
        "position_bias": (3, 4),
        "qkv.weight": (36, 12),
        "out.weight": (12, 12),
        "distance.weight": (12, 12),
    }
    assert not list(module.buffers())
    wide = RelativeAttention(12, 2, d_head=5)
    assert wide(draw(1, 3, 12).float()).shape == (1, 3, 12)


# --- what is refused ---------------------------------------------------------------


x345 = torch.zeros(3, 4, 5, 8)
REFUSED = [
    (lambda: RoPE(5), "must be even and in d_head, got d_head=5, d_rotary=None"),
    (lambda: RoPE(8, d_rotary=3), "got d_head=8, d_rotary=3"),
    (lambda: RoPE(8, d_rotary=10), "got d_head=8, d_rotary=10"),
    (lambda: RoPE(8, d_rotary=0), "got d_head=8, d_rotary=0"),
    (lambda: RoPE(8, pairing="half"), "halves or neighbours, got pairing='half'"),
    (
        lambda: RoPE(8, frequencies=torch.ones(8)),
        "got tuple(frequencies.shape)=(8,) for 8 features",
    ),
    (
        lambda: RoPE(6)(x345, torch.arange(5)),
        "heads must have 6 features, got tuple(x.shape)=(3, 4, 5, 8)",
    ),
    (
        lambda: RoPE(8)(x345, torch.arange(4)),
        "got tuple(positions.shape)=(4,), tuple(x.shape)=(3, 4, 5, 8)",
    ),
    (lambda: RoPE(8)(x345[:, :, :1], torch.arange(5)), "must broadcast to the tokens"),
    (lambda: RoPE(8)(x345[0, 0], torch.zeros(2, 5)), "must broadcast to the tokens"),
    (lambda: RoPE(8)(x345[:1], torch.zeros(3, 1, 5)), "must broadcast to the tokens"),
    (
        lambda: SinusoidalPositions(6)(x345),
        "x must have 6 features, got tuple(x.shape)",
    ),
    (
        lambda: LearnedPositions(9, 6)(x345),
        "x must have 6 features, got tuple(x.shape)",
    ),
    (lambda: LearnedPositions(9, 8)(x345, torch.arange(4)), "must broadcast"),
    (lambda: SinusoidalPositions(8)(x345, torch.arange(4)), "must broadcast"),
    (lambda: sinusoids(3, 0), "must be positive, got width=0, base=10000.0"),
    (lambda: pair_frequencies(4, -1.0), "must be positive, got width=4, base=-1.0"),
    (lambda: alibi_slopes(0), "n_heads must be positive, got n_heads=0"),
    (lambda: alibi_attention(-2), "n_heads must be positive, got n_heads=-2"),
    (
        lambda: alibi_attention(2)(x345, x345, x345),
        "queries must have 2 heads, got tuple(q.shape)=(3, 4, 5, 8)",
    ),
    (lambda: ntk_base(2, 8, 4), "d_rotary must exceed 2, the others be positive"),
    (lambda: ntk_base(8, 0, 4), "got d_rotary=8, length=0, n_trained=4"),
    (lambda: ntk_base(8, 8, 4, 0.0), "n_trained=4, factor=0.0, base=10000.0"),
    (lambda: neighbours_to_halves(torch.ones(10), 3), "got len(rows)=10, n_heads=3"),
    (lambda: neighbours_to_halves(torch.ones(9), 3), "even rotated widths"),
    (lambda: RelativeAttention(10, 3), "d_model must be a multiple of n_heads"),
    (
        lambda: relative()(torch.zeros(2, 3, 12), mask=torch.ones(2, 3, 3).bool()),
        "mask needs a heads dimension",
    ),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_wrong_input_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_number_masks_are_refused():
    mask = causal_mask(5).float()
    for run in (
        lambda: alibi_attention(4)(x345, x345, x345, mask),
        lambda: relative()(torch.zeros(1, 5, 12), mask=mask),
    ):
        with pytest.raises(TypeError, match="mask must be bool"):
            run()
