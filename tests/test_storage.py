"""Files of a checkpoint are there, whole, or not at all."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from transformer.storage import (
    digest,
    newest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
]


def write(folder, step, **how):
    """A small checkpoint of a step."""
    return write_checkpoint(
        folder, {"w": torch.full((5,), step)}, {"step": step}, **how
    )


def step_of(folder):
    """The step of the newest whole checkpoint, whose tensor is of this step, too."""
    found = newest_checkpoint(folder)
    assert (found.tensors["w"] == found.state["step"]).all()
    return found.state["step"]


def other(path):
    """The file of tensors beside."""
    return path.with_suffix(".safetensors")


def python(program, *arguments):
    """Start a program in another process."""
    start = "import sys, os, torch\nfrom transformer.storage import *\n"
    how = [sys.executable, "-c", start + program, *map(str, arguments)]
    return subprocess.Popen(
        how, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    )


def said(process):
    """What a process prints, if it ends well."""
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    return text.strip()


def test_every_dtype_comes_back_and_the_library_reads_it(tmp_path):
    values = torch.arange(6).view(2, 3)
    tensors = {str(dtype): values.to(dtype) for dtype in DTYPES}
    tensors |= {"a number": torch.tensor(3.0), "nothing": torch.ones(0, 2)}
    tensors |= {"not contiguous": torch.arange(6.0).view(2, 3).T, "odd": torch.ones(3)}
    tensors |= {"learned": torch.nn.Parameter(torch.ones(2)), "ü/注": torch.ones(1)}
    path = write_checkpoint(tmp_path, tensors, {})
    mine, theirs = read_checkpoint(path).tensors, load_file(other(path))
    assert mine.keys() == theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        for found in (mine[name], theirs[name]):
            assert found.dtype == tensor.dtype and found.shape == tensor.shape
            same = found.view(torch.uint8) if found.dim() else found
            assert torch.equal(same, tensor.detach().contiguous().view(same.dtype))


def test_no_tensors_at_all(tmp_path):
    assert read_checkpoint(write_checkpoint(tmp_path, {}, {"a": 1})).tensors == {}


def test_large_tensor_comes_back(tmp_path):
    big = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    found = read_checkpoint(write_checkpoint(tmp_path, {"b": big}, {})).tensors["b"]
    assert found.equal(big)


def test_sparse_and_complex_tensors_are_refused(tmp_path):
    for odd in (torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex64)):
        with pytest.raises(TypeError, match="kind of tensor, got x of torch"):
            write_checkpoint(tmp_path, {"x": odd}, {})
    assert not [*tmp_path.iterdir()]


def test_state_comes_back(tmp_path):
    state = {"step": 3, "rate": 0.1, "注": [1, None, {"a": True}], "lone": "\ud83d"}
    found = read_checkpoint(write_checkpoint(tmp_path, {}, state)).state
    assert {key: found[key] for key in state} == state


@pytest.mark.parametrize(
    "odd",
    [
        *((1, 2), {1: 2}, Path("a"), torch.ones(1), {"a": {"b": {3}}}),
        *(float("nan"), float("inf"), [-float("inf")]),
    ],
)
def test_state_that_json_would_change_is_refused(tmp_path, odd):
    with pytest.raises(TypeError, match="what must be what JSON gives back"):
        write_checkpoint(tmp_path / "new", {}, {"fine": 1, "what": odd})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_every_prefix_of_a_file_is_refused(tmp_path, suffix):
    path = write(tmp_path, 1)
    file = path.with_suffix(suffix)
    whole = file.read_bytes()
    for n in range(len(whole)):
        file.write_bytes(whole[:n])
        with pytest.raises(ValueError, match=rf"^{file.name} ") as error:
            read_checkpoint(path)
        assert "\n" not in str(error.value)
    file.write_bytes(whole)
    assert step_of(tmp_path) == 1


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_every_changed_byte_is_noticed(tmp_path, suffix):
    path = write(tmp_path, 1)
    file = path.with_suffix(suffix)
    whole = file.read_bytes()
    blanks = {i for i, byte in enumerate(whole) if byte in b" \n"}  # JSON's own
    for i in range(len(whole)):
        if suffix == ".json" and i in blanks:
            continue
        file.write_bytes(whole[:i] + bytes([whole[i] ^ 4]) + whole[i + 1 :])
        with pytest.raises(ValueError):
            read_checkpoint(path)


FOREIGN = [b"", b"[]", b"{}", b"null", b"\x80\x04}q", b'"a"', b"[" * 100_000]


@pytest.mark.parametrize("content", FOREIGN, ids=range(len(FOREIGN)))
def test_foreign_json_is_refused(tmp_path, content):
    path = write(tmp_path, 1)
    path.write_bytes(content)
    with pytest.raises(ValueError, match="json is not the JSON of a checkpoint"):
        read_checkpoint(path)


def test_another_format_is_refused(tmp_path):
    path = write(tmp_path, 1)
    with mock.patch("transformer.storage.FORMAT", "something else 2"):
        with pytest.raises(ValueError, match="must have the format 'something else 2'"):
            read_checkpoint(path)


def test_files_of_two_checkpoints_do_not_mix(tmp_path):
    first, second = write(tmp_path, 1), write(tmp_path, 2)
    shutil.copy(other(first), other(second))
    with pytest.warns(
        RuntimeWarning, match=r"^checkpoint-000002.safetensors is not as"
    ):
        assert step_of(tmp_path) == 1


def test_a_pickle_is_not_read(tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "old.pt")
    with pytest.raises(
        ValueError, match=r"a checkpoint must be a .json file, got .*pt"
    ):
        read_checkpoint(tmp_path / "old.pt")
    with pytest.raises(FileNotFoundError, match="no checkpoint in "):
        newest_checkpoint(tmp_path)


def test_the_newest_whole_one_is_read(tmp_path):
    paths = [write(tmp_path, step, keep=4) for step in (5, 9, 2, 7)]
    assert step_of(tmp_path) == 7  # the order of writing counts, not the step
    other(paths[3]).unlink()
    paths[2].write_bytes(b"")
    line = "000004.safetensors is missing; checkpoint-000003.json .* 000002.json is"
    with pytest.warns(
        RuntimeWarning, match=line.replace(" 000002", " checkpoint-000002")
    ):
        assert step_of(tmp_path) == 9
    for path in paths[:2]:
        other(path).write_bytes(b"")
    with pytest.raises(ValueError, match=r"no whole checkpoint in .*000004.*000001"):
        newest_checkpoint(tmp_path)
    assert write(tmp_path, 1, keep=4).name == "checkpoint-000005.json"
    assert step_of(tmp_path) == 1


def test_there_is_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        newest_checkpoint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no checkpoint in "):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_as_many_are_kept_as_asked_for(tmp_path, keep):
    for step in range(1, 6):
        write(tmp_path, step, keep=keep)
        names = sorted(path.stem for path in tmp_path.iterdir())
        first = max(step - keep, 0) + 1
        assert names[::2] == [f"checkpoint-{i:06}" for i in range(first, step + 1)]
        assert names[::2] == names[1::2]


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "2", None])
def test_keep_must_be_positive(tmp_path, keep):
    line = re.escape(f"keep must be a positive int, got {keep!r}")
    with pytest.raises(ValueError, match=line):
        write(tmp_path, 1, keep=keep)


def test_a_damaged_one_does_not_count_as_kept(tmp_path):
    write(tmp_path, 1)
    damaged = write(tmp_path, 2)
    other(damaged).write_bytes(b"short")
    write(tmp_path, 3)
    assert {path.stem[-1] for path in tmp_path.iterdir()} == {"1", "2", "3"}
    write(tmp_path, 4)
    assert {path.stem[-1] for path in tmp_path.iterdir()} == {"3", "4"}


def test_leftovers_go_and_files_of_others_stay(tmp_path):
    write(tmp_path, 1)
    gone = "checkpoint-000002.safetensors", "checkpoint-000002.json.part"
    gone += ("checkpoint-000003.safetensors.part", "checkpoint-000000.safetensors")
    kept = "notes.part", "model.safetensors", "checkpoint.json", "checkpoint-12.part"
    for name in gone + kept:
        (tmp_path / name).write_text("x", encoding="utf-8")
    assert write(tmp_path, 2).name == "checkpoint-000002.json"
    assert step_of(tmp_path) == 2
    assert not [name for name in gone[1:] if (tmp_path / name).exists()]
    assert all((tmp_path / name).exists() for name in kept)


def calls(during):
    """How many calls that change the disk a function makes."""
    seen = []
    with interrupted(seen, at=None):
        during()
    return len(seen)


def interrupted(seen, at, error=KeyboardInterrupt):
    """Raise at the at-th call of fsync, replace or unlink."""

    def counted(call):
        def wrapper(*args):
            seen.append(call.__name__)
            if len(seen) == at:
                raise error
            return call(*args)

        return wrapper

    stack = contextlib.ExitStack()
    for name in ("fsync", "replace", "unlink"):
        stack.enter_context(mock.patch(f"os.{name}", counted(getattr(os, name))))
    return stack


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_full_disk_at_any_call_leaves_a_whole_one(tmp_path):
    write(tmp_path / "count", 1, keep=1)
    n = calls(lambda: write(tmp_path / "count", 2, keep=1))
    assert n == 8
    for at in range(1, n + 1):
        folder = tmp_path / f"at {at}"
        write(folder, 1, keep=1)
        full = OSError(errno.ENOSPC, "No space left on device")
        with interrupted([], at, full), pytest.raises(OSError) as error:
            write(folder, 2, keep=1)
        assert error.value.errno == errno.ENOSPC
        line = f"{folder}: No space left on device; the newest there is checkpoint-00"
        assert line in str(error.value) and "\n" not in str(error.value)
        assert step_of(folder) == (1 if at <= 5 else 2)
        assert not [*folder.glob("*.part")]
        write(folder, 3, keep=1)
        assert step_of(folder) == 3 and len([*folder.iterdir()]) == 2


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_interrupt_at_any_call_leaves_a_whole_one(tmp_path):
    for at in range(1, 9):
        folder = tmp_path / f"at {at}"
        write(folder, 1, keep=1)
        with interrupted([], at, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            write(folder, 2, keep=1)
        assert step_of(folder) in (1, 2)
        assert not [*folder.glob("*.part")]


FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
for n in (100, 100_000, 100):
    try:
        write_checkpoint(sys.argv[1], {"w": torch.full((n,), 7.0)}, {"step": 7})
    except OSError as error:
        print(error)
"""


