"""Tokenizers: round trips, the same ids as others, and one line for what is wrong."""

import json
import re
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer.data import BytePairTokenizer, ByteTokenizer
from transformer.sources import sentence_pairs, text, weights_path

END = "<|endoftext|>"
TEXTS = {
    "english": "It's the best of times, it WAS the worst: 1859.  Isn't it?\n\n\tYes.",
    "code": "def f(x):\n\treturn {'a': x ** 2}  # ok\r\n\n\n    print(f(1_000))\n",
    "chinese": "注意力机制让每个词元向其他词元取信息。龘䶮𠮷",
    "emoji": "👨‍👩‍👧 😀🤖🏳️‍🌈 ☺️ e\u0301 é",
    "odd": "a\0b \x01\x7f\x80\u0085\u00a0\u180e\u200b\u2028\u3000\x1c\x1d ½²③ ß\ufeff",
    "last": "\uffff\U0010ffff \U0010ffff",
    "spaces": " \n \t  a  \n\n b\r\n\r\n   ",
    "names": f"one{END}two <|endoftext <||> {END}{END}",
    "empty": "",
}
anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
often = settings(max_examples=100, derandomize=True, deadline=None, database=None)


@pytest.fixture(scope="module")
def gpt2():
    """GPT-2's own vocabulary."""
    return BytePairTokenizer.from_files(
        weights_path("gpt2-vocab"), weights_path("gpt2-merges")
    )


@pytest.fixture(scope="module")
def tiktoken():
    """OpenAI's merges of the same files, with OpenAI's pattern."""
    from tiktoken import Encoding
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    files = str(weights_path("gpt2-merges")), str(weights_path("gpt2-vocab"))
    ranks = data_gym_to_mergeable_bpe_ranks(*files)
    return Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={END: 50256},
    )


@pytest.fixture(scope="module")
def small():
    """A vocabulary of Chinese messages."""
    return BytePairTokenizer.train(zh(), 700)


def zh():
    """The Chinese messages of an interface, one a line."""
    return "\n".join(chinese for _, chinese in sentence_pairs())


@pytest.fixture(params=["bytes", "gpt2", "small"])
def tokenizer(request):
    """Each kind of tokenizer."""
    if request.param == "bytes":
        return ByteTokenizer()
    return request.getfixturevalue(request.param)


# --- there and back -------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXTS)
def test_text_comes_back(name, tokenizer):
    ids = tokenizer.encode(TEXTS[name])
    assert tokenizer.decode(ids) == TEXTS[name]
    assert tokenizer.decode_bytes(ids) == TEXTS[name].encode()
    assert set(ids).isdisjoint(tokenizer.specials.values())


@often
@given(anything)
def test_any_text_comes_back(gpt2, s):
    for tokenizer in (gpt2, ByteTokenizer()):
        ids = tokenizer.encode(s)
        assert tokenizer.decode(ids) == s
        assert tokenizer.decode(torch.tensor(ids, dtype=torch.int32)) == s


def test_bytes_are_their_own_ids():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("Aé\0") == [65, 195, 169, 0]
    assert [tokenizer.decode_bytes([i]) for i in range(256)] == [
        bytes([i]) for i in range(256)
    ]
    assert (tokenizer.vocab_size, tokenizer.end) == (257, 256)
    bare = ByteTokenizer(specials=())
    assert (bare.vocab_size, bare.end, bare.specials) == (256, None, {})
    assert bare.encode(END, specials=True) == bare.encode(END)


@pytest.mark.parametrize("data", [b"\xff", b"a\xe4\xbd", b"\xc0\x80", b"\xed\xa0\x80b"])
def test_invalid_bytes_are_decoded_as_python_and_the_library_do(data, gpt2):
    byte_id = {piece: i for i, piece in enumerate(gpt2.pieces)}
    ids = [byte_id[bytes([b])] for b in data]
    wanted = data.decode("utf-8", errors="replace")
    assert "\ufffd" in wanted
    assert gpt2.decode(ids) == gpt2.core.decode(ids) == wanted
    assert ByteTokenizer().decode(data) == wanted
    assert gpt2.decode_bytes(ids) == data


# --- special tokens -------------------------------------------------------------------


