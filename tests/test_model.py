"""What `Encoder` and `LanguageModel` promise, and what tying must survive."""

import copy
import io
import pickle
import re

import pytest
import torch
from attention_oracle import DEVICES
from blocks_oracle import make_block, randomise
from torch import nn
from torch.testing import assert_close

from transformer.attention import MultiHeadAttention, causal_mask, padding_mask
from transformer.blocks import PreNormBlock, scaled_init
from transformer.feedforward import FeedForward
from transformer.model import (
    EmbeddingSum,
    Encoder,
    LanguageModel,
    count_parameters,
    resize_vocabulary,
)
from transformer.norms import LayerNorm
from transformer.positions import LearnedPositions, RoPE, SinusoidalPositions

each_device = pytest.mark.parametrize("device", DEVICES)
each_kind = pytest.mark.parametrize("kind", ["pre", "post"])


def last_norm(kind: str):
    """Stacks that normalise first end in a norm."""
    return LayerNorm if kind == "pre" else None


def make_model(kind="pre", n_blocks=2, *, cross=False, dropout=0.0, **how):
    """A language model of 9 tokens with random weights, in float64."""
    torch.manual_seed(0)
    blocks = [make_block(kind, cross, dropout=dropout) for _ in range(n_blocks)]
    how = {"norm": last_norm(kind), "dropout": dropout, **how}
    return randomise(LanguageModel(9, 12, blocks, **how)).double()


def make_encoder(kind="pre", n_blocks=2, **how):
    """An encoder of 9 tokens with random weights, in float64."""
    torch.manual_seed(0)
    blocks = [make_block(kind) for _ in range(n_blocks)]
    how = {"norm": last_norm(kind), **how}
    return randomise(Encoder(9, 12, blocks, **how)).double()


TOKENS = torch.tensor([[1, 5, 2, 8], [0, 3, 3, 7]])


# --- values -----------------------------------------------------------------------


@each_kind
def test_encoder_is_its_parts_one_after_the_other(kind):
    encoder = make_encoder(kind, positions=SinusoidalPositions(12))
    mask = padding_mask(torch.tensor([4, 3]), 4)
    x = encoder.positions(encoder.embedding.weight[TOKENS])
    for block in encoder.blocks:
        x = block(x, mask=mask)
    x = encoder.norm(x) if kind == "pre" else x
    assert_close(encoder(TOKENS, mask=mask), x, rtol=0, atol=1e-12)


@each_kind
@pytest.mark.parametrize("tie", [True, False])
def test_language_model_is_its_parts_one_after_the_other(kind, tie):
    model = make_model(kind, cross=True, tie=tie, positions=LearnedPositions(9, 12))
    context = torch.randn(2, 3, 12, dtype=torch.float64)
    how = {"context": context, "context_mask": padding_mask(torch.tensor([3, 1]), 3)}
    places = torch.tensor([3, 0, 8, 1])
    x = model.positions(model.embedding.weight[TOKENS], places)
    for block in model.blocks:
        x = block(x, causal=True, **how)
    x = model.norm(x) if kind == "pre" else x
    want = x @ (model.embedding if tie else model.head).weight.mT
    assert_close(model(TOKENS, positions=places, **how), want, rtol=0, atol=1e-12)


@each_kind
def test_later_tokens_change_nothing_before_them(kind):
    model = make_model(kind, positions=SinusoidalPositions(12))
    changed = TOKENS.clone()
    changed[:, 2] = 6
    moved = (model(TOKENS) != model(changed)).any(-1)
    assert moved.tolist() == [[False, False, True, True]] * 2


