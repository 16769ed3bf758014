"""The typed report: levels, outcome, verdict and messages, and that chart and client show the level they are given."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from comfy_server import load_client
from repo import ROOT
from reports import FIX, FOLDER, LOADER, RESCUE, SAMPLES, report, reports, rows, samples

from fold.report.counters import BlockStats
from fold.report.messages import PLACEHOLDER, TEXTS, Message, by_importance, message, named
from fold.report.report import headroom_bits, level_of
from fold.report.words import bars_of, counts, fact, notes, setup, title
from fold.scaling.factors import Factors
from fold.scaling.plan import StreamPlan

INF, NAN = float("inf"), float("nan")
FILES = sorted(FOLDER.glob("*.json"))
#: What every reader shows for the reports in tests/data/reports, block by block. The page's test has the same list.
LEVELS = json.loads((FOLDER.parent / "report_levels.json").read_text("utf-8"))


def stored(name: str) -> dict[str, Any]:
    return dict(json.loads((FOLDER / f"{name}.json").read_text("utf-8")))


# ---- the set of reports --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(reports()))
def test_the_stored_reports_are_what_is_made_today(name: str) -> None:
    assert stored(name) == reports()[name].to_json(), "run tests/tools/reports.py"


def test_every_level_and_outcome_is_among_them() -> None:
    found = [stored(path.stem) for path in FILES]
    assert {block["level"] for one in found for block in one["blocks"]} == {"ok", "low", "saturated", "not_finite"}
    assert {one["outcome"] for one in found} == {"ok", "rescued", "saturated", "broken", "unknown"}
    assert {one["state"] for one in found} >= {"done", "failed", "interrupted"}
    assert set(LEVELS) == {path.stem for path in FILES}


@pytest.mark.parametrize("name", sorted(LEVELS))
def test_report_chart_and_client_agree_on_the_level_of_every_block(name: str) -> None:
    found, wanted = stored(name), LEVELS[name]
    assert [block["level"] for block in found["blocks"]] == wanted
    assert [bar.level for bar in bars_of(found)] == wanted
    client = load_client()
    lines = client.format_report(found).splitlines()
    shown = [line.split()[1] for line in lines if re.match(r"(text|layer)\.\d+ ", line)]
    assert shown == [client.LEVELS[level] for level in wanted]


# ---- levels, outcome -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peak", "level"),
    [(0.0, "ok"), (8188.0, "ok"), (8188.1, "low"), (65503.0, "low"), (65504.0, "saturated"), (INF, "not_finite")],
)
def test_the_level_of_a_block_in_fp16_and_in_a_wider_stream(peak: float, level: str) -> None:
    block = BlockStats("layer.0", peak, 0, 0, 0, 0)
    assert level_of(block, limited=True) == level
    assert level_of(block, limited=False) == ("not_finite" if peak == INF else "ok")


def test_counts_decide_the_level_where_the_peak_does_not() -> None:
    assert level_of(BlockStats("a", 5.0, 0, 1, 0, 0), limited=True) == "saturated"
    assert level_of(BlockStats("a", 5.0, 0, 1, 0, 0), limited=False) == "ok"
    assert level_of(BlockStats("a", 5.0, 0, 0, 0, 1), limited=False) == "not_finite"


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        ({}, "ok"),
        ({"rows": rows(112.0, 65000.0)}, "ok"),
        ({"rows": rows(112.0, 65504.0)}, "saturated"),
        ({"rows": rows(112.0, 65504.0), "rescues": [RESCUE]}, "saturated"),
        ({"rows": rows(112.0, INF), "finite": None, "state": "running"}, "broken"),
        ({"rows": rows(112.0, INF), "finite": True}, "saturated"),
        ({"finite": False}, "broken"),
        ({"rescues": [RESCUE]}, "rescued"),
        ({"rescues": [RESCUE], "finite": False}, "broken"),
        ({"rows": rows(0.0, 0.0)}, "unknown"),
        ({"rows": rows(0.0, 0.0), "state": "running"}, "ok"),
        ({"counted": False}, "unknown"),
        ({"counted": False, "finite": False}, "broken"),
        ({"rows": rows(112.0, 131008.0, saturated=2), "dtype": torch.bfloat16}, "ok"),
        ({"rows": rows(112.0, 131008.0, saturated=2), "dtype": torch.float32}, "ok"),
        ({"shown": False}, "ok"),
        ({"rows": rows(112.0, 65504.0), "shown": False}, "saturated"),
    ],
)
def test_outcome_is_what_became_of_the_image(given: dict[str, Any], outcome: str) -> None:
    found = report(given.pop("rows", rows(112.0, 640.0)), **given)
    assert found.outcome == outcome
    assert found.blocks == () or given.get("shown", True)


def test_headroom_is_the_doublings_left() -> None:
    assert headroom_bits(65504.0) == 0.0
    assert headroom_bits(65504.0 / 8) == 3.0
    assert headroom_bits(0.0) is None
    assert headroom_bits(INF) is None


def test_the_json_has_every_field_and_no_infinity() -> None:
    found = report((BlockStats("text.0", 4096.0, 0, 0, 0, 0), BlockStats("layer.0", INF, 3, 2, 1, 4))).to_json()
    json.dumps(found, allow_nan=False)
    assert found["schema"] == "moss_fp16.report/1" and found["state"] == "done"
    assert found["blocks"][1]["max_abs"] is None and found["blocks"][1]["headroom_bits"] is None
    assert found["summary"] == {
        "peak": None,
        "block": "layer.0",
        "headroom_bits": None,
        "saturated": 2,
        "clamped": 1,
        "non_finite": 4,
    }
    assert report(()).to_json()["summary"]["block"] is None


# ---- messages ------------------------------------------------------------------------------------------------------


def test_what_became_of_the_image_and_the_remedy_come_first() -> None:
    fault = message("input_fault_latent")
    found = report(rows(1.0, INF), finite=False, messages=[message("no_fix"), fault], advise=lambda outcome: FIX)
    first, second = found.messages
    assert first.text.startswith("The image is black or broken: the model was given NaN or infinity. Set fix = auto")
    assert second == fault
    assert found.warnings == [first.text, second.text]
    assert found.to_json()["remedy"]["action"] == {"node": "source", "input": "fix", "value": "auto"}


def test_the_cause_of_a_broken_image() -> None:
    def cause(*peaks: float, **given: Any) -> str:
        return str(report(rows(*peaks), finite=False, **given).to_json()["verdict"]["values"]["cause"]["key"])

    assert cause(1.0, INF) == "cause_range"
    assert cause(1.0, 640.0) == "cause_output"
    assert cause(1.0, INF, messages=[message("model_broken")]) == "cause_model"
    assert cause(1.0, INF, messages=[message("weights_broken", weights=("a.weight",), dtype="fp16")]) == "cause_weights"
    assert cause(1.0, INF, messages=[message("input_fault_cond", name="text")]) == "cause_input"


def test_a_run_that_ended_in_fp32_says_so() -> None:
    found = report(rows(112.0, 131008.0), dtype=torch.float32)
    assert found.compute_dtype == found.stream_dtype == "fp32"


def test_blocks_that_are_not_shown_are_not_summed_either() -> None:
    assert report(rows(112.0, 640.0), shown=False).summary.block is None


def test_before_the_run_is_over_nothing_is_said_of_the_finished_image() -> None:
    for state in ("running", "interrupted", "failed"):
        found = report(rows(1.0, INF), finite=None, state=state)
        assert found.outcome == "broken" and found.messages == ()


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({"state": "running", "finite": None}, ["no_fix"]),
        ({}, ["no_fix_needed"]),
        ({"rescues": [RESCUE]}, []),
        ({"finite": False}, ["black_image"]),
        ({"counted": False}, ["no_fix"]),
    ],
)
def test_that_no_fix_is_active_is_said_only_while_it_matters(given: dict[str, Any], keys: list[str]) -> None:
    found = report(rows(112.0, 640.0), "none", messages=[message("no_fix")], **given)
    assert [said.key for said in found.messages] == keys
    assert len(found.warnings) == len(keys) - (keys == ["no_fix_needed"])


def online(*c: float, **rest: Any) -> StreamPlan:
    return StreamPlan("online", Factors(c), **rest)


@pytest.mark.parametrize(
    ("plan", "given", "outcome", "keys"),
    [
        (online(2**-4), {}, "ok", []),
        (online(2**-12), {}, "ok", []),
        (online(2**-13), {}, "unknown", ["small_factor"]),
        (online(2**-4, 2**-20, 2**-4), {}, "unknown", ["small_factor"]),
        (online(2**-8, baked=Factors((2**-4,))), {}, "ok", []),
        (online(2**-8, baked=Factors((2**-5,))), {}, "unknown", ["small_factor"]),
        (online(2**-20), {"dtype": torch.bfloat16}, "ok", []),
        (online(2**-20), {"dtype": torch.float32}, "ok", []),
        (StreamPlan("fp32_residual", Factors((2**-20,))), {}, "ok", []),
        (online(2**-16), {"rescues": [RESCUE]}, "unknown", ["small_factor"]),
        (online(2**-12), {"rescues": [RESCUE]}, "rescued", []),
        (online(2**-20), {"finite": False}, "broken", ["black_image", "small_factor"]),
        (online(2**-20), {"counted": False}, "unknown", ["small_factor"]),
        (online(2**-4, eps="stock"), {}, "ok", []),
        (online(2**-5, eps="stock"), {}, "ok", ["stock_eps"]),
        (online(2**-5, eps="stock"), {"dtype": torch.float32}, "ok", ["stock_eps"]),
        (StreamPlan("weights", baked=Factors((2**-6,)), eps="stock"), {}, "ok", ["stock_eps"]),
        (online(2**-13, eps="stock"), {}, "unknown", ["small_factor", "stock_eps"]),
    ],
)  # fmt: skip
def test_a_factor_that_loses_what_no_counter_sees_is_said(
    plan: StreamPlan, given: dict[str, Any], outcome: str, keys: list[str]
) -> None:
    found = report(rows(112.0, 640.0), plan=plan, **given)
    assert (found.outcome, [said.key for said in found.messages]) == (outcome, keys)
    assert len(found.warnings) == len(keys)
    assert (found.verdict.key == "verdict_small_factor") == (outcome == "unknown")


def test_the_remark_names_the_scale_that_the_stream_has() -> None:
    said = report(rows(1.0), plan=online(2**-8, 2**-9, baked=Factors((2**-4,)))).messages[0].text
    assert said.startswith("With a factor of 1/8192 ordinary values") and "a c of 1/4096 or more" in said


def test_a_batch_with_broken_inputs_says_that_some_images_are_broken() -> None:
    found = report(rows(112.0, 640.0), finite=False, messages=[message("input_fault_latent_some")])
    assert [said.key for said in found.messages] == ["some_images_broken", "input_fault_latent_some"]


def test_a_message_is_said_once_and_in_the_order_of_importance() -> None:
    said = [message("no_fix"), message("model_broken"), message("no_fix")]
    assert [one.key for one in by_importance(said)] == ["model_broken", "no_fix", "no_fix"]
    assert [one.key for one in report(rows(1.0), finite=None, state="running", messages=said).messages] == [
        "model_broken", "no_fix",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "values"),
    [("no_such", {}), ("remedy_fix", {"value": "auto"}), ("model_broken", {"x": 1}), ("error", {"Error": "a"})],
)
def test_a_message_that_the_table_does_not_have_is_refused(key: str, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=key):
        Message(key, values)


def test_values_are_put_in_once() -> None:
    assert message("error", error="a {node} in braces").text == "a {node} in braces"
    assert message("with_remedy", said=message("model_broken"), remedy="").text.endswith("broken.")


def test_a_message_as_json_holds_its_values_as_messages() -> None:
    found = message("remedy_fix", value="auto", node=LOADER).to_json()
    assert found == {
        "key": "remedy_fix",
        "values": {"value": "auto", "node": {"key": "node_loader", "values": {}, "text": "Load MOSS-Image (FP16)"}},
        "text": "Set fix = auto on Load MOSS-Image (FP16).",
        "severity": "info",
    }


def test_a_list_of_blocks_is_cut_and_says_so() -> None:
    names = [f"layer.{i}" for i in range(6)]
    assert message("reason_stream", blocks=named(names[:3])).text == "layer.0, layer.1, layer.2 out of range"
    assert message("reason_stream", blocks=named(names)).text == "layer.0, layer.1, layer.2 and 3 more out of range"


def test_every_sentence_ends_as_one_and_fragments_do_not() -> None:
    fragments = ("cause_", "node_", "reason_", "suspect_", "and_more", "verdict_", "error")
    for key, (_, text) in TEXTS.items():
        assert text.endswith((".", "{remedy}")) != (key.startswith(fragments) and key != "error_memory"), key


# ---- in words ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "verdict", "number"),
    [
        ("in_range", "OK: the image is not affected by fp16", "largest value 3904 in layer.1, margin 4.1 bits"),
        ("low", "OK: the image is not affected by fp16",
         "largest value 6.5e4 in layer.3, margin 0.0007 bits (small)"),
        ("rescued", "Rescued, the image is fine: step 2 was computed again with online c=1/256",
         "largest value 3904 in layer.1, margin 4.1 bits"),
        ("saturated", "Saturated: values hit fp16's limit, so the image may be wrong",
         "layer.0 reached fp16's limit of 65504"),
        ("overflow", "Broken: the image is black or broken, the model left fp16's range",
         "NaN or infinity in layer.0, layer.1, layer.2 and 1 more"),
        ("bf16", "OK: the image is not affected by fp16",
         "largest value 9.0e4 in layer.0, beyond fp16, but the stream is bf16"),
        ("interrupted", "Interrupted at step 8 of 20", "largest value 3904 in layer.1, margin 4.1 bits"),
        ("failed", "Failed: RuntimeError: boom", "largest value 640 in layer.0, margin 6.7 bits"),
        ("not_counted", "Not measured: nothing was counted in this run", "no largest values were measured"),
        ("input_fault", "Broken: the image is black or broken, the model was given NaN or infinity",
         "NaN or infinity in layer.0, layer.1, layer.2 and 1 more"),
    ],
)  # fmt: skip
def test_the_verdict_and_the_number_behind_it(name: str, verdict: str, number: str) -> None:
    found = stored(name)
    assert title(found) == verdict
    assert fact(found, bars_of(found)) == number
    assert load_client().format_report(found).splitlines()[0] == verdict


def test_what_ran_the_counts_and_the_notes() -> None:
    assert setup(stored("clamped")).split("  ·  ") == ["fix online", "engine native", "fp16", "c 1/4"]
    assert counts(stored("clamped")) == "saturated 9, clamped 4"
    assert counts(stored("in_range")) == "no value saturated, none NaN/inf"
    assert counts(stored("rescued")) == "no value saturated, none NaN/inf, rescued 1"
    assert counts(stored("overflow")) == "NaN/inf 28"
    assert counts(stored("bf16")) == "no value saturated, none NaN/inf, beyond fp16 5"
    assert notes(stored("overflow")) == ["Set fix = auto on Load MOSS-Image (FP16)."]
    assert notes(stored("input_fault"))[1].startswith("The latent held NaN or infinity before the model was called")
    assert notes(stored("rescued")) == [
        "Set fix = auto on Load MOSS-Image (FP16).",
        "Step 2 was computed again with online c=1/256 (layer.0, layer.1 out of range)",
    ]


# ---- in every language ---------------------------------------------------------------------------------------------


def locale(name: str) -> dict[str, str]:
    table = json.loads((ROOT / "locales" / name / "main.json").read_text("utf-8"))
    return dict(table["mossFP16"]["message"])


def test_the_english_locale_says_what_the_messages_say() -> None:
    assert locale("en") == {key: text for key, (_, text) in TEXTS.items()}, "run tests/tools/english_locale.py"


def test_every_message_is_there_in_chinese_with_the_same_values() -> None:
    chinese = locale("zh")
    assert list(chinese) == list(TEXTS)
    for key, (_, text) in TEXTS.items():
        assert sorted(PLACEHOLDER.findall(chinese[key])) == sorted(PLACEHOLDER.findall(text)), key
        own = PLACEHOLDER.sub("", chinese[key])
        assert re.search(r"[\u4e00-\u9fff]", own) or not PLACEHOLDER.sub("", text).strip(), f"{key} is not translated"
        assert not re.search(r"[,;:!?()]|\.$|\. ", own.replace("MOSS-Image", "")), f"{key} has ASCII punctuation"


def test_the_samples_of_messages_are_what_is_made_today() -> None:
    """The page's test says each of them in both languages."""
    stored_samples = json.loads(SAMPLES.read_text("utf-8"))
    assert stored_samples == [sample.to_json() for sample in samples()], "run tests/tools/reports.py"
    assert {sample["key"] for sample in stored_samples} == set(TEXTS)
