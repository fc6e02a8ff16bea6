"""The exit codes of every command.

An error that nobody foresaw prints Python's traceback and ends with 1: whatever is not 0 has not passed.
"""

from __future__ import annotations

OK = 0
FAILED = 1
"""The work was done, and what was checked is not as it should be; each command's help says what that is."""
USAGE = 2
"""An option, a file or a model cannot be used; one line on standard error says why."""
INTERRUPTED = 130
"""Ctrl-C. What a command keeps of its work is kept."""
CLOSED = 141
"""What read the output stopped reading, as in ``hessiankit claims | head``; shells give the same to other programs."""


def described(failed: str | None) -> str:
    """Return the line of a command's help.

    Args:
        failed: When the command ends with 1; None if it never does.

    >>> described(None)
    '0 done; 2 an option or a file cannot be used; 130 interrupted'
    """
    found = f"{FAILED} {failed}; " if failed else ""
    return f"{OK} done; {found}{USAGE} an option or a file cannot be used; {INTERRUPTED} interrupted"
