"""What the pack has to say about a run, as key and values with an English sentence, so that a page can translate it.

`TEXTS` holds every sentence once. A value that fills a placeholder is a text, a number, a list of those, or a message
of its own. Chinese is in locales/zh/main.json under mossFP16.message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["info", "warn", "error"]

#: key -> severity, English. The order is the order of importance: what became of the image first, its causes after.
TEXTS: Mapping[str, tuple[Severity, str]] = {
    # ---- remarks and toasts
    "black_image": ("error", "The image is black or broken: {cause}. {remedy}"),
    "some_images_broken": ("error", "Images of the batch are broken: {cause}. {remedy}"),
    "image_affected": ("warn", "The image may be wrong: {cause}. {remedy}"),
    "input_fault_latent": (
        "error",
        "The latent held NaN or infinity before the model was called: a node before the sampler made it, not the fp16 "
        "fix.",
    ),
    "input_fault_latent_some": (
        "error",
        "The latents of some images held NaN or infinity before the model was called: a node before the sampler made "
        "them, not the fp16 fix. The other images of the batch go on without them.",
    ),
    "input_fault_between": (
        "error",
        "What the model gave was finite up to call {call}, and the latent after it held NaN or infinity: guidance, a "
        "function after it (post-CFG) or the sampler made it, not the fp16 fix.",
    ),
    "input_fault_between_some": (
        "error",
        "What the model gave was finite up to call {call}, and the latents of some images after it held NaN or "
        "infinity: guidance, a function after it (post-CFG) or the sampler made it, not the fp16 fix. The other images "
        "of the batch go on without them.",
    ),
    "input_fault_cond": (
        "error",
        "The conditioning {name} held NaN or infinity before the model was called: the node that made it is to blame, "
        "not the fp16 fix.",
    ),
    "weights_broken": (
        "error",
        "Weights of the model hold NaN or infinity: {weights}. The model file is damaged, an adapter made them so, or "
        "they do not fit {dtype}.",
    ),
    "model_broken": (
        "error",
        "Even in fp32 the output holds NaN or infinity: the model, an adapter or the conditioning is broken.",
    ),
    "out_of_range": ("warn", "Step {step}: {reason} (guard is set to report, so nothing was done)."),
    "self_check_failed": (
        "warn",
        "This MOSS-Image class ({name}; {suspects}) is built otherwise than the fix knows: with {rung} a call came out "
        "{off} away from what the class itself computes, so the run went on with the class's own forward ({instead}); "
        "please send us this report and your ComfyUI's version.",
    ),
    "rung_left_out": (
        "warn",
        "This MOSS-Image class ({name}; {suspects}) is built otherwise than the fix knows: with {rung} a call came out "
        "{off} away from what the class itself computes, so the guard left that out; please send us this report and "
        "your ComfyUI's version.",
    ),
    "self_check_accepted": (
        "warn",
        "This MOSS-Image class ({name}; {suspects}) is built otherwise than the fix knows: with {rung} a call came out "
        "{off} away from what the class itself computes; accept_unproven is set, so it was kept.",
    ),
    "self_check_refused": (
        "error",
        "This MOSS-Image class ({name}; {suspects}) is built otherwise than the fix knows: with {rung} a call came out "
        "{off} away from what the class itself computes. Use fix = auto with engine = auto, or set accept_unproven if "
        "you want just this.",
    ),
    "not_proven": (
        "info",
        "The fix was not proven on this MOSS-Image class: no part of the call could be computed in fp32. At c and c/2 "
        "it agreed.",
    ),
    "rescued": ("info", "Step {step} was computed again with {rung}: {reason}."),
    "no_fix": (
        "warn",
        "No fix is active: MOSS-Image runs in fp16 as stored, and the base weights overflow there. Finetunes that were "
        "trained to stay in range need no fix; for any other file set fix = auto.",
    ),
    "no_fix_needed": ("info", "No fix was active, and this run needed none."),
    "small_factor": (
        "warn",
        "With a factor of {c} ordinary values of the stream fall below fp16's normal numbers and lose bits. Use a c of "
        "{least} or more, or fp32_residual.",
    ),
    "stock_eps": (
        "warn",
        "With eps = stock and a factor of {c} the norms' eps is no longer small next to the stream, which changes the "
        "image. Use eps = exact.",
    ),
    "param_dtypes_unused": (
        "warn",
        "The parameter dtypes of {parameters} had no effect: this MOSS-Image class runs them inside a fused kernel. "
        "Use engine = managed in MOSS FP16 Fix, or engine = builtin in Load MOSS-Image (FP16).",
    ),
    "with_remedy": ("info", "{said} {remedy}"),
    # ---- why the image is affected: fills {cause}
    "cause_range": ("info", "the model left fp16's range"),
    "cause_limit": ("info", "values hit fp16's limit of 65504 in {blocks}"),
    "cause_clamp": ("info", "the clamp limited values in {blocks}"),
    "cause_input": ("info", "the model was given NaN or infinity"),
    "cause_between": ("info", "guidance or the sampler made NaN or infinity"),
    "cause_weights": ("info", "weights of the model hold NaN or infinity"),
    "cause_model": ("info", "even in fp32 the output holds NaN or infinity"),
    "cause_output": ("info", "the model's output holds NaN or infinity"),
    # ---- what to do: the report's remedy, and what fills {remedy}
    "remedy_fix": ("info", "Set fix = {value} on {node}."),
    "remedy_guard": ("info", "Set guard = rescue on {node}: a step that leaves fp16's range is then computed again."),
    "remedy_clamp": ("info", "Switch clamp off on {node}: guard and fix then keep the values whole."),
    "remedy_save_steps": ("info", "To save the repeated steps set {settings} on {node}."),
    "remedy_input": ("info", "Check the nodes before the sampler; fp16 is not the cause."),
    "remedy_between": ("info", "Take guidance nodes out one by one, or try another sampler; fp16 is not the cause."),
    "remedy_weights": ("info", "Get the model file again, take LoRAs out one by one, or load it in bf16 or fp32."),
    "remedy_model": ("info", "Check the model file, and take LoRAs and patches out one by one; fp16 is not the cause."),
    "remedy_mode": ("info", "Run it again with --mode {value}."),
    "remedy_dtype": ("info", "Run it again with --dtype fp32, which tells a broken model from one out of range."),
    "remedy_smaller_c": ("info", "Run it again with a smaller factor, such as --c {value}."),
    # ---- the nodes that carry the settings: fills {node}
    "node_loader": ("info", "Load MOSS-Image (FP16)"),
    "node_fix": ("info", "MOSS FP16 Fix"),
    # ---- what a call showed: a rescue's reason, and what fills {reason}
    "reason_stream": ("info", "{blocks} out of range"),
    "reason_attn": ("info", "the output of o out of range"),
    "reason_ffn": ("info", "the output of ffn_down out of range"),
    "reason_stream_attn": ("info", "{blocks} out of range, and the output of o"),
    "reason_stream_ffn": ("info", "{blocks} out of range, and the output of ffn_down"),
    "reason_output": ("info", "the output holds NaN or infinity"),
    # ---- who could be writing to the stream: fills {suspects}
    "suspect_conditioning": ("info", "conditioning {name}"),
    "suspect_control": ("info", "a control input"),
    "suspect_patch": ("info", "block patch {name}"),
    "suspect_replace": ("info", "replace patch {name}"),
    "suspect_class": ("info", "a part of the class itself"),
    # ---- lists
    "and_more": ("info", "{names} and {n} more"),
    # ---- why a run failed
    "error_memory": ("error", "The GPU ran out of memory. Use a smaller image or batch, or close other programs."),
    "error": ("error", "{error}"),
    # ---- the verdict: the report's first line
    "verdict_ok": ("info", "OK: the image is not affected by fp16"),
    "verdict_rescued_once": ("info", "Rescued, the image is fine: step {step} was computed again with {rung}"),
    "verdict_rescued": ("info", "Rescued, the image is fine: {n} steps were computed again, the last with {rung}"),
    "verdict_saturated": ("warn", "Saturated: values hit fp16's limit, so the image may be wrong"),
    "verdict_broken": ("error", "Broken: the image is black or broken, {cause}"),
    "verdict_unknown": ("info", "Not measured: nothing was counted in this run"),
    "verdict_small_factor": ("warn", "Not known: with so small a factor fp16 loses bits, so the image may be wrong"),
    "verdict_failed": ("error", "Failed: {error}"),
    "verdict_interrupted": ("warn", "Interrupted at step {step} of {total}"),
}

#: What a verdict and a remedy say already.
CONSEQUENCES = ("black_image", "some_images_broken", "image_affected")
PLACEHOLDER = re.compile(r"\{(\w+)\}")
SHOWN = 3


@dataclass(frozen=True)
class Message:
    """One sentence of `TEXTS` with what fills it. Raises ValueError for a key or value that the table does not have."""

    key: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.key not in TEXTS:
            raise ValueError(f"{self.key} is not among the messages.")
        if set(PLACEHOLDER.findall(TEXTS[self.key][1])) != set(self.values):
            raise ValueError(f"The message {self.key} is not filled by {', '.join(self.values) or 'nothing'}.")

    @property
    def severity(self) -> Severity:
        return TEXTS[self.key][0]

    @property
    def text(self) -> str:
        """The English sentence."""
        return PLACEHOLDER.sub(lambda found: _english(self.values[found[1]]), TEXTS[self.key][1]).strip()

    def to_json(self) -> dict[str, Any]:
        """{key, values, severity, text}; a message among the values is {key, values, text}."""
        return {**_plain(self), "severity": self.severity}


def message(key: str, **values: Any) -> Message:
    """The message of that key. Raises ValueError as `Message` does."""
    return Message(key, values)


def _english(value: Any) -> str:
    match value:
        case Message():
            return value.text
        case list() | tuple():
            return ", ".join(map(_english, value))
        case _:
            return str(value)


def _plain(value: Any) -> Any:
    match value:
        case Message():
            values = {name: _plain(one) for name, one in value.values.items()}
            return {"key": value.key, "values": values, "text": value.text}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return value


def by_importance(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Sorted by the order of `TEXTS`; of the same key, by the order they were added in."""
    order = {key: place for place, key in enumerate(TEXTS)}
    return tuple(sorted(messages, key=lambda said: order[said.key]))


def named(names: Sequence[str]) -> Message | tuple[str, ...]:
    """A list of names as a value, cut after three: "layer.0, layer.1, layer.2 and 4 more"."""
    if len(names) <= SHOWN:
        return tuple(names)
    return message("and_more", names=tuple(names[:SHOWN]), n=len(names) - SHOWN)
