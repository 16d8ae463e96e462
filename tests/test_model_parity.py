"""Models of ours and of `transformers` with the same weights, tiny and random."""

from functools import partial

import pytest
import torch
from blocks_oracle import randomise
from torch import nn

from transformer.attention import MultiHeadAttention, padding_mask
from transformer.blocks import PostNormBlock, PreNormBlock
from transformer.feedforward import FeedForward, GatedFeedForward
from transformer.model import EmbeddingSum, Encoder, LanguageModel
from transformer.norms import LayerNorm, RMSNorm
from transformer.positions import LearnedPositions, RoPE

C, H, F, L, V = 24, 4, 40, 3, 30
PARTS = ("weight", "bias")
TOKENS = torch.randint(V, (2, 7), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([7, 4])


def filled(module: nn.Module, state: dict) -> nn.Module:
    """Every parameter of ours from the other model."""
    module.load_state_dict(state)
    return module.eval()


def linear(ours: str, theirs: str, state: dict, flip: bool = False) -> dict:
    """Weight and bias of one layer; GPT-2 keeps its matrices transposed."""
    weight, bias = state[f"{theirs}.weight"], state[f"{theirs}.bias"]
    return {f"{ours}.weight": weight.T if flip else weight, f"{ours}.bias": bias}


# --- GPT-2 ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2():
    """transformers' GPT-2 and ours with its weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    shape = {"n_embd": C, "n_head": H, "n_layer": L, "n_inner": F, "n_positions": 16}
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=V, **shape)).eval()
    randomise(theirs)
    state = {k.removeprefix("transformer."): v for k, v in theirs.state_dict().items()}
    mine = {
        "embedding.weight": state["wte.weight"],
        "positions.weight": state["wpe.weight"],
        **linear("norm", "ln_f", state),
    }
    for i in range(L):
        a, b = f"blocks.{i}.", f"h.{i}."
        mine |= linear(a + "attn_norm", b + "ln_1", state)
        mine |= linear(a + "attn.qkv", b + "attn.c_attn", state, flip=True)
        mine |= linear(a + "attn.out", b + "attn.c_proj", state, flip=True)
        mine |= linear(a + "ffn_norm", b + "ln_2", state)
        mine |= linear(a + "ffn.up", b + "mlp.c_fc", state, flip=True)
        mine |= linear(a + "ffn.down", b + "mlp.c_proj", state, flip=True)
    blocks = [
        PreNormBlock(
            C,
            MultiHeadAttention(C, H, bias=True),
            FeedForward(C, F, activation="gelu_tanh"),
        )
        for _ in range(L)
    ]
    places = LearnedPositions(16, C)
    ours = LanguageModel(V, C, blocks, positions=places, norm=LayerNorm)
    return filled(ours, mine), theirs


@torch.no_grad()
def test_equals_gpt2(gpt2, conform):
    ours, theirs = gpt2
    got, want = ours(TOKENS), theirs(TOKENS).logits
    assert want.std() > 0.3  # far above the tolerance
    how = {"reference": "transformers.GPT2LMHeadModel", "atol": 1e-5}
    conform("LanguageModel", "forward", got, want, **how)


@torch.no_grad()
def test_equals_gpt2_on_padded_texts(gpt2, conform):
    ours, theirs = gpt2
    mask = padding_mask(LENGTHS, 7)
    got = ours(TOKENS, mask=mask)
    want = theirs(TOKENS, attention_mask=mask[:, 0, 0].long()).logits
    real = mask[:, 0, 0]
    how = {"reference": "transformers.GPT2LMHeadModel", "atol": 1e-5}
    conform("LanguageModel", "ragged", got[real], want[real], **how)


def test_equals_gpt2s_gradients(gpt2, conform):
    ours, theirs = gpt2
    up = torch.randn(2, 7, V)
    got = torch.autograd.grad(ours(TOKENS), ours.embedding.weight, up)[0]
    table = theirs.transformer.wte.weight
    want = torch.autograd.grad(theirs(TOKENS).logits, table, up)[0]
    how = {"reference": "transformers.GPT2LMHeadModel", "rtol": 1e-5, "atol": 1e-4}
    conform("LanguageModel", "gradient", got, want, **how)


# --- BERT -------------------------------------------------------------------------


def bert_state(state: dict, n_layers: int) -> dict:
    """Our names for the weights of a BERT; all its tokens are of the first kind."""
    kind = state["embeddings.token_type_embeddings.weight"][0]
    mine = {
        "embedding.weight": state["embeddings.word_embeddings.weight"],
        "positions.positions.weight": state["embeddings.position_embeddings.weight"]
        + kind,
        **linear("positions.norm", "embeddings.LayerNorm", state),
    }
    for i in range(n_layers):
        a, b = f"blocks.{i}.", f"encoder.layer.{i}."
        names = [f"{b}attention.self.{name}" for name in ("query", "key", "value")]
        for p in PARTS:
            rows = [state[f"{name}.{p}"] for name in names]
            mine[f"{a}attn.qkv.{p}"] = torch.cat(rows)
        mine |= linear(a + "attn.out", b + "attention.output.dense", state)
        mine |= linear(a + "attn_norm", b + "attention.output.LayerNorm", state)
        mine |= linear(a + "ffn.up", b + "intermediate.dense", state)
        mine |= linear(a + "ffn.down", b + "output.dense", state)
        mine |= linear(a + "ffn_norm", b + "output.LayerNorm", state)
    return mine


def bert_encoder(state: dict, d: int, n_heads: int, d_ff: int, n_layers: int):
    """Our encoder with a BERT's weights."""
    norm = partial(LayerNorm, eps=1e-12)
    blocks = [
        PostNormBlock(
            d,
            MultiHeadAttention(d, n_heads, bias=True),
            FeedForward(d, d_ff),
            norm=norm,
        )
        for _ in range(n_layers)
    ]
    mine = bert_state(state, n_layers)
    places = LearnedPositions(len(mine["positions.positions.weight"]), d)
    embed = EmbeddingSum(places, norm=norm(d))
    vocab_size = len(mine["embedding.weight"])
    return filled(Encoder(vocab_size, d, blocks, positions=embed), mine)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@torch.no_grad()
def test_equals_bert(padded, conform):
    from transformers import BertConfig, BertModel

    torch.manual_seed(1)
    shape = {"hidden_size": C, "num_attention_heads": H, "num_hidden_layers": L}
    config = BertConfig(
        vocab_size=V, **shape, intermediate_size=F, max_position_embeddings=16
    )
    theirs = randomise(BertModel(config, add_pooling_layer=False)).eval()
    ours = bert_encoder(theirs.state_dict(), C, H, F, L)
    mask = padding_mask(LENGTHS, 7) if padded else None
    there = mask[:, 0, 0].long() if padded else None
    want = theirs(TOKENS, attention_mask=there).last_hidden_state
    got = ours(TOKENS, mask=mask)
    real = mask[:, 0, 0] if padded else torch.ones(2, 7, dtype=torch.bool)
    how = {"reference": "transformers.BertModel", "atol": 1e-5}
    conform("Encoder", "ragged" if padded else "forward", got[real], want[real], **how)


# --- Llama ------------------------------------------------------------------------


@torch.no_grad()
def test_equals_llama_where_heads_are_not_shared(conform):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    shape = {"hidden_size": C, "num_attention_heads": H, "num_hidden_layers": L}
    config = LlamaConfig(
        vocab_size=V, **shape, intermediate_size=F, num_key_value_heads=H
    )
    theirs = randomise(LlamaForCausalLM(config)).eval()
    state = {k.removeprefix("model."): v for k, v in theirs.state_dict().items()}
    names = {"embedding": "embed_tokens", "norm": "norm", "head": "lm_head"}
    for i in range(L):
        a, b = f"blocks.{i}.", f"layers.{i}."
        names |= {a + "attn_norm": b + "input_layernorm", a + "ffn_norm": b + NORM}
        names |= {f"{a}ffn.{p}": f"{b}mlp.{p}_proj" for p in ("gate", "up", "down")}
        names |= {a + "attn.out": b + "self_attn.o_proj"}
    mine = {f"{k}.weight": state[f"{v}.weight"] for k, v in names.items()}
    for i in range(L):
        rows = [state[f"layers.{i}.self_attn.{p}_proj.weight"] for p in "qkv"]
        mine[f"blocks.{i}.attn.qkv.weight"] = torch.cat(rows)
    norm = partial(RMSNorm, eps=config.rms_norm_eps)
    blocks = [
        PreNormBlock(C, MultiHeadAttention(C, H), GatedFeedForward(C, F), norm=norm)
        for _ in range(L)
    ]
    how = {"rope": RoPE(C // H), "norm": norm, "tie": False}
    ours = filled(LanguageModel(V, C, blocks, **how), mine)
    got, want = ours(TOKENS), theirs(TOKENS).logits
    how = {"reference": "transformers.LlamaForCausalLM", "atol": 1e-5}
    conform("LanguageModel", "forward", got, want, **how)


NORM = "post_attention_layernorm"
