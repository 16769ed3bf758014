"""The ``kohakumoss_fp16_fix`` record: a JSON string in a file's metadata saying which fold its weights carry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from ..errors import MossError
from .factors import IDENTITY, Factors, check_factor

RECORD_KEY = "kohakumoss_fp16_fix"
_MAX_LENGTH = 2**20
_KNOWN = ("c", "via", "s_attn", "s_ffn", "eps")


class FoldRecord(NamedTuple):
    """The uniform fold that a file's weights carry.

    ``eps`` is "stock" (written for runtimes that keep the norm eps) or "exact" (eps times c squared); ``via`` is
    always "gate". ``extra`` holds fields this version does not know, as (name, value); they are kept when the record is
    written again.
    """

    c: float
    s_attn: float = 1.0
    s_ffn: float = 1.0
    eps: str = "stock"
    via: str = "gate"
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def factors(self) -> Factors:
        """The recorded fold as factors."""
        return Factors((self.c,), (self.s_attn,), (self.s_ffn,))

    @classmethod
    def parse(cls, text: str, where: str) -> FoldRecord:
        """Read the record's JSON; MossError naming ``where`` (a file) and the field that is wrong."""
        place = f"the {RECORD_KEY} record of {where}"
        if len(text) > _MAX_LENGTH:
            raise MossError(f"{_start(place)} has {len(text)} characters, more than any record has.")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise MossError(f"{_start(place)} is not valid JSON: write the file again, or remove the record.") from None
        if not isinstance(value, dict):
            raise MossError(f"{_start(place)} must be a JSON object, but it is a {_json_type(value)}.")
        if "c" not in value:
            raise MossError(f"{_start(place)} has no c: the factor of the fold is unknown.")
        via, eps = value.get("via", "gate"), value.get("eps", "stock")
        if via != "gate":
            raise MossError(f"via in {place} must be 'gate', but it is {_short(via)}: this kind of fold is unknown.")
        if eps not in ("stock", "exact"):
            raise MossError(f"eps in {place} must be 'stock' or 'exact', but it is {_short(eps)}.")
        return cls(
            c=check_factor(value["c"], "c", place),
            s_attn=check_factor(value.get("s_attn", 1.0), "s_attn", place),
            s_ffn=check_factor(value.get("s_ffn", 1.0), "s_ffn", place),
            eps=eps,
            via=via,
            extra=tuple((key, item) for key, item in value.items() if key not in _KNOWN),
        )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str] | None, where: str) -> FoldRecord | None:
        """The record in a file's metadata, or None when it has none."""
        text = (metadata or {}).get(RECORD_KEY)
        return None if text is None else cls.parse(text, where)

    @classmethod
    def of(cls, factors: Factors, extra: tuple[tuple[str, Any], ...] = ()) -> FoldRecord:
        """The record of a uniform fold; MossError for per-block factors, which a file cannot carry."""
        if not factors.uniform:
            raise MossError("Per-block factors cannot be written into a file: give one value for c, s_attn and s_ffn.")
        return cls(factors.c[0], factors.s_attn[0], factors.s_ffn[0], extra=extra)

    def to_dict(self) -> dict[str, Any]:
        """The record's fields in their written order, unknown ones last."""
        known = {"c": self.c, "via": self.via, "s_attn": self.s_attn, "s_ffn": self.s_ffn, "eps": self.eps}
        return known | dict(self.extra)

    def to_json(self) -> str:
        """The metadata string."""
        return json.dumps(self.to_dict())


class StoredFold(NamedTuple):
    """The fold of the file that weights come from: its record (None: no fold), and whether loading took it out."""

    record: FoldRecord | None = None
    unfolded: bool = False

    @property
    def in_weights(self) -> Factors:
        """The fold that the loaded weights carry."""
        return IDENTITY if self.record is None or self.unfolded else self.record.factors

    @property
    def kept(self) -> bool:
        """Whether the loaded weights carry a recorded fold."""
        return self.record is not None and not self.unfolded

    @property
    def eps(self) -> Literal["exact", "stock"]:
        """The eps that the loaded weights were made for."""
        return "stock" if self.record is not None and self.kept and self.record.eps == "stock" else "exact"


NO_FOLD = StoredFold()


def _start(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _json_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case list():
            return "list"
        case str():
            return "string"
        case _:
            return "number"


def _short(value: object) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
