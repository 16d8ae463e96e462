"""What attention keeps for any shapes, dtypes, masks and values; rotations, norms."""

import math

import torch
from attention_oracle import plain, repeat_heads, with_gradients
from hypothesis import given
from hypothesis import strategies as st
from properties import (
    assert_near,
    block_sizes,
    counts,
    double,
    exact,
    formulas,
    heads,
    often,
    randoms,
    rounding,
    seeds,
    shuffled,
)
from torch.testing import assert_close

from transformer.attention import (
    attention,
    attention_weights,
    causal_mask,
    merge_heads,
    padding_mask,
    split_heads,
)
from transformer.flash import flash_attention, online_softmax
from transformer.long_range import ExternalMemory, top_k_attention
from transformer.norms import LayerNorm, RMSNorm
from transformer.positions import (
    RoPE,
    alibi_attention,
    alibi_slopes,
    neighbours_to_halves,
    ntk_base,
    pair_frequencies,
    relative_shift,
    sinusoids,
    yarn_frequencies,
)
from transformer.window import window_attention, window_mask


@st.composite
def attends(draw, n_heads: int):
    """Any function that can be a layer's `attend`."""
    kind = draw(st.sampled_from(["formula", "window", "top", "alibi", "memory"]))
    if kind == "window":
        return window_attention(draw(counts))
    if kind == "top":
        return top_k_attention(draw(counts))
    if kind == "memory":
        return ExternalMemory(n_heads, draw(counts), attend=draw(formulas()))
    return alibi_attention(n_heads) if kind == "alibi" else draw(formulas())


def take(x, dim: int, order):
    """x with the entries of one dimension in this order; a 1 stays a 1."""
    if x is None or x.dim() < -dim or x.size(dim) == 1 != len(order):
        return x
    return x.index_select(dim, order)


# --- the formula ---------------------------------------------------------------------


@often(100)
@given(heads(), formulas(), st.booleans())
def test_every_formula_is_the_textbook_s_up_to_rounding(given, attend, causal):
    got = attend(*given, causal)
    want = plain(*(x.double() for x in given[:3]), given.mask, causal)
    assert got.dtype == given.q.dtype
    assert_near(got, want, rounding(*given[:3]))


@often(60)
@given(heads(double), formulas(), st.booleans(), seeds)
def test_every_formula_has_the_gradients_of_the_textbook(given, attend, causal, seed):
    mask, inputs = given.mask, list(given[:3])
    want = plain(*inputs, mask, causal)
    up = torch.randn(want.shape, generator=randoms(seed), dtype=double)
    got = with_gradients(lambda q, k, v: attend(q, k, v, mask, causal), inputs, up)
    want = with_gradients(lambda q, k, v: plain(q, k, v, mask, causal), inputs, up)
    assert_close(got, want, **exact)


@often(60)
@given(heads(), st.booleans())
def test_weights_sum_to_one_or_are_zero(given, causal):
    q, k, _, mask = given
    weights = attention_weights(q, k, mask, causal)
    seen = torch.ones(weights.shape, dtype=torch.bool) if mask is None else mask
    seen = seen & causal_mask(q.size(-2), k.size(-2)) if causal else seen
    seen = seen.expand(weights.shape)
    assert (weights >= 0).all() and not weights[~seen].any()
    assert_near(weights.sum(-1), seen.any(-1).double(), 2 * k.size(-2) + 8)


@often(60)
@given(heads(double), formulas(), st.booleans())
def test_outputs_lie_between_the_values(given, attend, causal):
    q, k, v, mask = given
    out = attend(q, k, v, mask, causal)
    v = repeat_heads(q, v)
    if v.size(-2):
        low, high = v.amin(-2, keepdim=True), v.amax(-2, keepdim=True)
        inside = (out >= low - 1e-12) & (out <= high + 1e-12)
        assert (inside | (out == 0)).all()
    else:
        assert not out.any()


# --- order ---------------------------------------------------------------------------


