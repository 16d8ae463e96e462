"""Which faults the tests find: mutmut's mutants of the core, module by module.

site/measured/mutants/MODULE.json holds what came of each mutant, for the conformance
page. It is written after every mutant, so that a run goes on where one was stopped.
When the module changes, all run again; when a file of tests does, those that a test of
it killed, each first against that test, and the survivors, against the tests of that
file. Mutants run in a fixed random order: those that have run are a sample.
tests/survivors.toml says why each survivor stays.

Usage: python tools/mutants.py [--sample=N] [--quick=SECONDS] [MODULE ...]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from measured import facts, write

ROOT = Path(__file__).resolve().parent.parent
FOUND = ROOT / "site" / "measured" / "mutants"
REASONS = ROOT / "tests" / "survivors.toml"
BUILD = ROOT / "build" / "mutants"
CORE = ("attention", "positions", "norms", "feedforward", "blocks", "model", "flash")
CORE += ("grouped", "window", "cache", "sampling", "quantize", "training", "checkpoint")
APART = ("benchmark", "memory", "kills", "minilm", "triton")  # minutes, or no fault's
MORE = {  # tests of a module that another name has; those of properties take long
    "attention": ["multi_head_attention"],
    "model": ["encoder_decoder"],
    "flash": ["row_attention"],
    "checkpoint": ["training_cases"],
}
LEFT_OUT = "not compile and not graph and not recompil"  # tracers see the trampolines


def test_files(module: str) -> list[Path]:
    """The files of tests that concern a module."""
    stems = [module, *MORE.get(module, []), "bad_values"]
    found = {path for stem in stems for path in ROOT.glob(f"tests/test_{stem}*.py")}
    return sorted(p for p in found if not any(word in p.stem for word in APART))


def digest(path: Path) -> str:
    """A digest of the contents of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class Store:
    """What is known of the mutants of a module, on disk."""

    def __init__(self, module: str) -> None:
        self.path = FOUND / f"{module}.json"
        source = ROOT / "transformer" / f"{module}.py"
        self.source, tests = digest(source), test_files(module)
        self.tests = {f"tests/{path.name}": digest(path) for path in tests}
        stored = {}
        if self.path.is_file():
            stored = json.loads(self.path.read_text(encoding="utf-8"))
        same_source = stored.get("source") == self.source
        before = stored.get("tests", {})
        same = {name for name in self.tests if before.get(name) == self.tests[name]}
        killed = unpacked(stored.get("killed", {}))
        self.before = unpacked(stored.get("earlier", {})) | killed
        self.killed = {
            mutant: test
            for mutant, test in killed.items()
            if same_source and test.partition("::")[0] in same
        }
        passed = stored.get("passed", {})
        passed |= {mutant: [*before] for mutant in stored.get("survived", {})}
        self.passed: dict[str, list[str]] = {
            mutant: sorted(same.intersection(files))
            for mutant, files in passed.items()
            if same_source
        }
        keep = stored if same_source and self.tests == before else {}
        self.timeout: list[str] = keep.get("timeout", [])
        self.early: list[str] = keep.get("early", [])
        self.later: list[str] = keep.get("later", [])
        self.survived: dict[str, dict] = keep.get("survived", {})
        self.mutants: int | None = stored.get("mutants")

    def done(self) -> set[str]:
        """The mutants whose end is known."""
        return {*self.killed, *self.timeout, *self.survived, *self.early}

    def add(self, mutant: str, outcome: str, test: str, change: dict) -> None:
        """Note what came of a mutant."""
        for waiting in (self.early, self.later):
            if mutant in waiting:
                waiting.remove(mutant)
        if outcome == "killed":
            self.killed[mutant] = test
        elif outcome == "survived":
            self.survived[mutant] = change
        else:
            getattr(self, outcome).append(mutant)
        self.save()

    def save(self) -> None:
        """Write it down, in one step."""
        found = {
            "facts": facts() | {"mutmut": importlib.metadata.version("mutmut")},
            "source": self.source,
            "tests": self.tests,
            "mutants": self.mutants,
            "killed": packed(self.killed),
            "timeout": sorted(self.timeout),
            "survived": self.survived,
        }
        done = self.done()
        earlier = {name: test for name, test in self.before.items() if name not in done}
        passed = {name: on for name, on in self.passed.items() if name not in done}
        also = {"early": self.early, "later": sorted(self.later)}
        also |= {"earlier": packed(earlier), "passed": passed}
        new = self.path.with_suffix(".new")
        write(new, found | {name: value for name, value in also.items() if value})
        os.replace(new, self.path)

    def words(self) -> str:
        """How it stands, in a line."""
        n_killed = len(self.killed)
        n_survived = len(self.survived) + len(self.early) + len(self.later)
        share = 100 * n_killed / max(1, n_killed + n_survived)
        counts = (
            f"{n_killed} killed, {len(self.timeout)} timeouts, {n_survived} survived"
        )
        n = len(self.done()) + len(self.later)
        return f"{n} of {self.mutants} mutants: {counts}, {share:.1f} %"


