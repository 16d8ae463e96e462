"""Contenders side by side: one process, equal outputs first, then round by round."""

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close

Run = Callable[[], object]


# --- time ----------------------------------------------------------------------------


def cpu_seconds(run: Run) -> float:
    """CPU time of this process: other processes hardly change it."""
    start = time.process_time_ns()
    run()
    return (time.process_time_ns() - start) / 1e9


def wall_seconds(run: Run) -> float:
    """Time by the clock: right only where nothing else runs."""
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) / 1e9


def cuda_seconds(run: Run, repeats: int = 20) -> float:
    """Time on the GPU of one of several runs in a row, by its own events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


CLOCKS = {"CPU time": cpu_seconds, "wall time": wall_seconds, "GPU time": cuda_seconds}


def interleave(
    contenders: dict[str, Run],
    rounds: int,
    clock: str,
    warm_up: int = 1,
    pause: float = 0.0,
) -> dict[str, list[float]]:
    """Seconds of each contender in each round; who starts changes with the round.

    Before each, `pause` seconds pass in which nothing runs.
    """
    names, seconds = list(contenders), {name: [] for name in contenders}
    for name in names * warm_up:
        CLOCKS[clock](contenders[name])
    gc.collect()
    gc.disable()
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            time.sleep(pause)
            seconds[name].append(CLOCKS[clock](contenders[name]))
    gc.enable()
    return seconds


class Ratio(tuple):
    """Median and quartiles of what pairs of times say, round by round."""

    def __new__(cls, ours: list[float], theirs: list[float]):
        found = [a / b for a, b in zip(ours, theirs, strict=True)]
        ends = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
        return super().__new__(cls, (statistics.median(found), ends[0], ends[2]))

    def __str__(self):
        return "{:.2f} ({:.2f}–{:.2f})".format(*self)


def best(seconds: dict[str, list[float]]) -> str:
    """The contender with the lowest median."""
    return min(seconds, key=lambda name: statistics.median(seconds[name]))


def assert_equal(found: dict[str, list[Tensor]], tolerance: float) -> float:
    """Refuse contenders that do not compute the same; return how far they are apart.

    The largest difference of a tensor from the first contender's, as a share of the
    largest number in it, may be the tolerance.
    """
    (_, first), *others = found.items()
    worst = 0.0
    for name, tensors in others:
        for i, (mine, theirs) in enumerate(zip(first, tensors, strict=True)):
            mine, theirs = mine.double(), theirs.double()
            size = mine.abs().max().item()
            text = f"{name} computes something else (tensor {i}):"
            told = {"msg": lambda why, text=text: f"{text} {why}"}
            assert_close(theirs, mine, rtol=0, atol=tolerance * size, **told)
            worst = max(worst, (theirs - mine).abs().max().item() / size)
    return worst


# --- memory --------------------------------------------------------------------------


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what the profiler writes to the standard error, below Python."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def peak_bytes(run: Run, device: str = "cpu") -> int:
    """Most bytes that run holds at a time, scratch space of kernels included.

    On the CPU from the allocator's own record, so that it is the same each time.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = run()
        del kept
        return torch.cuda.max_memory_allocated() - before
    activities = [ProfilerActivity.CPU]
    with quiet(), profile(activities=activities, profile_memory=True) as watched:
        kept = run()
        del kept
    events = watched.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    now = most = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        now += change.nbytes()
        most = max(most, now)
    return most


# --- where and when ------------------------------------------------------------------


def load() -> float:
    """Processes that want to run, averaged over the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def cores() -> int:
    """Cores that this process may use."""
    has = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has else os.cpu_count() or 1


def device_name(device: str) -> str:
    """What the maker calls it."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1] for line in lines if line.startswith("model name")]
    return " ".join(names[0].split()) if names else platform.machine()


def facts(device: str, rounds: int, seed: int) -> dict:
    """What a reader needs to know about the place and the way of measuring."""
    return {
        "device": device_name(device),
        "cores": cores(),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rounds": rounds,
        "seed": seed,
        "load": round(load(), 2),
    }


def is_busy(found: dict) -> bool:
    """Whether more wanted to run than the machine has cores."""
    return found["load"] > found["cores"]


def describe(found: dict) -> str:
    """The facts in one sentence, with a warning where the machine was busy."""
    text = (
        f"{found['device']}, {found['cores']} cores; {found['date']}; Python "
        f"{found['python']}, torch {found['torch']}; {found['rounds']} rounds, seed "
        f"{found['seed']}; load at the start {found['load']}."
    )
    if is_busy(found):
        text += "\n\n:::{warning}\nMore than one process for each core wanted to run: "
        text += "these figures are not to be trusted.\n:::"
    return text


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown: words to the left, numbers to the right."""
    rule = ["---:" if cell[:1].isdigit() else ":---" for cell in rows[0]]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *rows])


# --- the command ---------------------------------------------------------------------


def command(
    script: str,
    arguments: list[str],
    *,
    measure_all: Callable[[str, int, str], dict],
    page: Callable[[dict, str], str],
    summary: Callable[[dict], str],
    rounds: int = 15,
) -> int:
    """Run a benchmark from the command line; return its exit status.

    Args:
        script: Path of the benchmark; its results are named after it.
        arguments: What follows the script on the command line.
        measure_all: From device, rounds and size ("full" or "tiny") to what was found.
        page: From that and the device to the section of the book, in Markdown.
        summary: From that to the line that is printed at the end.
        rounds: How many there are if the command line does not say.
    """
    there = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog=Path(script).name)
    parser.add_argument("--device", choices=["cpu", "cuda"], default=there)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--tiny", action="store_true", help="sizes that take a second")
    parser.add_argument("--table", action="store_true", help="write only the table")
    parser.add_argument("--out", type=Path, default=Path(script).parent / "results")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and there != "cuda":
        print("no CUDA device is available: --device cpu")
        return 1
    path = chosen.out / f"{Path(script).stem}.{chosen.device}.json"
    if not chosen.table:
        size = "tiny" if chosen.tiny else "full"
        found = measure_all(chosen.device, chosen.rounds, size)
        chosen.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8", newline="\n")
    found = json.loads(path.read_text(encoding="utf-8"))
    text = page(found, chosen.device)
    path.with_suffix(".md").write_text(text, encoding="utf-8", newline="\n")
    busy = "; the machine was busy" if is_busy(found) else ""
    print(f"{path.name}: {summary(found)}{busy}")
    return 0