def test_names_of_special_tokens_are_text_unless_asked_for(tokenizer):
    s = f"{END}a {END}{END}b"
    ids = tokenizer.encode(s, specials=True)
    assert Counter(ids)[tokenizer.end] == 3 and ids[0] == tokenizer.end
    assert tokenizer.end not in tokenizer.encode(s)
    assert tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode(s)) == s


def test_longest_special_token_wins():
    tokenizer = ByteTokenizer(["<a", "<a>", "(.*)"])
    assert tokenizer.encode("<a><a(.*)x", specials=True) == [257, 256, 258, 120]


@pytest.mark.parametrize("names", [["a b"], [""], ["\n"], ["x", "x"], [" x"]])
def test_odd_special_tokens_are_refused(names):
    for make in (ByteTokenizer, lambda s: BytePairTokenizer([], specials=s)):
        with pytest.raises(
            ValueError, match=r"^special tokens must be words that .* \["
        ):
            make(names)


def test_special_token_that_is_ordinary_too_is_refused():
    for merges, name in (([], "a"), ([("a", "b")], "ab")):
        with pytest.raises(ValueError, match=f"and special ones, apart, got '{name}'$"):
            BytePairTokenizer(merges, specials=[name])


# --- the same as others ---------------------------------------------------------------


@pytest.mark.parametrize("name", TEXTS)
def test_gpt2_ids_are_those_of_tiktoken(name, gpt2, tiktoken, conform):
    for s in (TEXTS[name], TEXTS[name] * 40):
        ours, theirs = gpt2.encode(s), tiktoken.encode_ordinary(s)
        assert ours == theirs
        assert gpt2.encode(s, specials=True) == tiktoken.encode(
            s, allowed_special="all"
        )
        ids = torch.tensor(ours), torch.tensor(theirs)
        conform(
            "BytePairTokenizer", "forward", *ids, reference="tiktoken.Encoding", atol=0
        )


def test_gpt2_ids_of_long_texts_are_those_of_tiktoken(gpt2, tiktoken):
    with open(json.__file__, encoding="utf-8") as file:
        code = file.read()
    for s in (text()[:200_000], zh(), code):
        assert gpt2.encode(s) == tiktoken.encode_ordinary(s)


@often
@given(anything)
def test_gpt2_ids_of_any_text_are_those_of_tiktoken(gpt2, tiktoken, s):
    assert gpt2.encode(s) == tiktoken.encode_ordinary(s)


@pytest.mark.parametrize(
    "s, ids",
    [
        ("hello world", [31373, 995]),  # tiktoken's tests
        ("hello <|endoftext|>", [31373, 220, 50256]),
        ("0" * 7, [24598]),
        ("Hello world", [15496, 995]),  # the documentation of transformers
        (" Hello world", [18435, 995]),
    ],
)
def test_gpt2_ids_are_those_that_were_published(s, ids, gpt2):
    assert gpt2.encode(s, specials=True) == ids


def test_gpt2_vocabulary_follows_from_its_merges(gpt2):
    assert (gpt2.vocab_size, len(gpt2.merges), gpt2.end) == (50257, 50000, 50256)
    assert BytePairTokenizer(gpt2.merges).vocab == gpt2.vocab


def by_hand(words, n_tokens):
    """Merges of counted words, recounted from scratch after each; words are tuples."""
    from transformer.data import byte_symbols

    ids = {symbol: i for i, symbol in enumerate(sorted(byte_symbols()))}
    merges = []
    while len(ids) < n_tokens:
        counts = Counter()
        for word, n in words.items():
            for pair in pairwise(word):
                counts[pair] += n
        best = max(counts, key=lambda p: (counts[p], -ids[p[0]], -ids[p[1]]))
        merges.append(best)
        ids.setdefault("".join(best), len(ids))
        merged = Counter()
        for word, n in words.items():
            new, i = [], 0
            while i < len(word):
                step = 2 if word[i : i + 2] == best else 1
                new.append("".join(word[i : i + step]))
                i += step
            merged[tuple(new)] += n
        words = merged
    return merges


