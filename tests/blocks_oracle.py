"""Our blocks and torch's with the same weights."""

import torch
from torch import nn

from transformer.attention import MultiHeadAttention
from transformer.blocks import PostNormBlock, PreNormBlock
from transformer.feedforward import FeedForward

KINDS = {"pre": PreNormBlock, "post": PostNormBlock}


def make_block(kind: str, cross: bool = False, *, d=12, d_ff=20, dropout=0.0, **how):
    """A block of 3 heads with biases and random weights, norms included."""
    heads = [MultiHeadAttention(d, 3, bias=True) for _ in range(2)]
    ffn = FeedForward(d, d_ff, **how)
    read = heads[1] if cross else None
    block = KINDS[kind](d, heads[0], ffn, cross=read, dropout=dropout)
    return randomise(block)


def randomise(module: nn.Module) -> nn.Module:
    """Every parameter drawn, gains around 1."""
    for name, p in module.named_parameters():
        nn.init.normal_(p, 1.0 if "norm.weight" in name else 0.0, 0.3)
    return module


def names_in_torch(cross: bool) -> dict[str, str]:
    """Where a parameter of ours lies in torch's layers."""
    attn = {"qkv.weight": "in_proj_weight", "qkv.bias": "in_proj_bias"}
    attn |= {f"out.{p}": f"out_proj.{p}" for p in ("weight", "bias")}
    plain = {"attn_norm": "norm1", "ffn.up": "linear1", "ffn.down": "linear2"}
    plain |= {"ffn_norm": "norm3" if cross else "norm2"}
    plain |= {"cross_norm": "norm2"} if cross else {}
    names = {f"{a}.{p}": f"{b}.{p}" for a, b in plain.items() for p in PARTS}
    names |= {f"attn.{a}": f"self_attn.{b}" for a, b in attn.items()}
    if cross:
        names |= {f"cross.{a}": f"multihead_attn.{b}" for a, b in attn.items()}
    return names


PARTS = ("weight", "bias")


def in_torch(block: nn.Module, cross: bool = False, prefix: str = "") -> dict:
    """The state of torch's layer that has the weights of our block."""
    names, state = names_in_torch(cross), block.state_dict()
    assert names.keys() == state.keys()
    return {prefix + names[name]: value for name, value in state.items()}


def torch_layer(block: nn.Module, kind: str, cross: bool = False, **how) -> nn.Module:
    """torch's layer with the weights of our block; in training, without dropout.

    In eval torch would take a path of its own.
    """
    layer = nn.TransformerDecoderLayer if cross else nn.TransformerEncoderLayer
    widths = block.attn.qkv.in_features, 3, block.ffn.up.out_features
    how = {"dropout": 0.0, "batch_first": True, "norm_first": kind == "pre", **how}
    theirs = layer(*widths, **how)
    theirs.load_state_dict(in_torch(block, cross))
    return theirs.to(block.attn.qkv.weight)


def float_tokens(*shape: int) -> torch.Tensor:
    """Random tokens in float64 that want a gradient."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)
