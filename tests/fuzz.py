"""Damaged files for every reader of the package: what each says, takes and touches.

A reader may give what a file holds, or refuse it with a ValueError or OSError of one
line. It may take twice the file's size and a mebibyte of memory, starts no process,
runs no code of the file, and opens nothing for writing. tests/test_fuzz.py reads a few
hundred inputs of each format; `make fuzz` reads ten thousand and counts the outcomes.

Usage: python tests/fuzz.py [--inputs N] [--seed N] [--format NAME]
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import gguf
import torch
from test_formats import write
from torch import nn

from transformer import command, families, records, storage, training, zoo
from transformer.checkpoint import load_checkpoint, save_checkpoint
from transformer.data import BytePairTokenizer
from transformer.formats import open_weights

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "fuzz"  # the inputs that a reader did not take well
SLACK = 1 << 20  # bytes of memory beside twice the file
ROOM = 1 << 30  # bytes that a process may reserve beside those that it has
SECONDS = 5  # of the processor, for one file
LENGTH = 1500  # characters of an error
Damage = Callable[[bytes, random.Random], bytes]

# --- the readers --------------------------------------------------------------------


class Format(NamedTuple):
    """A file of its kind and what reads it.

    Args:
        make: Writes a whole file into a folder, and what must lie beside it.
        read: Reads the file.
        seal: Gives JSON the digest that fits it, so that damage gets past the digest.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], object]
    seal: Callable[[dict], dict] | None = None


def some_tensors() -> dict[str, torch.Tensor]:
    """Tensors whose table is as long as their numbers."""
    generator = torch.Generator().manual_seed(0)
    return {f"t{i}.w": torch.randn(4, 32, generator=generator) for i in range(9)}


def weights(form: str) -> Format:
    """A weight file of this format, and every tensor in it."""

    def read(path: Path) -> list:
        found = open_weights(path)
        return [found[name].shape for name in found]

    return Format(lambda folder: write(form, folder, some_tensors()), read)


def shards(folder: Path) -> Path:
    """An index of two files of weights."""
    names, files = iter(some_tensors().items()), {}
    for i in (1, 2):
        name = f"model-0000{i}-of-00002.safetensors"
        some = dict(next(names) for _ in range(3))
        write("safetensors", folder, some).rename(folder / name)
        files |= dict.fromkeys(some, name)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": files}), "utf-8")
    return path


def config(folder: Path) -> Path:
    """What lies beside weights and says how to use them."""
    write("safetensors", folder, some_tensors())
    found = {"model_type": "llama", "rope_scaling": {"factor": 2.0}, "eos": [1, 2]}
    path = folder / "config.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    return path


