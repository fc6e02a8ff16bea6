"""Long axes in chunks; a dry run that counts operations sees each kind of chunk once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

_repeated: ContextVar[Callable[[int], AbstractContextManager[None]] | None] = ContextVar("repeated", default=None)


@contextmanager
def counting_chunks(repeated: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
    """Let :func:`chunks` yield two chunks of each length, the first within ``repeated(how many it represents)``.

    Two, because memory of one chunk may still be alive while the next is computed. Chunks whose work differs are all yielded.
    """
    before = _repeated.set(repeated)
    try:
        yield
    finally:
        _repeated.reset(before)


def chunks(length: int, step: int, *, alike: bool = True) -> Iterator[tuple[int, int]]:
    """Yield start and stop of chunks of ``step`` indices, and of the remainder.

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
