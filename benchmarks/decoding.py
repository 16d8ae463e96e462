"""Greedy decoding of one text, against transformers and CTranslate2.

Usage: python benchmarks/decoding.py [--device cpu|cuda] [--rounds N] [--tiny]
                                     [--out FOLDER] [--table]

Writes decoding.<device>.json and, from it, decoding.<device>.md. `--tiny` runs sizes
that take seconds; `--table` only writes the table again. Large models and several texts
run a third of the rounds. Without CTranslate2 (requirements/bench.txt) its rows stay
empty.
"""

import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import side_by_side
import torch
from side_by_side import Ratio
from torch import Tensor, nn
from transformers import (
    CompileConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
)

from transformer.attention import MultiHeadAttention
from transformer.blocks import PreNormBlock
from transformer.feedforward import FeedForward
from transformer.model import LanguageModel
from transformer.norms import LayerNorm
from transformer.positions import LearnedPositions
from transformer.quantize import quantize
from transformer.sampling import generate, prompt_lookup, speculate
from transformer.sources import text
from transformer.zoo import load, save, tokenizer

SEED, PROMPT = 0, 32
EAGER, COMPILED, INT8 = "ours, eager", "ours, compiled", "ours, compiled, int8"
INT4 = "ours, compiled, int4"
THEIRS, STATIC = "transformers", "transformers, static"
STATIC_COMPILED = "transformers, static, compiled"
LOOK_UP, THEIR_LOOK_UP = "ours, prompt look-up", "transformers, prompt look-up"
N_DRAFT = 10  # tokens that a look-up proposes, the default of transformers
CT2, CT2_INT8 = "CTranslate2", "CTranslate2, int8"
BITS = {INT8: 8, INT4: 4, CT2_INT8: 8}  # these need not give the same tokens
READ, N_READ = "a sum", 64 << 20  # numbers, 256 MiB: beyond what a core caches
ROUNDS = 9
PAUSE = 0.3  # seconds in which the threads of the one before go to sleep
AIMS = {  # times the speed of transformers' default, two threads
    "12M": {COMPILED: 3.5, INT8: 5.0, EAGER: 1.9},
    "124M": {COMPILED: 1.8, INT8: 3.3, EAGER: 1.7},
}
MARGIN = 20  # smallest lead of a token, as a multiple of what two programs differ by


class Case(NamedTuple):
    """One table."""

    model: str
    threads: int
    batch: int
    compiled: bool


class Shape(NamedTuple):
    """Layers, features, heads and tokens of a model."""

    n_layers: int
    d_model: int
    n_heads: int
    vocab_size: int


REAL = "SmolLM2-135M"
SHAPES = {
    REAL: Shape(30, 576, 9, 49152),
    "12M": Shape(6, 384, 6, 5120),
    "124M": Shape(12, 768, 12, 50257),
    "tiny": Shape(2, 32, 2, 300),
}
CASES = {
    "full": [
        Case("12M", 2, 1, True),
        Case("124M", 2, 1, True),
        Case("12M", 1, 1, False),
        Case("124M", 1, 1, False),
        Case("12M", 2, 8, False),
        Case(REAL, 2, 1, True),
    ],
    "tiny": [Case("tiny", 1, 1, True), Case("tiny", 1, 2, False)],
}
NEW = {"full": 64, "tiny": 8}  # tokens to write


# --- the same weights twice ----------------------------------------------------------


