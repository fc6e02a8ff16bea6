"""Building the compiled kernels with torch's extension loader, and what replays plans, and loading them.

The result is kept in the user's cache, under a name that tells sources, flags and processor apart: another version of the
toolkit, or another machine on the same disk, takes none that is not its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from subprocess import CalledProcessError
from tempfile import TemporaryDirectory

import torch

from hessiankit.support.errors import InputError

FLAGS = ("-O3", "-march=native", "-std=c++17", "-pthread")
SWITCH = "HESSIANKIT_COMPILED"  # an environment variable: 0 for plain torch
_FOLDER = Path(__file__).parent / "cpp"
_REPLAYER = _FOLDER / "torch" / "replay.cpp"
_allowed: ContextVar[bool] = ContextVar("allowed", default=True)
_recorders: ContextVar[int] = ContextVar("recorders", default=0)  # modes that look on, and are told what a kernel writes


def replayer() -> ctypes.CDLL | None:
    """Return what runs the operations of a plan without Python in between, or None where it was not built or is turned off."""
    return None if not _allowed.get() or os.environ.get(SWITCH) == "0" else _found_replayer()


def kernels() -> ctypes.CDLL | None:
    """Return the kernels, or None where they were not built, are turned off, or something looks on at torch's operations.

    A tracer or a transform sees what torch does, and not what a kernel writes.
    """
    watched = torch._C._len_torch_dispatch_stack() > _recorders.get() or torch._C._functorch.peek_interpreter_stack() is not None
    return None if watched or not _allowed.get() or os.environ.get(SWITCH) == "0" else _found()


@contextmanager
def plain() -> Iterator[None]:
    """Use plain torch within the block.

    >>> with plain():
    ...     kernels() is None
    True
    """
    token = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(token)


@contextmanager
def noted() -> Iterator[None]:
    """Use kernels within the block though one mode looks on: their callers tell it what they write."""
    token = _recorders.set(_recorders.get() + 1)
    try:
        yield
    finally:
        _recorders.reset(token)


def build(*, verbose: bool = False) -> Path:
    """Compile the kernels for this machine, unless that was done before; what runs afterwards uses them.

    Returns:
        The file.
    """
    if not built().exists():
        try:
            _compile(sorted(_FOLDER.glob("*.cpp")), built(), FLAGS, verbose=verbose)
        except (RuntimeError, OSError, CalledProcessError) as error:
            raise InputError(
                f"hessiankit compile: the kernels could not be built ({_why(error)}); expected g++ "
                "or clang++ in PATH or in CXX, and a cache that can be written; --verbose shows what the compiler printed. "
                "Everything works without, slower"
            ) from error
    _found.cache_clear()
    return built()


def build_replayer(*, verbose: bool = False) -> str:
    """Compile what replays plans, unless that was done before; what is planned afterwards uses it.

    It needs the headers of torch, takes half a minute, and is for this version of torch only.

    Returns:
        Why it could not be built; empty where it was.
    """
    if not built_replayer().exists():
        try:
            _compile([_REPLAYER], built_replayer(), ("-O2",), verbose=verbose)
        except (RuntimeError, OSError, CalledProcessError) as error:
            return _why(error)
    _found_replayer.cache_clear()
    return "" if _found_replayer() is not None else "what was built cannot be loaded"


def _compile(sources: list[Path], target: Path, flags: tuple[str, ...], *, verbose: bool) -> None:
    if find_spec("ninja") is None or find_spec("setuptools") is None:
        raise InputError("hessiankit compile: ninja and setuptools are needed; pip install 'hessiankit[compiled]'")
    from torch.utils import cpp_extension  # takes a second

    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent) as folder:  # an interrupt leaves no partial build
        cpp_extension.load(
            target.stem,
            [str(path) for path in sources],
            extra_cflags=list(flags),
            extra_ldflags=["-pthread"],
            build_directory=folder,
            is_python_module=False,
            verbose=verbose,
        )
        (Path(folder) / target.name).replace(target)


def _why(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def built() -> Path:
    """Return where the kernels for this machine are, once they are built."""
    return _root() / f"hessiankit_{_key()}" / "hessiankit_kernels.so"


def built_replayer() -> Path:
    """Return where that which replays plans with this torch is, once it is built."""
    parts = (_REPLAYER.read_text(encoding="utf-8"), torch.__version__, platform.machine())
    return _root() / f"hessiankit_{_digest(parts)}" / "hessiankit_replayer.so"


def _root() -> Path:
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")


@cache
def _found() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(built()))
    except OSError:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.hessiankit_sum.argtypes = [ctypes.c_int, pointer, pointer, pointer, number, pointer]
    library.hessiankit_sum.restype = ctypes.c_int
    library.hessiankit_multiply.argtypes = [ctypes.c_int, pointer, pointer, pointer, pointer, number]
    library.hessiankit_multiply.restype = ctypes.c_int
    library.hessiankit_mirror.argtypes = [ctypes.c_int, pointer, number, pointer, number, number, pointer]
    library.hessiankit_mirror.restype = None
    return library


@cache
def _found_replayer() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(built_replayer()))
    except OSError:
        return None
    pointer, number, single = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.hessiankit_tape.restype = pointer
    library.hessiankit_tape_end.argtypes = [pointer]
    library.hessiankit_tape_operation.argtypes = [pointer, ctypes.c_char_p, ctypes.c_char_p, pointer, pointer, number]
    library.hessiankit_tape_product.argtypes = [pointer, pointer, single, single, pointer, pointer]
    library.hessiankit_tape_sum.argtypes = [pointer, pointer, single, single, pointer, pointer, number, pointer]
    library.hessiankit_tape_run.argtypes = [pointer, number, number]
    library.hessiankit_tape_run.restype = number
    return library


@cache
def _key() -> str:
    parts = [path.read_text(encoding="utf-8") for path in sorted(_FOLDER.iterdir()) if path.suffix in (".cpp", ".h")]
    return _digest([*parts, *FLAGS, platform.machine(), _instructions()])


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _instructions() -> str:
    """Return the instruction sets of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
