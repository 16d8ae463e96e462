"""Run the tests of a module against each of its mutants: a process a mutant.

pytest collects the tests once, with torch and the mutated module imported. A first
child runs them, of each test random cases for a second of the processor, and notes
which functions each reaches, what it imports, and how long it takes; a second runs them
in the order of an attack, as a control, unless the run is to be quick. Then each mutant
has a child of its own, which runs the tests that reach its function until one fails:
those that killed last come first, then one case of each test, the fastest first, then
other cases, so that each test gets the same time, for twenty seconds. A test that takes
ten times its time, and at least five seconds, is a timeout. What collection itself
calls (a function that makes a parameter) is made before a child begins, so a mutant
that survives there is tried once more from the beginning.

Usage: tools/mutants.py runs it, for one module a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import math
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

Tell = Callable[[str, str, str], None]
KILLED, SURVIVED, TIMEOUT = "killed", "survived", "timeout"
EARLY = "early"  # survived, and is in what collection calls: to be tried once more
LATER = "later"  # not killed quickly: to be tried with all tests, another time
SHARE = 1.0  # seconds of the processor for the cases of a test
BUDGET = 20.0  # and for all cases against a mutant, besides one of each test
TIMES, LEAST = 10, 5.0  # processor time that a test may take: times its own, seconds
WALL = 120.0  # seconds beyond what the tests take, for those that wait for nothing
BAD_VALUES = "tests/test_bad_values.py"  # of all modules: a row is of one
MEMORY = 8 << 30  # bytes
PR_SET_PDEATHSIG = 1  # of prctl: the signal that comes when the parent ends


def set_mutant(name: str) -> None:
    """Turn a mutant on, or `stats`, or none."""
    from mutmut.mutation.trampoline import set_mutant_under_test

    set_mutant_under_test(name)


def test_of(nodeid: str) -> str:
    """The test of a case; in the table of bad values, each argument is one."""
    if nodeid.startswith(BAD_VALUES):
        return nodeid.rpartition("-")[0]
    return nodeid.partition("[")[0]


def shuffled(items: list) -> list:
    """The cases of each test in a random order, which is always the same."""
    tests = defaultdict(list)
    for item in items:
        tests[test_of(item.nodeid)].append(item)
    return [
        item
        for name, cases in tests.items()
        for item in random.Random(name).sample(cases, len(cases))
    ]


class Rows:
    """A plugin that leaves out the bad values of other modules."""

    def pytest_collection_modifyitems(self, items) -> None:
        """Keep the rows of the table that name the mutated module."""
        mine = f"[{os.environ['MUTATED_MODULE'].rpartition('.')[2]}."
        items[:] = [x for x in items if BAD_VALUES not in x.nodeid or mine in x.nodeid]


class Outcomes:
    """A plugin that keeps the first failure."""

    def __init__(self) -> None:
        self.failed: str | None = None
        self.words = ""

    def pytest_runtest_logreport(self, report) -> None:
        """Keep what a phase of a test came to."""
        if report.failed and not self.failed:
            self.failed, self.words = report.nodeid, str(report.longrepr)[-2000:]


def quiet(config) -> Outcomes:
    """In a child: no progress on the terminal, and what comes of the tests."""
    if plugin := config.pluginmanager.get_plugin("terminalreporter"):
        config.pluginmanager.unregister(plugin)
    outcomes = Outcomes()
    config.pluginmanager.register(outcomes)
    return outcomes


def run_item(item, after) -> None:
    """One test, with its fixtures; what `after` needs stays."""
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)


def start_child(work: Callable[[], str], answer: str) -> int:
    """Fork, do the work there and write down what it returns; the child's id."""
    if pid := os.fork():
        return pid
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        text = work()
        Path(answer).write_text(text, encoding="utf-8")
    finally:
        os._exit(0)


