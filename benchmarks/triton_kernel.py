"""The Triton kernel against torch's kernels on a GPU, in TFLOP/s.

Usage: python benchmarks/triton_kernel.py [--device cpu|cuda] [--rounds N] [--tiny]
                                          [--out FOLDER] [--table]

Writes triton_kernel.cuda.json and, from it, triton_kernel.cuda.md. Where there is no
GPU there is nothing to measure: one line says so.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import side_by_side
import torch
from side_by_side import Ratio
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from transformer.flash_triton import triton_attention

SEED, TOLERANCE = 0, 3e-2
TOKENS, FEATURES = 16_384, 2048  # of a batch; all heads together
LENGTHS = {"full": [512 * 2**i for i in range(6)], "tiny": [512]}
AIMS = {"forward": 1.0, "backward": 0.9}  # speed over that of the flash backend
WINDOW, WINDOWED = 1024, 16_384
OURS, FLASH, CUDNN, FLEX = "ours", "flash", "cuDNN", "flex, compiled"
BACKENDS = {FLASH: SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}
COMPILED = torch.compile(flex_attention, dynamic=False)


class Case(NamedTuple):
    """One row of the table."""

    t: int
    d: int
    causal: bool
    window: int | None
    backward: bool


def cases(size: str) -> list[Case]:
    """The rows: causal and not, and last those with a window."""
    passes, widths = (False, True), (64, 128)
    rows = [
        Case(t, d, causal, None, backward)
        for d in widths
        for causal in (False, True)
        for backward in passes
        for t in LENGTHS[size]
    ]
    return rows + [Case(WINDOWED, d, True, WINDOW, b) for d in widths for b in passes]


def tera_flop(case: Case) -> float:
    """10¹² operations as papers count them: halved if causal, backward × 2.5."""
    pairs = case.t**2 / (2 if case.causal else 1)
    if case.window is not None:
        pairs = case.t * case.window - case.window * (case.window - 1) / 2
    batch = max(1, TOKENS // case.t)
    return 4 * batch * FEATURES * pairs * (2.5 if case.backward else 1) / 1e12


# --- contenders ------------------------------------------------------------------


def torchs(backend: SDPBackend, causal: bool, q: Tensor, k: Tensor, v: Tensor):
    """One of torch's own kernels, and no other."""
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def block_mask(case: Case):
    """What flex_attention may skip."""

    def seen(b, h, query, key):
        near = query >= key
        return near & (query - key < case.window) if case.window else near

    if not case.causal:
        return None
    return create_block_mask(seen, None, None, case.t, case.t, device="cuda")


def attends(case: Case) -> dict[str, Callable]:
    """How each attends; torch's own kernels know no window."""
    ours = partial(triton_attention, causal=case.causal, window=case.window)
    found = {OURS: ours}
    if case.window is None:
        found |= {name: partial(torchs, b, case.causal) for name, b in BACKENDS.items()}
    if case.t < WINDOWED:  # compiling for each length would take minutes
        return found
    torch.compiler.reset()  # a ninth shape would fall to a path without a kernel
    return found | {FLEX: partial(COMPILED, block_mask=block_mask(case))}


def runs(case: Case, attend: Callable, inputs: list, upstream: Tensor):
    """What is timed: the forward pass, or the backward pass alone."""
    if not case.backward:

        def forward() -> list[Tensor]:
            with torch.no_grad():
                return [attend(*inputs)]

        return forward
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, upstream, retain_graph=True)


