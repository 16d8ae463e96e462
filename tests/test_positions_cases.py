"""CASE-06 to CASE-13: faults that users of other code for positions have reported."""

import math
import re

import pytest
import torch
from positions_oracle import (
    alibi_by_hand,
    draw,
    each_device,
    each_pairing,
    relative,
    relative_by_hand,
    sinusoid_by_hand,
    turn_by_hand,
    turn_rows,
)
from torch.testing import assert_close

from transformer.attention import MultiHeadAttention, causal_mask, project_heads
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
)


def doubles(*numbers: float) -> torch.Tensor:
    """A row in float64."""
    return torch.tensor(numbers, dtype=torch.float64)


# --- CASE-06: which features are a pair --------------------------------------------


@each_device
def test_case_06_pairs_are_halves_or_neighbours(device):
    x, at = doubles(1, 2, 3, 4)[None].to(device), torch.tensor([1], device=device)
    close = {"rtol": 0, "atol": 1e-8}
    found = RoPE(4, pairing="neighbours")(x, at)[0].cpu()
    neighbours = doubles(-1.14263966, 1.92207560, 2.95985067, 4.02979950)
    assert_close(found, neighbours, **close)
    halves = doubles(-1.98411065, 1.95990067, 2.46237790, 4.01979967)
    assert_close(RoPE(4)(x, at)[0].cpu(), halves, **close)


def test_case_06_permutation_leads_from_one_pairing_to_the_other():
    x, at = draw(2, 3, 5, 8), torch.arange(3, 8)
    order = neighbours_to_halves(torch.arange(8), 1)
    assert order.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    halves = RoPE(8)(x[..., order], at)
    assert_close(halves, RoPE(8, pairing="neighbours")(x, at)[..., order])