def tokenizer(name: str) -> Callable[[Path], Path]:
    """A vocabulary in one file, or in two as GPT-2's."""

    def make(folder: Path) -> Path:
        made = BytePairTokenizer.train("the cat sat on the other mat " * 9, 270)
        made.save(folder / "tokenizer.json")
        vocab = json.dumps(made.vocab)
        (folder / "vocab.json").write_text(vocab, encoding="utf-8")
        lines = ["#version: 0.2", *map(" ".join, made.merges)]
        (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
        return folder / name

    return make


def read_pair(path: Path) -> BytePairTokenizer:
    """The tokenizer of the two files in this folder."""
    folder = path.parent
    return BytePairTokenizer.from_files(folder / "vocab.json", folder / "merges.txt")


def small_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, which has made a step."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def checkpoint(suffix: str) -> Callable[[Path], Path]:
    """One of the two files of a checkpoint."""

    def make(folder: Path) -> Path:
        how = {"step": 1, "data": {"at": 3}, "schedule": {"rate": 0.1}}
        return save_checkpoint(folder, *small_model(), **how).with_suffix(suffix)

    return make


def read_checkpoint(path: Path) -> dict:
    """The checkpoint, loaded into a model and an optimizer."""
    return load_checkpoint(path.with_suffix(".json"), *small_model())


def seal_checkpoint(state: dict) -> dict:
    """With the digest that a checkpoint's JSON needs."""
    state = {name: value for name, value in state.items() if name != "digest"}
    return state | {"digest": storage.digest(state)}


def result(folder: Path) -> Path:
    """The recorded result of an experiment."""
    path = folder / "experiment.json"
    facts = {"device": "cpu", "seeds": [0, 1], "hash": "a" * 64}
    records._write_record(path, facts | {"result": {"loss": [1.5, 2.5]}})
    return path


def read_result(path: Path) -> dict:
    """The result, if it was recorded for this experiment; a refusal is its own."""
    try:
        return records._read_record(path, "a" * 64)
    except RuntimeError as error:  # as documented
        raise ValueError(str(error)) from None


def run_of_command(folder: Path) -> Path:
    """What `transformer-train` wrote down about a run, with its checkpoint."""
    shape = {"n_layers": 1, "d_model": 8, "n_heads": 2, "vocab_size": 257}
    save_checkpoint(folder, command.small_decoder(**shape), step=1)
    path = folder / "run.json"
    path.write_text(json.dumps({"shape": shape, "tokens": 4, "seed": 0}), "utf-8")
    return path


def log(folder: Path) -> Path:
    """What `train` writes beside its checkpoints."""
    path = folder / "log.csv"
    rows = [f"{i},128,{2.5 / i},1.25,0.003,0.5" for i in range(1, 9)]
    text = "\n".join([",".join(training.COLUMNS), *rows])
    path.write_text(text + "\n", encoding="utf-8")
    return path


SIZES = {"vocab_size": 270, "hidden_size": 8, "num_attention_heads": 2}
SIZES |= {"num_hidden_layers": 1, "intermediate_size": 12, "hidden_act": "silu"}
SIZES |= {"max_position_embeddings": 16}
SLOW = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500.0}
SLOW |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SLOW |= {"original_max_position_embeddings": 32}
MODELS = {
    "llama": SIZES | {"num_key_value_heads": 1, "rope_parameters": SLOW},
    "mistral": SIZES | {"sliding_window": 3, "tie_word_embeddings": True},
    "bert": SIZES | {"hidden_act": "gelu", "architectures": ["BertForMaskedLM"]},
    "gpt2": {
        **{"vocab_size": 270, "n_embd": 8, "n_head": 2, "n_layer": 1, "n_inner": 9},
        **{"n_positions": 16, "activation_function": "gelu_new"},
    },
    "whisper": {
        **{"vocab_size": 270, "d_model": 8, "activation_function": "gelu"},
        **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 9 for side in ("encoder", "decoder")},
        **{"num_mel_bins": 3, "max_source_positions": 4, "max_target_positions": 5},
    },
}


def saved_model(kind: str, name: str) -> Callable[[Path], Path]:
    """A file of the folder that `zoo.save` writes, with a tokenizer."""

    def make(folder: Path) -> Path:
        said = {"model_type": kind} | MODELS[kind]
        model = zoo.FAMILIES[kind].build(said)
        for part, parameter in model.named_parameters():
            if part.endswith("qkv.bias"):
                parameter.detach().zero_()  # Whisper's files hold none for keys
        zoo.save(model, folder, said)
        tokenizer("tokenizer.json")(folder)
        return folder / name

    return make


def gguf_model(folder: Path) -> Path:
    """A Llama with its tokenizer as one GGUF file."""
    made = BytePairTokenizer.train("the cat sat on the other mat " * 9, 270)
    writer = gguf.GGUFWriter(folder / "x.gguf", "llama")
    for name, n in zip(COUNTS, (16, 8, 1, 12, 2, 1, 4), strict=True):
        getattr(writer, f"add_{name}")(n)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*made.vocab])
    writer.add_token_types([1] * (len(made.vocab) - 1) + [3])
    writer.add_token_merges([" ".join(pair) for pair in made.merges])
    model = families.llama({"model_type": "llama"} | MODELS["llama"])
    for name, pieces in zoo.pieces_of(model, families.LLAMA_GGUF).items():
        for piece in pieces:
            rows = model.get_parameter(name).detach()[piece.rows]
            writer.add_tensor(piece.name, rows.contiguous().numpy())
    for write_part in ("header_to_file", "kv_data_to_file", "tensors_to_file"):
        getattr(writer, f"write_{write_part}")()
    writer.close()
    return folder / "x.gguf"


COUNTS = "context_length", "embedding_length", "block_count", "feed_forward_length"
COUNTS += "head_count", "head_count_kv", "rope_dimension_count"


def read_model(path: Path) -> nn.Module:
    """The model of the folder that the file is in, or of the file."""
    return zoo.load(path if path.suffix == ".gguf" else path.parent)