@pytest.mark.parametrize("scheme", ["rope", "learned"])
@pytest.mark.parametrize("pieces", [(1, 1, 1, 1), (3, 1)], ids=str)
def test_pieces_with_caches_equal_the_whole(scheme, pieces, conform):
    """`prepare(i)` is layer i's, and comes after the rotation."""
    table = {"positions": LearnedPositions(9, 12)}
    model = make_model(**({"rope": RoPE(4)} if scheme == "rope" else table))
    caches, kept = [{}, {}], []

    def prepare(i):
        def widen(q, k, v, mask):
            for name, new in (("k", k), ("v", v)):
                old = [caches[i][name]] if name in caches[i] else []
                caches[i][name] = torch.cat([*old, new], -2)
            return q, caches[i]["k"], caches[i]["v"], mask

        return widen

    for piece, places in zip(
        TOKENS.split(pieces, 1), torch.arange(4).split(pieces), strict=True
    ):
        kept.append(model(piece, positions=places, prepare=prepare))
    got, reference = torch.cat(kept, 1), "all tokens at once"
    how = {"reference": reference, "atol": 1e-10}
    conform("LanguageModel", "cached", got, model(TOKENS), **how)
    assert all(cache["k"].shape == (2, 3, 4, 4) for cache in caches)


def test_rope_takes_a_row_of_positions_for_each_text():
    model = make_model(rope=RoPE(4))
    places = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 9]])
    together = model(TOKENS, positions=places)
    alone = [model(TOKENS[i : i + 1], positions=places[i]) for i in (0, 1)]
    assert_close(together, torch.cat(alone), rtol=0, atol=1e-12)
    shifted = model(TOKENS, positions=torch.arange(4) + 100)
    assert_close(shifted, model(TOKENS), rtol=0, atol=1e-9)
    assert not model(TOKENS).allclose(make_model()(TOKENS))


def test_rope_is_asked_once_a_call():
    model, asked = make_model(rope=RoPE(4)), []
    at = model.rope.at
    model.rope.at = lambda positions: asked.append(positions) or at(positions)
    model(TOKENS)
    assert [p.tolist() for p in asked] == [[0, 1, 2, 3]]


def test_padded_texts_equal_texts_alone(conform):
    encoder = make_encoder("post", positions=SinusoidalPositions(12))
    mask = padding_mask(torch.tensor([2, 4]), 4)
    got, want = encoder(TOKENS, mask=mask)[:1, :2], encoder(TOKENS[:1, :2])
    conform("Encoder", "ragged", got, want, reference="texts alone", atol=1e-10)
    left = torch.tensor([[False, False, True, True]])[:, None, None]
    model = make_model(rope=RoPE(4))
    got = model(TOKENS[:1], mask=left)[:, 2:]
    want = model(TOKENS[:1, 2:])
    conform("LanguageModel", "ragged", got, want, reference="texts alone", atol=1e-10)


def test_embedding_sum_scales_adds_and_normalises():
    x, norm = torch.randn(2, 3, 12), randomise(LayerNorm(12))
    add = SinusoidalPositions(12)
    assert EmbeddingSum()(x).equal(x)
    assert EmbeddingSum(scale=3.0)(x).equal(3 * x)
    assert_close(EmbeddingSum(add, scale=3.0, norm=norm)(x), norm(add(3 * x)))
    places = torch.tensor([4, 0, 2])
    assert_close(EmbeddingSum(add)(x, places), add(x, places))


@each_device
def test_models_compile_into_one_graph(device, conform):
    model = make_model(rope=RoPE(4)).to(device, torch.float32)
    encoder = make_encoder("post", positions=SinusoidalPositions(12)).to(
        model_like := (model.embedding.weight)
    )
    tokens, mask = TOKENS.to(device), padding_mask(torch.tensor([4, 3]), 4).to(device)
    assert model_like.dtype == torch.float32
    for module in (model, encoder):
        torch.compiler.reset()
        got = torch.compile(module, fullgraph=True)(tokens, mask=mask)
        want, name = module(tokens, mask=mask), type(module).__name__
        how = {"reference": "itself without compiling", "atol": 1e-4}
        conform(name, "compile", got, want, **how)
    torch.compiler.reset()


# --- dropout ----------------------------------------------------------------------


@each_kind
def test_case_18_eval_is_the_same_twice_and_greedy_stays_the_same(kind):
    model = make_model(kind, dropout=0.5, positions=SinusoidalPositions(12))
    quiet = make_model(kind, positions=SinusoidalPositions(12))
    quiet.load_state_dict(model.state_dict())
    assert not model(TOKENS).equal(model(TOKENS))
    model.eval()
    assert model(TOKENS).equal(model(TOKENS)) and model(TOKENS).equal(quiet(TOKENS))
    model.train().blocks[0].eval()
    assert model.blocks[0].training is False and model.blocks[1].training
    assert not model(TOKENS).equal(quiet(TOKENS))