@pytest.mark.parametrize("seed", range(5))
def test_training_gives_the_merges_of_loops(seed):
    draw = torch.Generator().manual_seed(seed)
    letters = torch.randint(0, 3, (600,), generator=draw).tolist()
    s = "".join("ab "[i] for i in letters)  # runs of one letter, many ties
    tokenizer = BytePairTokenizer.train(s, 281)
    cut = tokenizer.core.pre_tokenizer.pre_tokenize_str(s)
    words = Counter(tuple(word) for word, _ in cut)
    assert tokenizer.merges == by_hand(words, 280)


def test_training_gives_the_merges_of_loops_on_real_text():
    s = zh()[:6000]
    tokenizer = BytePairTokenizer.train(s, 351)
    cut = tokenizer.core.pre_tokenizer.pre_tokenize_str(s)
    assert tokenizer.merges == by_hand(Counter(tuple(w) for w, _ in cut), 350)


def test_smaller_vocabulary_is_the_beginning_of_a_larger_one(small):
    less = BytePairTokenizer.train(zh(), 400)
    n = len(less.merges)
    assert n < len(small.merges) and less.merges == small.merges[:n]


def test_texts_are_trained_on_one_by_one():
    parts = ["aab" * 3, "aab" * 3]
    apart = BytePairTokenizer.train(iter(parts), 260)
    assert apart.merges == [("a", "a"), ("aa", "b"), ("aab", "aab")]
    assert BytePairTokenizer.train("aab" * 3 + " " + "aab" * 3, 260).merges[:2] == [
        ("a", "a"),
        ("aa", "b"),
    ]


def test_merging_to_a_token_that_exists_gives_it_no_second_id():
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]
    tokenizer = BytePairTokenizer(merges)
    assert tokenizer.vocab_size == 256 + 3 + 1
    assert tokenizer.encode("abc") == [tokenizer.vocab["abc"]]


# --- files ----------------------------------------------------------------------------


def test_saved_tokenizer_comes_back(tokenizer, tmp_path):
    if isinstance(tokenizer, BytePairTokenizer):
        tokenizer.save(tmp_path / "t.json")
        loaded = BytePairTokenizer.load(str(tmp_path / "t.json"))
        for s in TEXTS.values():
            assert loaded.encode(s, specials=True) == tokenizer.encode(s, specials=True)
        assert loaded.vocab == tokenizer.vocab and loaded.merges == tokenizer.merges
        assert loaded.specials == tokenizer.specials and loaded.end == tokenizer.end
        assert loaded.pieces == tokenizer.pieces
    else:
        assert not hasattr(tokenizer, "save")


def test_several_special_tokens_are_saved_in_order(tmp_path):
    tokenizer = BytePairTokenizer([("a", "b")], specials=["<z>", "<a>"])
    tokenizer.save(tmp_path / "t.json")
    loaded = BytePairTokenizer.load(tmp_path / "t.json")
    assert loaded.specials == {"<z>": 257, "<a>": 258} and loaded.end == 257


def test_others_read_a_saved_tokenizer(gpt2, tmp_path):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    gpt2.save(tmp_path / "tokenizer.json")
    path = str(tmp_path / "tokenizer.json")
    other, fast = (
        Tokenizer.from_file(path),
        PreTrainedTokenizerFast(tokenizer_file=path),
    )
    for s in TEXTS.values():
        ids = gpt2.encode(s, specials=True)
        assert other.encode(s).ids == fast(s)["input_ids"] == ids
    assert other.get_vocab_size() == len(fast) == gpt2.vocab_size


def test_files_with_special_tokens_first_are_read(tmp_path):
    symbols = sorted(BytePairTokenizer([]).vocab, key=BytePairTokenizer([]).vocab.get)
    tokens = ["<s>", "<pad>", *symbols[:256], "ab"]
    (tmp_path / "v.json").write_text(
        json.dumps({t: i for i, t in enumerate(tokens)}), encoding="utf-8"
    )
    (tmp_path / "m.txt").write_text("#version: 0.2\na b\n", encoding="utf-8")
    tokenizer = BytePairTokenizer.from_files(tmp_path / "v.json", tmp_path / "m.txt")
    assert tokenizer.specials == {"<s>": 0, "<pad>": 1} and tokenizer.end == 0
    assert tokenizer.encode("<s>abc", specials=True) == [0, 258, tokenizer.vocab["c"]]
    assert tokenizer.decode([0, 258]) == "<s>ab"


# --- refused in one line --------------------------------------------------------------


