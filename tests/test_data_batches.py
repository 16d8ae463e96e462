"""Streams, rows and batches: nothing lost, nothing twice, and resumed where it was."""

import io
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.testing import assert_close

from transformer.attention import MultiHeadAttention
from transformer.blocks import PreNormBlock
from transformer.data import (
    IGNORED,
    BytePairTokenizer,
    ByteTokenizer,
    batches,
    chunks,
    document_mask,
    document_positions,
    pack,
    read_tokens,
    rows,
    write_tokens,
)
from transformer.feedforward import FeedForward
from transformer.model import LanguageModel
from transformer.norms import LayerNorm
from transformer.positions import LearnedPositions
from transformer.sources import weights_path

often = settings(max_examples=100, derandomize=True, deadline=None, database=None)
documents = st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=8)
END = 10


@contextmanager
def refuses(error, message):
    """What is inside raises the error in one line that matches."""
    with pytest.raises(error, match=message) as caught:
        yield
    assert "\n" not in str(caught.value)


def joined(read):
    """All rows of a reader as two lists of lists."""
    both = list(read)
    tokens = [row for tokens, _ in both for row in tokens.tolist()]
    return tokens, [row for _, labels in both for row in labels.tolist()]


# --- packing --------------------------------------------------------------------------


@often
@given(documents)
def test_documents_come_back_from_the_stream(docs):
    stream = pack(docs, END)
    assert stream.dtype == torch.int64 and stream[0] == END
    found, part = [], []
    for token in stream[1:].tolist():
        if token == END:
            found.append(part)
            part = []
        else:
            part.append(token)
    assert found == docs and part == []


@often
@given(documents.filter(len), st.integers(1, 7), st.integers(1, 5))
def test_each_token_is_predicted_once_in_an_epoch(docs, n_tokens, batch_size):
    stream = pack(docs, END)
    tokens, labels = joined(batches(stream, n_tokens, batch_size, None, epochs=1))
    flat = [t for row in labels for t in row if t != IGNORED]
    assert flat == stream[1:].tolist()  # each once, in order, but the first end token
    seen = [
        (t, nxt)
        for a, b in zip(tokens, labels, strict=True)
        for t, nxt in zip(a, b, strict=True)
        if nxt != IGNORED
    ]
    assert [t for t, _ in seen] == stream[:-1].tolist()
    assert sum(row.count(IGNORED) for row in labels) == -(len(stream) - 1) % n_tokens


def test_rows_by_hand():
    tokens, labels = rows(torch.arange(10, 17), 4, [1, 0])
    assert tokens.tolist() == [[14, 15, 0, 0], [10, 11, 12, 13]]
    assert labels.tolist() == [[15, 16, IGNORED, IGNORED], [11, 12, 13, 14]]
    assert tokens.dtype == labels.dtype == torch.int64


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_rows_of_any_integer_type_are_the_same(dtype):
    stream = torch.arange(50).to(getattr(torch, dtype))
    assert rows(stream, 7, [0, 6])[1].equal(rows(torch.arange(50), 7, [0, 6])[1])
    tokens, labels = rows(stream, 7, [6])
    assert tokens.dtype == labels.dtype == torch.int64


def test_rows_share_no_memory_with_the_stream():
    stream = torch.arange(9)
    tokens, labels = rows(stream, 4, [0])
    tokens += 100
    labels += 100
    assert stream.equal(torch.arange(9)) and labels[0, 0] == 101


@pytest.mark.parametrize("ids", [[1.5], [True], [-1], torch.tensor([1.7]), ["a"]])
def test_what_is_no_id_is_not_packed(ids):
    for docs, end in (([[1], ids], END), ([[1]], ids[0]), ([[1]], None)):
        with refuses(ValueError, "^ids must be in 0 … 9223372036854775807, got "):
            pack(docs, end)


# --- documents in one row -------------------------------------------------------------


def test_mask_and_positions_by_hand():
    tokens = torch.tensor([[1, 2, END, 3, END, END, 4]])
    group = torch.tensor([0, 0, 1, 1, 2, 3, 3])  # an end token opens a document
    wanted = group[:, None] == group[None, :]
    assert document_mask(tokens, END).equal(wanted[None, None])
    assert document_positions(tokens, END).tolist() == [[0, 1, 0, 1, 0, 0, 1]]


