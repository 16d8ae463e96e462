"""Build the book into _build/html from the stored outputs; no notebook is executed.

Nothing is done when nothing changed. Otherwise the book is built from the start, for
an incremental build would keep pages that are gone and miss changes of the package.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import fetch_scripts

ROOT = Path(__file__).resolve().parents[1]
HTML = ROOT / "_build" / "html"
INPUTS = [
    "*.md",
    "*.yml",
    "references.bib",
    "requirements/book.txt",
    "api/*.md",
    "benchmarks/**/*.md",
    "chapters/*.ipynb",
    "transformer/*.json",
    "transformer/*.py",
    "site/*.json",
    "site/measured/*.json",
    "site/*.py",
    "site/styles/*",
]


def digest() -> str:
    """What the pages are made from."""
    found = hashlib.sha256()
    for path in sorted({path for glob in INPUTS for path in ROOT.glob(glob)}):
        if path.is_file():
            found.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def main() -> None:
    """Build if needed and print where the book is.

    Raises:
        SystemExit: A script could not be fetched, or Sphinx had a warning.
    """
    fetch_scripts.main()
    stamp, wanted = HTML.parent / "stamp", digest()
    built = stamp.is_file() and (HTML / "index.html").is_file()
    if not built or stamp.read_text(encoding="utf-8") != wanted:
        stamp.unlink(missing_ok=True)
        for folder in (HTML, HTML.parent / ".doctrees"):
            shutil.rmtree(folder, ignore_errors=True)
        book = Path(sys.executable).with_name("jupyter-book")
        strict = ["-W", "-n", "--keep-going", "-q"]
        command = [book, "build", ROOT, *strict]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        if done.returncode:
            sys.exit("site/build.py: the book has errors or warnings, see above")
        stamp.write_text(wanted, encoding="utf-8")
    print(HTML / "index.html")


if __name__ == "__main__":
    main()
