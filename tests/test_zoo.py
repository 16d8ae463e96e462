"""Tiny random models of every family, as `transformers` writes and computes them."""

import pytest
import torch
from blocks_oracle import randomise
from torch import nn
from torch.testing import assert_close

from transformer.attention import padding_mask
from transformer.sampling import generate
from transformer.zoo import load, save

V, C, H, F, L, T = 40, 24, 4, 36, 3, 9
TOKENS = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([T, 5])
BERT = {"hidden_size": C, "num_attention_heads": H, "num_hidden_layers": L}
BERT |= {"intermediate_size": F, "max_position_embeddings": 16}
GPT2 = {"n_embd": C, "n_head": H, "n_layer": L, "n_positions": 100}
LLAMA = {"hidden_size": C, "num_attention_heads": H, "num_hidden_layers": L}
LLAMA |= {"intermediate_size": F, "max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
WHISPER = {"d_model": C, "encoder_layers": L, "decoder_layers": 2, "num_mel_bins": 8}
WHISPER |= {"encoder_attention_heads": H, "decoder_attention_heads": 2}
WHISPER |= {"encoder_ffn_dim": F, "decoder_ffn_dim": 20, "max_source_positions": 10}
WHISPER |= {"max_target_positions": 12, "pad_token_id": 0, "bos_token_id": 1}
WHISPER |= {"eos_token_id": 2, "decoder_start_token_id": 3}
CASES = {
    "bert": ("BertModel", BERT),
    "bert, relu, three kinds": (
        "BertModel",
        BERT | {"hidden_act": "relu", "type_vocab_size": 3, "layer_norm_eps": 0.01},
    ),
    "bert with a head": ("BertForMaskedLM", BERT | {"hidden_act": "gelu_new"}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2, quick gelu, untied": (
        "GPT2LMHeadModel",
        GPT2
        | {"n_inner": F, "activation_function": "quick_gelu", "layer_norm_epsilon": 0.1}
        | {"tie_word_embeddings": False},
    ),
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama, shared heads, tied": (
        "LlamaForCausalLM",
        LLAMA | {"num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "llama, one key head, biases, wide heads": (
        "LlamaForCausalLM",
        LLAMA
        | {"num_key_value_heads": 1, "head_dim": 10, "attention_bias": True}
        | {"mlp_bias": True, "rms_norm_eps": 0.01, "hidden_act": "gelu"},
    ),
    "llama, another base": (
        "LlamaForCausalLM",
        LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    ),
    "llama, linear": (
        "LlamaForCausalLM",
        LLAMA
        | {
            "rope_parameters": {
                "rope_type": "linear",
                "rope_theta": 50.0,
                "factor": 4.0,
            }
        },
    ),
    "llama, llama3": ("LlamaForCausalLM", LLAMA | {"rope_parameters": LLAMA3}),
    "mistral": (
        "MistralForCausalLM",
        LLAMA | {"num_key_value_heads": 2, "sliding_window": 3},
    ),
    "mistral without a window": (
        "MistralForCausalLM",
        LLAMA | {"num_key_value_heads": 2, "sliding_window": None},
    ),
}
each_case = pytest.mark.parametrize("case", CASES)


def draw(case: str) -> nn.Module:
    """A model of transformers with random weights, gains and offsets."""
    import transformers

    head, sizes = CASES[case]
    model = getattr(transformers, head)
    torch.manual_seed(1)
    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = model.config_class(vocab_size=V, **{**ends, **sizes})
    return randomise(model(config)).eval()


def logits(model: nn.Module, tokens: torch.Tensor, mask=None) -> torch.Tensor:
    """What a model of transformers says."""
    out = model(tokens, attention_mask=mask)
    return out.logits if "logits" in out else out.last_hidden_state


def reference(model: nn.Module) -> str:
    return f"transformers.{type(model).__name__}"


@each_case
@torch.no_grad()
def test_every_family_gives_the_numbers_of_transformers(case, tmp_path, conform):
    theirs = draw(case)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    got, want = ours(TOKENS), logits(theirs, TOKENS)
    assert want.std() > 0.3 and not ours.training
    how = {"reference": reference(theirs), "atol": 1e-5}
    conform("load", "forward", got, want, **how)
    mask = padding_mask(LENGTHS, T)
    real = mask[:, 0, 0]
    got, want = ours(TOKENS, mask=mask), logits(theirs, TOKENS, real.long())
    conform("load", "ragged", got[real], want[real], **how)


@each_case
@torch.no_grad()
def test_transformers_reads_back_what_was_saved(case, tmp_path, conform):
    theirs = draw(case)
    theirs.save_pretrained(tmp_path / "theirs")
    save(load(tmp_path / "theirs"), tmp_path / "ours")
    back, info = type(theirs).from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    missing = {n for n in info["missing_keys"] if not n.startswith("pooler.")}
    assert not missing and not info["unexpected_keys"]
    got, want = logits(back.eval(), TOKENS), logits(theirs, TOKENS)
    assert_close(got, want, rtol=0, atol=0)
    assert got.argmax(-1).equal(want.argmax(-1))
    conform("save", "forward", got, want, reference=reference(theirs), atol=0.0)
    if case.startswith(("gpt2", "llama", "mistral")):
        how = {"max_new_tokens": 20, "do_sample": False}
        how["attention_mask"] = torch.ones_like(TOKENS)
        written = back.generate(TOKENS, **how)
        assert written.equal(generate(load(tmp_path / "ours"), TOKENS, 20))
        assert written.equal(theirs.generate(TOKENS, **how))
