"""Models: what is refused before anything is computed, and what other chapters use."""

import re

import pytest
import torch
from torch import nn

from transformer import model
from transformer.attention import MultiHeadAttention
from transformer.blocks import PreNormBlock
from transformer.feedforward import FeedForward
from transformer.model import Encoder, EncoderDecoder, LanguageModel, resize_vocabulary
from transformer.norms import LayerNorm

LOGITS, LABELS = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
COUNT = torch.tensor(3)


@pytest.mark.parametrize("count", [None, 0, 7, COUNT])
def test_labels_of_the_shape_of_the_scores_are_taken(count):
    for smoothing in (0, 0.5, 1):
        model.check_labels(LOGITS, LABELS, smoothing, count)
    model.check_labels(LOGITS[0, 0], LABELS[0, 0], 0, count)


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"logits": 3}, TypeError, "logits must be "),
        ({"labels": [1]}, TypeError, "labels must be "),
        (
            {"logits": LABELS},
            TypeError,
            "logits must be floating point, labels int64, got logits (2, 3) of "
            "torch.int64 on cpu, labels (2, 3) of torch.int64 on cpu",
        ),
        ({"labels": LABELS.int()}, TypeError, "logits must be floating point, labels"),
        ({"labels": LABELS[:1]}, ValueError, "logits must be labels' shape and V, got"),
        ({"labels": LABELS[:, 0]}, ValueError, "logits must be labels' shape and V"),
        (
            {"logits": LOGITS[0, 0, 0], "labels": LABELS[0, 0]},
            ValueError,
            "logits must",
        ),
        ({"smoothing": -0.1}, ValueError, "smoothing must be a finite number in 0 … 1"),
        ({"smoothing": 1.1}, ValueError, "smoothing must be a finite number in 0 … 1"),
        (
            {"count": -1},
            ValueError,
            "count must be a whole number from 0, got count=-1",
        ),
        ({"count": 1.5}, ValueError, "count must be a whole number from 0"),
        ({"count": COUNT[None]}, ValueError, "count must be a whole number from 0"),
    ],
)
def test_labels_without_a_loss_are_refused(changes, error, words):
    arguments = {"logits": LOGITS, "labels": LABELS, "smoothing": 0, "count": None}
    with pytest.raises(error, match=f"^{re.escape(words)}"):
        model.check_labels(**arguments | changes)


def translator():
    """A model without blocks to read, and a block that reads it."""
    parts = MultiHeadAttention(8, 2), FeedForward(8, 16)
    block = PreNormBlock(8, *parts, cross=MultiHeadAttention(8, 2))
    decoder = LanguageModel(7, 8, [block], norm=LayerNorm)
    return EncoderDecoder(Encoder(7, 8, []), decoder)


def test_masks_that_are_none_are_refused_by_name_though_no_block_sees_them():
    tokens = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(TypeError, match=r"^mask must be "):
        Encoder(7, 8, [])(tokens, mask=3)
    for name in ("source_mask", "target_mask"):
        with pytest.raises(TypeError, match=f"^{name} must be "):
            translator()(tokens, tokens, **{name: 3})


def test_offsets_of_a_head_stay_frozen_when_it_grows():
    for frozen in (True, False):
        writer = LanguageModel(7, 8, [], norm=LayerNorm, tie=False)
        writer.head = nn.Linear(8, 7)
        writer.head.bias.requires_grad_(not frozen)
        old = writer.head.bias.detach().clone()
        resize_vocabulary(writer, 9)
        assert writer.head.bias.requires_grad != frozen
        assert writer.head.bias.tolist() == [*old.tolist(), 0, 0]


def test_only_models_of_tokens_grow():
    words = "model must be an Encoder or a LanguageModel, got Linear"
    with pytest.raises(TypeError, match=f"^{words}$"):
        resize_vocabulary(nn.Linear(2, 2), 3)


def test_positions_and_preparations_that_are_none_are_refused_though_unused():
    writer, tokens = LanguageModel(7, 8, []), torch.zeros(1, 2, dtype=torch.long)
    for name in ("positions", "mask", "context", "context_mask", "prepare"):
        with pytest.raises(TypeError, match=f"^{name} must be "):
            writer(tokens, **{name: 3})


def test_token_that_is_none_is_refused_with_the_range():
    tokens = torch.tensor([[3, 9, 1]])
    with pytest.raises(ValueError, match=r"^tokens must be in 0 … 6, got 1 to 9$"):
        Encoder(7, 8, [])(tokens)


def test_block_that_is_none_is_named_by_its_place():
    with pytest.raises(TypeError, match=r"^blocks\[1\] must be "):
        model.list_blocks([nn.Identity(), 3])


def test_heads_are_turned_before_they_are_prepared():
    prepare = lambda *given: ("prepared", *given)  # noqa: E731
    both = model.chain("turned {}".format, prepare)
    assert both("q", "k", "v", "mask") == (
        *("prepared", "turned q", "turned k"),
        *("v", "mask"),
    )
    alone = model.chain("turned {}".format, None)
    assert alone("q", "k", "v", "mask") == ("turned q", "turned k", "v", "mask")
    assert model.chain(None, prepare) is prepare and model.chain(None, None) is None


@pytest.mark.parametrize("frozen", [True, False])
def test_encoder_has_no_head_to_grow_and_its_embedding_stays_frozen(frozen):
    encoder = Encoder(7, 8, [])
    encoder.embedding.weight.requires_grad_(not frozen)
    resize_vocabulary(encoder, 9)
    assert encoder.embedding.weight.shape == (9, 8)
    assert encoder.embedding.weight.requires_grad != frozen
