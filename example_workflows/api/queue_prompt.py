#!/usr/bin/env python3
"""Queue an API workflow on a running ComfyUI, follow it, and print its MOSS saturation report.

    python queue_prompt.py moss_fp16_headless.json
    python queue_prompt.py moss_fp16_headless.json --server gpu-box:8188 --set KSampler.steps=8 --json

Needs nothing but Python 3.10+. Exit codes: 0 done, 1 the job failed or was interrupted, 2 bad arguments, a workflow
the server refuses, or no server.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import io
import json
import os
import socket
import ssl
import struct
import sys
import time
import uuid
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote, urlsplit

Json = dict[str, Any]
#: The words for a block's level; one that a newer server gives shows as "?".
LEVELS = {"ok": "ok", "low": "low", "saturated": "saturated", "not_finite": "NaN/inf"}
#: Streams that 65504 is no limit for.
WIDE_DTYPES = ("fp32", "float32", "bf16", "bfloat16")
#: Messages that the verdict says already.
CONSEQUENCES = ("black_image", "some_images_broken", "image_affected")
#: What POST /prompt takes beside the nodes and the client's id.
BODY = ("extra_data", "front", "number", "prompt_id", "partial_execution_targets")
REPORT_NODE = "MossFP16Report"
LAST_EVENTS = ("execution_success", "execution_error", "execution_interrupted")


class ClientError(Exception):
    """What went wrong, as one sentence, and the exit code it means: 2 for the caller to put right, 1 for the rest."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


class ComfyClient:
    """The few calls of ComfyUI's HTTP and websocket interface that a headless job needs."""

    def __init__(self, server: str = "127.0.0.1:8188", timeout: float = 30.0) -> None:
        try:
            url = urlsplit(server if "://" in server else f"http://{server}")
            host, port = url.hostname, url.port
        except ValueError:  # a port that is none, half an IPv6 address
            host = port = None
        if not host or url.scheme not in ("http", "https"):
            raise ClientError(f"--server {server} is not host:port or an http(s) address.")
        self.secure = url.scheme == "https"
        self.host, self.port = host, port or (443 if self.secure else 8188)
        self.root, self.timeout = url.path.rstrip("/"), timeout
        self.client_id = uuid.uuid4().hex

    def call(self, method: str, path: str, body: Json | None = None) -> Any:
        """One HTTP call; returns the decoded JSON (None for an empty body). Raises ClientError on any refusal."""
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=self.timeout)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self.root + path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            where = f"{self.host}:{self.port}"
            raise ClientError(f"No ComfyUI answers at {where} ({error}): start it or pass --server.") from error
        finally:
            connection.close()
        if response.status >= 400:
            raise ClientError(refusal(response.status, text, path))
        return json.loads(text) if text.strip() else None

    def queue(self, prompt: Json, rest: Json | None = None) -> str:
        """POST /prompt, with what else belongs into its body; returns the prompt's id."""
        answer = self.call("POST", "/prompt", {**(rest or {}), "prompt": prompt, "client_id": self.client_id})
        return str(answer["prompt_id"])

    def history(self, prompt_id: str) -> Json | None:
        """The finished prompt's entry of /history, None while it waits or runs."""
        entry: Json | None = (self.call("GET", f"/history/{prompt_id}") or {}).get(prompt_id)
        return entry

    def pending(self, prompt_id: str) -> bool:
        """Whether the prompt is in the queue, waiting or running."""
        queue = self.call("GET", "/queue")
        return any(item[1] == prompt_id for items in queue.values() for item in items)

    def cancel(self, prompt_id: str) -> None:
        """Take the prompt out of the queue, or interrupt it when it runs already."""
        self.call("POST", "/queue", {"delete": [prompt_id]})
        self.call("POST", "/interrupt", {"prompt_id": prompt_id})

    def wait(self, prompt_id: str, timeout: float | None = None) -> Json:
        """Poll until the prompt is in /history and return its entry. Raises ClientError when it vanishes or is late."""
        end = None if timeout is None else time.monotonic() + timeout
        missing = 0
        while (entry := self.history(prompt_id)) is None:
            # Between the queue and the history there is a moment in which a prompt is in neither.
            missing = 0 if self.pending(prompt_id) else missing + 1
            if missing > 20:
                raise ClientError(
                    f"The server no longer knows prompt {prompt_id}: removed, or the server restarted.", 1
                )
            if end is not None and time.monotonic() > end:
                raise ClientError(f"Prompt {prompt_id} did not end in time.", 1)
            time.sleep(0.1)
        return entry

    def input_types(self, class_name: str) -> Json:
        """The inputs of a node class, required and optional, as name: type; empty where the server lacks the class."""
        info = (self.call("GET", f"/object_info/{quote(class_name, safe='')}") or {}).get(class_name) or {}
        groups = info.get("input") or {}
        return {name: spec[0] for kind in ("required", "optional") for name, spec in (groups.get(kind) or {}).items()}

    def events(self, quiet: float | None = None) -> EventStream:
        """Connect to /ws; iterate over the result for the server's events. Connect before queueing to miss none."""
        return EventStream(self, quiet)


