"""Work in a process of its own, with clean memory and its own number of threads; a crash costs one cell only."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.plan import Tell

MARK = "@benchmarks "


class OverBudget(RuntimeError):
    """The process was stopped because its time was over."""


def run_fresh(function: str, arguments: dict[str, Any], *, threads: int, seconds: float, tell: Tell) -> dict[str, Any]:
    """Call ``module:function(tell=..., **arguments)`` in a new Python process and return what it returns.

    The process sees as many processors as it has threads, where the platform allows that, so that libraries with thread
    pools of their own keep to them.

    Raises:
        OverBudget: The process was stopped after so many seconds.
        RuntimeError: The process failed; the message holds the last line that it wrote.
    """
    env = {**os.environ, **{name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}}
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen={'false' if threads == 1 else 'true'}".strip()
    request = json.dumps({"function": function, "arguments": arguments, "threads": threads})
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fresh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=env,
        )
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        result: dict[str, Any] | None = None
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(request)
                process.stdin.close()
            for line in process.stdout:
                if line.startswith(MARK):
                    message = json.loads(line[len(MARK) :])
                    if "progress" in message:
                        tell(*message["progress"])
                    else:
                        result = message["result"]
            process.wait()
        finally:
            late = not timer.is_alive()
            timer.cancel()
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if result is None and late:
            raise OverBudget(f"stopped after {seconds:.0f} s")
        if result is None:
            errors.seek(0)
            lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
            raise RuntimeError(f"exit code {process.returncode}{': ' + lines[-1][:300] if lines else ''}")
    return result


def confine(threads: int) -> None:
    """Give torch so many threads, and this process so many processors where the platform allows it."""
    import torch

    torch.set_num_threads(threads)
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, allowed[-threads:])


def main() -> None:
    """Answer one request from standard input; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.read())
    module, _, name = request["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    confine(request["threads"])

    def say(message: dict[str, Any]) -> None:
        answers.write(MARK + json.dumps(message, allow_nan=False) + "\n")
        answers.flush()

    say({"result": function(tell=lambda *state: say({"progress": state}), **request["arguments"])})


if __name__ == "__main__":
    main()
