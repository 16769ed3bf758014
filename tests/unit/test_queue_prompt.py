"""The example client script: arguments, settings, reports and exit codes, against a stand-in server."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from comfy_server import free_port, load_client
from encoded import ENCODINGS, NAME, pipe, written

client = load_client()
API = Path(__file__).resolve().parents[2] / "example_workflows" / "api"
BLOCK = {
    "name": "layer.3", "max_abs": 11250.0, "over": 12, "saturated": 0, "clamped": 0, "non_finite": 0,
    "headroom_bits": 2.54, "level": "low",
}  # fmt: skip
OVERFLOWED = BLOCK | {"name": "text.0", "max_abs": None, "headroom_bits": None, "non_finite": 7, "level": "not_finite"}
REPORT = {
    "schema": "moss_fp16.report/1", "mode": "online", "engine": "native", "compute_dtype": "fp16",
    "stream_dtype": "fp16", "factors": {"c": 0.0625, "s_attn": [1.0, 0.5]}, "model_calls": 6,
    "blocks": [BLOCK, OVERFLOWED],
    "rescues": [{"step": 2, "sigma": 0.9, "rung": "c 1/32", "reason": "layer.3 saturated"}],
    "summary": {"peak": None, "block": "text.0", "saturated": 0, "clamped": 0, "non_finite": 7},
    "outcome": "broken", "verdict": {"key": "verdict_broken", "values": {}, "text": "Broken: black"},
    "remedy": {"key": "remedy_fix", "values": {}, "text": "Set fix = auto.", "action": None},
    "messages": [
        {"key": "black_image", "values": {}, "severity": "error", "text": "The image is black."},
        {"key": "other", "values": {}, "severity": "warn", "text": "mind the gap"},
    ],
    "warnings": ["The image is black.", "mind the gap"],
}  # fmt: skip


class StandIn(BaseHTTPRequestHandler):
    """Just enough of ComfyUI: refuses prompts with a node "bad", ends the others at once; no websocket."""

    status: dict[str, Any] = {"completed": True, "messages": []}  # noqa: RUF012

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "bad" in body.get("prompt", {}):
            problem = {"message": "Value not in list", "details": "fix: 'nope'"}
            errors = {"bad": {"class_type": "MossFP16Loader", "errors": [problem]}}
            self.answer({"error": {"message": "Prompt outputs failed validation"}, "node_errors": errors}, 400)
        else:
            self.answer({"prompt_id": "p1"})

    outputs: dict[str, Any] = {"6": {"moss_fp16_report": [REPORT]}}  # noqa: RUF012
    inputs: dict[str, Any] = {  # noqa: RUF012
        "required": {"model": ["MODEL"], "steps": ["INT", {}]}, "optional": {"note": ["STRING", {}]},
    }  # fmt: skip

    def do_GET(self) -> None:
        if self.path.startswith("/history/"):
            self.answer({"p1": {"status": self.status, "outputs": self.outputs}})
        elif self.path.startswith("/object_info/"):
            self.answer({"KSampler": {"input": self.inputs}} if self.path.endswith("/KSampler") else {})
        else:
            self.answer({"error": "nothing here"}, 404)


@pytest.fixture
def server() -> Iterator[str]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"6": {"class_type": "MossFP16Report", "inputs": {}}}), "utf-8")
    return path


def test_a_job_ends_with_its_table(server: str, workflow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert client.main([str(workflow), "--server", server]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[:2] == ["Broken: black", "Set fix = auto."]
    assert re.search(r"layer\.3 +low +1\.125e\+04 +2\.5 bits", out)
    assert re.search(r"text\.0 +NaN/inf +NaN/inf +- +7", out)
    assert "c 1/16" in out and "s_attn 1 to 1/2 per block" in out
    assert "step 2 was computed again with c 1/32: layer.3 saturated" in out and "warn: mind the gap" in out
    assert "The image is black." not in out


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.0**-24, "1/16777216"), (2.0**24, "16777216"), (0.3, "3/10"), ([1.0, 2.0**-22], "1 to 1/4194304 per block")],
)
def test_every_factor_that_is_allowed_is_shown(value: Any, text: str) -> None:
    assert client.factor_text(value) == text


@pytest.mark.parametrize(("dtype", "wide"), [("fp16", False), ("fp32", True), ("bf16", True)])
def test_a_stream_that_fp16_does_not_limit_has_no_margin_and_nothing_saturated(dtype: str, wide: bool) -> None:
    beyond = BLOCK | {"max_abs": 114000.0, "headroom_bits": -0.8, "saturated": 315, "level": "ok"}
    summary = {"peak": 114000.0, "block": "layer.3", "saturated": 315, "clamped": 0, "non_finite": 0}
    out = client.format_report(REPORT | {"stream_dtype": dtype, "blocks": [beyond], "summary": summary})
    row = r"layer\.3 +ok +1\.14e\+05 +- +0 +- +0" if wide else r"layer\.3 +ok +1\.14e\+05 +-0\.8 bits +0 +315 +0"
    assert re.search(row, out) and ("315 beyond fp16, 0 clamped" in out) is wide


def test_a_report_of_an_older_server_is_shown_without_a_verdict() -> None:
    newer = ("outcome", "verdict", "remedy", "messages")
    older = {key: value for key, value in REPORT.items() if key not in newer}
    older["blocks"] = [{key: value for key, value in BLOCK.items() if key != "level"}]
    out = client.format_report(older)
    assert out.startswith("fix online") and re.search(r"layer\.3 +\? ", out) and "warn: mind the gap" in out


def test_json_is_the_report_itself(server: str, workflow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert client.main([str(workflow), "--server", server, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out) == [REPORT]


def test_a_failed_job_exits_1(
    server: str, workflow: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"node_id": "1", "node_type": "MossFP16Loader", "exception_message": "no such file\n"}
    monkeypatch.setattr(StandIn, "status", {"completed": False, "messages": [["execution_error", error]]})
    assert client.main([str(workflow), "--server", server]) == 1
    assert capsys.readouterr().err == "Node 1 (MossFP16Loader) failed: no such file\n"
    monkeypatch.setattr(StandIn, "outputs", {})
    assert client.main([str(workflow), "--server", server]) == 1
    assert capsys.readouterr().out == "The job failed before its report.\n"
    workflow.write_text(json.dumps({"1": {"class_type": "SaveLatent", "inputs": {}}}), "utf-8")
    assert client.main([str(workflow), "--server", server]) == 1
    assert capsys.readouterr().out == "The job has no MossFP16Report node, so there is no report.\n"


@pytest.mark.parametrize(
    "option",
    ["--server=host:abc", "--server=host:70000", "--server=[::1", "--server=ftp://x",
     "--timeout=-1", "--timeout=0", "--timeout=nan", "--timeout=inf"],
)  # fmt: skip
def test_a_bad_option_is_one_line(workflow: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert client.main([str(workflow), option]) == 2
    err = capsys.readouterr().err
    assert err.startswith(option.partition("=")[0]) and err.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="a pipe breaks otherwise there")
def test_a_reader_that_has_gone_is_no_error(server: str, workflow: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, str(API / "queue_prompt.py"), str(workflow), "--server", server, "--json", "--quiet"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_refused_workflow_exits_2(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"bad": {"class_type": "MossFP16Loader", "inputs": {}}}), "utf-8")
    assert client.main([str(path), "--server", server]) == 2
    err = capsys.readouterr().err
    assert "node bad (MossFP16Loader): Value not in list: fix: 'nope'" in err and err.count("\n") == 1


def test_a_nodes_own_check_is_told_once() -> None:
    problems = [
        {
            "type": "custom_validation_failed",
            "message": "Custom validation failed for node",
            "details": f"{name} - c is 0.",
        }
        for name in ("c", "s_attn")
    ]
    body = {"error": {"message": "Prompt outputs failed validation"}, "node_errors": {"1": {"errors": problems}}}
    told = client.refusal(400, json.dumps(body), "/prompt")
    assert told == "The server refused the workflow: Prompt outputs failed validation; node 1 (None): c is 0."


def test_no_server_exits_2(workflow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert client.main([str(workflow), "--server", f"127.0.0.1:{free_port()}"]) == 2
    assert "No ComfyUI answers" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "not json", "[1]", '{"nodes": []}', '{"1": {"inputs": {}}}'])
def test_a_file_that_is_no_api_workflow_exits_2(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.json"
    if content is not None:
        path.write_text(content, "utf-8")
    assert client.main([str(path)]) == 2
    assert str(path) in capsys.readouterr().err


NODES = {"6": {"class_type": "MossFP16Report", "inputs": {}, "_meta": {"title": "\u62a5\u544a"}}}
PLAIN = json.dumps(NODES, ensure_ascii=False)
BODY = json.dumps({"prompt": NODES, "client_id": "x", "extra_data": {"a": 1}, "front": True}, ensure_ascii=False)
#: The same job, as PowerShell 5 and 7, editors and a browser's network tab leave it.
WRITTEN = {
    "plain": PLAIN.encode(),
    "utf-8 with a mark": PLAIN.encode("utf-8-sig"),
    "utf-16 (PowerShell 5)": PLAIN.encode("utf-16"),
    "utf-16 little-endian": b"\xff\xfe" + PLAIN.encode("utf-16-le"),
    "utf-16 big-endian": b"\xfe\xff" + PLAIN.encode("utf-16-be"),
    "utf-16 without a mark": PLAIN.encode("utf-16-le"),
    "Windows line ends": json.dumps(NODES, indent=2).replace("\n", "\r\n").encode(),
    "body of /prompt": BODY.encode(),
    "body of /prompt in utf-16": BODY.encode("utf-16"),
    "with the workflow beside it": json.dumps({"prompt": NODES, "extra_data": {"extra_pnginfo": {}}}).encode(),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_the_client_takes_what_people_have(
    case: str, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(WRITTEN[case])
    assert client.load_workflow(path)["6"]["class_type"] == "MossFP16Report"
    assert client.main([str(path), "--server", server]) == 0
    assert "layer.3" in capsys.readouterr().out


def test_the_rest_of_a_body_goes_along(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, sent = tmp_path / "job.json", []
    path.write_text(BODY, "utf-8")
    call = client.ComfyClient.call
    monkeypatch.setattr(
        client.ComfyClient,
        "call",
        lambda self, method, to, body=None: (sent.append((to, body)), call(self, method, to, body))[1],
    )
    assert client.main([str(path), "--server", server]) == 0
    (body,) = [body for to, body in sent if to == "/prompt"]
    assert body["extra_data"] == {"a": 1} and body["front"] is True and body["prompt"] == NODES
    assert body["client_id"] != "x"  # the events come to this client


def test_a_workflow_over_the_standard_input(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PLAIN.encode("utf-8-sig"))))
    assert client.main(["-", "--server", server]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (PLAIN.encode("gbk"), r"is not UTF-8 text \(byte \d+\): save it as UTF-8"),
        (b'{"nodes": [], "links": []}', "is a UI workflow"),
        (b'{"prompt": {"nodes": []}}', "is a UI workflow"),
        (b'{"workflow": {"nodes": []}}', "is a UI workflow"),
        (b"{}", "without a single node"),
        (b'{"prompt": {}}', "without a single node"),
        (b'{"prompt": [1]}', "is not an API workflow"),
        (b"\xff\xfe", "cannot be read as a workflow"),
    ],
)
def test_what_is_no_job_is_named(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(content)
    assert client.main([str(path)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_node_called_prompt_is_a_node(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"prompt": NODES["6"]}), "utf-8")
    assert client.load_job(path) == ({"prompt": NODES["6"]}, {})


@pytest.mark.parametrize(("text", "value"), [("True", True), ("False", False), ("true", True), ("4", 4), ("x", "x")])
def test_values_as_powershell_writes_them(text: str, value: Any) -> None:
    assert client.parse_value(text) == value


def test_settings_find_their_node() -> None:
    workflow = client.load_workflow(API / "moss_fp16_headless.json")
    for setting in (
        "KSampler.steps=8",
        "1.c=0.0625",
        "MossFP16Loader.counters=false",
        "Positive conditioning.file=a=b",
    ):
        client.apply_setting(workflow, setting)
    assert workflow["5"]["inputs"]["steps"] == 8
    assert workflow["1"]["inputs"]["c"] == "0.0625"
    assert workflow["1"]["inputs"]["counters"] is False
    assert workflow["2"]["inputs"]["file"] == "a=b"


@pytest.mark.parametrize(
    "setting",
    [
        "steps=8",
        "KSampler.steps",
        "Nobody.x=1",
        "MossFP16LoadConditioning.file=x",
        "KSampler.model=x",
        "KSampler.nope=1",
        ".a=1",
    ],
)
def test_a_setting_that_fits_nothing_is_refused(setting: str) -> None:
    with pytest.raises(client.ClientError, match="--set"):
        client.apply_setting(client.load_workflow(API / "moss_fp16_headless.json"), setting)


def test_an_input_that_the_workflow_leaves_out_has_to_be_one_of_the_node(
    server: str, workflow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = {"5": {"class_type": "KSampler", "inputs": {"steps": 4}}, "7": {"class_type": "Gone", "inputs": {}}}
    api = client.ComfyClient(server)
    client.apply_setting(nodes, "KSampler.note=8", api)
    client.apply_setting(nodes, "KSampler.steps=8", api)
    client.apply_setting(nodes, "Gone.x=1", api)  # the server says itself that it has no such node
    assert (nodes["5"]["inputs"], nodes["7"]["inputs"]) == ({"steps": 8, "note": "8"}, {"x": 1})
    workflow.write_text(json.dumps(nodes), "utf-8")
    assert client.main([str(workflow), "--server", server, "--set", "KSampler.nope=1"]) == 2
    said = "--set KSampler.nope=1: KSampler has no input nope (its inputs: steps, note, model).\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_pipe_that_cannot_show_a_report_gets_it_all_the_same(
    server: str, workflow: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    job = workflow.rename(workflow.with_name(f"{NAME}.json"))
    monkeypatch.setitem(REPORT, "warnings", [f"第 1 步 · {NAME}"])
    stdout, _ = pipe(monkeypatch, encoding)
    assert client.main([str(job), "--server", server]) == 0
    assert "layer.3" in written(stdout)
    error = {"node_id": "1", "node_type": "x", "exception_message": NAME}
    monkeypatch.setattr(StandIn, "status", {"completed": False, "messages": [["execution_error", error]]})
    _, stderr = pipe(monkeypatch, encoding)
    assert client.main([str(job), "--server", server, "--json"]) == 1
    assert "Node 1 (x) failed" in written(stderr)
