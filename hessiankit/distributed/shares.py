"""A rank's share of the data: its micro-batches, and the numbers that its sequences have in the whole data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hessiankit.distributed.ranks import Ranks
from hessiankit.errors import InputError
from hessiankit.estimation.batches import IGNORED, MicroBatch, micro_batches


def share(
    ranks: Ranks,
    data: Any,
    target: Any,
    *,
    micro_batch: int | None,
    shift: bool | None,
    numbers: Iterable[int] | None,
) -> list[MicroBatch]:
    """Return this rank's micro-batches; none where it holds no data.

    The sequences are numbered rank by rank: rank 0 has the first ones, rank 1 those after them; or as ``numbers`` says.

    Raises:
        InputError: On every rank, if the data of one cannot be used, or two ranks claim the same number.
    """
    given = None if numbers is None else list(numbers)

    def read() -> list[MicroBatch]:
        if data is None or (isinstance(data, (list, tuple)) and not data):
            return []
        return micro_batches(ranks.who, data, target, micro_batch=micro_batch, numbers=given, shift=shift)

    own = ranks.together(read)
    ranks.agree(**{"numbers=": "given" if given is not None else "not given"})
    numbered = [number for batch in own for number in batch.numbers]
    if given is None:
        first = sum(ranks.gather(len(numbered))[: ranks.rank])
        return [replace(batch, numbers=tuple(first + number for number in batch.numbers)) for batch in own]
    claimed = Counter(number for its in ranks.gather(numbered) for number in its)
    twice = next((number for number, times in claimed.items() if times > 1), None)
    if twice is not None:
        raise InputError(f"{ranks.who}: two ranks hold a sequence of number {twice}; give each sequence of all data its own")
    return own


def counts(batch: MicroBatch, loss: str) -> bool:
    """Tell whether any position of a micro-batch has a label that counts."""
    if loss == "mse":
        return True
    shifted = batch.shifted if batch.shifted is not None else batch.target.ndim > 1
    target = batch.target[..., 1:] if shifted else batch.target
    return bool((target != IGNORED).any())
