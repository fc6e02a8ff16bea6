"""Building the compiled kernels with torch's extension loader, and loading them.

They are kept in the user's cache, under a name that tells sources, flags and processor apart.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from collections.abc import Iterator
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
_allowed: ContextVar[bool] = ContextVar("allowed", default=True)


def kernels() -> ctypes.CDLL | None:
    """Return the kernels, or None where they were not built, are off, or a tracer or transform observes torch's operations."""
    return None if is_observed() or not _allowed.get() or os.environ.get(SWITCH) == "0" else _found()


def is_observed() -> bool:
    """Tell whether a tracer or a transform observes torch's operations."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None


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


def build(*, verbose: bool = False) -> Path:
    """Compile the kernels for this machine, unless that was done before, and return the file; they are used from then on."""
    if not built().exists():
        if find_spec("ninja") is None or find_spec("setuptools") is None:
            raise InputError("hessiankit compile: ninja and setuptools are needed; pip install 'hessiankit[compiled]'")
        try:
            _compile(built(), verbose=verbose)
        except (RuntimeError, OSError, CalledProcessError) as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise InputError(
                f"hessiankit compile: the kernels could not be built ({why}); expected g++ or clang++ in PATH or in CXX, and a "
                "cache that can be written; --verbose shows what the compiler printed. Everything works without, slower"
            ) from error
    _found.cache_clear()
    return built()


def _compile(target: Path, *, verbose: bool) -> None:
    from torch.utils import cpp_extension  # takes a second

    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent) as folder:  # an interrupt leaves no partial build
        cpp_extension.load(
            target.stem,
            [str(path) for path in sorted(_FOLDER.glob("*.cpp"))],
            extra_cflags=list(FLAGS),
            extra_ldflags=["-pthread"],
            build_directory=folder,
            is_python_module=False,
            verbose=verbose,
        )
        (Path(folder) / target.name).replace(target)


def built() -> Path:
    """Return where the kernels for this machine are, once they are built."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    return root / f"hessiankit_{_key()}" / "hessiankit_kernels.so"


@cache
def _found() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(built()))
    except OSError:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.hessiankit_sum.argtypes = [ctypes.c_int, pointer, pointer, pointer, number, pointer]
    library.hessiankit_sum.restype = ctypes.c_int
    library.hessiankit_mirror.argtypes = [ctypes.c_int, pointer, number, pointer, number, number, pointer]
    library.hessiankit_mirror.restype = None
    return library


@cache
def _key() -> str:
    parts = [path.read_text(encoding="utf-8") for path in sorted(_FOLDER.iterdir()) if path.suffix in (".cpp", ".h")]
    content = "\n".join([*parts, *FLAGS, platform.machine(), processor_line("flags", "features") or platform.processor()])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def processor_line(*names: str) -> str:
    """Return the line of /proc/cpuinfo that begins with one of these names; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.lower().startswith(names)), "")