FORMATS = {
    "safetensors": weights("safetensors"),
    "gguf": weights("gguf"),
    "ctranslate2": weights("ctranslate2"),
    "torch": weights("torch"),
    "index": Format(shards, open_weights),
    "config": Format(config, lambda path: open_weights(path.parent)),
    "tokenizer": Format(tokenizer("tokenizer.json"), BytePairTokenizer.load),
    "vocabulary": Format(tokenizer("vocab.json"), read_pair),
    "merges": Format(tokenizer("merges.txt"), read_pair),
    "checkpoint": Format(checkpoint(".json"), read_checkpoint, seal_checkpoint),
    "checkpoint tensors": Format(checkpoint(".safetensors"), read_checkpoint),
    "result": Format(result, read_result),
    "run": Format(run_of_command, lambda path: command.load_run(path.parent)),
    "log": Format(log, training.read_log),
    **{
        f"{kind} of a folder": Format(saved_model(kind, "config.json"), read_model)
        for kind in MODELS
    },
    "model of a folder": Format(saved_model("llama", "model.safetensors"), read_model),
    "model of a GGUF": Format(gguf_model, read_model),
    "tokenizer of a folder": Format(
        saved_model("llama", "tokenizer.json"), lambda path: zoo.tokenizer(path.parent)
    ),
    "tokenizer of a GGUF": Format(gguf_model, zoo.tokenizer),
}

# --- the damage ---------------------------------------------------------------------


def truncated(whole: bytes, chance: random.Random) -> bytes:
    """The beginning of a file."""
    return whole[: chance.randrange(len(whole))]


def flipped(whole: bytes, chance: random.Random) -> bytes:
    """One to four bits turned over, more often near the beginning."""
    data = bytearray(whole)
    for _ in range(chance.randint(1, 4)):
        place = int(len(whole) * chance.random() ** chance.choice((1, 3)))
        data[place] ^= 1 << chance.randrange(8)
    return bytes(data)


def oversized(whole: bytes, chance: random.Random) -> bytes:
    """More than there was: bytes put in, or a number that claims much."""
    at = chance.randrange(len(whole))
    kind = chance.randrange(4)
    if kind == 0:
        return whole + chance.randbytes(chance.randint(1, 4096))
    if kind == 1:
        end = chance.randint(at, len(whole))
        return whole[:end] + whole[at:end] + whole[end:]
    if kind == 2:
        return whole[:at] + chance.choice((b"[", b'{"a":', b"9")) * 5000 + whole[at:]
    huge = chance.choice((2**64 - 1, 2**63 - 1, 2**40, 2**32 - 1, 2**31))
    number = struct.pack("<Q", huge)
    return whole[:at] + number + whole[at + 8 :]


JUNK = None, True, -1, 0, 7, 2**70, 1e308, float("nan"), "", "é", "x" * 3000
JUNK += [], {}, [[]], {"a": 1}, ["x", 1], "../../x"


def replaced(whole: bytes, chance: random.Random) -> bytes:
    """JSON in which one value is another, or is gone."""
    found = json.loads(whole)
    node = found
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = chance.choice(list(keys))
        deeper = isinstance(node[key], dict | list) and node[key]
        if not deeper or chance.random() < 0.2:
            break
        node = node[key]
    if chance.random() < 0.2:
        del node[key]
    else:
        node[key] = copy.deepcopy(chance.choice(JUNK))
    return json.dumps(found).encode()


def sealed(seal: Callable[[dict], dict]) -> Damage:
    """JSON in which one value is another, with a digest that fits again."""

    def damage(whole: bytes, chance: random.Random) -> bytes:
        return json.dumps(seal(json.loads(replaced(whole, chance)))).encode()

    return damage


def damages(form: Format, path: Path) -> dict[str, Damage]:
    """What can be done to a file of this format, each as often."""
    known = {"truncated": truncated, "flipped": flipped, "oversized": oversized}
    if path.suffix == ".json":
        known["replaced"] = replaced
    return known | ({"sealed": sealed(form.seal)} if form.seal else {})


# --- one reading --------------------------------------------------------------------


ACTS = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen"}
ACTS |= {"pickle.find_class", "socket.connect", "ctypes.dlopen", "os.remove"}
ACTS |= {"os.rename", "os.mkdir", "shutil.rmtree"}
LIBRARIES = tuple({sys.prefix, sys.base_prefix, str(ROOT), "<frozen"})
acts: list[str] = []  # what was done while a file was read
watching = False


def notice(event: str, arguments: tuple) -> None:
    """Write down what no reader does."""
    if not watching:
        return
    foreign = False
    if event == "exec":  # of a module of Python's libraries, imported late, or not
        name = getattr(arguments[0], "co_filename", "")
        foreign = not name.startswith(LIBRARIES)
    elif event == "open":
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        foreign = bool((arguments[2] or 0) & writes)
    if foreign or event in ACTS:
        acts.append(f"{event} {arguments!s:.200}")