@often
@given(st.lists(st.lists(st.integers(8, 10), min_size=6, max_size=6), max_size=4))
def test_mask_and_positions_equal_loops(found):
    tokens = torch.tensor(found, dtype=torch.long).view(-1, 6)
    mask, positions = document_mask(tokens, END), document_positions(tokens, END)
    assert mask.shape == (len(found), 1, 6, 6) and mask.dtype == torch.bool
    for b, row in enumerate(found):
        for i in range(6):
            opened = max([j for j in range(i + 1) if row[j] == END], default=0)
            assert positions[b, i] == i - opened
            for j in range(i + 1):
                assert mask[b, 0, i, j] == (END not in row[j + 1 : i + 1])


def model():
    """A small language model with learned positions, the same each time."""
    torch.manual_seed(0)
    blocks = [
        PreNormBlock(16, MultiHeadAttention(16, 2), FeedForward(16)) for _ in range(2)
    ]
    parts = {"positions": LearnedPositions(16, 16), "norm": LayerNorm}
    return LanguageModel(11, 16, blocks, **parts).eval()


def test_packed_documents_do_not_see_each_other():
    first, second = [1, 2, 3], [4, 5]
    stream = pack([first, second], END)[:-1][None]
    how = {
        "mask": document_mask(stream, END),
        "positions": document_positions(stream, END),
    }
    with torch.no_grad():
        packed = model()(stream, **how)
        for start, ids in ((0, [END, *first]), (4, [END, *second])):
            alone = model()(torch.tensor([ids]))
            assert_close(packed[:, start : start + len(ids)], alone)
        without = model()(stream)
    assert (without[:, 4:] - packed[:, 4:]).abs().max() > 0.01


# --- order ----------------------------------------------------------------------------


def test_each_epoch_has_each_row_once_in_another_order():
    stream = torch.arange(41)
    tokens, _ = joined(batches(stream, 4, 5, seed=1, epochs=3))
    firsts = [row[0] for row in tokens]
    epochs = [firsts[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(0, 40, 4)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_is_the_same_on_every_machine():
    tokens, _ = joined(batches(torch.arange(41), 4, 5, seed=0, epochs=1))
    assert [row[0] // 4 for row in tokens] == [5, 0, 3, 9, 6, 2, 7, 1, 8, 4]


def test_seeds_differ_and_none_keeps_the_order():
    stream = torch.arange(401)
    orders = [joined(batches(stream, 4, 8, s, epochs=1))[0] for s in (None, 0, 1, -1)]
    assert orders[0] == stream[:400].view(100, 4).tolist()
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_order_neither_uses_nor_changes_torchs_random_state():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = joined(batches(torch.arange(99), 4, 5, epochs=2))
    assert torch.get_rng_state().equal(before)
    torch.manual_seed(2)
    assert joined(batches(torch.arange(99), 4, 5, epochs=2)) == one


def test_reading_without_end_runs_on_from_epoch_to_epoch():
    stream = torch.arange(29)  # 7 rows of 4
    endless, counted = batches(stream, 4, 3), batches(stream, 4, 3, epochs=3)
    for (a, b), (c, d) in zip(endless, counted, strict=False):
        assert a.equal(c) and b.equal(d) and len(a) == 3  # 21 rows
    assert next(endless)[0].shape == (3, 4)
    with pytest.raises(StopIteration):
        next(counted)


def test_last_batch_of_the_last_epoch_may_be_shorter():
    sizes = [len(tokens) for tokens, _ in batches(torch.arange(29), 4, 4, epochs=2)]
    assert sizes == [4, 4, 4, 2]


def test_batch_larger_than_an_epoch_is_filled_from_the_next():
    tokens, _ = next(batches(torch.arange(9), 4, 5, seed=None))
    assert tokens[:, 0].tolist() == [0, 4, 0, 4, 0]


# --- resumed --------------------------------------------------------------------------


@often
@given(
    st.integers(2, 40),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 9),
    st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 2)]),
)
def test_resumed_reading_gives_what_was_left(length, n_tokens, each, stop, sizes):
    before, after = sizes
    how = {"n_tokens": n_tokens, "batch_size": 6 * each, "seed": 3, "epochs": 3}
    stream = torch.arange(length)
    whole = joined(batches(stream, **how))
    first = together(stream, how, before, stop=stop)
    state = json.loads(json.dumps(first[2]))
    rest = together(stream, how, after, state=state)
    assert first[0] + rest[0] == whole[0] and first[1] + rest[1] == whole[1]


