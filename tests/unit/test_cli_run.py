"""The commands that run a model: what they write, and the sentence for everything that cannot be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import golden
import pytest
import torch
from golden import UNIFORM, relative, velocity
from repo import DATA
from safetensors.torch import load_file, save_file

from fold.cli import main
from fold.measure.sampling import SampleSettings, euler, initial_noise
from fold.report.counters import Counters, site_names
from fold.scaling.factors import Factors
from fold.scaling.plan import StreamPlan
from fold.scaling.record import RECORD_KEY

HOT = str(DATA / "hot.safetensors")
CASE = golden.cases_of("hot")[1]
Fails = Callable[..., str]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "velocity.safetensors"


def forward_args(out: Path, checkpoint: str = HOT, case: golden.Case = CASE) -> dict[str, str | None]:
    return {
        "checkpoint": checkpoint,
        "--io": str(DATA / f"{case.model}_io.safetensors"),
        "--latent": f"{case.name}.latent",
        "--context": f"{case.name}.context",
        "--sigma": str(case.scalars["sigma"]),
        "--out": str(out),
    }


def argv(command: str, args: dict[str, str | None]) -> list[str]:
    """Options as a command line; None leaves one out, "" stands for a flag without a value."""
    parts = [command, str(args["checkpoint"])]
    for name, value in args.items():
        if name != "checkpoint" and value is not None:
            parts += [name] if value == "" else [f"{name}={value}"]
    return parts


def forward(out: Path, checkpoint: str = HOT, case: golden.Case = CASE, **options: str) -> torch.Tensor:
    """Run `forward`; options by their names with _ for -."""
    args = forward_args(out, checkpoint, case) | {f"--{k.replace('_', '-')}": v for k, v in options.items()}
    assert main(argv("forward", args)) == 0
    tensors = load_file(out)
    assert list(tensors) == ["velocity"]
    assert tensors["velocity"].dtype == torch.float32
    return tensors["velocity"]


def test_forward_writes_the_velocity(out: Path) -> None:
    assert torch.equal(forward(out), velocity(CASE))
    assert [path.name for path in out.parent.iterdir()] == [out.name]


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ({"mode": "none"}, StreamPlan()),
        ({}, StreamPlan("online", UNIFORM)),
        ({"mode": "online", "c": "1/8", "s_ffn": "0.5"}, StreamPlan("online", Factors((1 / 8,), s_ffn=(0.5,)))),
        ({"c": "1/16,1/32,2^-6,0.0625"}, StreamPlan("online", Factors((1 / 16, 1 / 32, 1 / 64, 1 / 16)))),
        ({"s_ffn": "0.5"}, StreamPlan("online", Factors((1 / 16,), s_ffn=(0.5,)))),
        ({"mode": "fp32_residual", "clamp": "4096"}, StreamPlan("fp32_residual", clamp=4096.0)),
        ({"eps": "stock"}, StreamPlan("online", UNIFORM, eps="stock")),
    ],
)
def test_forward_in_fp16(out: Path, options: dict[str, str], plan: StreamPlan) -> None:
    value = forward(out, dtype="fp16", **options)
    wanted = velocity(CASE, plan, torch.float16).float()
    assert torch.allclose(value, wanted, rtol=0.0, atol=0.0, equal_nan=True)
    assert bool(value.isfinite().all()) == (plan.mode != "none")


def test_forward_skips_blocks(out: Path) -> None:
    assert relative(forward(out, skip="1"), CASE.expected["none_skip1"]) <= 2e-6


@pytest.mark.parametrize("unfold", ["auto", "keep"])
def test_forward_reads_the_record(out: Path, tmp_path: Path, unfold: str) -> None:
    report = tmp_path / "report.json"
    source = str(DATA / "hot_fp16fix_s.safetensors")
    value = forward(out, source, dtype="fp16", unfold=unfold, eps="exact", report=str(report))
    assert relative(value, velocity(CASE)) < 4e-4
    found = json.loads(report.read_text())
    assert found["mode"] == ("online" if unfold == "auto" else "weights")


def test_forward_reports(out: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    forward(out, report=str(report))
    found = json.loads(report.read_text())
    assert found["schema"] == "moss_fp16.report/1"
    assert (found["model_calls"], found["steps"], found["mode"], found["engine"]) == (1, 1, "none", "builtin")
    for row in found["blocks"]:
        assert row["over"] == CASE.scalars["saturation"][row["name"]]["over"]


def test_forward_masks(out: Path, tmp_path: Path) -> None:
    io = tmp_path / "io.safetensors"
    context = CASE.context.clone()
    context[0, 4:] = 9.0
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, 4:] = 0
    save_file({"x": CASE.latent, "c": context, "m": mask}, io)
    value = forward(out, io=str(io), latent="x", context="c", mask="m")
    alone = golden.model("hot")(CASE.latent[:1], CASE.sigma[:1], CASE.context[:1, :4], plan=StreamPlan())
    assert relative(value[:1], alone) < 2e-6
    assert relative(value[1:], velocity(CASE)[1:]) < 2e-6


def test_forward_says_that_a_velocity_is_not_finite(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forward(out, dtype="fp16", mode="none")
    said = capsys.readouterr()
    assert said.out.startswith("Broken: the image is black or broken, the model left fp16's range\n")
    assert said.err == (
        "Warning: The image is black or broken: the model left fp16's range. Run it again with --mode auto.\n"
    )


def test_forward_says_that_factors_do_nothing_in_mode_none(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert torch.equal(forward(out, mode="none", c="1/16"), velocity(CASE))
    assert "applies no factors" in capsys.readouterr().err
    forward(out, mode="none")
    assert capsys.readouterr().err == ""


def test_forward_says_how_it_went(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forward(out, dtype="fp16", c="1/16")
    verdict, seen, ran = capsys.readouterr().out.splitlines()
    assert verdict == "OK: the image is not affected by fp16"
    assert re.match(r"largest value [\d.e]+ in layer\.\d+, margin \d\.\d bits", seen)
    assert seen.endswith("no value saturated, none NaN/inf")
    assert ran.replace("  ·  ", ", ") == f"fix online, engine builtin, fp16, c 1/16, wrote {out}"


COOL = {"checkpoint": str(DATA / "cool.safetensors"), "case": golden.cases_of("cool")[0], "mode": "online"}


@pytest.mark.parametrize("c", ["1/16", "2^-12"])
def test_forward_has_nothing_to_say_of_a_factor_that_fp16_can_hold(
    out: Path, capsys: pytest.CaptureFixture[str], c: str
) -> None:
    forward(out, dtype="fp16", c=c, **COOL)
    said = capsys.readouterr()
    assert said.out.startswith("OK: the image is not affected by fp16\n") and said.err == ""


def test_forward_warns_of_a_factor_too_small_for_fp16(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = forward(out, dtype="fp16", c="2^-20", **COOL)
    assert relative(value, velocity(COOL["case"])) > 0.05
    said = capsys.readouterr()
    assert said.out.startswith("Not known: with so small a factor fp16 loses bits, so the image may be wrong\n")
    assert said.err.startswith("Warning: With a factor of 1/1048576 ordinary values of the stream fall below fp16's")


def test_forward_warns_of_stock_eps_with_a_small_factor(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = forward(out, c="2^-10", eps="stock", **COOL)
    assert relative(value, velocity(COOL["case"])) > 0.3
    assert capsys.readouterr().err.startswith("Warning: With eps = stock and a factor of 1/1024 the norms' eps")
    forward(out, c="1/16", eps="stock", **COOL)
    assert capsys.readouterr().err == ""


def test_a_run_out_of_range_is_not_sent_to_a_factor_too_small_for_fp16(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forward(out, dtype="fp16", mode="online", c="1")
    assert "Run it again with a smaller factor, such as --c 1/16." in capsys.readouterr().err
    forward(out, dtype="fp16", mode="online", c="1,1,1,2^-9")
    assert "Run it again with --mode fp32_residual." in capsys.readouterr().err


def test_forward_prints_the_report_as_json(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv("forward", forward_args(out)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "moss_fp16.report/1"


def test_a_bad_skip_is_said_before_the_load(out: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fold.cli.running.load_model", lambda *_, **__: pytest.fail("loaded"))
    assert "this model has blocks 0 to 3" in fails("forward", forward_args(out) | {"--skip": "4"})


@pytest.fixture
def cond(tmp_path: Path) -> Path:
    file = tmp_path / "cond.safetensors"
    save_file({"context": CASE.context[:1].contiguous(), "attention_mask": torch.ones(1, 9)}, file)
    return file


def sample_args(out: Path, cond: Path) -> dict[str, str | None]:
    return {
        "checkpoint": HOT,
        "--cond": str(cond),
        "--height": "64",
        "--width": "96",
        "--steps": "3",
        "--seed": "5",
        "--dtype": "fp16",
        "--out": str(out),
    }


@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_sample_is_the_sampler_over_the_model(out: Path, cond: Path, tmp_path: Path, cfg: float) -> None:
    report = tmp_path / "report.json"
    args = sample_args(out, cond) | {"--cfg": str(cfg), "--skip": "1", "--report": str(report), "--batch": "2"}
    assert main(argv("sample", args)) == 0
    model, plan = golden.model("hot", torch.float16), StreamPlan("online", UNIFORM)
    watch = Counters(site_names(2, 4))

    @torch.no_grad()
    def call(x: torch.Tensor, sigma: torch.Tensor, branch: str) -> torch.Tensor:
        context = CASE.context[:1] if branch == "cond" else torch.zeros(1, 1, 48)
        replace = golden.SKIP_1 if branch == "uncond" else None
        half = torch.float16
        value = model(
            x.to(half), sigma, context.expand(2, -1, -1), plan=plan, dtype=half, replace=replace, observer=watch
        )
        watch.commit()
        return value

    wanted = euler(call, initial_noise((2, 128, 4, 6), 5), SampleSettings(3, cfg))
    latent = load_file(out)["latent"]
    assert latent.shape == (2, 128, 4, 6)
    assert relative(latent, wanted) < 1e-5
    found = json.loads(report.read_text())
    assert (found["model_calls"], found["steps"]) == (3 if cfg == 1.0 else 6, 3)
    assert found["summary"]["non_finite"] == 0


def test_sample_prints_the_report_as_json(out: Path, cond: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv("sample", sample_args(out, cond) | {"--json": ""})) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "moss_fp16.report/1"


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Fails]:
    """Run a command that must be refused: exit 2, one line on stderr, nothing written; returns the line."""

    def run(command: str, args: dict[str, str | None]) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main(argv(command, args)) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        assert "Traceback" not in said.err
        assert sorted(tmp_path.rglob("*")) == before
        return said.err

    return run


BAD_RUN_OPTIONS = [
    ({"--c": "0"}, "c must be a finite number above 0"),
    ({"--c": "-1/16"}, "c must be a finite number above 0"),
    ({"--c": "nan"}, "c must be a finite number above 0"),
    ({"--c": "inf"}, "c must be a finite number above 0"),
    ({"--c": "1/0"}, "c must be numbers like"),
    ({"--c": "half"}, "c must be numbers like"),
    ({"--c": ","}, "c must be numbers like"),
    ({"--c": "0.5,0.5"}, "c has 2 values, but this model has 4 blocks"),
    ({"--s-attn": "0.5,0.5,0.5"}, "s_attn has 3 values"),
    ({"--c": "1,1,1,1", "--s-ffn": "1,1"}, "must have the same number of values"),
    ({"--s-ffn": "-1"}, "s_ffn must be a finite number above 0"),
    ({"--clamp": "0"}, "clamp must be a positive"),
    ({"--clamp": "nan"}, "clamp must be a positive"),
    ({"--clamp": "inf"}, "clamp must be a positive"),
    ({"--mode": "magic"}, "--mode"),
    ({"--dtype": "fp64"}, "--dtype"),
    ({"--device": "abacus"}, "device 'abacus' cannot be used"),
    ({"--device": "meta"}, "device 'meta' cannot be used"),
    ({"--threshold": "nan"}, "--threshold must be"),
    ({"--threshold": "-1"}, "--threshold must be"),
    ({"--skip": "4"}, "this model has blocks 0 to 3"),
    ({"--skip": "one"}, "this model has blocks 0 to 3"),
    ({"--out": "/nowhere/at/all.safetensors"}, "does not exist"),
    ({"--report": "/nowhere/at/all.json"}, "does not exist"),
    ({"checkpoint": "/nowhere.safetensors"}, "does not exist"),
    ({"checkpoint": str(DATA / "expected.json")}, "expected.json is not a usable safetensors file"),
    ({"checkpoint": str(DATA / "hot_io.safetensors")}, "is not a MOSS-Image model"),
]
BAD_FORWARD = [
    ({"--sigma": "1.5"}, "--sigma must be 0 to 1"),
    ({"--sigma": "nan"}, "--sigma must be 0 to 1"),
    ({"--sigma": "x"}, "--sigma"),
    ({"--sigma": None}, "--sigma"),
    ({"--io": "/nowhere.safetensors"}, "does not exist"),
    ({"--latent": "case9.latent"}, "has no tensor 'case9.latent'"),
    ({"--context": "case1.latent"}, "but [2, T, 48] is needed"),
    ({"--latent": "case1.context"}, "but [B, 128, h, w] is needed"),
    ({"--context": "case0.context"}, "but [2, T, 48] is needed"),
    ({"--mask": "case1.context"}, "but [2, 9] is needed"),
]
BAD_SAMPLE = [
    ({"--steps": "0"}, "number of steps"),
    ({"--steps": "1001"}, "number of steps"),
    ({"--shift": "0"}, "shift must be a finite number"),
    ({"--shift": "inf"}, "shift must be a finite number"),
    ({"--cfg": "nan"}, "CFG must be"),
    ({"--height": "100"}, "multiple of 16 pixels"),
    ({"--width": "0"}, "multiple of 16 pixels"),
    ({"--batch": "0"}, "--batch must be 1 to 64"),
    ({"--seed": "-1"}, "seed must be"),
    ({"--cond": "/nowhere.safetensors"}, "does not exist"),
    ({"--cond": str(DATA / "hot_io.safetensors")}, "has no tensor 'context'"),
    ({"--uncond": str(DATA / "hot_io.safetensors")}, "has no tensor 'context'"),
]


@pytest.mark.parametrize(("change", "sentence"), BAD_RUN_OPTIONS + BAD_FORWARD)
def test_forward_refuses(out: Path, fails: Fails, change: dict[str, str | None], sentence: str) -> None:
    assert sentence in fails("forward", forward_args(out) | change)


def test_an_input_that_is_empty_is_named_as_that(out: Path, tmp_path: Path, fails: Fails) -> None:
    empty = load_file(DATA / "hot_io.safetensors") | {"case1.latent": torch.zeros(0, 128, 4, 4)}
    save_file(empty, tmp_path / "empty.safetensors")
    error = fails("forward", forward_args(out) | {"--io": str(tmp_path / "empty.safetensors")})
    assert "has shape [0, 128, 4, 4], but [B, 128, h, w] is needed, none of them 0." in error


@pytest.mark.parametrize(("change", "sentence"), BAD_RUN_OPTIONS + BAD_SAMPLE)
def test_sample_refuses(out: Path, cond: Path, fails: Fails, change: dict[str, str | None], sentence: str) -> None:
    assert sentence in fails("sample", sample_args(out, cond) | change)


def test_a_result_never_replaces_what_is_read(out: Path, cond: Path, tmp_path: Path, fails: Fails) -> None:
    copy, link, folder = tmp_path / "copy.safetensors", tmp_path / "link.safetensors", tmp_path / "hf"
    folder.mkdir()
    shard = folder / "diffusion_pytorch_model.safetensors"
    for file in (copy, shard):
        file.write_bytes(Path(HOT).read_bytes())
    link.symlink_to(copy)
    forward = forward_args(out, str(copy))
    assert "is what this command reads" in fails("forward", forward | {"--out": str(copy)})
    assert "is what this command reads" in fails("forward", forward | {"--out": str(link)})
    assert "is what this command reads" in fails("forward", forward | {"--report": str(copy)})
    assert "is what this command reads" in fails("forward", forward_args(out, str(folder)) | {"--out": str(shard)})
    assert "is what this command reads" in fails("sample", sample_args(out, cond) | {"--out": str(cond)})
    for name in ("--save", "--out"):
        args = {"checkpoint": str(copy), "--cond": str(cond), "--size": "32x32", name: str(copy)}
        assert "is what this command reads" in fails("compare", args)
    assert "is what this command reads" in fails(
        "probe", {"checkpoint": str(copy), "--cond": str(cond), "--out": str(cond)}
    )
    assert copy.read_bytes() == Path(HOT).read_bytes()
    assert "is named for two results" in fails("forward", forward | {"--report": str(out)})


def test_a_result_never_replaces_a_model(out: Path, cond: Path, tmp_path: Path, fails: Fails) -> None:
    other = tmp_path / "other.safetensors"
    whole = (DATA / "hot_prefixed.safetensors").read_bytes()
    other.write_bytes(whole)
    target = {"--out": str(other)}
    walk: dict[str, str | None] = {"checkpoint": HOT, "--cond": str(cond), "--size": "32x32"}
    for command, args in (
        ("forward", forward_args(out) | target),
        ("forward", forward_args(out) | {"--report": str(other)}),
        ("sample", sample_args(out, cond) | target),
        ("compare", walk | target),
        ("compare", walk | {"--save": str(other)}),
        ("probe", {"checkpoint": HOT, "--cond": str(cond)} | target),
    ):
        assert "is a MOSS-Image model, which a result must not replace" in fails(command, args)
    assert other.read_bytes() == whole
    out.write_bytes(b"an earlier result")
    forward(out)


def test_numbers_beyond_fp16_are_one_sentence_or_its_maximum(out: Path, tmp_path: Path, fails: Fails) -> None:
    for name, option in (("c", "--c"), ("s_attn", "--s-attn"), ("s_ffn", "--s-ffn")):
        args = forward_args(out) | {"--dtype": "fp16", option: "65536"}
        assert f"{name} is 65536, but in fp16 it must not be above 65504" in fails("forward", args)
    plain = {"dtype": "fp16", "mode": "none"}
    assert torch.equal(forward(out, clamp="70000", **plain), forward(out, clamp="65504", **plain))
    forward(out, dtype="fp16", mode="fp32_residual", c="65536", clamp="70000")
    forward(out, c="65536", s_attn="65536", clamp="70000")


def test_a_bad_noise_level_is_said_before_the_work(cond: Path, fails: Fails) -> None:
    args = {"checkpoint": "/nowhere.safetensors", "--cond": str(cond), "--noise-level": "nan"}
    assert "noise level must be" in fails("compare", args)


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("hot_fp16fix", {}, Factors((1 / 16,), s_ffn=(1 / 4,))),
        ("hot_fp16fix", {"--unfold": "keep"}, Factors(s_ffn=(1 / 4,))),
        ("hot", {}, Factors((1 / 16,), s_ffn=(1 / 4,))),
        ("hot", {"--mode": "fp32_residual"}, Factors(s_ffn=(1 / 4,))),
    ],
)
def test_an_s_alone_goes_with_the_modes_own_c(
    out: Path, tmp_path: Path, name: str, options: dict[str, str], wanted: Factors
) -> None:
    report = tmp_path / "report.json"
    args = forward_args(out, str(DATA / f"{name}.safetensors")) | {"--s-ffn": "1/4", "--report": str(report)} | options
    assert main(argv("forward", args)) == 0
    assert Factors.from_json(json.loads(report.read_text())["factors"]) == wanted


def test_an_out_that_is_a_folder_is_refused(out: Path, fails: Fails) -> None:
    assert "it is a folder" in fails("forward", forward_args(out) | {"--out": str(out.parent)})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_refused(out: Path, tmp_path: Path, fails: Fails, bad: float) -> None:
    latent = CASE.latent.clone()
    latent[0, 0, 0, 0] = bad
    save_file({"x": latent, "c": CASE.context}, tmp_path / "io.safetensors")
    change = {"--io": str(tmp_path / "io.safetensors"), "--latent": "x", "--context": "c"}
    assert "holds NaN or infinity" in fails("forward", forward_args(out) | change)


def test_integer_inputs_are_refused(out: Path, tmp_path: Path, fails: Fails) -> None:
    save_file({"x": CASE.latent.to(torch.int64), "c": CASE.context}, tmp_path / "io.safetensors")
    change = {"--io": str(tmp_path / "io.safetensors"), "--latent": "x", "--context": "c"}
    assert "floating" in fails("forward", forward_args(out) | change)


RECORDS = [
    ('{"c": 0}', "c in the kohakumoss_fp16_fix record of bad.safetensors must be a finite number above 0"),
    ('{"c": -1}', "must be a finite number above 0"),
    ('{"c": NaN}', "must be a finite number above 0"),
    ('{"c": "1/16"}', "must be a number above 0"),
    ('{"c": [0.5]}', "must be a number above 0"),
    ('{"c": 0.5, "via": "norm"}', "via in"),
    ('{"c": 0.5, "eps": "loose"}', "eps in"),
    ("[1]", "must be a JSON object"),
    ("{", "is not valid JSON"),
    ("{}", "has no c"),
]


@pytest.mark.parametrize(("record", "sentence"), RECORDS)
def test_a_bad_record_is_refused(out: Path, tmp_path: Path, fails: Fails, record: str, sentence: str) -> None:
    save_file(load_file(HOT), tmp_path / "bad.safetensors", {RECORD_KEY: record})
    said = fails("forward", forward_args(out, str(tmp_path / "bad.safetensors")))
    assert sentence in said
    assert "bad.safetensors" in said


def broken(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
    """A copy of the hot model with something wrong in its tensors."""
    tensors = load_file(HOT)
    change(tensors)
    save_file(tensors, tmp_path / "bad.safetensors")
    return str(tmp_path / "bad.safetensors")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t["layers.2.proj.o.weight"].view(-1)[3:4].fill_(float("nan")), "layers.2.proj.o.weight"),
        (lambda t: t["video_embedder.bias"].view(-1)[3:4].fill_(float("inf")), "video_embedder.bias"),
        (lambda t: t.pop("layers.1.norm2.weight"), "layers.1.norm2.weight"),
        (lambda t: t.update(extra=torch.zeros(2)), "extra"),
        (lambda t: t.update({"layers.0.proj.o.weight": torch.zeros(64, 65)}), "layers.0.proj.o.weight"),
    ],
    ids=["nan", "inf", "missing", "unknown", "shape"],
)
def test_bad_weights_are_refused(out: Path, tmp_path: Path, fails: Fails, change, sentence: str) -> None:  # type: ignore[no-untyped-def]
    said = fails("forward", forward_args(out, broken(tmp_path, change)))
    assert sentence in said
    assert "bad.safetensors" in said


def test_a_weight_beyond_fp16_is_refused_in_fp16(out: Path, tmp_path: Path, fails: Fails) -> None:
    checkpoint = broken(tmp_path, lambda t: t["layers.2.proj.o.weight"].view(-1)[3:4].fill_(1e6))
    args = forward_args(out, checkpoint) | {"--dtype": "fp16"}
    assert "layers.2.proj.o.weight in bad.safetensors does not fit fp16" in fails("forward", args)


def test_a_truncated_file_is_refused(out: Path, tmp_path: Path, fails: Fails) -> None:
    file = tmp_path / "short.safetensors"
    file.write_bytes(Path(HOT).read_bytes()[:-100])
    assert "short.safetensors" in fails("forward", forward_args(out, str(file)))


def test_a_pickle_is_refused(out: Path, tmp_path: Path, fails: Fails) -> None:
    file = tmp_path / "model.pt"
    torch.save({}, file)
    assert "only .safetensors is opened" in fails("forward", forward_args(out, str(file)))


def test_a_quantized_file_is_refused(out: Path, tmp_path: Path, fails: Fails) -> None:
    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.proj.o.weight"] = torch.zeros(64, 64, dtype=torch.int8)
        tensors["layers.0.proj.o.weight_scale"] = torch.ones(64)

    assert "is quantized (int8)" in fails("forward", forward_args(out, broken(tmp_path, quantize)))