def test_a_full_disk_leaves_the_last_good_one(tmp_path):
    line = said(python(FULL, tmp_path))
    assert line == (
        f"[Errno 27] no checkpoint written to {tmp_path}: File too large;"
        " the newest there is checkpoint-000001.json"
    )
    assert step_of(tmp_path) == 7
    assert len([*tmp_path.iterdir()]) == 4  # the first and the third


CLOSED = """
if os.geteuid() == 0:
    os.seteuid(65534)
print(newest_checkpoint(sys.argv[1]).state["step"])
for folder in (sys.argv[1], sys.argv[1] + "/new"):
    try:
        write_checkpoint(folder, {}, {})
    except OSError as error:
        print(error)
"""


def test_a_folder_that_may_only_be_read():
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        folder = Path(base, "closed")
        write(folder, 4)
        for path in folder.iterdir():
            path.chmod(0o444)
        folder.chmod(0o555)
        lines = said(python(CLOSED, folder)).splitlines()
        folder.chmod(0o755)
        assert lines[0] == "4"
        assert "no checkpoint written to" in lines[1]
        assert "Permission denied; the newest there is checkpoint-000001" in lines[1]
        assert "Permission denied; the newest there is none" in lines[2]
        assert len([*folder.iterdir()]) == 2


def test_a_file_in_the_folders_place(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"no checkpoint written to .*file: File exists"):
        write(tmp_path / "file", 1)


