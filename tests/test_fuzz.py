"""A few hundred damaged files for every reader; `make fuzz` reads ten thousand each."""

import json
import pickle
import re
from pathlib import Path

import fuzz
import pytest

KINDS = {"truncated", "flipped", "oversized"}
LENIENT = {"merges", "log", "result"}  # a shorter one may be whole
LENIENT |= {f"{kind} of a folder" for kind in fuzz.MODELS}  # but for a line break


@pytest.mark.parametrize("name", fuzz.FORMATS)
def test_damaged_files_are_refused_in_a_line_or_read_and_nothing_else(name, tmp_path):
    counts, faults = fuzz.fuzz(name, 300, tmp_path)
    assert faults == [] and sum(counts.values()) == 300
    assert {kind for kind, _ in counts} >= KINDS
    if name not in LENIENT:
        assert counts["truncated", "read"] == 0, "a shorter file is not whole"
    sizes = [n for (kind, end), n in counts.items() if end != "read"]
    assert sum(sizes) >= 100 or name == "log"


def reading(path: Path, act) -> str:
    """What is found out about a reader that does this."""
    path.write_bytes(b"x")
    return fuzz.outcome(fuzz.Format(lambda folder: path, lambda _: act()), path)


def hang() -> None:
    """Take longer than a reader may."""
    start = fuzz.time.process_time()
    while fuzz.time.process_time() - start < 0.2:
        pass


def refuse(words: str) -> None:
    """Refuse a file."""
    raise ValueError(words)


BAD = {
    "another error": (lambda: {}["x"], "raised KeyError: 'x'"),
    "an error of a library": (lambda: json.loads("{"), "raised JSONDecodeError"),
    "two lines": (lambda: refuse("one\ntwo"), "said 'one"),
    "no words": (lambda: refuse(""), "said ''"),
    "many words": (lambda: refuse("x" * 2000), "said 'xxx"),
    "memory": (lambda: bytes(4 << 20), "took [0-9]+ bytes"),
    "time": (hang, "took 0.2 s"),
    "a process": (lambda: fuzz.os.system("true"), "did os.system"),
    "a pickle": (lambda: pickle.loads(b"cos\nsystem\n."), "did pickle.find_class"),
    "code": (lambda: eval("1 + 1"), "did exec"),
}


@pytest.mark.parametrize("act, words", BAD.values(), ids=BAD)
def test_reader_that_does_more_is_found_out(act, words, tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", 0.1 if act is hang else 5)
    fuzz.tracemalloc.start()
    try:
        with pytest.raises(AssertionError, match=words):
            reading(tmp_path / "x", act)
    finally:
        fuzz.tracemalloc.stop()


def test_reader_that_writes_is_found_out(tmp_path):
    with pytest.raises(AssertionError, match="did open"):
        reading(tmp_path / "x", lambda: (tmp_path / "y").write_text("y", "utf-8"))
    assert reading(tmp_path / "x", lambda: (tmp_path / "y").read_bytes()) == "read"


def test_fault_is_reported_with_its_input(tmp_path, monkeypatch, capsys):
    def read(path: Path) -> None:
        if re.search("[^a]", path.read_text("utf-8", "replace")):
            raise KeyError("b")

    def make(folder: Path) -> Path:
        (folder / "x").write_bytes(b"a" * 99)
        return folder / "x"

    monkeypatch.setattr(fuzz, "FORMATS", {"letters": fuzz.Format(make, read)})
    monkeypatch.setattr(fuzz, "KEPT", tmp_path / "kept")
    assert fuzz.main(["--inputs", "9", "--format", "letters"]) == 1
    said = capsys.readouterr().out
    assert "letters: 9 inputs" in said and "truncated  read 3" in said
    assert "flipped    FAULT 3" in said and "raised KeyError: 'b'" in said
    kept = sorted((tmp_path / "kept").iterdir())
    assert len(kept) >= 3 and all(set(path.read_bytes()) - {97} for path in kept)
