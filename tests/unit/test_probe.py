"""The probe: true peaks, factors that work, and the file it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
from golden import Case, velocity
from hypothesis import given, settings
from hypothesis import strategies as st
from repo import DATA
from safetensors.torch import save_file

from fold.cli import main
from fold.errors import MossCancelledError, MossError
from fold.measure import probe as module
from fold.measure.probe import (
    BlockPeaks,
    PeakObserver,
    Peaks,
    ProbeResult,
    ProbeSettings,
    Prompt,
    choose_factors,
    largest_logit,
    probe,
)
from fold.scaling.factors import IDENTITY, Factors, factor_for_peak, read_factors
from fold.scaling.plan import StreamPlan

HALF = torch.float16
SIZES = ((64, 96), (128, 48))


def probed(name: str, per_block: bool = False, **options: Any) -> ProbeResult:
    model = golden.model(name)
    return probe(model, model.arch, prompts_of(name), ProbeSettings(SIZES, per_block=per_block), **options)


def prompts_of(name: str) -> list[Prompt]:
    return [
        Prompt(row[None], name=f"{case.name}.{i}")
        for case in golden.cases_of(name)
        for i, row in enumerate(case.context)
    ]


@pytest.mark.parametrize("name", golden.MODELS)
@pytest.mark.parametrize("per_block", [False, True], ids=["uniform", "per_block"])
def test_the_factors_chosen_cost_no_more_than_rounding(name: str, per_block: bool) -> None:
    factors = probed(name, per_block).factors
    assert factors.power_of_two
    for case in golden.cases_of(name):
        plan = StreamPlan("online", factors)
        assert bool(velocity(case, plan, HALF).isfinite().all())
        assert golden.rounding_error(case, plan, HALF) <= golden.fp16_bound(case)


def test_the_rule_on_the_golden_models() -> None:
    assert probed("cool").factors == IDENTITY
    assert probed("burst").factors == Factors((1 / 1024,), (1.0,), (1 / 128,))
    assert probed("hot").factors.c == (1 / 64,)


@pytest.mark.parametrize("case", golden.cases(), ids=str)
def test_peaks_are_the_true_ones(case: Case) -> None:
    watch = PeakObserver(2)
    velocity(case, observer=watch)
    found = watch.read()
    for name, row in case.scalars["saturation"].items():
        kind, layer = name.split(".")
        peak = found["stream" if kind == "layer" else "text_stream", int(layer)]
        assert peak == pytest.approx(row["maxabs"], rel=1e-5)


def test_peaks_do_not_depend_on_the_fold() -> None:
    case = golden.cases_of("hot")[0]
    plain, folded = PeakObserver(2), PeakObserver(2)
    velocity(case, observer=plain)
    velocity(case, StreamPlan("online", golden.factors("per_block")), observer=folded)
    streams = ("stream", "text_stream")
    known = {key: value for key, value in plain.read().items() if key[0] not in streams}
    assert known == {key: value for key, value in folded.read().items() if key[0] not in streams}


def test_logits_are_measured_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, 37, 16, generator=draw) for _ in "qk")
    whole = float((q @ k.transpose(-1, -2)).abs().max() / 4)
    sizes = []
    product = torch.Tensor.__matmul__

    def watched(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        out = product(left, right)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    for limit in (1, 500, 1000, 10**6):
        sizes.clear()
        monkeypatch.setattr(module, "LOGITS_CHUNK", limit)
        assert float(largest_logit(q, k)) == pytest.approx(whole, rel=1e-6)
        assert max(sizes) <= max(limit, 2 * 3 * 37)


@pytest.mark.parametrize("name", ["hot", "burst"])
def test_low_precision_weights_are_run_in_fp32(name: str) -> None:
    model = golden.model(name, torch.bfloat16)
    found = probe(model, model.arch, prompts_of(name), ProbeSettings(SIZES))
    assert found.peaks == probed(name).peaks


def test_every_prompt_size_and_sigma_is_run_and_told() -> None:
    told: list[tuple[int, int]] = []
    result = probed("hot", progress=lambda done, total: told.append((done, total)))
    assert told == [(done, 24) for done in range(1, 25)]
    rows = result.to_json()["runs"]
    assert len({(row["prompt"], row["size"], row["sigma"]) for row in rows}) == 24
    assert max(row["stream"] for row in rows) == result.peaks.stream


def test_padding_does_not_count() -> None:
    model, context = golden.model("hot"), golden.cases_of("hot")[0].context
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    loud = context.clone()
    loud[:, 3:] = 1e6
    one = ProbeSettings(((64, 64),), (1.0,))
    found, wanted = (
        probe(model, model.arch, [prompt], one).runs[0] for prompt in (Prompt(loud, mask), Prompt(context[:, :3]))
    )
    for key in ("stream", "text_stream", "o", "ffn_down", "ffn_up_gate", "logits"):
        assert found[key] == pytest.approx(wanted[key], rel=1e-5), key
    assert probe(model, model.arch, [Prompt(loud, mask * 0)], one).peaks.stream > 0


@pytest.mark.parametrize("after", [0, 1, 7, 50])
def test_it_can_be_cancelled(after: int) -> None:
    asked = 0

    def cancel() -> bool:
        nonlocal asked
        asked += 1
        return asked > after

    with pytest.raises(MossCancelledError, match="cancelled"):
        probed("hot", cancel=cancel)
    assert asked == after + 1


def test_nan_is_an_error() -> None:
    model, context = golden.model("cool"), golden.cases_of("cool")[0].context
    with pytest.raises(MossError, match="NaN or infinity in text_entry"):
        probe(model, model.arch, [Prompt(context * float("nan"))], ProbeSettings(((64, 64),)))


def peaks(stream: list[float], o: list[float], ffn: list[float], entry: float = 1.0, text: float = 1.0) -> Peaks:
    joint = tuple(
        BlockPeaks(f"layer.{i}", s, a, f, 1.0, 1.0) for i, (s, a, f) in enumerate(zip(stream, o, ffn, strict=True))
    )
    return Peaks(entry, 1.0, (BlockPeaks("text.0", text, 1.0, 1.0, None, 1.0),), joint)


def test_factors_are_chosen_by_the_largest_peaks() -> None:
    found = peaks([4096.0, 4097.0, 100.0], [1.0, 8192.0, 1.0], [1.0, 1.0, 70000.0], text=20000.0)
    assert choose_factors(found) == Factors((1 / 8,), (1 / 2,), (1 / 32,))
    assert choose_factors(found, per_block=True) == Factors((1 / 8, 1 / 2, 1 / 2), (1.0, 0.5, 1.0), (1.0, 1.0, 1 / 32))
    assert choose_factors(found, target=65504.0) == Factors((1.0,), (1.0,), (1 / 2,))


numbers = st.floats(0.0, 1e7)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=6), numbers, numbers)
def test_per_block_factors_hold_every_peak(rows: list[tuple[float, float, float]], entry: float, text: float) -> None:
    found = peaks(*(list(column) for column in zip(*rows, strict=True)), entry=entry, text=text)
    whole, each = choose_factors(found), choose_factors(found, per_block=True)
    assert max(found.stream, found.text_stream) * whole.c[0] <= 4096
    assert max(entry, text) * each.c[0] <= 4096
    for i, block in enumerate(found.joint):
        before = found.joint[i - 1].stream if i else 0.0
        assert max(before, block.stream) * each.c[i] <= 4096
        assert block.o * each.s_attn[i] <= 4096
        assert block.ffn_down * each.s_ffn[i] <= 4096
        assert each.c[i] >= whole.c[0]


@given(st.floats(0.0, 2.0**35))
def test_the_factor_is_the_largest_that_fits(peak: float) -> None:
    factor = factor_for_peak(peak)
    assert peak * factor <= 4096
    assert factor == 1.0 or peak * factor * 2 > 4096


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sizes": ()}, "at least one size"),
        ({"sizes": ((100, 64),)}, "multiples of 16"),
        ({"sizes": ((64, 0),)}, "multiples of 16"),
        ({"sigmas": (0.0,)}, "above 0 and at most 1"),
        ({"sigmas": (float("nan"),)}, "above 0 and at most 1"),
        ({"seed": -1}, "seed must be"),
        ({"target": 1e6}, "target of the peaks"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(MossError, match=sentence):
        ProbeSettings(**change)


def test_no_prompts_are_refused() -> None:
    model = golden.model("cool")
    with pytest.raises(MossError, match="at least one prompt"):
        probe(model, model.arch, [], ProbeSettings())


@pytest.fixture
def cond(tmp_path: Path) -> Path:
    file = tmp_path / "cat.safetensors"
    save_file({"context": golden.cases_of("burst")[0].context}, file)
    return file


def run(cond: Path, *options: str, name: str = "burst") -> int:
    sizes = "--sizes=64x96,128x48"
    return main(["probe", str(DATA / f"{name}.safetensors"), f"--cond={cond}", f"--cond={cond}", sizes, *options])


def test_the_command_and_its_file(cond: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "factors.json"
    assert run(cond, f"--out={out}") == 0
    said = capsys.readouterr().out
    assert "layer.3" in said
    found = json.loads(out.read_text())
    assert list(found)[:4] == ["schema", "c", "s_attn", "s_ffn"]
    assert found["schema"] == "moss_fp16.factors/1"
    assert [row["name"] for row in found["blocks"]] == ["text.0", "text.1", *(f"layer.{i}" for i in range(4))]
    factors = read_factors(out)
    assert factors == Factors.from_json(found)
    assert f"--c 1/{1 / factors.c[0]:g} --s-attn 1 --s-ffn 1/{1 / factors.s_ffn[0]:g}" in said
    assert run(cond, "--json", "--per-block") == 0
    assert len(json.loads(capsys.readouterr().out)["c"]) == 4


def test_a_folded_file_is_probed_as_its_original(cond: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for name in ("hot", "hot_fp16fix_bf16"):
        assert run(cond, "--json", name=name) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]


@pytest.mark.parametrize("per_block", [False, True])
def test_its_file_feeds_forward_and_export(cond: Path, tmp_path: Path, per_block: bool) -> None:
    out, target = tmp_path / "factors.json", tmp_path / "v.safetensors"
    assert run(cond, f"--out={out}", *(["--per-block"] if per_block else [])) == 0
    source, io = str(DATA / "burst.safetensors"), str(DATA / "burst_io.safetensors")
    case = golden.cases_of("burst")[1]
    line = ["--latent=case1.latent", "--context=case1.context", "--sigma=0.5", "--dtype=fp16", f"--factors={out}"]
    assert main(["forward", source, f"--io={io}", *line, f"--out={target}"]) == 0
    from safetensors.torch import load_file

    wanted = velocity(case, StreamPlan("online", read_factors(out)), HALF)
    assert torch.equal(load_file(target)["velocity"], wanted)
    uniform = read_factors(out).uniform
    assert main(["export", source, str(tmp_path / "fixed.safetensors"), f"--factors={out}"]) == (0 if uniform else 2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not valid JSON"),
        ("[]", "holds no factors"),
        ("{}", "holds no factors"),
        ('{"schema": "moss_fp16.report/1", "c": 1}', "not a moss_fp16.factors/1"),
        ('{"c": 0}', "c in bad.json must be a finite number above 0"),
        ('{"c": [1, "x"]}', "c in bad.json must be a number"),
        ('{"c": []}', "at least one value"),
        ('{"c": [0.5, 0.5]}', "c has 2 values, but this model has 4 blocks"),
    ],
)
def test_bad_factor_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str
) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    line = ["forward", str(DATA / "hot.safetensors"), f"--io={DATA / 'hot_io.safetensors'}", "--latent=case1.latent"]
    line += ["--context=case1.context", "--sigma=0.5", f"--out={tmp_path / 'v.safetensors'}", f"--factors={file}"]
    assert main(line) == 2
    assert sentence in capsys.readouterr().err
    assert main([*line, "--c=1/16"]) == 2
    assert "--factors already says what c is" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--sizes=64", "--sizes must be like"),
        ("--sizes=64x", "--sizes must be like"),
        ("--sizes=64x65", "multiples of 16"),
        ("--sigmas=1,x", "--sigmas must be numbers"),
        ("--sigmas=2", "above 0 and at most 1"),
        ("--target=nan", "target of the peaks"),
        ("--device=abacus", "device 'abacus'"),
        ("--cond=/nowhere.safetensors", "does not exist"),
        ("--out=/nowhere/f.json", "does not exist"),
    ],
)
def test_the_command_refuses(cond: Path, capsys: pytest.CaptureFixture[str], option: str, sentence: str) -> None:
    assert run(cond, option) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_kill_during_the_probe_leaves_nothing(
    cond: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    watch: Callable[..., None] = stop
    monkeypatch.setattr(PeakObserver, "stream", watch)
    assert run(cond, f"--out={tmp_path / 'f.json'}") == 1
    assert capsys.readouterr().err == "Stopped.\n"
    assert list(tmp_path.iterdir()) == [cond]
