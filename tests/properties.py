"""How often properties are tried, and the inputs that they are tried on.

In `make test` a few examples each, always the same ones. `HUNT=20 python -m pytest
tests/test_properties*.py` tries twenty times as many, others each time;
`--hypothesis-show-statistics` counts them.
"""

import math
import os
from typing import NamedTuple

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from transformer.attention import attention, fused_attention
from transformer.flash import flash_attention, row_attention
from transformer.grouped import grouped_attention

HUNT = int(os.environ.get("HUNT", "0"))
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
dtypes, seeds = st.sampled_from(DTYPES), st.integers(0, 2**16)
counts, double = st.integers(1, 9), torch.float64
exact = {"rtol": 1e-9, "atol": 1e-10}


def often(n: int = 30) -> settings:
    """Try a property n times, or HUNT times as often."""
    return settings(
        max_examples=n * max(HUNT, 1),
        derandomize=not HUNT,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def randoms(seed: int) -> torch.Generator:
    """Random numbers of one example."""
    return torch.Generator().manual_seed(seed)


class Heads(NamedTuple):
    """Queries, keys, values, and a mask or none."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None


@st.composite
def masks(draw, scores: tuple[int, ...], seed: int) -> Tensor | None:
    """None, or bools that broadcast to the scores (..., T, S)."""
    if not draw(st.booleans()):
        return None
    shape = [draw(st.sampled_from(sorted({1, n}))) for n in scores]
    shape = shape[draw(st.integers(0, len(shape))) :]
    share = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    return torch.rand(shape, generator=randoms(seed + 1)) < share


@st.composite
def heads(draw, dtype=dtypes, most=7, shared=True, least=0) -> Heads:
    """Up to two dimensions in front, K heads of keys, a multiple of them of queries."""
    size = st.integers(least, most)
    n_queries, n_keys = draw(size), draw(size)
    d, e = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    n_shared = draw(st.integers(1, 3))
    n_heads = n_shared * (draw(st.integers(1, 3)) if shared else 1)
    lead = draw(st.lists(st.integers(least, 2), max_size=2))
    seed, scale = draw(seeds), draw(st.sampled_from([0.0, 0.1, 1.0, 8.0]))
    shapes = (n_heads, n_queries, d), (n_shared, n_keys, d), (n_shared, n_keys, e)
    made = randoms(seed)
    drawn = [torch.randn(*lead, *shape, generator=made) for shape in shapes]
    kind = draw(dtype) if isinstance(dtype, st.SearchStrategy) else dtype
    q, k, v = ((x * scale).to(kind) for x in drawn)
    v = drawn[2].to(kind) if scale == 0 else v  # equal scores, other values
    mask = draw(masks((*lead, n_heads, n_queries, n_keys), seed))
    return Heads(q, k, v, mask)


block_sizes = st.integers(1, 9)


@st.composite
def formulas(draw):
    """A function that computes what `attention` computes."""
    kind = draw(st.sampled_from(["plain", "fused", "flash", "row", "grouped"]))
    if kind == "flash":
        how = {"block_q": draw(block_sizes), "block_k": draw(block_sizes)}
        return lambda *given: flash_attention(*given, **how)
    if kind == "row":
        block_q = draw(block_sizes)
        return lambda *given: row_attention(*given, block_q=block_q)
    kinds = {"plain": attention, "fused": fused_attention, "grouped": grouped_attention}
    return kinds[kind]


def rounding(q: Tensor, k: Tensor, v: Tensor) -> float:
    """How far rounding may put attention in the dtype of q from that in float64.

    A score is a sum of D products, each rounded; an error of δ in it changes a weight
    by 2δ of itself; the output is a sum of S products.
    """
    q, k, v = (x.double().abs() for x in (q, k, v))
    if not (q.numel() and k.numel() and v.numel()):
        return 0.0
    d, n_keys = q.size(-1), k.size(-2)
    rows = q.flatten(0, -2) @ k.flatten(0, -2).mT / math.sqrt(d)
    score = rows.max().item()
    return (2 * (d + 4) * score + n_keys + 8) * v.max().item()


def assert_near(actual: Tensor, expected: Tensor, size: float = 1.0) -> None:
    """At most size times the rounding of actual's dtype away from float64."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    limit = size * torch.finfo(actual.dtype).eps + torch.finfo(actual.dtype).tiny
    off = (actual.double() - expected.double()).abs()
    assert off.numel() == 0 or off.max().item() <= limit


def shuffled(n: int, seed: int) -> Tensor:
    """The numbers below n in another order."""
    return torch.randperm(n, generator=randoms(seed))
