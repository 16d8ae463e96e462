"""Figures with sliders as they get onto a page."""

from __future__ import annotations

import base64
import html
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("myst_nb", reason="what builds the book is not installed")
from bs4 import BeautifulSoup
from sphinx.errors import ExtensionError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "site"))
light_pages = importlib.import_module("light_pages")


FRAMES = [f"{a}{b}" for a in "xy" for b in "123"]  # the last choice changes fastest


def model(kind: str, **state) -> dict:
    """A saved widget."""
    return {"model_name": f"{kind}Model", "state": state}


def refer(*names: str) -> list[str]:
    """References to saved widgets."""
    return [f"IPY_MODEL_{name}" for name in names]


def link(slider: str, stack: str) -> dict:
    """A saved link from a slider to the stack in which it chooses."""
    (source,), (target,) = refer(slider), refer(stack)
    return model("Link", source=[source, "index"], target=[target, "selected_index"])


def frame(name: str) -> dict:
    """A saved picture whose bytes are its name."""
    data = base64.b64encode(name.encode()).decode()
    alt = html.escape(f'"{name}" & more')
    source = f'src="data:image/png;base64,{data}"'
    return model("HTML", value=f'<img alt="{alt}" width="30" height="20" {source}>')


def two_sliders() -> dict:
    """What explore saves for two choices."""
    models = {name: frame(name) for name in FRAMES}
    for a in "xy":
        models[a] = model("Stack", children=refer(*(f"{a}{b}" for b in "123")))
        models[f"link {a}"] = link("inner", a)
    options = {"outer": ["x", "y"], "inner": ["1", "2", "3"]}
    sliders = {
        name: model("SelectionSlider", description=name, _options_labels=labels)
        for name, labels in options.items()
    }
    return {
        **models,
        **sliders,
        "link": link("outer", "all"),
        "all": model("Stack", children=refer("x", "y")),
        "box": model("VBox", children=refer("outer", "inner", "all")),
    }


def drawn(models: dict, folder: Path) -> BeautifulSoup:
    """The figure on a page in a folder of the book, its widgets given."""
    output = {"data": {light_pages.WIDGET_VIEW: {"model_id": "box"}, "text/plain": ""}}
    notebook = {
        "metadata": {"widgets": {light_pages.WIDGET_STATE: {"state": models}}},
        "cells": [{"outputs": [output]}, {"cell_type": "markdown"}],
    }
    env = SimpleNamespace(doc2path=lambda name: f"{name}.ipynb")
    app = SimpleNamespace(env=env, outdir=folder)
    content = [json.dumps(notebook)]
    light_pages.draw_widgets(app, "chapters/a", content)
    shown = json.loads(content[0])
    assert shown["metadata"] == {}, "no state of widgets is left for the page"
    (data,) = (output["data"] for output in shown["cells"][0]["outputs"])
    assert list(data) == ["text/html"]
    return BeautifulSoup(data["text/html"], "html.parser")


def test_each_position_of_the_sliders_has_its_frame(tmp_path):
    figure = drawn(two_sliders(), tmp_path).div
    frames = json.loads(figure["data-frames"])
    outer, inner = figure.find_all("input")
    steps = [int(slider["data-step"]) for slider in (outer, inner)]
    for a, first in enumerate(json.loads(outer["data-values"])):
        for b, second in enumerate(json.loads(inner["data-values"])):
            source, alt = frames[a * steps[0] + b * steps[1]]
            path = (tmp_path / "chapters" / source).resolve()
            assert path.read_text(encoding="utf-8") == first + second
            assert alt == f'"{first}{second}" & more'
    assert [int(slider["max"]) for slider in (outer, inner)] == [1, 2]


def test_figure_begins_with_its_first_frame(tmp_path):
    figure = drawn(two_sliders(), tmp_path).div
    assert [figure.img["src"], figure.img["alt"]] == json.loads(figure["data-frames"])[
        0
    ]
    assert (figure.img["width"], figure.img["height"]) == ("30", "20")
    assert [label.span.text for label in figure.find_all("label")] == ["outer", "inner"]
    assert [output.text for output in figure.find_all("output")] == ["x", "1"]


def test_one_slider_is_enough(tmp_path):
    models = two_sliders()
    models["box"] = model("VBox", children=refer("inner", "x"))
    figure = drawn(models, tmp_path).div
    assert len(json.loads(figure["data-frames"])) == 3
    assert figure.input["data-step"] == "1"


def test_other_widgets_stop_the_build(tmp_path):
    models = two_sliders()
    models["box"] = model("VBox", children=refer("outer", "box", "all"))
    with pytest.raises(ExtensionError, match="VBox"):
        drawn(models, tmp_path)


def test_frames_that_do_not_fit_stop_the_build(tmp_path):
    models = two_sliders()
    models["inner"]["state"]["_options_labels"] = ["1", "2"]
    with pytest.raises(ExtensionError, match="6 frames"):
        drawn(models, tmp_path)
