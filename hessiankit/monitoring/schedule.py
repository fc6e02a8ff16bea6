"""At which steps of training a monitor measures."""

from __future__ import annotations

from hessiankit.errors import InputError


def due(step: int, every: int, *, log_spaced: bool = False) -> bool:
    """Return whether a step is measured: multiples of ``every``, and early on 1, 2, 5, 10, 20, 50, ... below it if asked for.

    The order of the blocks forms in the first steps of training (The Sharpness Disparity Principle, Figure 3: the first 2 %),
    which even spacing misses.

    Raises:
        InputError: ``every`` is not positive, or the step is negative.

    >>> [step for step in range(101) if due(step, 50, log_spaced=True)]
    [0, 1, 2, 5, 10, 20, 50, 100]
    """
    if every < 1:
        raise InputError(f"monitor: every={every} measures at no step; pass 1 or more")
    if step < 0:
        raise InputError(f"monitor: step={step}; expected the number of updates done, 0 or more")
    early = log_spaced and step < every and str(step).rstrip("0") in ("1", "2", "5")
    return step % every == 0 or early