def draw(shape: Shape) -> GPT2LMHeadModel:
    """A model of transformers whose next token is not always the one before.

    Rows have length about 1, so that the layers outweigh the embedding, and those of
    positions 8, so that more than a few tokens are written.
    """
    torch.manual_seed(SEED)
    sizes = {"n_layer": shape.n_layers, "n_embd": shape.d_model}
    sizes |= {"n_head": shape.n_heads, "vocab_size": shape.vocab_size}
    ends = {"bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **ends, n_positions=128)).eval()
    for name, x in model.named_parameters():
        if x.dim() == 2:  # theirs are (in, out), the tables (tokens, features)
            n = x.size(1) if "wte" in name or "wpe" in name else x.size(0)
            nn.init.normal_(x, std=(8 if "wpe" in name else 1) * n**-0.5)
    return model


def ours(theirs: GPT2LMHeadModel, shape: Shape) -> LanguageModel:
    """Our model with their weights."""
    c = shape.d_model
    blocks = [
        PreNormBlock(
            c,
            MultiHeadAttention(c, shape.n_heads, bias=True),
            FeedForward(c, activation="gelu_tanh"),
        )
        for _ in range(shape.n_layers)
    ]
    how = {"positions": LearnedPositions(128, c), "norm": LayerNorm}
    model = LanguageModel(shape.vocab_size, c, blocks, **how).eval()
    parts = [(model.norm, theirs.transformer.ln_f)]
    for mine, other in zip(model.blocks, theirs.transformer.h, strict=True):
        parts += [(mine.attn_norm, other.ln_1), (mine.ffn_norm, other.ln_2)]
        parts += [
            (mine.attn.qkv, other.attn.c_attn),
            (mine.attn.out, other.attn.c_proj),
        ]
        parts += [(mine.ffn.up, other.mlp.c_fc), (mine.ffn.down, other.mlp.c_proj)]
    with torch.no_grad():
        for mine, other in parts:
            mine.weight.copy_(
                other.weight.mT if other.weight.dim() == 2 else other.weight
            )
            mine.bias.copy_(other.bias)
        model.embedding.weight.copy_(theirs.transformer.wte.weight)
        model.positions.weight.copy_(theirs.transformer.wpe.weight)
    return model


def real_pair() -> tuple[PreTrainedModel, LanguageModel]:
    """A trained model in both programs."""
    model = load("smollm2").eval()
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder)
        return LlamaForCausalLM.from_pretrained(folder).eval(), model


def bytes_read(model: LanguageModel) -> int:
    """Bytes of weights that a token reads: all but the tables that it looks up."""
    tables = [] if model.positions is None else [model.positions.weight]
    tables += [model.embedding.weight] if model.head is not None else []
    parts = [*model.parameters(), *model.buffers()]
    head = model.head.weight if isinstance(model.head, nn.Linear) else None
    seen = [x for x in parts if x is head or not any(x is t for t in tables)]
    return sum(x.nbytes for x in seen)


# --- contenders ----------------------------------------------------------------------


class Setting(NamedTuple):
    """What all contenders of a case are given."""

    theirs: PreTrainedModel
    ours: LanguageModel
    prompt: Tensor
    n_new: int


def run_ours(model: LanguageModel, at: Setting, compile: bool = False) -> Tensor:
    """The tokens that we write, (B, N)."""
    return generate(model, at.prompt, at.n_new, compile=compile)[:, PROMPT:]


def run_look_up(model: LanguageModel, at: Setting) -> Tensor:
    """The same with drafts from the text so far, (1, N)."""
    found = speculate(model, at.prompt, at.n_new, prompt_lookup(), N_DRAFT)
    return found.tokens[:, PROMPT:]


def run_theirs(
    at: Setting, cache: str | None = None, compiled: bool = False, **how
) -> Tensor:
    """The tokens that transformers writes, (B, N)."""
    how |= {"max_new_tokens": at.n_new, "do_sample": False, "pad_token_id": 0}
    how |= {"eos_token_id": None}
    how |= {"cache_implementation": cache} if cache else {}
    how["disable_compile"] = not compiled
    if compiled:
        how["compile_config"] = CompileConfig(mode="default", fullgraph=False)
        how["compile_config"]._compile_all_devices = True  # also on a CPU
    with torch.inference_mode():
        real = torch.ones_like(at.prompt)
        return at.theirs.generate(at.prompt, attention_mask=real, **how)[:, PROMPT:]


