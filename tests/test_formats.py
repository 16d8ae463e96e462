"""Weight files of four formats: read as their libraries do, or refused in a line."""

import json
import os
import pickle
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from transformer.formats import open_weights
from transformer.sources import weights_path
from transformer.storage import DTYPES

K_KINDS = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K".split()
FORMS = "safetensors", "gguf", "ctranslate2", "torch"


def some_tensors() -> dict[str, torch.Tensor]:
    """Tensors of several shapes, one empty and one without axes."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (6, 32), "b.c": (7,), "d": (), "e": (0, 4), "f": (2, 3, 5)}
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


def ct2_bytes(
    tensors, aliases=(), version=6, codes=None, text_errors="strict"
) -> bytes:
    """A CTranslate2 model.bin, written as its converter writes it."""
    codes = codes or {torch.float32: 0, torch.int8: 1, torch.float16: 4}

    def text(words):
        data = words.encode(errors=text_errors) + b"\0"
        return struct.pack("<H", len(data)) + data

    data = struct.pack("<I", version) + text("TestSpec")
    data += struct.pack("<II", 3, len(tensors))
    for name, tensor in tensors.items():
        data += text(name) + struct.pack("<B", tensor.ndim)
        data += struct.pack(f"<{tensor.ndim}I", *tensor.shape)
        data += struct.pack("<BI", codes[tensor.dtype], tensor.nbytes)
        data += tensor.numpy().tobytes()
    data += struct.pack("<I", len(aliases))
    return data + b"".join(text(a) + text(b) for a, b in aliases)


def write_gguf(path, tensors, facts=(), kinds=None) -> Path:
    """A GGUF file, written by the library; uint8 tensors hold blocks of a kind."""
    writer = gguf.GGUFWriter(path, "llama")
    for add, key, value in facts:
        getattr(writer, f"add_{add}")(key, value)
    for name, tensor in tensors.items():
        kind = (kinds or {}).get(name)
        writer.add_tensor(
            name, tensor.numpy(), raw_dtype=kind and gguf.GGMLQuantizationType[kind]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write(form, folder, tensors) -> Path:
    """A file of this format with these tensors."""
    if form == "safetensors":
        save_file(tensors, folder / "x.safetensors")
        return folder / "x.safetensors"
    if form == "gguf":
        facts = [("array", "words", ["one", "two"] * 20), ("array", "n", [*range(99)])]
        return write_gguf(folder / "x.gguf", tensors, facts)
    if form == "torch":
        torch.save(tensors, folder / "x.pt")
        return folder / "x.pt"
    (folder / "model.bin").write_bytes(ct2_bytes(tensors))
    return folder / "model.bin"


def refuses(path, *words, error=ValueError):
    """The file is refused in one line that holds the words, in order."""
    with pytest.raises(error, match=".*".join(words)) as caught:
        open_weights(path)
    assert "\n" not in str(caught.value)


# --- read as the libraries read them --------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_each_format_gives_back_what_was_written(form, tmp_path):
    tensors = some_tensors()
    if form == "gguf":  # which has no tensor without axes
        del tensors["d"], tensors["e"]
    weights = open_weights(write(form, tmp_path, tensors))
    assert weights.form == form and list(sorted(weights)) == sorted(tensors)
    for name, tensor in tensors.items():
        assert weights[name].equal(tensor)
        assert weights.place(name).shape == tuple(tensor.shape)
    assert len(weights) == len(tensors) and "a" in weights and "z" not in weights
    with pytest.raises(KeyError):
        weights["z"]


@pytest.mark.parametrize("code", DTYPES)
def test_each_dtype_of_safetensors_is_read_as_the_library_reads_it(code, tmp_path):
    raw = torch.arange(48, dtype=torch.uint8) % (2 if code == "BOOL" else 99)
    tensor = raw.view(DTYPES[code]).view(2, -1)
    save_file({"x": tensor, "odd": raw[:3].clone()}, tmp_path / "x.safetensors")
    ours = open_weights(tmp_path / "x.safetensors")["x"]
    theirs = load_file(tmp_path / "x.safetensors")["x"]
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert ours.view(torch.uint8).equal(theirs.view(torch.uint8))


def test_minilm_is_the_librarys(conform):
    path = weights_path("minilm")
    ours, theirs = open_weights(path), load_file(path)
    assert ours.keys() == theirs.keys()
    how = {"reference": "safetensors.torch.load_file", "atol": 0.0}
    for name, tensor in theirs.items():
        conform("open_weights", "forward", ours[name], tensor, **how)


def test_smollm2_is_what_gguf_dequantizes_to_the_last_bit(conform):
    path = weights_path("smollm2")
    ours, theirs = open_weights(path), gguf.GGUFReader(path).tensors
    assert [tensor.name for tensor in theirs] == list(ours) and len(ours) == 272
    for tensor in theirs:
        want = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        conform(
            *("open_weights", "forward", ours[tensor.name], want),
            reference="gguf.dequantize",
            atol=0.0,
        )


def test_whisper_has_its_tied_projection_and_finite_numbers():
    weights = open_weights(weights_path("whisper").parent)
    assert weights.metadata["spec"] == "WhisperSpec" and "lang_ids" in weights.config
    tied = weights.metadata["aliases"]
    assert tied == {"decoder/projection/weight": "decoder/embeddings/weight"}
    one, other = next(iter(tied.items()))
    assert weights[one].equal(weights[other]) and weights[one].shape == (51864, 384)
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize("kind", K_KINDS)
def test_each_kind_of_blocks_is_dequantized_as_gguf_does(kind, tmp_path, conform):
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(0).integers(0, 256, (40, 3 * size), dtype=np.uint8)
    path = tmp_path / "x.gguf"
    write_gguf(path, {"w": torch.from_numpy(raw)}, kinds={"w": kind})
    with np.errstate(invalid="ignore"):  # scales drawn at random may be infinite
        ours = open_weights(path)["w"]
        want = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert ours.shape == (40, 3 * block) and ours.dtype == torch.float32
    assert_close(ours, torch.from_numpy(want), rtol=0, atol=0, equal_nan=True)
    good = ours.isfinite() & (ours.abs() < 1e30)
    conform(
        *("open_weights", "dtype", ours[good], torch.from_numpy(want)[good]),
        reference="gguf.dequantize",
        atol=0.0,
    )


def test_blocks_of_many_pieces_are_those_of_the_whole(tmp_path):
    numbers = torch.randn(70_000, 32, generator=torch.Generator().manual_seed(0))
    kind = gguf.GGMLQuantizationType.Q8_0
    raw = gguf.quantize(numbers.numpy(), kind)
    path = tmp_path / "x.gguf"
    write_gguf(path, {"w": torch.from_numpy(raw)}, kinds={"w": "Q8_0"})
    want = torch.from_numpy(gguf.dequantize(raw, kind))
    assert open_weights(path)["w"].equal(want)
    assert (want - numbers).abs().max() < 0.05
    target = torch.empty(70_000, 32, dtype=torch.bfloat16)
    open_weights(path).copy("w", target)
    assert target.equal(want.bfloat16())


def test_gguf_values_of_every_type_are_read(tmp_path):
    numbers = {"uint8": 200, "int8": -3, "uint16": 60_000, "int16": -9, "uint32": 9}
    numbers |= {"int32": -9, "float32": 0.5, "uint64": 2**60, "int64": -(2**60)}
    numbers |= {"float64": 0.1, "bool": True, "string": "Wörter 文字"}
    facts = [(add, f"of.{add}", value) for add, value in numbers.items()]
    facts += [("array", "list.words", ["a", "", "é"]), ("array", "list.n", [1, -2, 3])]
    facts += [("array", "list.x", [0.5, 2.0])]
    path = write_gguf(tmp_path / "x.gguf", {"w": torch.ones(4)}, facts)
    found = open_weights(path).metadata
    assert {key: found[key] for _, key, _ in facts[:12]} == {
        key: value for _, key, value in facts[:12]
    }
    assert found["list.words"] == ["a", "", "é"]
    assert list(found["list.n"]) == [1, -2, 3] and list(found["list.x"]) == [0.5, 2.0]


def test_ctranslate2_reads_kinds_and_numbers_at_odd_bytes(tmp_path):
    tensors = {"x": torch.tensor([1, -2], dtype=torch.int8), "yy": torch.ones(3).half()}
    tensors |= {"h" * n: torch.ones(n).half() for n in range(1, 5)}
    data = ct2_bytes(tensors | {"zzz": torch.arange(5.0)}, [("tied", "yy")])
    (tmp_path / "model.bin").write_bytes(data)
    weights = open_weights(tmp_path)
    assert weights["x"].equal(tensors["x"]) and weights["zzz"].equal(torch.arange(5.0))
    assert all(weights[name].equal(tensor) for name, tensor in tensors.items())
    assert weights["tied"].equal(tensors["yy"])
    starts = [weights.place("h" * n).begin % 2 for n in range(1, 5)]
    assert 0 < sum(starts) < 4, "at odd and at even bytes"
    assert weights.metadata["spec"] == "TestSpec"


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files_old_and_new_are_read(zipped, tmp_path):
    tensors = some_tensors() | {"p": torch.nn.Parameter(torch.ones(2))}
    tensors["t"] = torch.arange(6).view(2, 3).t()
    how = {"_use_new_zipfile_serialization": zipped}
    torch.save(tensors, tmp_path / "x.pt", **how)
    weights = open_weights(tmp_path / "x.pt")
    assert all(weights[name].equal(tensors[name]) for name in tensors)
    assert not weights["p"].requires_grad


# --- views, copies, memory ------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_writing_to_a_tensor_leaves_the_file_as_it_is(form, tmp_path):
    path = write(form, tmp_path, {"a": torch.ones(6, 32)})
    before = path.read_bytes()
    open_weights(path)["a"].fill_(7)
    assert path.read_bytes() == before and open_weights(path)["a"].eq(1).all()


@pytest.mark.parametrize("form", FORMS)
def test_copy_fills_and_converts(form, tmp_path):
    tensor = torch.randn(600, 500, generator=torch.Generator().manual_seed(1))
    weights = open_weights(write(form, tmp_path, {"a": tensor, "z": torch.ones(3)}))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        target = torch.nn.Parameter(torch.zeros(600, 500, dtype=dtype))
        weights.copy("a", target)
        assert target.equal(tensor.to(dtype))
    assert weights["a"].equal(tensor)


def test_what_was_written_to_a_view_survives_copies_of_it(tmp_path):
    weights = open_weights(write("safetensors", tmp_path, {"a": torch.ones(300, 500)}))
    weights["a"].fill_(7)
    target = torch.zeros(300, 500)
    weights.copy("a", target)
    assert target.eq(7).all() and weights["a"].eq(7).all()


@pytest.mark.parametrize(
    "target", [torch.zeros(32), torch.zeros(32, 6), torch.zeros(32, 6).t()]
)
def test_copy_refuses_another_shape_and_does_not_broadcast(target, tmp_path):
    weights = open_weights(write("safetensors", tmp_path, {"a": torch.ones(6, 32)}))
    with pytest.raises(ValueError, match=r"contiguous, \(6, 32\), got target=\("):
        weights.copy("a", target)
    assert target.eq(0).all()


def test_check_names_missing_surplus_and_other_shapes(tmp_path):
    tensors = {"a": torch.ones(6, 2), "b": torch.ones(3), "c": torch.ones(1)}
    weights = open_weights(write("safetensors", tmp_path, tensors))
    weights.check({"a": (6, 2), "b": torch.Size([3]), "c": [1]})
    words = r"missing: d; surplus: c; different: a \(\(6, 2\), here \(2, 6\)\)"
    with pytest.raises(ValueError, match=words):
        weights.check({"a": (2, 6), "b": (3,), "d": (1,)})


PEAK = """
import sys, torch
from transformer.formats import open_weights
def kilobytes(what):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))
before = kilobytes("VmRSS")
weights = open_weights(sys.argv[1])
opened = kilobytes("VmHWM") - before
weights["encoder.layer.3.attention.self.query.weight"].sum()
one = kilobytes("VmHWM") - before
kept = dict(weights)
sum(t.sum() for t in kept.values())
print(opened, one, kilobytes("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_opening_is_free_a_tensor_costs_itself_and_all_of_them_the_file():
    path = weights_path("minilm")
    command = [sys.executable, "-c", PEAK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    opened, one, every = (int(word) / 1024 for word in done.stdout.split())
    size = path.stat().st_size / 2**20
    assert opened < 8 and one < opened + 8, "megabytes; the file has 87"
    assert 0.9 * size < every < 1.2 * size


# --- folders and shards ---------------------------------------------------------------


def shards(folder, **changes) -> Path:
    """A folder with two shards and their index."""
    files = {f"model-0000{i}-of-00002.safetensors": {} for i in (1, 2)}
    one, two = files
    files[one]["a"], files[two]["b"] = torch.ones(2), torch.zeros(3)
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    index = {"metadata": {"total_size": 20}, "weight_map": {"a": one, "b": two}}
    index |= changes
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index), encoding="utf-8"
    )
    return folder


def test_shards_are_one_model(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "config.json").write_text('{"layers": 2}', encoding="utf-8")
    weights = open_weights(shards(tmp_path))
    assert sorted(weights) == ["a", "b"] and weights["b"].equal(torch.zeros(3))
    assert weights.config == {"layers": 2} and weights.metadata == {"total_size": 20}


def test_missing_and_surplus_shards_are_named(tmp_path):
    folder = shards(tmp_path)
    extra = folder / "model-00003-of-00003.safetensors"
    save_file({"c": torch.ones(1)}, extra)
    refuses(folder, "surplus: model-00003-of-00003.safetensors")
    extra.unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()
    refuses(folder, "missing: model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    "weight_map, words",
    [
        ({"a": 1, "b": 2}, ["different: a .1, here 2."]),
        ({"a": 1, "b": 2, "c": 2}, ["missing: c"]),
        ({"a": 1}, ["surplus: model-00002"]),
        ({"a": 1, "b": "../x.safetensors"}, ["missing: ../x.safetensors"]),
        ({"a": 1, "b": 7}, ["no weight_map"]),
        ([], ["no weight_map"]),
        (None, ["no weight_map"]),
    ],
)
def test_an_index_must_fit_its_shards(weight_map, words, tmp_path):
    if isinstance(weight_map, dict):
        full = "model-0000{}-of-00002.safetensors"
        weight_map = {
            n: full.format(f) if f in (1, 2) else f for n, f in weight_map.items()
        }
        if words[0].startswith("different"):
            weight_map = {"a": full.format(2), "b": full.format(1)}
            words = ["different: a .model-00001.*, here model-00002"]
    save_file({"b": torch.ones(1)}, tmp_path / "x.safetensors")
    (tmp_path / "inner").mkdir()
    refuses(shards(tmp_path / "inner", weight_map=weight_map), *words)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder = shards(tmp_path)
    both = {"b": torch.zeros(3), "a": torch.ones(2)}
    save_file(both, folder / "model-00002-of-00002.safetensors")
    refuses(folder, "a name stands twice")


def test_a_folder_must_hold_one_weight_file(tmp_path):
    refuses(tmp_path, "must hold one weight file", "none of", error=FileNotFoundError)
    for name in ("x", "y"):
        save_file({"a": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    words = "must hold one weight file", "x.safetensors, y.safetensors"
    refuses(tmp_path, *words, error=FileNotFoundError)
    gone = tmp_path / "gone.gguf"
    refuses(gone, "must be a weight file", "gone.gguf", error=FileNotFoundError)


def test_a_config_that_is_none_is_refused(tmp_path):
    path = write("safetensors", tmp_path, {"a": torch.ones(1)})
    for text in ("[1]", "{", '{"a": 1, "a": 2}', "[" * 100_000):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        refuses(path, "config.json must hold a JSON object")


# --- refused in one line --------------------------------------------------------------


def st(table, numbers=b"", length=None) -> bytes:
    """A safetensors file with this table, or text in its place."""
    text = (table if isinstance(table, str) else json.dumps(table)).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + numbers


def entry(shape, begin, end, kind="F32") -> dict:
    """A row of a table."""
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


BAD_SAFETENSORS = {
    "short": (b"\1\0", ["cut short", "8 bytes are due"]),
    "long table": (
        st({}, length=10**9),
        ["its table may have 2 bytes, got 1000000000"],
    ),
    "huge table": (st({}, length=2**64 - 1), ["got 18446744073709551615"]),
    "no json": (st("{oops"), ["must hold a JSON object"]),
    "a list": (st("[]"), ["must hold a JSON object, got \\[\\]"]),
    "deep": (st("[" * 100_000), ["must hold a JSON object", "Recursion"]),
    "twice": (st('{"a": 1, "a": 2}'), ["a name stands twice"]),
    "no utf-8": (struct.pack("<Q", 2) + b"{\xff", ["must hold a JSON object"]),
    "no entry": (st({"a": 3}), ["bad entry", "a 3"]),
    "keys": (st({"a": {"dtype": "F32", "shape": [1]}}), ["bad entry"]),
    "offsets": (st({"a": entry([1], "0", 4)}, b"1234"), ["bad entry"]),
    "kind": (st({"a": entry([1], 0, 4, "F4")}, b"1234"), ["a of F4; supported are"]),
    "kind list": (st({"a": entry([1], 0, 4, [1])}, b"1234"), ["not supported"]),
    "negative": (st({"a": entry([-1], 0, 4)}, b"1234"), ["absurd shape"]),
    "fraction": (st({"a": entry([1.0], 0, 4)}, b"1234"), ["absurd shape"]),
    "true": (st({"a": entry([True], 0, 4)}, b"1234"), ["absurd shape"]),
    "huge": (st({"a": entry([2**40] * 2, 0, 4)}, b"1234"), ["absurd shape"]),
    "huge, empty": (st({"a": entry([0, 2**40, 2**40], 0, 0)}), ["absurd shape"]),
    "axes": (st({"a": entry([1] * 65, 0, 4)}, b"1234"), ["absurd shape"]),
    "shape": (
        st({"a": entry([2], 0, 4)}, b"1234"),
        ["does not fit its bytes", "\\[2\\]"],
    ),
    "reversed": (st({"a": entry([1], 4, 0)}, b"1234"), ["does not fit its bytes"]),
    "before": (st({"a": entry([1], -4, 0)}, b"1234"), ["overlap"]),
    "beyond": (st({"a": entry([2], 0, 8)}, b"1234"), ["cut short or damaged"]),
    "overlap": (
        st({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
        ["tensors that overlap"],
    ),
    "hole": (
        st({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)),
        ["bytes of no tensor"],
    ),
    "surplus": (st({"a": entry([1], 0, 4)}, bytes(5)), ["bytes of no tensor"]),
    "empty": (b"", ["x.safetensors is empty"]),
}


@pytest.mark.parametrize("fault", BAD_SAFETENSORS)
def test_bad_safetensors_is_refused(fault, tmp_path):
    data, words = BAD_SAFETENSORS[fault]
    (tmp_path / "x.safetensors").write_bytes(data)
    refuses(tmp_path / "x.safetensors", *words)


def gg(
    *pairs, tensors=(), version=3, n_tensors=None, n_pairs=None, numbers=b""
) -> bytes:
    """A GGUF file: pairs (key, type, bytes), tensors (name, shape, kind, at)."""

    def text(words):
        return struct.pack("<Q", len(words)) + words.encode()

    counts = len(tensors) if n_tensors is None else n_tensors
    data = b"GGUF" + struct.pack("<IQ", version, counts)
    data += struct.pack("<Q", len(pairs) if n_pairs is None else n_pairs)
    for key, code, value in pairs:
        data += text(key) + struct.pack("<I", code) + value
    for name, shape, kind, at in tensors:
        data += text(name) + struct.pack("<I", len(shape))
        data += struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, at)
    return data.ljust(-(-len(data) // 32) * 32, b"\0") + numbers


def u32(n):
    return struct.pack("<I", n)


def array_of(code, n, data=b""):
    return struct.pack("<IQ", code, n) + data


ONE = [("a", [8], 0, 0)]
BAD_GGUF = {
    "magic": (b"GGML" + bytes(40), ["must be GGUF of version 2 or 3", "GGML"]),
    "version 1": (gg(version=1), ["version 2 or 3", "1"]),
    "big-endian": (gg(version=3 << 24), ["version 2 or 3", "50331648"]),
    "many tensors": (gg(n_tensors=2**63), ["cut short or damaged"]),
    "many pairs": (gg(n_pairs=2**63), ["cut short or damaged"]),
    "array": (gg(("k", 9, array_of(5, 2**63))), ["cut short", "bytes are due"]),
    "words": (gg(("k", 9, array_of(8, 2**63))), ["cut short", "bytes are due"]),
    "nested": (gg(("k", 9, array_of(9, 1, array_of(5, 0)))), ["type 9, 9: not supp"]),
    "type": (gg(("k", 77, b"1234")), ["type 77, 77: not supported"]),
    "twice": (gg(("k", 4, u32(1)), ("k", 4, u32(2))), ["a name stands twice"]),
    "pieces": (gg(("split.count", 2, b"\3\0")), ["one of 3 pieces"]),
    "alignment": (gg(("general.alignment", 4, u32(0))), ["no power of two: 0"]),
    "alignment 3": (gg(("general.alignment", 4, u32(3))), ["no power of two: 3"]),
    "alignment word": (
        gg(("general.alignment", 8, struct.pack("<Q", 1) + b"x")),
        ["no power of two: 'x'"],
    ),
    "kind": (
        gg(tensors=[("a", [256], 16, 0)], numbers=bytes(99)),
        ["a of kind 16; supp"],
    ),
    "rows": (gg(tensors=[("a", [31], 8, 0)], numbers=bytes(99)), ["does not fit"]),
    "axes": (
        gg(tensors=[("a", [1] * 70, 0, 0)], numbers=bytes(32)),
        ["70 axes, 4 are"],
    ),
    "product": (
        gg(tensors=[("a", [4194305, 4194305, 211106198978564], 0, 0)]),
        ["absurd shape"],
    ),
    "name twice": (gg(tensors=ONE * 2, numbers=bytes(64)), ["a name twice: a"]),
    "overlap": (
        gg(tensors=[*ONE, ("b", [8], 0, 0)], numbers=bytes(64)),
        ["tensors that overlap"],
    ),
    "hole": (
        gg(tensors=[*ONE, ("b", [8], 0, 64)], numbers=bytes(96)),
        ["bytes of no tensor"],
    ),
    "short": (gg(tensors=ONE, numbers=bytes(31)), ["cut short or damaged"]),
    "surplus": (gg(tensors=ONE, numbers=bytes(64)), ["bytes of no tensor"]),
    "offset": (gg(tensors=[("a", [8], 0, 2**63)], numbers=bytes(32)), ["absurd"]),
}


@pytest.mark.parametrize("fault", BAD_GGUF)
def test_bad_gguf_is_refused(fault, tmp_path):
    data, words = BAD_GGUF[fault]
    (tmp_path / "x.gguf").write_bytes(data)
    start = time.perf_counter()
    refuses(tmp_path / "x.gguf", *words)
    assert time.perf_counter() - start < 1


def test_good_gguf_by_hand_is_read(tmp_path):
    data = gg(("k", 4, u32(7)), tensors=ONE, numbers=struct.pack("<8f", *range(8)))
    (tmp_path / "x.gguf").write_bytes(data)
    weights = open_weights(tmp_path / "x.gguf")
    assert weights.metadata == {"k": 7} and weights["a"].equal(torch.arange(8.0))


@pytest.mark.parametrize("kind", sorted(set(K_KINDS) - {"Q4_1", "Q8_0"}))
def test_kinds_that_gguf_reads_say_so_where_it_is_missing(kind, tmp_path, monkeypatch):
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    raw = torch.zeros(1, size, dtype=torch.uint8)
    path = write_gguf(tmp_path / "x.gguf", {"w": raw}, kinds={"w": kind})
    monkeypatch.setitem(sys.modules, "gguf", None)
    words = rf"{kind} need gguf: pip install 'measured-transformer\[models\]"
    refuses(path, words, error=ImportError)
    smol = open_weights(weights_path("smollm2"))
    assert smol["blk.0.attn_k.weight"].shape == (192, 576)


BAD_CT2 = {
    "version": (ct2_bytes({}, version=5), ["version 5, 6 is supported"]),
    "kind": (
        ct2_bytes({"a": torch.ones(2)}, codes={torch.float32: 9}),
        ["a of the kind of number 9"],
    ),
    "bytes": (
        ct2_bytes({"a": torch.ones(2)}, codes={torch.float32: 4}),
        ["does not fit its bytes"],
    ),
    "alias": (ct2_bytes({"a": torch.ones(2)}, [("b", "z")]), ["bad alias: b of z"]),
    "taken": (ct2_bytes({"a": torch.ones(2)}, [("a", "a")]), ["bad alias: a of a"]),
    "surplus": (ct2_bytes({"a": torch.ones(2)}) + b"!", ["1 bytes after its last"]),
    "short": (ct2_bytes({"a": torch.ones(2)})[:-9], ["cut short"]),
    "name": (
        ct2_bytes({"\udcff": torch.ones(2)}, text_errors="surrogateescape"),
        ["text at byte 23 that is no UTF-8"],
    ),
}


@pytest.mark.parametrize("fault", BAD_CT2)
def test_bad_ctranslate2_is_refused(fault, tmp_path):
    data, words = BAD_CT2[fault]
    (tmp_path / "model.bin").write_bytes(data)
    refuses(tmp_path, *words)


class Code:
    """What a pickle with code looks like."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_torch_file_is_refused_and_not_run(zipped, tmp_path):
    proof = tmp_path / "proof"
    how = {"_use_new_zipfile_serialization": zipped}
    torch.save({"w": torch.ones(2), "x": Code(proof)}, tmp_path / "x.pt", **how)
    refuses(tmp_path / "x.pt", "runs no code and holds tensors: it asks for")
    assert not proof.exists()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", ["x.pt", "x.bin", "x.safetensors", "x.gguf", "x"])
def test_a_bare_pickle_is_refused_under_any_name(protocol, name, tmp_path, recwarn):
    proof = tmp_path / "proof"
    (tmp_path / name).write_bytes(pickle.dumps({"w": Code(proof)}, protocol))
    refuses(tmp_path / name, name)
    assert not proof.exists() and not recwarn.list


@pytest.mark.parametrize(
    "held, words",
    [
        (torch.nn.Linear(2, 2), "asks for torch.nn"),
        ({"a": torch.ones(2), "epoch": 3}, "plain tensors by name, got 'epoch' of int"),
        ({"state_dict": {"a": torch.ones(2)}}, "got 'state_dict' of dict"),
        ([torch.ones(2)], "plain tensors by name, got 0 of list"),
        ({7: torch.ones(2)}, "plain tensors by name, got 7 of torch.float32"),
        ({"a": torch.ones(2).to_sparse()}, "plain tensors by name, got 'a'"),
        ({"a": torch.ones(2) * 1j}, "got 'a' of torch.complex64"),
    ],
)
def test_what_is_no_dictionary_of_tensors_is_refused(held, words, tmp_path):
    torch.save(held, tmp_path / "x.pt")
    refuses(tmp_path / "x.pt", words)


def test_a_compressed_archive_is_refused(tmp_path):
    torch.save({"a": torch.zeros(1000)}, tmp_path / "x.pt")
    with (
        zipfile.ZipFile(tmp_path / "x.pt") as archive,
        zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    refuses(tmp_path / "y.pt", "must be a whole torch file", "ValueError")


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "x.onnx").write_bytes(b"\x08\x07\x12\x07pytorch")
    refuses(tmp_path / "x.onnx", "x.onnx is of none of the four formats")
