"""The errors of this package. Every message is one full sentence: what is wrong, where, what to do."""

from __future__ import annotations


class MossError(ValueError):
    """Bad input, said in a sentence that can be shown to a person as it is."""


class MossCancelledError(MossError):
    """A long piece of work was cancelled by its caller; nothing was left behind."""