def ctranslate2_generator(model: GPT2LMHeadModel, kind: str, n_threads: int):
    """CTranslate2's generator with the weights of a model of transformers."""
    import ctranslate2
    from ctranslate2.converters import transformers as converters

    loader = converters.GPT2Loader()
    spec = loader.get_model_spec(model)
    spec.register_vocabulary([str(i) for i in range(model.config.vocab_size)])
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
    spec.validate()
    spec.optimize()
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        how = {"device": "cpu", "intra_threads": n_threads, "inter_threads": 1}
        return ctranslate2.Generator(folder, compute_type=kind, **how)


def run_ctranslate2(generator, at: Setting) -> Tensor:
    """The tokens that CTranslate2 writes, (B, N)."""
    texts = [[str(i) for i in row] for row in at.prompt.tolist()]
    how = {"max_length": at.n_new, "min_length": at.n_new, "sampling_topk": 1}
    how |= {"include_prompt_in_result": False, "max_batch_size": 0}
    found = generator.generate_batch(texts, **how)
    return torch.tensor([result.sequences_ids[0] for result in found])


def contenders(at: Setting, case: Case) -> dict[str, Callable[[], Tensor]]:
    """What each does in one round."""
    fast = quantize(deepcopy(at.ours), 32)
    runs = {THEIRS: partial(run_theirs, at), EAGER: partial(run_ours, fast, at)}
    if case.compiled:
        runs[COMPILED] = partial(run_ours, fast, at, True)
        for name in (INT8, INT4) if case.model in ("12M", "tiny") else (INT8,):
            small = quantize(deepcopy(at.ours), BITS[name], group=32)
            runs[name] = partial(run_ours, small, at, True)
        runs[STATIC] = partial(run_theirs, at, "static")
        if case.model in ("12M", "tiny"):
            runs[STATIC_COMPILED] = partial(run_theirs, at, "static", True)
    if case.model == REAL:
        runs[LOOK_UP] = partial(run_look_up, fast, at)
        how = {"prompt_lookup_num_tokens": N_DRAFT}
        runs[THEIR_LOOK_UP] = partial(run_theirs, at, **how)
    elif importlib.util.find_spec("ctranslate2"):
        for name, kind in ((CT2, "float32"), (CT2_INT8, "int8")):
            generator = ctranslate2_generator(at.theirs, kind, case.threads)
            runs[name] = partial(run_ctranslate2, generator, at)
    return runs


# --- measuring -----------------------------------------------------------------------


@torch.no_grad()
def lead(at: Setting, tokens: Tensor) -> tuple[float, float]:
    """The smallest lead of a chosen token, and how far two programs are apart."""
    text = torch.cat([at.prompt, tokens], 1)
    mine, theirs = at.ours(text), at.theirs(text).logits
    best = mine[:, PROMPT - 1 : -1].topk(2).values
    return (best[..., 0] - best[..., 1]).min().item(), (
        mine - theirs
    ).abs().max().item()


def some_prompts(case: Case) -> Iterator[Tensor]:
    """Prompts (B, T): random tokens, or real text for a trained model."""
    real = case.model == REAL
    tokens = tokenizer("smollm2").encode(text("shakespeare")).ids if real else []
    for seed in range(50):
        where = torch.Generator().manual_seed(seed)
        shape, n_tokens = (case.batch, PROMPT), SHAPES[case.model].vocab_size
        start = PROMPT * 10 * seed
        yield (
            torch.tensor([tokens[start : start + PROMPT]])
            if real
            else torch.randint(1, n_tokens, shape, generator=where)
        )


def choose_prompt(theirs, model, case: Case, n_new: int) -> tuple:
    """The first prompt in which every token leads clearly, and what it leads by."""
    for prompt in some_prompts(case):
        at = Setting(theirs, model, prompt, n_new)
        tokens = run_ours(model, at)
        margin, apart = lead(at, tokens)
        if margin > MARGIN * apart and (tokens != 0).all():
            return at, tokens, margin, apart
    raise RuntimeError("no prompt whose tokens all lead clearly")


