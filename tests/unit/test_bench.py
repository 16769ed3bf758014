"""The bench's own arithmetic, tables and plot; what it measures is not tested here."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from bench import files, gpu, headless, machine, steps
from bench.__main__ import NOTES, write
from bench.plot import growth_plot
from bench.stats import Ratio, interleave, quartiles, ratio
from bench.table import Row, markdown, number
from bench.work import miniature
from fold.checkpoint.reader import open_checkpoint


def test_median_and_quartiles_of_the_ratios_of_the_pairs() -> None:
    found = ratio([2.0, 8.0, 9.0], [1.0, 2.0, 3.0])
    assert found == Ratio(3.0, 2.5, 3.5, 3)
    assert quartiles([3.0]) == (3.0, 3.0)
    with pytest.raises(ValueError):
        ratio([1.0], [1.0, 2.0])


def test_turns_go_back_and_forth_and_the_first_is_thrown_away() -> None:
    order: list[str] = []

    def thing(name: str, seconds: float) -> float:
        order.append(name)
        return seconds + len(order)

    found = interleave({"a": lambda: thing("a", 0.0), "b": lambda: thing("b", 0.5)}, 2)
    assert "".join(order) == "abbaab"
    assert found == {"a": [4.0, 5.0], "b": [3.5, 6.5]}


def test_table_says_what_is_missed() -> None:
    good = Row.of("online", "CPU", Ratio(1.004, 0.99, 1.01, 7), 1.005)
    bad = Row("inspect | export", "CPU", 61.25, 60.0, 70.0, 3, 50.0, "ms", "floor")
    lines = markdown([good, bad, replace(good, target=None)]).splitlines()
    assert lines[2] == "| online | CPU | 1.004 | 0.990 to 1.010 | 7 | ≤ 1.005 | met |  |"
    assert lines[3] == "| inspect \\| export | CPU | 61.2 ms | 60 ms to 70 ms | 3 | ≤ 50 ms | **missed** | floor |"
    assert lines[4].endswith("| 7 |  |  |  |")
    assert (good.met, bad.met, number(1234.5, "MB")) == (True, False, "1234 MB")


def test_every_target_of_a_mode_is_in_the_table() -> None:
    shape = steps.Shape(64, 2, (2, 2), 4)
    rows = steps.rows({name: Ratio(1.0, 1.0, 1.0, 1) for name in steps.VARIANTS}, shape)
    assert [row.target for row in rows] == [None, 1.005, 1.03, 1.04, 1.02, 1.10, 1.05]
    on_gpu = steps.rows({name: Ratio(1.0, 1.0, 1.0, 1) for name in steps.VARIANTS}, shape, gpu=True)
    assert [row.target for row in on_gpu] == [None, 1.005, 1.02, 1.03, 1.02, 1.06, 1.03]


@pytest.mark.skipif(sys.platform == "win32", reason="here a sparse file has to be asked for")
def test_made_up_files_are_checkpoints(tmp_path: Path) -> None:
    sparse, noise = tmp_path / "sparse.safetensors", tmp_path / "noise.safetensors"
    size = files.write_sparse(sparse, files.REAL)
    assert 9e9 < size < 11e9 and sparse.stat().st_blocks * 512 < 10 * 2**20
    with open_checkpoint(sparse) as checkpoint:
        assert checkpoint.arch == files.REAL
    arch = miniature(256, 2)
    files.write_checkpoint(noise, arch)
    with open_checkpoint(noise) as checkpoint:
        assert checkpoint.arch == arch
        checkpoint.state_dict(check=True)


def test_headless_modes_and_the_gpu_script_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    arch, cpu = replace(miniature(128, 1), text_dim=32), torch.device("cpu")
    found = gpu.measure(cpu, 1, 1, arch, (2, 2), 3)
    precisions = 3 if gpu.has_fp16_accumulation() else 2
    assert [one["fix"] for one in found["steps"]] == ["off", "on"] * precisions
    assert len(found["rows"]) == 1 + len(headless.MODES)
    assert json.dumps(found) and "fp16 accumulation" in found["markdown"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == gpu.NO_GPU + "\n"


def test_the_bench_writes_its_plot_and_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    points = [
        {"axis": axis, "at": at, "ratio": 1.0 + at / 1e5, "low": 0.99, "high": 1.02, "pairs": 3, "shape": ""}
        for axis in ("image tokens", "blocks")
        for at in (256, 4096)
    ]
    growth_plot(points, tmp_path / "growth.png")
    with Image.open(tmp_path / "growth.png") as image:
        assert image.width == 900
    rows = [Row.of("online", "CPU", Ratio(1.0, 1.0, 1.0, 1), 1.005)]
    found = {
        "command": "c",
        "date": "d",
        "machine": machine.describe() | {"gpu": None},
        "shapes": ["s"],
        "skipped": [],
        "growth": points,
    }
    write(tmp_path, found, rows)
    assert markdown(rows) in (tmp_path / "bench.md").read_text("utf-8")
    assert json.loads((tmp_path / "bench.json").read_text("utf-8"))["date"] == "d"
    with (tmp_path / "bench.md").open("a", encoding="utf-8") as document:
        document.write(f"\n{NOTES}\n\n- By hand.\n")
    write(tmp_path, found | {"date": "later"}, rows)
    again = (tmp_path / "bench.md").read_text("utf-8")
    assert "later" in again and again.endswith(f"{NOTES}\n\n- By hand.\n") and again.count(NOTES) == 1
    assert "no GPU" in capsys.readouterr().out
