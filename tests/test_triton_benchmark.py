"""The benchmark of the Triton kernel: what it counts, what it says without a GPU."""

import pytest
import side_by_side
import torch
import triton_kernel
from triton_kernel import Case


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so_and_nothing_fails(capsys, tmp_path):
    assert triton_kernel.main(["--tiny", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("\n") == 1 and not list(tmp_path.iterdir())


def test_work_is_counted_as_papers_count_it():
    full = triton_kernel.tera_flop(Case(16_384, 64, False, None, False))
    assert full == pytest.approx(4 * 16_384**2 * 2048 / 1e12)
    causal = triton_kernel.tera_flop(Case(16_384, 64, True, None, False))
    backward = triton_kernel.tera_flop(Case(16_384, 64, True, None, True))
    assert causal == full / 2 and backward == 2.5 * causal
    one = triton_kernel.tera_flop(Case(16_384, 64, True, 1, False))
    assert one == pytest.approx(4 * 16_384 * 2048 / 1e12)
    assert triton_kernel.tera_flop(Case(512, 64, False, None, False)) < full / 30


def made_up(backward: bool, window: int | None, ours: float) -> dict:
    """A row in which torch's kernels take a second, or flex_attention does."""
    peers = {"flex, compiled": [1.0] * 3} if window else {"flash": [1.0] * 3}
    case = Case(1024, 64, True, window, backward)._asdict()
    return case | {"apart": 1e-3, "seconds": {"ours": [ours] * 3} | peers, "absent": {}}


def test_page_and_summary_give_the_lowest_speeds():
    rows = [made_up(False, None, 0.5), made_up(False, None, 0.8)]
    rows += [made_up(True, None, 2.0), made_up(False, 1024, 0.25)]
    found = side_by_side.facts("cpu", 3, 0) | {"rows": rows, "triton": "3.7.1"}
    text = triton_kernel.page(found, "cuda")
    assert "At least 1.25 times the speed of `flash`; the aim is 1.0." in text
    assert "At least 0.50 times the speed of `flash`; the aim is 0.9." in text
    assert text.count("| 1024 | 64 | causal |") == 3 and "window 1024" in text
    wanted = "1.25 times flash forward, 0.50 backward; with a window 4.00 times"
    assert wanted in triton_kernel.summary(found)


def test_cases_cover_both_widths_both_passes_and_the_window():
    rows = triton_kernel.cases("full")
    assert len(rows) == 2 * 2 * 2 * 6 + 4 == len(set(rows))
    assert {row.t for row in rows} == {512, 1024, 2048, 4096, 8192, 16_384}
    assert [row.window for row in rows].count(1024) == 4
