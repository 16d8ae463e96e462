"""Multi-head attention against what others would write, and its memory.

Usage: python benchmarks/attention.py [--device cpu|cuda] [--rounds N] [--tiny]
                                      [--out FOLDER] [--table]

Writes attention.<device>.json and, from it, attention.<device>.md. `--tiny` runs sizes
that take a second; `--table` only writes the table again.
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import side_by_side
import torch
from side_by_side import Ratio
from torch import Tensor, nn
from torch.nn import functional as F

from transformer.attention import MultiHeadAttention, attention, fused_attention

SEED = 0
AIM = 1.05  # our time over that of the best peer
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}  # as a share of the largest number
OURS, BY_HAND, TORCH = "ours", "hand-written SDPA", "torch.nn"


class Case(NamedTuple):
    """One row of the table."""

    b: int
    t: int
    c: int
    h: int
    dtype: str
    backward: bool = False
    causal: bool = False
    bias: bool = False
    threads: int = 1


SIZES = {"full": [(8, 256, 384, 6), (1, 2048, 768, 12)], "tiny": [(2, 8, 16, 2)]}
LENGTHS = {"full": [1024, 2048, 4096, 8192], "tiny": [16, 32]}


def cases(size: str) -> list[Case]:
    """The rows: all, then causal ones, then those where torch.nn takes its fast path.

    torch.nn.MultiheadAttention has a kernel of its own for inference with biases.
    """
    passes = [False, True]
    shapes, kinds = SIZES[size], list(TOLERANCE)
    rows = [Case(*s, d, backward) for d in kinds for s in shapes for backward in passes]
    rows += [Case(*s, "float32", True, causal=True) for s in shapes]
    return rows + [Case(*s, d, bias=True) for d in kinds for s in shapes]


# --- contenders ------------------------------------------------------------------


class ByHand(nn.Module):
    """What one would write today: project, call torch's kernel, project."""

    def __init__(self, d_model: int, n_heads: int, bias: bool):
        super().__init__()
        self.n_heads = n_heads
        self.c_attn = nn.Linear(d_model, 3 * d_model, bias=bias)
        self.c_proj = nn.Linear(d_model, d_model, bias=bias)

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        b, t, c = x.size()
        parts = self.c_attn(x).split(c, dim=2)
        shape = (b, t, self.n_heads, c // self.n_heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


def make_modules(case: Case) -> dict[str, nn.Module]:
    """The contenders, with the same weights."""
    torch.manual_seed(SEED)
    ours = MultiHeadAttention(case.c, case.h, bias=case.bias)
    by_hand = ByHand(case.c, case.h, case.bias)
    options = {"bias": case.bias, "batch_first": True}
    torchs = nn.MultiheadAttention(case.c, case.h, **options)
    weights = [parameter.detach() for parameter in ours.parameters()]
    for module in (by_hand, torchs):  # both name them in the order of ours
        for parameter, weight in zip(module.parameters(), weights, strict=True):
            parameter.data.copy_(weight)
    return {OURS: ours, BY_HAND: by_hand, TORCH: torchs}


def call(name: str, module: nn.Module, case: Case, mask: Tensor) -> Callable:
    """How each is called on x."""
    if name != TORCH:
        return partial(module, causal=case.causal)
    how = {"attn_mask": mask, "is_causal": True} if case.causal else {}
    return lambda x: module(x, x, x, need_weights=False, **how)[0]


def forward(run: Callable, x: Tensor) -> list[Tensor]:
    """Inference."""
    with torch.no_grad():
        return [run(x)]


def forward_backward(run: Callable, x: Tensor, leaves: list, up: Tensor):
    """Training: the output, and the gradients of the input and of all weights."""
    out = run(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *leaves], up)]


def contenders(case: Case, device: str) -> dict[str, Callable[[], list[Tensor]]]:
    """What each does in one round."""
    place = {"device": device, "dtype": getattr(torch, case.dtype)}
    modules = {name: m.to(**place) for name, m in make_modules(case).items()}
    mask = torch.ones(case.t, case.t, dtype=torch.bool, device=device).triu(1)
    torch.manual_seed(SEED + 1)
    x, up = (torch.randn(case.b, case.t, case.c).to(**place) for _ in range(2))
    runs = {}
    for name, module in modules.items():
        run = call(name, module.train(case.backward), case, mask)
        if case.backward:
            mine = x.clone().requires_grad_()
            leaves = list(module.parameters())
            runs[name] = partial(forward_backward, run, mine, leaves, up)
        else:
            runs[name] = partial(forward, run, x)
    return runs


# --- measuring -----------------------------------------------------------------------


def measure(case: Case, device: str, rounds: int) -> dict:
    """Seconds of all contenders in one case, once they gave the same."""
    if device == "cpu":
        torch.set_num_threads(case.threads)
    runs = contenders(case, device)
    outputs = {name: run() for name, run in runs.items()}
    apart = side_by_side.assert_equal(outputs, TOLERANCE[case.dtype])
    clock = "CPU time" if case.threads == 1 else "wall time"
    clock = "GPU time" if device == "cuda" else clock
    seconds = side_by_side.interleave(runs, rounds, clock)
    rounded = {name: [round(s, 7) for s in list_] for name, list_ in seconds.items()}
    row = case._asdict() | {"clock": clock, "apart": apart, "seconds": rounded}
    print(*case, f"{gate(row):.3f}", flush=True)
    return row