@often(60)
@given(heads(double), st.data(), seeds)
def test_order_of_keys_makes_no_difference(given, data, seed):
    q, k, v, mask = given
    attend = data.draw(st.one_of(formulas(), counts.map(top_k_attention)))
    order = shuffled(k.size(-2), seed)
    other = attend(q, take(k, -2, order), take(v, -2, order), take(mask, -1, order))
    assert_close(other, attend(q, k, v, mask), **exact)


@often(60)
@given(heads(double), st.data(), seeds)
def test_outputs_go_with_their_queries(given, data, seed):
    q, k, v, mask = given
    attend = data.draw(st.one_of(formulas(), counts.map(top_k_attention)))
    order = shuffled(q.size(-2), seed)
    other = attend(take(q, -2, order), k, v, take(mask, -2, order))
    assert_close(other, take(attend(q, k, v, mask), -2, order), **exact)


@often(60)
@given(heads(double, shared=False), st.data(), st.booleans(), seeds)
def test_heads_know_nothing_of_each_other(given, data, causal, seed):
    q, k, v, mask = given
    attend = data.draw(st.one_of(formulas(), counts.map(window_attention)))
    order = shuffled(q.size(-3), seed)
    other = attend(*(take(x, -3, order) for x in given), causal)
    assert_close(other, take(attend(q, k, v, mask, causal), -3, order), **exact)


# --- what may be seen ----------------------------------------------------------------


@often(100)
@given(heads(least=1), st.data())
def test_later_keys_change_no_earlier_output(given, data):
    q, k, v, mask = given
    attend = data.draw(attends(q.size(-3)))
    n_queries, n_keys = q.size(-2), k.size(-2)
    cut = data.draw(st.integers(0, n_keys))
    before = attend(q, k, v, mask, True)
    if isinstance(attend, ExternalMemory):
        attend.store.clear()
    k, v = k.clone(), v.clone()
    k[..., cut:, :] = 3 - 2 * k[..., cut:, :]
    v[..., cut:, :] += 100
    after = attend(q, k, v, mask, True)
    n_same = max(0, cut - n_keys + n_queries)
    assert after[..., :n_same, :].equal(before[..., :n_same, :])


@often(100)
@given(heads(least=1), st.data(), st.booleans())
def test_what_a_mask_hides_makes_no_difference(given, data, causal):
    q, k, v, mask = given
    attend = data.draw(attends(q.size(-3)))
    hidden = torch.rand(k.size(-2), generator=randoms(data.draw(seeds))) < 0.5
    seen = ~hidden if mask is None else mask & ~hidden
    before = attend(q, k, v, seen, causal)
    if isinstance(attend, ExternalMemory):
        attend.store.clear()
    k = k.masked_fill(hidden[:, None], 7.0)
    v = v.masked_fill(hidden[:, None], -50.0)
    assert attend(q, k, v, seen, causal).equal(before)


@often(60)
@given(heads(), counts, st.booleans())
def test_window_is_a_mask(given, window, causal):
    q, k, v, mask = given
    band = window_mask(q.size(-2), k.size(-2), window)
    band = band if mask is None else band & mask
    want = plain(*(x.double() for x in (q, k, v)), band)
    got = window_attention(window)(q, k, v, mask, causal)
    assert_near(got, want, rounding(q, k, v))


@often(40)
@given(heads(double, most=12), counts, seeds)
def test_window_has_the_gradients_of_its_mask(given, window, seed):
    q, k, v, mask = given
    band = window_mask(q.size(-2), k.size(-2), window)
    band = band if mask is None else band & mask
    shape = plain(q, k, v).shape
    up = torch.randn(shape, generator=randoms(seed), dtype=double)
    attend = window_attention(window)
    got = with_gradients(lambda *qkv: attend(*qkv, mask), [q, k, v], up)
    want = with_gradients(lambda *qkv: plain(*qkv, band), [q, k, v], up)
    assert_close(got, want, **exact)


