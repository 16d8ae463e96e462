"""What all tests need before the first of them is imported, and what they measure.

Tests import the benchmarks as they import one another: by their file's name. And
setuptools comes before anything that imports distutils: torch.compile imports it late,
and it refuses to load once the standard library's distutils is there.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import sampled_coverage
import setuptools  # noqa: F401
import torch
from conformance import Conformance, pairs
from measured import facts, write
from torch.testing import assert_close

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

FOUND = pytest.StashKey[Conformance]()
RAN = pytest.StashKey[list]()  # the lines that ran in each worker
WATCH = pytest.StashKey()


class Conform:
    """Compare with a reference and keep the largest error for the conformance page.

    `column` is forward, gradient, mask, dtype, ragged, compile or cached; `reference`
    is a name like torch.nn.GELU, whose package's version is noted, or words such as
    "loops in float64". An expected tensor may be more exact than the actual one:
    float64. `record` keeps the error of what another assertion has compared.
    """

    def __init__(self, found: Conformance):
        self.record = found.record

    def __call__(
        self, component, column, actual, expected, *, reference, rtol=0.0, atol
    ) -> None:
        for mine, theirs in pairs(actual, expected):
            same = theirs.dtype != torch.float64  # else compared in float64
            assert_close(mine, theirs, rtol=rtol, atol=atol, check_dtype=same)
        self.record(component, column, actual, expected, reference=reference)


@pytest.fixture(scope="module")
def tiny_run(request, tmp_path_factory) -> tuple[dict, str]:
    """What the test module's `benchmark` finds in a round of tiny sizes; its page."""
    benchmark, out = request.module.benchmark, tmp_path_factory.mktemp("results")
    threads = torch.get_num_threads()
    command = ["--device=cpu", "--tiny", "--rounds=1", "--out", str(out)]
    assert benchmark.main(command) == 0
    torch.set_num_threads(threads)
    name = f"{Path(benchmark.__file__).stem}.cpu"
    assert {path.name for path in out.iterdir()} == {f"{name}.json", f"{name}.md"}
    found = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    text = (out / f"{name}.md").read_text(encoding="utf-8")
    assert benchmark.page(found, "cpu") == text
    assert found["rounds"] == 1 and found["torch"] == torch.__version__
    return found, text


@pytest.fixture
def one_thread():
    """Scratch space of kernels grows with the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def conform(pytestconfig) -> Conform:
    """`conform(component, column, actual, expected, reference=…, atol=…)`."""
    return Conform(pytestconfig.stash[FOUND])


def pytest_addoption(parser) -> None:
    """Name the file that takes what was measured."""
    parser.addoption(
        "--measured", help="write largest errors and coverage to this file"
    )


def pytest_configure(config) -> None:
    """Start with nothing found, and watch the package if that is wanted."""
    config.stash[FOUND], config.stash[RAN] = Conformance(), []
    config.stash[WATCH] = None
    if config.getoption("measured"):
        config.stash[WATCH] = sampled_coverage.Watch()


def pytest_collection_finish(session) -> None:
    """Choose the tests in which the package is watched."""
    if watch := session.config.stash[WATCH]:
        watch.choose(item.nodeid for item in session.items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Watch the package in a chosen test."""
    watch = item.config.stash[WATCH]
    with watch.during(item.nodeid) if watch else nullcontext():
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """Take in what a worker of pytest-xdist found."""
    if sent := getattr(node, "workeroutput", {}).get("measured"):
        found, ran = json.loads(sent)
        node.config.stash[FOUND].merge(found)
        node.config.stash[RAN].append(ran)


def pytest_sessionfinish(session, exitstatus) -> None:
    """Send what a worker found to its controller; write it down if all tests passed."""
    stash, config = session.config.stash, session.config
    if not (watch := stash[WATCH]):
        return
    statements, ran = watch.lines()
    found = stash[FOUND].found
    if hasattr(config, "workeroutput"):
        config.workeroutput["measured"] = json.dumps([found, ran])
    elif exitstatus == 0:
        coverage = sampled_coverage.share(statements, [ran, *stash[RAN]])
        measured = {"facts": facts(), "components": found, "coverage": coverage}
        write(Path(config.getoption("measured")), measured)
