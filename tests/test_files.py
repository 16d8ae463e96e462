"""Whatever a folder is called, whatever the locale, and where a file may not grow."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ODD = Path("a b") / "été, 注意 😀" / "'q' %s {x}"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
PLAY = "".join(f"{i} grüne Flaschen hängen an der Wand, 注意\n" for i in range(300))
# Each writer and its reader, and what must lie in the folder then.
WRITERS = """
import sys
from pathlib import Path
import torch
from transformer import records
from transformer.checkpoint import load_checkpoint, save_checkpoint
from transformer.command import load_run, main
from transformer.data import BytePairTokenizer
from transformer.formats import open_weights

folder = Path(sys.argv[1])
play = folder / "play.txt"
small = ["--shape", "1x16x2", "--tokens", "16", "--batch", "4", "--steps", "3"]


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(64, 64)


def checkpoint():
    path = save_checkpoint(folder / "saved", model(), step=3)
    assert load_checkpoint(folder / "saved", model())["step"] == 3
    found = open_weights(path.with_suffix(".safetensors"))
    assert found["model/weight"].equal(model().weight)


def tokenizer():
    text = play.read_text(encoding="utf-8")
    made = BytePairTokenizer.train(text, 300)
    made.save(folder / "tokenizer.json")
    read = BytePairTokenizer.load(folder / "tokenizer.json")
    assert read.decode(read.encode(text)) == text


def result():
    path = folder / "results" / "x.json"
    records._write_record(path, {"hash": "h", "result": {"losses": [0.5] * 999}})
    assert records._read_record(path, "h")["result"]["losses"][0] == 0.5


def train():
    words = ["--text", str(play), "--tokenizer", "300", *small]
    main([*words, "--out", str(folder / "run")])
    assert load_run(folder / "run")[1].vocab_size == 300
"""
READ_ALL = "checkpoint(), tokenizer(), result(), train()\nprint('done')"


def python(code: str, folder: Path, cwd: Path, **env: str):
    """Run code in a process of its own."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", WRITERS + code, str(folder)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )


def files(folder: Path) -> dict[str, bytes]:
    """What lies in a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture
def odd(tmp_path) -> Path:
    """A folder with an odd name, and a text in it."""
    folder = tmp_path / ODD
    folder.mkdir(parents=True)
    (folder / "play.txt").write_text(PLAY, encoding="utf-8")
    return folder


@pytest.mark.parametrize("locale", [{}, ASCII], ids=["as it is", "ascii"])
def test_case_52_readers_and_writers_take_any_path_in_any_locale(odd, locale):
    (odd.parent / "x").mkdir()
    done = python(READ_ALL, Path("x") / ".." / odd.name, odd.parent, **locale)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("bits per held-out byte\ndone\n")
    assert {"tokenizer.json", "results/x.json", "run/run.json"} <= files(odd).keys()
    assert not [name for name in files(odd) if name.endswith(".part")]


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({n_bytes}, -1))
for act in ({acts},):
    try:
        act()
    except OSError as error:
        print(error)
"""


def test_files_that_may_not_grow_are_said_in_a_line_each_and_nothing_changes(odd):
    acts = "checkpoint, tokenizer, result"
    limited, free = LIMITED.format(n_bytes=2048, acts=acts), f"[f() for f in ({acts})]"
    for n_files in (1, 5):  # before there is anything, and after
        before = files(odd)
        assert len(before) == n_files
        done = python(limited, odd, odd)
        assert done.returncode == 0 and files(odd) == before, done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) == 3 and all("File too large" in line for line in lines)
        assert python(free, odd, odd).returncode == 0


@pytest.mark.parametrize("n_bytes", [2048, 16_384], ids=["tokenizer", "checkpoint"])
def test_command_that_may_not_write_says_one_line_and_can_be_repeated(odd, n_bytes):
    done = python(LIMITED.format(n_bytes=n_bytes, acts="train"), odd, odd)
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert re.fullmatch(r"transformer-train: .*File too large.*\n", done.stderr)
    assert not [name for name in files(odd) if name.endswith(".part")]
    done = python("train()", odd, odd)
    assert done.returncode == 0, done.stderr
    rows = files(odd)["run/log.csv"].decode("ascii").splitlines()
    assert len(rows) == 4 and json.loads(files(odd)["run/run.json"])["seed"] == 0


MODEL = """
from transformer import zoo
sizes = {"n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 9, "vocab_size": 99}
said = {"model_type": "gpt2", "activation_function": "gelu"} | sizes
made = zoo.FAMILIES["gpt2"].build(said)


def act():
    zoo.save(made, folder / "x" / ".." / "new", said)
    read = zoo.load(folder / "new").state_dict()
    assert all(read[name].equal(x) for name, x in made.state_dict().items())
"""


def test_model_is_saved_into_any_folder_whole_or_not_at_all(odd):
    (odd / "x").mkdir()
    limited = MODEL + LIMITED.format(n_bytes=2048, acts="act")
    for n_files in (1, 3):  # before there is anything, and after
        before = files(odd)
        assert len(before) == n_files
        done = python(limited, odd, odd, **ASCII)
        assert done.returncode == 0 and files(odd) == before, done.stderr
        [line] = done.stdout.splitlines()
        assert "no model written to" in line and "File too large" in line
        assert python(MODEL + "act()", odd, odd, **ASCII).returncode == 0
    (odd / "file").touch()
    code = "try: zoo.save(made, folder / 'file', said)\nexcept OSError as e: print(e)"
    done = python(MODEL + code, odd, odd)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1, done.stderr
