"""The commands on files: inspect, export, unfold, demo-checkpoint, and the contract of every command's exit."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from raw_files import entry, golden, quantized, raw_file, save
from repo import DATA, ROOT

from fold.cli import main
from fold.cli.common import human_bytes
from fold.cli.progress import Progress
from fold.scaling.record import RECORD_KEY

HOT = str(DATA / "hot.safetensors")


def run(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str, str]:
    """Exit status, stdout, stderr."""
    status = main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return status, out, err


def refused(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    """The one line of stderr of a command that must exit with 2 and print nothing else."""
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and "Traceback" not in err
    return err


def inspected(capsys: pytest.CaptureFixture[str], path: str | Path) -> dict[str, Any]:
    status, out, err = run(capsys, "inspect", path, "--json")
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize(
    ("name", "layout", "prefix", "dtype", "fold"),
    [
        ("hot", "split", "", "bf16", None),
        ("hot_fused_qkv", "fused", "", "bf16", None),
        ("hot_prefixed", "split", "model.diffusion_model.", "bf16", None),
        (
            "hot_fp16fix_s",
            "split",
            "",
            "fp16",
            {"c": 0.0625, "via": "gate", "s_attn": 0.5, "s_ffn": 0.25, "eps": "stock"},
        ),
    ],
)
def test_inspect_says_what_a_golden_file_is(
    capsys: pytest.CaptureFixture[str], name: str, layout: str, prefix: str, dtype: str, fold: object
) -> None:
    found = inspected(capsys, DATA / f"{name}.safetensors")
    assert (found["layout"], found["prefix"], found["dtype"], found["fold"]) == (layout, prefix, dtype, fold)
    assert found["arch"]["dim"] == 64 and found["quantization"] is None
    assert found["tensors"] == (75 if layout == "fused" else 83)
    assert found["bytes"] == sum(tensor.nbytes for tensor in golden(name).values())
    assert ("fix = auto" if fold else "online") in found["advice"]
    status, out, _ = run(capsys, "inspect", DATA / f"{name}.safetensors")
    assert status == 0 and f"{name}.safetensors: MOSS-Image, 4 blocks of width 64, {dtype}" in out


def test_inspect_a_quantized_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = inspected(capsys, save(tmp_path / "q.safetensors", quantized("int8")))
    assert found["quantization"] == "int8" and "no quantized tensor" in found["advice"]


def test_inspect_is_fast_on_a_large_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A model file with 10 GB more in it, as a sparse file."""
    content = (DATA / "hot.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header["vae.large"] = entry("U8", [10 * 10**9], len(data), len(data) + 10 * 10**9)
    file = raw_file(tmp_path / "large.safetensors", header, data)
    os.truncate(file, file.stat().st_size + 10 * 10**9)
    inspected(capsys, HOT)
    started = time.process_time()
    found = inspected(capsys, file)
    assert time.process_time() - started < 0.05
    assert found["other_tensors"] == 1


def test_export_then_unfold(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folded, back = tmp_path / "folded.safetensors", tmp_path / "back.safetensors"
    command = ("export", HOT, folded, "--c", "1/16", "--s-attn", "0.5", "--s-ffn", "1/4", "--dtype", "bf16", "--json")
    status, out, err = run(capsys, *command)
    assert (status, err) == (0, "")
    said = json.loads(out)
    assert said["fold"] == {"c": 0.0625, "via": "gate", "s_attn": 0.5, "s_ffn": 0.25, "eps": "stock"}
    assert said["bytes"] == folded.stat().st_size and said["target"] == str(folded)
    status, out, _ = run(capsys, "unfold", folded, back)
    assert status == 0 and "no fold" in out
    assert back.read_bytes() == (DATA / "hot.safetensors").read_bytes()


def test_export_says_what_the_defaults_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(capsys, "export", HOT, tmp_path / "out.safetensors", "--layout", "fused")
    found = inspected(capsys, tmp_path / "out.safetensors")
    assert (found["layout"], found["dtype"], found["fold"]["c"]) == ("fused", "fp16", 1 / 16)


def test_overwriting_must_be_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    target.write_text("mine")
    for command in (["export", HOT], ["demo-checkpoint"], ["unfold", str(DATA / "hot_fp16fix_bf16.safetensors")]):
        assert "--overwrite" in refused(capsys, *command, target)
        assert target.read_text() == "mine"
    assert run(capsys, "export", HOT, target, "--overwrite")[0] == 0
    assert "is the source itself" in refused(capsys, "export", target, target, "--overwrite")


BAD_RECORDS = {
    '{"c": 0}': "c in the",
    '{"c": -1}': "c in the",
    '{"c": NaN}': "c in the",
    '{"c": "1/16"}': "c in the",
    '{"c": [0.5]}': "c in the",
    '{"c": 0.5, "via": "x"}': "via in the",
    '{"c": 0.5, "s_ffn": 0}': "s_ffn in the",
    "[0.5]": "JSON object",
    "x": "not valid JSON",
}


@pytest.mark.parametrize("text", BAD_RECORDS)
@pytest.mark.parametrize("command", ["inspect", "export", "unfold"])
def test_a_bad_record_is_named_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, text: str
) -> None:
    file = save(tmp_path / "bad.safetensors", golden("cool"), {RECORD_KEY: text})
    rest = () if command == "inspect" else (tmp_path / "out.safetensors",)
    said = refused(capsys, command, file, *rest)
    assert BAD_RECORDS[text] in said and "bad.safetensors" in said
    assert [path.name for path in tmp_path.iterdir()] == ["bad.safetensors"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: command"),
        (["nonsense"], "invalid choice"),
        (["inspect"], "required: path"),
        (["inspect", "missing.safetensors"], "missing.safetensors does not exist"),
        (["inspect", str(ROOT / "README.md")], "README.md"),
        (["inspect", HOT, "--wrong"], "--wrong"),
        (["export", HOT, "T", "--c", "0"], "c must be a finite number above 0"),
        (["export", HOT, "T", "--c", "x"], "c must be numbers"),
        (["export", HOT, "T", "--s-attn", "nan"], "s_attn"),
        (["export", HOT, "T", "--c", "0.5,0.25,0.5,0.5"], "Per-block"),
        (["export", HOT, "T", "--dtype", "int8"], "invalid choice"),
        (["export", HOT, "T.pt"], "must end in .safetensors"),
        (["unfold", HOT, "T"], "nothing to unfold"),
        (["demo-checkpoint", "T", "--dim", "99"], "dim must be"),
        (["demo-checkpoint", "T", "--peak", "nan"], "peak must"),
        (["demo-checkpoint", "T", "--seed", "x"], "seed"),
    ],
)
def test_bad_arguments_are_one_sentence_and_leave_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], message: str
) -> None:
    argv = [word.replace("T", str(tmp_path / "out.safetensors")) if word in ("T", "T.pt") else word for word in argv]
    assert message in refused(capsys, *argv)
    assert not list(tmp_path.iterdir())


