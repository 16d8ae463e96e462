"""What `make test` measures, beside what is committed for the status and other pages.

Each stage that passes leaves a file in build/measured: unit and kernels largest errors
and coverage, together tests.json, and notebooks the outputs compared and run times.
`make measured` copies them to site/measured, where the book reads them, once all of
these stages have passed. Errors may grow tenfold and run times differ fivefold between
machines.

Usage: python tools/measured.py compare|accept
"""

from __future__ import annotations

import datetime
import functools
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
# The files of site/measured, and the stages that they come from.
FILES = {"tests.json": ("unit", "kernels"), "notebooks.json": ("notebooks",)}
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


def add(found: dict, more: dict) -> None:
    """Take in errors that another process found: the larger ones, and all counts."""
    for component, references in more.items():
        for reference, columns in references.items():
            for column, dtypes in columns.items():
                row = found.setdefault(component, {}).setdefault(reference, {})
                cell = row.setdefault(column, {})
                for dtype, new in dtypes.items():
                    old = cell.get(dtype, {"error": 0.0, "comparisons": 0})
                    error = max(old["error"], new["error"])
                    n = old["comparisons"] + new["comparisons"]
                    cell[dtype] = {"error": error, "comparisons": n}


def merged(found: dict, more: dict) -> dict:
    """What the tests of two stages measured, on the machine of the first."""
    found = json.loads(json.dumps(found))
    add(found["components"], more["components"])
    for module, lines in more["coverage"].items():
        known = found["coverage"].setdefault(module, lines)
        known["covered"] = max(known["covered"], lines["covered"])
    return found


def left(stage: str, fresh: Path) -> Path:
    """The file that a stage leaves when it has passed."""
    return fresh / f"{stage}.json"


def lacking(name: str, fresh: Path) -> list[str]:
    """The stages that have not passed, of those that a file comes from."""
    return [stage for stage in FILES[name] if not left(stage, fresh).is_file()]


def gather(name: str, fresh: Path) -> Path:
    """The file with all that its stages, which have passed, have left."""
    parts = [read(left(stage, fresh)) for stage in FILES[name]]
    write(fresh / name, functools.reduce(merged, parts))
    return fresh / name


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


def unpassed(stages: list[str]) -> str:
    """That stages have not passed, in words."""
    has = "stage {} has" if len(stages) == 1 else "stages {} have"
    return f"{has.format(' and '.join(stages))} not passed"


def compare(committed: Path = COMMITTED, fresh: Path = FRESH) -> list[str]:
    """What is missing or differs, one line each."""
    complaints = []
    for name, stages in FILES.items():
        if missing := lacking(name, fresh):
            complaints.append(f"nothing fresh to compare: {unpassed(missing)}")
            continue
        path, names = gather(name, fresh), " and ".join(stages)
        found = [f"nothing is committed of what {names} measure"]
        if (committed / name).is_file():
            found = COMPARE[name](read(committed / name), read(path))
        complaints += [f"{one}; `make measured` accepts it" for one in found]
    return complaints


def accept(committed: Path = COMMITTED, fresh: Path = FRESH) -> list[str]:
    """Copy what was measured to where the book reads it; the names of the files.

    All that is measured here is taken or none; run times on a GPU come alone if no
    stage has passed here.
    """
    missing = [stage for name in FILES for stage in lacking(name, fresh)]
    found = [fresh / GPU] if (fresh / GPU).is_file() else []
    if missing and not (found and len(missing) == sum(map(len, FILES.values()))):
        raise FileNotFoundError(unpassed(missing))
    found = found if missing else [*(gather(name, fresh) for name in FILES), *found]
    committed.mkdir(parents=True, exist_ok=True)
    for path in found:
        shutil.copyfile(path, committed / path.name)
    return [path.name for path in found]


def main(words: list[str]) -> int:
    """Compare, or accept what differs."""
    if words == ["accept"]:
        try:
            print("accepted: " + ", ".join(accept()))
        except FileNotFoundError as missing:
            print(f"accepted: nothing, for {missing}; run `make test` first")
            return 1
        return 0
    if words != ["compare"]:
        sys.exit((__doc__ or "").splitlines()[-1])
    complaints = compare()
    for complaint in complaints:
        print("measured:", complaint)
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
