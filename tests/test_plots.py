"""The figures: style, heat maps, and what moves without a kernel."""

import base64
import html
import io
import itertools
import re
import subprocess
import sys

import ipywidgets
import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from transformer import plots
from transformer.plots import explore, heatmap, use_style

# ipywidgets 7 has no Stack: run this file with 7.7.1 on PYTHONPATH to test it for real.
PAGES = {k: getattr(ipywidgets, k) for k in ("Stack", "Tab") if hasattr(ipywidgets, k)}


@pytest.fixture(autouse=True)
def style_and_no_open_figures():
    """The book's style within a test, and no figure after it."""
    with plt.rc_context():
        use_style()
        yield
        plt.close("all")


@pytest.fixture(params=PAGES)
def pages(request, monkeypatch):
    """What holds the frames: ipywidgets 8 has Stack, Colab's version 7 only Tab."""
    if request.param == "Tab":
        monkeypatch.delattr(ipywidgets, "Stack", raising=False)
    return PAGES[request.param]


def frame(head=0, layer=0):
    """Weights of one head.

    More words.
    """
    figure, ax = plt.subplots()
    ax.plot([head, layer])
    return figure


def widgets_in(box, kinds):
    """All widgets of some kinds in a box, in the order of the page."""
    found = [box] if isinstance(box, kinds) else []
    for child in getattr(box, "children", ()):
        found += widgets_in(child, kinds)
    return found


def alt(image):
    """The alternative text of a frame."""
    return html.unescape(re.search('alt="(.*?)"', image.value)[1])


def picture(image):
    """The picture in a frame."""
    return Image.open(
        io.BytesIO(base64.b64decode(re.search('base64,(.*?)"', image.value)[1]))
    )


def links():
    """The links between widgets, from the state that a saved page holds."""
    models = ipywidgets.Widget.get_manager_state()["state"].values()
    return [m["state"] for m in models if m["model_name"] == "LinkModel"]


def move(box, name, index):
    """Move a slider as the browser does, without Python: what is linked follows."""
    slider = next(s for s in box.children if getattr(s, "description", "") == name)
    slider.index = index
    places = {
        f"IPY_MODEL_{p.model_id}": p for p in widgets_in(box, tuple(PAGES.values()))
    }
    for link in links():
        if tuple(link["source"]) == (f"IPY_MODEL_{slider.model_id}", "index"):
            target, trait = link["target"]
            setattr(places[target], trait, index)


def shown(box):
    """The alternative text of the frame that a page with this widget shows."""
    page = box.children[-1]
    while not isinstance(page, ipywidgets.HTML):
        page = page.children[page.selected_index]
    return alt(page)


# --- explore: what it shows -----------------------------------------------------------


def test_every_position_of_two_sliders_shows_its_frame(pages):
    box = explore(frame, head=range(3), layer=[5, 7])
    for head, layer in itertools.product(range(3), range(2)):
        move(box, "head", head)
        move(box, "layer", layer)
        assert shown(box) == f"Weights of one head, head {head}, layer {[5, 7][layer]}"
    assert len(widgets_in(box, pages)) == 4


def test_one_slider_shows_its_frames(pages):
    box = explore(frame, layer=["first", "last"])
    assert shown(box) == "Weights of one head, layer first"
    move(box, "layer", 1)
    assert shown(box) == "Weights of one head, layer last"


def test_frame_is_the_figure_of_its_choice():
    def bar(height):
        """A bar."""
        figure, ax = plt.subplots()
        ax.axis("off")
        ax.set_ylim(0, 1)
        ax.bar([0], height, color="black")
        return figure

    dark = [
        (255 - torch.tensor(list(picture(i).convert("L").tobytes()))).sum().item()
        for i in widgets_in(explore(bar, height=[0.25, 0.5, 1]), ipywidgets.HTML)
    ]
    assert dark[1] == pytest.approx(2 * dark[0], rel=0.05)
    assert dark[2] == pytest.approx(4 * dark[0], rel=0.05)


def test_sliders_carry_the_names_and_values_of_the_choices():
    sliders = explore(frame, head=[0, 1], layer=[5, 7]).children[:2]
    assert [s.description for s in sliders] == ["head", "layer"]
    assert [s.options for s in sliders] == [("0", "1"), ("5", "7")]
    assert all("arrow keys" in s.tooltip for s in sliders)


def test_tabs_carry_the_values_where_there_is_no_stack(monkeypatch):
    monkeypatch.delattr(ipywidgets, "Stack", raising=False)
    outer = explore(frame, head=["a", "b"], layer=[5, 7]).children[-1]
    assert [outer.get_title(i) for i in range(2)] == ["a", "b"]
    assert [outer.children[1].get_title(i) for i in range(2)] == ["5", "7"]