def same_tokens(runs: dict, wanted: Tensor) -> dict[str, float]:
    """Share of tokens up to the first that differs; all, where nothing is rounded."""
    shares = {}
    for name, run in runs.items():
        found = run()
        same = (found == wanted).int().cumprod(1).float().mean().item()
        if name not in BITS and same < 1:
            raise AssertionError(f"{name} computes something else: {same:.2f} the same")
        shares[name] = round(same, 3)
    return shares


def measure(case: Case, rounds: int, n_new: int) -> dict:
    """Seconds of all in one case, once they gave the same."""
    torch.set_num_threads(case.threads)
    torch.compiler.reset()
    if case.model == REAL:
        theirs, model = real_pair()
    else:
        theirs = draw(SHAPES[case.model])
        model = ours(theirs, SHAPES[case.model])
    at, tokens, margin, apart = choose_prompt(theirs, model, case, n_new)
    runs = contenders(at, case)
    shares = same_tokens(runs, tokens)  # compiles
    how, data = {"warm_up": 0, "pause": PAUSE}, torch.ones(N_READ)
    runs[READ] = data.sum
    seconds = side_by_side.interleave(runs, rounds, "wall time", **how)
    bandwidth = data.nbytes / statistics.median(seconds.pop(READ))
    rounded = {name: [round(s, 6) for s in list_] for name, list_ in seconds.items()}
    row = case._asdict() | {"n_new": n_new, "rounds": rounds, "seconds": rounded}
    row |= {"same": shares, "margin": margin, "apart": apart}
    row["bandwidth"] = bandwidth  # bytes a second, amid the others
    row["distinct"] = len(set(tokens.flatten().tolist()))
    made = {b: quantize(deepcopy(model), b, group=32) for b in (32, 8, 4)}
    row["bytes"] = {str(b): bytes_read(one) for b, one in made.items()}
    print(*case, {n: f"{speed(row, n):.2f}" for n in rounded}, flush=True)
    return row