def test_a_truncated_file_is_named_and_leaves_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    content = (DATA / "hot.safetensors").read_bytes()
    file = tmp_path / "cut.safetensors"
    for length in (3, 100, 8000, len(content) - 1):
        file.write_bytes(content[:length])
        assert "cut.safetensors" in refused(capsys, "inspect", file)
        assert "cut.safetensors" in refused(capsys, "export", file, tmp_path / "out.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["cut.safetensors"]


def test_what_is_not_the_users_fault_exits_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fold.cli import inspect

    def broken(path: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.delenv("MOSS_FP16_TRACEBACK", raising=False)
    monkeypatch.setattr(inspect, "open_checkpoint", broken)
    status, _, err = run(capsys, "inspect", HOT)
    assert status == 1 and err.startswith("ZeroDivisionError: oops") and err.count("\n") == 1


def test_demo_checkpoint_writes_a_model_of_the_sizes_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target, inputs = tmp_path / "demo.safetensors", tmp_path / "io.safetensors"
    sizes = ("--dim", "64", "--depth", "2", "--heads", "2", "--text-dim", "24", "--seed", "7")
    status, out, _ = run(capsys, "demo-checkpoint", target, *sizes, "--io", inputs)
    assert status == 0 and "131072" in out
    found = inspected(capsys, target)
    assert (found["arch"]["dim"], found["arch"]["depth"], found["arch"]["text_dim"]) == (64, 2, 24)
    assert inputs.exists()


def test_demo_checkpoint_writes_both_files_or_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target, inputs = tmp_path / "demo.safetensors", tmp_path / "io.safetensors"
    inputs.write_text("mine")
    assert "--overwrite" in refused(capsys, "demo-checkpoint", target, "--dim", "64", "--io", inputs)
    assert not target.exists() and inputs.read_text() == "mine"
    assert "two results" in refused(capsys, "demo-checkpoint", target, "--dim", "64", "--io", target)
    assert not target.exists()


def test_what_is_no_file_is_said_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.safetensors")
        said = refused(capsys, "inspect", tmp_path / "pipe.safetensors")
        assert said == f"{tmp_path / 'pipe.safetensors'} is not a regular file.\n"


def test_a_python_without_torch_is_told_so_in_a_sentence() -> None:
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import fold.cli as c"]
    command[-1] += "; sys.exit(c.main(['--help']))"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("torch is not installed")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert all(name in out for name in ("inspect", "export", "unfold", "demo-checkpoint"))


def module(*argv: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "fold", *argv], cwd=ROOT, text=True, **options)


def test_an_unknown_option_points_to_the_commands_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "export", "source", "target", "--out", "x")
    assert status == 2
    assert err == "python -m fold export: unrecognized arguments: --out x (see python -m fold export --help)\n"