def test_case_18_embedding_sum_is_dropped_too():
    blocks = [PreNormBlock(12, MultiHeadAttention(12, 3), FeedForward(12))]
    how = {"norm": lambda d: nn.Identity(), "dropout": 0.5}
    model = Encoder(9, 12, blocks, positions=SinusoidalPositions(12), **how)
    for writer in (blocks[0].attn.out, blocks[0].ffn.down):
        nn.init.zeros_(writer.weight)
    nn.init.zeros_(blocks[0].ffn.down.bias)
    sums = model.positions(model.embedding(TOKENS))
    got = torch.stack([model(TOKENS) for _ in range(200)])
    lost = got == 0
    assert abs(lost.double().mean() - 0.5) < 0.02
    assert_close(got[~lost], (2 * sums).expand_as(got)[~lost])


# --- tying ------------------------------------------------------------------------


def restored(model, **how):
    """The state of a model, loaded into a new one."""
    other = make_model()
    other.load_state_dict(copy.deepcopy(model.state_dict()), **how)
    return other


def from_meta(model):
    """Built without memory, given memory, then the weights."""
    with torch.device("meta"):
        blocks = [make_block("pre") for _ in range(2)]
        other = LanguageModel(9, 12, blocks, norm=LayerNorm)
    other = other.to_empty(device="cpu").double()
    scaled_init(other)
    return other


def resized(model, n):
    """With another number of tokens."""
    model = copy.deepcopy(model)
    resize_vocabulary(model, n)
    return model


def through_torch_save(model):
    """Saved whole and loaded."""
    with io.BytesIO() as file:
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)


