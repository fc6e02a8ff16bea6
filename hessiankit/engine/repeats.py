"""Operations of a record that compute what an earlier one has computed: each is run once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch.utils._pytree import tree_map

from hessiankit.engine.kernel_calls import KernelProduct
from hessiankit.engine.recorder import Note, TensorSpec

UNINITIALISED = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted"})


def without_repeats(notes: Sequence[Note], others: Collection[int]) -> tuple[list[Note], dict[int, int]]:
    """Return the notes without those that repeat an earlier one, and the storages that take the place of what these made.

    A note repeats another if it calls the same function of the same values; what is written more than once is no value.

    Args:
        notes: In order.
        others: Storages that something beside the notes reads or writes: what results are added to.

    >>> import torch
    >>> from hessiankit.engine.recorder import recording
    >>> x = torch.ones(2)
    >>> with recording([x]) as record:
    ...     _ = x.exp() * x.exp() - x.exp().mul_(2)
    >>> [note.name for note in record.notes], [note.name for note in without_repeats(record.notes, ())[0]]
    (['exp', 'exp', 'mul', 'exp', 'mul_', 'sub'], ['exp', 'mul', 'exp', 'mul_', 'sub'])
    """
    writes = Counter(key for note in notes if note.name not in UNINITIALISED for key in _changed(note))
    made_here = set().union(*(_changed(note) - {x.storage for x in note.written()} for note in notes))
    written = {x.storage for note in notes for x in note.written()}
    writes.update(dict.fromkeys({*others, *(written - made_here)}, 2))  # they had a value before
    same: dict[int, int] = {}
    found: dict[str, Note] = {}
    left: list[Note] = []

    def renamed(x: Any) -> Any:
        return replace(x, storage=same[x.storage]) if isinstance(x, TensorSpec) and x.storage in same else x

    for note in notes:
        if getattr(note.function, "_schema", None) is None:
            now = replace(note, args=(note.args[0].mapped(renamed),))
        else:
            now = Note(note.function, *tree_map(renamed, (note.args, note.kwargs, note.result)))
        made = _made(now)
        if not made or any(writes[key] > 1 for key in ({x.storage for x in now.read()} | {x.storage for x in made})):
            left.append(now)
            continue
        earlier = found.setdefault(_description(now, made), now)
        if earlier is now:
            left.append(now)
        else:
            same.update((x.storage, y.storage) for x, y in zip(made, _made(earlier), strict=True))
    return left, same


def _changed(note: Note) -> set[int]:
    """Return the storages that a note makes or writes into."""
    before = {x.storage for x in note.read()}
    return {x.storage for x in note.written()} | {x.storage for x in note.returned() if x.storage not in before}


def _made(note: Note) -> list[TensorSpec]:
    """Return what a note makes of values alone; nothing if it writes into an argument, reads for Python, or makes views."""
    if note.args and isinstance(note.args[0], KernelProduct):
        return note.written()
    before = {x.storage for x in note.read()}
    is_new = not note.written() and note.name not in UNINITIALISED and all(x.storage not in before for x in note.returned())
    return note.returned() if is_new else []


def _description(note: Note, made: Sequence[TensorSpec]) -> str:
    """Return what tells notes apart that make different values, or lay them out otherwise."""
    layouts = [(x.shape, x.strides, x.offset, x.dtype, x.storage_bytes) for x in made]
    read = note.read() if note.args and isinstance(note.args[0], KernelProduct) else (note.args, note.kwargs)
    return repr((note.function, layouts, read))
