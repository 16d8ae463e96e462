"""Small decoders of every kind, for the tests of caches and of sampling."""

from functools import partial

import torch

from transformer.blocks import PreNormBlock
from transformer.feedforward import FeedForward
from transformer.grouped import GroupedQueryAttention, grouped_attention
from transformer.model import LanguageModel
from transformer.norms import LayerNorm
from transformer.positions import (
    LearnedPositions,
    RelativeAttention,
    RoPE,
    SinusoidalPositions,
    alibi_attention,
)
from transformer.window import window_attention

C, H, V = 24, 6, 17
SCHEMES = {
    "none": {},
    "sinusoidal": {"positions": lambda: SinusoidalPositions(C)},
    "learned": {"positions": lambda: LearnedPositions(40, C)},
    "halves": {"rope": lambda: RoPE(C // H)},
    "neighbours": {"rope": lambda: RoPE(C // H, pairing="neighbours")},
    "alibi": {"attend": alibi_attention(H)},
    "relative": {"attn": lambda: RelativeAttention(C, H)},
}


def decoder(scheme="halves", *, kv=2, window=None, cross=False, layers=2, seed=0):
    """A `LanguageModel` of two blocks, ready to write; any of SCHEMES."""
    torch.manual_seed(seed)
    parts = dict(SCHEMES[scheme])
    attend = parts.pop("attend", grouped_attention)
    attend = attend if window is None else window_attention(window)
    grouped = partial(GroupedQueryAttention, C, H, kv, attend=attend)
    attn = parts.pop("attn", grouped)
    parts = {name: make() for name, make in parts.items()}
    blocks = [
        PreNormBlock(
            C,
            attn(),
            FeedForward(C, 2 * C),
            cross=GroupedQueryAttention(C, H, kv) if cross else None,
        )
        for _ in range(layers)
    ]
    return LanguageModel(V, C, blocks, norm=LayerNorm, tie=False, **parts).eval()


def prompts(batch, length, seed=0):
    """(B, T) tokens."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(V, (batch, length), generator=made)


def padded(rows, length, side="left", pad=0):
    """Rows of different lengths as (B, T) tokens and their (B, 1, 1, T) mask."""
    tokens = torch.full((len(rows), length), pad)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for b, row in enumerate(rows):
        where = slice(length - len(row), None) if side == "left" else slice(len(row))
        tokens[b, where], mask[b, where] = row, True
    return tokens, mask[:, None, None]
