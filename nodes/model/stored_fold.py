"""Where a MODEL's weights came from, and what fold they carry."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...fold.checkpoint.reader import open_checkpoint
from ...fold.errors import MossError
from ...fold.scaling.record import FoldRecord

KEY = "moss_fp16_source"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """The recorded fold of the file, and whether the loader took it out of the weights."""

    record: FoldRecord | None = None
    unfolded: bool = False


def source_of(model: Any) -> Source:
    """What our loader noted; for a MODEL of another loader, the header of the file that it says it came from."""
    noted = model.get_attachment(KEY)
    if isinstance(noted, Source):
        return noted
    file = source_file(model)
    if file is None:
        return Source()
    try:
        with open_checkpoint(file) as checkpoint:
            return Source(checkpoint.record)
    except MossError as error:
        # a file that some loader can read and we cannot: its fold is unknown, which the log should say
        log.warning("The fold record of this MODEL could not be read, so none is assumed: %s", error)
        return Source()


def source_file(model: Any) -> Path | None:
    """The safetensors file in the MODEL's `cached_patcher_init`, which names its loader and that loader's arguments."""
    init = getattr(model, "cached_patcher_init", None)
    for argument in init[1] if init else ():
        if isinstance(argument, str) and argument.endswith(".safetensors") and Path(argument).is_file():
            return Path(argument)
    return None
