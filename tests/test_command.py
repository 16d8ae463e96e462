"""`transformer-train` in real processes: it trains, goes on, and says what is wrong."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from transformer import command
from transformer.command import load_run, main
from transformer.data import BytePairTokenizer
from transformer.training import read_log

ROOT = Path(__file__).resolve().parent.parent
PLAY = "".join(f"{i} green bottles hanging on the wall\n" for i in range(300))
START = "from transformer.command import main; main()"


@pytest.fixture
def play(tmp_path):
    """A file of text."""
    path = tmp_path / "play.txt"
    path.write_text(PLAY, encoding="utf-8")
    return path


def run(*words):
    """What the command does in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", START, *map(str, words)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"},
    )


def small(play, out, steps=6):
    """Words that train something tiny."""
    words = ["--text", play, "--shape", "1x16x2", "--tokens", 16, "--batch", 4]
    return [*map(str, [*words, "--steps", steps, "--out", out])]


def test_script_is_installed_under_its_name():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {
        "transformer-train": "transformer.command:main"
    }


def test_process_trains_and_leaves_a_model(play, tmp_path):
    done = run(*small(play, tmp_path / "out"))
    assert done.returncode == 0 and done.stderr == ""
    found = re.fullmatch(
        r"([\d,]+) parameters, (\d\.\d{3}) bits per held-out byte\n", done.stdout
    )
    assert found and 4 < float(found[2]) < 9
    model, tokenizer = load_run(tmp_path / "out")
    logits = model(torch.tensor([tokenizer.encode("green")]))
    assert logits.shape == (1, 5, 257) and not model.training
    assert len(read_log(tmp_path / "out" / "log.csv")) == 6
    again = run(*small(play, tmp_path / "out"))  # nothing is left to do
    assert again.stdout == done.stdout


def test_process_with_wrong_words_says_one_line(play, tmp_path):
    done = run(*small(play, tmp_path / "out")[:-2], "--out", play)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"transformer-train: --out must be a folder, got '{play}'\n"


def test_stopped_run_goes_on_with_the_same_bits(play, tmp_path, monkeypatch, capsys):
    main(small(play, tmp_path / "whole", 8))
    train = command.train
    stopped = lambda *parts, **how: train(*parts, until=5, **how)  # noqa: E731
    monkeypatch.setattr(command, "train", stopped)
    main(small(play, tmp_path / "cut", 8))
    monkeypatch.setattr(command, "train", train)
    main(small(play, tmp_path / "cut", 8))
    first, middle, last = capsys.readouterr().out.splitlines()
    assert first == last != middle
    models = [load_run(tmp_path / name)[0] for name in ("whole", "cut")]
    pairs = zip(*(model.parameters() for model in models), strict=True)
    assert all(a.equal(b) for a, b in pairs)


def test_tokenizer_is_learned_saved_and_read(play, tmp_path, capsys):
    main([*small(play, tmp_path / "out"), "--tokenizer", "270"])
    tokenizer = load_run(tmp_path / "out")[1]
    assert isinstance(tokenizer, BytePairTokenizer) and tokenizer.vocab_size == 270
    saved = tmp_path / "out" / "tokenizer.json"
    main([*small(play, tmp_path / "other"), "--tokenizer", str(saved)])
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


WRONG = {
    "no text": (["--text", "absent.txt"], "--text must be a file of text in UTF-8"),
    "shape": (["--shape", "4x"], "--shape must be LAYERSxWIDTHxHEADS, the width"),
    "zero": (["--shape", "0x16x2"], "--shape must be LAYERSxWIDTHxHEADS, the width"),
    "heads": (["--shape", "1x16x3"], "a multiple of 2 * heads, got '1x16x3'"),
    "tokenizer": (["--tokenizer", "bpe"], "--tokenizer must be bytes, a number from"),
    "few tokens": (["--tokenizer", "100"], "vocab_size - specials must be at least"),
    "steps": (["--steps", "0"], "steps must be a whole number from 1, got steps=0"),
    "no number": (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
    "rate": (["--rate", "-1"], "rate must be a positive finite number, got rate=-1.0"),
    "long rows": (["--tokens", "5000"], "--text must have more than --tokens tokens"),
    "batch": (["--batch", "0"], "batch_size must be a positive int, got 0"),
    "unknown": (["--speed", "9"], "unrecognized arguments: --speed 9"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_argument_is_one_line(play, tmp_path, capsys, name):
    words, says = WRONG[name]
    with pytest.raises(SystemExit) as stop:
        main([*small(play, tmp_path / "out"), *words])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert err.startswith("transformer-train: ") and err.count("\n") == 1
    assert says in err


def test_missing_arguments_are_one_line(capsys):
    with pytest.raises(SystemExit):
        main([])
    says = "the following arguments are required: --text, --steps, --out"
    assert capsys.readouterr().err == f"transformer-train: {says}\n"


def test_text_that_is_none_is_one_line(tmp_path, capsys):
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SystemExit):
        main(small(tmp_path / "x", tmp_path / "out"))
    assert "--text must be a file of text in UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, says",
    [
        (["--shape", "1x32x2"], "--out must be a new folder or this run's, got shape="),
        (
            ["--seed", "1"],
            "--out must be a new folder or this run's, got seed=1, there",
        ),
        (["--steps", "9"], "recipe must be the one of the run so far, got"),
        (["--batch", "5"], "resume must be of the same reading, got batch_size"),
    ],
)
def test_folder_of_another_run_is_refused(play, tmp_path, capsys, change, says):
    main(small(play, tmp_path / "out"))
    with pytest.raises(SystemExit):
        main([*small(play, tmp_path / "out"), *change])
    assert says in capsys.readouterr().err
    assert (
        json.loads((tmp_path / "out/run.json").read_text(encoding="utf-8"))["seed"] == 0
    )


def test_load_run_without_a_run(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_run(tmp_path)