class EventStream:
    """A read-only websocket (RFC 6455) for ComfyUI's JSON events; binary previews are skipped."""

    def __init__(self, client: ComfyClient, quiet: float | None) -> None:
        raw = socket.create_connection((client.host, client.port), client.timeout)
        self.sock = ssl.create_default_context().wrap_socket(raw, server_hostname=client.host) if client.secure else raw
        key = base64.b64encode(os.urandom(16)).decode()
        self.sock.sendall(
            f"GET {client.root}/ws?clientId={client.client_id} HTTP/1.1\r\nHost: {client.host}:{client.port}\r\n"
            f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self.file = self.sock.makefile("rb")
        status = self.file.readline()
        while self.file.readline().strip():
            pass
        if b" 101 " not in status:
            self.close()
            raise OSError(f"the websocket was refused: {status.decode('latin-1').strip()}")
        self.sock.settimeout(quiet)

    def __iter__(self) -> Iterator[Json]:
        text = b""
        while True:
            first, second = self._read(2)
            size = second & 127
            if size == 126:
                (size,) = struct.unpack(">H", self._read(2))
            elif size == 127:
                (size,) = struct.unpack(">Q", self._read(8))
            payload, opcode, final = self._read(size), first & 15, first & 128
            if opcode == 8:
                return
            if opcode == 9:
                self._send(10, payload)
            elif opcode == 1 or (opcode == 0 and text):
                text += payload
                if final:
                    yield json.loads(text)
                    text = b""

    def _read(self, size: int) -> bytes:
        data = self.file.read(size)
        if data is None or len(data) < size:
            raise OSError("the server closed the websocket")
        return data

    def _send(self, opcode: int, payload: bytes) -> None:
        mask = os.urandom(4)  # a client has to mask what it sends; control frames stay below 126 bytes
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))
        self.sock.sendall(bytes((128 | opcode, 128 | len(payload))) + mask + masked)

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        self.sock.close()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refusal(status: int, text: str, path: str) -> str:
    """One sentence out of a server's error body, naming each node input that it rejects."""
    try:
        body = json.loads(text)
        main = body["error"] if isinstance(body["error"], str) else body["error"]["message"]
        details = [
            f"node {node} ({entry.get('class_type')}): {problem}"
            for node, entry in (body.get("node_errors") or {}).items()
            for problem in dict.fromkeys(map(problem_text, entry.get("errors", [])))
        ]
        return "The server refused the workflow: " + "; ".join([str(main).rstrip("."), *details]).rstrip(".") + "."
    except (ValueError, KeyError, TypeError):
        return f"The server answered {status} to {path}: {' '.join(text.split())[:200]}"


