"""A square matrix in a NumPy file, and a journal of the panels written and of the computation that they belong to."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hessiankit.engine.problem.calling import Loss
from hessiankit.engine.problem.loss_trace import LossTrace
from hessiankit.engine.problem.task import Task, gib
from hessiankit.engine.storage import SymmetricStorage
from hessiankit.support.errors import InputError
from hessiankit.support.files import replace_file, sync_folder
from hessiankit.support.kernels import built, kernels
from hessiankit.support.package import __version__

FORMAT = 1
OPERATIONS = "the operations of module and loss"
OF_THE_MACHINE = ("number of threads", "processor")  # which round alike only with the same of these


@dataclass
class Journal:
    """Record of an unfinished or finished matrix, replaced atomically.

    Attributes:
        path: Of the journal.
        fingerprint: Digests of everything that the matrix depends on, by a name.
        plan: Chunks and panels.
        panels: Asymmetry and largest entry of the finished panels, by number.
        result: Results of the whole: loss, asymmetry, fallbacks, seconds.
        complete: Whether the matrix is in its place.
    """

    path: Path
    fingerprint: dict[str, str]
    plan: dict[str, Any]
    panels: dict[str, dict[str, Any]] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    complete: bool = False

    def save(self) -> None:
        """Replace the journal on disk, durably."""
        content = {name: getattr(self, name) for name in ("fingerprint", "plan", "panels", "result", "complete")}
        text = json.dumps({"format": FORMAT, **content}, indent=1)
        replace_file(self.path, text.encode(), durable=True)

    @classmethod
    def load(cls, path: Path) -> Journal:
        """Read a journal.

        Raises:
            InputError: The file is something else.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT:
                raise ValueError("another format")
            return cls(path, **content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"hessian: {path} is no journal of a matrix ({error}). Pass overwrite=True to start again, or another out=..."
            ) from error

    def differences(self, fingerprint: Mapping[str, str]) -> list[str]:
        """Return the names of the digests that differ from another computation's."""
        names = list(dict.fromkeys([*self.fingerprint, *fingerprint]))
        skip = OF_THE_MACHINE if self.complete else ()
        found = [n for n in names if n not in skip and self.fingerprint.get(n) != fingerprint.get(n)]
        return [n for n in found if n != OPERATIONS] or found  # other inputs change these too: only reported alone


def fingerprint(
    tasks: Sequence[Task], weights: Sequence[float], batch_size: int | None, traced: Iterable[LossTrace]
) -> dict[str, str]:
    """Return digests of everything that the bytes of the matrix depend on, by a name that an error can show.

    The module's own code is there as the operations that it runs on the first samples, with their values.
    """

    first = tasks[0]
    device = next(iter(first.parameters.values())).device
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    found = {f"{name!r} of the module": digest(value) for name, value in first.state.values.items()}
    found["the chosen parameters"] = digest(list(first.parameters))
    found["training or evaluation mode"] = digest(list(first.state.modes.values()))
    for n, (task, weight) in enumerate(zip(tasks, weights, strict=True)):
        found[f"the inputs of batch {n}"] = digest([*task.keywords, task.inputs])
        found[f"the target of batch {n}"] = digest(task.target)
        found[f"the weight of batch {n}"] = digest(weight)
    found["the loss"] = named(first.loss)
    found["batch_size"] = str(batch_size)
    found[OPERATIONS] = digest([_operations(one) for one in traced])
    found["version of hessiankit"], found["version of torch"] = __version__, torch.__version__
    found["compiled kernels"] = "none" if kernels() is None else built().parent.name
    found["number of threads"], found["processor"] = str(torch.get_num_threads()), processor
    return found


def named(loss: Loss) -> str:
    """Return a name for a loss that is the same in another process.

    >>> named("mse"), named(torch.nn.MSELoss()), named(None)
    ('mse', 'torch.nn.modules.loss.MSELoss', 'None')
    """
    if loss is None or isinstance(loss, str):
        return str(loss)
    kind = loss if hasattr(loss, "__qualname__") else type(loss)
    return f"{kind.__module__}.{kind.__qualname__}"


def digest(x: Any) -> str:
    """Return a digest of tensors and plain values, nested in any way.

    >>> digest([torch.ones(2), 1]) == digest([torch.ones(2), 1]), digest(torch.ones(2)) == digest(torch.ones(2, 1))
    (True, False)
    """
    found = hashlib.sha256()
    leaves, spec = torch.utils._pytree.tree_flatten(x)
    found.update(str(spec).encode() if len(leaves) != 1 else b"")
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            found.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            found.update(repr(leaf).encode())
        else:
            found.update(type(leaf).__qualname__.encode())
    return found.hexdigest()


def _operations(traced: LossTrace) -> list[Any]:
    one = traced.trace
    steps = [[type(a.primitive).__qualname__, *(-1 if at is None else at for at in a.inputs), a.output] for a in one.applications]
    return [*steps, one.values[one.output]]


def check_out(out: str | os.PathLike[str] | None) -> None:
    """Raise InputError unless a path for a matrix ends in ``.npy``; a folder is refused by :meth:`MatrixFile.check`."""
    if out is not None and not os.fspath(out).endswith(".npy") and not os.path.isdir(out):
        raise InputError(f"hessian: out={os.fspath(out)!r} is written in NumPy's format; pass a path that ends in '.npy'")


