"""One step of training: ours, nanoGPT's style, transformers' GPT-2, torch.nn.

Usage: python benchmarks/training.py [--device cpu|cuda] [--rounds N] [--tiny]
                                     [--out FOLDER] [--table]

Writes training.<device>.json and, from it, training.<device>.md. `--tiny` runs a model
that takes a second; `--table` only writes the table again.
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import side_by_side
import torch
from side_by_side import Ratio
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from transformer.attention import MultiHeadAttention
from transformer.blocks import PreNormBlock
from transformer.feedforward import FeedForward
from transformer.flash import row_attention
from transformer.model import LanguageModel
from transformer.norms import LayerNorm
from transformer.positions import LearnedPositions
from transformer.training import cross_entropy

SEED = 0
ROUNDS = 9
RATE = 1e-3
DTYPES = ["float32", "bfloat16"]
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # of losses, as a share
PEER_AIM = {"float32": 1.0, "bfloat16": 1.2}  # times the best peer's speed
HALF_AIM = 1.9  # bfloat16, times our speed in float32
OURS, NANO, GPT2, TORCH = "ours", "nanoGPT's style", "GPT-2", "torch.nn"
PRODUCT = "matrix product"  # what the share of the peak is of


class Shape(NamedTuple):
    """A model and a batch."""

    n_layers: int
    c: int
    h: int
    t: int
    b: int
    v: int
    edge: int  # rows and columns of the square matrices that measure the peak


SHAPES = {
    "full": Shape(6, 384, 6, 256, 8, 5120, 2048),
    "tiny": Shape(2, 16, 2, 8, 2, 32, 64),
}


def products(shape: Shape) -> int:
    """Floating-point operations of the matrix products of a step.

    Two for each multiplication; backward takes twice what forward takes; causal
    attention needs half of its scores.
    """
    c, n_tokens = shape.c, shape.b * shape.t
    block = 24 * c * c + 2 * c * (shape.t + 1)
    return 3 * n_tokens * (shape.n_layers * block + 2 * c * shape.v)


# --- contenders ----------------------------------------------------------------------


def make_ours(shape: Shape) -> LanguageModel:
    """Our decoder in GPT-2's form: learned positions, biases, tied embedding."""
    how = {"bias": True, "attend": row_attention}
    parts = (
        (MultiHeadAttention(shape.c, shape.h, **how), FeedForward(shape.c))
        for _ in range(shape.n_layers)
    )
    blocks = [PreNormBlock(shape.c, *both) for both in parts]
    positions = LearnedPositions(shape.t, shape.c)
    how = {"positions": positions, "norm": LayerNorm}
    return LanguageModel(shape.v, shape.c, blocks, **how)