def problem_text(problem: Json) -> str:
    """What is wrong with an input. A node's own check names the input itself, but comes once for each it looked at."""
    details = str(problem.get("details"))
    if problem.get("type") == "custom_validation_failed":
        return details.partition(" - ")[2] or details
    return f"{problem.get('message')}: {details}"


def load_job(path: Path) -> tuple[Json, Json]:
    """Read a workflow in API format, alone or as POST /prompt takes it; "-" is the standard input.

    Returns its nodes, and what else belongs into the body of /prompt (extra_data and the like). Raises ClientError for
    a missing file, bad JSON or another format.
    """
    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        found = json.loads(decoded(raw))
    except UnicodeDecodeError as error:
        raise ClientError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8.") from error
    except (OSError, ValueError) as error:
        raise ClientError(f"{path} cannot be read as a workflow: {error}.") from error
    workflow, rest = found, {}
    if isinstance(found, dict) and "prompt" in found and not is_node(found["prompt"]):
        workflow = found["prompt"]
        rest = {key: found[key] for key in BODY if key in found}
    for layer in (found, workflow, found.get("workflow") if isinstance(found, dict) else None):
        if isinstance(layer, dict) and isinstance(layer.get("nodes"), list):
            raise ClientError(
                f"{path} is a UI workflow: open it in ComfyUI and use File > Export (API), or take the api/ twin."
            )
    if not isinstance(workflow, dict) or not all(map(is_node, workflow.values())):
        raise ClientError(f"{path} is not an API workflow (an object of nodes, each with a class_type).")
    if not workflow:
        raise ClientError(f"{path} is an API workflow without a single node.")
    return workflow, rest


def load_workflow(path: Path) -> Json:
    """The nodes of a workflow in API format. Raises ClientError as `load_job` does."""
    return load_job(path)[0]


def is_node(value: Any) -> bool:
    """Whether a JSON value is a node in API format."""
    return isinstance(value, dict) and "class_type" in value


def decoded(raw: bytes) -> str:
    """Text as UTF-8, with or without a mark, or as UTF-16, which is what PowerShell 5 writes."""
    for mark, encoding in ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16")):
        if raw.startswith(mark):
            return raw.decode(encoding)
    if raw[1:2] == b"\0" or raw[:1] == b"\0":  # UTF-16 without a mark: JSON begins with an ASCII character
        return raw.decode("utf-16-be" if raw[:1] == b"\0" else "utf-16-le")
    return raw.decode("utf-8")


def apply_setting(workflow: Json, setting: str, client: ComfyClient | None = None) -> None:
    """Apply one `node.input=value`; node is an id, a title or a class name that only one node has.

    An input that the workflow leaves out is set where the client's server knows it. Raises ClientError for what is not
    there.
    """
    target, equals, value = setting.partition("=")
    name, dot, key = target.rpartition(".")
    if not equals or not dot or not name or not key:
        raise ClientError(f"--set {setting} is not node.input=value.")
    found = (
        [workflow[name]]
        if name in workflow
        else [node for node in workflow.values() if name in (node["class_type"], node.get("_meta", {}).get("title"))]
    )
    if len(found) != 1:
        known = ", ".join(f"{i} ({node['class_type']})" for i, node in workflow.items())
        raise ClientError(f"--set {setting}: {len(found)} nodes are called {name}; the workflow has {known}.")
    inputs = found[0].setdefault("inputs", {})
    if isinstance(inputs.get(key), list):
        raise ClientError(f"--set {setting}: {key} is a link from another node, not a value.")
    types = {} if key in inputs or client is None else client.input_types(found[0]["class_type"])
    # of a class that the server lacks it says so itself, when the job is queued
    if key not in inputs and key not in types and (types or client is None):
        has = ", ".join(dict.fromkeys([*inputs, *types])) or "none"
        raise ClientError(f"--set {setting}: {name} has no input {key} (its inputs: {has}).")
    text = isinstance(inputs.get(key), str) or types.get(key) == "STRING"
    inputs[key] = value if text else parse_value(value)


