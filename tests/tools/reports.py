"""The set of reports in tests/data/reports: one of every kind, for whoever shows a report.

python tests/tools/reports.py writes them anew.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from repo import DATA

from fold.report.counters import BlockStats
from fold.report.messages import TEXTS, Message, message, named
from fold.report.report import Remedy, Report, Rescue, SelfCheck, Setting, make_report
from fold.scaling.factors import Factors
from fold.scaling.plan import StreamPlan

FOLDER = DATA / "reports"
#: One message of every key, with what really fills it.
SAMPLES = DATA / "messages.json"
LOADER = message("node_loader")
FIX = Remedy(message("remedy_fix", value="auto", node=LOADER), Setting("fix", "auto"))
RESCUE = Rescue(2, 0.9, "online c=1/256", message("reason_stream", blocks=("layer.0", "layer.1")))


def rows(*peaks: float, over: int = 0, saturated: int = 0, clamped: int = 0) -> tuple[BlockStats, ...]:
    """text.0 and a joint block per further peak; an infinite one counts 7 values that are not finite."""
    names = ("text.0", *(f"layer.{i}" for i in range(len(peaks) - 1)))
    return tuple(
        BlockStats(
            name,
            peak,
            over if peak > 4096 else 0,
            saturated if 65504 <= peak < math.inf else 0,
            clamped if peak == 65504 else 0,
            0 if math.isfinite(peak) else 7,
        )
        for name, peak in zip(names, peaks, strict=True)
    )


def report(found: tuple[BlockStats, ...], mode: str = "online", **rest: object) -> Report:
    """A finished run of eight steps in fp16, with what is given in place of that."""
    factors = Factors((1 / 16,)) if mode == "online" else Factors()
    given = {
        "plan": StreamPlan(mode, factors),  # type: ignore[arg-type]
        "dtype": torch.float16,
        "finite": True,
        "rows": found,
    } | rest
    return make_report(
        node_id="1", engine="native", model_calls=8, steps=8, guard="rescue", **given,  # type: ignore[arg-type]
        input_dtypes={"latents": "default", "cond": "default", "timestep": "default"}, param_dtypes={},
    )  # fmt: skip


def reports() -> dict[str, Report]:
    """By name of the file."""
    overflow = rows(112.0, math.inf, math.inf, math.inf, math.inf)
    clamp = StreamPlan("online", Factors((1 / 4,)), clamp=65504.0)
    return {
        "in_range": report(rows(112.0, 640.0, 3904.0)),
        "low": report(rows(112.0, 8188.0, 8200.0, 40000.0, 65472.0, over=3)),
        "saturated": report(rows(112.0, 65504.0, 640.0, over=9, saturated=9), advise=lambda outcome: FIX),
        "clamped": report(rows(112.0, 65504.0, 640.0, over=9, saturated=9, clamped=4), plan=clamp),
        "overflow": report(
            overflow, "none", finite=False, messages=[message("no_fix")], advise=lambda outcome: FIX
        ),
        "rescued": report(
            rows(112.0, 640.0, 3904.0), rescues=[RESCUE], messages=[message("no_fix")], advise=lambda outcome: FIX
        ),
        "fp32_stream": report(rows(112.0, 131008.0, math.inf, saturated=5), "fp32_residual", finite=False),
        "bf16": report(rows(112.0, 90000.0, saturated=5), "none", dtype=torch.bfloat16),
        "not_counted": report((), counted=False),
        "interrupted": report(rows(112.0, 640.0, 3904.0), state="interrupted", total_steps=20, finite=None),
        "failed": report(
            rows(112.0, 640.0), state="failed", finite=None, error=message("error", error="RuntimeError: boom")
        ),
        "input_fault": report(
            overflow, finite=False, messages=[message("input_fault_latent")],
            advise=lambda outcome: Remedy(message("remedy_input")),
        ),
        "self_check": report(
            rows(112.0, 640.0),
            self_check=SelfCheck("failed", 0.5, 1e-5, "a strip of the latent (64 x 2 of 64 x 64)", "a control input"),
            messages=[
                message(
                    "self_check_failed", name="MossImage", suspects=[message("suspect_control")],
                    rung="online c=1/16", off="50.0%", instead="fp32",
                )
            ],
        ),
    }  # fmt: skip


def samples() -> list[Message]:
    """A message of every key."""
    reason = message("reason_stream", blocks=named([f"layer.{i}" for i in range(5)]))
    cause, remedy = (
        message("cause_range"),
        message("remedy_save_steps", settings=("c = 1/256", "s_ffn = 1/64"), node=LOADER),
    )
    filled: dict[str, dict[str, Any]] = {
        "black_image": {"cause": cause, "remedy": FIX.said},
        "some_images_broken": {"cause": message("cause_input"), "remedy": message("remedy_input")},
        "image_affected": {"cause": message("cause_limit", blocks=("layer.0",)), "remedy": FIX.said},
        "input_fault_between": {"call": 2},
        "input_fault_between_some": {"call": 2},
        "input_fault_cond": {"name": "text"},
        "weights_broken": {"weights": ("layers.1.proj.ffn_down.weight",), "dtype": "fp16"},
        "out_of_range": {"step": 1, "reason": reason},
        **{
            key: {
                "name": "MossImage",
                "suspects": (message("suspect_control"), message("suspect_patch", name="double_block (pack.Patch)")),
                "rung": "online c=1/16",
                "off": "50.0%",
                **({"instead": "fp32"} if key == "self_check_failed" else {}),
            }
            for key in ("self_check_failed", "rung_left_out", "self_check_accepted", "self_check_refused")
        },
        "rescued": {"step": 1, "rung": "online c=1/256", "reason": reason},
        "small_factor": {"c": "1/1048576", "least": "1/4096"},
        "stock_eps": {"c": "1/1024"},
        "param_dtypes_unused": {"parameters": named([f"layers.{i}.proj.o" for i in range(9)])},
        "with_remedy": {"said": message("rescued", step=1, rung="online c=1/16", reason=reason), "remedy": remedy},
        "cause_limit": {"blocks": ("layer.0", "layer.1")},
        "cause_clamp": {"blocks": ("layer.0", "layer.1")},
        "remedy_fix": {"value": "auto", "node": message("node_fix")},
        "remedy_guard": {"node": LOADER},
        "remedy_clamp": {"node": LOADER},
        "remedy_save_steps": {"settings": ("c = 1/256", "s_ffn = 1/64"), "node": LOADER},
        "remedy_mode": {"value": "auto"},
        "remedy_smaller_c": {"value": "1/256"},
        "reason_stream": {"blocks": ("layer.0",)},
        "reason_stream_attn": {"blocks": ("layer.0", "layer.1")},
        "reason_stream_ffn": {"blocks": named([f"layer.{i}" for i in range(4)])},
        "suspect_conditioning": {"name": "control_map"},
        "suspect_patch": {"name": "double_block (pack.Patch)"},
        "suspect_replace": {"name": "('double_block', 3) (pack.Patch)"},
        "and_more": {"names": ("layer.0", "layer.1", "layer.2"), "n": 3},
        "error": {"error": "RuntimeError: boom"},
        "verdict_rescued_once": {"step": 1, "rung": "online c=1/16"},
        "verdict_rescued": {"n": 3, "rung": "online c=1/256"},
        "verdict_broken": {"cause": cause},
        "verdict_failed": {"error": message("error", error="RuntimeError: boom")},
        "verdict_interrupted": {"step": 3, "total": 8},
    }
    return [Message(key, filled.get(key, {})) for key in TEXTS]


def write() -> None:
    """All of them, and one whose levels do not follow from its numbers: readers take the level as it is given."""
    FOLDER.mkdir(exist_ok=True)
    made = {name: found.to_json() for name, found in reports().items()}
    told = made["in_range"]
    levels = ("not_finite", "saturated", "low")
    made["told"] = told | {
        "blocks": [block | {"level": level} for block, level in zip(told["blocks"], levels, strict=True)]
    }
    SAMPLES.write_text(json.dumps([sample.to_json() for sample in samples()], indent=1) + "\n", "utf-8")
    for name, found in made.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    write()
