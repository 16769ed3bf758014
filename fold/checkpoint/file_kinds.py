"""What a file is that should have been safetensors: other formats of models, and text of every kind."""

from __future__ import annotations

_FORMATS = {
    b"PK\x03\x04": "a zip or pickle archive",
    b"GGUF": "a GGUF file (a GGUF loader node opens those)",
    b"\x89HDF": "an HDF5 file",
    b"\x1f\x8b": "a gzip archive: unpack it",
    b"\x28\xb5\x2f\xfd": "a zstd archive: unpack it",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive: unpack it",
    b"Rar!": "a rar archive: unpack it",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"RIFF": "a picture or a sound",
}
_TEXTS = (
    (
        "version https://git-lfs",
        "a git-lfs pointer, the text that stands for the model in a repository: run `git lfs pull` there, or download "
        "the file itself",
    ),
    ("<!doctype html", "a web page (HTML): the link led to a page, not to the file; download it again"),
    ("<html", "a web page (HTML): the link led to a page, not to the file; download it again"),
    ("<?xml", "an XML text, as a server sends with an error: download the file again"),
    ("<", "a text of tags, as a server sends with an error: download the file again"),
    ("{", "a JSON text"),
    ("[", "a JSON text"),
)
_BOMS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_SHOWN = 40


def kind_of(first: bytes) -> str | None:
    """What begins with the bytes ``first`` (up to a few hundred), as "a web page (HTML): ..."; None when unknown.

    Call it only for what cannot be safetensors: a header of at most 100 MB has zeros in bytes 4 to 7 of its length.
    """
    for magic, kind in _FORMATS.items():
        if first.startswith(magic):
            return kind
    if first[:1] == b"\x80" and first[1:2] <= b"\x05":
        return "a pickle"
    if first and not first.strip(b"\0"):
        return "zeros: a download that did not end, or a disk that lost it; download it again"
    text = _text(first)
    if text is None:
        return None
    start = text.lstrip()
    for beginning, kind in _TEXTS:
        if start.lower().startswith(beginning):
            return kind if beginning not in "{[" else f"{kind}, which begins with {_quoted(start)}"
    return f"a text, which begins with {_quoted(start)}" if start else "an empty text"


def _text(raw: bytes) -> str | None:
    """``raw`` as text; None where it is none."""
    for mark, encoding in _BOMS.items():
        if raw.startswith(mark):
            return raw.decode(encoding, "replace")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(raw) - 3:  # else only the end of what was read cuts a character
            return None
        text = raw[: error.start].decode("utf-8")
    plain = all(char.isprintable() or char.isspace() for char in text)
    return text if plain and text else None


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return repr(line[:_SHOWN] + ("..." if len(line) > _SHOWN else ""))