@often(40)
@given(counts, counts, st.integers(0, 9), st.integers(0, 9))
def test_wider_windows_see_more_and_all_of_them_what_is_causal(w, more, t, s):
    narrow, wide = window_mask(t, s, w), window_mask(t, s, w + more)
    assert (narrow <= wide).all() and window_mask(t, s, t + s + 1).equal(
        causal_mask(t, s)
    )
    assert narrow.sum(-1).le(w).all()


@often(40)
@given(st.lists(st.integers(0, 12), max_size=4), st.integers(0, 9))
def test_padding_masks_count_the_tokens(lengths, n_keys):
    mask = padding_mask(torch.tensor(lengths, dtype=torch.int64), n_keys)
    assert mask.shape == (len(lengths), 1, 1, n_keys)
    assert mask.sum(-1).flatten().tolist() == [min(n, n_keys) for n in lengths]
    assert (mask[..., 1:] <= mask[..., :-1]).all()


@often(60)
@given(heads(double), counts, st.booleans())
def test_top_k_keeps_the_best_that_may_be_seen(given, top, causal):
    q, k, v, mask = given
    scores = attention_weights(q, k, mask, causal)
    edge = scores.topk(min(top, scores.size(-1)), -1).values[..., -1:]
    kept = scores.where(scores >= edge, 0) if scores.size(-1) else scores
    want = kept / kept.sum(-1, keepdim=True).clamp(min=1e-300)
    got = top_k_attention(top)(q, k, v, mask, causal)
    assert_close(got, want @ repeat_heads(q, v), rtol=1e-7, atol=1e-9)


# --- shared heads --------------------------------------------------------------------


@often(60)
@given(heads(double), st.data(), st.booleans())
def test_shared_heads_are_repeated_heads(given, data, causal):
    q, k, v, mask = given
    kind = st.one_of(
        formulas(), counts.map(window_attention), counts.map(top_k_attention)
    )
    attend = data.draw(kind)
    repeated = attend(q, repeat_heads(q, k), repeat_heads(q, v), mask, causal)
    assert_close(attend(q, k, v, mask, causal), repeated, **exact)


@often(40)
@given(
    st.lists(st.integers(0, 3), max_size=2), st.integers(0, 5), counts, counts, seeds
)
def test_heads_are_split_and_merged_back(lead, n_tokens, n_heads, d, seed):
    x = torch.randn(*lead, n_tokens, n_heads * d, generator=randoms(seed))
    parts = split_heads(x, n_heads)
    assert parts.shape == (*lead, n_heads, n_tokens, d)
    assert merge_heads(parts).equal(x)


# --- pieces --------------------------------------------------------------------------


@often(60)
@given(heads(double, shared=False, least=1), st.lists(counts, max_size=4), seeds)
def test_softmax_of_pieces_in_any_order_is_that_of_the_whole(given, cuts, seed):
    q, k, v, mask = given
    scores = q @ k.mT
    scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
    order, running = shuffled(k.size(-2), seed), None
    for piece in order.tensor_split(sorted({min(c, len(order)) for c in cuts})):
        if len(piece):
            running = online_softmax(scores[..., piece], v[..., piece, :], running)
    average, total = running
    empty = scores.isneginf().all(-1, keepdim=True)
    want = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0) @ v
    assert_close(average, want, **exact)
    assert_close(total, scores.logsumexp(-1, keepdim=True), **exact)


@often(40)
@given(heads(double, most=12), block_sizes, block_sizes, st.booleans())
def test_size_of_tiles_makes_no_difference(given, block_q, block_k, causal):
    cut = flash_attention(*given, causal, block_q=block_q, block_k=block_k)
    assert_close(cut, flash_attention(*given, causal), **exact)


# --- rotations -----------------------------------------------------------------------


