"""A progress bar on standard error, shown in a terminal only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Tell: TypeAlias = Callable[[str, int, int], None]
"""Called with (name of the work, items done, items in all)."""


def silent(*_: object, **__: object) -> None:
    """Show nothing, whatever is told."""


@contextmanager
def progress_bar(part: str = "", *, of: int = 1, before: Sequence[float] = ()) -> Iterator[Tell]:
    """Yield a function that updates one progress bar and its estimate of the time left.

    Args:
        part: Name of the repeated work, such as "Hessian".
        of: How many such parts there are.
        before: Seconds that each part before this one took.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(10),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    start = now = time.perf_counter()
    doing = ""
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, left="")

        def tell(what: str, done: int, total: int) -> None:
            nonlocal now, doing
            if what != doing:
                now, doing = time.perf_counter(), what
            gone = time.perf_counter() - (start if before else now)
            seconds = (
                sum(before) / len(before) * (of - len(before)) - gone if before else gone * (total - done) / done if done else 0.0
            )
            remaining = f"{seconds:.0f} s left" if seconds >= 1 and (before or of == 1) else ""
            which = f"{part} {len(before) + 1} of {of}: " if part else ""
            bar.update(task, description=f"{which}{what}", completed=done, total=total, left=remaining)

        yield tell
