"""Rotating queries and keys, against the rotation of transformers' Llama.

Usage: python benchmarks/positions.py [--device cpu|cuda] [--rounds N] [--tiny]
                                      [--out FOLDER] [--table]

Writes positions.<device>.json and, from it, positions.<device>.md. `--tiny` runs sizes
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
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from transformer.positions import RoPE

SEED = 0
AIM = 1.1  # our time over Llama's
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}  # their angles are float32
OURS, LLAMA = "ours", "Llama"


class Case(NamedTuple):
    """One row of the table."""

    b: int
    h: int
    t: int
    d: int
    dtype: str = "float32"
    work: str = "turn"  # or: with tables, with backward


SIZES = {"full": [(1, 32, 4096, 128), (8, 12, 512, 64)], "tiny": [(1, 2, 16, 8)]}
WORKS = ["turn", "with tables", "with backward"]


def cases(size: str) -> list[Case]:
    """The rows."""
    return [Case(*s, d, w) for d in TOLERANCE for s in SIZES[size] for w in WORKS]


# --- contenders ----------------------------------------------------------------------


def llama_tables(case: Case, device: str) -> LlamaRotaryEmbedding:
    """What makes cos and sin there."""
    shape = {"hidden_size": case.h * case.d, "num_attention_heads": case.h}
    return LlamaRotaryEmbedding(LlamaConfig(**shape)).to(device)


def forward(turn: Callable, q: Tensor, k: Tensor) -> list[Tensor]:
    """Queries and keys, turned."""
    with torch.no_grad():
        return list(turn(q, k))


def backward(turn: Callable, q: Tensor, k: Tensor, up: Tensor) -> list[Tensor]:
    """The same with the gradients of both."""
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    out = turn(*leaves)
    slopes = torch.autograd.grad(out, leaves, (up, up))
    return [*(x.detach() for x in out), *slopes]


def contenders(case: Case, device: str) -> dict[str, Callable[[], list[Tensor]]]:
    """What each does in one round."""
    torch.manual_seed(SEED)
    place = {"device": device, "dtype": getattr(torch, case.dtype)}
    shape = (case.b, case.h, case.t, case.d)
    q, k, up = (torch.randn(shape).to(**place) for _ in range(3))
    at = torch.arange(case.t, device=device)
    rope, llama = RoPE(case.d), llama_tables(case, device)
    mine, theirs = rope.at(at), llama(q, at[None])

    def ours_with_tables(q, k):
        turn = rope.at(at)
        return turn(q), turn(k)

    turns = {
        OURS: lambda q, k: (mine(q), mine(k)),
        LLAMA: lambda q, k: apply_rotary_pos_emb(q, k, *theirs),
    }
    if case.work == "with tables":
        turns[OURS] = ours_with_tables
        turns[LLAMA] = lambda q, k: apply_rotary_pos_emb(q, k, *llama(q, at[None]))
    if case.work == "with backward":
        return {name: partial(backward, f, q, k, up) for name, f in turns.items()}
    return {name: partial(forward, f, q, k) for name, f in turns.items()}


# --- measuring -----------------------------------------------------------------------


def measure(case: Case, device: str, rounds: int) -> dict:
    """Seconds of both in one case, once they gave the same."""
    runs = contenders(case, device)
    outputs = {name: run() for name, run in runs.items()}
    apart = side_by_side.assert_equal(outputs, TOLERANCE[case.dtype])
    del outputs
    clock = "GPU time" if device == "cuda" else "CPU time"
    seconds = side_by_side.interleave(runs, rounds, clock)
    rounded = {name: [round(s, 7) for s in list_] for name, list_ in seconds.items()}
    row = case._asdict() | {"clock": clock, "apart": apart, "seconds": rounded}
    print(*case, f"{gate(row):.3f}", flush=True)
    return row


def measure_all(device: str, rounds: int, size: str) -> dict:
    """Everything that the table shows."""
    torch.set_num_threads(1)
    found = side_by_side.facts(device, rounds, SEED)
    return found | {"rows": [measure(case, device, rounds) for case in cases(size)]}


# --- the table -----------------------------------------------------------------------


def gate(row: dict) -> float:
    """Our time over Llama's, the median of the rounds."""
    return Ratio(row["seconds"][OURS], row["seconds"][LLAMA])[0]


def line(row: dict) -> list[str]:
    """One row as cells."""
    seconds = row["seconds"]
    shape = f"B{row['b']} H{row['h']} T{row['t']} D{row['d']}"
    own = 1e3 * statistics.median(seconds[OURS])
    own = f"{own:.0f}" if own >= 100 else f"{own:.3g}"
    ratio = str(Ratio(seconds[OURS], seconds[LLAMA]))
    return [shape, row["dtype"], row["work"], own, ratio]


def page(found: dict, device: str) -> str:
    """The section of the book that shows what was found."""
    where = {"cpu": "the CPU, one thread", "cuda": "a GPU"}[device]
    rows = found["rows"]
    apart = " and ".join(
        f"{max(r['apart'] for r in rows if r['dtype'] == dtype):.0e} ({dtype})"
        for dtype in TOLERANCE
    )
    said = (
        "`RoPE` turning queries and keys, beside `apply_rotary_pos_emb` of "
        f"`transformers`' Llama, by {rows[0]['clock']}; our time over theirs in each "
        "round: median, and in brackets the quartiles. *With tables* makes cos and sin "
        "as well, which a model does once for all its layers: ours from angles in "
        "float64, theirs in float32. Both gave the same to within "
        f"{apart} of the largest number; the rest is their angles. At most "
        f"{max(map(gate, rows)):.2f} times their time; the aim is {AIM}."
    )
    head = ["input", "dtype", "work", "ours, ms", "÷ Llama"]
    table = side_by_side.table(head, [line(row) for row in rows])
    title = f"## Rotating queries and keys on {where}"
    return "\n\n".join([title, side_by_side.describe(found), said, table]) + "\n"


def summary(found: dict) -> str:
    """The worst ratio."""
    return f"at most {max(map(gate, found['rows'])):.2f} times Llama's rotation"


def main(arguments: list[str]) -> int:
    """Measure, write, say the worst ratio."""
    parts = {"measure_all": measure_all, "page": page, "summary": summary}
    return side_by_side.command(__file__, arguments, **parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