def parse_value(text: str) -> Any:
    """A JSON value where the text is one (4, 3.5, true; True as PowerShell writes it), else the text itself."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text


def follow(events: EventStream, prompt_id: str, workflow: Json, show: bool, deadline: float) -> None:
    """Print progress until the prompt ends, the deadline passes or the websocket breaks (polling takes over then)."""
    started = time.monotonic()
    try:
        for event in events:
            kind, data = event.get("type"), event.get("data") or {}
            if time.monotonic() > deadline or (kind in LAST_EVENTS and data.get("prompt_id") == prompt_id):
                return
            if not show or data.get("prompt_id") != prompt_id:
                continue
            if kind == "executing" and data.get("node") in workflow:
                print(f"  {time.monotonic() - started:6.1f} s  {workflow[data['node']]['class_type']}", file=sys.stderr)
            elif kind == "progress":
                print(f"  {time.monotonic() - started:6.1f} s    {data['value']}/{data['max']}", file=sys.stderr)
    except (OSError, ValueError):
        return


def run(
    client: ComfyClient, workflow: Json, show: bool = True, timeout: float | None = None, rest: Json | None = None
) -> Json:
    """Queue a workflow, follow it to its end and return its entry of /history. A job that is given up is cancelled."""
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        try:
            events = stack.enter_context(client.events(quiet=timeout))
        except OSError:
            events = None  # no websocket through this proxy: polling does as well, only without the steps
        prompt_id = client.queue(workflow, rest)
        try:
            if events:
                follow(events, prompt_id, workflow, show, deadline)
            return client.wait(prompt_id, None if timeout is None else max(0.0, deadline - time.monotonic()))
        except (KeyboardInterrupt, ClientError):
            with contextlib.suppress(ClientError):
                client.cancel(prompt_id)
            raise


def failure(entry: Json) -> str | None:
    """Why a finished prompt failed, as one sentence; None when it did not."""
    status = entry.get("status") or {}
    if status.get("completed"):
        return None
    for kind, data in status.get("messages", []):
        if kind == "execution_interrupted":
            return f"The job was interrupted at node {data.get('node_id')} ({data.get('node_type')})."
        if kind == "execution_error":
            return f"Node {data['node_id']} ({data['node_type']}) failed: {str(data['exception_message']).strip()}"
    return "The job ended with no result and no message."


def reports(entry: Json) -> list[Json]:
    """The `moss_fp16.report/1` dictionaries that the job's report nodes left in the history."""
    return [r for output in (entry.get("outputs") or {}).values() for r in output.get("moss_fp16_report", [])]


def factor_text(value: Any) -> str:
    """A factor as a fraction, or the range of a per-block list."""
    values = value if isinstance(value, list) else [value]
    first, last = (str(Fraction(v).limit_denominator(1 << 24)) for v in (max(values), min(values)))
    return first if first == last else f"{first} to {last} per block"


