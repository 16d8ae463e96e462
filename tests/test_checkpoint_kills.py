"""A run that is killed again and again ends as one that was never stopped."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

KILLS = 20


class Runs:
    """A process that forks training runs."""

    def __init__(self, folder: Path):
        program = Path(__file__).with_name("checkpoint_runs.py")
        self.out = folder / "last weights.safetensors"
        self.child = None
        self.process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"},
        )

    def start(self, folder: Path, n_steps: int) -> int:
        """Begin to train; give the number of the process."""
        self.process.stdin.write(f"{folder}\t{n_steps}\t{self.out}\n")
        self.process.stdin.flush()
        self.child = int(self.process.stdout.readline())
        return self.child

    def status(self) -> int:
        """How the run has ended."""
        status, self.child = int(self.process.stdout.readline()), None
        return status

    def close(self) -> None:
        """End the process that forks, and the run if a test has failed meanwhile."""
        if self.child:
            os.kill(self.child, signal.SIGKILL)
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def runs(tmp_path):
    """Runs, with their end."""
    found = Runs(tmp_path)
    yield found
    found.close()


def parts(folder: Path) -> list[str]:
    """Files that are not finished, and tensors without their JSON."""
    names = set(os.listdir(folder))
    tensors = {name for name in names if name.endswith(".safetensors")}
    alone = {n for n in tensors if n.replace("safetensors", "json") not in names}
    return sorted(alone | {name for name in names if name.endswith(".part")})


def newest(folder: Path) -> int:
    """The number of the newest checkpoint."""
    names = os.listdir(folder)
    return max((int(n[11:17]) for n in names if n.endswith(".json")), default=0)


def wait_for(found, seconds: float = 60) -> None:
    """Wait until there is something."""
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)


def test_twenty_kills_change_no_bit(runs, tmp_path):
    draw, folder = random.Random(0), tmp_path / "killed, 注意 ü"
    folder.mkdir()
    in_a_write, numbers = 0, []
    while len(numbers) < KILLS or in_a_write < KILLS // 2:
        assert len(numbers) < 5 * KILLS, f"only {in_a_write} kills fell into a write"
        child = runs.start(folder, 10_000)
        first = newest(folder)
        if len(numbers) % 2:  # at any moment after the first checkpoint of this process
            wait_for(lambda first=first: newest(folder) > first)
            time.sleep(draw.random() * 0.1)
        else:  # aimed at a write
            wait_for(lambda first=first: newest(folder) > first and parts(folder))
            time.sleep(draw.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        assert runs.status() == -signal.SIGKILL
        in_a_write += bool(parts(folder))
        numbers.append(newest(folder))
    assert numbers == sorted({*numbers})  # each process came further than the last
    n_steps = 2 * numbers[-1] + 10

    runs.start(folder, n_steps)
    assert runs.status() == 0
    killed = load_file(runs.out)
    assert not parts(folder)
    runs.start(tmp_path / "calm", n_steps)
    assert runs.status() == 0
    calm = load_file(runs.out)
    assert killed.keys() == calm.keys() and len(calm) == 3
    assert all(killed[name].equal(calm[name]) for name in calm)
    print(f"{in_a_write} of {len(numbers)} kills fell into a write; {n_steps} steps")