class NanoBlock(nn.Module):
    """A block as nanoGPT has them."""

    def __init__(self, shape: Shape):
        super().__init__()
        c, self.h = shape.c, shape.h
        self.ln_1, self.c_attn = nn.LayerNorm(c), nn.Linear(c, 3 * c)
        self.c_proj = nn.Linear(c, c)
        self.ln_2 = nn.LayerNorm(c)
        self.mlp = nn.Sequential(nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c))

    def attend(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        parts = self.c_attn(x).split(c, dim=2)
        q, k, v = (p.view(b, t, self.h, c // self.h).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Nano(nn.Module):
    """A decoder as nanoGPT has it."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.wte = nn.Embedding(shape.v, shape.c)
        self.wpe = nn.Embedding(shape.t, shape.c)
        self.h = nn.ModuleList(NanoBlock(shape) for _ in range(shape.n_layers))
        self.ln_f = nn.LayerNorm(shape.c)

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.size(1), device=tokens.device)
        x = self.wte(tokens) + self.wpe(at)
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


class TorchDecoder(nn.Module):
    """torch.nn.TransformerEncoder with a causal mask, between the same embeddings."""

    def __init__(self, shape: Shape):
        super().__init__()
        c = shape.c
        self.wte, self.wpe = nn.Embedding(shape.v, c), nn.Embedding(shape.t, c)
        how = {"activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(c, shape.h, 4 * c, 0.0, **how)
        rest = {"norm": nn.LayerNorm(c), "enable_nested_tensor": False}
        self.encoder = nn.TransformerEncoder(layer, shape.n_layers, **rest)
        mask = nn.Transformer.generate_square_subsequent_mask(shape.t)
        self.register_buffer("mask", mask)

    def in_order(self) -> Iterator[nn.Parameter]:
        """The weights in the order of ours."""
        yield from (self.wte.weight, self.wpe.weight)
        for layer in self.encoder.layers:
            for part in (layer.norm1, layer.self_attn, layer.norm2):
                yield from part.parameters()
            yield from (*layer.linear1.parameters(), *layer.linear2.parameters())
        yield from self.encoder.norm.parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.size(1), device=tokens.device)
        x = self.wte(tokens) + self.wpe(at)
        return F.linear(self.encoder(x, self.mask, is_causal=True), self.wte.weight)


class Logits(nn.Module):
    """What a model of transformers returns, without the rest."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


def make_gpt2(shape: Shape) -> nn.Module:
    """GPT-2 of transformers, with the exact GELU that the others have."""
    config = GPT2Config(
        vocab_size=shape.v,
        n_positions=shape.t,
        n_embd=shape.c,
        n_layer=shape.n_layers,
        n_head=shape.h,
        activation_function="gelu",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
    )
    return Logits(GPT2LMHeadModel(config))


MAKE = {OURS: make_ours, NANO: Nano, GPT2: make_gpt2, TORCH: TorchDecoder}


@torch.no_grad()
def copy_weights(weights: list[Tensor], model: nn.Module) -> None:
    """Give a peer our weights; those of GPT-2's products lie the other way round."""
    turned = {id(m.weight) for m in model.modules() if isinstance(m, Conv1D)}
    theirs = getattr(model, "in_order", model.parameters)()
    for mine, weight in zip(theirs, weights, strict=True):
        mine.copy_(weight.mT if id(mine) in turned else weight)


def make_models(shape: Shape, device: str) -> dict[str, nn.Module]:
    """All decoders with the same weights."""
    torch.manual_seed(SEED)
    models = {name: make(shape) for name, make in MAKE.items()}
    weights = [parameter.detach() for parameter in models[OURS].parameters()]
    for name in models.keys() - {OURS}:
        copy_weights(weights, models[name])
    return {name: model.to(device).train() for name, model in models.items()}


def torch_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """What the peers are trained with."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def step(
    model: nn.Module,
    measure: Callable,
    optimizer,
    half: bool,
    tokens: Tensor,
    labels: Tensor,
) -> list[Tensor]:
    """Forward, backward, optimizer; the loss before the step."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=half):
        loss = measure(model(tokens), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach()]


def contenders(shape: Shape, device: str) -> dict[tuple[str, str], Callable]:
    """A step of each, by name and dtype."""
    torch.manual_seed(SEED + 1)
    text = torch.randint(shape.v, (shape.b, shape.t + 1)).to(device)
    data, runs = (text[:, :-1].contiguous(), text[:, 1:].contiguous()), {}
    for dtype in DTYPES:
        for name, model in make_models(shape, device).items():
            optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
            half = dtype == "bfloat16"
            measure = cross_entropy if name == OURS else torch_loss
            runs[name, dtype] = partial(step, model, measure, optimizer, half, *data)
    return runs


def ceilings(shape: Shape, device: str) -> dict[tuple[str, str], Callable]:
    """A product of square matrices in each dtype."""
    runs = {}
    for dtype in DTYPES:
        place = {"device": device, "dtype": getattr(torch, dtype)}
        a, b = (torch.ones(shape.edge, shape.edge, **place) for _ in range(2))
        runs[PRODUCT, dtype] = partial(torch.mm, a, b)
    return runs


# --- measuring -----------------------------------------------------------------------


def check_losses(runs: dict[tuple[str, str], Callable]) -> dict[str, float]:
    """Refuse contenders whose losses differ, before a step or after it."""
    apart = {}
    for dtype in DTYPES:
        mine = {name: run for (name, kind), run in runs.items() if kind == dtype}
        losses = {name: [*run(), *run()] for name, run in mine.items()}
        apart[dtype] = side_by_side.assert_equal(losses, TOLERANCE[dtype])
    return apart


def measure_all(device: str, rounds: int, size: str) -> dict:
    """Everything that the table shows."""
    torch.set_num_threads(1)
    shape, found = SHAPES[size], side_by_side.facts(device, rounds, SEED)
    runs = contenders(shape, device)
    apart = check_losses(runs)
    clock = "GPU time" if device == "cuda" else "CPU time"
    runs |= ceilings(shape, device)
    seconds = side_by_side.interleave(runs, rounds, clock)
    rows = [
        {"name": name, "dtype": dtype, "seconds": [round(s, 7) for s in each]}
        for (name, dtype), each in seconds.items()
    ]
    return found | {"clock": clock, "shape": shape, "apart": apart, "rows": rows}


# --- the table -----------------------------------------------------------------------


def seconds_of(found: dict, name: str, dtype: str) -> list[float]:
    """The times of one contender."""
    rows = [r for r in found["rows"] if (r["name"], r["dtype"]) == (name, dtype)]
    return rows[0]["seconds"]


def best_peer(found: dict, dtype: str) -> str:
    """The fastest of the others."""
    peers = [name for name in MAKE if name != OURS]
    return side_by_side.best({name: seconds_of(found, name, dtype) for name in peers})


def speeds(found: dict) -> list[tuple[str, Ratio, float]]:
    """What has an aim: what it is, how many times as fast we are, the aim."""
    lines = []
    for dtype, aim in PEER_AIM.items():
        peer, ours = best_peer(found, dtype), seconds_of(found, OURS, dtype)
        ratio = Ratio(seconds_of(found, peer, dtype), ours)
        lines.append((f"{dtype}, against {peer}, the fastest peer", ratio, aim))
    both = (seconds_of(found, OURS, dtype) for dtype in DTYPES)
    return [*lines, ("bfloat16, against our float32", Ratio(*both), HALF_AIM)]


def share(found: dict, name: str, dtype: str) -> float:
    """How near a step comes to the time of its matrix products alone."""
    shape = Shape(*found["shape"])
    whole = Ratio(seconds_of(found, PRODUCT, dtype), seconds_of(found, name, dtype))[0]
    return whole * products(shape) / (2 * shape.edge**3)


def line(found: dict, name: str, dtype: str) -> list[str]:
    """One row as cells."""
    seconds, shape = seconds_of(found, name, dtype), Shape(*found["shape"])
    middle = statistics.median(seconds)
    own = seconds_of(found, OURS, dtype)
    ratio = "1" if name == OURS else str(Ratio(own, seconds))
    first = seconds_of(found, GPT2, "float32")
    cells = [f"{1e3 * middle:.4g}", f"{shape.b * shape.t / middle:.0f}", ratio]
    cells += [f"{Ratio(first, seconds)[0]:.2f}", f"{share(found, name, dtype):.0%}"]
    return [name, dtype, *cells]


def page(found: dict, device: str) -> str:
    """The section of the book that shows what was found."""
    where = {"cpu": "the CPU, one thread", "cuda": "a GPU"}[device]
    s = Shape(*found["shape"])
    apart = " and ".join(f"{found['apart'][d]:.0e} ({d})" for d in DTYPES)
    peaks = " and ".join(
        f"{2e-9 * s.edge**3 / min(seconds_of(found, PRODUCT, d)):.0f} ({d})"
        for d in DTYPES
    )
    said = (
        f"Forward, backward and AdamW of a decoder of {s.n_layers} layers, C = {s.c}, "
        f"H = {s.h}, V = {s.v}, on {s.b} rows of {s.t} tokens, by {found['clock']}: "
        "our `LanguageModel` with `row_attention` and `cross_entropy`, code in the "
        "style of nanoGPT that was written for this page, GPT-2 of `transformers` with "
        "SDPA, and `torch.nn.TransformerEncoder`, these three with torch's loss. All "
        "have the same weights, the exact GELU and "
        "the fused AdamW, and nothing is compiled; bfloat16 is by autocast. Their "
        "losses before the first step and after it were the same to within "
        f"{apart}. Our time is divided by theirs in each round: median, and in "
        "brackets the quartiles. The last column is the share of the measured peak, "
        f"{peaks} billion operations a second in a product "
        f"of {s.edge} × {s.edge}."
    )
    head = ["model", "dtype", "ms", "tokens a second", "ours ÷ its"]
    head += ["speed ÷ GPT-2's in float32", "share of the peak"]
    cells = [line(found, name, dtype) for dtype in DTYPES for name in MAKE]
    aims = [[what, f"{aim}", str(ratio)] for what, ratio, aim in speeds(found)]
    parts = [f"## A step of training on {where}", side_by_side.describe(found), said]
    parts += [side_by_side.table(head, cells), "How many times as fast we are:"]
    parts += [side_by_side.table(["in", "aim", "found"], aims)]
    return "\n\n".join(parts) + "\n"


def summary(found: dict) -> str:
    """What has an aim."""
    return "; ".join(f"{what}: {ratio[0]:.2f}" for what, ratio, _ in speeds(found))


def main(arguments: list[str]) -> int:
    """Measure, write, say how fast we are."""
    parts = {"measure_all": measure_all, "page": page, "summary": summary}
    return side_by_side.command(__file__, arguments, rounds=ROUNDS, **parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
