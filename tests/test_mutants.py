"""What `make mutants` found, how it is kept and shown, and the reasons of survivors."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import json
import sys

import mutant_runs
import mutants
import mutate
import pytest
from bs4 import BeautifulSoup
from small_notebooks import ROOT

FOUND = {path.stem: path for path in mutants.FOUND.glob("*.json")}
LEAST = 85  # percent that must be killed, timeouts apart


def read(module: str) -> dict:
    """What is committed of a module."""
    return json.loads(FOUND[module].read_text(encoding="utf-8"))


# --- what is committed ------------------------------------------------------------


def test_every_module_of_the_core_is_counted():
    assert set(FOUND) == set(mutants.CORE)


@pytest.mark.parametrize("module", FOUND)
def test_most_mutants_that_ran_are_killed(module):
    found = read(module)
    killed = len(mutants.unpacked(found["killed"]))
    others = len(found["survived"]) + len(found.get("later", []))
    assert 100 * killed >= LEAST * (killed + others)


def test_survivors_have_reasons_and_reasons_survivors():
    found = {module: read(module) for module in FOUND}
    assert mutants.complaints(found, mutants.reasons()) == []


@pytest.mark.parametrize("module", mutants.CORE)
def test_every_module_has_tests_of_its_own(module):
    names = {path.name for path in mutants.test_files(module)}
    assert f"test_{module}.py" in names or "test_attention_contract.py" in names


# --- how it is kept --------------------------------------------------------------


def test_killed_mutants_are_packed_by_test_and_come_back():
    killed = {"RoPE.at 3": "a[x; y]", "RoPE.at 12": "a[x; y]", "yarn 1": "a[x; y]"}
    killed["RoPE.at 4"] = "b"
    packed = mutants.packed(killed)
    assert packed == {"a[x; y]": "RoPE.at 3 12; yarn 1", "b": "RoPE.at 4"}
    assert mutants.unpacked(packed) == killed


def test_survivor_needs_its_reason_and_reason_its_survivor():
    change = {"was": "a + 1", "now": "a - 1"}
    found = {"norms": {"survived": {"f 1": change}}}
    reason = {"function": "f", **change, "because": "a is 0"}
    assert mutants.complaints(found, {"norms": [reason]}) == []
    (missing,) = mutants.complaints(found, {})
    assert missing.startswith("norms: no reason for ('f',")
    (spare,) = mutants.complaints({"norms": {"survived": {}}}, {"norms": [reason]})
    assert spare.startswith("norms: no survivor ('f',")


FILES = ("transformer/norms.py", "tests/test_norms.py", "tests/test_norms_cases.py")
HERE, THERE = (f"{name}::test_a[1 ; 2]" for name in FILES[1:])  # tests that killed


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store of a module with two files of tests, in an empty folder."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1", encoding="utf-8")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "FOUND", tmp_path / "found")
    monkeypatch.setattr(mutants, "facts", dict)
    monkeypatch.setattr(mutants.importlib.metadata, "version", lambda name: "0")
    found = mutants.Store("norms")
    found.mutants = 5
    found.add("f 1", "killed", HERE, {})
    found.add("f 2", "killed", THERE, {})
    found.add("f 3", "survived", "", {"was": "1", "now": "2"})
    found.add("f 4", "timeout", "", {})
    return found


def test_stopped_run_goes_on_where_it_was(store):
    again = mutants.Store("norms")
    assert again.done() == {f"f {i}" for i in range(1, 5)}
    words = "4 of 5 mutants: 2 killed, 1 timeouts, 1 survived, 66.7 %"
    assert again.words() == store.words() == words


def test_survivor_that_is_tried_again_is_counted_once(store):
    store.add("f 5", "early", "", {})
    assert mutants.Store("norms").early == ["f 5"]
    store.add("f 5", "killed", HERE, {})
    again = mutants.Store("norms")
    assert again.early == [] and again.killed["f 5"] == HERE


def test_mutant_that_is_left_for_later_counts_as_a_survivor_until_then(store):
    store.add("f 5", "later", "", {})
    again = mutants.Store("norms")
    assert again.later == ["f 5"] and "f 5" not in again.done()
    assert again.words().startswith("5 of 5 mutants: 2 killed, 1 timeouts, 2 survived")
    again.add("f 5", "killed", HERE, {})
    assert mutants.Store("norms").later == []


def test_changed_module_runs_again_with_what_killed_before(store):
    (mutants.ROOT / FILES[0]).write_text("2", encoding="utf-8")
    again = mutants.Store("norms")
    assert again.done() == set() and again.before == {"f 1": HERE, "f 2": THERE}


def test_changed_tests_run_again_with_what_they_killed_and_what_none_did(store):
    (mutants.ROOT / FILES[1]).write_text("2", encoding="utf-8")
    again = mutants.Store("norms")
    assert again.done() == {"f 2"} and again.before == {"f 1": HERE, "f 2": THERE}
    assert again.passed == {"f 3": [FILES[2]]}  # the tests of which are as they were
    again.add("f 5", "timeout", "", {})  # and is stopped
    again = mutants.Store("norms")
    assert again.done() == {"f 2", "f 5"} and again.before["f 1"] == HERE
    assert again.passed == {"f 3": [FILES[2]]}


# --- how mutants are made and run ---------------------------------------------------


def test_decorators_are_taken_off_and_put_back():
    source = (
        "@functools.cache\ndef f():\n    return []\n\n"
        "class A:\n    @property\n    def p(self):\n        return 1\n\n"
        "    @staticmethod\n    @contextlib.contextmanager\n    def m():\n"
        "        yield 2\n\n    @staticmethod\n    def s():\n        return 3\n"
    )
    plain, again = mutate.bare(source)
    kept = [
        ast.unparse(one)
        for _, function in mutate.functions(ast.parse(plain))
        for one in function.decorator_list
    ]
    assert kept == ["staticmethod", "staticmethod"]
    names = {"functools": functools, "contextlib": contextlib}
    exec("\n".join([plain, *again]), names)
    a = names["A"]()
    assert names["f"]() is names["f"]() and a.p == 1 and a.s() == 3
    with a.m() as found:
        assert found == 2


def test_names_of_mutants_are_those_of_functions():
    assert mutate.plain_name("xǁRoPEǁat__mutmut_3") == "RoPE.at 3"
    assert mutate.plain_name("x_attention__mutmut_12") == "attention 12"


class Item:
    """As much of a test as is asked for."""

    def __init__(self, nodeid: str):
        self.nodeid = nodeid


def test_cases_of_a_test_stay_together_in_an_order_that_stays():
    items = [Item(f"a[{i}]") for i in range(50)] + [Item("b"), Item("c[0]")]
    found = [item.nodeid for item in mutant_runs.shuffled(items)]
    assert found == [item.nodeid for item in mutant_runs.shuffled(items)]
    given = [item.nodeid for item in items]
    assert found != given and sorted(found[:50]) == sorted(given[:50])
    assert found[50:] == given[50:]


def test_bad_values_are_those_of_the_module_and_each_argument_is_a_test(monkeypatch):
    monkeypatch.setenv("MUTATED_MODULE", "transformer.norms")
    table = f"{mutant_runs.BAD_VALUES}::test_bad_value_is_refused"
    rows = ("norms.RMSNorm-eps-0", "norms.RMSNorm-eps-1", "norms.RMSNorm-width-0")
    mine = ["tests/test_norms.py::test_a[1]", *(f"{table}[{row}]" for row in rows)]
    others = (f"{table}[{row}]" for row in ("flash.rows-n-0", "flash.norms.f-n-0"))
    items = [Item(name) for name in (*mine, *others)]
    mutant_runs.Rows().pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == mine
    assert len({mutant_runs.test_of(name) for name in mine}) == 3


def test_one_case_of_each_test_comes_first_and_what_killed_before_them():
    session = mutant_runs.Session({}, {}, print, ROOT)
    session.seconds = {"a[0]": 3.0, "a[1]": 1.0, "b": 2.0, "c": 9.0}
    session.seconds |= {f"d[{i}]": 0.5 for i in range(5)} | {"d[5]": 20.0}
    session.items = dict.fromkeys(session.seconds)
    found = session.order(session.items, ["gone", "c"])
    rest = ["d[1]", "d[2]", "d[3]", "d[4]", "a[0]"]  # at 1, 1.5, 2, 2.5, 4 s of each
    assert found == ["c", "d[0]", "a[1]", "b", *rest]


# --- how it is shown ----------------------------------------------------------------


@pytest.fixture
def pages():
    """The extension that makes the tables."""
    pytest.importorskip("myst_nb", reason="what builds the book is not installed")
    sys.path.insert(0, str(ROOT / "site"))
    return importlib.import_module("measured_pages")


COUNTED = {
    "facts": {"device": "CPU", "cores": 2, "date": "2026-11-30", "mutmut": "3.8.1"}
    | {"python": "3.11.7", "torch": "2.13.0"},
    "source": hashlib.sha256(b"").hexdigest()[:16],
    "mutants": 9,
    "killed": {"a": "f 1 2; g 1", "b": "A.m 7"},
    "timeout": ["f 3"],
    "survived": {"f 4": {"was": "a < 1", "now": "a <= 1"}},
}


def test_table_counts_mutants_and_lists_survivors(pages, tmp_path):
    folder = tmp_path / "site" / "measured" / "mutants"
    folder.mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "_toc.yml").write_text("- file: api/norms\n", encoding="utf-8")
    (folder / "norms.json").write_text(json.dumps(COUNTED), encoding="utf-8")
    source = tmp_path / "transformer" / "norms.py"
    source.parent.mkdir()
    source.touch()
    reason = '[[norms]]\nfunction = "f"\nwas = "a < 1"\nnow = "a <= 1"\n'
    text = reason + 'because = "a is never 1"\n'
    (tmp_path / "tests" / "survivors.toml").write_text(text, encoding="utf-8")
    page = BeautifulSoup(pages.mutants(tmp_path, str), "html.parser")
    rows = [[cell.text for cell in row.select("th, td")] for row in page.select("tr")]
    assert rows[1] == ["norms", "9", "6", "4", "1", "1", "80.0 %"]
    assert rows[2] == ["all", *rows[1][1:]]
    assert page.select_one("details li").text == "f: a < 1 → a <= 1. a is never 1"
    assert "2026-11-30; Python 3.11.7, torch 2.13.0, mutmut 3.8.1.\n" in page.text
    source.write_text("1", encoding="utf-8")
    text = pages.mutants(tmp_path, str)
    assert "mutmut 3.8.1. Changed since they ran: <code>norms</code>.\n" in text


def test_nothing_measured_is_said(pages, tmp_path):
    assert "make mutants" in pages.mutants(tmp_path, str)
