"""Tiny random models of every family, as `transformers` writes and computes them."""

import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from blocks_oracle import randomise
from safetensors.torch import load_file, save_file
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


# --- other ways in which the same weights come ----------------------------------------


@each_case
@torch.no_grad()
def test_shards_and_old_torch_files_give_the_same_model(case, tmp_path):
    theirs = draw(case)
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    folder = tmp_path / "old"
    folder.mkdir()
    shutil.copy(tmp_path / "one" / "config.json", folder)
    state = load_file(tmp_path / "one" / "model.safetensors")
    torch.save(state, folder / "pytorch_model.bin")
    want = load(tmp_path / "one")(TOKENS)
    assert load(tmp_path / "many")(TOKENS).equal(want)
    assert load(folder)(TOKENS).equal(want)


@pytest.mark.parametrize("case", ["gpt2", "llama, shared heads, tied", "bert"])
@torch.no_grad()
def test_prefix_old_spelling_and_tied_copies_make_no_difference(case, tmp_path):
    draw(case).save_pretrained(tmp_path)
    want, file = load(tmp_path)(TOKENS), tmp_path / "model.safetensors"
    state = load_file(file)
    prefix = {"gpt2": "transformer.", "bert": "bert."}.get(case, "model.")
    other = {n.removeprefix(prefix): x for n, x in state.items()}
    if case == "bert":
        other = {prefix + n: x for n, x in other.items()}
        spelled = [("LayerNorm.weight", "LayerNorm.gamma")]
        spelled += [("LayerNorm.bias", "LayerNorm.beta")]
        for new, old in spelled:
            other = {n.replace(new, old): x for n, x in other.items()}
        other["bert.embeddings.position_ids"] = torch.arange(16)[None]
        other["bert.pooler.dense.extra"] = torch.ones(1)
    else:
        other["lm_head.weight"] = torch.zeros(V, C)
        other["h.0.attn.bias" if case == "gpt2" else "rotary_emb.inv_freq"] = (
            torch.ones(3)
        )
        if case != "gpt2":
            other["layers.0.self_attn.rotary_emb.inv_freq"] = other.pop(
                "rotary_emb.inv_freq"
            )
    assert other.keys() != state.keys()
    save_file(other, file)
    assert load(tmp_path)(TOKENS).equal(want)