def format_report(report: Json) -> str:
    """The report as text: the verdict and what to do, one line per block with its level, what ran, the messages."""
    factors, summary, said = report.get("factors") or {}, report["summary"], messages(report)
    wide = report["stream_dtype"] in WIDE_DTYPES
    scale = ", ".join(f"{name} {factor_text(factors[name])}" for name in ("c", "s_attn", "s_ffn") if name in factors)
    lines = [text for field in ("verdict", "remedy") if (text := (report.get(field) or {}).get("text"))]
    lines.append(
        f"fix {report['mode']}, engine {report.get('engine')}, compute {report['compute_dtype']}, "
        f"stream {report['stream_dtype']}, {report['model_calls']} model calls" + (f", {scale}" if scale else "")
    )
    lines.append(
        f"{'block':<10}{'level':<12}{'max |x|':>12}{'margin':>12}{'NaN/inf':>12}{'saturated':>11}{'clamped':>9}"
        f"{'> ' + format(report.get('threshold') or 4096, 'g'):>9}"
    )
    for block in report["blocks"]:
        peak = "NaN/inf" if block["max_abs"] is None else f"{block['max_abs']:.4g}"
        margin = "-" if wide or block["headroom_bits"] is None else f"{block['headroom_bits']:.1f} bits"
        saturated = "-" if wide else block["saturated"]
        lines.append(
            f"{block['name']:<10}{LEVELS.get(block.get('level'), '?'):<12}{peak:>12}{margin:>12}"
            f"{block['non_finite']:>12}{saturated:>11}{block['clamped']:>9}{block['over']:>9}"
        )
    peak = "NaN/inf" if summary["peak"] is None else f"{summary['peak']:.4g}"
    lines.append(
        f"largest value {peak} in {summary['block']}: {summary['non_finite']} NaN/inf, "
        f"{summary['saturated']} {'beyond fp16' if wide else 'saturated'}, {summary['clamped']} clamped"
    )
    lines += [
        f"step {r['step']} was computed again with {r['rung']}: {r['reason']}" for r in report.get("rescues") or []
    ]
    # what became of the image stands in the first line
    lines += [f"{m['severity']}: {m['text']}" for m in said if m.get("key") not in CONSEQUENCES]
    return "\n".join(lines)


def messages(report: Json) -> list[Json]:
    """The report's messages; the warnings of an older server, which sent no more."""
    return report.get("messages") or [{"severity": "warn", "text": text} for text in report.get("warnings") or []]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Queue an API workflow on ComfyUI and print its MOSS saturation report."
    )
    parser.add_argument(
        "workflow",
        type=Path,
        help="a workflow in API format, such as moss_fp16_headless.json, or the body of a POST /prompt; - for stdin",
    )
    parser.add_argument("--server", default="127.0.0.1:8188", help="host:port or an address (default %(default)s)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NODE.INPUT=VALUE",
        help="change an input; NODE is an id, a title or a class name (may be repeated)",
    )
    parser.add_argument("--json", action="store_true", help="print the reports as JSON, not as tables")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument("--timeout", type=float, help="give up after this many seconds (default: never)")
    return parser.parse_args(argv)


def check_timeout(timeout: float | None) -> None:
    """ClientError for what is no time to wait; beyond 1e9 s a socket takes no time-out."""
    if timeout is not None and not 0 < timeout <= 1e9:
        raise ClientError(f"--timeout must be a number of seconds above 0 and up to 1e9, not {timeout:g}.")


def no_report(workflow: Json, failed: bool) -> str:
    """Why a job left no report."""
    if all(node["class_type"] != REPORT_NODE for node in workflow.values()):
        return f"The job has no {REPORT_NODE} node, so there is no report."
    return "The job failed before its report." if failed else "The job's report node gave no report."


def say(text: str, stream: TextIO) -> None:
    """Print; where the reader of a pipe has gone (`| head`), what is left is for nobody."""
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # or Python would try again at its end, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def show_what_can_be_shown() -> None:
    """Let a pipe or console whose encoding lacks a character show `?` for it, instead of failing after the job."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(ValueError):  # closed by whoever started us
                stream.reconfigure(errors="replace")


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    show_what_can_be_shown()
    arguments = parse_arguments(argv)
    try:
        check_timeout(arguments.timeout)
        client = ComfyClient(arguments.server)
        workflow, rest = load_job(arguments.workflow)
        for setting in arguments.set:
            apply_setting(workflow, setting, client)
        entry = run(client, workflow, not arguments.quiet, arguments.timeout, rest)
    except ClientError as error:
        print(error, file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("Interrupted; the job was cancelled on the server too.", file=sys.stderr)
        return 1
    found, reason = reports(entry), failure(entry)
    tables = "\n\n".join(map(format_report, found)) or no_report(workflow, failed=reason is not None)
    say(json.dumps(found, indent=1) if arguments.json else tables, sys.stdout)
    if reason:
        say(reason, sys.stderr)
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
