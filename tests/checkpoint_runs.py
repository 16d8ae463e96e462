"""A small training run in processes that can be killed, for test_checkpoint_kills.py.

As a program it imports torch once, then forks a process for each line that it reads:
folder, number of steps, and where to put the last weights. It answers with the process
number, and with the status once that process has ended. Saving is made slow, so that
kills fall into it.
"""

import contextlib
import os
import sys
import time
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from transformer.checkpoint import load_checkpoint, save_checkpoint
from transformer.data import batches

SLOW = 0.01  # seconds before each flush


def train(folder: Path, n_steps: int) -> nn.Module:
    """Train a tiny model, saving every second step; go on where a run has stopped."""
    torch.manual_seed(0)
    text = torch.arange(2000) * 7 % 64
    layers = nn.Embedding(64, 48), nn.Dropout(0.2), nn.Linear(48, 64)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step, data = 0, None
    with contextlib.suppress(FileNotFoundError):
        found = load_checkpoint(folder, model, optimizer)
        step, data = found["step"], found["data"]
    reader = batches(text, 16, 4, resume=data)
    while step < n_steps:
        tokens, labels = next(reader)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 2 == 0:
            save_checkpoint(folder, model, optimizer, step=step, data=reader.state())
    return model


def run(folder: Path, n_steps: int, out: Path) -> None:
    """Train and put the weights down, in a process that then ends."""
    fsync = os.fsync

    def slowly(descriptor):
        time.sleep(SLOW)
        fsync(descriptor)

    os.fsync = slowly
    save_file(train(folder, n_steps).state_dict(), out)


def main() -> None:
    """Fork as asked."""
    torch.set_num_threads(1)
    warnings.simplefilter("error", RuntimeWarning)  # no kill may damage a checkpoint
    unused = torch.ones(1, requires_grad=True)
    unused.grad = torch.zeros(1)
    torch.optim.AdamW([unused]).step()  # imports what each child would else import
    for line in sys.stdin:
        folder, n_steps, out = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run(Path(folder), int(n_steps), Path(out))
                status = 0
            finally:
                os._exit(status)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
