"""The default path's memory is linear in length, the formula's quadratic."""

import itertools
from functools import partial

import pytest
import torch
from attention_oracle import DEVICES
from side_by_side import peak_bytes

from transformer.attention import MultiHeadAttention, attention, fused_attention

pytestmark = pytest.mark.usefixtures("one_thread")
each_device = pytest.mark.parametrize("device", DEVICES)
each_pass = pytest.mark.parametrize("backward", [False, True])

LAYOUTS = {  # q, k, v for a length, as a draw of random numbers gives them
    "(T, D)": lambda draw, t: [draw(t, 16) for _ in range(3)],
    "(H, T, D)": lambda draw, t: [draw(2, t, 16) for _ in range(3)],
    "(B, H, T, D)": lambda draw, t: [draw(1, 2, t, 16) for _ in range(3)],
    "(A, B, H, T, D)": lambda draw, t: [draw(2, 1, 1, t, 16) for _ in range(3)],
    "six dimensions": lambda draw, t: [draw(1, 2, 1, 1, t, 16) for _ in range(3)],
    "wide values": lambda draw, t: [draw(1, 1, t, d) for d in (8, 8, 24)],
    "narrow values": lambda draw, t: [draw(1, 1, t, d) for d in (24, 24, 8)],
    "odd width": lambda draw, t: [draw(1, 1, t, 17) for _ in range(3)],
    "shared heads": lambda draw, t: [draw(1, h, t, 16) for h in (4, 2, 2)],
    "keys without batch": lambda draw, t: [
        draw(2, 1, t, 16),
        draw(1, t, 16),
        draw(1, t, 16),
    ],
    "transposed": lambda draw, t: [draw(1, t, 2, 16).transpose(1, 2) for _ in range(3)],
    "features first": lambda draw, t: [draw(1, 1, 16, t).mT for _ in range(3)],
    "every second": lambda draw, t: [draw(1, 1, t, 32)[..., ::2] for _ in range(3)],
    "one projection": lambda draw, t: draw(1, t, 3, 2, 8).permute(2, 0, 3, 1, 4),
}


def run(attend, inputs: list[torch.Tensor], backward: bool, causal: bool):
    """Attend, and go back where asked."""
    if not backward:
        with torch.no_grad():
            return attend(*inputs, None, causal)
    out = attend(*inputs, None, causal)
    return torch.autograd.grad(out, inputs, torch.ones_like(out))


def peaks(make, attend, backward, device, lengths, causal=False) -> list[int]:
    """Most bytes held at a time for each length, inputs not counted."""
    found = []
    for length in lengths:
        inputs = make(partial(torch.randn, device=device), length)
        inputs = [x.detach().requires_grad_(backward) for x in inputs]
        found.append(peak_bytes(partial(run, attend, inputs, backward, causal), device))
    return found


@each_device
@each_pass
@pytest.mark.parametrize("causal", [False, True])
def test_fused_memory_is_linear_from_1k_to_8k(causal, backward, device):
    make, lengths = LAYOUTS["(B, H, T, D)"], (1024, 2048, 4096, 8192)
    found = peaks(make, fused_attention, backward, device, lengths, causal)
    added = [b - a for a, b in itertools.pairwise(found)]
    for first, second in itertools.pairwise(added):
        assert 0 < second <= 2.05 * first  # twice as many tokens, twice as much
    assert found[-1] < 8192 * 8192  # not a byte for each pair


@each_device
@each_pass
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_memory_is_linear_in_every_layout(layout, backward, device):
    make = LAYOUTS[layout]
    for causal in (False, True):
        small, large = peaks(
            make, fused_attention, backward, device, (1024, 4096), causal
        )
        assert large <= 4.05 * small
        assert large < 4096 * 4096  # not a byte for each pair of one head


@each_device
@each_pass
@pytest.mark.parametrize("causal", [False, True])
def test_fused_memory_of_one_query_is_linear_in_the_keys(causal, backward, device):
    def make(draw, n_keys):
        return [draw(1, 4, n, 16) for n in (1, n_keys, n_keys)]

    found = peaks(make, fused_attention, backward, device, (2048, 8192), causal)
    per_key = 2 * 4 * 16 * 4  # bytes of a key and a value of four heads
    assert found[1] <= 4.05 * found[0]
    assert found[1] < 8192 * per_key * (3 if backward else 1)


@each_device
def test_shared_heads_are_not_copied_by_the_fused_path(device):
    def make(draw, n_keys):
        return [draw(1, h, n, 64) for h, n in ((16, 1), (1, n_keys), (1, n_keys))]

    found = peaks(make, fused_attention, False, device, (2048, 8192))
    one_copy = 8192 * 64 * 4
    assert found[1] < one_copy
    assert peaks(make, attention, False, device, (8192,))[0] > 16 * one_copy


@each_device
@each_pass
def test_formula_needs_memory_for_each_pair(backward, device):
    small, large = peaks(
        LAYOUTS["(B, H, T, D)"], attention, backward, device, (512, 2048)
    )
    assert large >= 15 * small  # four times as many tokens
    assert large > 2 * 2048 * 2048 * 4  # float32 weights of two heads


@each_device
@each_pass
def test_module_memory_is_linear_by_default_only(backward, device):
    found = {}
    for attend in (fused_attention, attention):
        module = MultiHeadAttention(32, 2, attend=attend).to(device)

        def make(draw, length):
            return [draw(1, length, 32)]

        def call(x, mask, causal, module=module):
            return module(x, mask=mask, causal=causal)

        found[attend] = peaks(make, call, backward, device, (1024, 4096), True)
    assert found[fused_attention][1] <= 4.05 * found[fused_attention][0]
    assert found[attention][1] >= 14 * found[attention][0]


@pytest.mark.skipif("cuda" in DEVICES, reason="counts the CPU allocator's bytes")
def test_peak_counts_what_is_held_at_a_time():
    def hold():
        a = torch.ones(1000)
        b = torch.ones(500)
        del a
        return b, torch.ones(250)

    assert peak_bytes(hold) == 4 * 1500
    assert peak_bytes(hold) == peak_bytes(hold)
    assert peak_bytes(lambda: None) == 0