def permuted(rows: torch.Tensor, n_heads: int) -> torch.Tensor:
    """As llama.cpp's converter writes rows of queries and keys."""
    halves = rows.view(n_heads, 2, rows.size(0) // n_heads // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def write_gguf(path: Path, model, drop=(), **facts) -> Path:
    """A tiny Llama of transformers as a GGUF file, written by the library."""
    c, writer = model.config, gguf.GGUFWriter(path, facts.pop("kind", "llama"))
    writer.add_context_length(64)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(c.head_dim)
    for name, value in facts.items():
        getattr(writer, f"add_{name}")(value)
    words = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k"}
    words |= {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"}
    words |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    words |= {f"mlp.{p}_proj": f"ffn_{p}" for p in ("gate", "up", "down")}
    words |= {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    words |= {"lm_head": "output", "model.layers.": "blk."}
    heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}
    for name, x in model.state_dict().items():
        for old, new in words.items():
            name = name.replace(old, new)
        if (part := name.split(".")[-2]) in heads:
            x = permuted(x, heads[part])
        if name not in drop:
            writer.add_tensor(name, x.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", ["llama", "llama, shared heads, tied"])
@torch.no_grad()
def test_a_gguf_file_gives_the_numbers_of_transformers(case, tmp_path, conform):
    theirs = draw(case)
    drop = ["output.weight"] if "tied" in case else []
    path = write_gguf(tmp_path / "x.gguf", theirs, drop)
    how = {"reference": reference(theirs), "atol": 1e-5}
    conform("load", "forward", load(path)(TOKENS), logits(theirs, TOKENS), **how)
    save(load(path), tmp_path / "folder")
    back = type(theirs).from_pretrained(tmp_path / "folder").eval()
    assert_close(logits(back, TOKENS), logits(theirs, TOKENS), rtol=0, atol=1e-5)


@torch.no_grad()
def test_whisper_gives_the_numbers_of_transformers(tmp_path, conform):
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(1)
    config = WhisperConfig(vocab_size=V, **WHISPER)
    theirs = randomise(WhisperForConditionalGeneration(config)).eval()
    theirs.save_pretrained(tmp_path)
    features = torch.randn(2, 8, 20)
    ours = load(tmp_path)
    got = ours.decoder(TOKENS, context=ours.encoder(features))
    want = theirs(features, decoder_input_ids=TOKENS).logits
    assert want.std() > 0.3
    conform("load", "forward", got, want, reference=reference(theirs), atol=2e-5)
    heard = theirs.model.encoder(features)[0]
    how = {"reference": reference(theirs), "atol": 1e-5}
    conform("SpeechEncoder", "forward", ours.encoder(features), heard, **how)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_weights_are_loaded_in_the_dtype_that_is_asked_for(dtype, tmp_path):
    draw("llama").save_pretrained(tmp_path)
    exact, other = load(tmp_path), load(tmp_path, dtype=dtype)
    pairs = zip(exact.parameters(), other.parameters(), strict=True)
    assert all(y.equal(x.to(dtype)) for x, y in pairs)
    with pytest.raises(TypeError, match=r"floating point, got dtype=torch.int8"):
        load(tmp_path, dtype=torch.int8)


def test_a_loaded_model_does_not_hang_on_its_file(tmp_path):
    draw("gpt2").save_pretrained(tmp_path)
    model = load(tmp_path)
    before = model(TOKENS)
    for file in tmp_path.iterdir():
        file.unlink()
    assert model(TOKENS).equal(before)
    model(TOKENS).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# --- refused in one line --------------------------------------------------------------


def refuses(folder, *words, error=ValueError):
    """`load` refuses in one line that holds the words, in order."""
    with pytest.raises(error, match=".*".join(words)) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.fixture
def folder(tmp_path):
    """A small Llama, its tensors, its configuration."""
    draw("llama, shared heads, tied").save_pretrained(tmp_path)
    return tmp_path


def change(folder, tensors=None, **config):
    """Write other tensors, or other entries of the configuration."""
    path = folder / "config.json"
    said = json.loads(path.read_text(encoding="utf-8")) | config
    path.write_text(json.dumps(said), encoding="utf-8")
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    "config, words",
    [
        ({"model_type": "rwkv"}, ["model_type of bert, gpt2, llama, mistral, whisper"]),
        ({"model_type": None}, ["model_type of bert", "got model_type=None"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config must be None"]),
        ({"num_hidden_layers": L + 1}, ["missing: layers.3", "more"]),
        ({"num_hidden_layers": L - 1}, ["surplus: layers.2", "more"]),
        ({"hidden_size": None}, ["hidden_size must be a whole number from 1"]),
        ({"hidden_size": True}, ["hidden_size must be", "got hidden_size=True"]),
        ({"intermediate_size": F + 1}, ["different: .*mlp.", "here"]),
        ({"num_key_value_heads": 4}, ["different: .*k_proj"]),
        ({"num_key_value_heads": 3}, ["n_heads must be a multiple of n_kv_heads"]),
        ({"vocab_size": V + 1}, ["different: embed_tokens"]),
        ({"tie_word_embeddings": False}, ["missing: lm_head.weight"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings must be true or false"]),
        ({"attention_bias": True}, ["missing: ", "q_proj.bias"]),
        ({"hidden_act": "snake"}, ["hidden_act must be one of gelu"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps must be a positive number"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps must be a positive number"]),
        ({"rope_parameters": {"rope_type": "yarn"}}, ["rope_type must be one of"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["factor must be a positive"]),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            ["partial_rotary_factor"],
        ),
        ({"pretraining_tp": 2}, ["pretraining_tp must be 1: no other"]),
    ],
)
def test_a_setting_that_cannot_be_built_is_refused(config, words, folder):
    change(folder, **config)
    refuses(folder, *words)


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "fault, words",
    [
        (lambda s: s.pop(Q), ["got missing: layers.1.self_attn.q_proj.weight$"]),
        (lambda s: s.update(x=torch.ones(1)), ["got surplus: x$"]),
        (
            lambda s: s.update({Q: s[Q][1:].clone()}),
            ["different: ", "23, 24", "24, 24"],
        ),
        (lambda s: s.update({Q: s[Q].half().char()}), ["blocks of GGUF", "of I8"]),
        (lambda s: s.update({Q[6:]: s[Q].clone()}), ["a name stands twice"]),
    ],
    ids=["missing", "surplus", "shape", "int8", "twice"],
)
def test_tensors_that_do_not_fit_are_named(fault, words, folder):
    state = load_file(folder / "model.safetensors")
    fault(state)
    change(folder, state)
    refuses(folder, *words)


def test_a_file_that_is_cut_damaged_or_runs_code_is_refused(folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-9])
    refuses(folder, "model.safetensors is cut short or damaged")
    file.write_bytes(data[:9] + b"\xff" + data[10:])
    refuses(folder, "model.safetensors must hold a JSON object")
    file.unlink()
    torch.save({"w": nn.Linear(2, 2)}, folder / "pytorch_model.bin")
    refuses(folder, "runs no code", "asks for torch.nn")
    (folder / "pytorch_model.bin").unlink()
    refuses(folder, "must hold one weight file", error=FileNotFoundError)
    refuses(
        "gpt5",
        "one of smollm2, minilm, whisper, got path=",
        "gpt5",
        error=FileNotFoundError,
    )


def test_nothing_is_allocated_for_a_file_that_does_not_fit(folder, monkeypatch):
    change(folder, vocab_size=10**9)

    def allocate(*_, **__):
        raise AssertionError("memory was taken")

    monkeypatch.setattr(nn.Module, "to_empty", allocate)
    refuses(folder, "different: embed_tokens", "1000000000")


@pytest.mark.parametrize(
    "facts, words",
    [
        ({"kind": "gemma"}, ["general.architecture must be 'llama'", "gemma"]),
        ({"expert_count": 8}, ["expert_count must be 0", "got expert_count=8"]),
        ({"key_length": 12}, ["must be 12"]),
        ({"head_count": [4, 4, 4]}, ["num_attention_heads must be a whole number"]),
    ],
)
def test_a_gguf_of_another_kind_is_refused(facts, words, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", draw("llama"), **facts)
    refuses(path, *words)


def test_missing_and_surplus_tensors_of_a_gguf_are_named(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", draw("llama"), ["blk.1.attn_k.weight"])
    refuses(path, "missing: blk.1.attn_k.weight")


def test_saving_refuses_another_model_and_other_weights(folder, tmp_path):
    model = load(folder)
    with pytest.raises(ValueError, match="model must have a config"):
        save(nn.Linear(2, 2), tmp_path / "a")
    with pytest.raises(ValueError, match=r"of the config here, got .*more"):
        save(model, tmp_path / "a", model.config | {"num_hidden_layers": L - 1})
    assert not (tmp_path / "a").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(FileExistsError, match="no other weights, got model-00001-of"):
        save(model, tmp_path / "b")
    save(model, folder)  # over what was there
    assert load(folder)(TOKENS).equal(model(TOKENS))
    assert not list(folder.glob("*.part"))