def in_child(work: Callable[[], str], wall: float | None) -> str | None:
    """What the work returns in a child; "" if it dies of it, None if it is late."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        pid = start_child(work, str(answer))
        watch = os.pidfd_open(pid)
        seconds = itertools.count() if wall is None else range(math.ceil(wall))
        # In steps, so that time in which this process is stopped does not count.
        late = not any(select.select([watch], [], [], 1)[0] for _ in seconds)
        os.close(watch)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # and what it started
        status = os.waitpid(pid, 0)[1]
        late |= os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        if late:
            return None
        return answer.read_text(encoding="utf-8") if answer.exists() else ""


class Session(Rows):
    """A plugin that runs collected tests against mutants."""

    def __init__(
        self,
        known: dict[str, str],
        passed: dict[str, list[str]],
        tell: Tell,
        cache: Path,
    ) -> None:
        """`tell(mutant, outcome, test)` hears of each mutant.

        `known` has all that are to run, and what killed each before, or ""; `passed`
        the files whose tests a mutant is known to survive.
        """
        self.cache, self.known, self.passed, self.tell = cache, known, passed, tell
        self.quick = math.inf  # seconds of tests for a mutant, at most
        self.early: set[str] = set()  # functions that collection called
        self.complaint = ""

    def pytest_runtestloop(self, session) -> bool:
        """Instead of a run of the tests: all runs."""
        from mutmut.state import state

        gc.collect()
        gc.freeze()
        self.items = {item.nodeid: item for item in shuffled(session.items)}
        self.early = {name.rpartition(".")[2] for name in state()._stats}
        state()._stats.clear()
        started = time.monotonic()
        if not self.first_run():
            return True
        seconds, wall = sum(self.seconds.values()), time.monotonic() - started
        took = f"{len(self.seconds)} cases take {seconds:.0f} s ({wall:.0f} s)"
        print(f"  {took}, {len(self.known)} mutants to run", flush=True)
        recent: dict[str, list[str]] = defaultdict(list)
        for mutant, before in self.known.items():
            function = mutant.partition("__mutmut_")[0]
            first = [before, *reversed(recent[function])]
            tests = self.order(self.reached.get(function, []), first)
            passed = {*self.passed.get(mutant, [])}
            tests = [test for test in tests if test.partition("::")[0] not in passed]
            sums = itertools.accumulate(self.seconds[test] for test in tests)
            within = zip(tests, sums, strict=True)
            first = [t for t, s in within if s <= self.quick] or tests[:1]
            outcome, test = self.try_mutant(mutant, first)
            if len(first) < len(tests) and outcome in (SURVIVED, EARLY):
                outcome = LATER
            if test and test not in recent[function]:
                recent[function] = [*recent[function], test][-6:]
            self.tell(mutant, outcome, test)
        return True

    # --- the tests without a mutant --------------------------------------------------

    def first_run(self) -> bool:
        """Run all tests without a mutant; note what they reach, and their seconds."""
        if not self.cache.is_file():
            found = in_child(self.reach, None) or "{}"
            self.cache.write_text(found, encoding="utf-8")
        answer = json.loads(self.cache.read_text(encoding="utf-8"))
        self.seconds, self.reached = answer.get("seconds"), answer.get("reached")
        for name in answer.get("imports", []):  # once, not for each mutant
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        gc.freeze()
        if answer.get("failed", "?"):
            self.complaint = f"a test fails unmutated: {answer.get('words')}"
        elif not math.isfinite(self.quick) and not self.controlled():
            self.complaint = "a test fails unmutated in another order"
        if self.complaint:
            self.cache.unlink()
        return not self.complaint

    def controlled(self) -> bool:
        """Whether no test fails without a mutant, in the order of an attack."""
        if not (noted := self.cache.with_suffix(".control")).exists():
            reached = {test for tests in self.reached.values() for test in tests}
            tests = self.order(sorted(reached), [])
            if (failed := in_child(lambda: self.attack("none", tests), None)) != "-":
                print(f"  fails unmutated: {failed}", flush=True)
                return False
            noted.touch()
        return True

    def reach(self) -> str:
        """The functions that each test reaches, its seconds, and the first failure."""
        from mutmut.state import state

        os.environ["MUTMUT_DEPENDENCY_DEPTH"], imported = "-1", {*sys.modules}
        set_mutant("stats")
        reached, items = defaultdict(list), list(self.items.values())
        seconds: dict[str, float] = {}
        spent: dict[str, float] = defaultdict(float)
        outcomes = quiet(items[0].config)
        for item in items:
            if spent[test := test_of(item.nodeid)] > SHARE:
                continue
            started = sum(os.times()[:4])  # of the processor, and of what a test starts
            run_item(item, None)  # which of the next runs is not known yet
            seconds[item.nodeid] = sum(os.times()[:4]) - started
            spent[test] += seconds[item.nodeid]
            for name in state()._stats:
                reached[name.rpartition(".")[2]].append(item.nodeid)
            state()._stats.clear()
            if outcomes.failed:
                break
        found = {"failed": outcomes.failed, "words": outcomes.words}
        found["imports"] = [name for name in sys.modules if name not in imported]
        return json.dumps(found | {"seconds": seconds, "reached": reached})

    def order(self, tests: Iterable[str], first: Iterable[str]) -> list[str]:
        """The tests in the order in which to try them."""
        ahead = [test for test in first if test in self.seconds]
        spent: dict[str, float] = {}
        one, others = [], []
        for test in sorted(tests, key=self.seconds.__getitem__):
            name = test_of(test)
            seconds = spent.get(name, 0.0) + self.seconds[test]
            if name in spent:
                others.append((seconds, test))
            else:
                one.append(test)
            spent[name] = seconds
        others = [test for _, test in sorted(others)]
        sums = itertools.accumulate(self.seconds[test] for test in others)
        others = [test for test, s in zip(others, sums, strict=True) if s <= BUDGET]
        return list(dict.fromkeys([*ahead, *one, *others]))

    # --- the tests with one ----------------------------------------------------------

    def try_mutant(self, mutant: str, tests: list[str]) -> tuple[str, str]:
        """What comes of a mutant, and the test that killed it."""
        function = mutant.partition("__mutmut_")[0]
        wall = WALL + 5 * sum(self.seconds[test] for test in tests)
        answer = in_child(lambda: self.attack(mutant, tests), wall) if tests else "-"
        if answer is None:
            return TIMEOUT, ""
        if answer == "-":
            return (EARLY if function in self.early else SURVIVED), ""
        return KILLED, answer

    def attack(self, mutant: str, tests: list[str]) -> str:
        """The first test that fails with the mutant on, or "-"."""
        set_mutant(f"{os.environ['MUTATED_MODULE']}.{mutant}")
        items = [self.items[test] for test in tests]
        outcomes = quiet(items[0].config)
        for item, after in zip(items, [*items[1:], None], strict=True):
            limit = max(LEAST, TIMES * self.seconds[item.nodeid])
            signal.setitimer(signal.ITIMER_PROF, limit)
            run_item(item, after)
            if outcomes.failed:
                return outcomes.failed
        return "-"


class Early(Rows):
    """A plugin that keeps the first failure of a whole run, that of collection too."""

    def __init__(self) -> None:
        self.failed = ""

    def pytest_collectreport(self, report) -> None:
        """Keep a file that cannot be collected."""
        if report.failed:
            self.failed = self.failed or report.nodeid

    pytest_runtest_logreport = pytest_collectreport


def collect(options: list[str], plugin: object) -> int:
    """Let pytest collect the tests, and the plugin run them."""
    quietly = (
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:faulthandler",
        "--tb=line",  # a long one takes longer than most tests
    )
    return int(pytest.main([*quietly, *options], plugins=[plugin]))


def from_the_beginning(mutant: str, options: list[str]) -> tuple[str, str]:
    """What comes of a mutant that is on while the tests are collected, in a child."""

    def attack() -> str:
        set_mutant(f"{os.environ['MUTATED_MODULE']}.{mutant}")
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            sys.stdout = sys.stderr = nowhere
            plugin = Early()
            code = collect(["-x", *options], plugin)
        return plugin.failed if code else "-"

    answer = in_child(attack, 900)
    if answer is None:
        return TIMEOUT, ""
    return (SURVIVED, "") if answer == "-" else (KILLED, answer)


def import_from(folder: Path, module: str) -> None:
    """Take the package, with a mutated module, from a folder; children too."""
    sys.path.insert(0, str(folder))
    others = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), others])
    os.environ["MUTATED_MODULE"] = f"transformer.{module}"


def from_collected(session: Session, options: list[str]) -> str:
    """Run mutants in a child, with the tests collected once; why not, if so."""

    def work() -> str:
        collect(options, session)
        return session.complaint

    set_mutant("stats")
    answer = in_child(work, None)
    return "the tests cannot be collected" if answer is None else answer
