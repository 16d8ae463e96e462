"""Positions by hand: scalar loops in float64, for the tests of `positions`.

And what those tests share.
"""

import math

import pytest
import torch
from attention_oracle import DEVICES, DTYPES, allowed_keys, stack
from torch import Tensor

from transformer.positions import RelativeAttention

each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
each_pairing = pytest.mark.parametrize("pairing", ["halves", "neighbours"])


def draw(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> Tensor:
    """Random numbers, drawn on the CPU."""
    torch.manual_seed(seed)
    return torch.randn(shape).to(device, dtype)


def relative(d_model: int = 12, n_heads: int = 3, **how) -> RelativeAttention:
    """With biases that are not zero."""
    torch.manual_seed(3)
    module = RelativeAttention(d_model, n_heads, **how)
    for bias in (module.content_bias, module.position_bias):
        bias.data.normal_()
    return module


def sinusoid_by_hand(position: float, d_model: int, base: float = 10000.0) -> Tensor:
    """The row of one position, column by column."""
    angles = [position / base ** (2 * (j // 2) / d_model) for j in range(d_model)]
    waves = [math.cos(a) if j % 2 else math.sin(a) for j, a in enumerate(angles)]
    return torch.tensor(waves, dtype=torch.float64)


def pairs_of(pairing: str, width: int) -> list[tuple[int, int]]:
    """Which features turn together."""
    half = range(width // 2)
    if pairing == "halves":
        return [(i, i + width // 2) for i in half]
    return [(2 * i, 2 * i + 1) for i in half]


def turn_by_hand(
    x: Tensor,
    position: float,
    pairing: str = "halves",
    width: int | None = None,
    base: float = 10000.0,
    frequencies: list[float] | None = None,
) -> Tensor:
    """One vector x (D,), turned pair by pair in float64."""
    out = x.detach().cpu().double().clone()
    width = len(x) if width is None else width
    for i, (a, b) in enumerate(pairs_of(pairing, width)):
        omega = base ** (-2 * i / width) if frequencies is None else frequencies[i]
        cos, sin = math.cos(position * omega), math.sin(position * omega)
        first, second = float(x[a]), float(x[b])
        out[a], out[b] = first * cos - second * sin, second * cos + first * sin
    return out


def turn_rows(x: Tensor, positions: Tensor, **how) -> Tensor:
    """All vectors of x (..., T, D)."""
    at = positions.expand(x.shape[:-1]).flatten().tolist()
    rows = [turn_by_hand(row, p, **how) for row, p in zip(x.flatten(0, -2), at)]  # noqa: B905
    return torch.stack(rows).view(x.shape)


def slopes_by_hand(n_heads: int) -> list[float]:
    """As the authors' code: a sequence, and every second number of the next one."""

    def powers(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    n = 2 ** math.floor(math.log2(n_heads))
    rest = powers(2 * n)[0::2][: n_heads - n] if n < n_heads else []
    return powers(n) + rest


def gather(scores: list[Tensor], values: list[Tensor]) -> Tensor:
    """Softmax of a few scores, and the values that it averages."""
    grown = (torch.stack(scores) - max(s.item() for s in scores)).exp()
    shares = grown / grown.sum()
    return sum(share * value for share, value in zip(shares, values, strict=True))


def biased_by_hand(q, k, v, bias, mask=None, causal=False) -> Tensor:
    """q (B, H, T, D), k, v (B, K, S, ·); bias(b, h, i, j) is added to each score."""
    b_, h_, t_, d = q.shape
    s_, group = k.size(-2), h_ // k.size(1)
    q, k, v = (x.cpu().double() for x in (q, k, v))
    mask = None if mask is None else mask.cpu().expand(b_, h_, t_, s_)
    rows = []
    for b in range(b_):
        for h in range(h_):
            for i in range(t_):
                row = None if mask is None else mask[b, h, i]
                seen = allowed_keys(row, causal, i, t_, s_)
                keys, values = k[b, h // group], v[b, h // group]
                scores = [
                    (q[b, h, i] * keys[j]).sum() / math.sqrt(d) + bias(b, h, i, j)
                    for j in seen
                ]
                none = torch.zeros(v.size(-1), dtype=torch.float64) + 0 * q.sum()
                rows.append(gather(scores, [values[j] for j in seen]) if seen else none)
    return stack(rows, b_, h_, t_, v.size(-1))


def alibi_by_hand(q, k, v, mask=None, causal=False) -> Tensor:
    """−slope · distance, the last query standing at the last key."""
    slopes, t_, s_ = slopes_by_hand(q.size(1)), q.size(-2), k.size(-2)

    def bias(b, h, i, j):
        return -slopes[h] * abs(i + s_ - t_ - j)

    return biased_by_hand(q, k, v, bias, mask, causal)


def relative_by_hand(module, x, memory=None, mask=None, causal=False) -> Tensor:
    """Transformer-XL's four terms, one pair of tokens at a time. x (B, T, C)."""
    seen = x if memory is None else torch.cat((memory, x), 1)
    h_, t_, s_ = module.n_heads, x.size(1), seen.size(1)
    w_q, w_k, w_v = module.qkv.weight.chunk(3)
    u, v = module.content_bias, module.position_bias

    def heads(y, w):  # (B, T, C) to (B, H, T, D)
        return (y @ w.T).unflatten(-1, (h_, -1)).transpose(1, 2)

    q, k, values = heads(x, w_q), heads(seen, w_k), heads(seen, w_v)
    d = q.size(-1)

    def bias(b, h, i, j):
        row = sinusoid_by_hand(i + s_ - t_ - j, x.size(-1))
        r = (module.distance.weight @ row).view(h_, d)[h]
        terms = q[b, h, i] @ r + u[h] @ k[b, h, j] + v[h] @ r
        return terms / math.sqrt(d)

    out = biased_by_hand(q, k, values, bias, mask, causal)
    return out.transpose(1, 2).flatten(-2) @ module.out.weight.T
