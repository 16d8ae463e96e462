"""What whole models keep: causality, order, padding, batches, caches of any splits."""

import pytest
import torch
from cache_oracle import SCHEMES, C, H, V, decoder, prompts
from hypothesis import given
from hypothesis import strategies as st
from properties import exact, formulas, often, randoms, seeds, shuffled
from torch.testing import assert_close

from transformer.attention import MultiHeadAttention, padding_mask
from transformer.beams import beam_search
from transformer.blocks import PostNormBlock, PreNormBlock
from transformer.cache import KVCache, RollingCache, StaticCache, read
from transformer.data import document_mask, document_positions
from transformer.experiments import bench_model
from transformer.feedforward import FeedForward, GatedFeedForward
from transformer.grouped import GroupedQueryAttention
from transformer.long_range import (
    HierarchicalEncoder,
    MemoryTokens,
    SegmentMemory,
    top_k_attention,
)
from transformer.model import Encoder, EncoderDecoder, LanguageModel
from transformer.norms import LayerNorm, RMSNorm
from transformer.positions import (
    RelativeAttention,
    SinusoidalPositions,
    alibi_attention,
)
from transformer.sampling import generate, speculate
from transformer.window import window_attention

schemes = st.sampled_from(sorted(SCHEMES))
lengths = st.integers(1, 12)
batch_sizes = st.integers(1, 3)


@pytest.fixture(autouse=True)
def without_gradients():
    """No test here asks for gradients."""
    with torch.no_grad():
        yield


@st.composite
def attns(draw, n_heads=H):
    """Any layer that can be a block's `attn`."""
    kind = draw(st.sampled_from(["many", "grouped", "relative"]))
    if kind == "relative":
        return RelativeAttention(C, n_heads)
    top, window = (draw(st.integers(1, 6)) for _ in range(2))
    choices = alibi_attention(n_heads), window_attention(window), top_k_attention(top)
    attend = draw(st.one_of(formulas(), st.sampled_from(choices)))
    bias = draw(st.booleans())
    if kind == "many":
        return MultiHeadAttention(C, n_heads, attend=attend, bias=bias)
    n_kv = draw(st.sampled_from([1, 2, 3, 6]))
    return GroupedQueryAttention(C, n_heads, n_kv, attend=attend, bias=bias)


@st.composite
def blocks(draw, cross=False):
    """One block, or a hierarchy of them."""
    kind = draw(st.sampled_from([PreNormBlock, PostNormBlock]))
    norm = draw(st.sampled_from([LayerNorm, RMSNorm]))
    ffn = draw(st.sampled_from([FeedForward, GatedFeedForward]))(C, 16)
    reads = MultiHeadAttention(C, H) if cross else None
    return kind(C, draw(attns()), ffn, norm=norm, cross=reads)


@st.composite
def hierarchies(draw):
    """Blocks with convolutions between them."""
    stride = draw(st.integers(1, 3))
    kernel = stride + draw(st.integers(0, 2))
    inner = [draw(blocks()) for _ in range(draw(st.integers(1, 3)))]
    how = {"every": draw(st.integers(1, 2)), "stride": stride, "kernel": kernel}
    return HierarchicalEncoder(C, inner, **how)


@st.composite
def writers(draw, cross=False):
    """A `LanguageModel` of one or two blocks of any kind, in float64."""
    torch.manual_seed(draw(seeds))
    kinds = blocks(cross) if cross else st.one_of(blocks(), hierarchies())
    layers = draw(st.lists(kinds, min_size=1, max_size=2))
    parts = dict(SCHEMES[draw(schemes)])
    made = {k: make() for k, make in parts.items() if k in ("positions", "rope")}
    if any(isinstance(m, HierarchicalEncoder) for m in layers):
        made.pop("rope", None)
    how = {"norm": LayerNorm, "tie": draw(st.booleans())}
    return LanguageModel(V, C, layers, **made, **how).double().eval()


@st.composite
def texts(draw, most=12) -> torch.Tensor:
    """(B, T) tokens."""
    return prompts(draw(batch_sizes), draw(st.integers(1, most)), draw(seeds))


# --- causality -----------------------------------------------------------------------


@often(60)
@given(writers(), texts(), st.data())
def test_later_token_changes_no_earlier_score(model, tokens, data):
    cut = data.draw(st.integers(0, tokens.size(1) - 1))
    other = tokens.clone()
    other[:, cut:] = (tokens[:, cut:] + 1 + data.draw(st.integers(0, V - 2))) % V
    before, after = model(tokens), model(other)
    assert_close(after[:, :cut], before[:, :cut], rtol=0, atol=1e-12)
    assert not after[:, cut].isclose(before[:, cut]).all()


