"""Recorded results: each fault under them is caught, and nothing else is."""

import ast
import importlib.util
import itertools
import json
import re
import sys
from pathlib import Path

import experiments as tool
import pytest
from small_notebooks import code, notebook, words, write

from transformer import records

CHAPTERS = Path(__file__).parents[1] / "chapters"
DEPENDENCY = "def attention(x):\n    return x / 2\n"
EXPERIMENT = '''
"""An experiment that calls a function beside it and one from elsewhere."""

from transformer.records import recorded
from {dependency} import attention


def halve(x):
    return attention(x)


class Model:
    """Not a function, and hashed all the same."""

    @staticmethod
    def plus(x):
        return x + 1

    @property
    def three(self):
        return 3


@recorded("run", full={{"n": 4}}, probe={{"n": 1}})
def run(n):
    """The result of n steps."""
    model = Model()
    values = [halve(model.plus(i) * model.three) for i in range(n)]
    return {{"values": values, "n": n, "word": "ok"}}
'''
COUNT = itertools.count()


def load(folder, text):
    """Import a text as a module of its own."""
    name = f"laboratory_{next(COUNT)}"
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Laboratory:
    """A repository of one experiment, one dependency and one folder of results."""

    def __init__(self, folder):
        self.folder = folder
        self.results = folder / "transformer" / "results"
        self.results.mkdir(parents=True)
        (folder / "pyproject.toml").touch()
        self.dependency = load(folder, DEPENDENCY)
        self.text = EXPERIMENT.format(dependency=self.dependency.__name__)
        self.file = self.results / "run.json"

    def load(self, *changes):
        """The experiment, with changes to its text: old, new, old, new ..."""
        text = self.text
        for old, new in zip(changes[::2], changes[1::2], strict=True):
            assert old in text
            text = text.replace(old, new)
        return load(self.folder, text)


@pytest.fixture
def lab(tmp_path, monkeypatch):
    lab = Laboratory(tmp_path)
    monkeypatch.setattr(records, "_results_folder", lambda: lab.results)
    monkeypatch.setenv("RECORDED", "run")
    lab.load().run()
    monkeypatch.delenv("RECORDED")
    monkeypatch.delenv("RECORDED_DEVICE", raising=False)
    return lab


# --- what is stored ----------------------------------------------------------------


def test_call_returns_what_was_stored_and_runs_nothing(lab, monkeypatch):
    module = lab.load()
    monkeypatch.setattr(module.run, "function", module.run.function)
    monkeypatch.setattr(lab.dependency, "attention", None)
    values = [1.5, 3.0, 4.5, 6.0]
    assert module.run() == {"values": values, "n": 4, "word": "ok"}


def test_record_says_where_the_number_comes_from(lab):
    record = lab.load().run.record()
    assert set(record) == {
        "name",
        "hash",
        "device",
        "versions",
        "date",
        "arguments",
        "seconds",
        "result",
        "probe",
    }
    assert record["arguments"] == {"n": 4}
    assert record["probe"]["result"]["values"] == [1.5]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
    assert set(record["versions"]) == {"python", "torch"}
    assert record["device"]


def test_fresh_result_is_not_measured_again(lab, monkeypatch):
    before = lab.file.stat().st_mtime_ns
    monkeypatch.setenv("RECORDED", "run")
    lab.load().run()
    assert lab.file.stat().st_mtime_ns == before


def test_experiment_can_still_be_run_with_any_arguments(lab):
    assert lab.load().run.function(n=2)["values"] == [1.5, 3.0]


# --- the digest --------------------------------------------------------------------


@pytest.mark.parametrize(
    "old, new", [("1.5", "1.6"), ('"n": 4', '"n": 5'), ("ok", "no"), ("date", "day")]
)
def test_edited_file_is_refused(lab, old, new):
    text = lab.file.read_text(encoding="utf-8")
    assert old in text
    lab.file.write_text(text.replace(old, new), encoding="utf-8")
    message = (
        r"run\.json was edited \(its digest does not fit\): run `make experiments`$"
    )
    with pytest.raises(RuntimeError, match=message):
        lab.load().run()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "7", '{"digest": NaN'])
