"""A run goes on as if it had not stopped; what does not fit changes nothing."""

import copy
import json
import math
import re
import subprocess
import sys

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from transformer import storage
from transformer.attention import MultiHeadAttention
from transformer.blocks import PreNormBlock
from transformer.checkpoint import load_checkpoint, save_checkpoint
from transformer.data import batches
from transformer.feedforward import FeedForward
from transformer.model import LanguageModel
from transformer.norms import LayerNorm
from transformer.storage import newest_checkpoint, write_checkpoint


class Wrapper(nn.Module):
    """Names what it holds as DDP does."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class WithModule(nn.Module):
    """Has a child that is really called module, and another."""

    def __init__(self):
        super().__init__()
        self.module, self.head = nn.Linear(3, 4), nn.Linear(4, 2)


class OnlyModule(nn.Module):
    """Has a child that is really called module, and no other."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(3, 4)


def model_of(seed=0, tie=True):
    """A decoder with dropout."""
    torch.manual_seed(seed)

    def block():
        attn, ffn = MultiHeadAttention(8, 2), FeedForward(8, 16)
        return PreNormBlock(8, attn, ffn, dropout=0.1)

    return LanguageModel(
        32, 8, [block(), block()], norm=LayerNorm, tie=tie, dropout=0.1
    )


def plain(seed=0):
    """A small model."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def adam(model, **how):
    """Its optimizer."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01} | how)


def steps(model, optimizer, reader, n):
    """Train."""
    for _ in range(n):
        tokens, labels = next(reader)
        logits = model(tokens.to(next(model.parameters()).device))
        labels = labels.to(logits.device).flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def reading(resume=None):
    """Batches of token ids."""
    return batches(torch.arange(400) * 7 % 32, 8, 4, resume=resume)


def everything(model, optimizer=None):
    """All that must not change when a checkpoint is refused."""
    found = [*(t.clone() for t in model.state_dict().values()), torch.get_rng_state()]
    if optimizer is not None:
        for values in optimizer.state.values():
            found += [value.clone() for value in values.values()]
        rates = [group["lr"] for group in optimizer.param_groups]
        found.append(torch.tensor(rates, dtype=torch.float64))
    return found


def refused(folder, line, model, optimizer=None, error=ValueError):
    """It is refused with one line, and nothing changes."""
    before = everything(model, optimizer)
    with pytest.raises(error, match=line) as found:
        load_checkpoint(folder, model, optimizer)
    assert "\n" not in str(found.value)
    after = everything(model, optimizer)
    assert len(after) == len(before)
    assert all(a.equal(b) for a, b in zip(before, after, strict=True))


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "one by one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "capturable": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_resumed_run_ends_at_the_same_bits(tmp_path, make):
    model = model_of()
    optimizer, reader = make(model.parameters()), reading()
    steps(model, optimizer, reader, 3)
    state = reader.state()
    save_checkpoint(tmp_path, model, optimizer, step=3, data=state, schedule={"a": 1})
    steps(model, optimizer, reader, 3)

    resumed = model_of(seed=1)
    other = make(resumed.parameters())
    for group in other.param_groups:
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = 5.0
    found = load_checkpoint(tmp_path, resumed, other)
    assert found["step"] == 3 and found["schedule"] == {"a": 1}
    assert found["file"] == "checkpoint-000001.json"
    assert found["versions"]["torch"] == torch.__version__ and found["config"] is None
    steps(resumed, other, reading(found["data"]), 3)
    for (name, a), b in zip(
        model.named_parameters(), resumed.parameters(), strict=True
    ):
        assert a.equal(b), name


