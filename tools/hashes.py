"""Write behind each pin of the locks the SHA-256 of every file of its release.

With them pip installs what was locked, on any system and Python, or nothing. Of torch
each machine takes the build that it needs; it is in no lock. Needs uv on the path.

Usage: python tools/hashes.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from environment import pins

ROOT = Path(__file__).resolve().parent.parent
HOW = ("--no-deps", "--generate-hashes", "--no-header", "--no-annotate", "--quiet")


def plain(pin: str) -> str:
    """A pin with the package's name as the index spells it."""
    name, _, version = pin.partition("==")
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}"


def hashes(pinned: list[str]) -> dict[str, list[str]]:
    """The hashes of each release, by plain pin."""
    done = subprocess.run(
        ["uv", "pip", "compile", *HOW, "-"],
        input="\n".join(pinned),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        encoding="utf-8",
    )
    found, release = {}, ""
    for line in done.stdout.splitlines():
        if hash_ := re.search(r"--hash=sha256:[0-9a-f]{64}", line):
            found[release].append(hash_[0])
        else:
            release = plain(line.split()[0])
            found[release] = []
    return found


def lock(path: Path) -> str:
    """A lock with its hashes, in the order and the spelling that it has."""
    text = path.read_text(encoding="utf-8")
    found, lines = hashes(pins(path)), re.findall(r"^-r .*$", text, re.M)
    for head in re.findall(r"^\S+==.*?(?= \\|$)", text, re.M):  # with its condition
        lines.append(" \\\n    ".join([head, *found[plain(head.split()[0])]]))
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write all locks anew."""
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        path.write_text(lock(path), encoding="utf-8", newline="\n")
        print(f"{path.name}: {len(pins(path))} pins")
    return 0


if __name__ == "__main__":
    sys.exit(main())
