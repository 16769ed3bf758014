"""dev.py and its helpers: which ComfyUI, what gets installed, what the summary says."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

import environment
import get_comfyui
import pytest
import repo
import run_tests
from comfy_server import ComfyServer, ComfyUIError, why_it_does_not_start

import dev

SETTINGS = ("COMFYUI_DIR", "COMFYUI_ARCHIVE", "COMFYUI_TAG", "COMFYUI_GIT", "MOSS_COMFYUI", "MOSS_PYTHON", "CI")


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty home, a pack somewhere else, and none of the variables that choose a ComfyUI."""
    pack = tmp_path / "elsewhere" / "pack"
    pack.mkdir(parents=True)
    for module in (repo, get_comfyui, dev):
        monkeypatch.setattr(module, "ROOT", pack)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in SETTINGS:
        monkeypatch.setenv(name, "")  # so that what dev.py sets is undone as well
        monkeypatch.delenv(name)


def make_comfyui(folder: Path, requirements: str = "") -> Path:
    (folder / "comfy").mkdir(parents=True)
    for name in ("main.py", "comfy/cli_args.py"):
        (folder / name).touch()
    (folder / "requirements.txt").write_text(requirements, "utf-8")
    return folder.resolve()


def git(folder: Path, *arguments: str) -> None:
    me = ("-c", "user.name=t", "-c", "user.email=t@t")
    subprocess.run(["git", *me, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a release of ComfyUI under the pinned tag and two others; set as the one to clone."""
    folder = make_comfyui(tmp_path / "remote")
    git(folder, "init", "-q")
    for tag in ("v0.9.0", get_comfyui.TAG, "v0.100.2", "nightly"):
        (folder / "version.txt").write_text(tag, "utf-8")
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", tag)
        git(folder, "tag", tag)
    monkeypatch.setenv("COMFYUI_GIT", folder.as_uri())
    return folder


def tar(file: Path, names: list[str], **options: bytes) -> Path:
    """A tar.xz with empty files of these names; options: `type` and `linkname` of the last one."""
    with tarfile.open(file, "w:xz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            if options and name == names[-1]:
                member.type, member.linkname = options["type"], options["linkname"].decode()
            archive.addfile(member, io.BytesIO())
    return file


COMFYUI_FILES = ["ComfyUI/main.py", "ComfyUI/comfy/cli_args.py"]


def own() -> Path:
    return repo.ROOT / repo.OWN_COMFYUI


def leftovers() -> list[str]:
    return sorted(path.name for path in repo.ROOT.iterdir() if path.name != repo.OWN_COMFYUI)


# Which one there is


def test_without_comfyui_only_our_own_and_torch() -> None:
    wanted = environment.wanted(None)
    assert f"torch=={environment.TORCH}" in wanted.lines and wanted.torchaudio is None
    assert not [line for line in wanted.lines if line.startswith(("torchvision", "comfyui"))]
    assert all("==" in line for line in wanted.lines)


def test_comfyui_requirements_without_what_is_pinned_here(tmp_path: Path) -> None:
    theirs = (
        "torch\ntorchsde\ntorchvision>=0.2\ntorchaudio\n\n# note\ncomfyui-frontend-package==1.0\ncomfy-kitchen==0.2\n"
    )
    wanted = environment.wanted(make_comfyui(tmp_path / "ComfyUI", theirs)).lines
    assert wanted[-2:] == ["torchsde", "comfy-kitchen==0.2"]
    assert [line for line in wanted if line.startswith("torch==")] == [f"torch=={environment.TORCH}"]
    assert environment.TORCHVISION in wanted and environment.FRONTEND in wanted


def test_a_newer_comfyui_keeps_its_own_frontend(tmp_path: Path) -> None:
    lines = environment.wanted(make_comfyui(tmp_path / "ComfyUI", "comfyui-frontend-package==1.100.2\n")).lines
    assert "comfyui-frontend-package==1.100.2" in lines and environment.FRONTEND not in lines


def test_another_torch_has_an_environment_of_its_own(tmp_path: Path) -> None:
    comfyui = make_comfyui(tmp_path / "ComfyUI", "torch\ntorchvision\ntorchaudio\n")
    wanted = environment.wanted(comfyui, "2.4.1")
    assert wanted.folder.name == ".venv-torch-2.4.1" and environment.wanted(comfyui).folder.name == ".venv"
    assert {"torch==2.4.1", "torchvision"} <= set(wanted.lines) and environment.TORCHVISION not in wanted.lines
    assert wanted.torchaudio == "torchaudio==2.4.1"
    assert environment.torchaudio("2.15.0") == environment.torchaudio("3.0") == "torchaudio"


def test_comfyui_is_found_by_variable_and_at_the_usual_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repo.find_comfyui() is None
    mine = make_comfyui(own())
    assert repo.find_comfyui() == mine
    usual = make_comfyui(tmp_path / "comfy" / "ComfyUI")
    assert repo.find_comfyui() == usual
    named = make_comfyui(tmp_path / "named")
    monkeypatch.setenv("COMFYUI_DIR", str(named))
    assert repo.find_comfyui() == named


def test_comfyui_is_found_around_an_installed_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    around = make_comfyui(tmp_path / "mine")
    monkeypatch.setattr(repo, "ROOT", around / "custom_nodes" / "ComfyUI-MOSS-FP16")
    make_comfyui(tmp_path / "comfy" / "ComfyUI")
    assert repo.find_comfyui() == around


def test_a_variable_that_names_no_comfyui_is_an_error_and_not_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    make_comfyui(tmp_path / "comfy" / "ComfyUI")
    monkeypatch.setenv("COMFYUI_DIR", str(tmp_path / "nothing"))
    assert dev.main(["test", "--parts", "lint"]) == 1
    assert "holds no ComfyUI" in capsys.readouterr().err


# Getting one


def test_the_pinned_release_is_cloned_once(remote: Path, capsys: pytest.CaptureFixture) -> None:
    assert dev.which_comfyui() == own().resolve()
    assert (own() / "version.txt").read_text("utf-8") == get_comfyui.TAG
    assert os.environ["COMFYUI_DIR"] == str(own().resolve()) and leftovers() == []
    assert "Getting ComfyUI" in capsys.readouterr().out
    remote.rename(remote.with_name("gone"))
    del os.environ["COMFYUI_DIR"]
    assert dev.which_comfyui() == own().resolve()  # nothing is asked for again
    assert "Getting" not in capsys.readouterr().out


def test_another_release_takes_the_place_of_the_one_that_was_got(remote: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tag, version in ((get_comfyui.TAG, get_comfyui.TAG), ("v0.9.0", "v0.9.0"), ("newest", "v0.100.2")):
        monkeypatch.setenv("COMFYUI_TAG", tag)
        monkeypatch.delenv("COMFYUI_DIR", raising=False)
        dev.which_comfyui()
        assert (own() / "version.txt").read_text("utf-8") == version
    assert leftovers() == []


def test_one_that_was_put_there_by_hand_is_left_alone(remote: Path) -> None:
    make_comfyui(own())
    assert dev.which_comfyui() == own().resolve()
    assert not (own() / "version.txt").exists()


def test_a_new_release_that_cannot_be_had_leaves_the_old_one(
    remote: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    dev.which_comfyui()
    monkeypatch.delenv("COMFYUI_DIR")
    monkeypatch.setenv("COMFYUI_TAG", "v7.0.0")
    assert dev.which_comfyui() == own().resolve()
    assert (own() / "version.txt").read_text("utf-8") == get_comfyui.TAG
    assert "stays as it is" in capsys.readouterr().out and leftovers() == []


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/ComfyUI.git", "file:///nowhere/ComfyUI.git"])
def test_without_a_network_it_is_said_loudly_and_soon(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, address: str
) -> None:
    monkeypatch.setenv("COMFYUI_GIT", address)
    started = time.monotonic()
    assert dev.which_comfyui() is None
    out = capsys.readouterr().out
    assert "!!! There is no ComfyUI" in out and "Going on without" in out and "COMFYUI_DIR" not in os.environ
    assert time.monotonic() - started < get_comfyui.ASK_SECONDS + 5 and leftovers() == []


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("COMFYUI_GIT", f"http://127.0.0.1:{silent.getsockname()[1]}/ComfyUI.git")
        monkeypatch.setattr(get_comfyui, "ASK_SECONDS", 0.5)
        with pytest.raises(get_comfyui.GetError, match="no answer in"):
            get_comfyui.get_comfyui()


@pytest.mark.parametrize(("name", "value"), [("MOSS_COMFYUI", "off"), ("MOSS_PYTHON", sys.executable)])
def test_getting_one_can_be_declined(
    remote: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert dev.which_comfyui() is None
    assert name in capsys.readouterr().out and not own().exists()


@pytest.mark.parametrize("top", ["ComfyUI/", "./ComfyUI-0.33.1/", ""])
def test_an_archive_is_unpacked_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top: str) -> None:
    file = tar(tmp_path / "c.tar.xz", [name.replace("ComfyUI/", top) for name in COMFYUI_FILES])
    monkeypatch.setenv("COMFYUI_ARCHIVE", str(file))
    monkeypatch.setenv("COMFYUI_GIT", "file:///nowhere")
    assert dev.which_comfyui() == own().resolve()
    assert repo.is_comfyui(own()) and leftovers() == []


BAD_NAMES = ["../out.py", "ComfyUI/../../out.py", "/tmp/out.py", "C:/out.py", "..\\out.py", "\\\\server\\out.py"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_an_archive_that_leads_out_of_its_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, name: str
) -> None:
    monkeypatch.setenv("COMFYUI_ARCHIVE", str(tar(tmp_path / "c.tar.xz", [*COMFYUI_FILES, name])))
    assert dev.main(["test"]) == 1
    assert "outside of the folder" in capsys.readouterr().err
    assert not own().exists() and leftovers() == [] and not list(tmp_path.rglob("out.py"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_an_archive_with_a_link_or_a_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes
) -> None:
    file = tar(tmp_path / "c.tar.xz", [*COMFYUI_FILES, "ComfyUI/a"], type=kind, linkname=b"..")
    monkeypatch.setenv("COMFYUI_ARCHIVE", str(file))
    with pytest.raises(get_comfyui.ArchiveError, match="a link or a device"):
        get_comfyui.get_comfyui()
    assert leftovers() == []


@pytest.mark.parametrize("content", [b"", b"not a tar", None])
def test_an_archive_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    file = tar(tmp_path / "c.tar.xz", COMFYUI_FILES * 500)
    file.write_bytes(file.read_bytes()[:-200] if content is None else content)
    monkeypatch.setenv("COMFYUI_ARCHIVE", str(file))
    with pytest.raises(get_comfyui.ArchiveError, match="cannot be unpacked"):
        get_comfyui.get_comfyui()
    monkeypatch.setenv("COMFYUI_ARCHIVE", str(tmp_path / "missing.tar"))
    with pytest.raises(get_comfyui.ArchiveError, match="not a file"):
        get_comfyui.get_comfyui()


# One that is broken


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A ComfyUI that lacks a module, as one whose requirements were never installed."""
    folder = make_comfyui(tmp_path / "broken")
    for name in ("main.py", "comfy/options.py"):
        (folder / name).write_text("import av_of_another_world\n", "utf-8")
    return folder


def test_a_comfyui_that_does_not_start_is_a_sentence_and_its_log(broken: Path, tmp_path: Path) -> None:
    with pytest.raises(ComfyUIError, match=r"broken ended with 1\. The end of its log:") as caught:
        ComfyServer(broken, tmp_path / "base", models=[]).start()
    assert "No module named 'av_of_another_world'" in str(caught.value)
    reason = why_it_does_not_start(Path(sys.executable), broken)
    assert reason == "ModuleNotFoundError: No module named 'av_of_another_world'"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["-m", "pytest", "tests/comfy", "-q", "-p", "no:cacheprovider"], 4),
        (["tests/tools/demo.py"], 1),
    ],
    ids=["tests", "demo"],
)
def test_a_broken_comfyui_gives_no_traceback_of_ours(broken: Path, command: list[str], code: int) -> None:
    here = Path(run_tests.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, *command], cwd=here, env={**os.environ, "COMFYUI_DIR": str(broken)},
        capture_output=True, encoding="utf-8", errors="replace", check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert "No module named 'av_of_another_world'" in said and str(broken) in said
    assert said.count("Traceback") == ("The end of its log" in said)  # ComfyUI's own, in its log