def test_loading_into_a_run_that_has_moved_on_brings_it_back(tmp_path):
    model = model_of()
    optimizer, reader = adam(model), reading()
    steps(model, optimizer, reader, 2)
    save_checkpoint(tmp_path, model, optimizer, step=2)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps(model, optimizer, reader, 2)
    load_checkpoint(tmp_path, model, optimizer)
    for name, tensor in model.state_dict().items():
        assert tensor.equal(kept[0][name])
    states = zip(
        optimizer.state_dict()["state"].values(),
        kept[1]["state"].values(),
        strict=True,
    )
    for now, then in states:
        assert now.keys() == then.keys()
        assert all(now[key].equal(then[key]) for key in now)


def test_before_the_first_step_nothing_is_remembered(tmp_path):
    model = plain()
    save_checkpoint(tmp_path, model, adam(model), step=0)
    optimizer = adam(model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    load_checkpoint(tmp_path, model, optimizer)
    assert not optimizer.state


def test_random_numbers_go_on_unless_not_wanted(tmp_path):
    model = plain()
    save_checkpoint(tmp_path, model, step=0)
    drawn = torch.rand(3)
    torch.manual_seed(99)
    load_checkpoint(tmp_path, model, rng=False)
    assert not torch.rand(3).equal(drawn)
    load_checkpoint(tmp_path, model)
    assert torch.rand(3).equal(drawn)


WAYS = {
    "plain": lambda m: m,
    "compiled": torch.compile,
    "wrapped": Wrapper,
    "compiled in a wrapper": lambda m: Wrapper(torch.compile(m)),
    "a compiled wrapper": lambda m: torch.compile(Wrapper(m)),
    "twice wrapped": lambda m: Wrapper(Wrapper(m)),
}


@pytest.mark.parametrize("make", [plain, WithModule, OnlyModule])
@pytest.mark.parametrize("wrap", WAYS.values(), ids=WAYS)
def test_wrappers_leave_no_trace(tmp_path, wrap, make):
    source, x = make(), torch.ones(1, 3)
    wrapped = wrap(source)
    optimizer = adam(wrapped)
    sum(p.sum() for p in source.parameters()).backward()
    optimizer.step()
    save_checkpoint(tmp_path, wrapped, optimizer, step=1)
    names = [n for n in newest_checkpoint(tmp_path).tensors if n[:6] == "model/"]
    assert not any("_orig_mod" in name for name in names)
    for back in WAYS.values():
        target = make()
        for parameter in target.parameters():
            nn.init.zeros_(parameter)
        load_checkpoint(tmp_path, back(target), adam(target))
        pairs = zip(source.parameters(), target.parameters(), strict=True)
        assert all(a.equal(b) and a.any() for a, b in pairs)
    if make is WithModule:
        assert "model/module.weight" in names and "model/head.weight" in names
        assert target.head(target.module(x)).equal(source.head(source.module(x)))


def test_blocks_that_are_compiled_alone_leave_no_trace(tmp_path):
    source, target = model_of(), model_of(seed=1)
    for i, block in enumerate(source.blocks):
        source.blocks[i] = torch.compile(block)
    save_checkpoint(tmp_path, source, step=0)
    load_checkpoint(tmp_path, target)
    tokens = torch.arange(8)[None]
    eager = model_of()
    assert target.eval()(tokens).equal(eager.eval()(tokens))
    source, target = model_of(), model_of(seed=1)
    save_checkpoint(tmp_path, source, step=0)
    for i, block in enumerate(target.blocks):
        target.blocks[i] = torch.compile(block)
    load_checkpoint(tmp_path, target)
    pairs = zip(source.parameters(), target.parameters(), strict=True)
    assert all(a.equal(b) for a, b in pairs)


def test_names_that_prefixes_would_make_equal_are_refused(tmp_path):
    model = nn.Module()
    model.a = nn.Module()
    model.a.w, model.a._orig_mod = nn.Parameter(torch.ones(1)), nn.Module()
    model.a._orig_mod.w = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="names must differ without prefixes"):
        save_checkpoint(tmp_path, model, step=0)