def test_python_m_fold_exits_with_2_and_a_sentence(tmp_path: Path) -> None:
    with module("inspect", str(tmp_path / "no"), stderr=subprocess.PIPE) as process:
        assert process.communicate()[1] == f"{tmp_path / 'no'} does not exist.\n"
    assert process.returncode == 2


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals and pipes")
def test_a_plain_kill_cleans_up(tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    sizes = ("--dim", "1024", "--depth", "40", "--heads", "8")
    with module("demo-checkpoint", str(target), *sizes, stderr=subprocess.PIPE) as process:
        time.sleep(0.2)
        # Until the command is at work, SIGTERM ends it in the ordinary way; nothing is there then either.
        for _ in range(1200):
            if process.poll() is not None or writes_into(tmp_path, process.pid):
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == 1 and err == "Stopped.\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals and pipes")
@pytest.mark.parametrize("command", ["forward", "sample"])
def test_a_plain_kill_is_one_line_for_every_command(command: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def killed(_: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        return 0

    monkeypatch.setattr(f"fold.cli.{command}.run", killed)
    given = {"forward": ["--io", "f", "--latent", "l", "--context", "c", "--sigma", "1"], "sample": ["--cond", "f"]}
    before = signal.getsignal(signal.SIGTERM)
    assert main([command, "no.safetensors", *given[command], "--out", "out"]) == 1
    assert capsys.readouterr().err == "Stopped.\n"
    assert signal.getsignal(signal.SIGTERM) is before


def writes_into(folder: Path, pid: int) -> bool:
    nameless = any(str(folder) in target for target in descriptors(pid))
    return nameless or any(folder.glob("*.part-*"))


def descriptors(pid: int) -> Iterator[str]:
    """What a process has open; what it closes meanwhile, and itself once it is gone, is passed over."""
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(link.readlink())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = Terminal()
    with Progress("Writing", human_bytes, stream) as progress:
        for done in range(1, 5):
            now[0] += 1.0
            progress(done * 1_000_000, 4_000_000)
    text = stream.getvalue()
    assert "[#######                     ] Writing  25%  1.0 MB of 4.0 MB, 3 s left" in text
    drawn = [line.rstrip() for line in text.rstrip("\n").split("\r")]
    assert drawn[-1] == f"[{'#' * 28}] Writing 100%  4.0 MB of 4.0 MB"
    lengths = [len(line) for line in text.rstrip("\n").split("\r")]
    assert lengths[-1] >= max(lengths)  # nothing of a longer line is left to be seen
    assert "\x1b" not in text


def test_elsewhere_only_slow_work_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with Progress("Writing", str, stream) as progress:
        for done in range(1, 5):
            now[0] += 1.0
            progress(done, 4)
    assert stream.getvalue() == ""
    with Progress("Writing", str, stream) as progress:
        for done in range(1, 5):
            now[0] += 11.0
            progress(done, 4)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4 and lines[0].startswith("Writing  25%  1 of 4, 33 s left")


def test_bytes_for_people() -> None:
    assert [human_bytes(count) for count in (7, 1500, 2_500_000, 11_200_000_000)] == [
        "7 B",
        "1.5 kB",
        "2.5 MB",
        "11.2 GB",
    ]


def test_ctrl_c_while_torch_is_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(name: str, package: str | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["sample", "x"]) == 1
    assert capsys.readouterr().err == "Stopped.\n"
