"""The same `train` in several processes: with DDP, with FSDP2, and between them.

Processes are real, started as torchrun starts them, on one machine without a network.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import distributed_runs
import pytest
from distributed_runs import STEPS

from transformer.storage import newest_checkpoint

PROGRAM = Path(distributed_runs.__file__)
CLOSE = 1e-5  # nats


def torchrun(tasks: list[dict], out: Path) -> subprocess.CompletedProcess:
    """Run tasks in two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}", str(PROGRAM)]
    alone = {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1", "GLOO_SOCKET_IFNAME": "lo"}
    known = os.environ | alone | {"CUDA_VISIBLE_DEVICES": ""}
    known["PYTHONPATH"] = os.pathsep.join(map(str, (PROGRAM.parent.parent, *sys.path)))
    return subprocess.run(
        [*command, json.dumps(tasks), str(out)],
        env=known,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )


def answers(out: Path, i: int) -> list[dict]:
    """What both processes have said of a task."""
    paths = (out / f"{i}.{rank}.json" for rank in range(2))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def losses(found: dict, first: int = 1) -> dict[int, float]:
    """The loss of each step, from a first one on."""
    return {r["step"]: r["loss"] for r in found["rows"] if r["step"] >= first}


@pytest.fixture(scope="module")
def alone() -> dict:
    """What one process finds."""
    return distributed_runs.run("plain")


TASKS = [  # resumed: from a checkpoint of one process after step 3
    {"kind": kind} | more
    for kind in ("ddp", "fsdp")
    for more in (
        {},
        {"pieces": 3},
        {"folder": "resumed"},
        {"folder": "written", "until": 3},
        {"folder": "a file/inside"},
        {"folder": "a file", "save": True},
        {"folder": "saved", "save": True},
    )
] + [{"kind": "plain"}]


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """A function from kind and what else a task has to what two processes found."""
    out = tmp_path_factory.mktemp("two")
    distributed_runs.run("plain", folder=str(out / "one"), until=3)
    (out / "a file").write_text("in the way", encoding="utf-8")
    tasks = []
    for task in TASKS:
        task = dict(task)
        name = task.get("folder")
        if name == "resumed":
            shutil.copytree(out / "one", out / f"{task['kind']} resumed")
        if name and name[:6] != "a file":
            name = f"{task['kind']} {name}"
        tasks.append(task | ({"folder": str(out / name)} if name else {}))
    done = torchrun(tasks, out)
    assert done.returncode == 0, done.stderr[-3000:]

    def find(kind: str, **more) -> list[dict]:
        return answers(out, TASKS.index({"kind": kind} | more))

    find.out = out
    return find


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_give_the_losses_of_one(kind, pieces, alone, together):
    more = {"pieces": pieces} if pieces > 1 else {}
    for found in together(kind, **more):
        assert losses(found) == pytest.approx(losses(alone), abs=CLOSE, rel=0)
        assert found["loss"] == pytest.approx(alone["loss"], abs=CLOSE, rel=0)
        norms = ([row["norm"] for row in x["rows"]] for x in (found, alone))
        assert next(norms) == pytest.approx(next(norms), abs=1e-4, rel=0)
        assert found["rows"][-1]["tokens"] == alone["rows"][-1]["tokens"]
    assert len(losses(alone)) == STEPS
    assert len({row["tokens"] for row in alone["rows"]}) > 1  # the padded row counted


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_go_on_from_one(kind, alone, together):
    first, second = together(kind, folder="resumed")
    wanted = losses(alone, 4)
    assert losses(first, 4) == pytest.approx(wanted, abs=CLOSE, rel=0)
    assert losses(second) == pytest.approx(
        wanted, abs=CLOSE, rel=0
    )  # no log of its own
    assert [row["step"] for row in first["rows"]] == [1, 2, 3, 4, 5, 6]
    assert first["loss"] == pytest.approx(alone["loss"], abs=CLOSE, rel=0)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_process_goes_on_from_two(kind, alone, together, tmp_path):
    together(kind, folder="written", until=3)
    folder = tmp_path / "run"
    shutil.copytree(together.out / f"{kind} written", folder)
    assert newest_checkpoint(folder).state["step"] == 3
    found = distributed_runs.run("plain", folder=str(folder))
    assert losses(found) == pytest.approx(losses(alone), abs=CLOSE, rel=0)
    assert found["loss"] == pytest.approx(alone["loss"], abs=CLOSE, rel=0)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_folder_that_cannot_be_made_is_the_same_line_in_each_process(kind, together):
    path = str(together.out / "a file/inside")
    for found in together(kind, folder="a file/inside"):
        assert found["error"].startswith("NotADirectoryError: [Errno ")
        assert found["error"].endswith(f"Not a directory: {path!r}")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_process_hears_that_the_first_could_not_save(kind, together):
    first, second = (x["error"] for x in together(kind, folder="a file", save=True))
    assert first.startswith("FileExistsError: ") and "no checkpoint written to" in first
    assert second == f"RuntimeError: rank 0 could not write: {first}"
    assert "\n" not in first


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_first_process_saves_and_the_others_get_no_path(kind, together):
    first, second = together(kind, folder="saved", save=True)
    assert (first["path"], second["path"]) == ("checkpoint-000001.json", None)


def test_model_that_is_not_wrapped_is_refused(together):
    rule = "ValueError: model must be in DistributedDataParallel or fully_shard, got "
    for found in together("plain"):
        assert found["error"] == f"{rule}LanguageModel in 2 processes"


DEATHS = [  # fsync: of the tensors, of the JSON and of the folder, twice
    {"rank": 1, "step": 5},
    {"rank": 0, "write": 5},
]


@pytest.mark.parametrize("die", DEATHS, ids=["between steps", "in a write"])
def test_killed_process_leaves_the_last_good_checkpoint(die, alone, tmp_path):
    folder = tmp_path / "run"
    kind = "fsdp" if "write" in die else "ddp"
    task = {"kind": kind, "folder": str(folder), "save_every": 2, "die": die}
    done = torchrun([task], tmp_path)
    (tmp_path / "stderr.txt").write_text(done.stderr, encoding="utf-8")
    assert done.returncode != 0 and "SIGKILL" in done.stderr
    assert not (tmp_path / f"0.{die['rank']}.json").exists()
    assert newest_checkpoint(folder).state["step"] == (4 if "step" in die else 2)
    found = distributed_runs.run("plain", folder=str(folder))
    assert losses(found) == pytest.approx(losses(alone), abs=CLOSE, rel=0)