def twins(tie=True):
    """An embedding and an output matrix, one tensor or two."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    if tie:
        model[1].weight = model[0].weight
    return model


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    source, target = twins(), twins()
    optimizer = adam(source)
    source[1](source[0](torch.arange(5))).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, source, optimizer, step=1)
    names = newest_checkpoint(tmp_path).tensors
    assert [n for n in names if n.startswith("model/")] == ["model/0.weight"]
    load_checkpoint(tmp_path, target, adam(target))
    assert target[1].weight is target[0].weight
    assert target[0].weight.equal(source[0].weight)


def test_tied_and_untied_do_not_fit(tmp_path):
    save_checkpoint(tmp_path / "tied", twins(), step=0)
    save_checkpoint(tmp_path / "untied", twins(tie=False), step=0)
    line = r"different: 1.weight \(tied to 0.weight, here \(5, 3\) of torch.float32\)$"
    refused(tmp_path / "tied", line, twins(tie=False))
    refused(tmp_path / "untied", r"here tied to 0.weight\)$", twins())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_keep_their_bits(tmp_path, dtype):
    source, target = plain().to(dtype), plain(1).to(dtype)
    optimizer, other = adam(source), adam(target)
    for _ in range(2):
        source(torch.ones(1, 3, dtype=dtype)).sum().backward()
        optimizer.step()
    save_checkpoint(tmp_path, source, optimizer, step=2)
    load_checkpoint(tmp_path, target, other)
    for a, b in zip(source.parameters(), target.parameters(), strict=True):
        assert a.dtype == b.dtype == dtype and a.equal(b)
        for key, value in optimizer.state[a].items():
            assert value.dtype == other.state[b][key].dtype
            assert value.equal(other.state[b][key])


def test_dtypes_are_not_converted(tmp_path):
    save_checkpoint(tmp_path, plain(), step=0)
    line = r"0.weight \(\(4, 3\) of torch.float32, here \(4, 3\) of torch.bfloat16\)"
    refused(tmp_path, line, plain(1).bfloat16())


def test_a_model_on_meta_is_refused(tmp_path):
    save_checkpoint(tmp_path, plain(), step=0)
    meta = plain().to("meta")
    line = "a model must hold tensors with memory, got 0.weight on meta"
    with pytest.raises(ValueError, match=line):
        load_checkpoint(tmp_path, meta)
    with pytest.raises(ValueError, match=line):
        save_checkpoint(tmp_path, meta, step=0)
    load_checkpoint(tmp_path, meta.to_empty(device="cpu"))


def test_each_difference_is_named(tmp_path):
    source = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2)})
    target = nn.ModuleDict({"a": nn.Linear(2, 4), "c": nn.Linear(2, 2)})
    save_checkpoint(tmp_path, source, step=0)
    line = (
        r"^the checkpoint must be of the model here, got missing: c.weight, c.bias;"
        r" surplus: b.weight, b.bias; different: a.weight \(\(3, 2\) of torch.float32,"
        r" here \(4, 2\) of torch.float32\), a.bias \(\(3,\) .*, here \(4,\) .*\)$"
    )
    refused(tmp_path, line, target)


def test_many_differences_are_counted(tmp_path):
    save_checkpoint(tmp_path, model_of(), step=0)
    refused(tmp_path, r"surplus: .*, .*, .*, \d+ more$", plain())


def test_the_optimizer_must_be_the_same(tmp_path):
    model = plain()
    save_checkpoint(tmp_path / "none", model, step=0)
    save_checkpoint(tmp_path / "adam", model, adam(model), step=0)
    here = adam(model)
    model(torch.ones(1, 3)).sum().backward()
    here.step()
    line = r"^the checkpoint must be of the optimizer here, got "
    found = line + r"missing: .*kind \(none, here AdamW\)"
    refused(tmp_path / "none", found, model, here)
    other = torch.optim.Adam(model.parameters())
    refused(tmp_path / "adam", r"different: kind \(AdamW, here Adam\)$", model, other)
    two = [{"params": [*layer.parameters()]} for layer in model]
    other = torch.optim.AdamW(two)
    line = r"groups \(1, here 2\), 1.weight \(in group 0, here in group 1\), 1.bias"
    refused(tmp_path / "adam", line, model, other)
    other = torch.optim.AdamW(model[0].parameters())
    refused(tmp_path / "adam", "surplus: 1.weight, 1.bias$", model, other)
    load_checkpoint(tmp_path / "adam", model)  # to use the model, none is needed


def test_the_optimizer_of_another_model_is_refused(tmp_path):
    line = "optimizer must hold parameters of the model, got others"
    with pytest.raises(ValueError, match=line):
        save_checkpoint(tmp_path, plain(), adam(plain()), step=0)
    assert not [*tmp_path.iterdir()]


def test_an_optimizer_that_remembers_more_than_tensors_is_refused(tmp_path):
    model = plain()
    optimizer = adam(model)
    optimizer.state[model[0].weight]["note"] = "words"
    line = "optimizer must remember tensors, got another at optimizer/note/0.weight"
    with pytest.raises(TypeError, match=line):
        save_checkpoint(tmp_path, model, optimizer, step=0)


def test_a_state_that_is_no_tensor_is_refused(tmp_path):
    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(ValueError, match=r"got 0\._extra_state dict"):
        save_checkpoint(tmp_path, nn.Sequential(Odd(2, 2)), step=0)


def test_options_come_back_and_the_way_of_computing_stays(tmp_path):
    model = plain()
    groups = [
        {"params": [model[0].weight], "weight_decay": 0.3},
        {"params": [model[0].bias, *model[1].parameters()], "betas": (0.5, 0.6)},
    ]
    save_checkpoint(
        tmp_path, model, torch.optim.AdamW(groups, lr=0.25, foreach=True), step=0
    )
    groups = [{"params": group["params"]} for group in groups]
    other = torch.optim.AdamW(groups, lr=torch.tensor(1.0), foreach=False)
    rate = other.param_groups[0]["lr"]
    load_checkpoint(tmp_path, model, other)
    first, second = other.param_groups
    assert first["lr"] is rate and rate.item() == 0.25
    assert first["weight_decay"] == 0.3 and second["betas"] == (0.5, 0.6)
    assert not first["foreach"]


def test_buffers_and_frozen_parameters_come_back(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model[0].weight.requires_grad_(False)
        return model

    source, target = make(0), make(1)
    optimizer, other = adam(source), adam(target)
    source(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, source, optimizer, step=1)
    load_checkpoint(tmp_path, target, other)
    for name, tensor in source.state_dict().items():
        assert target.state_dict()[name].equal(tensor), name
    assert target[1].num_batches_tracked == 1
    assert not target[0].weight.requires_grad and target[0].weight not in other.state


def test_memory_order_of_parameters_stays(tmp_path):
    source = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    target = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    optimizer, other = adam(source), adam(target)
    source(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, source, optimizer, step=0)
    load_checkpoint(tmp_path, target, other)
    assert target.weight.equal(source.weight)
    assert target.weight.stride() == source.weight.stride()
    moment = other.state[target.weight]["exp_avg"]
    assert moment.stride() == target.weight.stride()
    assert moment.equal(optimizer.state[source.weight]["exp_avg"])


def test_an_older_one_can_be_asked_for(tmp_path):
    model = plain()
    paths = [save_checkpoint(tmp_path, model, step=step) for step in (1, 2)]
    assert load_checkpoint(tmp_path, model)["step"] == 2
    assert load_checkpoint(paths[0], model)["step"] == 1
    assert load_checkpoint(paths[0].with_suffix(".safetensors"), model)["step"] == 1
    paths[1].write_bytes(b"")
    refused(paths[1], "000002.json is not the JSON of a checkpoint", model)
    with pytest.warns(RuntimeWarning, match=r"000002.json is not .*000001.json is"):
        assert load_checkpoint(tmp_path, model)["step"] == 1


def test_what_is_no_checkpoint_changes_nothing(tmp_path):
    model = plain()
    missing = pytest.raises(FileNotFoundError, match=r"no checkpoint in .*nowhere")
    with missing:
        load_checkpoint(tmp_path / "nowhere", model)
    path = save_checkpoint(tmp_path, model, step=1).with_suffix(".safetensors")
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:-1] + b"x", b"PK" + whole[2:], b""):
        path.write_bytes(content)
        refused(tmp_path, "no whole checkpoint in .*000001.safetensors", plain(1))


def test_a_file_that_is_not_there_is_named(tmp_path):
    path = save_checkpoint(tmp_path, plain(), step=1)
    for gone in (path.with_name("checkpoint-000002.json"), tmp_path / "x" / "a.json"):
        refused(gone, f"No such file .*{gone.name}", plain(1), error=FileNotFoundError)
    path.rename(tmp_path / "file")
    refused(tmp_path / "file", "a checkpoint must be a .json file", plain(1))


@pytest.mark.parametrize("step", [-1, True, 1.5, "3", None, torch.tensor(3)])
def test_a_step_is_a_count(tmp_path, step):
    line = re.escape(f"step must be 0 or a positive int, got {step!r}")
    with pytest.raises(ValueError, match=line):
        save_checkpoint(tmp_path, plain(), step=step)
    assert not [*tmp_path.iterdir()]


def test_what_another_program_wrote_is_refused(tmp_path):
    model = plain(1)
    tensors = {f"model/{name}": t for name, t in plain().state_dict().items()}
    strange = {"tied": []}, {"tied": None}, {"optimizer": "adam"}, {"optimizer": {}}
    for state in ({}, *({"tied": {}, "optimizer": None} | odd for odd in strange)):
        write_checkpoint(tmp_path, tensors, state)
        line = "json was not written by save_checkpoint$"
        refused(tmp_path, line, model, adam(model))
    state = {"tied": {}, "optimizer": None, "step": 0}
    write_checkpoint(tmp_path, {"model/0.weight": torch.ones(4, 3)}, state)
    refused(tmp_path, r"got missing: 0.bias, 1.weight, 1.bias$", model)


def reseal(path, change) -> None:
    """Change a checkpoint's JSON and give it the digest that fits."""
    state = json.loads(path.read_text("utf-8"))
    del state["digest"]
    change(state)
    state["digest"] = storage.digest(state)
    path.write_text(json.dumps(state), "utf-8")


