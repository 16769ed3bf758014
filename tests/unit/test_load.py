"""Loading for the built-in model: what is cast is looked at on the way, and the file's pages are given back."""

from __future__ import annotations

import mmap
import platform
import re
import sys
from pathlib import Path

import golden
import pytest
import torch
from repo import DATA

from fold.checkpoint import fresh_memory, load, reader
from fold.checkpoint.fresh_memory import provide
from fold.checkpoint.load import load_model
from fold.checkpoint.reader import cast_checked, open_checkpoint

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_PIECE", 7)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_casting_in_pieces_is_casting(source: torch.dtype, target: torch.dtype) -> None:
    x = torch.randn(5, 4).to(source)
    ready, finite = cast_checked(x, target)
    assert finite and ready.dtype == target and torch.equal(ready, x.to(target))
    assert (ready.data_ptr() == x.data_ptr()) == (source == target)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("place", [0, 10, 19])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e6])
def test_what_is_not_finite_afterwards_is_found_in_any_piece(place: int, value: float) -> None:
    x = torch.randn(20)
    x[place] = value
    assert not cast_checked(x, torch.float16)[1]
    assert cast_checked(x, torch.bfloat16)[1] == (value == 1e6)
    assert cast_checked(x, torch.float32)[1] == (value == 1e6)


@pytest.mark.parametrize("source", DTYPES)
def test_a_sum_out_of_range_is_no_value_out_of_range(source: torch.dtype) -> None:
    x = torch.full((100,), 6e4).to(source)
    ready, finite = cast_checked(x, torch.float16)
    assert finite and torch.equal(ready, x.half()) and not ready.sum().isfinite()


def page_faults() -> int:
    """Pages that the system has given this process as it touched them."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.skipif(
    sys.platform != "linux" or tuple(map(int, platform.release().split(".")[:2])) < (5, 14),
    reason="only Linux 5.14 and newer provides memory when asked",
)
def test_memory_is_provided_before_it_is_written() -> None:
    """As much as there is to write, page by page; what was written there before stays."""
    fresh = torch.empty(32 * 2**20, dtype=torch.uint8)  # larger than what the C library keeps
    pages = fresh.nbytes // mmap.PAGESIZE
    fresh[: fresh.nbytes // 2 + 1] = 7
    before = page_faults()
    provide(fresh)
    provided = page_faults()
    fresh[fresh.nbytes // 2 + 1 :] = 9
    assert page_faults() - provided < pages / 20 and provided - before <= pages
    assert fresh[0] == fresh[fresh.nbytes // 2] == 7 and fresh[-1] == 9


@pytest.mark.usefixtures("small_pieces")
def test_each_piece_is_provided_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[float]] = []
    monkeypatch.setattr(fresh_memory, "provide", lambda piece: seen.append(piece.tolist()))
    monkeypatch.setattr(torch, "empty", torch.zeros)
    cast_checked(torch.ones(20), torch.float16)
    assert seen == [[0.0] * 7, [0.0] * 7, [0.0] * 6]


def test_providing_memory_asks_for_no_more_than_there_is() -> None:
    for count in (0, 1, 4095, 4096, 4097):
        provide(torch.zeros(count, dtype=torch.uint8))


def mapped(file: Path) -> int:
    """Bytes of a file that are in this process's memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped")
def test_the_pages_of_a_file_are_given_back_while_it_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    file, seen = DATA / "hot.safetensors", [0]
    limit = 64 * 1024
    monkeypatch.setattr(load, "RELEASE_BYTES", limit)
    cast = load.cast_checked

    def watched(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
        found = cast(tensor, dtype)
        seen.append(mapped(file))
        return found

    monkeypatch.setattr(load, "cast_checked", watched)
    with open_checkpoint(file) as checkpoint:
        model = load_model(checkpoint, torch.float16)
        largest = max(checkpoint.info(name).nbytes for name in checkpoint.names())
        assert 0 < max(seen) < limit + 2 * largest + 2**17 < file.stat().st_size
        assert mapped(file) == 0
    for name, weight in golden.model("hot", torch.float16).state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


def test_weights_that_need_no_casting_stay_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "SMALL_BYTES", 1024)
    with open_checkpoint(DATA / "hot.safetensors") as checkpoint:
        model = load_model(checkpoint, torch.bfloat16)
        weight = checkpoint.tensor("layers.0.proj.o.weight")
        assert model.layers[0].proj.o.weight.data_ptr() % 4096 == weight.data_ptr() % 4096  # the place in the file
    assert torch.equal(model.layers[0].proj.o.weight, weight)