WAYS = {
    "to": lambda model: model.to(torch.float32),
    "half": lambda model: model.half().double(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_torch_save,
    "load": restored,
    "load by assignment": lambda model: restored(model, assign=True),
    "meta": from_meta,
    "more tokens": lambda model: resized(model, 14),
    "fewer tokens": lambda model: resized(model, 6),
}


@pytest.mark.parametrize("way", WAYS)
def test_case_20_tie_survives(way):
    model = make_model()
    n_parameters = count_parameters(model)
    model = WAYS[way](model)
    tokens = TOKENS % model.embedding.num_embeddings % 6
    size = model.embedding.weight.size(0)
    assert model.head is None and "head.weight" not in model.state_dict()
    assert model(tokens).size(-1) == size == model.embedding.num_embeddings
    if "tokens" not in way:
        assert count_parameters(model) == n_parameters
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # what reads the table and what compares with it move alike
        before = model.embedding.weight.detach().clone()
        loss = model(tokens).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert not model.embedding.weight.equal(before)
        hidden = model.norm(run(model, tokens))
        assert_close(model(tokens), hidden @ model.embedding.weight.mT)


def run(model, tokens):
    """What leaves the last block."""
    x = model.embedding.weight[tokens]
    for block in model.blocks:
        x = block(x, causal=True)
    return x


def test_case_20_gradient_is_the_sum_of_both_uses():
    tied, apart = make_model(), make_model(tie=False)
    apart.load_state_dict(tied.state_dict() | {"head.weight": tied.embedding.weight})
    for model in (tied, apart):
        model(TOKENS).square().sum().backward()
    both = apart.embedding.weight.grad + apart.head.weight.grad
    assert_close(tied.embedding.weight.grad, both, rtol=0, atol=1e-8)
    assert count_parameters(apart) - count_parameters(tied) == 9 * 12


def test_case_20_tie_survives_compiling():
    torch.compiler.reset()
    model = make_model().float()
    compiled = torch.compile(model, backend="aot_eager")
    assert_close(compiled(TOKENS), model(TOKENS))
    nn.init.ones_(model.embedding.weight)
    assert (compiled(TOKENS) - compiled(TOKENS)[..., :1]).abs().max() < 1e-4
    torch.compiler.reset()


@pytest.mark.parametrize("n", [6, 9, 14])
@pytest.mark.parametrize("tie", [True, False])
def test_resizing_keeps_the_first_rows(n, tie):
    model = make_model(tie=tie)
    if not tie:
        model.head = nn.Linear(12, 9).double()
    old = copy.deepcopy(model)
    resize_vocabulary(model, n)
    kept = min(n, 9)
    got, want = model(TOKENS % 6)[..., :kept], old(TOKENS % 6)[..., :kept]
    assert_close(got, want, rtol=0, atol=1e-12)
    assert model(TOKENS % 6).size(-1) == n
    assert tie or (model.head.out_features == n and (model.head.bias[9:] == 0).all())
    new = model.embedding.weight[9:]
    assert new.dtype == torch.float64 and new.requires_grad


def test_new_rows_are_as_large_as_fresh_ones():
    model = LanguageModel(4, 400, [make_block("post", d=12)])
    fresh = LanguageModel(900, 400, [make_block("post", d=12)]).embedding.weight
    resize_vocabulary(model, 900)
    for rows in (fresh, model.embedding.weight[4:]):
        assert abs(rows.std() * 400**0.5 - 1) < 0.02


# --- norms and counts -------------------------------------------------------------


def test_case_16_stack_that_normalises_first_needs_a_norm_at_the_end():
    message = "blocks that normalise first need a norm at the end, like norm=LayerNorm"
    for model in (Encoder, LanguageModel):
        with pytest.raises(ValueError, match=message):
            model(9, 12, [make_block("pre")])
        assert model(9, 12, [make_block("post")]).norm is None


@pytest.mark.parametrize("kind, n", [("pre", 9), ("post", 8)])
def test_case_16_number_of_norms(kind, n):
    norms = [m for m in make_model(kind, 4).modules() if isinstance(m, LayerNorm)]
    assert len(norms) == n


@pytest.mark.parametrize("n_blocks", [2, 48])
def test_case_16_what_enters_the_head_has_variance_1_at_any_depth(n_blocks):
    torch.manual_seed(0)
    blocks = [make_block("pre", d=48) for _ in range(n_blocks)]
    model = LanguageModel(9, 48, blocks, norm=LayerNorm)
    seen = []
    model.norm.register_forward_hook(lambda _, x, y: seen.append((x[0], y)))
    model(TOKENS)
    ((before, after),) = seen
    assert abs(after.var(-1, correction=0) - 1).max() < 1e-3
    assert before.var(-1).mean() > (1 if n_blocks == 2 else 20)


def test_count_is_what_a_formula_says():
    d, f, n = 24, 96, 3
    blocks = [
        PreNormBlock(d, MultiHeadAttention(d, 4), FeedForward(d, f)) for _ in range(n)
    ]
    model = LanguageModel(50, d, blocks, norm=LayerNorm)
    a_block = 4 * d * d + (2 * d * f + f + d) + 2 * 2 * d
    assert count_parameters(model) == 50 * d + n * a_block + 2 * d
    shared = nn.ModuleList([blocks[0], blocks[0]])
    assert count_parameters(shared) == a_block


# --- shapes and errors ------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (1, 1), (3,)], ids=str)
def test_shapes_come_back(shape):
    tokens = torch.zeros(shape, dtype=torch.long)
    encoder = make_encoder(positions=SinusoidalPositions(12))
    assert encoder(tokens).shape == (*shape, 12)
    assert make_model(rope=RoPE(4))(tokens).shape == (*shape, 9)


def test_runs_on_the_meta_device():
    model = make_model(rope=RoPE(4)).to("meta")
    out = model(TOKENS.to("meta"), mask=torch.ones(2, 1, 1, 4, device="meta").bool())
    assert out.device.type == "meta" and out.shape == (2, 4, 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_tokens_are_whole_numbers(dtype):
    message = (
        f"tokens must be whole numbers, got tokens={tuple(TOKENS.shape)} of {dtype}"
    )
    for model in (make_model(), make_encoder()):
        with pytest.raises(TypeError, match=re.escape(message)):
            model(TOKENS.to(dtype))


def test_mask_of_numbers_is_refused():
    with pytest.raises(TypeError, match="mask must be bool"):
        make_encoder()(TOKENS, mask=causal_mask(4).float())
