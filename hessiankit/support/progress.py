"""A progress bar on standard error, shown in a terminal only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Tell: TypeAlias = Callable[[str, int, int], None]
"""Called with (name of the work, items done, items in all)."""


def silent(*_: object, **__: object) -> None:
    """Show nothing."""


@contextmanager
def progress_bar(prefix: str = "") -> Iterator[Tell]:
    """Yield a function that updates one progress bar and its estimate of the time left."""
    console = Console(stderr=True)
    work, time_column = TextColumn("{task.description}"), TextColumn("{task.fields[left]}")
    columns = (work, BarColumn(10), MofNCompleteColumn(), TimeElapsedColumn(), time_column)
    start, stage = time.perf_counter(), ""
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, left="")

        def tell(name: str, count: int, total: int) -> None:
            nonlocal start, stage
            if name != stage:
                start, stage = time.perf_counter(), name
            seconds = (time.perf_counter() - start) * (total - count) / count if count else 0.0
            time_left = f"{seconds:.0f} s left" if seconds >= 1 else ""
            bar.update(task, description=f"{prefix}{name}", completed=count, total=total, left=time_left)

        yield tell