def together(stream, how, world_size, stop=None, state=None):
    """What all ranks read, row for row, and the state in which they stand."""
    readers = [
        batches(stream, **how, rank=r, world_size=world_size, resume=state)
        for r in range(world_size)
    ]
    tokens, labels = [], []
    for parts in islice(zip(*readers, strict=True), stop):
        most = max(len(part[0]) for part in parts)
        for i in range(most):  # rank r has rows r, r + world_size, …
            for part in parts:
                tokens += part[0][i : i + 1].tolist()
                labels += part[1][i : i + 1].tolist()
    states = [reader.state() for reader in readers]
    assert stop is None or all(state == states[0] for state in states)
    return tokens, labels, states[0]


def test_state_is_small_and_counts_batches():
    reader = batches(torch.arange(29), 4, 2, seed=5)
    next(reader), next(reader)
    state = {"batch": 2, "length": 29, "n_tokens": 4, "batch_size": 2, "seed": 5}
    state["digest"] = reader.state()["digest"]
    assert reader.state() == state == json.loads(json.dumps(state))
    resumed = batches(torch.arange(29), 4, 2, seed=5, resume=state)
    assert next(resumed)[0].equal(next(reader)[0])


@pytest.mark.parametrize("length", [2, 29, 999, 1000, 5000])
def test_state_of_another_stream_of_the_same_length_is_refused(length):
    state = batches(torch.arange(length), 4, 2).state()
    batches(torch.arange(length).to(torch.uint16), 4, 2, resume=state)  # same tokens
    with refuses(ValueError, "same reading, got digest .*, here "):
        batches(torch.arange(length) + 1, 4, 2, resume=state)


READING = """
import json, os, sys
from pathlib import Path
from transformer.data import batches, read_tokens
folder = Path(sys.argv[1])
kept, part = folder / "state.json", folder / "state.part"
resume = json.loads(kept.read_text()) if kept.exists() else None
reader = batches(read_tokens(folder / "t"), 7, 4, seed=5, epochs=20, resume=resume)
for tokens, labels in reader:
    print(reader.n_read, tokens.tolist(), labels.tolist(), sep="|", flush=True)
    part.write_text(json.dumps(reader.state()))
    os.replace(part, kept)
"""


def test_killed_process_goes_on_where_it_was(tmp_path):
    write_tokens(tmp_path / "t", [range(40), range(33)], 70_000, end=69_999)
    command, found, kills = [sys.executable, "-c", READING, str(tmp_path)], {}, 0
    for n_lines in (1, 17, 30, 99):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            for i, line in enumerate(child.stdout, 1):
                if i == n_lines:
                    child.kill()  # in the middle of what follows
                if line.endswith("\n"):
                    n, batch = line.split("|", 1)
                    assert found.setdefault(int(n), batch) == batch  # or read again
        kills += child.returncode == -9
    whole = batches(read_tokens(tmp_path / "t"), 7, 4, seed=5, epochs=20)
    wanted = [f"{tokens.tolist()}|{labels.tolist()}\n" for tokens, labels in whole]
    assert kills >= 3 and [found[n + 1] for n in range(len(wanted))] == wanted


def test_taking_a_state_changes_nothing():
    one, other = batches(torch.arange(99), 4, 2), batches(torch.arange(99), 4, 2)
    for _ in range(30):
        other.state()
        assert next(one)[0].equal(next(other)[0])
    assert iter(one) is one


def test_rank_without_a_row_gets_an_empty_batch():
    for tokens, labels in batches(
        torch.arange(5), 4, 2, epochs=1, rank=1, world_size=2
    ):
        assert tokens.shape == labels.shape == (0, 4)
        assert tokens.dtype == labels.dtype == torch.int64


# --- text cut into parts --------------------------------------------------------------

SPACED = (
    "It's  a test,\n\nof 12 words.   Don't\tcut! 你好 世界\u3000了 x\x1c y\r\n z \n"
)


@pytest.fixture(scope="module")
def gpt2():
    """GPT-2's own vocabulary."""
    return BytePairTokenizer.from_files(
        weights_path("gpt2-vocab"), weights_path("gpt2-merges")
    )


