"""Which statements of the package the tests run, seen in some of them.

Before Python 3.12 watching makes loops in Python twice as slow, so of each test no more
than SAMPLE of its parameters are watched, evenly spread. What is counted did run; what
is not may have run unseen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = 4
Lines = dict[str, list[int]]


def chosen(names: Iterable[str]) -> set[str]:
    """Of tests named file::test[parameters], those to watch."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition("[")[0], []).append(name)
    steps = {test: max(1, len(group) / SAMPLE) for test, group in groups.items()}
    return {
        group[int(i * steps[test])]
        for test, group in groups.items()
        for i in range(min(SAMPLE, len(group)))
    }


def modules() -> list[Path]:
    """The files of the package that are exported."""
    return sorted((ROOT / "transformer").glob("[!_]*.py"))


class Watch:
    """Watches the package from now on, with pauses."""

    def __init__(self) -> None:
        import coverage  # which a machine that measures nothing may lack

        self.names: set[str] = set()
        how = {"data_file": None, "config_file": False, "messages": False}
        self.inside = coverage.Coverage(source_pkgs=["transformer"], **how)
        silent = ["no-data-collected", "module-not-imported", "module-not-measured"]
        self.inside.set_option("run:disable_warnings", silent)
        self.inside.start()

    def choose(self, names: Iterable[str]) -> None:
        """Pause, and say which tests to watch."""
        self.inside.stop()
        self.names = chosen(names)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Watch while this test runs, if it is a chosen one."""
        if name not in self.names:
            yield
            return
        self.inside.start()
        try:
            yield
        finally:
            self.inside.stop()

    def lines(self) -> tuple[Lines, Lines]:
        """The lines of each module on which a statement begins, and those that ran."""
        self.inside.stop()
        statements, ran = {}, {}
        for path in modules():
            _, here, _, missing, _ = self.inside.analysis2(str(path))
            statements[path.stem] = here
            ran[path.stem] = sorted(set(here) - set(missing))
        return statements, ran


def share(statements: Lines, ran: Iterable[Lines]) -> dict[str, dict[str, int]]:
    """How many statements each module has, and how many ran in one process or other."""
    everywhere = list(ran)
    found = {}
    for name, lines in statements.items():
        seen = {line for one in everywhere for line in one.get(name, ())}
        covered = len(seen & set(lines))
        found[name] = {"statements": len(lines), "covered": covered}
    return found
