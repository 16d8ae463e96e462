"""Checkpoints: several processes, GPUs and odd states, without having them."""

import inspect
import platform
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from transformer import checkpoint
from transformer.checkpoint import load_checkpoint, save_checkpoint
from transformer.storage import newest_checkpoint

# --- one of several processes ------------------------------------------------------


@pytest.fixture
def group(monkeypatch):
    """A function that lets this process be one of a group, and what rank 0 says."""
    said = [""]

    def be(rank: int, says: str = "") -> list:
        def broadcast(words: list) -> None:
            said[0] = words[0]
            if rank > 0:
                words[0] = says

        fake = {"is_available": True, "is_initialized": True, "get_rank": rank}
        fake = {name: lambda value=value: value for name, value in fake.items()}
        fake["broadcast_object_list"] = broadcast
        monkeypatch.setattr(checkpoint, "distributed", SimpleNamespace(**fake))
        return said

    return be


def test_first_process_writes_and_the_others_wait(group, tmp_path):
    said, model = group(1), nn.Linear(2, 2)
    assert save_checkpoint(tmp_path, model, step=1) is None
    assert said == [""] and not [*tmp_path.iterdir()]
    group(0)
    assert save_checkpoint(tmp_path, model, step=1).is_file()
    assert said == [""]


def test_what_stops_the_first_process_stops_all_in_one_line(group):
    def fail():
        raise OSError("no space\n left")

    said = group(0)
    with pytest.raises(OSError, match=r"^no space\n left$"):
        checkpoint.on_first(fail)
    assert said == ["OSError: no space\n left"]
    group(1, says=said[0])
    rule = "^rank 0 could not write: OSError: no space left$"
    with pytest.raises(RuntimeError, match=rule):
        checkpoint.on_first(fail)


def test_random_numbers_go_on_where_they_were_saved(group, tmp_path):
    model = nn.Linear(2, 2)
    torch.manual_seed(5)
    save_checkpoint(tmp_path, model, step=0)
    saved = torch.rand(2)
    for rank in (0, 1):
        group(rank)
        torch.manual_seed(6)
        load_checkpoint(tmp_path, model)
        assert torch.rand(2).equal(saved) == (rank == 0)


@pytest.mark.parametrize("missing", ["is_available", "is_initialized"])
def test_rank_is_0_without_a_group(group, missing):
    group(3)
    assert checkpoint.rank() == 3
    setattr(checkpoint.distributed, missing, lambda: False)
    assert checkpoint.rank() == 0
    assert checkpoint.on_first(lambda: "done") == "done"


# --- GPUs ----------------------------------------------------------------------------


def test_states_of_all_gpus_are_saved_and_come_back_where_they_are(monkeypatch):
    states = [torch.tensor([1]), torch.tensor([2]), torch.tensor([3])]
    set_ones = []
    fake = {
        "is_available": lambda: True,
        "get_rng_state_all": lambda: states,
        "device_count": lambda: 2,
        "set_rng_state": lambda state, i: set_ones.append((i, state)),
    }
    for name, function in fake.items():
        monkeypatch.setattr(torch.cuda, name, function)
    found = checkpoint.random_states()
    assert found.pop("random/cpu").equal(torch.get_rng_state())
    assert found == {f"random/cuda:{i}": state for i, state in enumerate(states)}
    del found["random/cuda:1"]
    before = torch.get_rng_state()
    checkpoint.set_random_states(found)  # of the CPU there is nothing
    assert torch.get_rng_state().equal(before)
    ((i, state),) = set_ones
    assert i == 0 and state.equal(states[0]) and state is not states[0]


@pytest.mark.parametrize("how", [{}, {"capturable": True}, {"fused": True}])
def test_count_of_steps_is_on_the_device_only_where_it_must(how):
    parameters = [nn.Parameter(torch.ones(2, device="meta")) for _ in "ab"]
    groups = [{"params": parameters[:1]} | how, {"params": parameters[1:]}]
    optimizer = SimpleNamespace(param_groups=groups)
    tensors = {f"optimizer/step/{name}": torch.tensor(3.0) for name in "ab"}
    tensors["optimizer/exp_avg/a"] = torch.ones(2, dtype=torch.bfloat16)
    tensors["optimizer/norm/a"] = torch.ones(3)  # of another shape
    copied = []
    found = SimpleNamespace(
        tensors=tensors | {"model/a": torch.ones(2)},
        copy=lambda place, value: copied.append(place),
    )
    here = dict(zip("ab", parameters, strict=True))
    values = checkpoint.recalled(optimizer, here, found)
    assert copied == [*tensors]
    first, second = (values[p] for p in parameters)
    assert first["step"].device.type == ("meta" if how else "cpu")
    assert second["step"].device.type == "cpu" and [*second] == ["step"]
    assert first["exp_avg"].is_meta and first["exp_avg"].dtype == torch.bfloat16
    assert not first["exp_avg"].requires_grad
    assert first["norm"].is_meta and first["norm"].shape == (3,)


# --- what is said of differences ------------------------------------------------------


