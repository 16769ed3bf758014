"""The demo checkpoint: ours from a seed, and it overflows fp16 where the fold does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fold.arch import MossArch
from fold.checkpoint.reader import open_checkpoint
from fold.demo import demo_arch, demo_inputs, write_demo
from fold.errors import MossError
from fold.model.forward import MossDiT
from fold.model.observer import Observer
from fold.scaling.factors import DEFAULT
from fold.scaling.plan import StreamPlan


class Peak(Observer):
    """The largest |stream| of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0

    def stream(self, site: int, x: torch.Tensor) -> None:
        self.largest = max(self.largest, float(x.abs().max()))


def run(file: Path, arch: MossArch, plan: StreamPlan, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    model, peak = MossDiT(arch), Peak()
    with open_checkpoint(file) as checkpoint:
        model.load_state_dict(checkpoint.state_dict(torch.float32))
    given = demo_inputs(arch)
    with torch.no_grad():
        velocity = model.to(dtype)(
            given["latent"].to(dtype), torch.tensor([0.7]), given["context"].to(dtype), plan=plan, observer=peak
        )
    return velocity.float(), peak.largest


@pytest.mark.parametrize(("dim", "depth", "heads", "seed"), [(64, 4, 2, 0), (128, 8, 2, 1), (256, 6, 4, 0)])
def test_fp16_overflows_without_the_fix_and_only_then(
    tmp_path: Path, dim: int, depth: int, heads: int, seed: int
) -> None:
    arch, file = demo_arch(dim, depth, heads), tmp_path / "demo.safetensors"
    write_demo(file, arch, seed=seed)
    reference, peak = run(file, arch, StreamPlan(), torch.float32)
    assert 65504 < peak < 3 * 2**17
    plain, _ = run(file, arch, StreamPlan(), torch.float16)
    assert not plain.isfinite().all()
    fixed, _ = run(file, arch, StreamPlan("online", DEFAULT), torch.float16)
    assert float((fixed - reference).norm() / reference.norm()) < 0.01


def test_the_peak_can_be_chosen(tmp_path: Path) -> None:
    arch, file = demo_arch(64, 4, 2), tmp_path / "demo.safetensors"
    write_demo(file, arch, peak=2000.0)
    assert 600 < run(file, arch, StreamPlan(), torch.float32)[1] < 6000


def test_it_is_made_from_its_seed(tmp_path: Path) -> None:
    arch = demo_arch(64, 2, 2)
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_demo(tmp_path / f"{name}.safetensors", arch, seed=seed)
    first, same, other = (load_file(tmp_path / f"{name}.safetensors") for name in "abc")
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["layers.0.proj.o.weight"], other["layers.0.proj.o.weight"])
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    with open_checkpoint(tmp_path / "a.safetensors") as checkpoint:
        assert (checkpoint.arch, checkpoint.dtype) == (arch, "bf16")
        assert checkpoint.tensor("rope.bands").dtype == torch.float32


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dim": 100}, "dim must be a multiple"),
        ({"depth": 0}, "depth"),
        ({"heads": -1}, "heads"),
        ({"ffn_dim": -8}, "ffn_dim"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(MossError, match=message):
        demo_arch(**sizes)


@pytest.mark.parametrize("peak", [0.0, float("nan"), float("inf"), 1e12])
def test_a_peak_out_of_range_is_refused(tmp_path: Path, peak: float) -> None:
    with pytest.raises(MossError, match="peak must lie"):
        write_demo(tmp_path / "demo.safetensors", demo_arch(), peak=peak)
    assert not list(tmp_path.iterdir())