BUSY = """
for step in range(20):
    write_checkpoint(sys.argv[1], {"w": torch.full((50_000,), step)}, {"step": step})
"""


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_two_writers_and_a_reader(tmp_path):
    folder = tmp_path / "shared"
    write(folder, 0)
    writers = [python(BUSY, folder) for _ in range(2)]
    n_read = 0
    while any(writer.poll() is None for writer in writers):
        step_of(folder)  # neither warns nor fails
        n_read += 1
    for writer in writers:
        said(writer)
    assert n_read > 5
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        *("checkpoint-000040.json", "checkpoint-000040.safetensors"),
        *("checkpoint-000041.json", "checkpoint-000041.safetensors"),
    ]


def test_permissions_are_those_of_any_file(tmp_path):
    before = os.umask(0o027)
    try:
        path = write(tmp_path, 1)
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in (path, other(path))} == {0o640}


def test_links_are_followed_and_only_links_are_deleted(tmp_path):
    real = tmp_path / "real, ü 注"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    path = write(tmp_path / "link", 1, keep=1)
    far = tmp_path / "far"
    shutil.move(other(path), far)
    other(path).symlink_to(far)
    assert step_of(real) == 1
    write(tmp_path / "link", 2, keep=1)
    assert far.exists() and step_of(real) == 2
    assert len([*real.iterdir()]) == 2


