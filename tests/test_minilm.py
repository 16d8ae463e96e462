"""`MultiHeadAttention` with the weights of a real encoder gives that encoder's numbers.

A missing carrier is a failure here: `make test` installs it.
"""

import copy

import pytest
import torch
from attention_oracle import DEVICES
from safetensors import safe_open
from torch.testing import assert_close
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertAttention, BertEmbeddings

from transformer.attention import (
    MultiHeadAttention,
    attention,
    attention_weights,
    fused_attention,
    padding_mask,
    project_heads,
)
from transformer.sources import weights_path

BERT = "transformers.Bert"
SENTENCE = "the old dog did not cross the street because it was too tired ."
each_device = pytest.mark.parametrize("device", DEVICES)


def read(prefix: str) -> dict[str, torch.Tensor]:
    """The real weights below a name, without it."""
    with safe_open(weights_path("minilm"), "pt") as file:
        names = [name for name in file.keys() if name.startswith(prefix)]
        return {name.removeprefix(prefix): file.get_tensor(name) for name in names}


@pytest.fixture(scope="module")
def hidden() -> torch.Tensor:
    """What layer 0 sees of the sentence, by transformers' own embeddings."""
    vocabulary = weights_path("minilm-vocab").read_text(encoding="utf-8").split("\n")
    words = ["[CLS]", *SENTENCE.split(), "[SEP]"]
    tokens = torch.tensor([[vocabulary.index(word) for word in words]])
    embeddings = BertEmbeddings(config()).eval()
    names = {name for name, _ in embeddings.named_parameters()}
    state = {name: x for name, x in read("embeddings.").items() if name in names}
    assert not embeddings.load_state_dict(state, strict=False).missing_keys
    with torch.no_grad():
        return embeddings(tokens)


def config() -> BertConfig:
    """The shape of all-MiniLM-L6-v2."""
    shape = {"hidden_size": 384, "num_attention_heads": 12, "num_hidden_layers": 6}
    return BertConfig(**shape, intermediate_size=1536, attn_implementation="eager")


@pytest.fixture(scope="module")
def theirs() -> BertAttention:
    """Layer 0's attention as transformers computes it."""
    module = BertAttention(config()).eval()
    module.load_state_dict(read("encoder.layer.0.attention."))
    return module


def ours(attend=fused_attention) -> MultiHeadAttention:
    """Layer 0's attention with the same weights."""
    weights = read("encoder.layer.0.attention.")
    module, state = MultiHeadAttention(384, 12, bias=True, attend=attend).eval(), {}
    for kind in ("weight", "bias"):
        parts = [weights[f"self.{n}.{kind}"] for n in ("query", "key", "value")]
        state[f"qkv.{kind}"] = torch.cat(parts)
        state[f"out.{kind}"] = weights[f"output.dense.{kind}"]
    module.load_state_dict(state)
    return module


def masks(kept: int | None, n_keys: int) -> tuple[torch.Tensor | None, ...]:
    """The mask that shows the first tokens, as ours, and as transformers adds it."""
    if kept is None:
        return None, None
    mask = padding_mask(torch.tensor([kept]), n_keys)
    return mask, torch.zeros(mask.shape).masked_fill(~mask, torch.finfo().min)


def to(device: str, x: torch.Tensor | None) -> torch.Tensor | None:
    """x there, where there is one."""
    return x if x is None else x.to(device)


@each_device
@pytest.mark.parametrize("kept", [None, 10])
@pytest.mark.parametrize(
    "attend", [attention, fused_attention], ids=lambda f: f.__name__
)
@torch.no_grad()
def test_outputs_equal_transformers(hidden, theirs, attend, kept, device, conform):
    mask, added = masks(kept, hidden.size(1))
    heads = theirs.self(hidden, attention_mask=added)[0]  # before W_O
    want = theirs.output.dense(heads)
    module = ours(attend).to(device)
    got = module(to(device, hidden), mask=to(device, mask)).cpu()
    column = "forward" if kept is None else "ragged"
    how = {"reference": f"{BERT}Attention, weights of all-MiniLM-L6-v2", "atol": 1e-5}
    conform("MultiHeadAttention", column, got, want, **how)
    module.out = torch.nn.Identity()
    got_heads = module(to(device, hidden), mask=to(device, mask)).cpu()
    assert_close(got_heads, heads, rtol=0, atol=1e-5)
    normed = theirs.output.LayerNorm(got + hidden)
    whole = theirs(hidden, attention_mask=added)[0]
    assert_close(normed, whole, rtol=0, atol=1e-5)
    assert min(heads.std(), want.std()) > 0.03  # far above the tolerance


@each_device
@pytest.mark.parametrize("kept", [None, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@torch.no_grad()
def test_weights_equal_transformers(hidden, theirs, kept, dtype, device, conform):
    if (dtype, device) == (torch.float32, "cuda"):
        pytest.skip("float32 sums on two devices are 1e-6 apart: float64 compares them")
    mask, added = masks(kept, hidden.size(1))
    layer, hidden = copy.deepcopy(theirs.self).to(dtype), hidden.to(dtype)
    want = layer(hidden, attention_mask=added, output_attentions=True)[1]
    layer = ours().to(device, dtype)
    q, k, _ = project_heads(layer.qkv, 12, to(device, hidden))
    got = attention_weights(q, k, to(device, mask)).cpu()
    assert got.shape == (1, 12, hidden.size(1), hidden.size(1))
    column = "forward" if kept is None else "ragged"
    how = {"reference": f"{BERT}SelfAttention, weights of all-MiniLM-L6-v2"}
    conform("attention_weights", column, got, want, **how, atol=1e-6)


@torch.no_grad()
def test_real_heads_look_at_different_tokens(hidden):
    q, k, _ = project_heads(ours().qkv, 12, hidden)
    maps = attention_weights(q, k)[0].flatten(1)
    apart = torch.cdist(maps, maps).fill_diagonal_(torch.inf)
    assert apart.min() > 0.1