@pytest.mark.parametrize("n_kv_heads, d_rotary", [(4, None), (2, None), (2, 6)])
def test_case_06_converted_weights_give_the_same_scores(n_kv_heads, d_rotary):
    d, at = 10, torch.arange(7)
    w_q, w_k = draw(4 * d, 12), draw(n_kv_heads * d, 12, seed=1)
    b_q, b_k, x = draw(4 * d, seed=2), draw(n_kv_heads * d, seed=3), draw(7, 12, seed=4)

    def scores(w_q, b_q, w_k, b_k, pairing):
        turn = RoPE(d, pairing=pairing, d_rotary=d_rotary).at(at)
        q = turn((x @ w_q.T + b_q).unflatten(-1, (4, d)).transpose(0, 1))
        k = turn((x @ w_k.T + b_k).unflatten(-1, (-1, d)).transpose(0, 1))
        return q @ k.repeat_interleave(4 // n_kv_heads, 0).mT

    before = scores(w_q, b_q, w_k, b_k, "neighbours")
    queries = [neighbours_to_halves(w, 4, d_rotary) for w in (w_q, b_q)]
    keys = [neighbours_to_halves(w, n_kv_heads, d_rotary) for w in (w_k, b_k)]
    assert_close(scores(*queries, *keys, "halves"), before, rtol=0, atol=1e-10)
    wrong = scores(w_q, b_q, w_k, b_k, "halves")  # loads without a word
    assert (wrong - before).abs().max() > 1


@each_pairing
def test_case_06_turns_keep_length_and_see_distance_only(pairing):
    rope, q, k = RoPE(8, pairing=pairing), draw(1, 8), draw(1, 8, seed=1)
    at = torch.arange(60)
    turned = rope(q.expand(60, 8), at)
    assert_close(turned.norm(dim=-1), q.norm().expand(60))
    for distance in (0, 1, 7):
        other = rope(k.expand(60, 8), at + distance)
        products = (turned * other).sum(-1)
        assert_close(products, products[:1].expand(60), rtol=0, atol=1e-10)


# --- CASE-07: angles lose their precision ------------------------------------------


@each_device
@pytest.mark.parametrize(
    "cast", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_case_07_angles_do_not_depend_on_the_dtype_of_the_module(cast, device):
    rope = RoPE(128).to(device, cast)
    x, at = draw(1, 128, dtype=torch.float32), torch.tensor([4095], device=device)
    close = {"rtol": 0, "atol": 1e-6}
    found = rope(x.to(device), at).cpu().double()
    assert_close(found[0], turn_by_hand(x[0], 4095), **close)


@each_device
@each_pairing
@pytest.mark.parametrize("cast", [torch.float32, torch.bfloat16], ids=str)
def test_case_07_rotation_is_exact_at_a_million(cast, pairing, device):
    rope = RoPE(64, pairing=pairing).to(device, cast)
    x, at = draw(3, 64, dtype=torch.float32), torch.tensor([10**6, 999_983, 123_456])
    x = x / x.abs().max()
    found = rope(x.to(device), at.to(device)).cpu().double()
    assert_close(found, turn_rows(x, at, pairing=pairing), rtol=0, atol=1e-6)


def test_case_07_frequencies_in_bfloat16_would_be_wrong():
    exact, at = pair_frequencies(128), 4095
    rounded = exact.bfloat16().double()
    off = ((rounded * at).cos() - (exact * at).cos()).abs()
    assert 1.67 < off.max() < 1.69 and (off > 1e-2).sum() == 39
    turn = RoPE(128).at(torch.tensor([at]))
    ones = torch.ones(1, 128)
    cos = turn(torch.cat((ones[:, :64], 0 * ones[:, 64:]), 1))[0, :64]
    assert_close(cos.double(), (exact * at).cos(), rtol=0, atol=3e-4)
    half = turn(torch.cat((ones[:, :64], 0 * ones[:, 64:]), 1).bfloat16())[0, :64]
    assert_close(half.double(), (exact * at).cos(), rtol=0, atol=2.5e-3)


@each_device
def test_case_07_autocast_and_an_earlier_call_in_bfloat16_change_nothing(device):
    rope, x = RoPE(16), draw(4, 16, dtype=torch.float32).to(device)
    at = torch.arange(4000, 4004, device=device)
    alone = rope(x, at)
    turn = rope.at(at)
    assert turn(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast(device, torch.bfloat16):
        assert_close(rope.at(at)(x), alone, rtol=0, atol=0)
        assert_close(turn(x), alone, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool], ids=str)
def test_case_07_positions_that_cannot_count_are_refused(dtype):
    assert torch.tensor(257).bfloat16() == 256
    message = re.escape(f"(bfloat16 counts to 256), got positions.dtype={dtype}")
    for run in (RoPE(4).at, lambda at: SinusoidalPositions(4)(torch.ones(3, 4), at)):
        with pytest.raises(TypeError, match=message):
            run(torch.ones(3, dtype=dtype))


# --- CASE-08: a base that follows the length ---------------------------------------


def test_case_08_base_grows_with_the_length():
    found = [ntk_base(64, n, 2048, 4) for n in (1024, 2048, 4096, 8192)]
    expected = doubles(10000, 10000, 52664.434, 141213.757)
    assert_close(doubles(*found), expected, rtol=0, atol=1e-3)


def test_case_08_short_call_after_a_long_one_is_a_fresh_one():
    x = draw(1, 4, 64)

    def call(n):
        return RoPE(64, ntk_base(64, n, 8, 4))(x, torch.arange(4))

    fresh = call(4)
    assert (call(100) - fresh).abs().max() > 0.1
    assert_close(call(4), fresh, rtol=0, atol=0)


def test_case_08_slowest_pair_is_stretched_and_the_fastest_is_not():
    old, new = pair_frequencies(64), pair_frequencies(64, ntk_base(64, 8192, 2048))
    assert_close((old / new)[[0, -1]], doubles(1, 4))


# --- CASE-09: partial rotation -----------------------------------------------------


@each_pairing
def test_case_09_frequencies_belong_to_the_rotated_width(pairing):
    x = (torch.arange(8.0, dtype=torch.float64) + 1).expand(3, 8)
    at = torch.tensor([0, 1, 7])
    found = RoPE(8, pairing=pairing, d_rotary=4)(x, at)
    full = torch.cat((RoPE(4, pairing=pairing)(x[:, :4], at), x[:, 4:]), -1)
    assert_close(found, full, rtol=0, atol=0)
    assert_close(found, turn_rows(x, at, pairing=pairing, width=4))
    assert_close(found[:, 4:], x[:, 4:], rtol=0, atol=0)


def test_case_09_frequencies_of_4_and_of_64():
    assert_close(pair_frequencies(4), doubles(1, 0.01))
    last = pair_frequencies(64)[-1]
    assert_close(last, torch.tensor(1.33352e-4).double(), rtol=1e-5, atol=0)


# --- CASE-10: sinusoids of any width -----------------------------------------------


@pytest.mark.parametrize("d_model", [1, 2, 3, 5, 8, 33])
def test_case_10_any_width(d_model):
    table = sinusoids(40, d_model)
    assert table.shape == (40, d_model) and table.dtype == torch.float32
    expected = torch.stack([sinusoid_by_hand(p, d_model) for p in range(40)])
    assert_close(table.double(), expected, rtol=0, atol=1e-6)


def test_case_10_rows_of_odd_widths():
    rows = {
        5: [0.84147098, 0.54030231, 0.02511622, 0.99968454, 0.00063096],
        3: [0.84147098, 0.54030231, 0.00215443],
        1: [0.84147098],
    }
    for d_model, row in rows.items():
        assert_close(sinusoids(2, d_model)[1], torch.tensor(row), rtol=0, atol=1e-7)


@each_device
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str
)
def test_case_10_output_follows_the_input(dtype, device):
    layer, x = SinusoidalPositions(5).to(device, dtype), torch.zeros(2, 3, 5)
    at = torch.tensor([5000, 5001, 5002], device=device)
    found = layer(x.to(device, dtype), at)
    assert found.dtype == dtype and found.device.type == device
    expected = torch.stack([sinusoid_by_hand(p, 5) for p in at.tolist()])
    eps = {torch.float64: 1e-10, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    assert_close(found[1].cpu().double(), expected, rtol=0, atol=eps)


# --- CASE-11: the slopes of ALiBi --------------------------------------------------


def test_case_11_slopes_for_any_number_of_heads():
    eight = [2.0**-h for h in range(1, 9)]
    expected = {
        1: [2**-8],
        2: [2**-4, 2**-8],
        3: [1 / 16, 1 / 256, 1 / 4],
        4: [1 / 4, 1 / 16, 1 / 64, 1 / 256],
        6: [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8],
        8: eight,
        12: [*eight, 0.70710678, 0.35355339, 0.1767767, 0.08838835],
    }
    for n_heads, slopes in expected.items():
        found = alibi_slopes(n_heads)
        assert_close(found, torch.tensor(slopes), rtol=0, atol=1e-7)
        assert found.max() < 1  # an exponent that starts at 0 gives a slope of 1


@pytest.mark.parametrize("t, s", [(1, 5), (3, 5), (5, 5), (5, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_case_11_query_stands_at_its_place_in_the_cache(t, s, causal):
    q, k, v = draw(2, 6, t, 4), draw(2, 6, s, 4, seed=1), draw(2, 6, s, 3, seed=2)
    found = alibi_attention(6)(q, k, v, causal=causal)
    assert_close(found, alibi_by_hand(q, k, v, causal=causal), rtol=0, atol=1e-10)


def test_case_11_one_token_at_a_time_equals_all_at_once():
    q, k, v = draw(1, 3, 6, 4), draw(1, 3, 6, 4, seed=1), draw(1, 3, 6, 4, seed=2)
    attend = alibi_attention(3)
    steps = [
        attend(q[..., i : i + 1, :], k[..., : i + 1, :], v[..., : i + 1, :])
        for i in range(6)
    ]
    assert_close(torch.cat(steps, -2), attend(q, k, v, causal=True))


def test_case_11_constant_of_a_row_does_not_matter():
    q, k, v = draw(1, 2, 4, 3), draw(1, 2, 4, 3, seed=1), draw(1, 2, 4, 3, seed=2)
    attend, slopes = alibi_attention(2), alibi_slopes(2).double()[:, None, None]
    bias = slopes * torch.arange(4)  # grows with the key, whatever the query
    scores = q @ k.mT / math.sqrt(3) + bias
    by_key = scores.masked_fill(~causal_mask(4), -math.inf).softmax(-1) @ v
    assert_close(attend(q, k, v, causal=True), by_key)


# --- CASE-12: the shift of Transformer-XL ------------------------------------------


def test_case_12_shift_of_small_tables():
    square = relative_shift(torch.arange(1, 10).view(3, 3)).tolist()
    assert (square[0][:1], square[1][:2], square[2]) == ([3], [5, 6], [7, 8, 9])
    with_memory = relative_shift(torch.arange(1, 11).view(2, 5)).tolist()
    assert (with_memory[0][:4], with_memory[1]) == ([2, 3, 4, 5], [6, 7, 8, 9, 10])


@pytest.mark.parametrize(
    "t, s", [(0, 0), (0, 3), (1, 1), (1, 4), (3, 3), (3, 8), (4, 2)]
)
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_case_12_shift_equals_a_double_loop(t, s, lead):
    scores = draw(*lead, t, s)
    found = relative_shift(scores)
    assert found.shape == scores.shape
    for i in range(t):
        for j in range(min(i + s - t + 1, s)):
            expected = scores[..., i, j + t - 1 - i]
            assert_close(found[..., i, j], expected, rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("m", [None, 0, 3, 7])
def test_case_12_attention_equals_loops_with_and_without_memory_and_mask(m, causal):
    module = relative().double()
    x, memory = draw(2, 4, 12), None if m is None else draw(2, m, 12, seed=1)
    mask = draw(2, 1, 4, 4 + (m or 0), seed=2) > -1
    found = module(x, mask=mask, causal=causal, memory=memory)
    expected = relative_by_hand(module, x, memory, mask, causal)
    assert_close(found, expected, rtol=0, atol=1e-10)


def test_case_12_what_lies_past_the_last_key_leaves_no_trace(monkeypatch):
    module, x, memory = RelativeAttention(8, 2), draw(1, 5, 8), draw(1, 3, 8, seed=1)
    module, calm = module.double(), relative_shift
    before = module(x, causal=True, memory=memory)

    def loud(scores):
        shifted = calm(scores)
        past = ~causal_mask(*shifted.shape[-2:])
        return shifted.masked_fill(past, 1e6)

    monkeypatch.setitem(module.forward.__globals__, "relative_shift", loud)
    assert_close(module(x, causal=True, memory=memory), before, rtol=0, atol=0)
    assert (module(x, memory=memory) - module(x, causal=True, memory=memory)).any()


def test_case_12_first_slot_of_the_memory_is_seen():
    module, x, memory = RelativeAttention(8, 2), draw(1, 3, 8), draw(1, 4, 8, seed=1)
    module, other = module.double(), memory.clone()
    other[:, 0] += 1
    before, after = (module(x, causal=True, memory=m) for m in (memory, other))
    assert ((after - before).abs().amax(-1) > 1e-6).all()


# --- CASE-13: a position without a vector ------------------------------------------


@each_device
def test_case_13_one_token_too_many(device):
    layer = LearnedPositions(16, 4).to(device)
    message = re.escape("got n_tokens=17, n_positions=16")
    with pytest.raises(ValueError, match=message):
        layer(torch.ones(1, 17, 4, device=device))
    assert layer(torch.ones(1, 16, 4, device=device)).shape == (1, 16, 4)


@each_device
@pytest.mark.parametrize(
    "at, error, found",
    [
        ([0, 16], ValueError, "positions from 0 to 16, n_positions=16"),
        ([-1, 3], ValueError, "positions from -1 to 3, n_positions=16"),
        ([0.0, 1.0], TypeError, "integers, got positions.dtype=torch.float32"),
    ],
)
def test_case_13_positions_without_a_vector_are_refused(at, error, found, device):
    layer = LearnedPositions(16, 4).to(device)
    with pytest.raises(error, match=re.escape(found)):
        layer(torch.ones(1, 2, 4, device=device), torch.tensor(at, device=device))


def test_case_13_left_padded_positions_must_be_clamped_by_hand():
    keep = torch.tensor([[0, 0, 1, 1, 1]])
    at = keep.cumsum(-1) - 1  # −1 where there is padding
    layer, x = LearnedPositions(16, 4), torch.zeros(1, 5, 4)
    with pytest.raises(ValueError, match="positions from -1 to 2"):
        layer(x, at)
    found = layer(x, at.clamp(min=0))
    assert_close(found[0, 2:], layer.weight[:3], rtol=0, atol=0)


def test_case_13_cropped_window_counts_from_zero_again():
    """A cache of cropped keys would carry the old vectors: they must be made anew."""
    torch.manual_seed(0)
    layer, attn = LearnedPositions(16, 8).double(), MultiHeadAttention(8, 2).double()
    x = draw(1, 40, 8)
    cropped = attn(layer(x[:, -16:]), causal=True)[:, -1]
    at = torch.arange(40).clamp(max=15)  # what a growing cache would have written
    _, k, v = project_heads(attn.qkv, 2, layer(x, at)[:, -16:])
    last = layer(x[:, -16:])[:, -1:]
    stale = attn(last, prepare=lambda q, *_: (q, k, v, None))[:, 0]
    assert (stale - cropped).abs().max() > 1e-2
    _, k, v = project_heads(attn.qkv, 2, layer(x[:, -16:]))
    rebuilt = attn(last, prepare=lambda q, *_: (q, k, v, None))[:, 0]
    assert_close(rebuilt, cropped)