@pytest.mark.parametrize("n_chars", range(1, 40))
def test_parts_of_a_text_have_the_tokens_of_the_whole(n_chars, gpt2):
    parts = list(chunks(io.StringIO(SPACED, newline=""), n_chars))
    assert "".join(parts) == SPACED and all(parts)
    assert [i for p in parts for i in gpt2.encode(p)] == gpt2.encode(SPACED)


@often
@given(st.text(st.sampled_from("a1.'s \n\t\r\x1c\u0085\u3000é"), max_size=40))
def test_parts_of_any_text_have_the_tokens_of_the_whole(gpt2, s):
    for n_chars in (1, 3):
        parts = list(chunks(io.StringIO(s, newline=""), n_chars))
        assert "".join(parts) == s
        assert [i for p in parts for i in gpt2.encode(p)] == gpt2.encode(s)


def test_signs_that_only_python_takes_for_white_space_are_not_cut_off():
    tokenizer = BytePairTokenizer([("!", "\u011c")])  # ! and the byte 1c
    for n_chars in (1, 2, 99):
        parts = list(chunks(io.StringIO("a!\x1c!\x1c b"), n_chars))
        found = [i for part in parts for i in tokenizer.encode(part)]
        assert found == tokenizer.encode("a!\x1c!\x1c b") and found.count(256) == 2


def test_text_is_cut_as_soon_as_it_can_be():
    s = "ab cd\nef " * 50
    parts = list(chunks(io.StringIO(s), 9))
    assert max(map(len, parts)) <= 9 + 3
    assert list(chunks(io.StringIO("x" * 99), 9)) == ["x" * 99]
    assert list(chunks(io.StringIO(""), 9)) == []


def test_parts_of_no_length_are_refused():
    with refuses(ValueError, "^n_chars must be positive, got n_chars=0$"):
        next(chunks(io.StringIO("a"), 0))


# --- token files ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "vocab_size, dtype",
    [(257, torch.uint16), (1 << 16, torch.uint16), ((1 << 16) + 1, torch.uint32)],
)
def test_file_gives_back_what_was_written(vocab_size, dtype, tmp_path):
    docs = [[0, 1, vocab_size - 1], [], torch.tensor([5, 6])]
    n = write_tokens(tmp_path / "t", iter(docs), vocab_size, end=7)
    found = read_tokens(str(tmp_path / "t"), vocab_size)
    assert found.dtype == dtype and n == len(found) == 9
    assert found.long().equal(pack(docs, 7))
    assert (tmp_path / "t").stat().st_size == 256 + n * dtype.itemsize
    assert os.listdir(tmp_path) == ["t"]
    assert load_file(tmp_path / "t")["tokens"].long().equal(found.long())


def test_parts_of_one_document_are_written_without_ends(tmp_path, gpt2):
    parts = chunks(io.StringIO(SPACED, newline=""), 5)
    write_tokens(tmp_path / "t", map(gpt2.encode, parts), gpt2.vocab_size)
    assert gpt2.decode(read_tokens(tmp_path / "t").long()) == SPACED


def test_empty_file_of_tokens_can_be_read(tmp_path):
    assert write_tokens(tmp_path / "t", [], 300) == 0
    found = read_tokens(tmp_path / "t")
    assert found.shape == (0,) and found.dtype == torch.uint16


def test_changes_do_not_reach_the_file(tmp_path):
    write_tokens(tmp_path / "t", [[1, 2, 3]], 300)
    before = (tmp_path / "t").read_bytes()
    found = read_tokens(tmp_path / "t")
    found[:] = torch.zeros(3, dtype=torch.uint16)
    assert (tmp_path / "t").read_bytes() == before
    (tmp_path / "t").unlink()
    assert found.long().tolist() == [0, 0, 0]


def test_batches_of_a_file_are_those_of_the_stream(tmp_path):
    docs = [[1, 2, 3], [4, 5, 6, 7, 8]]
    write_tokens(tmp_path / "t", docs, 300, end=9)
    ours = joined(batches(read_tokens(tmp_path / "t"), 3, 2, epochs=2))
    assert ours == joined(batches(pack(docs, 9), 3, 2, epochs=2))


