"""What a cache promises: what is read in pieces equals what is read at once."""

import pytest
import torch
from cache_oracle import SCHEMES, C, H, V, decoder, padded, prompts
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

from transformer.attention import MultiHeadAttention, padding_mask
from transformer.cache import KVCache, RollingCache, StaticCache, check_writer, read
from transformer.grouped import kv_cache_bytes
from transformer.model import Encoder, LanguageModel
from transformer.window import window_attention

N = 12
AT_ONCE = "all tokens at once"
SPLITS = [(n, *[size] * ((N - n) // size)) for n in range(1, N) for size in (1, 3)]
SPLITS = [(*s, N - sum(s)) if sum(s) < N else s for s in SPLITS]
CACHES = {"KVCache": KVCache, "StaticCache": lambda: StaticCache(N)}
each_cache = pytest.mark.parametrize("kind", CACHES)
each_scheme = pytest.mark.parametrize("scheme", SCHEMES)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def in_pieces(model, tokens, cache, sizes, mask=None, **how):
    """Logits of all positions, read piece by piece."""
    assert sum(sizes) == tokens.size(1)
    masks = [None] * len(sizes) if mask is None else mask.split(sizes, -1)
    found = []
    for piece, real in zip(tokens.split(sizes, 1), masks, strict=True):
        positions = cache.positions(piece, real)
        how_now = {"positions": positions, "mask": real, "prepare": cache, **how}
        found.append(model(piece, **how_now))
    return torch.cat(found, 1)


@each_scheme
@each_cache
def test_every_position_of_every_split_equals_the_whole(scheme, kind, conform):
    model, tokens = decoder(scheme), prompts(2, N)
    whole = model(tokens)
    for sizes in SPLITS:
        found = in_pieces(model, tokens, CACHES[kind](), sizes)
        conform(kind, "cached", found, whole, reference=AT_ONCE, atol=1e-5)


@each_scheme
@each_cache
def test_one_graph_of_fixed_shapes_equals_the_whole(scheme, kind, conform):
    """A compiled step, one token at a time, without a second compilation."""
    if kind == "KVCache" or scheme == "relative":
        pytest.skip("counts from the last key")
    torch.compiler.reset()
    counter = CompileCounter()
    step = torch.compile(read, backend=counter, fullgraph=True, dynamic=False)
    model, tokens, cache = decoder(scheme), prompts(2, N), StaticCache(70)
    found = [read(model, tokens[:, :5], cache, n_last=5)]
    found += [step(model, tokens[:, [i]], cache) for i in range(5, N)]
    how = {"reference": AT_ONCE, "atol": 1e-5}
    conform(kind, "compile", torch.cat(found, 1), model(tokens), **how)
    assert counter.frame_count == 1 and cache.n_slots == 128 and cache.length == N


@pytest.mark.parametrize("side", ["left", "right"])
@each_scheme
@each_cache
def test_padding_changes_no_row(scheme, kind, side):
    model, rows = decoder(scheme), [prompts(1, n, n)[0] for n in (3, 5, 1)]
    tokens, mask = padded(rows, 5, side)
    tail = prompts(3, 4, seed=7)
    cache = CACHES[kind]()
    in_pieces(model, tokens, cache, (5,), mask)
    found = in_pieces(model, tail, cache, (1, 2, 1))
    for b, row in enumerate(rows):
        alone = model(torch.cat((row, tail[b]))[None])[0, len(row) :]
        if side == "left" or scheme not in ("alibi", "relative") or b == 1:
            assert_close(found[b], alone, rtol=0, atol=1e-5)
    wanted = [[3, 4, 5, 6], [5, 6, 7, 8], [1, 2, 3, 4]]
    cache.rewind(4)
    assert cache.positions(tail).tolist() == wanted


@each_scheme
def test_what_padding_holds_makes_no_difference(scheme):
    model, rows = decoder(scheme), [prompts(1, n, n)[0] for n in (3, 5)]
    found = []
    for pad in (0, 16):
        tokens, mask = padded(rows, 5, pad=pad)
        cache = KVCache()
        in_pieces(model, tokens, cache, (2, 3), mask)
        found.append(in_pieces(model, prompts(2, 3), cache, (1, 1, 1)))
    assert found[0].equal(found[1])


def test_positions_of_padded_prompts():
    tokens, mask = padded([prompts(1, n)[0] for n in (3, 5)], 5)
    cache = KVCache()
    assert cache.positions(tokens, mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert cache.positions(tokens).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kv", [1, 2, 3, 6])
@each_cache
def test_shared_heads(kv, kind):
    model, tokens = decoder(kv=kv), prompts(2, N)
    found = in_pieces(model, tokens, CACHES[kind](), (4, 1, 3, 4))
    assert_close(found, model(tokens), rtol=0, atol=1e-5)


@each_cache
def test_what_was_read_twice_as_cross_attention(kind):
    model, tokens = decoder(cross=True), prompts(2, N)
    how = {"context": torch.randn(2, 7, C)}
    how["context_mask"] = padding_mask(torch.tensor([7, 4]), 7)
    found = in_pieces(model, tokens, CACHES[kind](), (4, 1, 1, 6), **how)
    assert_close(found, model(tokens, **how), rtol=0, atol=1e-5)


@pytest.mark.parametrize("own_window", [True, False])
@pytest.mark.parametrize("window", [1, 3, 4, 30])
@pytest.mark.parametrize("spare", [1, 3, 64])
def test_rolling_equals_the_band(own_window, window, spare, conform):
    banded, tokens = decoder(window=window), prompts(2, N)
    model = banded if own_window else decoder()
    whole = banded(tokens)
    for sizes in [*SPLITS, (N,), (2,) * 6, (5, 5, 2)]:
        cache = RollingCache(window, n_spare=spare)
        found = in_pieces(model, tokens, cache, sizes)
        how = {"reference": AT_ONCE, "atol": 1e-5}
        conform("RollingCache", "cached", found, whole, **how)
        assert cache.stores["k1"].size(-2) == window + spare and cache.length == N


@each_cache
def test_windows(kind):
    model, tokens = decoder(window=4), prompts(2, N)
    for sizes in SPLITS:
        found = in_pieces(model, tokens, CACHES[kind](), sizes)
        assert_close(found, model(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("spare", [1, 8])
def test_rolling_with_padding(spare):
    model, rows = decoder(window=3), [prompts(1, n, n)[0] for n in (3, 8)]
    tokens, mask = padded(rows, 8)
    tail = prompts(2, 4, seed=7)
    cache = RollingCache(3, n_spare=spare)
    in_pieces(model, tokens, cache, (3, 1, 4), mask)
    found = in_pieces(model, tail, cache, (1, 2, 1))
    for b, row in enumerate(rows):
        alone = model(torch.cat((row, tail[b]))[None])[0, len(row) :]
        assert_close(found[b], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [0, 1, 3, 7])
@pytest.mark.parametrize("kind", [*CACHES, "RollingCache"])
def test_rewound_as_if_never_read(n, kind):
    rolling = kind == "RollingCache"
    model, tokens = decoder(window=3 if rolling else None), prompts(2, N)
    cache = RollingCache(3, n, 1) if rolling else CACHES[kind]()
    read(model, tokens[:, :3], cache)
    for i in range(n):
        read(model, torch.full((2, 1), i), cache)
    cache.rewind(n)
    assert cache.length == 3
    found = in_pieces(model, tokens[:, 3:], cache, (1, 4, 4))
    assert_close(found, model(tokens)[:, 3:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [*CACHES, "RollingCache"])
def test_rewound_padding_counts_no_more(kind):
    cache = RollingCache(9) if kind == "RollingCache" else CACHES[kind]()
    tokens, mask = padded([prompts(1, n)[0] for n in (3, 5)], 5)
    read(decoder(), tokens, cache, mask=mask)
    read(decoder(), tokens, cache, mask=mask)
    cache.rewind(5)
    assert cache.positions(tokens[:, :2]).tolist() == [[3, 4], [5, 6]]
    cache.rewind(4)
    assert cache.positions(tokens[:, :2]).tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize("kind", [*CACHES, "RollingCache"])
def test_reordered_texts_go_on_as_their_new_selves(kind):
    model, tokens = decoder(window=4), prompts(3, N)
    cache = RollingCache(4) if kind == "RollingCache" else CACHES[kind]()
    read(model, tokens[:, :5], cache)
    rows = torch.tensor([2, 0, 0, 1])
    cache.reorder(rows)
    mixed = torch.cat((tokens[rows, :5], prompts(4, 3, seed=3)), 1)
    found = read(model, mixed[:, 5:], cache, n_last=3)
    assert_close(found, model(mixed)[:, 5:], rtol=0, atol=1e-5)


def test_full_static_cache_says_so_and_writes_nothing():
    model, tokens = decoder(), prompts(1, 64)
    cache = StaticCache(60)
    read(model, tokens[:, :62], cache)
    before = {name: store.clone() for name, store in cache.stores.items()}
    rule = "^this cache holds 64 tokens, got 3 more after 62$"
    with pytest.raises(ValueError, match=rule):
        read(model, tokens[:, :3], cache)
    assert cache.length == 62
    assert all(cache.stores[name].equal(store) for name, store in before.items())
    read(model, tokens[:, :2], cache)
    assert cache.length == 64


def test_nothing_is_shared():
    first, second, tokens = decoder(seed=0), decoder(seed=1), prompts(2, N)
    caches = [KVCache(), KVCache()]
    for model, cache in zip((first, second), caches, strict=True):
        read(model, tokens[:, :6], cache)
    found = [
        read(model, tokens[:, 6:], cache)
        for model, cache in zip((first, second), caches, strict=True)
    ]
    for model, last in zip((first, second), found, strict=True):
        assert_close(last, model(tokens)[:, -1:], rtol=0, atol=1e-5)
    assert not list(first.buffers()) and set(vars(first)) == set(vars(second))


def test_storage_is_what_the_formula_says():
    cache = KVCache(10)
    read(decoder(kv=2), prompts(3, 10), cache)
    assert cache.n_bytes == kv_cache_bytes(2, 2, C // H, 10, 3, torch.float32)
    keys = cache.stores["k0"]
    read(decoder(kv=2), prompts(3, 1), cache)
    assert cache.stores["k0"].size(-2) == 22  # doubled
    read(decoder(kv=2), prompts(3, 1), cache)
    assert cache.stores["k0"][:, :, :10].equal(keys)


def test_steps_write_in_place():
    cache = KVCache(8)
    read(decoder(), prompts(1, 4), cache)
    keys, model = cache.stores["k0"], decoder()
    read(model, prompts(1, 1), cache)
    assert cache.stores["k0"] is keys
    shared = cache(0)(*torch.zeros(3, 1, 2, 1, 4), None)[1]
    assert shared.data_ptr() == keys.data_ptr() and shared.size(-2) == 6


@pytest.mark.parametrize(
    "change",
    [
        lambda k: k[:1],
        lambda k: k[:, :1],
        lambda k: k[..., :2],
        lambda k: k.double(),
    ],
)
def test_another_text_is_refused(change):
    cache, k = KVCache(), torch.zeros(2, 2, 3, 4)
    cache(0)(k, k, k, None)
    with pytest.raises(ValueError, match=r"a cache goes on with its own texts"):
        cache(0)(k, change(k), k, None)
    assert cache.length == 3


def test_errors():
    k = torch.zeros(2, 2, 3, 4)
    with pytest.raises(ValueError, match=r"takes keys \(B, K, T, D\), got .*\(2, 3"):
        KVCache()(0)(k[0], k[0], k[0], None)
    with pytest.raises(TypeError, match=r"mask.dtype=torch.float32"):
        KVCache()(0)(k, k, k, torch.ones(2, 1, 1, 3))
    full = torch.ones(2, 1, 3, 3, dtype=torch.bool)
    with pytest.raises(
        ValueError, match=r"new tokens, \(2, 1, 1, 3\), got .*\(2, 1, 3"
    ):
        KVCache()(0)(k, k, k, full)
    for make in (KVCache, StaticCache, RollingCache):
        with pytest.raises(ValueError, match=r"whole number from 1, got .*=0"):
            make(0)
    with pytest.raises(ValueError, match=r"n_rewind must be a whole number from 0"):
        RollingCache(3, -1)
    with pytest.raises(ValueError, match=r"n_spare must be a whole number from 1"):
        RollingCache(3, 0, 0)
    cache = KVCache()
    cache(0)(k, k, k, None)
    with pytest.raises(ValueError, match=r"a cache of 3 tokens cannot forget n=4"):
        cache.rewind(4)
    with pytest.raises(ValueError, match=r"n must be a whole number from 0, got n=-1"):
        cache.rewind(-1)


def test_rewinding_past_what_a_window_keeps_is_refused():
    cache, model = RollingCache(3, n_rewind=2, n_spare=1), decoder(window=3)
    for i in range(9):
        read(model, torch.full((1, 1), i), cache)
    with pytest.raises(
        ValueError, match=r"a window of 3 needs keys that are gone .* n=6"
    ):
        cache.rewind(6)
    cache.rewind(2)
    assert cache.length == 7


def test_gradients_are_refused():
    with torch.enable_grad(), pytest.raises(RuntimeError, match=r"keeps no gradients"):
        read(decoder(), prompts(1, 3), KVCache())


def test_what_cannot_write_is_refused():
    model = decoder()
    check_writer(model)
    with pytest.raises(TypeError, match=r"only a LanguageModel writes .* got Encoder"):
        check_writer(Encoder(V, C, list(model.blocks), norm=torch.nn.LayerNorm))
    drops = LanguageModel(V, C, [], dropout=0.1)
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        check_writer(drops)
    check_writer(drops.eval())


def test_one_layer_alone():
    layer, x = (
        MultiHeadAttention(C, H, attend=window_attention(3)),
        torch.randn(2, 6, C),
    )
    cache = RollingCache(3, n_spare=2)
    found = [layer(piece, causal=True, prepare=cache(0)) for piece in x.split(1, 1)]
    assert_close(torch.cat(found, 1), layer(x, causal=True), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype, conform):
    model, tokens = decoder().to(dtype), prompts(2, N)
    cache = KVCache()
    found = in_pieces(model, tokens, cache, (5, 1, 1, 5))
    assert cache.stores["k0"].dtype == dtype
    atol = 1e-12 if dtype == torch.float64 else 0.05
    assert_close(found, model(tokens), rtol=0, atol=atol)