@st.composite
def rotations(draw) -> RoPE:
    """Any rotation of some or all features."""
    d_rotary = 2 * draw(st.integers(1, 4))
    d_head = d_rotary + draw(st.integers(0, 3))
    pairing = draw(st.sampled_from(["halves", "neighbours"]))
    base = draw(st.sampled_from([2.0, 100.0, 10000.0, 1e6]))
    frequencies = None
    if draw(st.booleans()):
        frequencies = yarn_frequencies(d_rotary, 4.0, 64, base)
    how = {"pairing": pairing, "frequencies": frequencies}
    return RoPE(d_head, base, d_rotary=d_rotary, **how)


places = st.integers(-(10**6), 10**6)


def drawn(seed: int, *shape: int):
    """Two tensors of this shape."""
    return torch.randn(2, *shape, generator=randoms(seed), dtype=double)


@often(60)
@given(rotations(), st.lists(places, min_size=1, max_size=5), seeds)
def test_rotations_keep_the_norm_and_what_is_not_rotated(rope, at, seed):
    x, _ = drawn(seed, 2, 3, len(at), rope.d_head)
    turned = rope(x, torch.tensor(at))
    assert_close(turned.norm(dim=-1), x.norm(dim=-1), **exact)
    assert turned[..., rope.d_rotary :].equal(x[..., rope.d_rotary :])
    back = rope(turned, -torch.tensor(at))
    assert_close(back, x, **exact)


@often(60)
@given(rotations(), places, places, places, seeds)
def test_products_of_rotated_vectors_depend_on_the_distance(rope, m, n, shift, seed):
    q, k = drawn(seed, 1, rope.d_head)
    at = [rope(x, torch.tensor([p])) for x, p in ((q, m), (k, n))]
    moved = [rope(x, torch.tensor([p + shift])) for x, p in ((q, m), (k, n))]
    # Two angles of up to 2e6 radians, each rounded to float64.
    size = 4e6 * 2**-52 * q.norm() * k.norm()
    assert abs((at[0] * at[1]).sum() - (moved[0] * moved[1]).sum()) <= 4 * size


@often(40)
@given(rotations(), st.integers(0, 999), st.integers(0, 999), seeds)
def test_rotations_add_up(rope, m, n, seed):
    x, _ = drawn(seed, 1, rope.d_head)
    twice = rope(rope(x, torch.tensor([m])), torch.tensor([n]))
    assert_close(twice, rope(x, torch.tensor([m + n])), **exact)


@often(40)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), seeds)
def test_reordered_rows_give_the_scores_of_the_other_pairing(n_heads, half, rest, seed):
    d = 2 * half + rest
    rows = drawn(seed, n_heads * d, 5)
    x, at = drawn(seed + 1, 4, 5)[0], torch.arange(4)
    scores = []
    for pairing in ("neighbours", "halves"):
        rope = RoPE(d, pairing=pairing, d_rotary=2 * half)
        if pairing == "halves":
            rows = [neighbours_to_halves(r, n_heads, 2 * half) for r in rows]
        q, k = (rope(split_heads(x @ r.T, n_heads), at) for r in rows)
        scores.append(q @ k.mT)
    assert_close(*scores, **exact)


@often(40)
@given(st.integers(1, 8), st.integers(0, 500), st.integers(0, 500))
def test_products_of_sinusoids_depend_on_the_distance(half, p, shift):
    table = sinusoids(p + shift + 4, 2 * half).double()
    here, there = table[p] @ table[p + 3], table[p + shift] @ table[p + shift + 3]
    assert abs(here - there) <= 4 * half * 2**-23
    assert abs(table[p].square().sum() - half) <= 4 * half * 2**-23


@often(40)
@given(
    st.integers(2, 64),
    st.floats(1, 64),
    st.integers(16, 10**5),
    st.floats(2, 1e6),
)
def test_yarn_lies_between_what_is_kept_and_what_is_interpolated(d, factor, n, base):
    old, new = pair_frequencies(d, base), yarn_frequencies(d, factor, n, base)
    assert (new <= old * (1 + 1e-12)).all()
    assert (new >= old / factor * (1 - 1e-12)).all()
    assert (new[1:] <= new[:-1] * (1 + 1e-12)).all()