def test_a_torch_that_comfyui_does_not_take_is_skipped_with_its_reason(
    broken: Path, capsys: pytest.CaptureFixture
) -> None:
    part = run_tests.run_comfy(run_tests.Here(Path(sys.executable), broken, [], "2.4.1"))
    assert (part.skipped, part.failed) == (1, 0)
    (reason,) = part.reasons
    assert "does not start with torch 2.4.1 (ModuleNotFoundError" in reason


# The command line


def test_what_is_not_an_option_of_dev_py_goes_to_pytest() -> None:
    options = dev.parse(["test", "-k", "golden", "--torch", "2.4.1", "-x", "--tb=short"])
    assert options.arguments == ["-k", "golden", "-x", "--tb=short"]
    assert (options.torch, options.parts) == ("2.4.1", ["unit", "comfy"])
    assert dev.parse(["test", "--parts", "web,lint"]).parts == ["lint", "web"]
    assert dev.parse(["test"]).parts == list(run_tests.PARTS)
    assert dev.parse(["bench", "--full", "--help"]).arguments == ["--full", "--help"]


@pytest.mark.parametrize("arguments", [["--torch", "new"], ["--torch", "2.4.1; x"], ["--parts", "unit,all"]])
def test_a_wrong_option_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        dev.parse(["test", *arguments])