def packed(killed: dict[str, str]) -> dict[str, str]:
    """Mutants by the test that killed them: `RoPE.at 3 5; yarn 1`."""
    tests: dict[str, dict[str, list[int]]] = {}
    for mutant, test in killed.items():
        function, number = mutant.split()
        tests.setdefault(test, {}).setdefault(function, []).append(int(number))
    return {
        test: "; ".join(
            " ".join([function, *map(str, sorted(numbers))])
            for function, numbers in sorted(functions.items())
        )
        for test, functions in tests.items()
    }


def unpacked(killed: dict[str, str]) -> dict[str, str]:
    """The test that killed each mutant."""
    found = {}
    for test, functions in killed.items():
        for text in functions.split("; "):
            function, *numbers = text.split()
            found |= {f"{function} {number}": test for number in numbers}
    return found


# --- running -----------------------------------------------------------------------


def package(module: str, code: str) -> Path:
    """A folder with the package, its files as links, one module as code."""
    folder = BUILD / module
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "transformer").mkdir(parents=True)
    for path in (ROOT / "transformer").iterdir():
        if path.name not in (f"{module}.py", "__pycache__"):
            (folder / "transformer" / path.name).symlink_to(path)
    target = folder / "transformer" / f"{module}.py"
    target.write_text(code, encoding="utf-8")
    return folder


def run_module(module: str, sample: int | None, quick: float) -> None:
    """Run the mutants of a module of which nothing is known, at most a sample."""
    import mutant_runs
    import mutate
    import torch  # noqa: F401  children have it from here

    store, started = Store(module), time.monotonic()
    made = mutate.kept(ROOT, f"transformer/{module}.py", BUILD / f"{store.source}.json")
    plain = {name: mutate.plain_name(name) for name in made.names}
    store.mutants = len(plain)
    chosen = random.Random(module).sample(made.names, len(made.names))[:sample]
    known = store.done() if math.isinf(quick) else {*store.done(), *store.later}
    left = [name for name in chosen if plain[name] not in known]
    print(f"{module}: {store.words()}", flush=True)
    options = [*(str(path.relative_to(ROOT)) for path in test_files(module))]
    folder = package(module, made.code)
    options += ["-k", LEFT_OUT, f"--basetemp={folder}/tmp"]

    def tell(name: str, outcome: str, test: str) -> None:
        change = made.change(name)
        store.add(plain[name], outcome, test, change)
        if outcome == mutant_runs.LATER:
            print(f"    later: {plain[name]}: {change}", flush=True)
            return
        minutes = (time.monotonic() - started) / 60
        if len(store.done()) % 20 == 0 or outcome != "killed":
            last = "" if outcome == "killed" else f" ({plain[name]}: {outcome})"
            print(f"  {minutes:5.1f} min  {store.words()}{last}", flush=True)

    mutant_runs.import_from(folder, module)
    state = hashlib.sha256(repr((store.source, store.tests)).encode()).hexdigest()
    cache = BUILD / f"{module}-{state[:16]}.json"
    if left:
        known = {name: store.before.get(plain[name], "") for name in left}
        passed = {name: store.passed.get(plain[name], []) for name in left}
        session = mutant_runs.Session(known, passed, tell, cache)
        session.quick = quick
        if complaint := mutant_runs.from_collected(session, options):
            sys.exit(f"{module}: {complaint}")
    store = Store(module)
    for name in [name for name in chosen if plain[name] in store.early]:
        tell(name, *mutant_runs.from_the_beginning(name, options))
    print(f"{module}: {store.words()}", flush=True)


# --- what is known ------------------------------------------------------------------


def reasons() -> dict[str, list[dict]]:
    """Why survivors stay, by module."""
    return tomllib.loads(REASONS.read_text(encoding="utf-8"))


def complaints(found: dict[str, dict], why: dict[str, list[dict]]) -> list[str]:
    """Survivors without a reason, and reasons without a survivor."""
    lines = []
    for module, stored in found.items():
        survived = [
            (mutant.split()[0], change["was"], change["now"])
            for mutant, change in stored["survived"].items()
        ]
        given = [
            (one["function"], one["was"], one["now"]) for one in why.get(module, [])
        ]
        lines += [f"{module}: no reason for {x}" for x in survived if x not in given]
        lines += [f"{module}: no survivor {x}" for x in given if x not in survived]
    return lines


def main(words: list[str]) -> int:
    """Run the modules that are named, or all, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE")
    parser.add_argument("--sample", type=int, help="at most so many mutants a module")
    more = "seconds of tests for each; what they do not kill is left for another run"
    parser.add_argument("--quick", type=float, default=math.inf, help=more)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    os.chdir(ROOT)
    if given.one:
        run_module(given.modules[0], given.sample, given.quick)
        return 0
    how = [f"--quick={given.quick}"]
    how += [f"--sample={given.sample}"] if given.sample else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    failed = [
        module
        for module in given.modules or CORE
        if subprocess.call(
            [sys.executable, __file__, "--one", module, *how], env=environment
        )
    ]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