ODD_OPTIONS = [
    *(("lr", "fast"), ("lr", None), ("lr", True), ("lr", math.nan), ("lr", [0.1])),
    *(("betas", 0.9), ("betas", [0.9]), ("betas", [0.9, "x"]), ("betas", None)),
    *(("eps", {"a": 1}), ("maximize", "yes"), ("maximize", 1), ("amsgrad", 0.0)),
]


@pytest.mark.parametrize("key, value", ODD_OPTIONS, ids=repr)
def test_an_option_of_another_kind_is_refused_though_its_digest_fits(
    key, value, tmp_path
):
    model = plain(1)
    path = save_checkpoint(tmp_path, model, adam(model), step=1)

    def change(state):
        state["optimizer"]["groups"][0]["options"][key] = value

    reseal(path, change)
    here = adam(other := plain(2))
    before = repr(here.param_groups)
    refused(path, f"{key} of the optimizer must be like .*, got ", other, here)
    assert repr(here.param_groups) == before


@pytest.mark.parametrize(
    "name, value",
    [
        *(("step", "3"), ("step", -1), ("step", True), ("step", None)),
        *(("data", [1]), ("schedule", "x"), ("config", 3)),
    ],
)
def test_what_is_told_of_another_kind_is_refused_though_its_digest_fits(
    name, value, tmp_path
):
    path = save_checkpoint(tmp_path, plain(1), step=1)
    reseal(path, lambda state: state.update({name: value}))
    refused(
        path, f"{path.name} {name} must .*, got {re.escape(repr(value))}$", plain(2)
    )