def test_another_torch_and_a_given_python_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOSS_PYTHON", sys.executable)
    with pytest.raises(environment.SetupError, match="MOSS_PYTHON"):
        environment.ensure(None, "2.4.1")


# The summary


def test_junit_counts_and_reasons(tmp_path: Path) -> None:
    xml = tmp_path / "j.xml"
    xml.write_text(
        "<testsuites><testsuite><testcase name='a'/><testcase name='b'><failure/></testcase><testcase name='c'>"
        "<error/></testcase><testcase name='d'><skipped message='no browser'/></testcase></testsuite></testsuites>",
        "utf-8",
    )
    part = run_tests.read_junit("tests/web", xml)
    assert (part.passed, part.failed, part.skipped) == (1, 2, 1)
    assert run_tests.skipped_line([part]) == "Skipped: tests/web: no browser"


def test_nothing_skipped_is_said_too() -> None:
    assert run_tests.skipped_line([run_tests.Part("ruff", passed=1, reasons=Counter())]) == "Nothing was skipped."


@pytest.mark.parametrize(("ci", "code", "last"), [("", 0, "2 passed, 0 failed, 2 skipped"), ("true", 1, "2 failed, 0")])
def test_what_is_skipped_of_comfy_and_web_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, ci: str, code: int, last: str
) -> None:
    web = run_tests.Part("tests/web", passed=2, skipped=1, reasons=Counter(["no Chromium"]))
    monkeypatch.setitem(run_tests.PARTS, "web", lambda here: [web])
    monkeypatch.setenv("CI", ci)
    here = run_tests.Here(Path(sys.executable), None, [])
    assert run_tests.main(here, ["comfy", "web"]) == code
    out = capsys.readouterr().out
    assert last in out and "no Chromium" in out and repo.NO_COMFYUI in out


def test_a_skipped_unit_test_is_fine_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    part = run_tests.Part("tests/unit", passed=2, skipped=1, reasons=Counter(["no named pipes"]))
    assert run_tests.insist(part) is part
