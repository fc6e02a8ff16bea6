"""Long axes are walked in chunks; whoever only counts what that costs is shown few of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

_repeated: ContextVar[Callable[[int], AbstractContextManager[None]] | None] = ContextVar("repeated", default=None)


@contextmanager
def counting_chunks(repeated: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
    """Let :func:`chunks` show two of the chunks of a length, the first within ``repeated(how many it stands for)``.

    Two, because what is left of one chunk may still be in memory while the next is made.

    Where what is done does not depend on where the chunk lies, that is.
    """
    before = _repeated.set(repeated)
    try:
        yield
    finally:
        _repeated.reset(before)


def chunks(length: int, step: int, *, alike: bool = True) -> Iterator[tuple[int, int]]:
    """Yield the first and the last index, the latter excluded, of chunks of ``step`` and of what is left.

    Args:
        length: Of the axis.
        step: Of a chunk.
        alike: Whether chunks of one length cost the same, wherever they lie.

    >>> list(chunks(7, 3))
    [(0, 3), (3, 6), (6, 7)]
    """
    repeated = _repeated.get()
    whole, rest = divmod(length, step)
    if repeated is None or not alike or whole < 3:
        yield from ((start, start + step) for start in range(0, whole * step, step))
    else:
        with repeated(whole - 1):
            yield 0, step
        yield step, 2 * step
    if rest:
        yield whole * step, length