@often(40)
@given(st.integers(3, 64), counts, st.integers(1, 99), st.floats(1, 8))
def test_ntk_base_grows_with_the_length_alone_past_what_was_trained(d, n, more, factor):
    assert ntk_base(d, n, n, factor) == 10000.0
    first, second = (ntk_base(d, n + more * i, n, factor) for i in (1, 2))
    assert 10000.0 < first < second


@often(30)
@given(st.integers(1, 70))
def test_slopes_differ_and_lie_between_0_and_1(n_heads):
    slopes = alibi_slopes(n_heads)
    assert slopes.shape == (n_heads,) and len({*slopes.tolist()}) == n_heads
    assert ((slopes > 0) & (slopes < 1)).all()


@often(40)
@given(heads(double, shared=False, least=1), st.booleans(), st.integers(-9, 9))
def test_alibi_is_the_formula_with_slopes(given, causal, _):
    q, k, v, mask = given
    n_queries, n_keys = q.size(-2), k.size(-2)
    place = torch.arange(n_queries)[:, None] + n_keys - n_queries
    away = (place - torch.arange(n_keys)).abs().double()
    bias = -alibi_slopes(q.size(-3)).double()[:, None, None] * away
    seen = torch.ones(n_queries, n_keys, dtype=torch.bool)
    seen = causal_mask(n_queries, n_keys) if causal else seen
    seen = seen if mask is None else seen & mask
    scores = (q @ k.mT / math.sqrt(q.size(-1)) + bias).exp() * seen
    want = scores / scores.sum(-1, keepdim=True).clamp(min=1e-300) @ v
    got = alibi_attention(q.size(-3))(q, k, v, mask, causal)
    assert_close(got, want, rtol=1e-6, atol=1e-6)


@often(40)
@given(st.lists(st.integers(0, 2), max_size=2), counts, st.integers(0, 4), seeds)
def test_shifted_scores_stand_at_their_distance(lead, n_queries, more, seed):
    n_keys = n_queries + more
    scores = torch.randn(*lead, n_queries, n_keys, generator=randoms(seed))
    shifted = relative_shift(scores)
    for i in range(n_queries):
        for j in range(i + n_keys - n_queries + 1):
            column = j + n_queries - 1 - i
            assert shifted[..., i, j].equal(scores[..., i, column])


# --- norms ---------------------------------------------------------------------------


@often(40)
@given(st.integers(2, 9), st.floats(0.1, 9), st.floats(-9, 9), seeds)
def test_norms_forget_size_and_layer_norm_the_mean(d, size, shift, seed):
    x, _ = drawn(seed, 3, d)
    for norm, moved in ((LayerNorm(d, 0.0), x + shift), (RMSNorm(d, 0.0), x)):
        norm = norm.double()
        assert_close(norm(size * moved), norm(x), rtol=1e-6, atol=1e-8)
    y = LayerNorm(d, 0.0).double()(x)
    assert_close(y.mean(-1), torch.zeros(3, dtype=double), **exact)
    ones = torch.ones(3, dtype=double)
    assert_close(y.square().mean(-1), ones, **exact)
    y = RMSNorm(d, 0.0).double()(x)
    assert_close(y * x.square().mean(-1, keepdim=True).sqrt(), x, **exact)


@often(40)
@given(heads(least=1), st.booleans())
def test_batches_are_texts_side_by_side(given, causal):
    q, k, v, mask = given
    if q.dim() < 4:
        return
    whole = attention(q, k, v, mask, causal)
    for b in range(len(q)):
        own = mask if mask is None or mask.dim() < q.dim() else mask[b % len(mask)]
        one = attention(q[b], k[b], v[b], own, causal)
        assert_near(whole[b], one, 2 * rounding(q, k, v))
