"""`EncoderDecoder` and torch's with the same weights: random ones, and trained ones."""

from functools import partial

import pytest
import torch
from blocks_oracle import in_torch, make_block, randomise
from torch import nn
from torch.testing import assert_close

from transformer.attention import MultiHeadAttention, causal_mask, padding_mask
from transformer.blocks import PostNormBlock
from transformer.feedforward import FeedForward
from transformer.model import (
    EmbeddingSum,
    Encoder,
    EncoderDecoder,
    LanguageModel,
    count_parameters,
)
from transformer.norms import LayerNorm
from transformer.positions import LearnedPositions, SinusoidalPositions
from transformer.sources import weights_path

each_kind = pytest.mark.parametrize("kind", ["pre", "post"])


def make_pair(kind: str, n_layers: int = 2):
    """Ours in float64, and torch's `Transformer` with the weights of our blocks.

    torch's ends in norms whatever the placement; so does ours here.
    """
    torch.manual_seed(0)
    read = [make_block(kind, activation="relu") for _ in range(n_layers)]
    write = [make_block(kind, True, activation="relu") for _ in range(n_layers)]
    how = {"positions": SinusoidalPositions(12), "norm": LayerNorm}
    ours = EncoderDecoder(
        Encoder(9, 12, read, **how), LanguageModel(11, 12, write, **how)
    )
    randomise(ours).double()
    theirs = nn.Transformer(
        *(12, 3, n_layers, n_layers, 20),
        dropout=0.0,
        batch_first=True,
        norm_first=kind == "pre",
    )
    state = {}
    for side, stack, cross in (
        ("encoder", ours.encoder, False),
        ("decoder", ours.decoder, True),
    ):
        for i, block in enumerate(stack.blocks):
            state |= in_torch(block, cross, f"{side}.layers.{i}.")
        for p in ("weight", "bias"):
            state[f"{side}.norm.{p}"] = getattr(stack.norm, p)
    theirs.load_state_dict(state)
    return ours, theirs.double()


@each_kind
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_equals_torchs_transformer(kind, padded, conform):
    ours, theirs = make_pair(kind)
    source = torch.randint(9, (2, 5))
    target = torch.randint(11, (2, 4))
    masks = [padding_mask(torch.tensor(n), m) for n, m in (([3, 5], 5), ([4, 2], 4))]
    how = {"tgt_mask": ~causal_mask(4)}
    if padded:
        outside = [~mask[:, 0, 0] for mask in masks]
        how |= {"src_key_padding_mask": outside[0], "tgt_key_padding_mask": outside[1]}
        how |= {"memory_key_padding_mask": outside[0]}
    x, y = ours.encoder.embed(source), ours.decoder.embed(target)
    want = theirs(x, y, **how) @ ours.decoder.embedding.weight.mT
    masks = dict(zip(("source_mask", "target_mask"), masks, strict=True))
    got = ours(source, target, **(masks if padded else {}))
    column, reference = "mask" if padded else "forward", "torch.nn.Transformer"
    conform("EncoderDecoder", column, got, want, reference=reference, atol=1e-10)
    up = torch.randn_like(got)
    tables = [ours.encoder.embedding.weight, ours.decoder.embedding.weight]
    mine = torch.autograd.grad(got, tables, up)
    their = torch.autograd.grad(want, tables, up)
    how = {"reference": reference, "atol": 1e-10}
    conform("EncoderDecoder", "gradient", list(mine), list(their), **how)


@each_kind
def test_padding_of_the_source_is_never_read(kind):
    ours, _ = make_pair(kind)
    source, target = torch.randint(9, (1, 3)), torch.randint(11, (1, 4))
    longer = torch.cat([source, torch.randint(9, (1, 2))], 1)
    mask = padding_mask(torch.tensor([3]), 5)
    got = ours(longer, target, source_mask=mask)
    assert_close(got, ours(source, target), rtol=0, atol=1e-12)
    assert not ours(longer, target).allclose(got)


def test_target_sees_no_later_token_and_the_whole_source():
    ours, _ = make_pair("post")
    source, target = torch.randint(9, (1, 5)), torch.randint(11, (1, 4))
    before = ours(source, target)
    target[0, 2] = (target[0, 2] + 1) % 11
    assert (ours(source, target) != before).any(-1).tolist() == [
        [False, False, True, True]
    ]
    source[0, 4] = (source[0, 4] + 1) % 9
    assert (ours(source, target) != before).any(-1).all()


def test_one_table_for_source_target_and_output_counts_once():
    ours, _ = make_pair("post")
    n = count_parameters(ours)
    ours.decoder.embedding = ours.encoder.embedding
    assert count_parameters(ours) == n - 11 * 12
    table = ours.encoder.embedding.weight
    ours(torch.zeros(1, 2).long(), torch.ones(1, 2).long()).sum().backward()
    assert table.grad[0].any() and table.grad[1].any()
    with pytest.raises(ValueError, match="need each other"):
        ours.decoder(torch.zeros(1, 2).long())


# --- trained weights --------------------------------------------------------------

MOLECULES = [
    "C C ( = O ) O c 1 c c c c c 1 C ( = O ) O",  # aspirin
    "C C ( C ) C c 1 c c c ( c c 1 ) C ( C ) C ( = O ) O",  # ibuprofen
    "C N 1 C = N C 2 = C 1 C ( = O ) N ( C ) C ( = O ) N 2 C",  # caffeine
    "C C ( = O ) N c 1 c c c ( O ) c c 1",  # paracetamol
]


