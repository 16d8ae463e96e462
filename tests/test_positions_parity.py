"""Positions give the numbers of other libraries on copied weights."""

import warnings

import pytest
import torch
from positions_oracle import sinusoid_by_hand
from torch import nn
from torch.testing import assert_close
from transformers import (
    BloomConfig,
    GPTNeoXConfig,
    LlamaConfig,
    RoFormerConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.gpt_neox.modeling_gpt_neox import (
    GPTNeoXAttention,
    GPTNeoXRotaryEmbedding,
)
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.roformer.modeling_roformer import (
    RoFormerSelfAttention,
    RoFormerSinusoidalPositionalEmbedding,
)

from transformer.attention import MultiHeadAttention
from transformer.positions import (
    RelativeAttention,
    RoPE,
    alibi_attention,
    alibi_slopes,
    neighbours_to_halves,
    ntk_base,
    pair_frequencies,
    sinusoids,
    yarn_frequencies,
    yarn_scale,
)

ATOL = {torch.float32: 1e-5, torch.float64: 1e-10}
each_dtype = pytest.mark.parametrize("dtype", ATOL, ids=str)
LLAMA = "transformers.LlamaAttention"


def draw(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """Random numbers, drawn on the CPU."""
    torch.manual_seed(seed)
    return torch.randn(shape).to(dtype)


def rotating(rope: RoPE, positions: torch.Tensor):
    """A `prepare` that turns queries and keys."""
    turn = rope.at(positions)
    return lambda q, k, v, mask: (turn(q), turn(k), v, mask)


def with_gradient(run, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What run gives for x, and the gradient of its weighted sum."""
    leaf = x.clone().requires_grad_()
    out = run(leaf)
    up = draw(*out.shape, seed=99, dtype=out.dtype)
    return out.detach(), torch.autograd.grad(out, leaf, up)[0]


def llama_config(**how) -> LlamaConfig:
    """A tiny one, heads of 16 features."""
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    # its eager path computes the softmax in float32
    return LlamaConfig(**shape, **how, attn_implementation="sdpa")


def copy_llama(ours: MultiHeadAttention, theirs: nn.Module) -> None:
    """Give both the same weights."""
    parts = [getattr(theirs, f"{name}_proj").weight for name in "qkv"]
    state = {"qkv.weight": torch.cat(parts), "out.weight": theirs.o_proj.weight}
    ours.load_state_dict(state)


# --- rotations ---------------------------------------------------------------------


@each_dtype
def test_llama(dtype, conform):
    config = llama_config()
    torch.manual_seed(0)
    theirs = LlamaAttention(config, layer_idx=0).to(dtype).eval()
    ours = MultiHeadAttention(64, 4).to(dtype)
    copy_llama(ours, theirs)
    rope, x = LlamaRotaryEmbedding(config), draw(2, 10, 64, dtype=dtype)
    if dtype == torch.float64:  # their frequencies and angles are float32
        rope.forward = lambda x, at: exact_tables(at, 16, dtype)
    at = torch.arange(5, 15)
    mask = torch.full((10, 10), torch.finfo(dtype).min, dtype=dtype).triu(1)
    run = lambda x: theirs(x, rope(x, at[None]), mask[None, None])[0]  # noqa: E731
    mine = lambda x: ours(x, causal=True, prepare=rotating(RoPE(16), at))  # noqa: E731
    how = {"reference": LLAMA, "atol": ATOL[dtype]}
    (out, slope), (want, their_slope) = (with_gradient(f, x) for f in (mine, run))
    conform("RoPE", "forward", out, want, **how)
    conform("RoPE", "gradient", slope, their_slope, **how)


def exact_tables(at, width, dtype):
    """Their cos and sin, from angles in float64."""
    angles = at[..., None].double() * pair_frequencies(width)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_llama_rotation_of_other_positions_in_each_sequence(dtype, conform):
    rope, at = (
        LlamaRotaryEmbedding(llama_config()),
        torch.tensor([[0, 1, 2], [7, 9, 4]]),
    )
    q, k = (draw(2, 4, 3, 16, seed=i, dtype=dtype) for i in (0, 1))
    want = apply_rotary_pos_emb(q, k, *rope(q, at))
    turn = RoPE(16).at(at[:, None])
    atol = 1e-5 if dtype == torch.float32 else 4e-2  # they round each product
    how = {"reference": LLAMA, "atol": atol}
    conform("RoPE", "dtype", (turn(q), turn(k)), want, **how)


@each_dtype
def test_roformer(dtype, conform):
    shape = {"hidden_size": 64, "num_attention_heads": 4, "embedding_size": 64}
    torch.manual_seed(0)
    config = RoFormerConfig(**shape, rotary_value=False)
    theirs = RoFormerSelfAttention(config).to(dtype).eval()
    ours = MultiHeadAttention(64, 4, bias=True).to(dtype)
    parts = [theirs.query, theirs.key, theirs.value]
    ours.qkv.weight.data.copy_(torch.cat([part.weight for part in parts]))
    ours.qkv.bias.data.copy_(torch.cat([part.bias for part in parts]))
    ours.out.weight.data.copy_(torch.eye(64))  # their projection is another module
    ours.out.bias.data.zero_()
    table = RoFormerSinusoidalPositionalEmbedding(20, 16)
    table.weight.data.copy_(table.create_weight())
    x, at = draw(2, 9, 64, dtype=dtype), torch.arange(9)
    rows = table(torch.Size([2, 9]))[None, None].to(dtype)
    if dtype == torch.float64:  # their table is float32
        both = sinusoids_in_float64(9, 16)
        rows = torch.cat((both[:, 0::2], both[:, 1::2]), -1)[None, None]
    rope = RoPE(16, pairing="neighbours")
    run = lambda x: theirs(x, sinusoidal_pos=rows)[0]  # noqa: E731
    mine = lambda x: ours(x, prepare=rotating(rope, at))  # noqa: E731
    how = {"reference": "transformers.RoFormerSelfAttention", "atol": ATOL[dtype]}
    (out, slope), (want, their_slope) = (with_gradient(f, x) for f in (mine, run))
    conform("RoPE", "forward", out, want, **how)
    conform("RoPE", "gradient", slope, their_slope, **how)


def sinusoids_in_float64(n: int, width: int) -> torch.Tensor:
    """The table, by hand."""
    return torch.stack([sinusoid_by_hand(p, width) for p in range(n)])


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_gpt_neox_turns_a_part_of_each_head(share, conform):
    rope = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": share}
    config = GPTNeoXConfig(
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=8,
        num_hidden_layers=1,
        rope_parameters=rope,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    theirs = GPTNeoXAttention(config, layer_idx=0).eval()
    ours = MultiHeadAttention(64, 4, bias=True)
    for part in ("weight", "bias"):  # their rows: q, k, v of head 0, then of head 1, …
        rows = getattr(theirs.query_key_value, part).unflatten(0, (4, 3, 16))
        getattr(ours.qkv, part).data.copy_(rows.transpose(0, 1).flatten(0, 2))
        getattr(ours.out, part).data.copy_(getattr(theirs.dense, part))
    x, at = draw(2, 10, 64), torch.arange(3, 13)
    mask = torch.full((10, 10), torch.finfo(x.dtype).min).triu(1)[None, None]
    tables = GPTNeoXRotaryEmbedding(config)(x, at[None])
    want = theirs(x, mask, position_embeddings=tables)[0]
    mine = RoPE(16, d_rotary=int(16 * share))
    found = ours(x, causal=True, prepare=rotating(mine, at))
    how = {"reference": "transformers.GPTNeoXAttention", "atol": 1e-5}
    conform("RoPE", "ragged", found, want, **how)


# --- longer than trained -----------------------------------------------------------


def their_frequencies(kind: str, length: int | None = None, **how):
    """Frequencies and scale of transformers, for heads of 64 features."""
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **how}
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=1,
        max_position_embeddings=2048,
        rope_parameters=parameters,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), length)


def close_ratio(found, want) -> tuple[torch.Tensor, torch.Tensor]:
    """Frequencies span four decades, so their quotient is what is compared."""
    return found / want.double(), torch.ones_like(found)


@pytest.mark.parametrize("factor", [2.0, 4.0, 7.5])
def test_interpolation(factor, conform):
    want, scale = their_frequencies("linear", factor=factor)
    how = {"reference": "transformers.modeling_rope_utils", "atol": 1e-6}
    ratio = close_ratio(pair_frequencies(64) / factor, want)
    conform("pair_frequencies", "forward", *ratio, **how)
    assert scale == 1


@pytest.mark.parametrize("length", [1024, 2048, 2049, 4096, 8192, 100_000])
@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
def test_dynamic_ntk(length, factor, conform):
    want, scale = their_frequencies("dynamic", length, factor=factor)
    found = pair_frequencies(64, ntk_base(64, length, 2048, factor))
    how = {"reference": "transformers.modeling_rope_utils", "atol": 1e-6}
    conform("ntk_base", "forward", *close_ratio(found, want), **how)
    assert scale == 1


@pytest.mark.parametrize("factor", [1.5, 4.0, 16.0, 40.0])
@pytest.mark.parametrize("n_trained", [256, 2048, 8192])
def test_yarn(factor, n_trained, conform):
    trained = {"original_max_position_embeddings": n_trained}
    want, scale = their_frequencies("yarn", factor=factor, **trained)
    found = yarn_frequencies(64, factor, n_trained)
    how = {"reference": "transformers.modeling_rope_utils", "atol": 2e-6}
    conform("yarn_frequencies", "forward", *close_ratio(found, want), **how)
    assert abs(yarn_scale(factor) - scale) < 1e-12


def test_yarn_with_other_turns():
    how = {"original_max_position_embeddings": 2048, "beta_fast": 16, "beta_slow": 2}
    want, _ = their_frequencies("yarn", factor=8.0, **how)
    found = yarn_frequencies(64, 8, 2048, turns=(16, 2))
    assert_close(found, want.double(), rtol=2e-6, atol=0)
    plain = yarn_frequencies(64, 8, 2048)
    assert ((plain / found - 1).abs() > 0.05).any()


def test_yarn_rotation(conform):
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    rope = LlamaRotaryEmbedding(llama_config(rope_parameters=parameters))
    q, k = (draw(1, 4, 100, 16, seed=i) for i in (0, 1))
    want = apply_rotary_pos_emb(q, k, *rope(q, torch.arange(100)[None]))
    mine = RoPE(16, frequencies=yarn_frequencies(16, 4, 32), scale=yarn_scale(4))
    turn = mine.at(torch.arange(100))
    # their float32 angles are 6e-6 off at 100 radians
    how = {"reference": "transformers.LlamaRotaryEmbedding", "atol": 3e-5}
    conform("yarn_frequencies", "ragged", (turn(q), turn(k)), want, **how)


# --- sinusoids and slopes ----------------------------------------------------------


def test_sinusoids_of_roformer_in_another_order(conform):
    table = RoFormerSinusoidalPositionalEmbedding(50, 16).create_weight()
    ours = sinusoids(50, 16)
    ours = torch.cat((ours[:, 0::2], ours[:, 1::2]), -1)
    how = {"reference": "transformers.RoFormerSinusoidalPositionalEmbedding"}
    conform("sinusoids", "forward", ours, table, **how, atol=1e-6)


@pytest.mark.parametrize("n_heads", [1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 112])
def test_slopes_of_bloom(n_heads, conform):
    ones = torch.ones(1, 2, dtype=torch.long)
    bias = build_alibi_tensor(ones, n_heads, torch.float32)  # (H, 1, 2): 0, slope
    how = {"reference": "transformers.BloomAttention", "atol": 1e-6}
    conform("alibi_slopes", "forward", alibi_slopes(n_heads), bias[:, 0, 1], **how)


@pytest.mark.parametrize("n_heads", [4, 6])
def test_bloom(n_heads, conform):
    width = 8 * n_heads
    shape = {"hidden_size": width, "n_head": n_heads, "hidden_dropout": 0.0}
    torch.manual_seed(0)
    theirs = BloomAttention(BloomConfig(**shape), layer_idx=0).eval()
    ours = MultiHeadAttention(
        width, n_heads, bias=True, attend=alibi_attention(n_heads)
    )
    for part in ("weight", "bias"):  # their rows: q, k, v of head 0, then of head 1, …
        rows = getattr(theirs.query_key_value, part).unflatten(0, (n_heads, 3, 8))
        getattr(ours.qkv, part).data.copy_(rows.transpose(0, 1).flatten(0, 2))
        getattr(ours.out, part).data.copy_(getattr(theirs.dense, part))
    x = draw(2, 11, width)
    bias = build_alibi_tensor(torch.ones(2, 11).long(), n_heads, x.dtype)
    mask = torch.full((11, 11), torch.finfo(x.dtype).min).triu(1)[None, None]
    run = lambda x: theirs(x, torch.zeros_like(x), bias, mask)[0]  # noqa: E731
    how = {"reference": "transformers.BloomAttention", "atol": 1e-5}
    mine = lambda x: ours(x, causal=True)  # noqa: E731
    (out, slope), (want, their_slope) = (with_gradient(f, x) for f in (mine, run))
    conform("alibi_attention", "forward", out, want, **how)
    conform("alibi_attention", "gradient", slope, their_slope, **how)


# --- Transformer-XL ----------------------------------------------------------------


def their_layer(dtype):
    """A layer of the last library that had Transformer-XL, and the same in ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is of 2019
        from pytorch_transformers.modeling_transfo_xl import (
            RelPartialLearnableMultiHeadAttn,
        )
    torch.manual_seed(0)
    theirs = RelPartialLearnableMultiHeadAttn(4, 32, 8, dropout=0.0).to(dtype).eval()
    for bias in (theirs.r_r_bias, theirs.r_w_bias):  # uninitialised there
        bias.data.normal_()
    theirs.layer_norm = nn.Identity()  # it gives w + attention
    ours = RelativeAttention(32, 4).to(dtype)
    ours.qkv.weight.data.copy_(theirs.qkv_net.weight)
    ours.out.weight.data.copy_(theirs.o_net.weight)
    # They put all sines before all cosines.
    columns = neighbours_to_halves(torch.arange(32), 1)
    ours.distance.weight.data[:, columns] = theirs.r_net.weight.data
    ours.content_bias.data.copy_(theirs.r_w_bias)
    ours.position_bias.data.copy_(theirs.r_r_bias)
    return ours, theirs


def run_theirs(layer, x, memory):
    """x (B, T, C) after memory (B, M, C), causal, their way."""
    t, s = x.size(1), x.size(1) + memory.size(1)
    distances = torch.arange(s - 1, -1, -1)
    exact = sinusoids_in_float64(s, 32)[distances]
    rows = torch.cat((exact[:, 0::2], exact[:, 1::2]), -1).to(x)[:, None]
    blocked = torch.ones(t, s).triu(1 + s - t).bool()[:, :, None]
    x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    return (layer(x, rows, blocked, memory)[0] - x).transpose(0, 1)


@each_dtype
def test_transformer_xl_over_three_segments(dtype, conform, monkeypatch):
    ours, theirs = their_layer(dtype)
    if dtype == torch.float64:  # they mask in float32, whatever comes in
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    how = {"reference": "pytorch-transformers.RelPartialLearnableMultiHeadAttn"}
    how |= {"atol": ATOL[dtype]}
    memory = torch.zeros(2, 0, 32, dtype=dtype)
    for segment in range(3):
        x = draw(2, 6, 32, seed=segment, dtype=dtype)
        mine = lambda x: ours(x, causal=True, memory=memory)  # noqa: E731, B023
        run = lambda x: run_theirs(theirs, x, memory)  # noqa: E731, B023
        (out, slope), (want, their_slope) = (with_gradient(f, x) for f in (mine, run))
        conform("RelativeAttention", "forward", out, want, **how)
        conform("RelativeAttention", "gradient", slope, their_slope, **how)
        memory = torch.cat((memory, x), 1)[:, -8:]  # 8 tokens are kept


@each_dtype
def test_transformer_xl_of_two_layers_carries_its_memory(dtype, conform):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pytorch_transformers.modeling_transfo_xl import (
            TransfoXLConfig,
            TransfoXLModel,
        )
    shape = {"d_model": 32, "d_embed": 32, "n_head": 4, "d_head": 8, "d_inner": 48}
    lengths = {"tgt_len": 6, "mem_len": 9, "clamp_len": -1, "same_length": False}
    how = {"n_layer": 2, "div_val": 1, "dropout": 0.0, "cutoffs": [10]}
    torch.manual_seed(0)
    theirs = TransfoXLModel(TransfoXLConfig(20, **shape, **lengths, **how))
    theirs = theirs.to(dtype).eval()
    layers = []
    for layer in theirs.layers:
        attn = layer.dec_attn
        for bias in (attn.r_r_bias, attn.r_w_bias):
            bias.data.normal_()
        ours = RelativeAttention(32, 4).to(dtype)
        ours.qkv.weight.data.copy_(attn.qkv_net.weight)
        ours.out.weight.data.copy_(attn.o_net.weight)
        columns = neighbours_to_halves(torch.arange(32), 1)
        ours.distance.weight.data[:, columns] = attn.r_net.weight.data
        ours.content_bias.data.copy_(attn.r_w_bias)
        ours.position_bias.data.copy_(attn.r_r_bias)
        layers.append(ours)
    tokens = torch.randint(20, (3, 2, 6), generator=torch.Generator().manual_seed(1))
    their_memory, memory = None, [torch.zeros(2, 9, 32, dtype=dtype)] * 2  # as theirs
    for segment in tokens:
        want, their_memory = theirs(segment, mems=their_memory)[:2]
        x = theirs.word_emb(segment)
        for i, (ours, layer) in enumerate(zip(layers, theirs.layers, strict=True)):
            kept = torch.cat((memory[i], x), 1)[:, -9:].detach()
            found = ours(x, causal=True, memory=memory[i])
            x = layer.pos_ff(layer.dec_attn.layer_norm(x + found))
            memory[i] = kept
        how = {"reference": "pytorch-transformers.TransfoXLModel", "atol": ATOL[dtype]}
        conform("RelativeAttention", "cached", x, want, **how)