@contextmanager
def refuses(error, message):
    """What is inside raises the error in one line that matches."""
    with pytest.raises(error, match=message) as caught:
        yield
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("half", ["\ud83d", "\udc00"])
def test_lone_surrogate_is_refused(half, tokenizer):
    rule = f"^text must have no lone surrogates, got U\\+{ord(half):04X} at position "
    with refuses(ValueError, rule + "2$"):
        tokenizer.encode(f"ab{half}c")
    with refuses(ValueError, rule + "0$"):
        BytePairTokenizer.train(["fine", half], 257)


@pytest.mark.parametrize("given", [b"bytes", None, 5, ["a"]])
def test_what_is_no_text_is_refused(given, tokenizer):
    with refuses(TypeError, f"^text must be str, got {type(given).__name__}$"):
        tokenizer.encode(given)


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_id_outside_the_vocabulary_is_refused(wrong, tokenizer):
    last = tokenizer.vocab_size - 1
    with refuses(ValueError, f"^ids must be in 0 … {last}, got {wrong}$"):
        tokenizer.decode([0, wrong, 1])
    assert tokenizer.decode([tokenizer.end]) == END


@pytest.mark.parametrize("vocab_size", [256, 0])
def test_vocabulary_without_room_for_bytes_is_refused(vocab_size):
    rule = "^vocab_size - specials must be at least 256, got "
    with refuses(ValueError, f"{rule}{vocab_size - 1}$"):
        BytePairTokenizer.train("a", vocab_size)
    assert BytePairTokenizer.train("a", 257).merges == []


def test_text_without_enough_pairs_is_refused():
    with refuses(ValueError, "pairs for 299 tokens that occur twice, got 258$"):
        BytePairTokenizer.train("aab aab", 300)


APART = "^tokens must be the 256 bytes, what is merged, and special ones, apart, got "


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda v: v.update(a=v["b"]), "^ids must be 0 … 257, each once$"),
        (lambda v: v.update(a=300), "^ids must be 0 … 257, each once$"),
        (lambda v: v.update(a=float(v["a"])), "^ids must be 0 … 257, each once$"),
        (lambda v: v.update(a=None), "^ids must be 0 … 257, each once$"),
        (lambda v: v.update(xx=v.pop("Ā")), APART),
        (lambda v: v.update(xx=len(v)), APART + "'xx'$"),
    ],
)
def test_vocabulary_that_does_not_fit_is_refused(change, message):
    vocab = BytePairTokenizer([("a", "b")]).vocab
    assert BytePairTokenizer([("a", "b")], vocab=vocab).vocab == vocab
    change(vocab)
    with refuses(ValueError, message):
        BytePairTokenizer([("a", "b")], vocab=vocab)


@pytest.mark.parametrize("pair", [("x", "yz"), ("a",), ("a", "b", "c"), ("a", "")])
def test_merge_of_what_is_no_token_is_refused(pair):
    rule = "^merges must be pairs that differ, got "
    with refuses(ValueError, f"{rule}{re.escape(str([pair]))}$"):
        BytePairTokenizer([("b", "c"), pair])
    with refuses(ValueError, f"{rule}a copy$"):  # which of two places would count?
        BytePairTokenizer([("b", "c"), ("c", "a"), ("b", "c")])
    with refuses(ValueError, f"{APART}''$"):
        BytePairTokenizer([("", "")])


@pytest.mark.parametrize("names", [[5], ["a", None], [b"a"]])
def test_special_token_that_is_no_text_is_refused(names):
    for make in (ByteTokenizer, lambda s: BytePairTokenizer([], specials=s)):
        with refuses(TypeError, "^text must be str, got (int|NoneType|bytes)$"):
            make(names)
        with refuses(ValueError, "^text must have no lone surrogates, got U.D83D"):
            make(["\ud83d"])


@pytest.mark.parametrize("ids", [[1.0], [True], ["a"], [None], "ab", [[1]], [1e99]])
def test_what_is_no_id_is_refused(ids, tokenizer):
    with refuses(ValueError, f"^ids must be in 0 … .*, got {re.escape(repr(ids[0]))}$"):
        tokenizer.decode(ids)


