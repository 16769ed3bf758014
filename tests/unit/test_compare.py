"""Comparing runs: the metrics, the SDE step, saved runs, the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
from golden import Case, NoFloat64, relative, velocity
from hypothesis import given, settings
from hypothesis import strategies as st
from repo import DATA
from safetensors.torch import load_file, save_file
from torch import Tensor

from fold.cli import main
from fold.errors import MossCancelledError, MossError
from fold.measure.compare import Comparison, compare_runs, difference, log_prob_change, sde_std
from fold.measure.recording import KEY, RecordedRun, Step, is_run, load_run, record_run, save_run
from fold.measure.sampling import flow_sigmas, initial_noise
from fold.model.forward import skip_block
from fold.scaling.plan import StreamPlan

HALF = torch.float16


def recorded(
    case: Case, plan: StreamPlan | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> RecordedRun:
    """The golden case as a run of one step."""
    model = golden.model(case.model, dtype)

    def call(x: Tensor, sigma: Tensor, branch: str) -> Tensor:
        skip = {1: skip_block} if branch == "uncond" else None
        out: Tensor = model(x, sigma, case.context, plan=plan or StreamPlan(), dtype=dtype, replace=skip)
        return out

    sigmas = [float(case.sigma[0]), 0.0]
    return record_run(call, case.latent, sigmas, walk=False, **options)


@pytest.mark.parametrize("case", golden.cases(), ids=str)
def test_a_model_is_exactly_itself(case: Case) -> None:
    found = compare_runs(recorded(case, cfg=3.0), recorded(case, cfg=3.0)).to_json()
    rows = [found["overall"], *found["steps"]]
    for row in rows:
        for kind in ("cond", "guided"):
            metrics = dict(row[kind])
            assert metrics.pop("cosine") == 1.0
            assert set(metrics.values()) == {0.0}
        assert (row["log_prob_mean_abs_diff"], row["ratio_abs_minus_1"]) == (0.0, 0.0)
        assert row["guidance_scale"] == 3.0


@pytest.mark.parametrize("case", golden.cases(), ids=str)
def test_fp16_against_fp32_gives_the_reference_figures(case: Case) -> None:
    plan = StreamPlan("online", golden.factors(case.model))
    found = compare_runs(recorded(case), recorded(case, plan, HALF))
    error = relative(velocity(case, plan, HALF), velocity(case))
    assert found.cond.relative_l2 == pytest.approx(error, rel=1e-4)
    assert found.cond.relative_l2 <= 4 * case.scalars["fp16"]["online"]["rel"]  # luck decides: see test_golden
    assert found.guided is None


@pytest.mark.parametrize("name", ["hot", "burst"])
def test_what_overflowed_is_null(name: str) -> None:
    case = golden.cases_of(name)[0]
    found = compare_runs(recorded(case), recorded(case, dtype=HALF)).to_json()
    assert set(found["overall"]["cond"].values()) == {None}
    assert found["overall"]["log_prob_mean_abs_diff"] is None
    json.dumps(found, allow_nan=False)


tensors = st.integers(0, 10**6).flatmap(
    lambda seed: st.sampled_from([1e-3, 1.0, 1e4]).map(
        lambda scale: torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(seed)) * scale
    )
)


@settings(max_examples=60, deadline=None)
@given(tensors, tensors)
def test_metrics_are_the_textbook_ones(value: Tensor, reference: Tensor) -> None:
    found = difference(value, reference).to_json()
    a, b = value.double(), reference.double()
    wanted = {
        "model_output_mean_abs_diff": float((a - b).abs().mean()),
        "model_output_max_abs_diff": float((a - b).abs().max()),
        "model_output_rel_max": float((a - b).abs().max() / b.abs().max()),
        "relative_l2": float((a - b).norm() / b.norm()),
        "cosine": float((a * b).sum() / a.norm() / b.norm()),
    }
    for name, number in wanted.items():
        assert found[name] == pytest.approx(number, rel=1e-5, abs=1e-6), name


@settings(max_examples=30, deadline=None)
@given(tensors, tensors, tensors, tensors)
def test_differences_add_up(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
    total = (difference(a, b) + difference(c, d)).to_json()
    whole = difference(torch.cat((a, c)), torch.cat((b, d))).to_json()
    assert total == pytest.approx(whole, rel=1e-5, abs=1e-6)


def test_a_small_angle_is_not_lost_in_rounding() -> None:
    reference = torch.randn(1, 128, 8, 8, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(1, 128, 8, 8, generator=torch.Generator().manual_seed(1))
    found = difference(reference + noise * 1e-4, reference)
    assert 1 - found.cosine == pytest.approx(0.5e-8, rel=0.05)


def test_metrics_of_nothing() -> None:
    zero, one = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    assert difference(zero, zero).to_json()["relative_l2"] == 0.0
    assert difference(one, zero).to_json()["relative_l2"] is None
    assert difference(one, zero).cosine == 0.0
    with pytest.raises(MossError, match="cannot be compared"):
        difference(zero, torch.zeros(1, 1, 1, 2))


def test_nothing_is_float64() -> None:
    case = golden.cases_of("cool")[0]
    a, b = recorded(case, cfg=2.0), recorded(case, StreamPlan("fp32_residual"), torch.bfloat16, cfg=2.0)
    with NoFloat64():
        compare_runs(a, b)


def grpo_log_prob(x: Tensor, v: Tensor, following: Tensor, sigma: float, after: float, level: float) -> Tensor:
    """log p of the transition, written out in double precision from its mean and standard deviation."""
    dt = after - sigma
    std = math.sqrt(sigma / (1 - (after if sigma == 1 else sigma))) * level
    mean = x * (1 + std**2 / (2 * sigma) * dt) + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
    spread = std * math.sqrt(-dt)
    return (-((following - mean) ** 2) / (2 * spread**2) - math.log(spread) - math.log(2 * math.pi) / 2).mean((1, 2, 3))


@pytest.mark.parametrize(("sigma", "after"), [(1.0, 0.9), (1.0, 0.0), (0.9, 0.5), (0.3, 0.0)])
@pytest.mark.parametrize("level", [0.1, 0.7, 1.3])
def test_the_sde_step_is_flow_grpos(sigma: float, after: float, level: float) -> None:
    x, v, noise, error = (initial_noise((3, 4, 5, 6), seed).double() for seed in range(4))
    other = v + 0.01 * error
    std = math.sqrt(sigma / (1 - (after if sigma == 1 else sigma))) * level
    assert sde_std(sigma, after, level) == pytest.approx(std)
    dt = after - sigma
    mean = x * (1 + std**2 / (2 * sigma) * dt) + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
    following = mean + std * math.sqrt(-dt) * noise
    wanted = grpo_log_prob(x, other, following, sigma, after, level) - grpo_log_prob(
        x, v, following, sigma, after, level
    )
    found = log_prob_change(other.float(), v.float(), sigma, after, level, noise.float())
    assert torch.allclose(found.double(), wanted, rtol=1e-3, atol=1e-7)
    assert torch.equal(log_prob_change(v, v, sigma, after, level, noise), torch.zeros(3))


def test_the_sde_step_keeps_the_flows_marginals() -> None:
    # between pure noise and one image, x_t = (1 - t) a + t e has v = e - a; the SDE must keep mean and deviation of x_t
    torch.manual_seed(0)
    image, t, after, count = 0.5, 0.6, 0.59, 400_000
    x = (1 - t) * image + t * torch.randn(count)
    v = (x - image) / t
    std, dt = sde_std(t, after, 0.7), after - t
    mean = x * (1 + std**2 / (2 * t) * dt) + v * (1 + std**2 * (1 - t) / (2 * t)) * dt
    following = mean + std * math.sqrt(-dt) * torch.randn(count)
    assert float(following.mean()) == pytest.approx((1 - after) * image, abs=4e-3)
    assert float(following.std()) == pytest.approx(after, abs=4e-3)


def test_ratio_and_log_prob_of_a_run() -> None:
    case = golden.cases_of("cool")[0]
    found = compare_runs(recorded(case), recorded(case, StreamPlan(), HALF)).to_json()["overall"]
    assert 0 < found["log_prob_mean_abs_diff"] < 1e-3
    assert found["ratio_abs_minus_1"] == pytest.approx(found["log_prob_mean_abs_diff"], rel=1e-2)
    none = compare_runs(recorded(case), recorded(case), noise_level=0.0).to_json()["overall"]
    assert none["log_prob_mean_abs_diff"] is None


def walk(cfg: float = 1.0, **options: Any) -> tuple[RecordedRun, list[tuple[float, str]]]:
    """A run over a made-up model, and the calls it made."""
    calls: list[tuple[float, str]] = []

    def call(x: Tensor, sigma: Tensor, branch: str) -> Tensor:
        calls.append((round(float(sigma[0]), 4), branch))
        return x * 0.5 if branch == "cond" else x * 0.25

    return record_run(call, initial_noise((2, 3, 4, 4), 0), flow_sigmas(3).tolist(), cfg=cfg, **options), calls


def test_a_walk_is_eulers() -> None:
    found, calls = walk(3.0)
    assert [branch for _, branch in calls] == ["cond", "uncond"] * 3
    for before, after in zip(found.steps[:-1], found.steps[1:], strict=True):
        guided = 0.25 * before.x + 3.0 * 0.25 * before.x
        assert torch.allclose(before.guided(3.0), guided)
        assert torch.allclose(after.x, before.x + guided * (before.sigma_next - before.sigma))
    assert found.sigmas[-1] == 0.0
    _, calls = walk(1.0)
    assert [branch for _, branch in calls] == ["cond"] * 3


def test_another_runs_latents_can_be_given() -> None:
    first, _ = walk()
    again = record_run(lambda x, s, b: x * 2, [step.x for step in first.steps], first.sigmas)
    assert all(torch.equal(a.x, b.x) for a, b in zip(first.steps, again.steps, strict=True))
    with pytest.raises(MossError, match="3 steps need as many latents, not 2"):
        record_run(lambda x, s, b: x, [step.x for step in first.steps[:2]], first.sigmas)


def test_progress_and_cancel() -> None:
    told: list[tuple[int, int]] = []
    walk(progress=lambda *done: told.append(done))
    assert told == [(1, 3), (2, 3), (3, 3)]
    with pytest.raises(MossCancelledError):
        walk(cancel=lambda: True)


@pytest.mark.parametrize("sigmas", [[1.0], [], [1.5, 0.0], [0.0, 0.0], [0.5, 0.7], [0.5, 0.5], [1.0, float("nan")]])
def test_bad_sigmas_are_refused(sigmas: list[float]) -> None:
    with pytest.raises(MossError, match="sigmas of a run"):
        record_run(lambda x, s, b: x, torch.zeros(1, 1, 1, 1), sigmas)


def test_a_run_survives_its_file(tmp_path: Path) -> None:
    found, _ = walk(3.0, conditioning={"context": torch.ones(1, 2, 8), "context_mask": torch.ones(1, 2)}, info={"a": 1})
    save_run(tmp_path / "run.safetensors", found)
    assert is_run(tmp_path / "run.safetensors")
    again = load_run(tmp_path / "run.safetensors")
    assert compare_runs(found, again).cond.products[0] == 0.0
    assert (again.cfg, again.info, set(again.conditioning)) == (3.0, {"a": 1}, {"context", "context_mask"})
    names = load_file(tmp_path / "run.safetensors")
    assert {"steps.000.x", "steps.002.cond", "steps.001.uncond", "steps.001.guided", "sigmas"} <= set(names)
    assert torch.equal(names["steps.001.guided"], found.steps[1].guided(3.0))


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        (None, "is not a saved run"),
        ("{", "is not a whole saved run"),
        ("[]", "is not a whole saved run"),
        ('{"schema": "x", "cfg": 1, "info": {}}', "moss_fp16.run/1 is needed"),
        ('{"schema": "moss_fp16.run/1", "cfg": "x", "info": {}}', "is not a whole saved run"),
        ('{"schema": "moss_fp16.run/1", "cfg": 1, "info": 3}', "is not a whole saved run"),
    ],
)
def test_bad_run_files_are_refused(tmp_path: Path, metadata: str | None, sentence: str) -> None:
    file = tmp_path / "bad.safetensors"
    save_run(file, walk()[0])
    save_file(load_file(file), file, {KEY: metadata} if metadata else None)
    with pytest.raises(MossError, match=sentence) as error:
        load_run(file)
    assert "bad.safetensors" in str(error.value)


@pytest.mark.parametrize("name", ["steps.001.x", "steps.001.cond", "sigmas"])
def test_a_run_with_a_tensor_missing_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "bad.safetensors"
    save_run(file, walk()[0])
    parts = load_file(file)
    del parts[name]
    save_file(parts, file, {KEY: '{"schema": "moss_fp16.run/1", "cfg": 1, "info": {}}'})
    with pytest.raises(MossError, match="is not a whole saved run"):
        load_run(file)


def test_no_model_file_is_a_run() -> None:
    assert not is_run(DATA / "hot.safetensors")
    assert not is_run(DATA / "expected.json")
    assert not is_run(DATA)


def test_runs_that_are_not_alike_are_refused() -> None:
    run, _ = walk(3.0)
    step: Step = run.steps[0]
    others = {
        "3 and 2 steps": replace(run, steps=run.steps[:2]),
        "guided at 3 and 2": replace(run, cfg=2.0),
        "Step 0 is at sigma": replace(run, steps=(replace(step, sigma=0.95), *run.steps[1:])),
        "negative output": replace(run, steps=(replace(step, uncond=None), *run.steps[1:])),
        "cannot be compared": replace(run, steps=(replace(step, cond=step.cond[:1]), *run.steps[1:])),
    }
    for sentence, other in others.items():
        with pytest.raises(MossError, match=sentence):
            compare_runs(run, other)
    for level in (-1.0, math.inf, math.nan):
        with pytest.raises(MossError, match="noise level"):
            compare_runs(run, run, noise_level=level)


def test_other_inputs_are_shown() -> None:
    run, _ = walk()
    moved = replace(run, steps=(replace(run.steps[0], x=run.steps[0].x * 1.5), *run.steps[1:]))
    found: Comparison = compare_runs(run, moved)
    assert [step.input_relative_l2 for step in found.steps] == pytest.approx([0.5, 0.0, 0.0])


# The command.

HOT = str(DATA / "hot.safetensors")
CASE = golden.cases_of("hot")[1]


@pytest.fixture
def cond(tmp_path: Path) -> str:
    file = tmp_path / "cond.safetensors"
    save_file({"context": CASE.context[:1].contiguous()}, file)
    return str(file)


def compare(tmp_path: Path, *options: str) -> dict[str, Any]:
    out = tmp_path / "result.json"
    assert main(["compare", *options, "--out", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("case", golden.cases_of("hot") + golden.cases_of("burst"), ids=str)
def test_the_command_on_golden_inputs(tmp_path: Path, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = [f"--io={DATA / f'{case.model}_io.safetensors'}", f"--latent={case.name}.latent"]
    inputs += [f"--context={case.name}.context", f"--sigmas={case.scalars['sigma']}", "--dtype=fp16"]
    factors = golden.factors(case.model)
    inputs += [f"--c={factors.c[0]}", f"--s-ffn={factors.s_ffn[0]}"]
    found = compare(tmp_path, str(DATA / f"{case.model}.safetensors"), *inputs)
    error = relative(velocity(case, StreamPlan("online", factors), HALF), velocity(case))
    assert found["overall"]["cond"]["relative_l2"] == pytest.approx(error, rel=1e-4)
    assert (found["other"]["mode"], found["reference"]["mode"]) == ("online", "none")
    assert "relative L2" in capsys.readouterr().out


def test_the_command_walks_with_guidance(tmp_path: Path, cond: str, capsys: pytest.CaptureFixture[str]) -> None:
    walked = [f"--cond={cond}", "--size=64x96", "--steps=3", "--cfg=3", "--skip=1", "--seed=4", "--batch=2"]
    found = compare(tmp_path, HOT, *walked, "--dtype=fp16")
    assert found["schema"] == "moss_fp16.compare/1"
    assert found["guidance_scale"] == 3.0
    assert len(found["steps"]) == 3
    assert 0 < found["overall"]["guided"]["relative_l2"] < 1e-3
    assert all(step["input_relative_l2"] == 0.0 for step in found["steps"])
    assert "uncond + 3 (cond - uncond)" in capsys.readouterr().out
    same = compare(tmp_path, HOT, *walked)
    assert same["overall"]["guided"]["model_output_max_abs_diff"] == 0.0


def test_a_saved_run_is_compared_against_as_if_run_anew(
    tmp_path: Path, cond: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, half = str(tmp_path / "run.safetensors"), str(tmp_path / "half.safetensors")
    walked = [f"--cond={cond}", "--size=64x96", "--steps=3", "--cfg=3", "--skip=1"]
    assert main(["compare", HOT, *walked, f"--save={run}"]) == 0
    assert "3 steps saved" in capsys.readouterr().out
    found = compare(tmp_path, HOT, f"--against={run}")
    assert found["overall"]["guided"]["model_output_max_abs_diff"] == 0.0
    found = compare(tmp_path, HOT, f"--against={run}", "--dtype=fp16", f"--save={half}")
    assert 0 < found["overall"]["guided"]["relative_l2"] < 1e-3
    again = compare(tmp_path, half, f"--against={run}")
    assert again["overall"]["guided"] == pytest.approx(found["overall"]["guided"], rel=1e-6)
    assert (again["reference"], again["other"]) == (found["reference"], found["other"])
    assert compare(tmp_path, HOT, *walked, "--dtype=fp16")["overall"]["guided"] == pytest.approx(
        found["overall"]["guided"], rel=1e-6
    )


def test_compare_takes_two_checkpoints(tmp_path: Path, cond: str) -> None:
    walked = [f"--cond={cond}", "--size=64x96", "--steps=2"]
    fixed = str(DATA / "hot_fp16fix_bf16.safetensors")
    found = compare(tmp_path, fixed, f"--reference={HOT}", *walked)
    assert found["overall"]["cond"]["model_output_max_abs_diff"] == 0.0


BAD = [
    ([], "Give the inputs with --cond"),
    (["--io=x"], "--io needs --latent, --context and --sigmas"),
    (["--cond=COND", "--io=x"], "Give the inputs with --cond"),
    (["--cond=COND", "--latent=x"], "--latent does not go with --cond"),
    (["--cond=COND", "--sigmas=1,0.5", "--steps=3"], "--steps does not go with --sigmas"),
    (["--cond=COND", "--sigmas=0.5,1"], "must fall"),
    (["--cond=COND", "--sigmas=x"], "--sigmas must be numbers"),
    (["--cond=COND", "--size=big"], "--size must be like"),
    (["--cond=COND", "--size=100x100"], "multiple of 16 pixels"),
    (["--cond=COND", "--cfg=nan"], "CFG must be"),
    (["--cond=COND", "--steps=0"], "number of steps"),
    (["--cond=COND", "--batch=0"], "--batch must be"),
    (["--cond=COND", "--skip=9", "--cfg=2"], "this model has blocks 0 to 3"),
    (["--cond=COND", "--noise-level=-1"], "noise level"),
    (["--cond=COND", "--against=RUN"], "leave --cond out"),
    (["--against=RUN", "--reference=x"], "leave --reference out"),
    (["--against=COND"], "is not a saved run"),
    (["--against=/nowhere"], "does not exist"),
    (["--cond=COND", "--save=/nowhere/x.safetensors"], "does not exist"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD)
def test_the_command_refuses(
    tmp_path: Path, cond: str, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    run = tmp_path / "run.safetensors"
    save_run(run, walk()[0])
    line = [option.replace("COND", cond).replace("RUN", str(run)) for option in options]
    extra = [] if any(option.startswith("--size") for option in line) or "--cond" not in str(line) else ["--size=32x32"]
    extra = extra if sentence != "leave --cond out" else []
    assert main(["compare", HOT, *line, *extra, f"--out={tmp_path / 'o.json'}"]) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cond.safetensors", "run.safetensors"]


def test_a_run_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.safetensors"
    save_run(run, walk(conditioning={"context": torch.ones(1, 2, 48)})[0])
    assert main(["compare", HOT, f"--against={run}"]) == 2
    assert "do not fit this model" in capsys.readouterr().err
    save_run(run, walk(conditioning={"context": torch.ones(1, 2, 8)})[0])
    assert main(["compare", HOT, f"--against={run}"]) == 2
    assert "does not fit this model" in capsys.readouterr().err
    assert main(["compare", str(run), f"--save={tmp_path / 'x'}", f"--against={run}"]) == 2
    assert "is a saved run" in capsys.readouterr().err
