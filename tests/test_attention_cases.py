"""CASE-01 to CASE-05: faults that users of other attention code have reported."""

import copy

import pytest
import torch
from attention_oracle import DEVICES, assert_as_exact, by_hand, plain
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from transformer.attention import (
    MultiHeadAttention,
    attention,
    attention_weights,
    causal_mask,
    fused_attention,
    merge_heads,
    project_heads,
    split_heads,
)

BOTH = [attention, fused_attention]
each_attend = pytest.mark.parametrize("attend", BOTH, ids=lambda f: f.__name__)
each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)


def draw(*shapes, seed=0, dtype=torch.float64, device="cpu"):
    """Random tensors, drawn on the CPU."""
    torch.manual_seed(seed)
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


@each_device
@each_dtype
@pytest.mark.parametrize("rows", [[0, 2], [0, 1, 2]], ids=["unused", "in the loss"])
@each_attend
def test_case_01_row_with_no_allowed_key(attend, rows, dtype, device):
    keep = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]], device=device).bool()
    inputs = draw(*[(16, 3, 8)] * 3, dtype=dtype, device=device)
    results = []
    for function, cast in ((attend, dtype), (by_hand, torch.float64), (plain, dtype)):
        leaves = [x.detach().to(cast).requires_grad_() for x in inputs]
        out = function(*leaves, keep)
        out = out[0] if function is by_hand else out
        out[:, rows].sum().backward()
        results.append([out, *(x.grad for x in leaves)])
    out, *slopes = results[0]
    assert_close(out[:, 1], torch.zeros_like(out[:, 1]), rtol=0, atol=0)
    weights = attention_weights(*inputs[:2], keep)[:, 1]
    assert_close(weights, torch.zeros_like(weights), rtol=0, atol=0)
    assert all(slope.isfinite().all() for slope in slopes)
    assert_as_exact(*results)


@each_device
@each_dtype
@each_attend
def test_case_01_weights_of_the_module_stay_finite(attend, dtype, device):
    torch.manual_seed(0)
    module = MultiHeadAttention(8, 2, attend=attend).to(device, dtype)
    keep = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]], device=device).bool()
    (x,) = draw((1, 3, 8), dtype=dtype, device=device)
    out = module(x, mask=keep)
    assert_close(out[:, 1], torch.zeros_like(out[:, 1]), rtol=0, atol=0)
    out[:, [0, 2]].sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


def variants(x):
    """Every way of this package to attend to x (1, 6, 12), with 3 heads."""
    torch.manual_seed(1)
    modules = [MultiHeadAttention(12, 3, attend=attend).to(x) for attend in BOTH]
    modules[1].load_state_dict(modules[0].state_dict())
    q, k, v = project_heads(modules[0].qkv, 3, x)
    merge, out = merge_heads, modules[0].out
    return {
        "formula": lambda **how: out(merge(attention(q, k, v, **how))),
        "fused": lambda **how: out(merge(fused_attention(q, k, v, **how))),
        "weights": lambda **how: out(merge(attention_weights(q, k, **how) @ v)),
        "module": lambda **how: modules[0](x, **how),
        "fused module": lambda **how: modules[1](x, **how),
    }


HOW = {"switch": {"causal": True}, "mask": {"mask": causal_mask(6)}}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", variants(torch.zeros(1, 6, 12)))
def test_case_02_changed_token_is_seen_by_later_ones_only(name, how):
    (x,) = draw((1, 6, 12))
    other = x.clone()
    other[:, 4] += 1
    before, after = (variants(y)[name](**HOW[how]) for y in (x, other))
    assert_close(after[:, :4], before[:, :4], rtol=0, atol=0)
    assert ((after - before).abs().amax(-1)[:, 4:] > 1e-3).all()


def test_case_02_all_variants_agree():
    (x,) = draw((1, 6, 12))
    found = [run(**how) for run in variants(x).values() for how in HOW.values()]
    for one in found[1:]:
        assert_close(one, found[0])
    all_true = [run(mask=torch.ones(6, 6).bool()) for run in variants(x).values()]
    no_mask = [run() for run in variants(x).values()]
    for one in (*all_true, *no_mask):
        assert_close(one, no_mask[0])


