"""Make the virtual environment in .venv, or bring it up to date with the locks.

Nothing here is newer than Python 3.6, so that a Python that is too old can say so.

Usage: python tools/environment.py book|test|bench|mutants
"""

import hashlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
TORCH = os.environ.get("TORCH", "torch==2.13.0")


def fail(message):
    """End with one clear line."""
    sys.exit(message)


def check_python():
    """Refuse a Python that cannot run the package or make an environment."""
    if sys.version_info < (3, 11):  # noqa: UP036
        here = ".".join(map(str, sys.version_info[:3]))
        fail(
            f"Python 3.11 or newer is needed, {sys.executable} is {here}; "
            "name another: make PYTHON=/path/to/python"
        )
    try:
        import ensurepip
        import venv
    except ImportError as missing:
        fail(
            f"Python's {missing.name} module is missing; on Debian and Ubuntu: "
            "apt-get install python3-venv"
        )
    return ensurepip, venv


def pins(path):
    """The pins of a lock, without their hashes: name==version."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split()[0] for line in lines if "==" in line]


def layers():
    """What each environment holds: its name, its files, and its calls of pip.

    Each file that pip takes must have a hash of its lock; all but torch, of which each
    machine takes its own build.
    """
    locks = ROOT / "requirements"
    locked = ["--require-hashes", "-r"]
    book = [
        [*locked, str(locks / "book.txt")],  # has all that torch needs on a CPU
        shlex.split(TORCH),  # before what takes another build of it where it is absent
        ["--no-deps", "--no-build-isolation", "-e", str(ROOT)],
    ]
    test = [
        [*locked, str(locks / "test.txt")],
        ["--no-deps", *locked, str(locks / "weights.txt")],
    ]
    return {
        "book": ([locks / "book.txt", ROOT / "pyproject.toml"], book),
        "test": ([locks / "test.txt", locks / "weights.txt"], test),
        "bench": ([locks / "bench.txt"], [[*locked, str(locks / "bench.txt")]]),
        "mutants": ([locks / "mutants.txt"], [[*locked, str(locks / "mutants.txt")]]),
    }


def fingerprint(files):
    """A digest of the files, the Python and the torch that an environment is for."""
    facts = [os.path.realpath(sys.executable), sys.version, TORCH, str(ROOT)]
    contents = [path.read_bytes() for path in files]
    return hashlib.sha256(b"\0".join([*map(os.fsencode, facts), *contents])).hexdigest()


def works():
    """Whether .venv has this version of Python, with pip, and it starts."""
    if not PYTHON.exists():
        return False
    code = "import pip, sys; sys.exit(sys.version_info[:2] != {})"
    command = [str(PYTHON), "-c", code.format(tuple(sys.version_info[:2]))]
    return not subprocess.call(command, stderr=subprocess.DEVNULL)


def install(arguments):
    """Call pip in the environment."""
    what = " ".join(arguments).replace(str(ROOT) + os.sep, "").replace(str(ROOT), ".")
    print("  pip install " + what, flush=True)
    pip = [str(PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    status = subprocess.call([*pip, *arguments])
    if status:
        fail(f"pip could not install {what} (status {status}): its reason stands above")


def ensure(wanted):
    """Install what is new since the last time; usually nothing."""
    done, known = [], layers()
    for name in dict.fromkeys(["book", "book" if wanted == "book" else "test", wanted]):
        files, calls = known[name]
        done += files
        stamp = VENV / ("installed-" + name)
        now = fingerprint(done)
        current = stamp.read_text(encoding="utf-8") if stamp.exists() else None
        if current != now:
            if not works():
                print("Making .venv", flush=True)
                command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
                if subprocess.call(command):
                    fail("python -m venv .venv failed: its reason stands above")
            print(f"Installing what the {name} needs", flush=True)
            for arguments in calls:
                install(arguments)
            stamp.write_text(now, encoding="utf-8")


def main(arguments):
    """Make the environment that the only argument names."""
    if len(arguments) != 1 or arguments[0] not in layers():
        fail(__doc__.strip().splitlines()[-1])
    check_python()
    ensure(arguments[0])


if __name__ == "__main__":
    main(sys.argv[1:])