SLAB = 32 * 2**20  # bytes that are turned round at once before they are written
KINDS = {torch.float64: "<f8", torch.float32: "<f4"}
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class MatrixFile:
    """The file of an n x n matrix, written as ``.part`` until it is complete.

    Args:
        path: Path of the finished matrix.
        n: Rows and columns.
        dtype: Of the entries.
    """

    def __init__(self, path: str | os.PathLike[str], n: int, dtype: torch.dtype) -> None:
        self.path = Path(os.path.abspath(path))
        self.part = self.path.with_name(self.path.name + ".part")
        self.journal = self.path.with_name(self.path.name + ".journal.json")
        self.n, self.dtype = n, dtype
        self.header = _header(n, KINDS[dtype])
        self.bytes = len(self.header) + n * n * dtype.itemsize
        self._open: io.FileIO | None = None

    def check(self, overwrite: bool) -> None:
        """Check that the path can be written to.

        Raises:
            InputError: It cannot, or there is a file without a journal.
        """
        folder = self.path.parent
        if not folder.is_dir():
            raise InputError(f"hessian: out={str(self.path)!r}: there is no folder {str(folder)!r}; make it first")
        if self.path.is_dir():
            raise InputError(f"hessian: out={str(self.path)!r} is a folder; pass the path of a file in it")
        whole = self.journal.exists() and self.is_whole()
        if not os.access(folder, os.W_OK | os.X_OK) and not whole:
            raise InputError(f"hessian: out={str(self.path)!r}: the folder is read-only; pass a path that can be written to")
        if overwrite or self.journal.exists():
            return
        for file in (self.path, self.part):
            if file.exists() and file.stat().st_size:
                raise InputError(
                    f"hessian: {file} exists, without the journal of a matrix beside it. Pass another out=..., or "
                    "overwrite=True to lose it"
                )

    def is_whole(self) -> bool:
        """Whether the finished file exists with the expected size and header."""
        if not self.path.is_file() or self.path.stat().st_size != self.bytes:
            return False
        with open(self.path, "rb") as file:
            return file.read(len(self.header)) == self.header

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open ``.part`` exclusively.

        Raises:
            InputError: Another process has it.
            OSError: A write fails; on a full disk the message says what to do.
        """
        with open(os.open(self.part, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as self._open:
            _lock(self._open, self.path)
            try:
                with self._disk_full_explained():
                    yield
            finally:
                if not os.fstat(self._open.fileno()).st_size and self.part.exists():
                    self.part.unlink()  # nothing was begun

    def clear(self) -> None:
        """Delete the journal and the matrix, and empty ``.part``."""
        self.journal.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)
        self._file.truncate(0)

    def prepare(self) -> bool:
        """Allocate the file on disk unless it is; return whether it was not.

        Raises:
            OSError: There is not enough.
        """
        if os.fstat(self._file.fileno()).st_size == self.bytes:
            return False
        self._file.truncate(0)
        _reserve(self._file, self.bytes)
        self._write(0, self.header)
        os.fsync(self._file.fileno())
        return True

    def put(self, panel: SymmetricStorage) -> None:
        """Write a panel and its mirror image, and wait until the disk has them.

        Raises:
            OSError: There is not enough room, or the disk fails.
        """
        data = panel.data.cpu()
        self._block(panel.top.start, panel.left.start, data)
        after = max(panel.left.start, panel.top.stop)
        step = max(1, SLAB // max(1, data.shape[0] * data.element_size()))
        for start in range(after, panel.left.stop, step):
            stop = min(start + step, panel.left.stop)
            self._block(start, panel.top.start, data[:, start - panel.left.start : stop - panel.left.start].T.contiguous())
        os.fsync(self._file.fileno())

    def _block(self, row: int, column: int, data: Tensor) -> None:
        if not data.numel():
            return
        size, array = self.dtype.itemsize, data.numpy()
        if data.shape[1] == self.n:
            self._write(len(self.header) + row * self.n * size, array.data.cast("B"))
            return
        for k in range(data.shape[0]):
            self._write(len(self.header) + ((row + k) * self.n + column) * size, array[k].data.cast("B"))

    def _write(self, at: int, content: Any) -> None:
        self._file.seek(at)
        done = 0
        while done < len(content):
            done += self._file.write(content[done:]) or 0

    def finish(self) -> None:
        """Move the complete file to its path."""
        os.fsync(self._file.fileno())
        os.replace(self.part, self.path)
        sync_folder(self.path.parent)

    def read(self) -> Tensor:
        """Return the matrix as a tensor mapped from the file, copy-on-write."""
        with open(self.path, "rb") as file:
            if hasattr(mmap, "MAP_PRIVATE"):  # without a reserve, or a file larger than the memory could not be mapped
                flags = mmap.MAP_PRIVATE | (NO_RESERVE if os.uname().sysname == "Linux" else 0)
                pages = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            else:
                pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        flat = np.frombuffer(pages, dtype=KINDS[self.dtype], offset=len(self.header))
        return torch.from_numpy(flat.reshape(self.n, self.n))

    @property
    def _file(self) -> io.FileIO:
        assert self._open is not None
        return self._open

    @contextmanager
    def _disk_full_explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,
                f"hessian: the disk is full: the matrix takes {gib(self.bytes)}. What is finished is kept; make room and call "
                "again with the same arguments, or pass another out=...",
                str(self.path),
            ) from error


def _header(n: int, kind: str) -> bytes:
    """Return the header of a NumPy file of an n x n matrix.

    >>> len(_header(3, "<f8"))
    128
    """
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": kind, "fortran_order": False, "shape": (n, n)})
    return out.getvalue()


def _reserve(file: io.FileIO, size: int) -> None:
    """Set a file's size, with disk blocks allocated where the system supports it."""
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except AttributeError:
        file.truncate(size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        file.truncate(size)


def _lock(file: io.FileIO, path: Path) -> None:
    """Lock the file until it is closed.

    Raises:
        InputError: Another one has it.
    """
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"hessian: another process is writing {path}; wait for it, or pass another out=...") from error
    except OSError:  # a file system without locks
        return