def test_saved_state_holds_frames_and_links():
    ipywidgets.Widget.close_all()
    explore(frame, head=range(3), layer=range(2))
    models = ipywidgets.Widget.get_manager_state()["state"].values()
    assert sum("<img" in str(m["state"].get("value")) for m in models) == 6
    assert len(links()) == 4  # the outer stack, three inner ones


def test_alternative_text_is_the_docstring_and_the_choice_escaped():
    def quotes(word):
        """Is 1 < 2 & "so on"?

        More.
        """
        return frame()

    first = widgets_in(explore(quotes, word=['<b>"', "é"]), ipywidgets.HTML)[0]
    assert alt(first) == 'Is 1 < 2 & "so on"?, word <b>"'
    assert first.value.count("<") == 1


def test_frame_is_a_palette_on_white_at_the_size_of_the_figure():
    image = widgets_in(explore(frame, head=[0, 1]), ipywidgets.HTML)[0]
    assert picture(image).mode == "P"
    assert picture(image).size == (720, 480)
    assert min(picture(image).convert("RGB").getpixel((0, 0))) >= 250
    assert 'width="480" height="320"' in image.value
    assert "max-width:100%" in image.value


def test_frames_have_the_same_bytes_each_time():
    one, two = (explore(frame, head=[0, 1]) for _ in range(2))
    values = [[i.value for i in widgets_in(b, ipywidgets.HTML)] for b in (one, two)]
    assert values[0] == values[1] and values[0][0] != values[0][1]


def test_explore_closes_its_figures_and_no_others():
    mine = plt.figure()

    def reuses(head):
        """A figure of ours, and one that is not returned."""
        plt.figure()
        return mine

    explore(frame, head=range(5))
    explore(reuses, head=range(2))
    assert plt.get_fignums() == [mine.number]


def test_figure_outside_pyplot_is_drawn():
    def bare(head):
        """A figure that pyplot does not know."""
        return Figure(figsize=(2, 1))

    image = widgets_in(explore(bare, head=[0, 1]), ipywidgets.HTML)[0]
    assert picture(image).size == (300, 150)


def test_sixty_frames_are_allowed():
    def bare(a, b):
        """Empty."""
        return Figure(figsize=(1, 1))

    box = explore(bare, a=range(6), b=range(10))
    assert len(widgets_in(box, ipywidgets.HTML)) == 60


# --- explore: what it refuses ---------------------------------------------------------


def refuses(error, message, *arguments, **choices):
    """The call raises the error with one line that holds the message."""
    with pytest.raises(error, match=re.escape(message)) as caught:
        explore(*arguments, **choices)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "choices, message",
    [
        ({}, "one or two choices, got []"),
        (dict(a=[1, 2], b=[1, 2], c=[1, 2]), "one or two choices, got ['a', 'b', 'c']"),
        (dict(head=[]), "head needs two values to choose from, got head=[]"),
        (
            dict(head=[0, 1], layer=(3,)),
            "layer needs two values to choose from, got layer=[3]",
        ),
        (dict(head=range(61)), "head may make up to 60 frames, got n_frames=61"),
        (
            dict(head=range(8), layer=range(8)),
            "head and layer may make up to 60 frames, got n_frames=64",
        ),
    ],
)
def test_choices_are_refused_before_anything_is_drawn(choices, message):
    def never(**_):
        """Not called."""
        raise AssertionError("drawn")

    refuses(ValueError, message, never, **choices)


@pytest.mark.parametrize("doc", [None, "", " \n "])
def test_frame_without_docstring_is_refused(doc):
    def silent(head):
        return frame(head)

    silent.__doc__ = doc
    refuses(
        ValueError, "frame must be a function with a docstring", silent, head=[0, 1]
    )


@pytest.mark.parametrize("result", [None, "figure", torch.zeros(2)])
def test_frame_that_is_no_figure_is_refused(result):
    def no_figure(head):
        """A figure."""
        plt.figure()
        return result

    message = f"must return a Figure, got {type(result).__name__} for {{'head': 0}}"
    refuses(TypeError, message, no_figure, head=[0, 1])
    assert plt.get_fignums() == []


def test_frames_that_weigh_too_much_are_refused():
    def noise(seed):
        """Noise."""
        x = torch.rand(400, 400, generator=torch.Generator().manual_seed(seed))
        return heatmap(x, "row", "column")

    refuses(
        ValueError,
        "the frames may have 400000 bytes, got n_bytes=",
        noise,
        seed=range(5),
    )
    assert plt.get_fignums() == []


def test_error_inside_a_frame_passes_and_leaves_no_figure():
    def broken(head):
        """A figure."""
        plt.figure()
        raise ZeroDivisionError(head)

    with pytest.raises(ZeroDivisionError):
        explore(broken, head=[0, 1])
    assert plt.get_fignums() == []