@often(40)
@given(writers(), texts(), lengths)
def test_a_text_scores_as_the_beginning_of_a_longer_one(model, tokens, more):
    longer = torch.cat((tokens, prompts(len(tokens), more, 1)), 1)
    assert_close(model(longer)[:, : tokens.size(1)], model(tokens), **exact)


@often(20)
@given(writers(cross=True), texts(), texts(), st.data(), seeds)
def test_answers_see_the_whole_source_and_no_later_word(
    writer, source, target, data, seed
):
    torch.manual_seed(seed)
    encoder = Encoder(V, C, [data.draw(blocks())], norm=LayerNorm).double().eval()
    model = EncoderDecoder(encoder, writer)
    n = min(len(source), len(target))
    source, target = source[:n], target[:n]
    cut = data.draw(st.integers(0, target.size(1) - 1))
    other = target.clone()
    other[:, cut:] = (target[:, cut:] + 1) % V
    before = model(source, target)
    after = model(source, other)[:, :cut]
    assert_close(after, before[:, :cut], rtol=0, atol=1e-12)
    assert not model((source + 1) % V, target).isclose(before).all(-1).any()


@often(20)
@given(st.sampled_from([MultiHeadAttention, RelativeAttention]), texts(), st.data())
def test_bench_model_looks_back_only(attn, tokens, data):
    torch.manual_seed(0)
    model = bench_model(lambda: attn(C, H), d_model=C, vocab_size=V).double()
    cut = data.draw(st.integers(0, tokens.size(1) - 1))
    other = tokens.clone()
    other[:, cut:] = (tokens[:, cut:] + 1) % V
    same = model(other)[:, :cut]
    assert_close(same, model(tokens)[:, :cut], rtol=0, atol=1e-12)


# --- order, padding, batches ---------------------------------------------------------


@often(40)
@given(texts(), st.data(), seeds)
def test_encoder_without_positions_knows_no_order(tokens, data, seed):
    torch.manual_seed(seed)
    attend = data.draw(formulas())
    attn = MultiHeadAttention(C, H, attend=attend)
    kind = data.draw(st.sampled_from([PreNormBlock, PostNormBlock]))
    block = kind(C, attn, FeedForward(C))
    model = Encoder(V, C, [block], norm=LayerNorm).double().eval()
    order = shuffled(tokens.size(1), seed)
    assert_close(model(tokens[:, order]), model(tokens)[:, order], **exact)


@often(40)
@given(texts(), st.data(), seeds)
def test_what_padding_holds_changes_no_real_token(tokens, data, seed):
    torch.manual_seed(seed)
    layer = data.draw(st.one_of(blocks(), hierarchies()))
    model = Encoder(V, C, [layer], norm=LayerNorm).double().eval()
    n = tokens.size(1)
    real = [data.draw(st.integers(1, n)) for _ in tokens]
    mask = padding_mask(torch.tensor(real), n)
    other = tokens.where(mask[:, 0, 0], (tokens + 5) % V)
    before, after = model(tokens, mask=mask), model(other, mask=mask)
    for b, length in enumerate(real):
        assert_close(after[b, :length], before[b, :length], rtol=0, atol=1e-12)


@often(40)
@given(writers(), texts())
def test_a_text_knows_nothing_of_its_neighbours(model, tokens):
    whole = model(tokens)
    for b in range(len(tokens)):
        assert_close(model(tokens[b : b + 1]), whole[b : b + 1], **exact)


@often(30)
@given(st.lists(st.lists(st.integers(1, V - 1), max_size=5), max_size=3), seeds)
def test_packed_documents_score_as_if_each_stood_alone(documents, seed):
    torch.manual_seed(seed)
    block = PreNormBlock(C, MultiHeadAttention(C, H), FeedForward(C))
    how = {"norm": LayerNorm, "positions": SinusoidalPositions(C)}
    model = LanguageModel(V, C, [block], **how).double().eval()
    documents = [torch.tensor([0, *ids]) for ids in documents]
    row = torch.cat([torch.tensor([], dtype=torch.int64), *documents])[None]
    if not row.numel():
        return
    where = {"positions": document_positions(row, 0), "mask": document_mask(row, 0)}
    packed = model(row, **where)[0].split([len(x) for x in documents])
    for mine, document in zip(packed, documents, strict=True):
        assert_close(mine, model(document[None])[0], **exact)


