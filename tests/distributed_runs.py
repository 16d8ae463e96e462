"""Training runs in several processes, for test_distributed.py, which starts them with

    python -m torch.distributed.run --nproc-per-node 2 … distributed_runs.py TASKS OUT

TASKS is a JSON list of what `run` takes, or `save`. Each process writes what came out
of task i to OUT/i.rank.json: the rows of the log, or the error.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from transformer.checkpoint import rank, save_checkpoint
from transformer.data import batches
from transformer.training import Recipe, evaluate, small_decoder, train

V, T, ROWS = 64, 16, 8
STEPS = 6


def read(length: int, **how) -> batches:
    """A stream whose last row is mostly padding: processes get unequal numbers."""
    text = torch.arange(length) * 7 % 61 % V
    return batches(text, T, ROWS, seed=1, **how)


def make(kind: str) -> nn.Module:
    """The same small decoder: plain, in DDP, or cut up by FSDP2."""
    torch.manual_seed(0)
    model = small_decoder(V, 2, 32, 4)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def run(
    kind: str,
    folder: str | None = None,
    until: int | None = None,
    pieces: int = 1,
    save_every: int = 0,
    die: dict | None = None,
) -> dict:
    """Train; give the rows of the log and the loss on other text.

    `die` = {"rank": r, "step": s} kills process r after step s; with "write" instead,
    in the middle of its write number w.
    """
    how = {"rate": 3e-3, "warmup": 2, "clip": 0.5}
    recipe = Recipe(STEPS, **how, pieces=pieces, save_every=save_every)
    watch = None
    if die and die["rank"] == rank():
        watch = mortal(**die)
    model = make(kind)
    data = read(12 * T + 6)
    rows = train(model, data, recipe, folder=folder, until=until, watch=watch)
    loss = evaluate(model, read(5 * T + 3, epochs=1))
    return {"rows": rows, "loss": loss, "read": data.state()["batch"]}


def mortal(rank: int, step: int | None = None, write: int | None = None):
    """What ends this process: after a step, or in a write."""

    def end():
        os.kill(os.getpid(), signal.SIGKILL)

    if write is not None:
        fsync, calls = os.fsync, []

        def half(descriptor):
            calls.append(descriptor)
            if len(calls) == write:
                end()
            fsync(descriptor)

        os.fsync = half
    return lambda row: end() if row["step"] == step else None


def save(kind: str, folder: str) -> dict:
    """Save a model without training it."""
    path = save_checkpoint(folder, make(kind), step=0)
    return {"path": path and path.name}


def main(tasks: str, out: str) -> None:
    """Run each task; an error is an answer too."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    for i, task in enumerate(json.loads(tasks)):
        try:
            answer = (save if task.pop("save", False) else run)(**task)
        except (OSError, RuntimeError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        path = Path(out) / f"{i}.{rank()}.json"
        path.write_text(json.dumps(answer), encoding="utf-8")
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
