"""A sliding window against full attention, against its mask, and FlexAttention.

Usage: python benchmarks/window.py [--device cpu|cuda] [--rounds N] [--tiny]
                                   [--out FOLDER] [--table]

Writes window.<device>.json and, from it, window.<device>.md. `--tiny` runs sizes that
take a second and leaves FlexAttention out, which has to be compiled; `--table` only
writes the table again.
"""

import math
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
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from transformer.window import window_attention, window_mask

SEED = 0
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}  # as a share of the largest number
OURS, DENSE, MASKED, FLEX = "ours", "full, causal", "the window as mask", "flex"
H, D = 4, 64


class Case(NamedTuple):
    """One row of the table."""

    t: int
    w: int
    dtype: str
    backward: bool = False


LENGTHS = {"full": [2048, 4096, 8192, 16384], "tiny": [32, 64, 128]}
WINDOW = {"full": 256, "tiny": 8}
BACKWARD = {"full": [4096, 8192], "tiny": [32]}
LONGEST_MASK = 8192  # of 16384 keys a mask alone is 256 MiB
MEMORY = {"full": [1 << i for i in range(10, 16)], "tiny": [256, 512]}
AIMS = {  # (dtype, length, peer): how many times faster we want to be
    ("float32", 16384, DENSE): 12,
    ("bfloat16", 16384, DENSE): 15,
    ("float32", 8192, MASKED): 15,
    ("float32", 16384, FLEX): 0.95,
    ("bfloat16", 16384, FLEX): 1.5,
}


def cases(size: str) -> list[Case]:
    """The rows."""
    w = WINDOW[size]
    rows = [Case(t, w, dtype) for dtype in TOLERANCE for t in LENGTHS[size]]
    return rows + [Case(t, w, d, True) for d in TOLERANCE for t in BACKWARD[size]]


# --- contenders ----------------------------------------------------------------------


def flexed(case: Case, device: str, compiled: bool) -> Callable[..., Tensor]:
    """FlexAttention with the same window; it makes its list of blocks only once."""
    inside = lambda b, h, i, j: (j <= i) & (i - j < case.w)  # noqa: E731
    blocks = create_block_mask(inside, None, None, case.t, case.t, device=device)
    torch.compiler.reset()  # else it falls to a slow path after some shapes
    run = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    return lambda q, k, v: run(q, k, v, block_mask=blocks)


def attends(case: Case, device: str, flex: bool) -> dict[str, Callable[..., Tensor]]:
    """Each as a function of q, k, v."""
    sdpa = F.scaled_dot_product_attention
    found = {OURS: window_attention(case.w), DENSE: partial(sdpa, is_causal=True)}
    if case.t <= LONGEST_MASK:
        mask = window_mask(case.t, case.t, case.w, torch.device(device))
        found[MASKED] = partial(sdpa, attn_mask=mask)
    if flex and not (case.backward and device == "cpu"):  # forward only there
        found[FLEX] = flexed(case, device, compiled=True)
    return found


def forward(attend: Callable, inputs: list[Tensor]) -> list[Tensor]:
    """Inference."""
    with torch.no_grad():
        return [attend(*inputs)]


def forward_backward(attend: Callable, inputs: list[Tensor], up: Tensor):
    """Training: the output and the gradients."""
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, up)]


def contenders(case: Case, device: str, flex: bool) -> dict[str, Callable]:
    """What each does in one round."""
    torch.manual_seed(SEED)
    place = {"device": device, "dtype": getattr(torch, case.dtype)}
    *inputs, up = (torch.randn(1, H, case.t, D).to(**place) for _ in range(4))
    functions = attends(case, device, flex).items()
    if case.backward:
        leaves = [x.requires_grad_() for x in inputs]
        return {name: partial(forward_backward, f, leaves, up) for name, f in functions}
    return {name: partial(forward, f, inputs) for name, f in functions}


# --- measuring -----------------------------------------------------------------------


def measure(case: Case, device: str, rounds: int, flex: bool) -> dict:
    """Seconds of all contenders, once those with the window gave the same."""
    runs = contenders(case, device, flex)
    outputs = {name: run() for name, run in runs.items() if name != DENSE}
    apart = side_by_side.assert_equal(outputs, TOLERANCE[case.dtype])
    del outputs
    clock = "GPU time" if device == "cuda" else "CPU time"
    seconds = side_by_side.interleave(runs, rounds, clock)
    rounded = {name: [round(s, 7) for s in list_] for name, list_ in seconds.items()}
    row = case._asdict() | {"clock": clock, "apart": apart, "seconds": rounded}
    print(
        *case, *(f"{name} {faster(row, name):.2f}" for name in peers(row)), flush=True
    )
    return row


def measure_memory(t: int, w: int, device: str) -> dict:
    """Peak bytes of a pass forward and of one with backward."""
    torch.manual_seed(SEED)
    inputs = [torch.randn(1, H, t, D, device=device) for _ in range(3)]
    attend, up = window_attention(w), torch.ones_like(inputs[0])
    ahead = side_by_side.peak_bytes(partial(forward, attend, inputs), device)
    leaves = [x.requires_grad_() for x in inputs]
    both = partial(forward_backward, attend, leaves, up)
    return {
        "t": t,
        "forward": ahead,
        "with backward": side_by_side.peak_bytes(both, device),
    }