def test_data_that_json_would_change_is_refused(tmp_path):
    with pytest.raises(TypeError, match="config must be what JSON gives back"):
        save_checkpoint(tmp_path, plain(), step=0, config={"betas": (0.9, 0.98)})


def shard(rank, folder, n_steps):
    """Go on in two processes that hold half of each tensor."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = plain(seed=5 + rank)
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    optimizer = adam(model)
    assert load_checkpoint(folder, model, optimizer)["step"] == 2
    for _ in range(n_steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    path = save_checkpoint(folder, model, optimizer, step=2 + n_steps)
    assert (path is None) == (rank > 0)
    distributed.destroy_process_group()


def test_two_processes_go_on_from_one_and_one_from_two(tmp_path):
    def go_on(model, optimizer, n):
        for _ in range(n):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()

    model = plain()
    optimizer = adam(model)
    go_on(model, optimizer, 2)
    save_checkpoint(tmp_path, model, optimizer, step=2)
    torch.multiprocessing.spawn(shard, (str(tmp_path), 3), nprocs=2)
    last = plain(seed=9)
    other = adam(last)
    assert load_checkpoint(tmp_path, last, other)["step"] == 5
    go_on(last, other, 2)
    go_on(model, optimizer, 5)
    pairs = zip(model.parameters(), last.parameters(), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


MEMORY = """
import sys, torch
from torch import nn
from transformer.checkpoint import load_checkpoint, save_checkpoint