@each_attend
def test_case_02_mask_means_what_an_added_mask_of_zeros_and_infinities_means(
    attend, conform
):
    q, k, v = draw(*[(1, 2, 6, 4)] * 3)
    keep = torch.rand(6, 6) < 0.5
    keep.fill_diagonal_(True)
    added = torch.zeros(6, 6, dtype=q.dtype).masked_fill(~keep, -torch.inf)
    want = F.scaled_dot_product_attention(q, k, v, added)
    how = {"reference": "torch.nn.functional.scaled_dot_product_attention"}
    conform(attend.__name__, "mask", attend(q, k, v, keep), want, **how, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("name", variants(torch.zeros(1, 6, 12)))
def test_case_02_number_masks_are_refused(name, dtype):
    (x,) = draw((1, 6, 12))
    for causal in (False, True):
        with pytest.raises(
            TypeError, match=f"mask must be bool .* got mask.dtype={dtype}"
        ):
            variants(x)[name](mask=causal_mask(6).to(dtype), causal=causal)


ALIGNED = [
    ((2, 5), [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
    ((5, 2), [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]),
    ((1, 4), [[1, 1, 1, 1]]),
    ((3, 3), [[1, 0, 0], [1, 1, 0], [1, 1, 1]]),
]


@each_device
@each_attend
@pytest.mark.parametrize("lengths, matrix", ALIGNED)
def test_case_03_last_query_stands_at_the_last_key(attend, lengths, matrix, device):
    (t, s), seen = lengths, torch.tensor(matrix).bool()
    assert_close(causal_mask(t, s), seen)
    q, k, v = draw((1, 2, t, 4), (1, 2, s, 4), (1, 2, s, 4), device=device)
    want, weights = by_hand(q, k, v, seen)
    assert_close(attend(q, k, v, causal=True).cpu(), want)
    assert_close(attention_weights(q, k, causal=True).cpu(), weights)


@each_attend
def test_case_03_one_token_at_a_time_equals_all_at_once(attend, conform):
    q, k, v = draw(*[(2, 2, 5, 4)] * 3)
    whole = attend(q, k, v, causal=True)
    for t in range(5):
        seen = (q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1])
        got, want = attend(*seen, causal=True), whole[:, :, t : t + 1]
        how = {"reference": "itself, all tokens at once", "atol": 1e-10}
        conform(attend.__name__, "cached", got, want, **how)


@each_device
@each_dtype
@each_attend
def test_case_04_blocked_weight_is_zero_beside_a_very_low_score(attend, dtype, device):
    q = torch.tensor([[1.0]], dtype=dtype, device=device)
    k = torch.tensor([[-2e4], [0.0], [-2e4]], dtype=dtype, device=device)
    v = torch.tensor([[1.0], [100.0], [3.0]], dtype=dtype, device=device)
    mask = torch.tensor([[True, False, True]], device=device)
    weights = attention_weights(q, k, mask)
    half = torch.tensor([[0.5, 0, 0.5]], dtype=dtype, device=device)
    assert_close(weights, half, rtol=0, atol=0)
    two = torch.full_like(q, 2)
    assert_close(attend(q, k, v, mask), two, rtol=0, atol=0)


@each_device
@each_dtype
@each_attend
def test_case_04_masked_module_works_in_every_dtype(attend, dtype, device):
    torch.manual_seed(0)
    module = MultiHeadAttention(16, 2, attend=attend).to(device, dtype)
    (x,) = draw((8, 6, 16), dtype=dtype, device=device)
    mask = torch.rand(8, 1, 6, 6) < 0.5
    found = []
    for attending, cast in ((attend, dtype), (plain, torch.float64), (plain, dtype)):
        twin = copy.deepcopy(module).to(cast)
        twin.attend = attending
        found.append([twin(x.to(cast), mask=mask.to(device))])
    assert found[0][0].isfinite().all()
    assert_as_exact(*found)


@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_attend
def test_case_04_mask_works_under_autocast(attend, dtype, device):
    torch.manual_seed(0)
    module = MultiHeadAttention(16, 2, attend=attend).to(device)
    (x,) = draw((8, 6, 16), dtype=torch.float32, device=device)
    mask = torch.rand(8, 1, 6, 6) < 0.5
    mask[:, :, 0] = False
    with torch.autocast(device, dtype):
        out = module(x, mask=mask.to(device))
        module.attend = plain
        theirs = module(x, mask=mask.to(device))
    exact = module.double()(x.double(), mask=mask.to(device))
    assert_close(out[:, 0], torch.zeros_like(out[:, 0]), rtol=0, atol=0)
    assert_as_exact([out], [exact], [theirs])


def test_case_05_merged_heads_keep_their_tokens():
    heads = torch.arange(8.0).reshape(1, 2, 2, 2)  # (B, H, T, D)
    want = torch.tensor([[[0.0, 1, 4, 5], [2, 3, 6, 7]]])
    assert_close(merge_heads(heads), want)
    one_by_one = torch.cat([heads[:, 0], heads[:, 1]], -1)
    assert_close(merge_heads(heads), one_by_one)
    assert_close(split_heads(want, 2), heads)


def identity_module(attend) -> MultiHeadAttention:
    """Two heads of two features, all projections the identity."""
    module = MultiHeadAttention(4, 2, attend=attend).double()
    with torch.no_grad():
        module.qkv.weight.copy_(torch.eye(4).repeat(3, 1))
        module.out.weight.copy_(torch.eye(4))
    return module


@each_attend
def test_case_05_module_of_identities_gives_back_the_tokens(attend):
    x = torch.arange(8.0, dtype=torch.float64).reshape(1, 2, 4)
    itself = torch.eye(2, dtype=torch.bool)
    assert_close(identity_module(attend)(x, mask=itself), x)


@each_attend
def test_case_05_first_token_never_sees_the_second(attend):
    x, other = draw((1, 2, 4), (1, 2, 4))
    other[:, 0] = x[:, 0]
    module = identity_module(attend)
    before, after = (module(y, causal=True) for y in (x, other))
    assert_close(after[:, 0], before[:, 0], rtol=0, atol=0)
    assert ((after - before)[:, 1].abs() > 1e-3).any()


@each_device
@each_attend
def test_case_05_module_equals_torchs_with_the_same_weights(attend, device, conform):
    torch.manual_seed(0)
    mine = MultiHeadAttention(12, 3, attend=attend).to(device, torch.float64)
    theirs = nn.MultiheadAttention(12, 3, bias=False, batch_first=True).to(
        mine.qkv.weight
    )
    with torch.no_grad():
        theirs.in_proj_weight.copy_(mine.qkv.weight)
        theirs.out_proj.weight.copy_(mine.out.weight)
    (x,) = draw((2, 5, 12), device=device)
    want, weights = theirs(x, x, x, average_attn_weights=False)
    how = {"reference": "torch.nn.MultiheadAttention", "atol": 1e-10}
    conform("MultiHeadAttention", "forward", mine(x), want, **how)
    q, k, _ = project_heads(mine.qkv, 3, x)
    conform("attention_weights", "forward", attention_weights(q, k), weights, **how)