def test_relative_folders_and_numbers_with_more_digits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write("deep/er", 1)
    for suffix in (".json", ".safetensors"):
        number = path.with_name(f"checkpoint-999999{suffix}")
        path.with_suffix(suffix).rename(number)
    assert write("deep/er", 2).name == "checkpoint-1000000.json"
    assert step_of("deep/er") == 2


def test_a_mapped_tensor_outlives_its_file_and_does_not_change_it(tmp_path):
    path = write(tmp_path, 3)
    found = read_checkpoint(path)
    found.tensors["w"].add_(1)
    assert load_file(other(path))["w"].eq(3).all()
    other(path).unlink()
    assert found.tensors["w"].eq(4).all()


def test_the_json_can_be_read_by_anyone(tmp_path):
    text = write(tmp_path, 3).read_text(encoding="utf-8")
    assert json.loads(text)["step"] == 3 and text.count("\n") > 5


def seal(path, **changes):
    """Change the JSON of a checkpoint, and let its digest fit."""
    state = json.loads(path.read_bytes()) | changes
    del state["digest"]
    path.write_text(json.dumps(state | {"digest": digest(state)}), encoding="utf-8")


@pytest.mark.parametrize("odd", [None, [], {}, {"bytes": "9", "sha256": "a"}, 3])
def test_json_of_another_writer_is_refused(tmp_path, odd):
    path = write(tmp_path, 1)
    seal(path, tensors=odd)
    with pytest.raises(ValueError, match=r"json does not tell the size and digest of"):
        read_checkpoint(path)
    write(tmp_path, 2)  # no obstacle to the next


def table(text):
    """What a safetensors file with this table begins with."""
    return struct.pack("<Q", len(text)) + text


PLACE = '{"a": {"dtype": "%s", "shape": [%d], "data_offsets": [0, 4]}}'
TABLES = {
    "nothing": b"",
    "short": b"abc",
    "no table": struct.pack("<Q", 1 << 60),
    "huge": struct.pack("<Q", (1 << 64) - 1) + b"[1]",
    "not JSON": table(b"abcd"),
    "not a table": table(b"[1]"),
    "metadata": table(b'{"__metadata__": {"a": "b"}}'),
    "a dtype": table((PLACE % ("F4", 1)).encode()) + bytes(4),
    "a shape": table((PLACE % ("F32", 2)).encode()) + bytes(4),
    "cut": table((PLACE % ("F32", 1)).encode()),
}


@pytest.mark.parametrize("content", TABLES.values(), ids=TABLES)
def test_tensors_of_another_writer_are_refused(tmp_path, content):
    path = write(tmp_path, 1)
    other(path).write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    seal(path, tensors={"bytes": len(content), "sha256": sha256})
    with pytest.raises(ValueError, match="safetensors is not the tensors' file of a"):
        read_checkpoint(path)


@pytest.mark.parametrize("odd", [1, "__metadata__"])
def test_names_that_safetensors_does_not_have_are_refused(tmp_path, odd):
    with pytest.raises(ValueError, match=f"name of its own, got {odd!r}"):
        write_checkpoint(tmp_path, {odd: torch.ones(1)}, {})
    assert not [*tmp_path.iterdir()]


def test_a_state_has_names_of_text(tmp_path):
    with pytest.raises(TypeError, match="1 must be what JSON gives back"):
        write_checkpoint(tmp_path / "new", {}, {1: 2})
    assert not (tmp_path / "new").exists()


def test_a_negated_view_comes_back(tmp_path):
    tensor = torch.tensor([1 + 2j]).conj().imag  # torch notes the sign and no more
    assert tensor.is_neg()
    found = read_checkpoint(write_checkpoint(tmp_path, {"a": tensor}, {}))
    assert found.tensors["a"].tolist() == [-2]


def test_names_of_the_files_own_are_refused(tmp_path):
    with pytest.raises(ValueError, match="tensors is a name of the file's own"):
        write_checkpoint(tmp_path / "new", {}, {"tensors": 1})
    assert not (tmp_path / "new").exists()
