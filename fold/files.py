"""Opening a file for reading, and writing one so that it is there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import MossError

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

_LOCK = threading.Lock()
_WRITING: set[Path] = set()

_ON_WINDOWS = os.name == "nt"

Write = Callable[[bytes | bytearray | memoryview], None]

# So much is written between two early flushes: each costs the disk a few milliseconds of its own.
_FLUSH_BYTES = 128 * 1024 * 1024


def open_regular(file: Path) -> BufferedReader:
    """Open a regular file for reading; MossError in words when it is missing, no file or not readable."""
    try:
        mode = file.stat().st_mode
        if not stat.S_ISREG(mode):
            raise MossError(f"{file} is not a regular file.")
        return file.open("rb")
    except FileNotFoundError:
        raise MossError(f"{file} does not exist.") from None
    except MossError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise MossError(f"{file} cannot be opened: {reason}.") from None


@contextlib.contextmanager
def new_file(target: str | Path, *, overwrite: bool = False) -> Iterator[Write]:
    """Give a ``write(bytes)`` function; when the block ends well, what was written becomes ``target`` in one step.

    On an exception (an interrupt too) nothing is left. On Linux the data have no name until they are complete, so that
    even a killed process leaves nothing; elsewhere they are in ``<target>.part-<pid>`` until then, and the part file
    of a process that is gone is removed by the next write to the same target. Raises MossError when ``target`` exists
    (without ``overwrite``), cannot be written, or the disk is full.
    """
    target = Path(target)
    check_target(target, overwrite)
    with _claimed(target):
        _remove_stale_parts(target)
        with _in_words(target):
            draft = _Draft(target)
        try:
            yield draft.write
            with _in_words(target):
                draft.publish(overwrite)
        finally:
            draft.discard()


def check_target(target: Path, overwrite: bool) -> None:
    """MossError when ``target`` cannot become a new file: no folder to put it in, or something is there already."""
    if _ON_WINDOWS and (reason := name_refused_by_windows(target.name)):
        raise MossError(f"{target} cannot be written on Windows: {reason}.")
    if not target.parent.is_dir():
        raise MossError(f"{target} cannot be written: the folder {target.parent} does not exist.")
    if target.is_dir():
        raise MossError(f"{target} cannot be written: it is a folder.")
    if target.exists() and not target.is_file():
        # the new file would take its place: run as root, /dev/null would be gone for everyone
        raise MossError(f"{target} cannot be written: it is a pipe or a device, which a file must not replace.")
    if not overwrite and os.path.lexists(target):
        raise MossError(f"{target} exists already: choose another name, or allow overwriting (--overwrite).")


def save_tensors(
    target: str | Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a (small) safetensors file whole or not at all; MossError as ``new_file``."""
    from safetensors.torch import save

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with new_file(target, overwrite=overwrite) as write:
        write(save(plain, dict(metadata) if metadata else None))


def tensor_bytes(tensor: torch.Tensor) -> bytearray:
    """The numbers of a CPU tensor as they stand in a safetensors file (row-major, little-endian)."""
    import torch

    data = bytearray(tensor.numel() * tensor.element_size())
    if data:
        torch.frombuffer(data, dtype=tensor.dtype).copy_(tensor.flatten())
    return data


