"""Write the table of chapters into README.md, from _toc.yml and the notebooks.

Usage: python tools/readme.py
"""

from __future__ import annotations

import re
from pathlib import Path

import checks

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- chapters: written by make export -->", "<!-- end of chapters -->"


def table(root: Path) -> str:
    """One row a notebook: chapter, title, promise, and the module it writes."""
    rows = ["|   | notebook | what it gives | module |", "|---|---|---|---|"]
    for stem in checks.toc_notebooks((root / "_toc.yml").read_text(encoding="utf-8")):
        path = root / "chapters" / f"{stem}.ipynb"
        if not path.exists():
            continue
        nb = checks.read(path)
        title, promise = checks.title_and_promise(nb)
        cells = map(checks.directives, checks.code_cells(nb))
        module = next((c["default_exp"] for c in cells if "default_exp" in c), "")
        link = f"[{title}](chapters/{stem}.ipynb)"
        name = f"`{module}`" if module else ""
        rows.append(f"| {int(stem[:2])} | {link} | {promise} | {name} |")
    return "\n".join(rows)


def update(text: str, root: Path) -> str:
    """The readme with a fresh table between its two markers."""
    between = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.S)
    return between.sub(lambda _: f"{BEGIN}\n{table(root)}\n{END}", text)


def main() -> None:
    """Update README.md."""
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    path.write_text(update(text, ROOT), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
