"""Tiled attention in plain PyTorch, against torch's kernel and the formula.

Usage: python benchmarks/flash.py [--device cpu|cuda] [--rounds N] [--tiny]
                                  [--out FOLDER] [--table]

Writes flash.<device>.json and, from it, flash.<device>.md. `--tiny` runs sizes that
take a second; `--table` only writes the table again.
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
from torch.nn import functional as F

from transformer.attention import attention
from transformer.flash import flash_attention

SEED = 0
SPEED = {"float32": 0.55, "bfloat16": 1.3}  # aims: forward, times SDPA's speed
TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2}  # as a share of the largest number
OURS, SDPA, FORMULA = "ours", "SDPA", "formula"
HEADS, WIDTH = 4, 64


class Case(NamedTuple):
    """One row of the table."""

    t: int
    dtype: str
    backward: bool


LENGTHS = {"full": [512, 1024, 2048, 4096, 8192], "tiny": [32, 48]}
MOST = {"full": 2048, "tiny": 32}  # tokens that the formula is asked to attend to


def cases(size: str) -> list[Case]:
    """The rows."""
    passes, kinds = (False, True), list(TOLERANCE)
    return [Case(t, d, b) for b in passes for d in kinds for t in LENGTHS[size]]


# --- contenders ----------------------------------------------------------------------


def forward(attend: Callable, inputs: list[Tensor]) -> list[Tensor]:
    """Inference."""
    with torch.no_grad():
        return [attend(*inputs)]


def forward_backward(attend: Callable, inputs: list[Tensor], up: Tensor):
    """Training: the output and the gradients of q, k and v."""
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, up)]


ATTENDS = {
    OURS: partial(flash_attention, causal=True),
    SDPA: partial(F.scaled_dot_product_attention, is_causal=True),
    FORMULA: partial(attention, causal=True),
}


def draw(t: int, dtype: str, device: str) -> list[Tensor]:
    """q, k, v and an upstream gradient."""
    torch.manual_seed(SEED)
    place = {"device": device, "dtype": getattr(torch, dtype)}
    return [torch.randn(1, HEADS, t, WIDTH).to(**place) for _ in range(4)]


def contenders(case: Case, device: str, most: int) -> dict[str, Callable]:
    """What each does in one round; the formula only up to `most` tokens."""
    *inputs, up = draw(case.t, case.dtype, device)
    names = [name for name in ATTENDS if name != FORMULA or case.t <= most]
    if not case.backward:
        return {name: partial(forward, ATTENDS[name], inputs) for name in names}
    leaves = [x.requires_grad_() for x in inputs]
    return {n: partial(forward_backward, ATTENDS[n], leaves, up) for n in names}


# --- measuring -----------------------------------------------------------------------


def measure(case: Case, device: str, rounds: int, most: int) -> dict:
    """Seconds of all in one case, once they gave the same."""
    runs = contenders(case, device, most)
    outputs = {name: run() for name, run in runs.items()}
    apart = side_by_side.assert_equal(outputs, TOLERANCE[case.dtype])
    del outputs
    clock = "GPU time" if device == "cuda" else "CPU time"
    seconds = side_by_side.interleave(runs, rounds, clock)
    rounded = {name: [round(s, 7) for s in list_] for name, list_ in seconds.items()}
    row = case._asdict() | {"clock": clock, "apart": apart, "seconds": rounded}
    print(*case, f"{speed(row):.3f}", flush=True)
    return row


def measure_memory(t: int, device: str, most: int) -> dict:
    """Peak bytes in float32, inputs not counted."""
    *inputs, up = draw(t, "float32", device)
    found = {"t": t}
    for name, attend in ATTENDS.items():
        for kind in ("forward", "with backward"):
            column = f"{name}, {kind}"
            found[column] = None
            if name == FORMULA and t > most:
                continue
            run = partial(forward, attend, inputs)
            if kind == "with backward":
                leaves = [x.detach().requires_grad_() for x in inputs]
                run = partial(forward_backward, attend, leaves, up)
            found[column] = side_by_side.peak_bytes(run, device)
    return found


def measure_all(device: str, rounds: int, size: str) -> dict:
    """Everything that the table shows."""
    torch.set_num_threads(1)
    found = side_by_side.facts(device, rounds, SEED)
    rows = [measure(case, device, rounds, MOST[size]) for case in cases(size)]
    memory = [measure_memory(t, device, MOST[size]) for t in LENGTHS[size]]
    return found | {"rows": rows, "memory": memory}


# --- the table -----------------------------------------------------------------------


def speed(row: dict) -> float:
    """How many times as fast as SDPA we are, the median of the rounds."""
    return Ratio(row["seconds"][SDPA], row["seconds"][OURS])[0]


def line(row: dict) -> list[str]:
    """One row as cells."""
    seconds = row["seconds"]
    own = 1e3 * statistics.median(seconds[OURS])
    own = f"{own:.0f}" if own >= 100 else f"{own:.3g}"
    work = "forward + backward" if row["backward"] else "forward"
    peers = [
        str(Ratio(seconds[OURS], seconds[name])) if name in seconds else "–"
        for name in (SDPA, FORMULA)
    ]
    return [str(row["t"]), row["dtype"], work, own, *peers, f"{speed(row):.2f}"]


def reached(rows: list[dict]) -> dict[str, float]:
    """Our lowest speed, as a multiple of SDPA's, in the rows that have an aim."""
    longest = sorted({row["t"] for row in rows})[-2:]  # 4096 and 8192
    aimed = [row for row in rows if row["t"] in longest and not row["backward"]]
    return {d: min(speed(r) for r in aimed if r["dtype"] == d) for d in SPEED}


