"""The code of the twelve tasks runs, and is no longer than the peers'."""

from __future__ import annotations

import pytest

from benchmarks.tasks.__main__ import Task, errors, seconds, statements
from benchmarks.tasks.code import TASKS


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_task_runs_in_no_more_lines_than_a_peers(task: Task) -> None:
    _, result = seconds(task, task.ours, repeats=0)
    assert result is not None
    assert task.peer is None or statements(task.ours) <= statements(task.peer)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_one_who_guesses_meets_one_error_at_most(task: Task) -> None:
    failed, messages = errors(task, task.guesses)
    assert failed <= 1, messages
    assert failed < len(task.guesses)
