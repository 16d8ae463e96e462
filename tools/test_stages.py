"""Run every check in stages and say where the time went.

All stages run, also after one has failed; the exit status is 1 if any did.

What stages measure is written to build/measured and compared by the last of them.

Usage: python tools/test_stages.py [environment] [unit] [kernels] [notebooks] [book]
       [browser] [measured]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import measured as measures
from environment import check_python

ROOT = Path(__file__).resolve().parent.parent
PYTHON = str(ROOT / ".venv" / "bin" / "python")
WHEEL = ROOT / "build" / "wheel-site"  # the installed wheel, alone
MEASURED = measures.FRESH
FORMATTED = ("tools", "tests", "site", "benchmarks", "chapters")


def run(*command: str, **environment: str) -> bool:
    """Run a command in the repository and say whether it succeeded."""
    print("$", " ".join(command).replace(PYTHON, "python"), flush=True)
    return not subprocess.call(command, cwd=ROOT, env={**os.environ, **environment})


def environment() -> bool:
    """The virtual environment holds what the locks name."""
    return run(sys.executable, "tools/environment.py", "test")


def fresh(stage: str) -> Path:
    """Where a stage writes what it measures, with nothing there of an older run."""
    out = measures.left(stage, MEASURED)
    out.unlink(missing_ok=True)
    return out


def kept(out: Path, good: bool) -> bool:
    """Whether a stage has passed; what another has measured goes."""
    if not good:
        out.unlink(missing_ok=True)
    return good


def unit() -> bool:
    """Lint, and the tests of the package and of the repository."""
    folders = [name for name in FORMATTED if (ROOT / name).is_dir()]
    apart = ("--ignore=tests/browser", "--ignore=tests/kernels")
    pytest = (PYTHON, "-m", "pytest", "tests", *apart)
    out = fresh("unit")
    options = ("-n2", "--dist=worksteal", "--durations=10", f"--measured={out}")
    steps = [
        run(PYTHON, "-m", "ruff", "check", "."),
        run(PYTHON, "-m", "ruff", "format", "--check", *folders),
        run(*pytest, *options),
    ]
    return kept(out, all(steps))


def kernels() -> bool:
    """Triton's kernels, interpreted, and compiled for GPUs that are not here."""
    pytest = (PYTHON, "-m", "pytest", "-n2", "--dist=worksteal", "--durations=5")
    out = fresh("kernels")
    interpreted = (*pytest, "tests/kernels/test_triton.py", f"--measured={out}")
    with tempfile.TemporaryDirectory() as cache:  # compiled anew each time
        steps = [
            run(*interpreted, TRITON_INTERPRET="1"),
            run(*pytest, "tests/kernels/test_ahead.py", TRITON_CACHE_DIR=cache),
        ]
    return kept(out, all(steps))


def build_wheel(folder: Path) -> Path | None:
    """The wheel, built from a clean copy: no file of an older build gets in."""
    clean, wheels = folder / "source", folder / "wheels"
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "transformer", clean / "transformer", ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clean)
    options = ("-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels))
    run(PYTHON, "-m", "pip", "wheel", *options, str(clean))
    return next(wheels.glob("*.whl"), None)


def install_wheel() -> bool:
    """Build the wheel and unpack it where nothing else lies."""
    shutil.rmtree(WHEEL, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(Path(folder))
        target = ("-q", "--no-deps", "--target", str(WHEEL))
        return bool(wheel) and run(PYTHON, "-m", "pip", "install", *target, str(wheel))


def kernel_environment() -> dict[str, str]:
    """What a notebook runs with: the wheel, one thread, and each probe once."""
    variables = {"PYTHONPATH": str(WHEEL), "OMP_NUM_THREADS": "1", "RECORDED": "probe"}
    return {**os.environ, **variables}


def imports_wheel() -> bool:
    """Whether a notebook would get the wheel's package, not the repository's."""
    code = "import transformer; print(transformer.__file__)"
    with tempfile.TemporaryDirectory() as folder:
        where = subprocess.run(
            [PYTHON, "-c", code],
            cwd=folder,
            env=kernel_environment(),
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        ).stdout.strip()
    print("notebooks import", where, flush=True)
    return bool(where) and WHEEL in Path(where).parents


def check_notebook(path: Path) -> bool:
    """One notebook through nbval; its whole report if it fails, one line if not."""
    script = str(ROOT / "tools" / "check_notebook.py")
    out = MEASURED / "notebooks" / f"{path.stem}.json"
    done = subprocess.run(
        [PYTHON, script, str(path), "--measured", str(out)],
        env=kernel_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    lines = done.stdout.strip().splitlines()
    print(done.stdout if done.returncode else lines[-1], flush=True)
    return not done.returncode


def notebooks() -> bool:
    """Every notebook gives its stored outputs, alone with the wheel, two at a time."""
    out, found = MEASURED / "notebooks", fresh("notebooks")
    shutil.rmtree(out, ignore_errors=True)
    if not (install_wheel() and imports_wheel()):
        return False
    paths = sorted((ROOT / "chapters").glob("*.ipynb"), key=lambda p: -p.stat().st_size)
    with ThreadPoolExecutor(2) as two:
        good = all(list(two.map(check_notebook, paths)))
    if good:
        measures.gather_notebooks(out, found)
    return good


def book() -> bool:
    """The site builds without a warning."""
    return run(PYTHON, "site/build.py")


def browser() -> bool:
    """The pages work in a real browser, from localhost alone."""
    two = ("-n2", "--dist=loadgroup", "--durations=10")
    return run(PYTHON, "-m", "pytest", "tests/browser", *two)


def measured() -> bool:
    """What is committed for the status and conformance pages still holds."""
    return not measures.main(["compare"])


# And the seconds that each may take on two slow cores; 40 minutes is all there is.
STAGES: dict[Callable[[], bool], int] = {
    environment: 240,
    unit: 720,
    kernels: 270,
    notebooks: 480,
    book: 90,
    browser: 360,
    measured: 5,
}


def table(rows: list[tuple[str, str, float, int]]) -> str:
    """Where the time went."""
    lines = [f"{'stage':12} {'result':8} {'seconds':>8} {'budget':>7}"]
    for name, result, seconds, budget in rows:
        over = "  over budget" if seconds > budget else ""
        lines.append(f"{name:12} {result:8} {seconds:8.1f} {budget:7}{over}")
    total = sum(seconds for _, _, seconds, _ in rows)
    lines.append(f"{'all':12} {'':8} {total:8.1f} {sum(row[3] for row in rows):7}")
    return "\n".join(lines)


def main(wanted: list[str]) -> int:
    """Run the stages that are named, or all of them."""
    check_python()
    os.environ["OMP_NUM_THREADS"] = "1"  # two processes of one thread beat one of two
    known = {stage.__name__: stage for stage in STAGES}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        print(f"unknown stage {unknown[0]}; the stages are {', '.join(known)}")
        return 1
    rows, usable = [], True
    for name in wanted or known:
        stage, start, result = known[name], time.perf_counter(), "not run"
        if usable:
            print(f"\n=== {name}: {stage.__doc__.splitlines()[0]}", flush=True)
            result = "passed" if stage() else "FAILED"
        usable = usable and (name, result) != ("environment", "FAILED")
        rows.append((name, result, time.perf_counter() - start, STAGES[stage]))
    print("\n" + table(rows), flush=True)
    return int(any(result != "passed" for _, result, _, _ in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