def memory(rows: list[dict]) -> str:
    """Peak memory by length, in MiB, and how it grows."""
    names = [name for name in rows[0] if name != "t"]
    cells = [
        [str(row["t"])]
        + ["–" if row[n] is None else f"{row[n] / 2**20:.1f}" for n in names]
        for row in rows
    ]
    grown = []
    for name in names:
        known = [row[name] for row in rows if row[name] is not None]
        grown.append(f"{known[-1] / known[-2]:.2f}" if len(known) > 1 else "–")
    cells.append(["last ÷ one before", *grown])
    said = "Four heads of 64 features in float32, causal; inputs not counted, outputs "
    said += "and scratch space counted. The last row is how memory grows where T = S "
    said += "doubles."
    return side_by_side.table(["T = S", *names], cells) + "\n\n" + said


def page(found: dict, device: str) -> str:
    """The section of the book that shows what was found."""
    where = {"cpu": "the CPU, one thread", "cuda": "a GPU"}[device]
    rows = found["rows"]
    apart = " and ".join(
        f"{max(r['apart'] for r in rows if r['dtype'] == dtype):.0e} ({dtype})"
        for dtype in TOLERANCE
    )
    said = (
        "`flash_attention`, a loop of matrix products in Python, beside "
        "`scaled_dot_product_attention` (SDPA), which is the same algorithm compiled, "
        f"and the formula of chapter 1: one sequence, {HEADS} heads of {WIDTH} "
        f"features, causal, by {rows[0]['clock']}. Our time is divided by theirs in "
        "each round: median, and in brackets the quartiles. The last column is the "
        "other way round, our speed as a multiple of SDPA's. All gave the same outputs "
        f"and gradients to within {apart} of the largest number in them."
    )
    if device == "cpu":
        lows = reached(rows)
        aims = " and ".join(
            f"{lows[d]:.2f} times SDPA's speed in {d} (aim {aim})"
            for d, aim in SPEED.items()
        )
        said += f" Forward at the two greatest lengths we reach at least {aims}."
    head = ["T = S", "dtype", "pass", "ours, ms", f"÷ {SDPA}", f"÷ {FORMULA}", "speed"]
    parts = [f"## Tiled attention on {where}", side_by_side.describe(found), said]
    parts += [side_by_side.table(head, [line(row) for row in rows])]
    parts += ["### Peak memory of tiled attention, MiB", memory(found["memory"])]
    return "\n\n".join(parts) + "\n"


def summary(found: dict) -> str:
    """The lowest speeds that have an aim."""
    lows = reached(found["rows"])
    return ", ".join(f"{low:.2f} times SDPA's speed in {d}" for d, low in lows.items())


def main(arguments: list[str]) -> int:
    """Measure, write, say how fast we are."""
    parts = {"measure_all": measure_all, "page": page, "summary": summary}
    return side_by_side.command(__file__, arguments, **parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