def test_ids_come_in_any_container_of_integers(tokenizer):
    ids = tokenizer.encode("to be")
    array = torch.tensor(ids)
    for same in (tuple(ids), iter(ids), array, array.numpy()):
        assert tokenizer.decode(same) == "to be"


def test_vocabulary_that_no_memory_holds_is_refused():
    rule = "pairs for 999999999999 tokens that occur twice, got 258$"
    with refuses(ValueError, rule):  # the library alone ends the process
        BytePairTokenizer.train("aab aab", 10**12)


@pytest.mark.parametrize("content", ["[1]", "{", "3", "[" * 100_000])
def test_file_without_a_json_object_is_refused(content, tmp_path):
    path, merges = tmp_path / "v.json", weights_path("gpt2-merges")
    path.write_text(content, encoding="utf-8")
    for read in (BytePairTokenizer.load, BytePairTokenizer.from_files):
        given = (path,) if read == BytePairTokenizer.load else (path, merges)
        with refuses(ValueError, f"^{re.escape(str(path))} must hold a JSON object$"):
            read(*given)


def test_files_that_are_no_vocabulary_are_refused(tmp_path):
    merges, vocab = weights_path("gpt2-merges"), weights_path("gpt2-vocab")
    read, path = BytePairTokenizer.from_files, tmp_path / "v.json"
    with refuses(ValueError, "must hold a JSON object"):
        read(merges, vocab)  # swapped
    path.write_text("{}", encoding="utf-8")
    with refuses(ValueError, "tokens must be the 256 bytes"):
        read(path, merges)
    path.write_text('{"a": "x"}', encoding="utf-8")
    with refuses(ValueError, "^ids must be in 0 … 0, got 'x'$"):
        read(path, merges)
    (binary := tmp_path / "m.txt").write_bytes(b"a b\n\xff\xfe\n")
    with refuses(ValueError, f"^{re.escape(str(binary))} must hold text in UTF-8$"):
        read(vocab, binary)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none", merges)


@pytest.mark.parametrize(
    "change, part",
    [
        (lambda d: d["pre_tokenizer"].update(add_prefix_space=True), "pre_tokenizer"),
        (lambda d: d.update(normalizer={"type": "NFC"}), "normalizer"),
        (lambda d: d["model"].update(ignore_merges=True), "model"),
        (lambda d: d["model"].update(type="WordPiece"), "model"),
        (lambda d: d["model"].pop("merges"), "form"),
        (lambda d: d["model"].update(merges=None), "form"),
        (lambda d: d["model"].update(merges=[5]), "form"),
        (lambda d: d["model"].update(vocab=[1]), "form"),
        (lambda d: d.pop("model"), "form"),
        (lambda d: d.update(model="BPE"), "form"),
        (lambda d: d.update(added_tokens=[{}]), "form"),
        (lambda d: d["added_tokens"][0].update(lstrip=True), "added_tokens"),
        (lambda d: d["added_tokens"][0].update(id=3), "added_tokens"),
        (lambda d: d.update(truncation={"max_length": 2}), "truncation"),
    ],
)
def test_tokenizer_of_another_kind_is_refused(change, part, tmp_path):
    path = tmp_path / "t.json"
    BytePairTokenizer([("a", "b")]).save(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    rule = f"^{re.escape(str(path))} must be byte-level BPE with GPT-2's pattern"
    with refuses(ValueError, f"{rule}, got another {part}$"):
        BytePairTokenizer.load(path)


def test_file_with_merges_as_text_is_read(tmp_path):
    path = tmp_path / "t.json"
    BytePairTokenizer([("a", "b")]).save(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    data["model"]["merges"] = ["a b"]  # as older versions of the library write it
    path.write_text(json.dumps(data), encoding="utf-8")
    assert BytePairTokenizer.load(path).merges == [("a", "b")]


def test_absent_library_is_said_in_one_line():
    code = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "from transformer.data import BytePairTokenizer, ByteTokenizer\n"
        "assert ByteTokenizer().encode('a') == [97]\n"
        "BytePairTokenizer([])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    wanted = "ImportError: BytePairTokenizer needs tokenizers: "
    wanted += "pip install 'measured-transformer[models]'"
    assert done.stderr.strip().splitlines()[-1] == wanted


def test_module_does_not_import_the_library_by_itself():
    code = "import sys, transformer.data; assert 'tokenizers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
