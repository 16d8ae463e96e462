"""A tiny random Mistral of `transformers` and ours with the same weights and window."""

import pytest
import torch
from blocks_oracle import randomise
from test_grouped_parity import C, F, H, L, V, llama_like, llama_state

from transformer.window import window_attention

WINDOW, T = 3, 9
TOKENS = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(4))
MISTRAL = "transformers.MistralForCausalLM"


@pytest.fixture(scope="module", params=["eager", "sdpa"])
def mistral(request):
    """transformers' Mistral and ours with its weights, in float64."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(1)
    tiny = {"vocab_size": V, "hidden_size": C, "intermediate_size": F}
    tiny |= {"num_attention_heads": H, "num_hidden_layers": L}
    tiny |= {"num_key_value_heads": 2, "sliding_window": WINDOW}
    config = MistralConfig(**tiny, attn_implementation=request.param)
    theirs = randomise(MistralForCausalLM(config)).double().eval()
    ours = llama_like(config, window_attention(WINDOW)).double().eval()
    ours.load_state_dict(llama_state(theirs.state_dict()))
    return ours, theirs


def test_equals_mistral(mistral, conform):
    ours, theirs = mistral
    want = theirs(TOKENS).logits
    assert want.std() > 0.3  # far above the tolerance
    how = {"reference": MISTRAL, "atol": 1e-4}  # their rotation is float32
    conform("window_attention", "forward", ours(TOKENS), want, **how)


def test_equals_mistrals_gradients(mistral, conform):
    ours, theirs = mistral
    torch.manual_seed(5)
    up = torch.randn(2, T, V, dtype=torch.float64)
    theirs.zero_grad()
    theirs(TOKENS).logits.backward(up)
    slopes = {name: p.grad for name, p in theirs.named_parameters()}
    want = llama_state(slopes)
    ours.zero_grad()
    ours(TOKENS).backward(up)
    got = {name: p.grad for name, p in ours.named_parameters()}
    assert got.keys() == want.keys()
    names = sorted(want)
    scale = max(want[name].abs().max() for name in names).item()
    mine, peers = ([x[name] / scale for name in names] for x in (got, want))
    conform("window_attention", "gradient", mine, peers, reference=MISTRAL, atol=1e-5)


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1])
@torch.no_grad()
def test_another_window_gives_other_numbers(mistral, window):
    ours, theirs = mistral
    want = theirs(TOKENS).logits
    kept = [block.attn.attend for block in ours.blocks]
    for block in ours.blocks:
        block.attn.attend = window_attention(window)
    apart = (ours(TOKENS) - want).abs().amax((0, 2))
    for block, attend in zip(ours.blocks, kept, strict=True):
        block.attn.attend = attend
    first = min(window, WINDOW)  # the first query whose windows differ
    assert (apart[:first] < 1e-4).all() and (apart[first:] > 1e-3).all()
