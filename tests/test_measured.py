"""What is measured for the status and conformance pages, kept, compared and shown."""

from __future__ import annotations

import copy
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import measured
import pytest
import sampled_coverage
import test_gpu
import test_stages
import torch
from bs4 import BeautifulSoup
from conformance import COLUMNS, Conformance
from small_notebooks import ROOT, code, notebook, words
from small_notebooks import write as write_notebook

pytest.importorskip("myst_nb", reason="what builds the book is not installed")
sys.path.insert(0, str(ROOT / "site"))
measured_pages = importlib.import_module("measured_pages")

TORCH = measured.facts()["torch"]
GELU = f"torch.nn.GELU, torch {TORCH}"


def entry(error: float, comparisons: int = 1) -> dict:
    """What is kept of some comparisons."""
    return {"error": error, "comparisons": comparisons}


# --- the fixture ------------------------------------------------------------------


def test_largest_error_is_kept_for_each_dtype_and_reference():
    found, zero = Conformance(), torch.zeros(2)
    for error, reference in ((0.5, "loops"), (0.25, "loops"), (0.125, "torch.nn.GELU")):
        both = (zero + error, zero)
        found.record("attention", "mask", *both, reference=reference)
    same = (zero.double(), zero.double())
    found.record("attention", "mask", *same, reference="loops")
    loops = {"float32": entry(0.5, 2), "float64": entry(0)}
    torchs = {"float32": entry(0.125)}
    assert found.found == {
        "attention": {"loops": {"mask": loops}, GELU: {"mask": torchs}}
    }


def test_equal_infinities_and_nothing_are_no_error():
    found, endless = Conformance(), torch.tensor([torch.inf, -torch.inf])
    nothing = torch.zeros(0)
    both = ([endless, nothing], [endless, nothing])
    found.record("attention", "mask", *both, reference="loops")
    assert found.found["attention"]["loops"]["mask"] == {"float32": entry(0, 2)}


REFUSED = [
    (
        ("attention", "backward"),
        "loops",
        1.0,
        "column must be one of forward, gradient",
    ),
    (("attention", "backward"), "loops", 1.0, "got 'backward'"),
    (("no_name", "mask"), "loops", 1.0, "component must be a public name, got 'no_nam"),
    (("attention", "mask"), "tensorfoo.f", 1.0, "reference names no installed package"),
    (("attention", "mask"), "loops", torch.nan, "error must be finite, got error=nan"),
]


@pytest.mark.parametrize("where, reference, value, message", REFUSED)
def test_unknown_name_is_refused_in_one_line(where, reference, value, message):
    both = (torch.full((2,), value), torch.ones(2))
    with pytest.raises(ValueError, match=message) as caught:
        Conformance().record(*where, *both, reference=reference)
    assert "\n" not in str(caught.value)


def test_half_precision_has_a_column_of_its_own(conform):
    x = torch.ones(2).bfloat16()
    found = "half precision goes in column 'dtype', got torch.bfloat16 in column 'mask'"
    with pytest.raises(ValueError, match=found):
        conform("attention", "mask", x, x, reference="loops", atol=0)
    found = Conformance()
    found.record("attention", "dtype", x, x.double(), reference="loops")
    assert found.found["attention"]["loops"]["dtype"] == {"bfloat16": entry(0)}


def test_more_results_than_references_are_refused(conform):
    x = torch.ones(2)
    with pytest.raises(ValueError, match="must be as many, got 2 and 1"):
        conform("attention", "mask", [x, x], [x], reference="loops", atol=0)


def test_comparison_fails_as_assert_close_does(conform):
    x = torch.ones(2)
    how = {"reference": "loops", "atol": 0.5}
    with pytest.raises(AssertionError, match="not close"):
        conform("attention", "mask", x + 1, x, **how)
    with pytest.raises(AssertionError, match="not close"):
        conform("attention", "mask", x + 1, x.double(), **how)
    with pytest.raises(AssertionError, match="dtype"):
        conform("attention", "mask", x.double(), x, **how)