@pytest.fixture(scope="module")
def state():
    """The trained weights."""
    path = weights_path("translator")
    return torch.load(path, map_location="cpu", weights_only=True)


def gather(state, prefix, ours):
    """One attention of ours from the four layers of theirs."""
    found = {}
    for p in ("weight", "bias"):
        parts = [state[f"{prefix}.fc_{name}.{p}"] for name in "qkv"]
        found[f"{ours}.qkv.{p}"] = torch.cat(parts)
        found[f"{ours}.out.{p}"] = state[f"{prefix}.fc_o.{p}"]
    return found


NORMS = {"self_attn": "attn_norm", "enc_attn": "cross_norm", "ff": "ffn_norm"}


def our_state(state, side):
    """The weights of one side under our names."""
    mine = {
        "embedding.weight": state[f"{side}.tok_embedding.weight"],
        "positions.positions.weight": state[f"{side}.pos_embedding.weight"],
    }
    for i in range(3):
        a, b = f"blocks.{i}", f"{side}.layers.{i}"
        mine |= gather(state, f"{b}.self_attention", f"{a}.attn")
        if side == "decoder":
            mine |= gather(state, f"{b}.encoder_attention", f"{a}.cross")
        for p in ("weight", "bias"):
            for j, name in ((1, "up"), (2, "down")):
                layer = f"{b}.positionwise_feedforward.fc_{j}"
                mine[f"{a}.ffn.{name}.{p}"] = state[f"{layer}.{p}"]
            for theirs, ours in NORMS.items():
                if f"{b}.{theirs}_layer_norm.{p}" in state:
                    mine[f"{a}.{ours}.{p}"] = state[f"{b}.{theirs}_layer_norm.{p}"]
    return mine


@pytest.fixture(scope="module")
def ours(state):
    """Our model with them; its head has an offset, which ours usually has not."""

    def blocks(cross):
        for _ in range(3):
            heads = [MultiHeadAttention(256, 8, bias=True) for _ in range(2)]
            ffn = FeedForward(256, 512, activation="relu")
            read = heads[1] if cross else None
            yield PostNormBlock(256, heads[0], ffn, cross=read)

    embed = partial(EmbeddingSum, scale=16.0)
    encoder = Encoder(
        59, 256, blocks(False), positions=embed(LearnedPositions(102, 256))
    )
    places = embed(LearnedPositions(102, 256))
    decoder = LanguageModel(59, 256, blocks(True), positions=places, tie=False)
    decoder.head = nn.Linear(256, 59)
    encoder.load_state_dict(our_state(state, "encoder"))
    mine = our_state(state, "decoder")
    mine |= {f"head.{p}": state[f"decoder.fc_out.{p}"] for p in ("weight", "bias")}
    decoder.load_state_dict(mine)
    return EncoderDecoder(encoder, decoder).double().eval()


@pytest.fixture(scope="module")
def theirs(ours):
    """torch's `Transformer` with them, called with tokens; without last norms."""
    model = nn.Transformer(256, 8, 3, 3, 512, dropout=0.0, batch_first=True)
    model.encoder.norm = model.decoder.norm = None
    weights = {}
    for side, stack in (("encoder", ours.encoder), ("decoder", ours.decoder)):
        for i, block in enumerate(stack.blocks):
            weights |= in_torch(block, side == "decoder", f"{side}.layers.{i}.")
    model.load_state_dict(weights)
    model.double()

    def run(source, target):
        x, y = (
            stack.embedding.weight[tokens] * 16 + stack.positions.positions.weight[:n]
            for stack, tokens in ((ours.encoder, source), (ours.decoder, target))
            for n in (tokens.size(1),)
        )
        out = model(x, y, tgt_mask=~causal_mask(target.size(1)))
        return out @ ours.decoder.head.weight.mT + ours.decoder.head.bias

    return run


def greedy(model, source, most=60):
    """Tokens until the end mark, each the likeliest."""
    target = torch.tensor([[2]])
    while target[0, -1] != 3 and target.size(1) < most:
        token = model(source, target)[:, -1].argmax(-1, keepdim=True)
        target = torch.cat([target, token], 1)
    return target


def read_vocabulary():
    """The 59 tokens, from a pickle that is checked byte for byte."""
    import pickle

    with open(weights_path("translator-vocab"), "rb") as file:
        return pickle.load(file)["stoi"]


@pytest.mark.parametrize("molecule", MOLECULES)
@torch.no_grad()
def test_trained_weights_write_the_same_tokens_as_torchs(
    ours, theirs, molecule, conform
):
    number = read_vocabulary()
    source = torch.tensor([[2, *(number[atom] for atom in molecule.split()), 3]])
    mine, their = greedy(ours, source), greedy(theirs, source)
    assert mine.tolist() == their.tolist() and mine[0, -1] == 3 and mine.size(1) > 5
    got, want = ours(source, mine), theirs(source, mine)
    assert want.std() > 1
    how = {"reference": "torch.nn.Transformer", "atol": 1e-10}
    conform("EncoderDecoder", "forward", got, want, **how)


def test_an_encoder_of_another_kind_takes_what_it_likes():
    class Given(nn.Module):
        def forward(self, source, mask=None):
            return source

    model, _ = make_pair("pre")
    heard, target = torch.randn(1, 4, 12).double(), torch.randint(5, (1, 3))
    other = EncoderDecoder(Given(), model.decoder)
    assert_close(other(heard, target), model.decoder(target, context=heard))
    with pytest.raises(TypeError, match="source must be whole numbers"):
        model(heard, target)