# --- what is missing ------------------------------------------------------------------


@pytest.mark.parametrize("module", ["ipywidgets", "matplotlib.pyplot", "PIL.Image"])
def test_missing_module_is_named_with_the_extra(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    line = f'figures need {module}: pip install "measured-transformer[book]"'
    refuses(ImportError, line, frame, head=[0, 1])


def test_style_and_heatmap_name_the_extra_too(monkeypatch):
    for module in ("matplotlib", "matplotlib.pyplot"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"matplotlib: pip .*transformer\[book\]"):
        use_style()
    with pytest.raises(ImportError, match=r"pyplot: pip .*transformer\[book\]"):
        heatmap([[1]], "row", "column")


def test_import_and_style_load_neither_widgets_nor_a_shell():
    code = """if True:
        import sys, transformer.plots
        assert not {"matplotlib", "ipywidgets", "IPython"} & set(sys.modules)
        transformer.plots.use_style()
        assert "matplotlib" in sys.modules
        assert not {"ipywidgets", "IPython"} & set(sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- style ----------------------------------------------------------------------------


def svg(figure):
    """The figure as SVG text."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def test_svg_has_the_same_bytes_each_time_and_words_as_text():
    figures = [heatmap(torch.eye(3), "query", "key", title="title") for _ in range(2)]
    assert svg(figures[0]) == svg(figures[1])
    assert ">title</text>" in svg(figures[0])
    assert "fill: #ffffff" in svg(figures[0])  # opaque: legible in dark mode


def test_style_leaves_other_settings():
    plt.rcParams["lines.markersize"] = 3
    use_style()
    assert plt.rcParams["lines.markersize"] == 3
    assert plt.rcParams["image.cmap"] == plots.STYLE["image.cmap"]


def luminance(colour):
    """The relative luminance of a colour, as WCAG 2 defines it."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts
    ]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_first_colours_differ_and_stand_out_from_white():
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    assert len(set(colours)) == len(colours) == 7
    assert all(1.05 / (luminance(c) + 0.05) >= 3 for c in colours[:3])


# --- heatmap --------------------------------------------------------------------------


def test_heatmap_draws_rows_from_the_top():
    ax = heatmap([[1, 2, 3], [4, 5, 6]], ["a", "b"], ["x", "y", "z"]).axes[0]
    assert ax.images[0].get_array().tolist() == [[1, 2, 3], [4, 5, 6]]
    assert ax.yaxis_inverted()
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["x", "y", "z"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.half])
def test_heatmap_takes_any_numbers(dtype):
    ax = heatmap(torch.eye(3).to(dtype), "query", "key").axes[0]
    assert ax.images[0].get_array().tolist() == torch.eye(3).tolist()


def test_heatmap_takes_tensors_with_a_gradient_and_arrays():
    x = torch.eye(2, requires_grad=True)
    for values in (x, x.detach().numpy()):
        array = heatmap(values, "query", "key").axes[0].images[0].get_array()
        assert array.tolist() == [[1, 0], [0, 1]]


def test_heatmap_names_axes_title_and_colours():
    figure = heatmap([[0, 1]], "query", "key", title="t", label="weight", vmin=-1)
    ax, bar = figure.axes
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("query", "key")
    assert (ax.get_title(), bar.get_ylabel()) == ("t", "weight")
    assert ax.images[0].get_clim() == (-1, 1)


def test_heatmap_without_label_has_no_colour_bar():
    assert len(heatmap([[0, 1]], "query", "key").axes) == 1


def test_heatmap_draws_in_given_axes():
    figure, (left, right) = plt.subplots(1, 2)
    assert heatmap([[0, 1]], "query", "key", ax=right) is figure
    assert (len(left.images), len(right.images)) == (0, 1)


def test_long_column_labels_stand_upright():
    def angles(labels):
        ax = heatmap([[0, 1]], "query", labels).axes[0]
        return {t.get_rotation() for t in ax.get_xticklabels()}

    assert angles(["the", "cat"]) == {90}
    assert angles(range(2)) == {0}


@pytest.mark.parametrize(
    "values, rows, columns, message",
    [
        ([1, 2], "r", "c", "values must be a matrix of numbers, got values=[1, 2]"),
        (torch.zeros(0, 3), "r", "c", "a matrix of numbers, got values=(0, 3)"),
        ([[1, 2]], ["a", "b"], "c", "one label for each of 1, got rows=['a', 'b']"),
        ([[1, 2]], "r", ["a"], "one label for each of 2, got columns=['a']"),
        ([[1, 2]], "r", [], "one label for each of 2, got columns=[]"),
    ],
)
def test_heatmap_refuses_in_one_line(values, rows, columns, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        heatmap(values, rows, columns)
    assert "\n" not in str(caught.value)