def status(name):
    lines = open("/proc/self/status", encoding="utf-8").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

def make():
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(24)))

torch.set_num_threads(1)
model = make()
optimizer = torch.optim.AdamW(model.parameters())
if sys.argv[2] == "save":
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
else:
    load_checkpoint(sys.argv[1] + "/small", nn.Linear(1, 1))  # what is imported late
open("/proc/self/clear_refs", "w", encoding="utf-8").write("5")
before = status("VmRSS")
if sys.argv[2] == "save":
    save_checkpoint(sys.argv[1], model, optimizer, step=0)
    save_checkpoint(sys.argv[1] + "/small", nn.Linear(1, 1), step=0)
else:
    load_checkpoint(sys.argv[1], model, optimizer)
print((status("VmHWM") - before) / (8 * sum(p.numel() for p in model.parameters())))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_saving_and_loading(tmp_path):
    def growth(what):
        how = [sys.executable, "-c", MEMORY, str(tmp_path), what]
        return float(subprocess.check_output(how, encoding="utf-8", timeout=120))

    # In units of what AdamW remembers, 48 MB, which loading has to make.
    assert growth("save") < 0.2
    loaded = growth("load")
    assert 0.9 < loaded < 1.2, loaded


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_from_gpu_to_cpu_and_back(tmp_path):
    model = model_of().cuda()
    optimizer, reader = adam(model), reading()
    steps(model, optimizer, reader, 2)
    save_checkpoint(tmp_path, model, optimizer, step=2, data=reader.state())
    drawn = torch.rand(3, device="cuda")
    on_cpu = model_of(seed=1)
    load_checkpoint(tmp_path, on_cpu, adam(on_cpu))
    for a, b in zip(model.parameters(), on_cpu.parameters(), strict=True):
        assert a.cpu().equal(b)
    again = model_of(seed=2).cuda()
    other = adam(again)
    load_checkpoint(tmp_path, again, other)
    assert torch.rand(3, device="cuda").equal(drawn)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert a.equal(b)
        for key, value in optimizer.state[a].items():
            assert value.equal(other.state[b][key])
            assert value.device == other.state[b][key].device
