"""A process that has torch loaded and forks one child a run: loading torch anew takes longer than most tests.

It loads nothing of the tree: what is imported in a child comes from the copy. A request is one JSON line on standard input,
``{"tree", "log", "environment", "tests", "check", "limit"}``; the answer is one line, ``{"code", "seconds"}``, code None at the
limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from typing import Any

import numpy  # noqa: F401  loaded before the fork
import pytest
import scipy.sparse.linalg  # noqa: F401
import sympy  # noqa: F401
import torch

POLL = 0.02


def child(request: dict[str, Any]) -> int:
    """Run in the child; return its exit code."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(request["environment"], PYTHONPATH=request["tree"])
    os.chdir(request["tree"])
    sys.path.insert(0, request["tree"])
    torch.set_num_threads(1)
    if request.get("check"):
        from benchmarks.mutants.checks import seen

        return int(seen(request["tests"]))
    return int(
        pytest.main(
            ["-x", "-q", "-n0", "-m", "not exhaustive", "-p", "no:cacheprovider", "--no-header", "--tb=line", *request["tests"]]
        )
    )


def end(pid: int) -> None:
    """Kill a child and the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def serve() -> None:
    """Answer requests until the input ends."""
    running: list[int] = []

    def stop(*_: object) -> None:
        for pid in running:
            end(pid)
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    for line in sys.stdin:
        request, start = json.loads(line), time.monotonic()
        pid = os.fork()
        if pid == 0:
            code = 3
            try:
                code = child(request)
            except BaseException as error:  # whatever a mutant raises is a verdict
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        code = None
        running.append(pid)
        while time.monotonic() - start < request["limit"]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                break
            time.sleep(POLL)
        else:
            end(pid)
            os.waitpid(pid, 0)
        running.clear()
        print(json.dumps({"code": code, "seconds": round(time.monotonic() - start, 2)}), flush=True)


if __name__ == "__main__":
    serve()