def measure_all(device: str, rounds: int, size: str) -> dict:
    """Everything that the tables show."""
    if device != "cpu":
        raise SystemExit("this benchmark is of a CPU: --device cpu")
    torch._inductor.config.fx_graph_cache = False  # it forgets the count of threads
    before = torch.get_num_threads()
    found = side_by_side.facts(device, rounds, SEED)
    names = ("transformers", "ctranslate2")
    found["peers"] = {n: version(n) for n in names if importlib.util.find_spec(n)}
    found["rows"] = []
    for case in CASES[size]:
        slow = case.model in ("124M", REAL) or case.batch > 1
        n = max(1, rounds // 3) if slow else rounds
        found["rows"].append(measure(case, n, NEW[size]))
    torch.set_num_threads(before)
    return found


def version(name: str) -> str:
    """What is installed of a package."""
    return importlib.import_module(name).__version__


# --- the table -----------------------------------------------------------------------


def speed(row: dict, name: str, other: str = THEIRS) -> float:
    """How many times as fast as another a contender is, the median of the rounds."""
    return Ratio(row["seconds"][other], row["seconds"][name])[0]


def line(row: dict, name: str) -> list[str]:
    """One contender as cells."""
    seconds = row["seconds"][name]
    a_token = statistics.median(seconds) / row["n_new"]
    n_bytes = row["bytes"][str(BITS.get(name, 32))]
    against = "1" if name == THEIRS else str(Ratio(row["seconds"][THEIRS], seconds))
    share = f"{100 * n_bytes / a_token / row['bandwidth']:.0f} %"
    same = f"{100 * row['same'][name]:.0f} %"
    return [name, f"{1e3 * a_token:.2f}", against, share, same]


def section(row: dict) -> str:
    """One case: a heading, what it is, a table."""
    threads = "one thread" if row["threads"] == 1 else f"{row['threads']} threads"
    texts = "one text" if row["batch"] == 1 else f"{row['batch']} texts"
    shape = SHAPES[row["model"]]
    said = (
        f"{shape.n_layers} layers, {shape.d_model} features, {shape.vocab_size} "
        f"tokens; {row['rounds']} round{'s' * (row['rounds'] > 1)}. "
        "The smallest lead of a chosen token is "
        f"{row['margin'] / row['apart']:.0f} times the largest difference of two "
        f"programs; {row['distinct']} different tokens are written. Memory gives "
        f"{row['bandwidth'] / 1e9:.0f} GB/s."
    )
    order = [
        EAGER,
        COMPILED,
        INT8,
        INT4,
        LOOK_UP,
        THEIR_LOOK_UP,
        THEIRS,
        STATIC,
        STATIC_COMPILED,
        CT2,
        CT2_INT8,
    ]
    lines = [line(row, name) for name in order if name in row["seconds"]]
    head = ["contender", "ms a token", "times transformers' speed"]
    head += ["share of bandwidth", "same tokens"]
    model = row["model"] if row["model"] == REAL else f"{row['model']} parameters"
    title = f"### {model}, {texts}, {threads}"
    return "\n\n".join([title, said, side_by_side.table(head, lines)])


def reached(rows: list[dict]) -> list[tuple[str, float, float]]:
    """What has an aim: in words, our speed, the aim."""
    found = []
    for row in rows:
        if row["threads"] != 2 or row["batch"] != 1 or row["model"] not in AIMS:
            continue
        for name, aim in AIMS[row["model"]].items():
            found.append((f"{row['model']} {name}", speed(row, name), aim))
        if CT2 in row["seconds"]:
            for mine, peer in ((COMPILED, CT2), (INT8, CT2_INT8)):
                words = f"{row['model']} {mine} against {peer}"
                found.append((words, speed(row, mine, peer), 1.0))
    return found


def aims(rows: list[dict]) -> str:
    """The aims and what became of them, as a table."""
    cells = [
        [words, f"{value:.2f}", f"{aim}", "yes" if value >= aim else "no"]
        for words, value, aim in reached(rows)
    ]
    head = ["two threads, one text", "times the speed", "aim", "reached"]
    return side_by_side.table(head, cells) if cells else ""


def page(found: dict, device: str) -> str:
    """The section of the book that shows what was found."""
    peers = ", ".join(f"{name} {number}" for name, number in found["peers"].items())
    n_new = found["rows"][0]["n_new"]
    said = (
        f"`generate` with the layers of `quantize`, beside {peers}: a prompt of "
        f"{PROMPT} tokens is read and {n_new} are written, each the most likely, by "
        "wall time, the prompt included. All have the same weights, random ones in "
        "the manner of GPT-2, or those of SmolLM2 on a piece of Shakespeare. Where no "
        "weight is rounded, all wrote the same tokens before anything was timed. In "
        "each round the time of `transformers` with its default cache in float32 is "
        "divided by a contender's: median, and in brackets the quartiles; above 1 is "
        f"faster. {PAUSE} seconds pass between two, since "
        "threads of some go on waiting busily after their work. The share of the "
        "bandwidth counts weights only: what a token reads, divided by its time and by "
        "what a sum over 256 MiB reads in a second, timed in the same rounds. The last "
        "column counts tokens up to the first that differs. Random weights say little "
        "about what rounding does to a text: chapter 11 measures that."
    )
    parts = ["## Greedy decoding on the CPU", side_by_side.describe(found), said]
    parts += [aims(found["rows"])]
    parts += [section(row) for row in found["rows"]]
    return "\n\n".join(filter(None, parts)) + "\n"


def summary(found: dict) -> str:
    """What has an aim, or else the first case."""
    values = reached(found["rows"])
    if not values:
        row = found["rows"][0]
        return f"{speed(row, COMPILED):.2f} times transformers' speed, compiled"
    return ", ".join(f"{words} {value:.2f} (aim {aim})" for words, value, aim in values)


def main(arguments: list[str]) -> int:
    """Measure, write, say how fast we are."""
    parts = {"measure_all": measure_all, "page": page, "summary": summary}
    return side_by_side.command(__file__, arguments, rounds=ROUNDS, **parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