def test_large_file_is_not_read_into_memory(tmp_path):
    n = 100_000_000
    write_tokens(tmp_path / "t", [[1, 2, 3]], 300)
    header = (tmp_path / "t").read_bytes()[8:256].rstrip()
    table = json.loads(header)
    table["tokens"] |= {"shape": [n], "data_offsets": [0, 2 * n]}
    with open(tmp_path / "t", "r+b") as file:
        file.seek(8)
        file.write(json.dumps(table).encode().ljust(248))
        file.truncate(256 + 2 * n)
    code = (
        "import resource, sys, torch\n"
        "from transformer.data import batches, read_tokens\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "next(batches(torch.arange(9), 4, 2)); before = peak()\n"
        "reader = batches(read_tokens(sys.argv[1]), 1024, 8)\n"
        "for _ in range(20): next(reader)\n"
        "print(reader.n_rows, peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "t")],
        capture_output=True,
        text=True,
        check=True,
    )
    n_rows, grown = map(int, done.stdout.split())
    assert n_rows == -(-(n - 1) // 1024)
    assert grown * 1024 < 2 * n / 4  # bytes; 160 rows of the 200 MB were used


@pytest.mark.parametrize(
    "ids, wrong", [([1, 300], 300), ([-1], -1), ([5, 70_000], 70_000)]
)
def test_id_that_would_wrap_is_refused_and_leaves_no_file(ids, wrong, tmp_path):
    with refuses(ValueError, f"^ids must be in 0 … 299, got {wrong}$"):
        write_tokens(tmp_path / "t", [[1], ids], 300)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("vocab_size", [0, -1, (1 << 32) + 1, 300.0, True, "9", None])
def test_size_of_no_vocabulary_is_refused(vocab_size, tmp_path):
    rule = re.escape("vocab_size must be in 1 … 2**32, got ")
    with refuses(ValueError, f"^{rule}{vocab_size!r}$"):
        write_tokens(tmp_path / "t", [[1]], vocab_size)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "old, new",
    [
        (b'"U16"', b'"F16"'),
        (b'"U16"', b'"U32"'),
        (b"[3]", b"[-1]"),
        (b"[3]", b'["3"]'),
        (b"[3]", b"[NaN]"),
        (b"[3]", b"[3, 1]"),
        (b"[0, 6]", b"[6, 0]"),
        (b'"300"', b'"-5"'),
        (b'"300"', b"Infinity"),
        (b'"300"', b'"70000"'),
    ],
)
def test_file_with_another_table_is_refused(old, new, tmp_path):
    path = tmp_path / "t"
    write_tokens(path, [[1, 2, 3]], 300)
    data = path.read_bytes()
    head = data[8:256].replace(old, new).rstrip().ljust(248)
    assert head != data[8:256]
    path.write_bytes(data[:8] + head + data[256:])
    with refuses(ValueError, "must be a file that write_tokens made$"):
        read_tokens(path)


