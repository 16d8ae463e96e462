"""Each kernel compiled for GPUs that are not here: what it takes of them.

The figures are compared with transformer/kernels.json, which chapter 6 shows.
`python tests/kernels/test_ahead.py` writes that file again.
"""

import functools
import json
import os
import re
from pathlib import Path

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("an interpreted kernel is not compiled", allow_module_level=True)
triton = pytest.importorskip("triton")

from transformer import flash_triton  # noqa: E402
from transformer.flash_triton import compile_ahead, resources_of  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE = ROOT / "transformer" / "kernels.json"
KERNELS = ["forward_kernel", "query_gradient_kernel", "key_gradient_kernel"]
TARGETS = {"8.0": (8, 0), "9.0": (9, 0)}
SHARED = {"8.0": 166_912, "9.0": 232_448, "7.5": 65_536, "8.9": 101_376}  # bytes
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
WIDTHS = [16, 32, 64, 128, 256]
PLAIN = [(n, t, d, w) for n in KERNELS for t in TARGETS for d in DTYPES for w in WIDTHS]
VARIANTS = [  # what a call may ask for beside causal attention, and a width
    ({"causal": False}, 128),
    ({"window": True}, 128),
    ({"window": True, "mask": True}, 128),
    ({"window": True, "mask": True}, 64),
]
SMALLER = [("7.5", torch.float16, 64), ("7.5", torch.float16, 256)]
SMALLER += [("8.9", torch.bfloat16, 128)]
# An instruction that adds to memory, perhaps under a condition.
ATOMIC = re.compile(r"^\s+(@!?%p\d+ )?(atom|red)\.", re.M)


@functools.cache
def compiled(name, capability, dtype, d, e=None, **how):
    """A kernel, compiled."""
    return compile_ahead(getattr(flash_triton, name), capability, dtype, d, e, **how)


def row(name, target, dtype, d) -> dict:
    """One line of the table."""
    capability = TARGETS[target]
    tile = flash_triton.choose_tile(name, capability, dtype.itemsize, d)
    found = resources_of(compiled(name, capability, dtype, d))
    key = {"kernel": name, "target": target, "dtype": str(dtype)[6:], "d": d}
    return key | {"tile": list(tile)} | found


def stored() -> dict:
    """The table as it is committed."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name, target, dtype, d", PLAIN)
def test_kernel_fits_spills_nothing_and_is_in_the_table(name, target, dtype, d):
    found = row(name, target, dtype, d)
    assert found["spilled"] == 0 and 0 < found["registers"] <= 255
    assert found["shared"] <= SHARED[target]
    keys = ("kernel", "target", "dtype", "d")
    known = [r for r in stored()["rows"] if all(r[key] == found[key] for key in keys)]
    assert len(known) == 1 and known[0]["tile"] == found["tile"]
    if triton.__version__ == stored()["triton"]:
        assert known == [found]


def test_table_has_no_other_rows():
    assert len(stored()["rows"]) == len(PLAIN)


@pytest.mark.parametrize("how, d", VARIANTS, ids=str)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_no_variant_spills(name, target, how, d):
    kernel = compiled(name, TARGETS[target], torch.bfloat16, d, **how)
    found = resources_of(kernel)
    assert found["spilled"] == 0 and found["shared"] <= SHARED[target]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_width_between_powers_of_two_spills_nothing(name, target):
    found = resources_of(compiled(name, TARGETS[target], torch.bfloat16, 80, 112))
    assert found["spilled"] == 0 and found["shared"] <= SHARED[target]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("name", KERNELS)
def test_products_on_9_0_are_wgmma(name, d, dtype):
    kernel = compiled(name, TARGETS["9.0"], dtype, d)
    # Gradients of 256 features of 64 keys do not fit into registers.
    without = name == "key_gradient_kernel" and d > 128
    assert ("wgmma" in kernel.asm["ptx"]) != without
    older = compiled(name, TARGETS["8.0"], dtype, d)
    assert "wgmma" not in older.asm["ptx"] and "mma.sync" in older.asm["ptx"]


@pytest.mark.parametrize("name", KERNELS)
def test_case_26_no_sum_is_atomic_and_float32_is_not_tf32(name):
    single = compiled(name, TARGETS["8.0"], torch.float32, 64)
    half = compiled(name, TARGETS["9.0"], torch.bfloat16, 64)
    for kernel in (single, half):
        assert not ATOMIC.search(kernel.asm["ptx"])
    assert ATOMIC.search("\t@%p1 red.global.add.f32 [%rd1], %f1;")
    assert "tf32" not in single.asm["ptx"] and "fma.rn.f32" in single.asm["ptx"]


@pytest.mark.parametrize("target, dtype, d", SMALLER, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_smaller_gpus_get_tiles_that_fit(name, target, dtype, d):
    capability = tuple(map(int, target.split(".")))
    found = resources_of(compiled(name, capability, dtype, d))
    assert found["shared"] <= SHARED[target]


def test_case_25_addresses_are_64_bits_wide():
    text = compiled("forward_kernel", TARGETS["8.0"], torch.float16, 64).asm["ttir"]
    strides = [line for line in text.splitlines() if "arith.muli" in line]
    assert any("tensor<64x1xi64>" in line for line in strides)
    wide = [
        line for line in text.splitlines() if "tt.addptr" in line and "x64x" in line
    ]
    assert wide and all("xi64>" in line for line in wide)


def main() -> None:
    """Write the table again."""
    rows = [row(*case) for case in PLAIN]
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    head = f'{{\n "triton": "{triton.__version__}",\n "rows": [\n  '
    TABLE.write_text(f"{head}{lines}\n ]\n}}\n", encoding="utf-8", newline="\n")
    bad = [r for r in rows if r["spilled"] or r["shared"] > SHARED[r["target"]]]
    print(len(rows), "rows;", "these do not fit:" if bad else "all fit", *bad, sep="\n")


if __name__ == "__main__":
    main()