@often(30)
@given(texts(), st.sampled_from([1, 2, 3, 6]), st.booleans(), st.booleans(), seeds)
def test_shared_heads_are_a_layer_with_its_rows_repeated(
    tokens, kv, bias, causal, seed
):
    torch.manual_seed(seed)
    shared = GroupedQueryAttention(C, H, kv, bias=bias).double()
    full = MultiHeadAttention(C, H, bias=bias).double()
    state = dict(shared.state_dict())
    for name in ("qkv.weight", "qkv.bias")[: 1 + bias]:
        q, *parts = state[name].split([C, kv * C // H, kv * C // H])
        parts = [p.unflatten(0, (kv, -1)).repeat_interleave(H // kv, 0) for p in parts]
        state[name] = torch.cat([q, *(p.flatten(0, 1) for p in parts)])
    full.load_state_dict(state)
    x = torch.randn(*tokens.shape, C, generator=randoms(seed), dtype=torch.float64)
    assert_close(shared(x, causal=causal), full(x, causal=causal), **exact)


@often(30)
@given(texts(), st.integers(1, 4), seeds)
def test_memory_tokens_are_seen_and_cut_off_again(tokens, n_memory, seed):
    torch.manual_seed(seed)
    memory = MemoryTokens(n_memory, C).double()
    x = torch.randn(*tokens.shape, C, generator=randoms(seed), dtype=torch.float64)
    front, text = memory.split(memory(x))
    assert text.equal(x)
    assert front.equal(memory.weight.expand(len(x), -1, -1))


@often(30)
@given(texts(), st.lists(lengths, max_size=3), st.integers(1, 12), seeds)
def test_segments_with_a_memory_see_what_a_window_sees(tokens, cuts, n_kept, seed):
    torch.manual_seed(seed)
    attn = MultiHeadAttention(C, H).double()
    x = torch.randn(*tokens.shape, C, generator=randoms(seed), dtype=torch.float64)
    n, memory, found = tokens.size(1), SegmentMemory(n_kept), []
    starts = sorted({0, *(c for c in cuts if c < n)})
    for start, stop in zip(starts, [*starts[1:], n], strict=True):
        found.append(attn(x[:, start:stop], causal=True, prepare=memory))
        first = max(0, start - n_kept)  # of what is seen from here
        seen = torch.arange(n) <= torch.arange(start, stop)[:, None]
        seen[:, :first] = False
        whole = attn(x[:, start:stop], x, mask=seen[None, None])
        assert_close(found[-1], whole, **exact)


# --- caches --------------------------------------------------------------------------

KINDS = {"growing": KVCache, "static": StaticCache}


@st.composite
def splits(draw, n: int) -> list[int]:
    """Numbers of tokens that add up to n."""
    sizes = []
    while n:
        sizes.append(draw(st.integers(1, n)))
        n -= sizes[-1]
    return sizes


@often(60)
@given(schemes, st.sampled_from([1, 2, 3, 6]), texts(), st.data())
def test_any_split_gives_the_scores_of_the_whole(scheme, kv, tokens, data):
    model, n = decoder(scheme, kv=kv).double(), tokens.size(1)
    make = KINDS[data.draw(st.sampled_from(sorted(KINDS)))]
    cache, found, at = make(data.draw(st.integers(n, 20))), [], 0
    for size in data.draw(splits(n)):
        new, at = tokens[:, at : at + size], at + size
        found.append(model(new, positions=cache.positions(new), prepare=cache))
    assert cache.length == n
    assert_close(torch.cat(found, 1), model(tokens), **exact)


@often(60)
@given(schemes, st.integers(1, 6), texts(), st.data())
def test_any_split_and_a_rolling_cache_give_the_scores_of_the_window(
    scheme, window, tokens, data
):
    own = scheme in ("alibi", "relative")  # their attends know no window
    model, n = decoder(scheme, window=None if own else window).double(), tokens.size(1)
    how = {"n_rewind": data.draw(st.integers(0, 3))}
    cache = RollingCache(window, n_spare=data.draw(st.integers(1, 5)), **how)
    found, at = [], 0
    for size in data.draw(splits(n)):
        new, at = tokens[:, at : at + size], at + size
        found.append(model(new, positions=cache.positions(new), prepare=cache))
    if own:
        plain = RollingCache(window, n_spare=20)
        want = model(tokens, positions=torch.arange(n), prepare=plain)
    else:
        want = model(tokens)
    assert_close(torch.cat(found, 1), want, **exact)


@often(60)
@given(schemes, texts(), st.data())
def test_padding_in_front_and_any_split_change_no_score(scheme, tokens, data):
    model, (batch, n) = decoder(scheme).double(), tokens.shape
    pads = [data.draw(st.integers(0, n - 1)) for _ in range(batch)]
    mask = torch.arange(n) >= torch.tensor(pads)[:, None]
    cache, found, at = KVCache(), [], 0
    for size in data.draw(splits(n)):
        cut = slice(at, at + size)
        new, real, at = tokens[:, cut], mask[:, None, None, cut], at + size
        where = cache.positions(new, real)
        found.append(model(new, positions=where, mask=real, prepare=cache))
    found = torch.cat(found, 1)
    for b, n_pads in enumerate(pads):
        alone = model(tokens[b : b + 1, n_pads:])[0]
        assert_close(found[b, n_pads:], alone, **exact)


@often(60)
@given(schemes, texts(), st.data())
def test_what_was_forgotten_leaves_no_trace(scheme, tokens, data):
    model, n = decoder(scheme).double(), tokens.size(1)
    make = data.draw(st.sampled_from(["growing", "rolling", "static"]))
    cache = KINDS[make](40) if make in KINDS else RollingCache(40)
    wrong = prompts(len(tokens), data.draw(lengths), data.draw(seeds))
    held = data.draw(st.integers(0, n - 1))
    if held:
        model(tokens[:, :held], positions=torch.arange(held), prepare=cache)
    model(wrong, positions=cache.positions(wrong), prepare=cache)
    cache.rewind(wrong.size(1))
    rest = tokens[:, held:]
    found = model(rest, positions=cache.positions(rest), prepare=cache)
    assert_close(found, model(tokens)[:, held:], **exact)


@often(40)
@given(schemes, texts(), st.data())
def test_reordered_texts_go_on_as_copies(scheme, tokens, data):
    model, n = decoder(scheme).double(), tokens.size(1)
    rows = st.lists(st.integers(0, len(tokens) - 1), min_size=1, max_size=4)
    rows = torch.tensor(data.draw(rows))
    new = prompts(len(rows), data.draw(lengths), 3)
    cache = KVCache(data.draw(st.integers(1, 20)))
    read(model, tokens, cache)
    cache.reorder(rows)
    n_last = data.draw(st.integers(1, new.size(1)))
    found = read(model, new, cache, n_last=n_last)
    whole = model(torch.cat((tokens[rows], new), 1))
    assert_close(found, whole[:, -n_last:], **exact)
    assert cache.length == n + new.size(1)


# --- writing -------------------------------------------------------------------------


def greedy(model, tokens, n):
    """Each step from the whole text."""
    for _ in range(n):
        best = model(tokens)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, best), 1)
    return tokens


@often(30)
@given(schemes, texts(8), st.integers(0, 8), st.integers(1, 9), seeds)
def test_generate_writes_what_whole_passes_write(scheme, tokens, n, chunk, seed):
    model = decoder(scheme, seed=seed).double()
    want = greedy(model, tokens, n)
    assert generate(model, tokens, n, chunk=chunk).equal(want)
    if n:
        beams = beam_search(model, tokens, n, 1, chunk=chunk)
        assert beams.tokens[:, 0].equal(want)


@often(30)
@given(schemes, lengths, st.integers(0, 8), st.integers(0, 5), st.data())
def test_no_draft_changes_what_is_written(scheme, length, n, n_draft, data):
    model, tokens = decoder(scheme).double(), prompts(1, length, data.draw(seeds))
    want = greedy(model, tokens, n)

    def draft(text, most):
        """The truth up to a place, then anything."""
        good = data.draw(st.integers(0, most))
        true = want[0, len(text) : len(text) + good]
        return torch.cat((true, prompts(1, most)[0]))[: data.draw(st.integers(0, most))]

    found = speculate(model, tokens, n, draft, n_draft)
    assert found.tokens.equal(want)
    assert found.n_accepted <= found.n_drafted


@often(20)
@given(schemes, lengths, st.integers(0, 8), st.integers(1, 5), seeds)
def test_no_draft_of_a_model_changes_what_is_written(scheme, length, n, n_draft, seed):
    model, tokens = decoder(scheme).double(), prompts(1, length, seed)
    draft = decoder("none", seed=seed % 3, layers=1).double()
    found = speculate(model, tokens, n, draft, n_draft)
    assert found.tokens.equal(greedy(model, tokens, n))


@often(20)
@given(schemes, texts(6), st.integers(1, 6), st.integers(1, 5))
def test_beams_are_ranked_differ_and_are_as_likely_as_they_say(
    scheme, tokens, n, n_beams
):
    model = decoder(scheme).double()
    found = beam_search(model, tokens, n, n_beams)
    assert found.scores.sort(-1, descending=True).values.equal(found.scores)
    for texts_of, scores in zip(*found, strict=True):
        likely = model(texts_of)[:, tokens.size(1) - 1 : -1].log_softmax(-1)
        new = texts_of[:, tokens.size(1) :]
        sums = likely.gather(-1, new[..., None]).sum((1, 2))
        finite = scores.isfinite()
        assert_close(sums[finite], scores[finite], **exact)
        assert len({*map(tuple, texts_of[finite].tolist())}) == finite.sum()