def test_three_differences_of_a_kind_are_named_and_the_others_counted():
    stored = {name: "1" for name in "abcdef"} | {f"{i}": "1" for i in range(3)}
    here = {name: "2" for name in "abcd"} | {"x" * 200: "1", "y": "1"}
    with pytest.raises(ValueError) as caught:
        checkpoint.check_facts("model", stored, here)
    assert str(caught.value) == (
        f"the checkpoint must be of the model here, got missing: {'x' * 150}, y; "
        "surplus: e, f, 0, 2 more; "
        "different: a (1, here 2), b (1, here 2), c (1, here 2), 1 more"
    )
    three = {"a": "1", "b": "1", "c": "1"}
    with pytest.raises(ValueError, match=r"got surplus: a, b, c$"):
        checkpoint.check_facts("model", three, {})
    checkpoint.check_facts("model", three, dict(three))


@pytest.mark.parametrize(
    "groups, ok",
    [
        ([], True),
        ([{"names": ["a"], "options": {}}], True),
        ([{"names": ["a", 3], "options": {}}], False),
        ([{"names": ["a"], "options": []}], False),
        ([{"names": "a", "options": {}}], False),
        ([{"names": ["a"], "options": {}}, {"names": ["a"]}], False),
        (3, False),
    ],
)
def test_groups_of_another_program_are_refused(tmp_path, groups, ok):
    save_checkpoint(tmp_path, nn.Linear(2, 2), step=1)
    found = newest_checkpoint(tmp_path)
    found.state["optimizer"] = {"kind": "SGD", "groups": groups}
    if ok:
        checkpoint.check_origin(found)
    else:
        rule = f"^{re.escape(found.path.name)} was not written by save_checkpoint$"
        with pytest.raises(ValueError, match=rule):
            checkpoint.check_origin(found)


def test_names_that_prefixes_would_make_equal_are_all_named():
    with pytest.raises(ValueError) as caught:
        checkpoint.clean_names(["b.w", "b._orig_mod.w", "a"])
    said = "names must differ without prefixes, got ['a', 'b._orig_mod.w', 'b.w']"
    assert str(caught.value) == said


def test_part_that_is_all_of_a_name_stays():
    assert checkpoint.clean_names(["module"]) == {"module": "module"}
    assert checkpoint.clean_names(["module.module"]) == {"module.module": "module"}


# --- what is kept -------------------------------------------------------------------


def test_all_that_is_given_comes_back_with_versions_and_the_name_of_the_file(tmp_path):
    given = {"data": {"at": 1}, "schedule": {"rate": 2}, "config": {"d": 3}}
    path = save_checkpoint(tmp_path, nn.Linear(2, 2), step=0, **given)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    found = load_checkpoint(tmp_path, nn.Linear(2, 2))
    assert found == {"step": 0, **given, "versions": versions, "file": path.name}


def test_two_checkpoints_stay_unless_more_are_wanted(tmp_path):
    for step in range(5):
        save_checkpoint(tmp_path, nn.Linear(2, 2), step=step)
    assert len([*tmp_path.glob("*.json")]) == 2
    for step in range(5, 10):
        save_checkpoint(tmp_path, nn.Linear(2, 2), step=step, keep=3)
    assert len([*tmp_path.glob("*.json")]) == 3
    assert inspect.signature(load_checkpoint).parameters["rng"].default is True


def test_folder_that_ends_as_a_file_is_a_folder(tmp_path):
    save_checkpoint(tmp_path / "run.json", nn.Linear(2, 2), step=4)
    assert load_checkpoint(tmp_path / "run.json", nn.Linear(2, 2))["step"] == 4


def test_rates_and_coefficients_are_kept_as_json_has_them():
    model = nn.Linear(2, 2)
    betas = (0.5, torch.tensor(0.25))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    group = optimizer.param_groups[0] | {"betas": betas[:1], "fused": True}
    options = checkpoint.group_options(group | {"param_names": ["a"]})
    assert options["lr"] == 0.5 and type(options["lr"]) is float
    assert options["betas"] == [0.5]
    skipped = {"params", "param_names", *checkpoint.HOW}
    assert options.keys() == group.keys() - skipped
    assert [*options] == sorted(options)


def test_optimizer_is_told_by_its_kind_and_groups(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, model, optimizer, step=0)
    found = newest_checkpoint(tmp_path)
    stored = found.state["optimizer"]
    assert stored["kind"] == "SGD" and len(stored["groups"]) == 1
    assert stored["groups"][0]["names"] == ["weight", "bias"]
    assert stored["groups"][0]["options"]["momentum"] == 0.5
    names = {"optimizer/momentum_buffer/weight", "optimizer/momentum_buffer/bias"}
    assert {name for name in found.tensors if name[:9] == "optimizer"} == names
    facts = {"kind": "SGD", "groups": "1", "weight": "in group 0", "bias": "in group 0"}
    assert checkpoint.optimizer_facts(stored) == facts


def test_names_may_have_slashes(tmp_path):
    model = nn.ModuleDict({"a/b/c": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    model["a/b/c"](torch.ones(2)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, model, optimizer, step=0)
    other = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    load_checkpoint(tmp_path, model, other)
    for parameter, values in optimizer.state.items():
        assert other.state[parameter]["momentum_buffer"].equal(
            values["momentum_buffer"]
        )


def test_flag_for_random_numbers_is_pythons_truth(tmp_path):
    model = nn.Linear(2, 2)
    torch.manual_seed(5)
    save_checkpoint(tmp_path, model, step=0)
    saved = torch.rand(2)
    for flag in (0, 1):
        torch.manual_seed(6)
        load_checkpoint(tmp_path, model, rng=flag)
        assert torch.rand(2).equal(saved) == flag
