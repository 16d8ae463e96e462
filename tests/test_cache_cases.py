"""Reported faults of caches, as cases.md restates them."""

import pytest
import torch
from cache_oracle import SCHEMES, decoder, padded, prompts
from test_cache import in_pieces
from torch.testing import assert_close

from transformer.cache import KVCache, RollingCache, read
from transformer.sampling import generate
from transformer.window import window_mask

each_scheme = pytest.mark.parametrize("scheme", SCHEMES)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("n_prompt", [3, 4, 5, 6, 9])
@pytest.mark.parametrize("chunk", [2, 3, 5, 9])
def test_case_30_a_prompt_longer_than_the_window(n_prompt, chunk):
    banded, plain = decoder(window=4), decoder()
    tokens = prompts(2, n_prompt + 3)
    band = window_mask(n_prompt + 3, n_prompt + 3, 4)[None, None]
    whole = plain(tokens, mask=band)
    assert_close(banded(tokens), whole, rtol=0, atol=1e-5)
    sizes = [min(chunk, n_prompt - i) for i in range(0, n_prompt, chunk)] + [1] * 3
    for model in (banded, plain):
        found = in_pieces(model, tokens, RollingCache(4, n_spare=1), sizes)
        assert_close(found, whole, rtol=0, atol=1e-5)


def test_case_30_slots_stay_in_the_order_of_the_text():
    cache = RollingCache(4, n_spare=1)
    for p in range(6):
        place = torch.full((1, 1, 1, 1), float(p))
        keys = cache(0)(place, place, place, None)[1]
    assert keys.flatten().tolist() == [2, 3, 4, 5]


@each_scheme
def test_case_31_the_offset_grows_by_the_number_of_new_tokens(scheme):
    model, tokens = decoder(scheme), prompts(2, 12)
    whole, cache = model(tokens), KVCache()
    for size, at in ((6, 0), (1, 6), (1, 7), (1, 8), (3, 9)):
        assert cache.length == at
        piece = tokens[:, at : at + size]
        assert cache.positions(piece).tolist() == list(range(at, at + size))
        found = read(model, piece, cache, n_last=size)
        assert_close(found, whole[:, at : at + size], rtol=0, atol=1e-5)


@each_scheme
def test_case_31_calls_with_and_without_a_cache_take_turns(scheme):
    model, other, tokens = decoder(scheme), decoder(scheme, seed=1), prompts(3, 8)
    for batch in (3, 1, 2):
        cached = in_pieces(model, tokens[:batch], KVCache(), (5, 1, 2))
        assert_close(cached, model(tokens[:batch]), rtol=0, atol=1e-5)
        theirs = in_pieces(other, tokens[:batch], KVCache(), (8,))
        assert_close(theirs, other(tokens[:batch]), rtol=0, atol=1e-5)


@each_scheme
@pytest.mark.parametrize("side", ["left", "right"])
def test_case_33_padded_prompts_write_what_each_writes_alone(scheme, side):
    model, rows = decoder(scheme), [prompts(1, n, n)[0] for n in (3, 5)]
    alone = [generate(model, row[None], 8)[0, len(row) :] for row in rows]
    for pad in (0, int(alone[0][2])):  # the second is also a token that is written
        tokens, mask = padded(rows, 5, side, pad)
        found = generate(model, tokens, 8, mask=mask)
        assert found[:, 5:].equal(torch.stack(alone))


def test_case_33_positions():
    tokens, mask = padded([prompts(1, n)[0] for n in (3, 5)], 5)
    found = KVCache().positions(tokens, mask)
    assert found.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
