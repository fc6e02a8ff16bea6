"""Twelve tasks by hessiankit and by the best peer that does them: lines, errors of a first guess, products, processor seconds.

    python -m benchmarks.tasks [NAME...] [--out FILE]

A line is a statement of the user's code, imports aside. A guess is what one types who has not read the documentation: guesses are
tried in order until one runs, and those before it are the errors. Products are columns that a Hessian or a Gauss-Newton matrix is
multiplied with. Peers are installed apart (``curvlinops-for-pytorch pyhessian laplace-torch kronfluence loss-landscapes``).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import os
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.tasks import code
from benchmarks.tasks.code import TASKS, Logits, Task, pairs
from hessiankit.curvature.operator import HessianOperator

# mypy: ignore-errors


def statements(*functions: Callable[..., Any]) -> int:
    """Return the statements of functions, imports and their own heads aside.

    >>> statements(code.ggn_ours)
    2
    """
    nodes = [node for f in functions for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(f))))]
    return sum(isinstance(n, ast.stmt) and not isinstance(n, (ast.Import, ast.ImportFrom)) for n in nodes) - len(functions)


def errors(task: Task, guesses: tuple[str, ...]) -> tuple[int, list[str]]:
    """Return how many guesses fail before one runs, and their messages."""
    messages: list[str] = []
    for guess in guesses:
        s = _made(task)
        try:
            with _quiet():
                exec(guess, vars(code), {"s": s})
        except Exception as error:
            messages.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        else:
            return len(messages), messages
    return len(messages), messages


def _made(task: Task) -> SimpleNamespace:
    s = task.make()
    s.folder = Path(tempfile.mkdtemp())
    return s


@contextlib.contextmanager
def _quiet() -> Any:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def counted() -> Any:
    """Yield a list of the columns that Hessians and Gauss-Newton matrices were multiplied with."""
    columns: list[int] = []
    counters = {(HessianOperator, "_rows"): lambda self, rows: len(rows)}
    with contextlib.suppress(ImportError):
        from curvlinops import GGNLinearOperator, HessianLinearOperator

        counters |= {(kind, "_matmat"): lambda self, X: X[0].shape[-1] for kind in (HessianLinearOperator, GGNLinearOperator)}
    with contextlib.suppress(ImportError):
        import pyhessian

        counters |= {(sys.modules[pyhessian.hessian.__module__], "hessian_vector_product"): lambda *_: 1}
    with contextlib.ExitStack() as stack:
        for (owner, name), count in counters.items():
            stack.enter_context(patch.object(owner, name, _counting(getattr(owner, name), count, columns)))
        yield columns


def _counting(function: Callable[..., Any], count: Callable[..., int], columns: list[int]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        columns.append(count(*args))
        return function(*args)

    return called


def products(task: Task, run: Callable[[SimpleNamespace], Any]) -> str:
    """Return the number of products with a Hessian or a Gauss-Newton matrix, "" for none."""
    s = _made(task)
    with _quiet(), counted() as columns:
        run(s)
    return str(sum(columns) or 0)


def seconds(task: Task, run: Callable[[SimpleNamespace], Any], repeats: int = 3) -> tuple[float, Any]:
    """Return the median processor seconds of some runs after a first, and the last result."""
    times: list[float] = []
    for _ in range(repeats + 1):
        s, result = _made(task), None
        with _quiet():
            start = time.process_time()
            result = run(s)
            times.append(time.process_time() - start)
    return sorted(times[1:] or times)[repeats // 2], result


def row(task: Task) -> tuple[str, list[str]]:
    """Return the row of a task, and the messages of its guesses."""
    cells, messages, results = [], [], []
    helpers = {code.top_peer, code.ggn_peer, code.density_peer, code.training_peer, code.metric_peer}
    for run, guesses in ((task.ours, task.guesses), (task.peer, task.peer_guesses)):
        if run is None:
            cells.append(("",) * 4)
            continue
        lines = statements(run, *((Logits.forward, pairs) if run in helpers else ()))
        try:
            took, result = seconds(task, run)
            count = products(task, run)
        except Exception as error:
            traceback.print_exc()
            cells.append((str(lines), "", "", f"{type(error).__name__}"))
            continue
        failed, said = errors(task, guesses)
        messages += said
        results.append(result)
        cells.append((str(lines), str(failed), count, f"{took:.2g}"))
    agreement = f"{task.compare(*results):.1e}" if task.compare and len(results) == 2 else ""
    both = [f"{a} / {b}" if b else a for a, b in zip(*cells, strict=True)]
    return f"| {task.name} | {task.who} | " + " | ".join(both) + f" | {agreement} |", messages


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="words of the names of tasks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("MPLBACKEND", "agg")
    print("| task | peer | lines | errors | products | seconds | difference |\n|---|---|--:|--:|--:|--:|--:|")
    said: list[str] = []
    for task in TASKS:
        if not options.names or any(name in task.name for name in options.names):
            line, messages = row(task)
            said += [f"{task.name}: {message}" for message in messages]
            print(line, flush=True)
    print("\nMessages of the guesses that failed:\n" + "\n".join(f"- {x}" for x in said))


if __name__ == "__main__":
    main()
