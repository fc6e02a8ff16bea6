"""Finished work in a JSON Lines file, and worker processes for the rest: an interrupted study resumes where it stopped."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from hessiankit.support.jsonl import append_records, read_records, usable

Task = TypeVar("Task", bound=Hashable)
Result = TypeVar("Result")
Runs = TypeVar("Runs", bound="Resumable[Any, Any]")


class Resumable(Generic[Task, Result]):
    """Results by task, those of earlier calls read from a file; a context, whose end stops the processes.

    Args:
        who: The command, for errors.
        path: The file of finished work, made where it is missing.
        run: Task -> result; with several jobs a function that a process can import.
        task_of: Result -> its task.
        encode: Result -> what JSON knows.
        decode: What ``encode`` returned -> result; None where it does not count, such as the result of other code.
        jobs: Processes that share the work, each with one thread.

    Attributes:
        known: The results by task.
    """

    def __init__(
        self,
        who: str,
        path: Path,
        run: Callable[[Task], Result],
        task_of: Callable[[Result], Task],
        encode: Callable[[Result], dict[str, Any]],
        decode: Callable[[Any], Result | None],
        *,
        jobs: int = 1,
    ) -> None:
        self.who, self.path, self.run, self.task_of, self.encode, self.jobs = who, path, run, task_of, encode, jobs
        with usable(who, path):
            found = read_records(path, decode)
            self.known = {task_of(result): result for result in found if result is not None}
            append_records(path)
        self._exit = ExitStack()
        self._pool: Any = None

    def __enter__(self: Runs) -> Runs:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._exit.close()

    def missing(self, tasks: Iterable[Task]) -> list[Task]:
        """Return the tasks without a result, each once."""
        return [task for task in dict.fromkeys(tasks) if task not in self.known]

    def finish(self, tasks: Iterable[Task]) -> Iterator[Result]:
        """Do the missing tasks, and yield each result as soon as its line is written."""
        left = self.missing(tasks)
        if self.jobs > 1 and left and self._pool is None:  # whose exit ends the processes at once
            self._pool = self._exit.enter_context(multiprocessing.get_context("spawn").Pool(self.jobs, _prepare_worker))
        for result in map(self.run, left) if self._pool is None else self._pool.imap_unordered(self.run, left):
            self.known[self.task_of(result)] = result
            with usable(self.who, self.path):
                append_records(self.path, self.encode(result))
            yield result


def _prepare_worker() -> None:
    """Take one thread, and leave Ctrl-C to the process that shares out the work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
