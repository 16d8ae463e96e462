"""Grouped and multi-query models of `transformers` and ours with the same weights."""

from functools import partial

import pytest
import torch
from blocks_oracle import randomise

from transformer.attention import padding_mask
from transformer.blocks import PreNormBlock
from transformer.feedforward import FeedForward, GatedFeedForward
from transformer.grouped import GroupedQueryAttention, grouped_attention
from transformer.model import LanguageModel, count_parameters
from transformer.norms import LayerNorm, RMSNorm
from transformer.positions import LearnedPositions, RoPE

C, H, F, L, V = 24, 4, 40, 3, 30
TOKENS = torch.randint(V, (2, 7), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([7, 4])


def llama_config(n_kv_heads: int, **shape):
    """A Llama of these counts, tiny by default."""
    from transformers import LlamaConfig

    tiny = {"vocab_size": V, "hidden_size": C, "intermediate_size": F}
    tiny |= {"num_attention_heads": H, "num_hidden_layers": L}
    return LlamaConfig(**{**tiny, **shape}, num_key_value_heads=n_kv_heads)


def llama_like(config, attend=grouped_attention) -> LanguageModel:
    """Our model of the same shape."""
    norm, c = partial(RMSNorm, eps=config.rms_norm_eps), config.hidden_size
    heads = config.num_attention_heads, config.num_key_value_heads
    blocks = [
        PreNormBlock(
            c,
            GroupedQueryAttention(c, *heads, attend=attend),
            GatedFeedForward(c, config.intermediate_size),
            norm=norm,
        )
        for _ in range(config.num_hidden_layers)
    ]
    how = {"rope": RoPE(c // heads[0]), "norm": norm, "tie": False}
    return LanguageModel(config.vocab_size, c, blocks, **how)


def llama_state(state: dict) -> dict:
    """Our names for the weights of a Llama."""
    names = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    mine = {}
    for i in range(L):
        a, b = f"blocks.{i}.", f"model.layers.{i}."
        names |= {a + "attn_norm": b + "input_layernorm"}
        names |= {a + "ffn_norm": b + "post_attention_layernorm"}
        names |= {f"{a}ffn.{p}": f"{b}mlp.{p}_proj" for p in ("gate", "up", "down")}
        names |= {a + "attn.out": b + "self_attn.o_proj"}
        rows = [state[f"{b}self_attn.{p}_proj.weight"] for p in "qkv"]
        mine[f"{a}attn.qkv.weight"] = torch.cat(rows)
    return mine | {f"{k}.weight": state[f"{v}.weight"] for k, v in names.items()}


@pytest.fixture(scope="module", params=[1, 2, 4], ids="{} kv heads".format)
def llama(request):
    """transformers' Llama and ours with its weights."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    config = llama_config(request.param)
    theirs = randomise(LlamaForCausalLM(config)).eval()
    ours = llama_like(config).eval()
    ours.load_state_dict(llama_state(theirs.state_dict()))
    return ours, theirs


def bigcode_state(state: dict) -> dict:
    """Our names for the weights of a GPTBigCode: one layer has q, then k, then v."""
    state = {k.removeprefix("transformer."): v for k, v in state.items()}
    mine = {"embedding.weight": state["wte.weight"]}
    mine["positions.weight"] = state["wpe.weight"]
    names = {"norm": "ln_f"}
    for i in range(L):
        a, b = f"blocks.{i}.", f"h.{i}."
        names |= {a + "attn_norm": b + "ln_1", a + "ffn_norm": b + "ln_2"}
        names |= {a + "attn.qkv": b + "attn.c_attn", a + "attn.out": b + "attn.c_proj"}
        names |= {a + "ffn.up": b + "mlp.c_fc", a + "ffn.down": b + "mlp.c_proj"}
    parts = [(k, v, p) for k, v in names.items() for p in ("weight", "bias")]
    return mine | {f"{k}.{p}": state[f"{v}.{p}"] for k, v, p in parts}


@pytest.fixture(scope="module")
def bigcode():
    """transformers' GPTBigCode, whose heads share one key and value, and ours."""
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    torch.manual_seed(1)
    shape = {"n_embd": C, "n_head": H, "n_layer": L, "n_inner": F, "n_positions": 16}
    config = GPTBigCodeConfig(vocab_size=V, **shape, multi_query=True)
    theirs = randomise(GPTBigCodeForCausalLM(config)).eval()
    blocks = [
        PreNormBlock(
            C,
            GroupedQueryAttention(C, H, 1, bias=True),
            FeedForward(C, F, activation="gelu_tanh"),
        )
        for _ in range(L)
    ]
    places = LearnedPositions(16, C)
    ours = LanguageModel(V, C, blocks, positions=places, norm=LayerNorm).eval()
    ours.load_state_dict(bigcode_state(theirs.state_dict()))
    return ours, theirs


def compare(models, rename, conform, reference: str) -> None:
    """Logits, logits of padded texts, and the gradients of all parameters."""
    ours, theirs = models
    how = {"reference": reference, "atol": 2e-5}
    got, want = ours(TOKENS), theirs(TOKENS).logits
    assert want.std() > 0.3  # far above the tolerance
    conform("GroupedQueryAttention", "forward", got, want, **how)
    mask = padding_mask(LENGTHS, 7)
    real = mask[:, 0, 0]
    padded = ours(TOKENS, mask=mask)[real]
    theirs_padded = theirs(TOKENS, attention_mask=real.long()).logits[real]
    conform("GroupedQueryAttention", "ragged", padded, theirs_padded, **how)
    up = torch.randn(want.shape, generator=torch.Generator().manual_seed(2))
    slopes = []
    for model, out in ((ours, got), (theirs, want)):
        names, parameters = zip(*model.named_parameters(), strict=True)
        found = torch.autograd.grad(out, parameters, up)
        slopes.append(dict(zip(names, found, strict=True)))
    mine, other = slopes[0], rename(slopes[1])
    assert mine.keys() == other.keys()
    for name, slope in mine.items():
        assert other[name].std() > 0.01
        how = {"reference": reference, "rtol": 1e-4, "atol": 1e-3}
        conform("GroupedQueryAttention", "gradient", slope, other[name], **how)


def test_equals_llama_with_shared_heads(llama, conform):
    compare(llama, llama_state, conform, "transformers.LlamaForCausalLM")


def test_equals_gpt_bigcode(bigcode, conform):
    compare(bigcode, bigcode_state, conform, "transformers.GPTBigCodeForCausalLM")


@torch.no_grad()
def test_cached_steps_equal_llamas(llama, conform):
    """Theirs with its own cache, ours with k and v appended in `prepare`."""
    ours, theirs = llama
    past, cached, kept = None, [], {}

    def prepare(i):
        def append(q, k, v, mask):
            old = kept.get(i)
            if old is not None:
                k, v = torch.cat([old[0], k], -2), torch.cat([old[1], v], -2)
            kept[i] = k, v
            return q, k, v, mask

        return append

    for t in range(7):
        out = theirs(TOKENS[:, t : t + 1], past_key_values=past, use_cache=True)
        past = out.past_key_values
        cached.append(out.logits)
    mine = [
        ours(TOKENS[:, t : t + 1], positions=torch.tensor([t]), prepare=prepare)
        for t in range(7)
    ]
    how = {"reference": "transformers.LlamaForCausalLM", "atol": 2e-5}
    mine, cached = torch.cat(mine, 1), torch.cat(cached, 1)
    conform("GroupedQueryAttention", "cached", mine, cached, **how)


@pytest.mark.parametrize(
    "n_kv_heads, shape",
    [
        (32, (32000, 4096, 11008, 32, 32)),  # Llama-2-7B
        (8, (32000, 8192, 28672, 64, 80)),  # Llama-2-70B
        (8, (128256, 4096, 14336, 32, 32)),  # Llama-3-8B
    ],
)
def test_has_as_many_parameters_as_llama(n_kv_heads, shape):
    from transformers import LlamaForCausalLM

    names = ["vocab_size", "hidden_size", "intermediate_size"]
    names += ["num_attention_heads", "num_hidden_layers"]
    config = llama_config(n_kv_heads, **dict(zip(names, shape, strict=True)))
    with torch.device("meta"):
        theirs, ours = LlamaForCausalLM(config), llama_like(config)
    assert count_parameters(ours) == theirs.num_parameters()