def measure_memory(length: int, device: str) -> dict:
    """Peak bytes of the formula and of the fused kernel, one head of 64 features."""
    torch.manual_seed(SEED)
    inputs = [torch.randn(1, 1, length, 64, device=device) for _ in range(3)]
    found = {"t": length}
    for name, attend in (("formula", attention), ("fused", fused_attention)):
        run = partial(forward, lambda qkv, f=attend: f(*qkv), inputs)
        found[f"{name}, forward"] = side_by_side.peak_bytes(run, device)
        leaves = [x.clone().requires_grad_() for x in inputs]
        up = torch.ones_like(inputs[0])
        run = lambda f=attend, x=leaves, up=up: torch.autograd.grad(f(*x), x, up)  # noqa: E731
        found[f"{name}, with backward"] = side_by_side.peak_bytes(run, device)
    return found


def measure_all(device: str, rounds: int, size: str) -> dict:
    """Everything that the table shows."""
    found = side_by_side.facts(device, rounds, SEED)
    torch.set_num_threads(1)
    rows = [measure(case, device, rounds) for case in cases(size)]
    two = device == "cpu" and found["cores"] > 1 and found["load"] < 2
    if two and side_by_side.load() < 2:  # we are one of them
        again = [case for case in cases(size) if case.dtype == "float32"]
        again = [case for case in again if not (case.causal or case.bias)]
        rows += [measure(c._replace(threads=2), device, rounds) for c in again]
    torch.set_num_threads(1)
    memory = [measure_memory(length, device) for length in LENGTHS[size]]
    return found | {"rows": rows, "memory": memory}


# --- the table ---------------------------------------------------------------------


def gate(row: dict) -> float:
    """Our time over that of the best peer, the median of the rounds."""
    peers = {name: s for name, s in row["seconds"].items() if name != OURS}
    return Ratio(row["seconds"][OURS], peers[side_by_side.best(peers)])[0]


def line(row: dict) -> list[str]:
    """One row as cells."""
    seconds = row["seconds"]
    shape = f"B{row['b']} T{row['t']} C{row['c']} H{row['h']}"
    names = {"causal": "causal", "bias": "biases"}
    how = ["forward + backward" if row["backward"] else "forward"]
    how += [word for key, word in names.items() if row[key]]
    ratios = [str(Ratio(seconds[OURS], seconds[name])) for name in (BY_HAND, TORCH)]
    own = 1e3 * statistics.median(seconds[OURS])
    own = f"{own:.0f}" if own >= 100 else f"{own:.3g}"
    over = f"{gate(row):.2f}"
    return [shape, row["dtype"], ", ".join(how), own, *ratios, over]


def times(rows: list[dict]) -> str:
    """The rows that one clock measured, and the worst of them."""
    unbiased = [row for row in rows if not row["bias"]]
    worst = max(map(gate, unbiased))
    head = ["input", "dtype", "pass", "ours, ms"]
    head += [f"÷ {BY_HAND}", f"÷ `{TORCH}`", "÷ the better"]
    said = f"Without biases, at most {worst:.2f} times the better peer in its row; the "
    said += f"aim is {AIM}."
    if len(unbiased) < len(rows):
        said += f" With biases it is {max(gate(r) for r in rows if r['bias']):.2f}: "
        said += "`torch.nn.MultiheadAttention` has a path of its own for inference, "
        said += "and takes it only then."
    return side_by_side.table(head, [line(row) for row in rows]) + "\n\n" + said


def memory(rows: list[dict]) -> str:
    """Peak memory by length, in MiB, and how it grows."""
    names = [name for name in rows[0] if name != "t"]
    cells = [
        [f"{row['t']}", *(f"{row[name] / 2**20:.2f}" for name in names)] for row in rows
    ]
    last, before = rows[-1], rows[-2]
    grown = [f"{last[name] / before[name]:.2f}" for name in names]
    cells.append([f"{last['t']} ÷ {before['t']}", *grown])
    said = "One head of 64 features in float32, no mask; inputs not counted, outputs "
    said += "and scratch space counted. The last row is how memory grows where T = S "
    said += "doubles."
    return side_by_side.table(["T = S", *names], cells) + "\n\n" + said


def page(found: dict, device: str) -> str:
    """The section of the book that shows what was found."""
    where = {"cpu": "the CPU", "cuda": "a GPU"}[device]
    parts = [f"## Multi-head attention on {where}", side_by_side.describe(found)]
    apart = " and ".join(
        f"{max(r['apart'] for r in found['rows'] if r['dtype'] == dtype):.0e} ({dtype})"
        for dtype in TOLERANCE
    )
    parts.append(
        "`MultiHeadAttention` with its default `attend`, beside a module written by "
        "hand around `scaled_dot_product_attention`, and `torch.nn.MultiheadAttention` "
        "called with `need_weights=False`. All have the same weights. Our time is "
        "divided by theirs in each round: median, and in brackets the quartiles. "
        f"Before anything was timed, all gave the same outputs and "
        f"gradients to within {apart} of the largest number in them."
    )
    clocks = dict.fromkeys((row["threads"], row["clock"]) for row in found["rows"])
    for threads, clock in clocks:
        rows = [
            r for r in found["rows"] if (r["threads"], r["clock"]) == (threads, clock)
        ]
        count = "" if device == "cuda" else f", {threads} thread{'s' * (threads > 1)}"
        parts += [f"### {clock}{count}", times(rows)]
    parts += ["### Peak memory, MiB", memory(found["memory"])]
    return "\n\n".join(parts) + "\n"


def summary(found: dict) -> str:
    """The worst ratio."""
    worst = max(gate(row) for row in found["rows"] if not row["bias"])
    return f"at most {worst:.2f} times the better peer"


def main(arguments: list[str]) -> int:
    """Measure, write, say the worst ratio."""
    parts = {"measure_all": measure_all, "page": page, "summary": summary}
    return side_by_side.command(__file__, arguments, **parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