def test_old_file_stays_when_writing_fails(tmp_path):
    write_tokens(tmp_path / "t", [[1, 2]], 300)

    def broken():
        yield [3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(tmp_path / "t", broken(), 300)
    assert read_tokens(tmp_path / "t").long().tolist() == [1, 2]
    assert os.listdir(tmp_path) == ["t"]


@pytest.mark.parametrize("cut", [-1, -4, 257])
def test_file_that_was_cut_short_is_refused(cut, tmp_path):
    path = tmp_path / "t"
    write_tokens(path, [[1, 2, 3]], 300)
    path.write_bytes(path.read_bytes()[:cut])
    size = path.stat().st_size
    with refuses(
        ValueError, f"^{re.escape(str(path))} must have 262 bytes, got {size}$"
    ):
        read_tokens(path)


@pytest.mark.parametrize("data", [b"", b"abc", bytes(256), b"x" * 300, None])
def test_file_of_another_kind_is_refused(data, tmp_path):
    path = tmp_path / "t"
    path.write_bytes(data or b"")
    if data is None:
        path = weights_path("minilm")
    with refuses(
        ValueError, f"^{re.escape(str(path))} must be a file that write_tokens"
    ):
        read_tokens(path)


def test_file_of_another_vocabulary_is_refused(tmp_path):
    write_tokens(tmp_path / "t", [[1]], 300)
    with refuses(ValueError, r"was made with V = 300, got vocab_size=301$"):
        read_tokens(tmp_path / "t", 301)
    with pytest.raises(FileNotFoundError):
        read_tokens(tmp_path / "none")


# --- refused in one line --------------------------------------------------------------


@pytest.mark.parametrize(
    "given, found",
    [
        ([1, 2, 3], "list"),
        (torch.rand(9), r"torch\.float32"),
        (torch.ones(9, dtype=torch.bool), r"torch\.bool"),
        ("text", "str"),
    ],
)
def test_what_is_no_stream_is_refused(given, found):
    with refuses(TypeError, f"^stream must be a tensor of token ids, got {found}$"):
        batches(given, 4, 2)


@pytest.mark.parametrize("shape", [(1,), (0,), (3, 3), ()])
def test_stream_of_another_shape_is_refused(shape):
    found = re.escape(f"got {shape}")
    with refuses(ValueError, f"^stream must be \\(N,\\), N > 1, {found}$"):
        batches(torch.ones(shape, dtype=torch.long), 4, 2)


@pytest.mark.parametrize("name", ["n_tokens", "batch_size", "epochs", "world_size"])
@pytest.mark.parametrize("value", [0, -2, 1.5, 2.0, True, "2", float("nan")])
def test_what_is_no_count_is_refused(name, value):
    how = {"n_tokens": 4, "batch_size": 2} | {name: value}
    with refuses(ValueError, f"^{name} must be a positive int, got {value!r}$"):
        batches(torch.arange(9), **how)


@pytest.mark.parametrize("rank, world_size", [(2, 2), (-1, 2), (0, 4)])
def test_ranks_that_do_not_fit_are_refused(rank, world_size):
    found = f"got rank={rank}, world_size={world_size}, 6 rows"
    rule = "^rank must be below world_size, and world_size divide batch_size"
    with refuses(ValueError, f"{rule}, {found}$"):
        batches(torch.arange(9), 4, 6, rank=rank, world_size=world_size)


@pytest.mark.parametrize(
    "change, found",
    [
        ({"n_tokens": 5}, "n_tokens 5, here 4"),
        ({"batch_size": 3}, "batch_size 3, here 2"),
        ({"seed": 1}, "seed 1, here 0"),
        ({"seed": 0.0}, "seed 0.0, here 0"),  # equal, but another order
        ({"digest": "f"}, "digest f, here [0-9a-f]{16}"),
        ({"length": 10}, "length 10, here 9"),
        ({"length": None}, "length None, here 9"),
    ],
)
def test_state_of_another_reading_is_refused(change, found):
    state = batches(torch.arange(9), 4, 2).state() | change
    with refuses(ValueError, f"^resume must be of the same reading, got {found}$"):
        batches(torch.arange(9), 4, 2, resume=state)


@pytest.mark.parametrize("batch", [-1, 1.5, "3", None, True])
def test_state_without_a_count_is_refused(batch):
    state = batches(torch.arange(9), 4, 2).state() | {"batch": batch}
    with refuses(ValueError, f"^resume must count batches from 0, got {batch}$"):
        batches(torch.arange(9), 4, 2, resume=state)
    with refuses(ValueError, "^resume must be of the same reading, got .* None, here"):
        batches(torch.arange(9), 4, 2, resume={})


@pytest.mark.parametrize("state", [[], "batch", 3, ("batch", 3)])
def test_state_that_is_no_dictionary_is_refused(state):
    found = re.escape(repr(state))
    words = f"^resume must be a dict, as state.. gives it, got {found}$"
    with refuses(TypeError, words):
        batches(torch.arange(9), 4, 2, resume=state)


@pytest.mark.parametrize("place", [-1, 2, 1.0, True])
def test_row_that_is_not_there_is_refused(place):
    assert rows(torch.arange(9), 4, [0, 1])[0].shape == (2, 4)
    with refuses(ValueError, f"^places must be in 0 … 1, got {place}$"):
        rows(torch.arange(9), 4, [0, place])


def test_bytes_of_a_text_can_be_read_as_they_are():
    stream = torch.frombuffer(bytearray(b"to be or not"), dtype=torch.uint8)
    tokens, labels = next(batches(stream, 11, 1, None))
    assert ByteTokenizer().decode(tokens[0]) == "to be or no"
    assert ByteTokenizer().decode(labels[0]) == "o be or not"