class _Draft:
    """The unfinished file: nameless where the system has that, else a part file beside the target."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.part = target.with_name(f"{target.name}.part-{os.getpid()}")
        self.nameless = _can_be_nameless(target.parent)
        if self.nameless:
            descriptor = os.open(target.parent, os.O_TMPFILE | os.O_RDWR, 0o666)
        else:
            binary = getattr(os, "O_BINARY", 0)
            descriptor = os.open(self.part, os.O_CREAT | os.O_EXCL | os.O_RDWR | binary, 0o666)
        self.has_part = not self.nameless
        self.stream = os.fdopen(descriptor, "wb", buffering=0)
        self.flush = _EarlyFlush(descriptor)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of ``data``."""
        with _in_words(self.target):
            rest = memoryview(data).cast("B")
            while rest:
                written = self.stream.write(rest)
                self.flush.count(written)
                rest = rest[written:]

    def publish(self, overwrite: bool) -> None:
        """Flush to the disk, give the data their name, and flush the folder."""
        self.flush.wait()
        os.fsync(self.stream.fileno())
        if self.nameless:
            _link_nameless(self.stream.fileno(), self.part)
            self.has_part = True
        self.stream.close()
        check_target(self.target, overwrite)
        _replace(self.part, self.target)
        self.has_part = False
        # Not every system can open a folder; the file itself is safe already.
        with contextlib.suppress(OSError):
            folder = os.open(self.target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def discard(self) -> None:
        """Close, and remove what has not been published."""
        self.flush.close()
        self.stream.close()
        if self.has_part:
            self.part.unlink(missing_ok=True)


class _EarlyFlush:
    """Flushes what has been written so far in a thread, so that the flush at the end has little left to wait for.

    Only where there is fdatasync (Linux): elsewhere a flush may hold up the writing.
    """

    def __init__(self, descriptor: int) -> None:
        from concurrent.futures import ThreadPoolExecutor  # here: whoever only reads need not wait for its import

        self._flush: Callable[[int], None] | None = getattr(os, "fdatasync", None)
        self._descriptor = descriptor
        self._thread = ThreadPoolExecutor(1, "moss-flush")
        self._pending: Future[None] | None = None
        self._unflushed = 0

    def count(self, written: int) -> None:
        """So many bytes more were written. Raises what an earlier flush raised."""
        self._unflushed += written
        if self._flush is None or self._unflushed < _FLUSH_BYTES or (self._pending and not self._pending.done()):
            return
        self.wait()
        self._unflushed = 0
        self._pending = self._thread.submit(self._flush, self._descriptor)

    def wait(self) -> None:
        """Wait for the flush that is going on and raise what it raised: the system reports a failed write only once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the flush that is going on; the file may be closed then."""
        self._thread.shutdown()


# Windows: "access denied" and "used by another process", which a virus scanner causes for a moment.
_BUSY = (5, 32)
_BUSY_SECONDS = 2.0


def _replace(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``. Windows refuses that while a program has either open: tried for two seconds."""
    end = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            source.replace(target)
            return
        except PermissionError as error:
            if getattr(error, "winerror", None) not in _BUSY:
                raise
            if time.monotonic() > end:
                busy = "another program has it open (a loaded model counts): close that, or choose another name"
                raise OSError(errno.EBUSY, busy) from error
            time.sleep(0.05)


def name_refused_by_windows(name: str) -> str | None:
    """Why Windows would not make a file of this name, or would make something else of it; None where it is fine."""
    if found := sorted(set(name) & set('<>:"|?*')):
        return f"a name there cannot hold {' '.join(found)}"
    if any(ord(character) < 32 for character in name):
        return "a name there cannot hold control characters"
    if name.endswith((".", " ")):
        return "a name there cannot end in a dot or a space"
    if re.fullmatch(r"(CON|PRN|AUX|NUL|(COM|LPT)[1-9¹²³])( *\..*)?", name, re.IGNORECASE):
        return "that is the name of a device there"
    return None


def _can_be_nameless(folder: Path) -> bool:
    """Whether ``folder`` takes files without a name that can be named later: tried out, as it depends on the disk."""
    if not hasattr(os, "O_TMPFILE"):
        return False
    trial = folder / f".moss-{os.getpid()}-{os.urandom(4).hex()}.tmp"
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError:
        return False
    try:
        _link_nameless(descriptor, trial)
        trial.unlink()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _link_nameless(descriptor: int, name: Path) -> None:
    # Only with a folder's descriptor does Python call linkat, which follows the link in /proc to the open file.
    folder = os.open(name.parent, os.O_RDONLY)
    try:
        os.link(f"/proc/self/fd/{descriptor}", name.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _claimed(target: Path) -> Iterator[None]:
    """Refuse to write ``target`` twice at once in this process (its part file is named by the process)."""
    place = target.resolve()
    with _LOCK:
        if place in _WRITING:
            raise MossError(f"{target} is being written already: wait until that is done.")
        _WRITING.add(place)
    try:
        yield
    finally:
        _WRITING.discard(place)


def _remove_stale_parts(target: Path) -> None:
    """Remove part files of ``target`` that dead processes left."""
    pattern = re.compile(re.escape(target.name) + r"\.part-([0-9]{1,10})")
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            found = pattern.fullmatch(entry.name)
            if found and not _is_running(int(found[1])):
                # Where an open file cannot be removed, this also leaves that of a running process alone.
                with contextlib.suppress(OSError):
                    Path(entry.path).unlink()


def _is_running(pid: int) -> bool:
    """Whether another process has this number. On Windows this cannot be asked safely, nor need it be (see above)."""
    # Our own number: in a container each start may get the number of the run that was killed.
    if os.name == "nt" or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


@contextlib.contextmanager
def _in_words(target: Path) -> Iterator[None]:
    """Turn an OSError into a sentence about ``target``."""
    try:
        yield
    except OSError as error:
        full = errno.errorcode.get(error.errno or 0) in ("ENOSPC", "EDQUOT")
        reason = "the disk is full" if full else error.strerror or str(error)
        raise MossError(f"{target} cannot be written: {reason}. Nothing was left behind.") from error