def contenders(case: Case) -> tuple[dict[str, Callable], dict[str, str]]:
    """What each does in one round, and why some cannot take part."""
    torch.manual_seed(SEED)
    shape = max(1, TOKENS // case.t), FEATURES // case.d, case.t, case.d
    q, k, v, up = (torch.randn(shape).to("cuda", torch.bfloat16) for _ in range(4))
    found, absent = {}, {}
    for name, attend in attends(case).items():
        try:
            found[name] = runs(case, attend, [q, k, v], up)
            found[name]()
        except RuntimeError as error:
            if name == OURS:
                raise
            found.pop(name, None)
            absent[name] = str(error).splitlines()[0]
    return found, absent


# --- measuring -----------------------------------------------------------------------


def measure(case: Case, rounds: int) -> dict:
    """Seconds of all that can, once they gave the same."""
    found, absent = contenders(case)
    outputs = {name: list(run()) for name, run in found.items()}
    apart = side_by_side.assert_equal(outputs, TOLERANCE)
    del outputs
    seconds = side_by_side.interleave(found, rounds, "GPU time")
    rounded = {name: [round(s, 8) for s in list_] for name, list_ in seconds.items()}
    row = case._asdict() | {"apart": apart, "seconds": rounded, "absent": absent}
    print(*case, *cells(row), flush=True)
    return row


def measure_all(device: str, rounds: int, size: str) -> dict:
    """Everything that the table shows."""
    import triton

    found = side_by_side.facts(device, rounds, SEED) | {"triton": triton.__version__}
    return found | {"rows": [measure(case, rounds) for case in cases(size)]}


# --- the table ---------------------------------------------------------------------


def case_of(row: dict) -> Case:
    """The case that a row is about."""
    return Case(*(row[field] for field in Case._fields))


def cells(row: dict) -> list[str]:
    """TFLOP/s of each contender, then our speed over those that are aimed at."""
    work, shown = tera_flop(case_of(row)), []
    for name in (OURS, FLASH, CUDNN, FLEX):
        seconds = row["seconds"].get(name)
        speed = sorted(seconds)[len(seconds) // 2] if seconds else None
        shown.append(f"{work / speed:.0f}" if speed else "–")
    return [*shown, *(str(r) if r else "–" for r in map(ahead(row), (FLASH, FLEX)))]


def ahead(row: dict) -> Callable[[str], Ratio | None]:
    """Our speed over that of another, round by round."""

    def ratio(name: str) -> Ratio | None:
        theirs = row["seconds"].get(name)
        return Ratio(theirs, row["seconds"][OURS]) if theirs else None

    return ratio


def slowest(rows: list[dict], name: str) -> str:
    """Our lowest speed over that of another."""
    found = [ahead(row)(name) for row in rows]
    found = [ratio[0] for ratio in found if ratio]
    return f"{min(found):.2f}" if found else "not measured"


def page(found: dict, device: str) -> str:
    """The section of the book that shows what was found."""
    rows, parts = found["rows"], ["## The Triton kernel on a GPU"]
    parts += [side_by_side.describe(found) + f" Triton {found['triton']}."]
    worst = max(row["apart"] for row in rows)
    parts += [
        f"bfloat16, {TOKENS} tokens and {FEATURES} features in all, TFLOP/s as papers "
        "count them: 4·T²·features, halved with a causal mask, 2.5 times as much "
        "backward. `flash` and `cuDNN` are backends of `scaled_dot_product_attention`. "
        "Behind them our speed over theirs in each round, median and quartiles. "
        f"Before anything was timed, all agreed to within {worst:.0e} of the largest "
        "number."
    ]
    head = ["T", "D", "mask", OURS, FLASH, CUDNN, FLEX, "÷ flash", "÷ flex"]
    for backward in (False, True):
        mine, name = [], "backward" if backward else "forward"
        for row in (row for row in rows if row["backward"] == backward):
            case = case_of(row)
            mask = f"window {case.window}" if case.window else "–"
            mask = "causal" if case.causal and not case.window else mask
            mine.append([f"{case.t}", f"{case.d}", mask, *cells(row)])
        full = [r for r in rows if r["backward"] == backward and not r["window"]]
        said = f"At least {slowest(full, FLASH)} times the speed of `flash`; the aim "
        said += f"is {AIMS[name]}."
        parts += [f"### {name}", side_by_side.table(head, mine), said]
    return "\n\n".join(parts) + "\n"


def summary(found: dict) -> str:
    """Our lowest speeds over what is aimed at."""
    full = [row for row in found["rows"] if not row["window"]]
    forward = slowest([row for row in full if not row["backward"]], FLASH)
    backward = slowest([row for row in full if row["backward"]], FLASH)
    windowed = slowest([row for row in found["rows"] if row["window"]], FLEX)
    said = f"speed at least {forward} times flash forward, {backward} backward"
    return f"{said}; with a window {windowed} times flex_attention"


def main(arguments: list[str]) -> int:
    """Measure where there is a GPU; elsewhere say that there is none."""
    there = torch.cuda.is_available()
    if "--table" not in arguments and (not there or "cpu" in arguments):
        print("triton_kernel: nothing measured, a Triton kernel needs a GPU")
        return 0
    if "--rounds" not in arguments:
        arguments = [*arguments, "--rounds", "5"]  # of 20 calls each
    parts = {"measure_all": measure_all, "page": page, "summary": summary}
    return side_by_side.command(__file__, arguments, **parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
