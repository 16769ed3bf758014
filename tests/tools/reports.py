"""The set of reports in tests/data/reports: one of every kind, for whoever shows a report.

python tests/tools/reports.py writes them anew.
"""

from __future__ import annotations

import json
import math

import torch
from repo import DATA

from fold.report.counters import BlockStats
from fold.report.messages import message
from fold.report.report import Remedy, Report, Rescue, SelfCheck, Setting, make_report
from fold.scaling.factors import Factors
from fold.scaling.plan import StreamPlan

FOLDER = DATA / "reports"
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
            rows(112.0, 640.0), self_check=SelfCheck("failed", 0.5, "a control input"),
            messages=[
                message(
                    "self_check_failed", difference="5.0e-01", suspects=[message("suspect_control")],
                    rung="fp32_residual",
                )
            ],
        ),
    }  # fmt: skip


def write() -> None:
    """All of them, and one whose levels do not follow from its numbers: readers take the level as it is given."""
    FOLDER.mkdir(exist_ok=True)
    made = {name: found.to_json() for name, found in reports().items()}
    told = made["in_range"]
    levels = ("not_finite", "saturated", "low")
    made["told"] = told | {
        "blocks": [block | {"level": level} for block, level in zip(told["blocks"], levels, strict=True)]
    }
    for name, found in made.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    write()
