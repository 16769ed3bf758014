"""The fold of the file that a MODEL's weights come from."""

from __future__ import annotations

import logging
from pathlib import Path

from ...fold.checkpoint.header import is_safetensors
from ...fold.checkpoint.reader import open_checkpoint
from ...fold.errors import MossError
from ...fold.scaling.record import NO_FOLD, StoredFold
from .comfy_types import ModelPatcher

KEY = "moss_fp16_source"
log = logging.getLogger(__name__)


def stored_fold_of(model: ModelPatcher) -> StoredFold:
    """The fold that our loader noted on the MODEL; of another loader's MODEL, what its source file's header says."""
    noted = model.get_attachment(KEY)
    if isinstance(noted, StoredFold):
        return noted
    file = source_file(model)
    if file is None:
        return NO_FOLD
    try:
        with open_checkpoint(file) as checkpoint:
            return StoredFold(checkpoint.record)
    except MossError as error:
        # a file that some loader can read and we cannot: its fold is unknown, which the log should say
        log.warning("The fold record of this MODEL could not be read, so none is assumed: %s", error)
        return NO_FOLD


def source_file(model: ModelPatcher) -> Path | None:
    """The safetensors file in the MODEL's `cached_patcher_init`, which names its loader and that loader's arguments."""
    init = getattr(model, "cached_patcher_init", None)
    for argument in init[1] if init else ():
        if isinstance(argument, str) and is_safetensors(argument) and Path(argument).is_file():
            return Path(argument)
    return None
