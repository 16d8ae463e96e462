"""Sphinx extension: pages that weigh little.

A figure with sliders is saved as the state of its widgets, with every frame inside.
On the page each frame is a file of its own, loaded when it is wanted, and the sliders
are the browser's: explore.js moves them in place of 3.6 MB of widget scripts.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class Widgets:
    """The saved widgets of a notebook."""

    def __init__(self, notebook: dict) -> None:
        saved = notebook["metadata"].pop("widgets", {}).get(WIDGET_STATE, {})
        self.models = saved.get("state", {})
        ends = [
            (model["state"]["source"], model["state"]["target"])
            for model in self.models.values()
            if model["model_name"] == "LinkModel"
        ]
        self.slider_of = {named(target[0]): named(source[0]) for source, target in ends}

    def kind(self, name: str) -> str:
        """What a widget is."""
        return self.models[name]["model_name"].removesuffix("Model")

    def children(self, name: str) -> list[str]:
        """The widgets that a box holds."""
        return [named(child) for child in self.models[name]["state"]["children"]]

    def sliders(self, stack: str) -> Iterator[str]:
        """The sliders that choose in a stack and in the stacks which it holds."""
        while self.kind(stack) == "Stack":
            yield self.slider_of[stack]
            stack = self.children(stack)[0]

    def frames(self, stack: str) -> list[dict[str, str]]:
        """The attributes of each picture in a stack, in order."""
        if self.kind(stack) == "Stack":
            return [f for child in self.children(stack) for f in self.frames(child)]
        found = ATTRIBUTE.findall(self.models[stack]["state"]["value"])
        return [{key: html.unescape(value) for key, value in found}]


def named(reference: str) -> str:
    """The name of the model that a reference points at."""
    return reference.removeprefix("IPY_MODEL_")


def stored(source: str, folder: Path) -> str:
    """Write a picture given as a data address into a folder and return its name."""
    data = base64.b64decode(source.removeprefix("data:image/png;base64,"))
    name = f"frame-{hashlib.sha256(data).hexdigest()[:16]}.png"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return name


def slider(label: str, options: list[str], step: int) -> str:
    """One choice: its label, a range, and the value that is chosen."""
    values = html.escape(json.dumps(options))
    return (
        f'<label><span>{html.escape(label)}</span> <input type="range" value="0" '
        f'max="{len(options) - 1}" aria-valuetext="{html.escape(options[0])}" '
        f'data-step="{step}" data-values="{values}"> '
        f"<output>{html.escape(options[0])}</output></label>"
    )


def figure(widgets: Widgets, view: str, folder: Path, path: str) -> str:
    """A figure with sliders, as HTML.

    Raises:
        ExtensionError: The widgets are not those which `explore` makes.
    """
    kinds = [widgets.kind(child) for child in widgets.children(view)]
    if kinds not in (["SelectionSlider", "Stack"], ["SelectionSlider"] * 2 + ["Stack"]):
        raise ExtensionError(f"pages show sliders and a stack of frames, not {kinds}")
    stack = widgets.children(view)[-1]
    frames, rows = widgets.frames(stack), []
    step = len(frames)
    for name in widgets.sliders(stack):
        state = widgets.models[name]["state"]
        options = state["_options_labels"]
        step //= len(options)
        rows.append((state["description"], options, step))
    if math.prod(len(options) for _, options, _ in rows) != len(frames):
        raise ExtensionError(f"{len(frames)} frames do not fit the sliders")
    shown = [[path + stored(f["src"], folder), f["alt"]] for f in frames]
    size = " ".join(f'{key}="{frames[0][key]}"' for key in ("width", "height"))
    first, alt = map(html.escape, shown[0])
    return (
        f'<div class="explore" data-frames="{html.escape(json.dumps(shown))}">'
        f"{''.join(slider(*row) for row in rows)}"
        f'<img src="{first}" alt="{alt}" {size}></div>'
    )


def draw_widgets(app: Sphinx, docname: str, content: list[str]) -> None:
    """Put figures in the place of widgets, before the notebook is parsed."""
    if not app.env.doc2path(docname).endswith(".ipynb"):
        return
    notebook = json.loads(content[0])
    widgets = Widgets(notebook)
    folder = Path(app.outdir) / "_images"
    path = "../" * docname.count("/") + "_images/"
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if view := output.get("data", {}).pop(WIDGET_VIEW, None):
                shown = figure(widgets, view["model_id"], folder, path)
                output["data"] = {"text/html": shown}
    content[0] = json.dumps(notebook)


def setup(app: Sphinx) -> dict:
    """Connect the extension."""
    app.connect("source-read", draw_widgets, priority=400)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
