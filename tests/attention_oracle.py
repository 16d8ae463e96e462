"""Attention by hand in float64, and how far from it a result may be."""

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
HALF = [torch.bfloat16, torch.float16]


def allowed_keys(
    mask: Tensor | None, causal: bool, t: int, n_queries: int, n_keys: int
):
    """The keys that query t may see; mask is its row of the mask, (S,)."""
    past = [s for s in range(n_keys) if not causal or s <= n_keys - n_queries + t]
    return [s for s in past if mask is None or mask[s]]


def one_query(
    q: Tensor, k: Tensor, v: Tensor, keys: list[int]
) -> tuple[Tensor, Tensor]:
    """What one query (D,) gathers, (E,), and its weights, (S,), over these keys."""
    weights = torch.zeros(len(k), dtype=q.dtype)
    if not keys:
        return torch.zeros(v.size(-1), dtype=q.dtype), weights
    scores = torch.stack([(q * k[s]).sum() / math.sqrt(len(q)) for s in keys])
    grown = (scores - scores.max().detach()).exp()
    shares = grown / grown.sum()
    out = sum(share * v[s] for share, s in zip(shares, keys, strict=True))
    return out, weights.index_put((torch.tensor(keys),), shares)


def stack(rows: list[Tensor], *shape: int) -> Tensor:
    """Rows as one tensor of this shape, also where there are none."""
    full = torch.stack(rows) if rows else torch.zeros(0, dtype=torch.float64)
    return full.reshape(shape)


def by_hand(q, k, v, mask=None, causal=False) -> tuple[Tensor, Tensor]:
    """Output and weights, one row at a time, in float64 on the CPU."""
    q, k, v = (x.to("cpu", torch.float64) for x in (q, k, v))
    flat = max(q.dim(), k.dim()) < 3  # no heads
    nothing = 0 * (q.sum() + k.sum() + v.sum())  # gradients of 0 where no row sees
    q, k, v = (x if x.dim() > 2 else x[None] for x in (q, k, v))
    lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3])
    q, k, v = (x.expand(*lead, *x.shape[-3:]) for x in (q, k, v))
    n_heads, n_queries, n_keys = q.size(-3), q.size(-2), k.size(-2)
    if mask is not None:
        mask = mask.cpu().expand(*lead, n_heads, n_queries, n_keys)
    outs, weights = [], []
    for *b, h, t in itertools.product(*map(range, (*lead, n_heads, n_queries))):
        group = (*b, h // (n_heads // k.size(-3)))
        row = None if mask is None else mask[(*b, h, t)]
        keys = allowed_keys(row, causal, t, n_queries, n_keys)
        out, weight = one_query(q[(*b, h, t)], k[group], v[group], keys)
        outs.append(out)
        weights.append(weight)
    shape = (*lead, n_queries) if flat else (*lead, n_heads, n_queries)
    return stack(outs, *shape, v.size(-1)) + nothing, stack(weights, *shape, n_keys)


def dense_mask(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """One mask, (T, S) or wider, that says what mask and causal say."""
    n_queries, n_keys = q.size(-2), k.size(-2)
    dense = torch.ones(n_queries, n_keys, dtype=torch.bool, device=q.device)
    if causal:
        last = torch.arange(n_queries, device=q.device) + n_keys - n_queries
        dense = torch.arange(n_keys, device=q.device) <= last[:, None]
    return dense if mask is None else dense & mask


def repeat_heads(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values, one head for each head of the queries."""
    if x.dim() < 3 or q.dim() < 3 or q.size(-3) == x.size(-3):
        return x
    return x.repeat_interleave(q.size(-3) // x.size(-3), -3)


def plain(q, k, v, mask=None, causal=False) -> Tensor:
    """The formula, in the dtype of its inputs, as a textbook has it."""
    k, v = repeat_heads(q, k), repeat_heads(q, v)
    mask = dense_mask(q, k, mask, causal)
    empty = ~mask.any(-1, keepdim=True)
    scores = q @ k.mT / math.sqrt(q.size(-1))
    scores = scores.masked_fill(~mask, -math.inf).masked_fill(empty, 0)
    return scores.softmax(-1).masked_fill(empty, 0) @ v


def torchs(q, k, v, mask=None, causal=False) -> Tensor:
    """torch's own function, given one dense mask, four dimensions and one width.

    With other E than D it would leave its kernel for a slow path in float32.
    """
    mask, d, e = dense_mask(q, k, mask, causal), q.size(-1), v.size(-1)
    q, k = (F.pad(x, (0, max(e - d, 0))) for x in (q, k))
    v = F.pad(v, (0, max(d - e, 0)))
    k, v = repeat_heads(q, k), repeat_heads(q, v)
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
    four = [x.expand(*lead, *x.shape[-2:]) for x in (q, k, v)]
    four = [x.reshape(math.prod(lead), 1, *x.shape[-2:]) for x in four]
    mask = mask.expand(*lead, *mask.shape[-2:])
    mask = mask.reshape(math.prod(lead), 1, *mask.shape[-2:])
    scale = 1 / math.sqrt(d)
    out = F.scaled_dot_product_attention(*four, attn_mask=mask, scale=scale)
    return out.reshape(*lead, *out.shape[-2:])[..., :e]


def with_gradients(function, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """What function gives, then the gradients of its inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream.to(out))]


def distance(got: Tensor, exact: Tensor) -> Tensor:
    """The largest error; in half precision the root of the mean square.

    Half precision rounds so often that the largest error of a few numbers is luck.
    """
    errors = (got.detach().cpu().double() - exact.detach().cpu().double()).abs()
    if not errors.numel():
        return errors.sum()
    return errors.square().mean().sqrt() if got.dtype in HALF else errors.max()


def assert_as_exact(got: list[Tensor], exact: list[Tensor], *peers: list[Tensor]):
    """At most twice as far from float64 as each peer is, plus 1e-5.

    The peers computed the same in the same dtype. In float64 itself: plus 1e-10.
    """
    for mine, true, *theirs in zip(got, exact, *peers, strict=True):
        assert mine.shape == true.shape and all(x.dtype == mine.dtype for x in theirs)
        floor = 1e-10 if mine.dtype == torch.float64 else 1e-5
        atol = 2 * min(distance(x, true).item() for x in theirs) + floor
        off = distance(mine, true)
        assert_close(off, torch.zeros_like(off), rtol=0, atol=atol)
