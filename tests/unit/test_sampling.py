"""The sampler: ComfyUI's sigmas and update, seeded noise, guidance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fold.errors import MossError
from fold.measure.sampling import SampleSettings, euler, flow_sigmas, guided, initial_noise


def test_sigmas_are_the_shifted_even_places() -> None:
    sigmas = flow_sigmas(4, 5.0)
    wanted = [5 * u / (1 + 4 * u) for u in (1.0, 0.75, 0.5, 0.25)]
    assert sigmas.tolist() == pytest.approx([*wanted, 0.0], rel=1e-6)
    assert sigmas.dtype == torch.float32


@pytest.mark.parametrize("steps", [1, 3, 20, 50, 1000])
def test_sigmas_fall_from_one_to_zero(steps: int) -> None:
    sigmas = flow_sigmas(steps)
    assert len(sigmas) == steps + 1
    assert (sigmas[0], sigmas[-1]) == (1.0, 0.0)
    assert bool((sigmas.diff() < 0).all())


def test_noise_depends_on_the_seed_alone() -> None:
    first = initial_noise((1, 128, 4, 4), 7)
    torch.manual_seed(0)
    assert torch.equal(initial_noise((1, 128, 4, 4), 7), first)
    assert not torch.equal(initial_noise((1, 128, 4, 4), 8), first)


def test_a_straight_flow_arrives_whatever_the_steps() -> None:
    # v = noise - image everywhere: the exact path is straight
    noise, image = initial_noise((2, 4, 3, 3), 1), initial_noise((2, 4, 3, 3), 2)

    def velocity(x: Tensor, sigma: Tensor, branch: str) -> Tensor:
        assert branch == "cond"
        assert sigma.shape == (2,)
        return noise - image

    for steps in (1, 2, 9):
        latent = euler(velocity, noise, SampleSettings(steps, cfg=1.0))
        assert torch.allclose(latent, image, atol=1e-5)


def test_guidance_is_linear_and_skips_the_negative_at_one() -> None:
    x, sigma = torch.ones(1, 1, 1, 1), torch.tensor([0.5])
    asked = []

    def velocity(_x: Tensor, _sigma: Tensor, branch: str) -> Tensor:
        asked.append(branch)
        return torch.full((1, 1, 1, 1), 1.0 if branch == "cond" else 0.5)

    assert float(guided(x, sigma, velocity, 3.0)) == pytest.approx(1 - 0.5 * (0.5 + 3 * 0.5))
    assert asked == ["cond", "uncond"]
    assert float(guided(x, sigma, velocity, 1.0)) == 0.5
    assert asked == ["cond", "uncond", "cond"]


def test_progress_is_told_every_step() -> None:
    told: list[tuple[int, int, float]] = []
    euler(lambda x, s, b: x, torch.ones(1, 1, 1, 1), SampleSettings(3, 1.0), lambda *a: told.append(a))
    assert [(done, total) for done, total, _ in told] == [(1, 3), (2, 3), (3, 3)]
    assert told[0][2] == 1.0


@pytest.mark.parametrize("steps", [0, -1, 1001])
def test_bad_steps_are_refused(steps: int) -> None:
    with pytest.raises(MossError, match="number of steps"):
        SampleSettings(steps)


@pytest.mark.parametrize("shift", [0.0, -1.0, float("nan")])
def test_a_bad_shift_is_refused(shift: float) -> None:
    with pytest.raises(MossError, match="shift"):
        SampleSettings(shift=shift)
