"""Work that `fused_attention` does not do where it need not."""

import torch
from torch.testing import assert_close

import transformer.attention
from transformer.attention import attention, fold, fused_attention


def test_heads_of_a_projection_are_folded_without_a_copy():
    heads = torch.randn(2, 3, 5, 4, 8).transpose(2, 3)  # (A, B, T, H, D) before
    folded = fold(heads, (2, 3))
    assert folded.shape == (6, 4, 5, 8) and folded.data_ptr() == heads.data_ptr()
    assert folded.stride() == heads.stride()[1:]


def test_last_query_alone_sees_all_without_a_mask(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a mask is made")

    q, k = torch.randn(2, 3, 1, 4), torch.randn(2, 3, 5, 4)
    want = attention(q, k, k, causal=True)
    monkeypatch.setattr(transformer.attention, "causal_mask", refuse)
    assert_close(fused_attention(q, k, k, causal=True), want)
