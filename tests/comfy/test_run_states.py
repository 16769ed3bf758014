"""How a run ended is in its report: done, interrupted, failed and why, with the numbers up to there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import comfy.model_management as mm
import pytest
from comfy_runs import conditioning, fixed, load, report, sample
from moss_fp16_pack.fold.errors import MossError
from moss_fp16_pack.fold.report.messages import message
from moss_fp16_pack.nodes.panel import publish
from moss_fp16_pack.nodes.state import fix_of
from server import PromptServer


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What went to the page."""
    found: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(publish, "_send", lambda event, data: found.append((event, data)))
    return found


def stopped(error: BaseException, **options: Any) -> Any:
    """A MODEL whose third model call raises `error`."""
    model, calls = fixed(load("hot", "fp16"), **options), []

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise error
        return executor(*args, **kwargs)

    model.add_wrapper_with_key("diffusion_model", "stop", wrapper)
    return model


FAILURES = {
    "an exception": (RuntimeError("boom\nand where"), "error", "RuntimeError: boom"),
    "one of this pack": (MossError("The clamp is wrong."), "error", "The clamp is wrong."),
    "one without a text": (KeyError(), "error", "KeyError: KeyError"),
    "memory": (mm.OOM_EXCEPTION("CUDA out of memory. Tried to allocate"), "error_memory", "The GPU ran out of memory."),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failed_run_says_why_and_keeps_its_numbers(case: str, sent: list[tuple[str, dict[str, Any]]]) -> None:
    error, key, text = FAILURES[case]
    model = stopped(error, self_check=False)
    with pytest.raises(type(error)):
        sample(model, conditioning("hot"), steps=5)
    found = report(model)
    assert found["state"] == "failed" and found["error"]["key"] == key
    assert found["error"]["text"].startswith(text) and "\n" not in found["error"]["text"]
    assert found["verdict"]["text"] == f"Failed: {found['error']['text']}"
    assert (found["step"], found["total_steps"]) == (2, 5) and found["summary"]["peak"] > 0
    assert sent[-1][0] == publish.REPORT_EVENT and sent[-1][1]["state"] == "failed"


def test_an_interrupted_run_has_no_error_and_no_verdict_on_the_image() -> None:
    model = stopped(mm.InterruptProcessingException(), fix="none", guard="report")
    with pytest.raises(mm.InterruptProcessingException):
        sample(model, conditioning("hot"), steps=5)
    found = report(model)
    assert found["state"] == "interrupted" and found["error"] is None
    assert found["verdict"]["text"] == "Interrupted at step 2 of 5"
    assert found["outcome"] == "broken"  # so far, and the remedy holds for the next run
    assert found["remedy"]["action"]["value"] == "auto"
    assert "black_image" not in [said["key"] for said in found["messages"]]


@pytest.mark.parametrize("error", [mm.InterruptProcessingException(), RuntimeError("boom")], ids=["interrupt", "error"])
def test_a_run_that_stopped_is_told_to_its_report_nodes_too(
    error: BaseException, sent: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = {
        "1": {"class_type": "MossFP16Loader", "inputs": {}},
        "6": {"class_type": "MossFP16Report", "inputs": {"model": ["1", 0]}},
        "7": {"class_type": "MossFP16Report", "inputs": {"model": ["2", 0]}},
    }
    running = {0: (0, "p-1", prompt, {"extra_pnginfo": {"workflow": {"id": "w-1"}}})}
    queue = SimpleNamespace(currently_running=running)
    monkeypatch.setattr(PromptServer, "instance", SimpleNamespace(prompt_queue=queue), raising=False)
    monkeypatch.setattr(publish, "get_executing_context", lambda: SimpleNamespace(prompt_id="p-1"))
    model = stopped(error, node_id="1")
    with pytest.raises(type(error)):
        sample(model, conditioning("hot"), steps=5)
    ended = [data for event, data in sent if event == publish.REPORT_EVENT and data["state"] != "running"]
    assert [entry["node_id"] for entry in ended] == ["1", "6"]
    assert {entry["workflow_id"] for entry in ended} == {"w-1"} and {entry["prompt_id"] for entry in ended} == {"p-1"}


def test_a_toast_of_one_kind_is_sent_once_a_run(sent: list[tuple[str, dict[str, Any]]]) -> None:
    model = fixed(load("cool", "fp16"))
    fix = fix_of(model)
    assert fix is not None
    for _ in range(2):
        run = fix.begin_run(None)
        for kind in ("rescue", "rescue", "self_check"):
            publish.notice(fix, run, kind, message("model_broken"))
    assert [data["kind"] for event, data in sent if event == publish.NOTICE_EVENT] == 2 * ["rescue", "self_check"]


def test_a_run_that_counts_nothing_is_not_measured(sent: list[tuple[str, dict[str, Any]]]) -> None:
    model = fixed(load("cool", "fp16"), counters=False, guard="off", self_check=False)
    sample(model, conditioning("cool"), steps=2)
    found = report(model)
    assert {data["report"]["outcome"] for _, data in sent} == {"unknown"}  # while it runs, too
    assert found["outcome"] == "unknown" and found["verdict"]["key"] == "verdict_unknown" and found["blocks"] == []
    model = fixed(load("cool", "fp16"), counters=False)
    sample(model, conditioning("cool"), steps=2)
    assert report(model)["outcome"] == "ok" and report(model)["blocks"] == []  # the guard looked


def test_in_bf16_what_breaks_is_not_blamed_on_fp16() -> None:
    prompt = conditioning("cool")
    prompt[0][0] = prompt[0][0].clone()
    prompt[0][0][0, 1, 2] = float("nan")
    model = fixed(load("cool", "bf16"), guard="off")
    sample(model, prompt, steps=2)
    found = report(model)
    assert found["outcome"] == "broken" and found["remedy"]["key"] == "remedy_model"