SMALL = """
import pytest
import torch
from transformer.attention import causal_mask


@pytest.mark.parametrize("i", range(8))
def test_small(conform, i):
    x = torch.zeros(2)
    assert causal_mask(2).shape == (2, 2)
    conform("attention", "mask", x + i / 8, x, reference="loops", atol=1)
    conform("attention", "mask", x.double(), x.double(), reference="loops", atol=1)
"""


def run_small(folder: Path, text: str, *options: str) -> tuple[int, Path]:
    """Run a small test with the fixture; its status, and the file that it may write."""
    (folder / "conftest.py").write_text(
        (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8"
    )
    (folder / "test_small.py").write_text(text, encoding="utf-8")
    out = folder / "out.json"
    command = [sys.executable, "-m", "pytest", f"--rootdir={folder}", "-c/dev/null"]
    command += ["-q", f"-opythonpath={ROOT / 'tools'}", "-pno:cacheprovider"]
    command += [f"--measured={out}", *options, str(folder / "test_small.py")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, out


def test_workers_together_find_what_one_process_finds(tmp_path):
    found = []
    for options in (("-pno:xdist",), ("-n2", "--dist=load")):
        status, out = run_small(tmp_path, SMALL, *options)
        assert status == 0
        found.append(measured.read(out))
        out.unlink()
    mask = {"float32": entry(7 / 8, 8), "float64": entry(0, 8)}
    assert [one["components"] for one in found] == (
        [{"attention": {"loops": {"mask": mask}}}] * 2
    )
    for one in found:
        part = one["coverage"]["attention"]
        assert 0 < part["covered"] < part["statements"]  # its import, and one function
        assert one["coverage"]["plots"]["covered"] == 0
    assert found[0]["coverage"] == found[1]["coverage"]


def test_failed_tests_leave_nothing_to_accept(tmp_path):
    failing = SMALL + "\n\ndef test_red():\n    assert False\n"
    status, out = run_small(tmp_path, failing, "-pno:xdist")
    assert status == 1 and not out.exists()


# --- comparing --------------------------------------------------------------------


FACTS = {"device": "a machine", "cores": 2, "date": "2026-01-01"}
FACTS |= {"python": "3.12.1", "torch": "2.9.0"}
TESTS = {
    "facts": FACTS,
    "components": {
        "attention": {
            "torch.nn.GELU, torch 2.9.0": {
                "forward": {"float64": entry(2e-12, 3), "float32": entry(1e-5, 1200)}
            },
            "itself, all at once": {"cached": {"float32": entry(0.0)}},
            "itself uncompiled": {"compile": {"float32": entry(0.5)}},
        },
        "MultiHeadAttention": {
            "loops & sums, twice": {
                "dtype": {"float16": entry(0.25), "bfloat16": entry(2)}
            }
        },
    },
    "coverage": {
        "attention": {"statements": 200, "covered": 199},
        "plots": {"statements": 100, "covered": 80},
    },
}
NOTEBOOKS = {
    "facts": FACTS,
    "notebooks": {
        "one": {"cells": 9, "compared": 4, "ignored": 1, "seconds": 40.0},
        "two": {"cells": 3, "compared": 1, "ignored": 0, "seconds": 5.0},
    },
}
COMPARE = {"tests": measured.compare_tests, "notebooks": measured.compare_notebooks}


def changed(found: dict, *path: str, to=None) -> dict:
    """A copy with another value at this place, or without what is there."""
    found = copy.deepcopy(found)
    *way, last = path
    place = found
    for name in way:
        place = place[name]
    if to is None:
        del place[last]
    else:
        place[last] = to
    return found


WAY = ("components", "attention", "torch.nn.GELU, torch 2.9.0", "forward")


@pytest.mark.parametrize(
    "path, value",
    [
        ((*WAY, "float64", "error"), 2.09e-11),  # tenfold and the floor
        ((*WAY, "float64", "error"), 0.0),
        ((*WAY, "float32", "error"), 1e-4),
        ((*WAY, "float32", "comparisons"), 7),
        (("facts", "date"), "2026-02-02"),
        (("facts", "device"), "another"),
        (("coverage", "plots", "covered"), 82),
        (("coverage", "plots", "covered"), 78),
        (("coverage", "plots"), {"statements": 50, "covered": 40}),
    ],
)
def test_what_differs_between_machines_is_let_pass(path, value):
    assert measured.compare_tests(TESTS, changed(TESTS, *path, to=value)) == []


def test_error_of_zero_may_become_noise():
    cached = ("components", "attention", "itself, all at once", "cached", "float32")
    assert measured.compare_tests(TESTS, changed(TESTS, *cached, to=entry(9e-7))) == []
    worse = measured.compare_tests(TESTS, changed(TESTS, *cached, to=entry(2e-6)))
    assert worse == [
        "comparison attention / itself, all at once / cached / float32 is off by "
        "2.0e-06, committed 0.0e+00"
    ]


@pytest.mark.parametrize(
    "path, value, message",
    [
        ((*WAY, "float64", "error"), 3e-11, "is off by 3.0e-11, committed 2.0e-12"),
        ((*WAY, "float32", "error"), 2e-4, "is off by 2.0e-04, committed 1.0e-05"),
        (("coverage", "plots", "covered"), 83, "plots is 83 %, committed 80 %"),
        (("coverage", "plots", "covered"), 77, "plots is 77 %, committed 80 %"),
    ],
)
def test_what_got_worse_is_named(path, value, message):
    (complaint,) = measured.compare_tests(TESTS, changed(TESTS, *path, to=value))
    assert complaint.endswith(message)


@pytest.mark.parametrize(
    "path, name",
    [
        (("components", "MultiHeadAttention"), "component MultiHeadAttention"),
        ((*WAY, "float64"), "comparison attention / torch.nn.GELU, torch / forward"),
        (WAY, "comparison attention / torch.nn.GELU, torch / forward / float32"),
        (("coverage", "plots"), "coverage of module plots"),
    ],
)
def test_new_and_lost_measurements_are_named(path, name):
    less = changed(TESTS, *path)
    lost, new = measured.compare_tests(TESTS, less), measured.compare_tests(less, TESTS)
    assert lost[0].startswith(name) and lost[0].endswith(
        "committed and was not measured"
    )
    assert new[0].startswith(name) and new[0].endswith("measured and is not committed")


def test_version_of_a_reference_is_held_but_torchs_follows_the_machine():
    other = json.loads(json.dumps(TESTS).replace("2.9.0", "2.10.1"))
    assert measured.compare_tests(TESTS, other) == []
    text = json.dumps(TESTS).replace("torch 2.9.0", "lib 5.1")
    old, new = json.loads(text), json.loads(text.replace("lib 5.1", "lib 5.2"))
    assert len(measured.compare_tests(old, new)) == 4  # two dtypes, gone and new


def test_run_times_may_differ_but_must_be_there():
    seconds = ("notebooks", "one", "seconds")
    for good in (9.0, 200.0, 210.0):
        fresh = changed(NOTEBOOKS, *seconds, to=good)
        assert measured.compare_notebooks(NOTEBOOKS, fresh) == []
    slow = changed(NOTEBOOKS, *seconds, to=300.0)
    for both in ((NOTEBOOKS, slow), (slow, NOTEBOOKS)):
        (complaint,) = measured.compare_notebooks(*both)
        assert complaint.startswith("notebook one took")
    for gone in (changed(NOTEBOOKS, *seconds), changed(NOTEBOOKS, *seconds, to=0.0)):
        for both in ((NOTEBOOKS, gone), (gone, NOTEBOOKS)):
            found = measured.compare_notebooks(*both)
            assert found == ["notebook one has no run time"]


@pytest.mark.parametrize("count", ["cells", "compared", "ignored"])
def test_other_counts_of_cells_are_named(count):
    fresh = changed(NOTEBOOKS, "notebooks", "one", count, to=77)
    (complaint,) = measured.compare_notebooks(NOTEBOOKS, fresh)
    assert complaint.startswith(f"notebook one: 77 {count}, committed ")


def test_new_and_lost_notebooks_are_named():
    less = changed(NOTEBOOKS, "notebooks", "two")
    lost = measured.compare_notebooks(NOTEBOOKS, less)
    assert lost == ["notebook two is committed and was not measured"]
    new = measured.compare_notebooks(less, NOTEBOOKS)
    assert new == ["notebook two was measured and is not committed"]


def leave(fresh: Path, **stages: dict) -> None:
    """Write what stages leave when they have passed."""
    for stage, found in stages.items():
        measured.write(measured.left(stage, fresh), found)


def split(tests: dict, component: str) -> dict[str, dict]:
    """What the unit stage leaves if the kernels measure one of the components."""
    kernels = {**tests, "components": {component: tests["components"][component]}}
    return {"unit": changed(tests, "components", component), "kernels": kernels}


STAGES = {**split(TESTS, "MultiHeadAttention"), "notebooks": NOTEBOOKS}


def test_each_complaint_names_the_command_that_accepts(tmp_path):
    fresh, committed = tmp_path / "fresh", tmp_path / "committed"
    leave(fresh, **STAGES)
    found = measured.compare(committed, fresh)
    assert len(found) == 2 and all("nothing is committed" in one for one in found)
    assert measured.accept(committed, fresh) == ["tests.json", "notebooks.json"]
    assert measured.compare(committed, fresh) == []
    assert measured.read(committed / "tests.json") == TESTS
    assert measured.read(committed / "notebooks.json") == NOTEBOOKS
    less = changed(TESTS, "components", "attention")
    measured.write(committed / "tests.json", less)
    (complaint,) = measured.compare(committed, fresh)
    assert complaint.endswith("; `make measured` accepts it") and "\n" not in complaint


MISSING = [
    (["unit"], "stage unit has not passed"),
    (["kernels"], "stage kernels has not passed"),
    (["notebooks"], "stage notebooks has not passed"),
    (["unit", "kernels"], "stages unit and kernels have not passed"),
]


@pytest.mark.parametrize("gone, words", MISSING)
@pytest.mark.parametrize("gpu", [False, True])
def test_stage_that_has_not_passed_is_named_and_nothing_accepted(
    tmp_path, monkeypatch, capsys, gone, words, gpu
):
    fresh, committed = tmp_path / "fresh", tmp_path / "committed"
    leave(fresh, **STAGES)
    assert measured.compare(committed, fresh) and (fresh / "tests.json").is_file()
    for stage in gone:
        measured.left(stage, fresh).unlink()
    if gpu:
        measured.write(fresh / measured.GPU, NOTEBOOKS)
    assert f"nothing fresh to compare: {words}" in measured.compare(committed, fresh)
    with pytest.raises(FileNotFoundError, match=f"^{words}$"):
        measured.accept(committed, fresh)
    assert not committed.exists()
    monkeypatch.setattr(measured.accept, "__defaults__", (committed, fresh))
    assert measured.main(["accept"]) == 1
    said = f"accepted: nothing, for {words}; run `make test` first\n"
    assert capsys.readouterr().out == said and not committed.exists()


def test_two_stages_add_to_one_component_and_one_module():
    unit = changed(TESTS, "coverage", "attention", "covered", to=150)
    found = measured.merged(unit, TESTS)
    gelu = found["components"]["attention"]["torch.nn.GELU, torch 2.9.0"]["forward"]
    assert gelu == {"float64": entry(2e-12, 6), "float32": entry(1e-5, 2400)}
    assert found["coverage"] == TESTS["coverage"] and found["facts"] == FACTS
    assert unit["coverage"]["attention"]["covered"] == 150


def test_run_times_on_a_gpu_are_accepted_where_nothing_else_has_run(tmp_path):
    fresh, committed = tmp_path / "fresh", tmp_path / "committed"
    measured.write(fresh / measured.GPU, NOTEBOOKS)
    assert measured.accept(committed, fresh) == [measured.GPU]
    leave(fresh, **STAGES)
    names = ["tests.json", "notebooks.json", measured.GPU]
    assert measured.accept(committed, fresh) == names


@pytest.mark.parametrize("stage", ["unit", "kernels"])
@pytest.mark.parametrize("red", ["", "ruff", "test_triton", "test_ahead", "--ignore"])
def test_red_stage_leaves_nothing_to_accept(tmp_path, monkeypatch, stage, red):
    monkeypatch.setattr(test_stages, "MEASURED", tmp_path)
    leave(tmp_path, **{stage: {}})

    def run(*command: str, **environment: str) -> bool:
        """Write what a run of the tests would; fail if it is the red one."""
        line = " ".join(command)
        good = not red or red not in line
        if "--measured=" in line:
            out = Path(line.partition("--measured=")[2])
            assert not out.exists(), "an interrupted stage would leave an older run's"
            measured.write(out, {}) if good else None
        return good

    monkeypatch.setattr(test_stages, "run", run)
    good = getattr(test_stages, stage)()
    reds = {"unit": ("ruff", "--ignore"), "kernels": ("test_triton", "test_ahead")}
    assert good == (red not in reds[stage])
    assert measured.left(stage, tmp_path).is_file() == good


# --- coverage ---------------------------------------------------------------------


def test_few_parameters_of_each_test_are_watched_evenly():
    many = [f"a.py::test_many[{i}]" for i in range(80)]
    few = ["a.py::test_few[x]", "a.py::test_few[y]", "b.py::test_one"]
    watched = sampled_coverage.chosen([*many, *few])
    assert watched == {*many[:: 80 // sampled_coverage.SAMPLE], *few}
    uneven = sampled_coverage.chosen(many[:11])
    assert len(uneven) == sampled_coverage.SAMPLE and many[0] in uneven


def test_statement_that_ran_in_any_process_is_covered():
    statements = {"norms": [1, 2, 3, 5], "flash": [1]}
    ran = [{"norms": [1, 2]}, {"norms": [2, 3, 4], "gone": [1]}, {}]
    assert sampled_coverage.share(statements, ran) == {
        "norms": {"statements": 4, "covered": 3},
        "flash": {"statements": 1, "covered": 0},
    }


# --- gathering --------------------------------------------------------------------


def test_notebooks_of_a_run_are_put_together(tmp_path):
    for name, one in NOTEBOOKS["notebooks"].items():
        measured.write(tmp_path / "nb" / f"{name}.json", one | {"facts": FACTS})
    measured.gather_notebooks(tmp_path / "nb", tmp_path / "notebooks.json")
    assert measured.read(tmp_path / "notebooks.json") == NOTEBOOKS


def test_run_times_on_a_gpu_carry_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(test_gpu, "TIMES", tmp_path / "gpu")
    monkeypatch.setattr(measured, "FRESH", tmp_path)
    test_gpu.run_times("a fast card")
    assert not (tmp_path / measured.GPU).exists()
    for name, one in NOTEBOOKS["notebooks"].items():
        measured.write(tmp_path / "gpu" / f"{name}.json", one | {"facts": FACTS})
    test_gpu.run_times("a fast card")
    found = measured.read(tmp_path / measured.GPU)
    assert found["notebooks"] == NOTEBOOKS["notebooks"]
    assert found["facts"]["device"] == "a fast card" and "cores" not in found["facts"]


# --- showing ----------------------------------------------------------------------


@pytest.fixture
def book(tmp_path):
    """A small book with two notebooks, two modules and what was measured of them."""
    for name, module in (("one", "attention"), ("two", "plots"), ("three", None)):
        cells = [words(f"# Title & {name}\n\n> A line.", "title")]
        cells += [code(f"#| default_exp {module}", "module")] if module else []
        write_notebook(notebook(*cells), tmp_path / "chapters" / f"{name}.ipynb")
    files = ("chapters/one", "chapters/two", "chapters/three", "api/plots")
    lines = [f"  - file: {file}\n" for file in (*files, "api/attention")]
    (tmp_path / "_toc.yml").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "transformer").mkdir()
    exports = {"attention": ["attention", "fold", "MultiHeadAttention"], "plots": ["p"]}
    for name, names in exports.items():
        text = f"__all__ = {names}\n"
        path = tmp_path / "transformer" / f"{name}.py"
        path.write_text(text, encoding="utf-8")
    measured.write(tmp_path / "site" / "measured" / "tests.json", TESTS)
    measured.write(tmp_path / "site" / "measured" / "notebooks.json", NOTEBOOKS)
    return tmp_path


def link(page: str) -> str:
    """The address of a page, seen from the root."""
    return f"{page}.html"


def rows(soup: BeautifulSoup) -> list[list[str]]:
    """The texts of a table, row by row."""
    found = [row.find_all(["th", "td"]) for row in soup.find_all("tr")]
    return [[cell.get_text(" ", strip=True) for cell in row] for row in found]


def test_status_shows_what_was_measured(book):
    text = measured_pages.status(book, link)
    assert "CPU: a machine, 2 cores; 2026-01-01; Python 3.12.1, torch 2.9.0" in text
    assert "GPU: not measured here" in text
    found = rows(BeautifulSoup(text, "html.parser"))[1:]
    assert found == [
        ["Title & one", "5 min", "40 s", "–", "4", "1", "99 %"],
        ["Title & two", "5 min", "5 s", "–", "1", "0", "80 %"],
        ["Title & three", "5 min", "–", "–", "–", "–", "–"],
        ["all 3", "15 min", "45 s", "–", "5", "1", "93 %"],
    ]


def test_status_shows_times_on_a_gpu_with_its_name(book):
    facts = {**FACTS, "device": "a fast card"}
    del facts["cores"]
    on_gpu = {"facts": facts, "notebooks": {"one": {"seconds": 71.6}}}
    measured.write(book / "site" / "measured" / "notebooks.cuda.json", on_gpu)
    text = measured_pages.status(book, link)
    assert "GPU: a fast card; 2026-01-01; Python 3.12.1, torch 2.9.0" in text
    found = rows(BeautifulSoup(text, "html.parser"))
    assert [row[3] for row in found[1:]] == ["1 min 12 s", "–", "–", "1 min 12 s"]


def shown(text: str) -> dict:
    """What the tables of the conformance page say, as the JSON has it."""
    found, columns = {}, list(COLUMNS)
    for body in BeautifulSoup(text, "html.parser").find_all("tbody"):
        name = body.find("code").get_text()
        for row in body.find_all("tr")[1:]:
            head, *cells = row.find_all(["th", "td"])
            assert len(cells) == len(columns)
            for column, cell in zip(columns, cells, strict=True):
                parts = cell.get_text(" ", strip=True).split()
                if parts != ["–"]:
                    errors = dict(zip(parts[1::2], map(float, parts[::2]), strict=True))
                    found.setdefault((name, head.get_text()), {})[column] = errors
    return found


def test_conformance_shows_each_error_with_its_reference(book):
    text = measured_pages.conformance(book, link)
    assert shown(text) == {
        ("attention", "torch.nn.GELU, torch 2.9.0"): {
            "forward": {"float64": 2e-12, "float32": 1e-5}
        },
        ("attention", "itself: all at once; uncompiled"): {
            "cached": {"float32": 0.0},
            "compile": {"float32": 0.5},
        },
        ("MultiHeadAttention", "loops & sums, twice"): {
            "dtype": {"float16": 0.25, "bfloat16": 2.0}
        },
    }
    assert "2 components, 1,207 comparisons. a machine, 2 cores; 2026-01-01" in text
    assert "## `transformer.attention`" in text and "transformer.plots" not in text
    assert "No error is recorded for `fold`." in text
    names = [a["href"] for a in BeautifulSoup(text, "html.parser").find_all("a")]
    anchor = "api/attention.html#transformer.attention."
    assert names == [anchor + "attention", anchor + "MultiHeadAttention"]


@pytest.mark.parametrize("page", ["status", "conformance"])
def test_tables_can_be_read_out_and_reached_by_keyboard(book, page):
    text = getattr(measured_pages, page)(book, link)
    soup = BeautifulSoup(text, "html.parser")
    assert soup.find("table")
    for table in soup.find_all("table"):
        assert table.caption.get_text() and table.parent["tabindex"] == "0"
        assert table.parent["role"] == "region" and table.parent["aria-label"]
        heads = table.thead.find_all("th")
        assert {head["scope"] for head in heads} == {"col"}
        for row in table.find_all("tr")[1:]:
            head, *cells = row.find_all(["th", "td"])
            assert head.name == "th" and head["scope"] in ("row", "rowgroup")
            named = [cell["data-column"] for cell in cells]
            assert named == [h.get_text() for h in heads[int(head.get("colspan", 1)) :]]


@pytest.mark.parametrize("page", ["status", "conformance"])
def test_page_without_measurements_says_how_to_get_them(tmp_path, page):
    text = getattr(measured_pages, page)(tmp_path, link)
    assert "`make test` measures, `make measured` accepts" in text


def test_columns_are_those_of_the_fixture():
    assert tuple(measured_pages.COLUMNS) == COLUMNS
    page = (ROOT / "conformance.md").read_text(encoding="utf-8")
    for head in measured_pages.COLUMNS.values():
        assert f"\n{head}\n: " in page


def test_counts_of_cells_are_those_that_nbval_compares(tmp_path):
    import check_notebook

    path = tmp_path / "small.ipynb"
    cells = [code("x = 1", "a"), code("print(x)", "b", prints="1\n")]
    cells += [code("time()", "c", "nbval-ignore-output", prints="0.1\n")]
    found = check_notebook.counts(write_notebook(notebook(*cells), path))
    assert found == {"cells": 3, "compared": 1, "ignored": 1}


# --- faults that others reported ----------------------------------------------------


CASES = json.loads((ROOT / "site" / "cases.json").read_text(encoding="utf-8"))


def test_each_reported_fault_is_listed_once_with_a_title_of_its_own():
    assert [case["case"] for case in CASES] == [*range(1, 50), 51, 52]
    titles = [case["title"] for case in CASES]
    assert len(set(titles)) == len(titles) and all(len(t) < 60 for t in titles)


def test_each_reported_fault_has_a_test_that_is_collected_and_bears_its_number():
    wanted = [case["test"] for case in CASES]
    files = sorted({test.partition("::")[0] for test in wanted})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-k", "case"]
    known = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, *files], cwd=ROOT, env=known, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    collected = {line.partition("[")[0] for line in done.stdout.splitlines()}
    assert [test for test in wanted if test not in collected] == []
    numbers = [int(re.search(r"::test_case_(\d\d)_", test)[1]) for test in wanted]
    assert numbers == [case["case"] for case in CASES]


def test_cases_are_shown_with_links_to_their_tests(book):
    shown = [{"case": 7, "title": "One & all", "test": "tests/test_x.py::test_case_07"}]
    measured.write(book / "site" / "cases.json", shown)
    config = "repository: {url: https://host/owner/name, branch: trunk}\n"
    (book / "_config.yml").write_text(config, encoding="utf-8")
    found = BeautifulSoup(measured_pages.cases(book, link), "html.parser")
    assert rows(found)[1:] == [["One & all", "7", "test_ case_ 07"]]
    address = "https://host/owner/name/blob/trunk/tests/test_x.py"
    assert [a["href"] for a in found.find_all("a")] == [address]