sys.addaudithook(notice)


def refusal(error: BaseException) -> str:
    """The kind of an error with which a reader may refuse a file.

    Raises:
        AssertionError: It is another, or says too little or too much.
    """
    kind, said = type(error).__name__, str(error)
    plain = type(error) is ValueError or isinstance(error, OSError)
    assert plain, f"raised {kind}: {said:.300}"  # a library's own names no file
    assert said and "\n" not in said and len(said) <= LENGTH, f"said {said!r:.300}"
    return kind


def outcome(form: Format, path: Path) -> str:
    """What a reader made of a file: read, or the kind of error.

    Raises:
        AssertionError: It was none of what a reader may do.
    """
    global watching
    acts.clear()
    tracemalloc.reset_peak()
    before, start = tracemalloc.get_traced_memory()[0], time.process_time()
    watching, error = True, None
    try:
        form.read(path)
    except BaseException as raised:
        error = raised
    finally:
        watching = False
    took, more = time.process_time() - start, tracemalloc.get_traced_memory()[1]
    assert acts == [], f"did {'; '.join(acts)}"
    assert took <= SECONDS, f"took {took:.1f} s"
    limit = 2 * path.stat().st_size + SLACK
    assert more - before <= limit, f"took {more - before} bytes, {limit} are allowed"
    return "read" if error is None else refusal(error)


# --- many readings ------------------------------------------------------------------


def limit_memory() -> tuple[int, int]:
    """Let this process reserve ROOM more than it has; what its limits were."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    status = Path("/proc/self/statm")
    if status.exists():
        size = (
            int(status.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        )
        resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, old[1]))
    return old


def fuzz(name: str, n_inputs: int, folder: Path, seed: int = 0) -> tuple[dict, list]:
    """Read damaged files of a format.

    Returns:
        How often each damage came to each outcome, and what went wrong, with the path
        of the input.
    """
    form, chance = FORMATS[name], random.Random(f"{seed} {name}")
    torch.manual_seed(0)
    path = form.make(folder)
    whole, counts, faults = path.read_bytes(), collections.Counter(), []
    kinds = damages(form, path)
    old = limit_memory()
    tracemalloc.start()
    try:
        with warnings.catch_warnings(action="ignore"):
            form.read(path)  # what is imported late is there from now on
            for i in range(n_inputs):
                kind = list(kinds)[i % len(kinds)]
                path.write_bytes(kinds[kind](whole, chance))
                try:
                    counts[kind, outcome(form, path)] += 1
                except AssertionError as error:
                    counts[kind, "FAULT"] += 1
                    faults.append(f"{name}, {kind}, input {i}: {error}")
                    keep(path, f"{name}-{i}")
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, old)
    return counts, faults


def keep(path: Path, name: str) -> None:
    """Keep an input that a reader did not take well."""
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / name.replace(" ", "-")).write_bytes(path.read_bytes())


def run_one(name: str, n_inputs: int, seed: int) -> int:
    """Fuzz a format in this process and print what came of it."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        counts, faults = fuzz(name, n_inputs, Path(folder), seed)
    kinds = dict.fromkeys(kind for kind, _ in counts)
    print(
        f"{name}: {sum(counts.values()):,} inputs, {time.perf_counter() - start:.0f} s"
    )
    for kind in kinds:
        ends = {end: n for (k, end), n in sorted(counts.items()) if k == kind}
        print(f"  {kind:10}", ", ".join(f"{end} {n:,}" for end, n in ends.items()))
    print(*(f"  {fault}" for fault in faults[:20]), sep="\n", end="\n" * bool(faults))
    return int(bool(faults))


def main(words: list[str] | None = None) -> int:
    """Fuzz every format, two at a time and each in a process of its own, or one."""
    parser = argparse.ArgumentParser(description="Damaged files for every reader.")
    parser.add_argument("--inputs", type=int, default=10_000, help="of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=FORMATS)
    given = parser.parse_args(words)
    if given.format:
        return run_one(given.format, given.inputs, given.seed)

    def one(name: str) -> int:
        options = ["--inputs", str(given.inputs), "--seed", str(given.seed)]
        command = [sys.executable, __file__, "--format", name, *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        print(done.stdout.decode("utf-8", "replace"), end="", flush=True)
        return done.returncode

    with ThreadPoolExecutor(2) as two:
        return int(any(list(two.map(one, FORMATS))))


if __name__ == "__main__":
    sys.exit(main())