def test_broken_file_is_refused(lab, text):
    lab.file.write_text(text, encoding="utf-8")
    with pytest.raises(RuntimeError, match="not a whole JSON file: run `make exp"):
        lab.load().run()


def test_missing_file_is_refused(lab):
    lab.file.unlink()
    with pytest.raises(RuntimeError, match=r"run\.json is missing: run `make exp"):
        lab.load().run()


def test_layout_of_the_file_does_not_matter(lab):
    record = json.loads(lab.file.read_text(encoding="utf-8"))
    lab.file.write_text(json.dumps(dict(reversed(record.items()))), encoding="utf-8")
    assert lab.load().run()["n"] == 4


# --- the hash ----------------------------------------------------------------------

CHANGES = {
    "the experiment": ("range(n)", "range(n + 1)"),
    "a function beside it": ("return attention(x)", "return attention(x) + 0"),
    "a method": ("return x + 1", "return x + 2"),
    "a property": ("return 3", "return 4"),
    "the full run": ('full={"n": 4}', 'full={"n": 5}'),
    "the probe": ('probe={"n": 1}', 'probe={"n": 2}'),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_experiment_is_stale(lab, change):
    message = r"run\.json is stale \(its experiment has changed\): run `make exper"
    with pytest.raises(RuntimeError, match=message):
        lab.load(*change).run()


HARMLESS = {
    "a docstring": ("The result of n steps.", "What comes out."),
    "a docstring of a class": ("Not a function, and hashed all the same.", "A class."),
    "a comment": ("return x + 1", "return x + 1  # one more"),
    "a line break": ("return attention(x)", "return attention(\n        x\n    )"),
    "a function that is not called": (
        "class Model",
        "def other(): pass\n\nclass Model",
    ),
    "a check": (
        *("class Model", "def check_x(x): assert x\n\nclass Model"),
        *("return attention", "check_x(x)\n    return attention"),
    ),
    "a check in a method": ("return x + 1", "check_x(x)\n        return x + 1"),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_new_layout_or_check_is_not_stale(lab, change):
    assert lab.load(*change).run()["n"] == 4


def test_stale_result_is_measured_again(lab, monkeypatch):
    monkeypatch.setenv("RECORDED", "run:run")
    assert lab.load(*CHANGES["a method"]).run()["values"][0] == 3.0


def test_other_name_is_not_measured(lab, monkeypatch):
    monkeypatch.setenv("RECORDED", "run:other")
    with pytest.raises(RuntimeError, match="is stale"):
        lab.load(*CHANGES["a method"]).run()


@pytest.mark.parametrize(
    "change, name",
    [
        (
            (
                "class Model",
                "RATES = [1, 2]\n\n\nclass Model",
                "n)]",
                "n + len(RATES))]",
            ),
            "RATES",
        ),
        (
            (
                "class Model",
                "double = lambda x: 2 * x\n\n\nclass Model",
                "plus(i)",
                "plus(double(i))",
            ),
            "double",
        ),
        (
            ("class Model", "third = halve\n\n\nclass Model", "[halve(", "[third("),
            "third",
        ),
    ],
)
def test_what_the_hash_cannot_see_is_refused(lab, change, name):
    with pytest.raises(ValueError, match=f"run uses the global {name}, which its hash"):
        lab.load(*change).run()


@pytest.mark.parametrize(
    "member",
    [
        "@property\n    def only(self):\n        return 1",
        "@classmethod\n    def only(cls):\n        return 1",
        "@functools.cached_property\n    def only(self):\n        return 1",
    ],
)
def test_class_of_one_wrapped_method_is_seen(lab, member):
    text = f"import functools\n\n\nclass Odd:\n    {member}\n\n\nclass Model"
    change = ("class Model", text, "model = Model()", "model, odd = Model(), Odd()")
    before, after = lab.load(*change), lab.load(*change, "return 1", "return 2")
    hashes = {
        records.experiment_hash("run", records._live_find(module.run.function))
        for module in (before, after)
    }
    assert len(hashes) == 2


def test_class_of_fields_is_no_obstacle(lab):
    fields = "class Fields(NamedTuple):\n    a: int\n\n\nclass Model"
    change = ("class Model", fields, "model = Model()", "model = Model(); Fields(1)")
    module = lab.load(
        *change, "from transformer", "from typing import NamedTuple\n\nfrom transformer"
    )
    with pytest.raises(RuntimeError, match="is stale"):
        module.run()


# --- what can only refuse ----------------------------------------------------------

STEP = """
def run(n, items):
    {line}
    return half(n)
def half(n):
    return n / 2
{beside}
"""


def hash_of(line="", beside=""):
    """The hash of `run` with one more statement, beside other definitions."""
    nodes = ast.parse(STEP.format(line=line or "pass", beside=beside)).body
    return records.experiment_hash("run", {n.name: n for n in nodes}.get)


CHECK = "def check_n(n):\n    if n < 1: raise ValueError(n)"
REFUSALS = (
    "check_n(n)",
    "check_n(n, least=len(items), kind=type(n))",
    "check_kinds(run, locals())",
    "if n < 1: raise ValueError(f'n must be from 1, got {n=}')",
    "if not isinstance(n, int) or n.dim() != 2: raise TypeError(str(items.pop()))",
    "if n < 1: found = items[0]; raise ValueError(found)",
    "if n is not None: check_n(n)",
    "if n is not None:\n        if n < 1: raise ValueError(n)",
)


@pytest.mark.parametrize("line", REFUSALS)
def test_statement_that_can_only_refuse_leaves_the_hash(line):
    assert hash_of(line) == hash_of(line, CHECK) == hash_of()
    assert hash_of(f"for i in items: n = i; {line}" if line[:2] != "if" else line)


def test_rule_of_a_check_is_no_part_of_the_hash():
    other = CHECK.replace("1", "2")
    assert hash_of("check_n(n)", CHECK) == hash_of("check_n(n)", other)


ACTS = (
    "check_n(n := 3)",
    "if (n := 3) < 1: raise ValueError(n)",
    "if (m := n) < 1: raise ValueError(m)",
    "if items.pop() < 1: raise ValueError(n)",
    "check_n(items.pop())",
    "check_n(next(items))",
    "check_n(*items)",
    "if any(i < 1 for i in items): raise ValueError(items)",
    "if [i for i in items]: raise ValueError(items)",
    "if half(n) < 1: raise ValueError(n)",
    "if (yield n): raise ValueError(n)",
)


@pytest.mark.parametrize("line", ACTS)
def test_check_that_may_change_something_moves_the_hash(line):
    assert hash_of(line) != hash_of()


OTHERS = (
    "n = check_n(n)",
    "n.check_n()",
    "half(n)",
    "assert n > 0",
    "if n < 1: raise StopIteration(n)",
    "if n < 1: raise KeyError(n)",
    "if n < 1: raise ValueError",
    "if n < 1: n = 1",
    "if n < 1: n += 1; raise ValueError(n)",
    "if n < 1: items[0] = 1; raise ValueError(n)",
    "if n < 1: items.pop(); raise ValueError(n)",
    "if n < 1: raise ValueError(n)\n    else: n = 1",
    "if n < 1: check_n(n); n = 1",
    "while n < 1: raise ValueError(n)",
    "check_n = items.pop; check_n(n)",
    "len = items.pop\n    if len(n): raise ValueError(n)",
)


@pytest.mark.parametrize("line", OTHERS)
def test_what_is_no_plain_refusal_moves_the_hash(line):
    assert hash_of(line) != hash_of()


@pytest.mark.parametrize("name", ["check_n", "type"])
def test_argument_with_the_name_of_a_check_is_followed(name):
    text = "def run(n, {name}):\n    {line}\n    return n"
    hashes = {
        records.experiment_hash("run", {"run": ast.parse(filled).body[0]}.get)
        for line in ("pass", "check_n(type(n))")
        if (filled := text.format(name=name, line=line))
    }
    assert len(hashes) == 2


def test_value_of_a_check_is_followed():
    line, check = "return check_n(n)", "def check_n(n): return n > 1"
    assert hash_of(line, check) != hash_of(line, check.replace("1", "2"))


CATCHERS = (
    "try:\n        half(n)\n    except ValueError:\n        n = 0",
    "try:\n        half(n)\n    except* ValueError:\n        n = 0",
    "with suppress(ValueError): half(n)",
    "with contextlib.suppress(ValueError): half(n)",
    "with pytest.raises(ValueError): half(n)",
    "with TestCase().assertRaises(ValueError): half(n)",
)


@pytest.mark.parametrize("line", CATCHERS)
def test_checks_are_followed_where_something_catches_errors(line):
    assert hash_of(f"{line}\n    check_n(n)") != hash_of(line)
    called = f"{line}\n    check_n(n)"
    assert hash_of(called, CHECK) != hash_of(called, CHECK.replace("1", "2"))


def test_manager_of_the_notebook_may_catch_errors():
    quiet = "class Quiet:\n    def __exit__(self, *_): return True"
    line = "with Quiet(): half(n)"
    assert hash_of(f"{line}; check_n(n)", quiet) != hash_of(line, quiet)


def test_catch_two_calls_away_counts():
    beside = "def other(n):\n    try: return n\n    except ValueError: return 0"
    assert hash_of("n = other(n); check_n(n)", beside) != hash_of(
        "n = other(n)", beside
    )


def test_finding_the_hash_leaves_the_trees_as_they_were():
    nodes = {
        n.name: n for n in ast.parse(STEP.format(line="check_n(n)", beside="")).body
    }
    before = ast.dump(nodes["run"])
    records.experiment_hash("run", nodes.get)
    assert ast.dump(nodes["run"]) == before


def test_constant_that_only_a_check_reads_is_allowed(lab):
    change = ("class Model", "MOST = 9\n\n\nclass Model", "return attention")
    line = "if x > MOST: raise ValueError(f'at most {MOST}, got {x=}')"
    assert lab.load(*change, f"{line}\n    return attention").run()["n"] == 4


IN_PLACE = (
    *("append", "extend", "insert", "remove", "pop", "popitem", "clear", "sort"),
    *("add", "update", "discard", "setdefault", "reverse", "send", "write", "next"),
    *("manual_seed", "setattr", "delattr", "open", "print", "exec"),
)


def deeds(function):
    """What a function does besides looking and raising, to other than its own."""
    own = {p.id for p in ast.walk(function) if isinstance(p, ast.Name)}
    own -= {p.arg for p in ast.walk(function) if isinstance(p, ast.arg)}
    for part in ast.walk(function):
        name = getattr(getattr(part, "func", None), "attr", "")
        name = name or getattr(getattr(part, "func", None), "id", "")
        if name in IN_PLACE or (name.endswith("_") and name[:1] != "_"):
            yield ast.unparse(part)
        if isinstance(part, ast.Global | ast.Nonlocal | ast.Yield | ast.YieldFrom):
            yield ast.unparse(part)
        if isinstance(part, ast.Attribute | ast.Subscript | ast.Starred):
            base = getattr(getattr(part, "value", None), "id", "")
            if not isinstance(part.ctx, ast.Load) and base not in own:
                yield ast.unparse(part)


def package_checks():
    """Every function check_… of the package."""
    for path in sorted(records._results_folder().parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("check_"):
                yield node


@pytest.mark.parametrize(
    "text",
    [
        "x.total = 1",
        "x[0] = 1",
        "del x[0]",
        "global x",
        "x.pop()",
        "x.add_(1)",
        "next(x)",
        "yield x",
    ],
)
def test_deed_of_a_check_is_found(text):
    assert [*deeds(ast.parse(f"def check_x(x):\n    {text}").body[0])]


def test_functions_named_check_do_nothing_but_raise():
    assert {f.name: found for f in package_checks() if (found := [*deeds(f)])} == {}


def test_checks_that_the_hash_skips_are_those_of_the_package():
    known = {node.name for node in package_checks()}
    for experiment in tool.find_all():
        nb = tool.nbformat.read(experiment.notebook, as_version=4)
        find = tool.definitions(nb).get
        whole = records._reached(experiment.function, find, lambda node: node)
        kept = records._reached(experiment.function, find, records._kept)
        assert {n for n in whole if n not in kept and n.startswith("check_")} <= known


# --- the same everywhere -----------------------------------------------------------

SAMPLE = '''
def sample(a, *b, c: int = 1, **d) -> str:
    """Dropped."""
    with open(a) as f, f:  # dropped
        text = f"{a!r:>{c}} {b[0]}" "end" u"x"
    match a:
        case [1, *rest] | {"k": rest}:
            return [x async for x in y if (z := x) is not None]
    try:
        yield from (lambda q, /: q @ ~q)(text)
    except* (KeyError, OSError):
        global g
        g, *h = b"\\0", 1j, ..., None, True, 0x10, 1_0.5
'''


def test_hash_is_the_same_in_every_python():
    node = ast.parse(SAMPLE.replace("async for", "for")).body[0]
    code = records.experiment_hash("sample", {"sample": node}.get)
    assert code == ("538b90a549d08b896906e0dc5f715b698bf311126616fe40cd8a4a1f74d9ceac")


def test_definitions_that_call_each_other_end():
    nodes = ast.parse("def a(n): return b(n)\ndef b(n): return a(n)").body
    found = {node.name: node for node in nodes}
    assert records.experiment_hash("a", found.get) == records.experiment_hash(
        "b", found.get
    )


@pytest.mark.parametrize(
    "wrapper", ["torch.no_grad()", "functools.cache", "functools.partial"]
)
def test_decorator_that_hides_helpers_from_the_hash_is_refused(lab, wrapper):
    change = (
        "def run(n)",
        f"@{wrapper}\ndef run(n)",
        '"""An',
        'import functools\nimport torch\n"""An',
    )
    message = "@recorded must stand right above def: .* got name='run', function="
    with pytest.raises(TypeError, match=message) as caught:
        lab.load(*change)
    assert "\n" not in str(caught.value)


def test_decorator_above_the_record_is_seen(lab):
    change = ("@recorded", "@(lambda run: run)\n@recorded")
    with pytest.raises(RuntimeError, match="is stale"):
        lab.load(*change).run()


# --- the probe ---------------------------------------------------------------------


def test_changed_dependency_is_caught_by_the_probe(lab, monkeypatch):
    module = lab.load()
    monkeypatch.setattr(module, "attention", lambda x: x / 3)
    module.attention.__module__ = lab.dependency.__name__
    assert module.run()["n"] == 4  # the hash does not see it
    monkeypatch.setenv("RECORDED", "probe")
    message = (
        r"probe of run: result\['values'\]\[0\] is 1.0, was 1.5: code that it calls has"
        r" changed; delete run.json, then run `make experiments`$"
    )
    with pytest.raises(RuntimeError, match=message):
        module.run()


def test_honest_probe_passes(lab, monkeypatch):
    monkeypatch.setenv("RECORDED", "probe")
    assert lab.load().run()["n"] == 4


def test_probe_allows_another_rounding(lab, monkeypatch):
    module = lab.load()
    monkeypatch.setattr(module, "attention", lambda x: x / 2.001)
    module.attention.__module__ = lab.dependency.__name__
    monkeypatch.setenv("RECORDED", "probe")
    assert module.run()["n"] == 4


@pytest.mark.parametrize(
    "now, then",
    [
        ({"a": [1.0, {"b": 2.0}]}, {"a": [1.0, {"b": 2.0019}]}),
        ([0.0], [1e-7]),
        ([2.0], [2]),
        (["x", None, True], ["x", None, True]),
    ],
)
def test_near_results_agree(now, then):
    assert records._deviation(now, then) is None


@pytest.mark.parametrize(
    "now, then, where",
    [
        ({"a": [1.0, {"b": 2.0}]}, {"a": [1.0, {"b": 2.01}]}, "result['a'][1]['b']"),
        ([1000], [1001], "result[0] is 1000, was 1001"),
        ([1.0], [1.0, 1.0], "result is [1.0]"),
        ({"a": 1.0}, {"b": 1.0}, "result is {'a': 1.0}"),
        ([None], [1.0], "result[0] is None"),
        ([True], [1.0], "result[0] is True"),
        (["x"], ["y"], "result[0] is x"),
        ([0.0], [1e-3], "result[0]"),
        ([1.0], [-1.0], "result[0]"),
    ],
)
def test_other_results_are_named(now, then, where):
    assert where in records._deviation(now, then)


# --- writing -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["prob", "runs", "RUN", "1"])
def test_unknown_mode_is_refused(lab, monkeypatch, mode):
    monkeypatch.setenv("RECORDED", mode)
    with pytest.raises(ValueError, match=f"RECORDED must be .* got '{mode}'"):
        lab.load().run()


@pytest.mark.parametrize("result", ["float('nan')", "{1, 2}", "run"])
def test_result_that_json_cannot_hold_is_refused(lab, monkeypatch, result):
    before = lab.file.read_text(encoding="utf-8")
    monkeypatch.setenv("RECORDED", "run")
    with pytest.raises(TypeError, match="run must return what strict JSON can hold"):
        lab.load('"word": "ok"', f'"word": {result}').run()
    assert lab.file.read_text(encoding="utf-8") == before


def test_interrupted_write_leaves_the_old_file(lab, monkeypatch):
    before = lab.file.read_text(encoding="utf-8")

    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr(records.Path, "replace", full_disk)
    monkeypatch.setenv("RECORDED", "run")
    with pytest.raises(OSError, match="no space"):
        lab.load(*CHANGES["a method"]).run()
    assert lab.file.read_text(encoding="utf-8") == before


def test_installed_copy_is_not_written_to(lab, monkeypatch):
    (lab.folder / "pyproject.toml").unlink()
    lab.file.unlink()
    monkeypatch.setenv("RECORDED", "run")
    with pytest.raises(RuntimeError, match="this is an installed copy: pip install -e"):
        lab.load().run()
    assert not lab.file.exists()


def test_result_from_a_gpu_lies_beside_the_other(lab, monkeypatch):
    monkeypatch.setattr(records, "_device_name", lambda device: f"a fine {device}")
    change = (
        "def run(n)",
        'def run(n, device="cpu")',
        '"word": "ok"',
        '"word": device',
    )
    monkeypatch.setenv("RECORDED", "run")
    run = lab.load(*change).run
    assert run()["word"] == "cpu"
    assert run.on("cuda") is None
    monkeypatch.setenv("RECORDED_DEVICE", "cuda")
    assert run()["word"] == "cpu"
    assert run.on("cuda")["word"] == "cuda"
    assert run.record("cuda")["device"] == "a fine cuda"
    assert (lab.results / "run.cuda.json").exists()
    with pytest.raises(RuntimeError, match=r"run\.cuda\.json is stale"):
        lab.load(*change, "x + 1", "x + 2").run.on("cuda")


def test_experiment_without_a_device_is_not_run_on_a_gpu(lab, monkeypatch):
    monkeypatch.setenv("RECORDED", "run")
    monkeypatch.setenv("RECORDED_DEVICE", "cuda")
    assert lab.load().run()["n"] == 4
    assert not (lab.results / "run.cuda.json").exists()


def test_unknown_device_is_refused(lab, monkeypatch):
    monkeypatch.setenv("RECORDED", "run")
    monkeypatch.setenv("RECORDED_DEVICE", "gpu")
    with pytest.raises(ValueError, match="RECORDED_DEVICE must be cpu or cuda"):
        lab.load().run()


# --- make experiments --------------------------------------------------------------


def test_every_recorded_result_of_the_book_is_current():
    troubles = {e.name: e.trouble("cpu") for e in tool.find_all() if e.trouble("cpu")}
    assert troubles == {}


def test_every_result_belongs_to_an_experiment():
    names = {e.name for e in tool.find_all()}
    files = records._results_folder().glob("*.json")
    assert {path.name.split(".")[0] for path in files} <= names


def test_every_probe_is_short():
    for path in records._results_folder().glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record["probe"]["seconds"] <= 15, path.name  # 5 s on a core of its own


def book(folder, *cells):
    """A folder with one notebook of recorded experiments."""
    title = words("# A notebook\n\n> One line.", "a-notebook")
    start = code("from transformer.records import recorded", "imports")
    write(notebook(title, start, *cells), folder / "01_a.ipynb")
    return folder


ONE = """@recorded("one", full={"n": 3}, probe={"n": 1})
def one(n):
    return {"n": n}
"""
TWO = """@recorded("two", full={"n": 5}, probe={"n": 1})
def two(n):
    return {"n": twice(n)}
"""


def test_experiments_are_found_in_the_text(tmp_path):
    text = TWO.replace("two(n)", "two(n, device='cpu')")
    found = tool.find_all(book(tmp_path, code(ONE, "one"), code(text, "two")))
    assert [(e.name, e.function, e.takes_device) for e in found] == [
        ("one", "one", False),
        ("two", "two", True),
    ]


def test_two_experiments_with_one_file_are_refused(tmp_path):
    folder = book(tmp_path, code(ONE, "one"), code(TWO.replace('"two"', '"one"'), "x"))
    with pytest.raises(ValueError, match="two experiments are recorded as 'one'"):
        tool.find_all(folder)


def test_text_and_running_notebook_agree_about_the_hash(lab):
    node = {n.name: n for n in ast.parse(lab.text).body if hasattr(n, "name")}
    assert records.experiment_hash("run", node.get) == lab.load().run.record()["hash"]


def test_experiment_runs_although_another_result_is_missing(tmp_path, monkeypatch):
    cells = [
        code(ONE, "one"),
        code("print(one()['n'])", "show-one"),
        code("def twice(n):\n    return 2 * n", "twice"),
        code(TWO, "two"),
        code("assert one() == two()", "compare"),
    ]
    results = tmp_path / "repository" / "transformer" / "results"
    results.mkdir(parents=True)
    (tmp_path / "repository" / "pyproject.toml").touch()
    patch = (
        "from pathlib import Path\nfrom transformer import records\n"
        f"records._results_folder = lambda: Path({str(results)!r})"
    )
    folder = book(tmp_path, code(patch, "patch"), *cells)
    monkeypatch.setattr(records, "_results_folder", lambda: results)
    two = next(e for e in tool.find_all(folder) if e.name == "two")
    assert two.trouble("cpu") == "missing"
    monkeypatch.setenv("RECORDED", "run:two")
    assert tool.measure(two, "cpu") == ""
    assert two.trouble("cpu") == ""
    assert [path.name for path in results.iterdir()] == ["two.json"]


def test_unknown_name_is_said_in_one_line(capsys):
    assert tool.main(["--list", "no-such-name"]) == 1
    assert (
        capsys.readouterr().err == "no recorded experiment is called 'no-such-name'\n"
    )
