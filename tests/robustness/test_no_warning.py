"""The public API under ``python -W error``: no warning, of torch's or ours, reaches a user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CALLS = """
import sys
sys.path[:0] = sys.argv[1:]
from public_calls import CALLS, FOLDER

for call in CALLS.values():
    result = call.function(**call.right())
    str(result)
    if hasattr(result, "plot"):
        result.plot()
FOLDER.cleanup()
"""


def test_every_public_call_is_silent() -> None:
    """In a process of its own: torch loads its forward mode once a process, and pytest has filters of its own."""
    here, environment = str(Path(__file__).parent), {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", CALLS, here]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
