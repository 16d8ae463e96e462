"""What `make test` measures, beside what is committed for the status and other pages.

The stages leave build/measured/tests.json (largest errors, coverage) and notebooks.json
(outputs compared, run times); `make measured` copies them to site/measured, where the
book reads them. Errors may grow tenfold and run times differ fivefold between machines.

Usage: python tools/measured.py compare|accept
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FRESH = ROOT / "build" / "measured"
COMMITTED = ROOT / "site" / "measured"
FILES = {"tests.json": "unit", "notebooks.json": "notebooks"}  # and their stages
GPU = "notebooks.cuda.json"

GROWTH = 10  # how many times an error may be the committed one, above the floor
FLOORS = {"float64": 1e-12, "complex128": 1e-12}  # what errors are noise; else:
FLOOR = 1e-6
POINTS = 2  # how far coverage may be from the committed one
TIMES = 5  # how many times the one run time may be the other, above the slack
SLACK = 10  # seconds

# --- writing ---------------------------------------------------------------------


def processor() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.split(":")[1].strip() for line in lines if "model name" in line)
    return next(names, platform.processor() or platform.machine())


def facts() -> dict:
    """What was measured on, with what, and when."""
    return {
        "device": processor(),
        "cores": os.cpu_count(),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch").partition("+")[0],
    }


def write(path: Path, found: dict) -> None:
    """Write JSON whose bytes depend on nothing but what was found."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8", newline="\n")


def read(path: Path) -> dict:
    """The JSON of a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def percent(module: dict[str, int]) -> float:
    """The share of a module's statements that ran, in percent."""
    return 100 * module["covered"] / max(1, module["statements"])


def add(path: Path, more: Path) -> None:
    """Add to what the unit tests measured what tests of a process apart did."""
    found, others = read(path), read(more)
    found["components"] |= others["components"]
    for module, lines in others["coverage"].items():
        known = found["coverage"].setdefault(module, lines)
        known["covered"] = max(known["covered"], lines["covered"])
    write(path, found)


def gather_notebooks(folder: Path, out: Path) -> None:
    """Put what each notebook left in a folder into one file."""
    found = {path.stem: read(path) for path in sorted(folder.glob("*.json"))}
    on = [notebook.pop("facts") for notebook in found.values()]
    write(out, {"facts": on[0], "notebooks": found})


# --- comparing -------------------------------------------------------------------


def errors(found: dict) -> dict[tuple[str, str, str, str], float]:
    """The largest errors by component, reference, column and dtype.

    torch's version, which a user may choose, is left out of the references.
    """
    torch = f", torch {found['facts']['torch']}"
    return {
        (component, reference.replace(torch, ", torch"), column, dtype): entry["error"]
        for component, references in found["components"].items()
        for reference, columns in references.items()
        for column, dtypes in columns.items()
        for dtype, entry in dtypes.items()
    }


def differing(what: str, committed, fresh) -> Iterator[str]:
    """Names that are on one side only."""
    for name in sorted(committed - fresh):
        yield f"{what} {name} is committed and was not measured"
    for name in sorted(fresh - committed):
        yield f"{what} {name} was measured and is not committed"


def compare_errors(committed: dict, fresh: dict) -> Iterator[str]:
    """Components that are new, gone or farther from their references."""
    old, new = errors(committed), errors(fresh)
    components = [set(found["components"]) for found in (committed, fresh)]
    yield from differing("component", *components)
    shared = components[0] & components[1]
    rows = [{" / ".join(k) for k in found if k[0] in shared} for found in (old, new)]
    yield from differing("comparison", *rows)
    for key in sorted(old.keys() & new.keys()):
        most = GROWTH * old[key] + FLOORS.get(key[-1], FLOOR)
        if new[key] > most:
            size = f"{new[key]:.1e}, committed {old[key]:.1e}"
            yield f"comparison {' / '.join(key)} is off by {size}"


def compare_coverage(committed: dict, fresh: dict) -> Iterator[str]:
    """Modules that are new or gone, or whose share of tested statements moved."""
    old, new = committed["coverage"], fresh["coverage"]
    yield from differing("coverage of module", set(old), set(new))
    for name in sorted(old.keys() & new.keys()):
        was, now = percent(old[name]), percent(new[name])
        if abs(now - was) > POINTS:
            yield f"coverage of module {name} is {now:.0f} %, committed {was:.0f} %"


def compare_tests(committed: dict, fresh: dict) -> list[str]:
    """What differs between two runs of the tests, one line each."""
    both = (committed, fresh)
    return [*compare_errors(*both), *compare_coverage(*both)]


def compare_notebooks(committed: dict, fresh: dict) -> list[str]:
    """What differs between two runs of the notebooks, one line each."""
    old, new = committed["notebooks"], fresh["notebooks"]
    complaints = list(differing("notebook", set(old), set(new)))
    for name in sorted(old.keys() & new.keys()):
        for count in ("cells", "compared", "ignored"):
            was, now = old[name][count], new[name][count]
            if was != now:
                complaints.append(f"notebook {name}: {now} {count}, committed {was}")
        was, now = old[name].get("seconds", 0), new[name].get("seconds", 0)
        if min(was, now) <= 0:
            complaints.append(f"notebook {name} has no run time")
        elif max(was, now) > TIMES * min(was, now) + SLACK:
            complaints.append(f"notebook {name} took {now:.0f} s, committed {was:.0f}")
    return complaints


COMPARE = {"tests.json": compare_tests, "notebooks.json": compare_notebooks}


def compare(committed: Path = COMMITTED, fresh: Path = FRESH) -> list[str]:
    """What is missing or differs, one line each."""
    complaints = []
    for name, stage in FILES.items():
        if not (fresh / name).is_file():
            complaints.append(f"nothing fresh to compare: stage {stage} has not passed")
            continue
        found = [f"nothing is committed of what stage {stage} measures"]
        if (committed / name).is_file():
            found = COMPARE[name](read(committed / name), read(fresh / name))
        complaints += [f"{one}; `make measured` accepts it" for one in found]
    return complaints


def accept(committed: Path = COMMITTED, fresh: Path = FRESH) -> list[str]:
    """Copy what was measured to where the book reads it; the names of the files."""
    committed.mkdir(parents=True, exist_ok=True)
    found = [name for name in (*FILES, GPU) if (fresh / name).is_file()]
    for name in found:
        shutil.copyfile(fresh / name, committed / name)
    return found


def main(words: list[str]) -> int:
    """Compare, or accept what differs."""
    if words == ["accept"]:
        found = accept()
        print("accepted: " + (", ".join(found) or "nothing; run `make test` first"))
        return int(not found)
    if words != ["compare"]:
        sys.exit((__doc__ or "").splitlines()[-1])
    complaints = compare()
    for complaint in complaints:
        print("measured:", complaint)
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