def measure_all(device: str, rounds: int, size: str) -> dict:
    """Everything that the table shows."""
    torch.set_num_threads(1)
    found, flex = side_by_side.facts(device, rounds, SEED), size == "full"
    rows = [measure(case, device, rounds, flex) for case in cases(size)]
    memory = [measure_memory(t, WINDOW[size], device) for t in MEMORY[size]]
    return found | {"rows": rows, "memory": memory}


# --- the table -----------------------------------------------------------------------


def peers(row: dict) -> list[str]:
    """Who was measured beside us."""
    return [name for name in (DENSE, MASKED, FLEX) if name in row["seconds"]]


def faster(row: dict, name: str) -> float:
    """The peer's time over ours, the median of the rounds."""
    return Ratio(row["seconds"][name], row["seconds"][OURS])[0]


def slope(rows: list[dict], name: str) -> float:
    """How the logarithm of the time grows with that of the length: least squares."""
    rows = [row for row in rows if name in row["seconds"]]
    x = [math.log(row["t"]) for row in rows]
    y = [math.log(statistics.median(row["seconds"][name])) for row in rows]
    return statistics.linear_regression(x, y).slope


def linear_excess(memory: list[dict], work: str) -> float:
    """The largest share by which memory exceeds the first row's, scaled by length."""
    first = memory[0]
    return max(row[work] / first[work] / (row["t"] / first["t"]) for row in memory)


def line(row: dict) -> list[str]:
    """One row as cells."""
    work = "forward + backward" if row["backward"] else "forward"
    own = 1e3 * statistics.median(row["seconds"][OURS])
    own = f"{own:.0f}" if own >= 100 else f"{own:.3g}"
    seconds = row["seconds"]
    there = {name: str(Ratio(seconds[name], seconds[OURS])) for name in peers(row)}
    cells = [there.get(name, "–") for name in (DENSE, MASKED, FLEX)]
    return [f"{row['t']}", row["dtype"], work, own, *cells]


def aims(found: dict) -> list[list[str]]:
    """What was aimed at and what came out."""
    lines = []
    for (dtype, t, name), aim in AIMS.items():
        for row in found["rows"]:
            if (row["dtype"], row["t"], row["backward"]) == (dtype, t, False):
                there = f"{faster(row, name):.2f}" if name in row["seconds"] else "–"
                lines.append([f"{t}", dtype, name, f"{aim}", there])
    return lines


def slopes(found: dict) -> str:
    """How times grow with length, in words."""
    rows = [r for r in found["rows"] if not r["backward"] and r["dtype"] == "float32"]
    names = [name for name in (OURS, DENSE, MASKED, FLEX) if name in rows[0]["seconds"]]
    grown = ", ".join(f"{slope(rows, name):.2f} ({name})" for name in names)
    return f"Forward in float32, time grows with the length to the power {grown}."


def page(found: dict, device: str) -> str:
    """The section of the book that shows what was found."""
    where = {"cpu": "the CPU, one thread", "cuda": "a GPU"}[device]
    rows, memory = found["rows"], found["memory"]
    apart = " and ".join(
        f"{max(r['apart'] for r in rows if r['dtype'] == dtype):.0e} ({dtype})"
        for dtype in TOLERANCE
    )
    said = (
        f"`window_attention({rows[0]['w']})` on one sequence of {H} heads, {D} "
        f"features each, by {rows[0]['clock']}. Beside it: torch's kernel on the whole "
        "past, the same kernel given the window as a mask, and compiled "
        "`flex_attention` with the window. Unlike elsewhere on this page the peer's "
        "time is divided by ours, so above 1 we are faster: median over the rounds, "
        "and in brackets the quartiles. All that compute a window gave the same to "
        f"within {apart} of the largest number."
    )
    head = ["length", "dtype", "work", "ours, ms", DENSE, MASKED, FLEX]
    times = side_by_side.table(head, [line(row) for row in rows])
    parts = [f"## Sliding window on {where}", side_by_side.describe(found), said, times]
    if lines := aims(found):
        parts.append("How many times faster than each peer, and the aim:")
        parts.append(
            side_by_side.table(["length", "dtype", "peer", "aim", "found"], lines)
        )
    parts.append(slopes(found))
    works = ("forward", "with backward")
    cells = [[f"{m['t']}", *(f"{m[w] / 2**20:.1f}" for w in works)] for m in memory]
    parts.append("### Peak memory of a window, MiB")
    parts.append(side_by_side.table(["length", *works], cells))
    worst = max(linear_excess(memory, work) for work in works)
    parts.append(
        "Float32; inputs not counted, outputs and scratch space counted. Against the "
        f"first row times the length: at most {worst:.2f}; the aim is 1.1."
    )
    return "\n\n".join(parts) + "\n"


def summary(found: dict) -> str:
    """The longest row."""
    row = max(found["rows"], key=lambda row: (not row["backward"], row["t"]))
    return f"{faster(row, DENSE):.1f} times as fast as full attention at {row['t']}"


def main(arguments: list[str]) -> int:
    """Measure, write, say how much faster the longest row is."""
    parts = {"measure_all": measure_all, "page": page, "summary": summary}
    return side_by_side.command(__file__, arguments, **parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
