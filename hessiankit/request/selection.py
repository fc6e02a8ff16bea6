"""Selection of parameters by a user: names, patterns, parameter objects, and parts of a parameter such as ``"w[:, 0:32]"``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import EllipsisType
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hessiankit.support.arguments import check_whole
from hessiankit.support.errors import InputError, nearest


def check_surroundings(caller: str, module: nn.Module) -> None:
    """Refuse contexts as :func:`check_context` does, and modules whose tensors are spread over processes."""
    check_whole(caller, module)
    check_context(caller, module)


def check_context(caller: str, module: nn.Module) -> None:
    """Refuse contexts that change what torch computes.

    Raises:
        InputError: Within ``torch.autocast``, a transform of ``torch.func``, or under a default device other than the module's.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        raise InputError(
            f"{caller}: called within a transform of torch.func (vmap, grad, jvp ...), whose tensors have no values of their "
            "own; call it outside, once for each sample"
        )
    first = next(module.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    kinds = [kind for kind in dict.fromkeys((device.type, "cpu")) if torch.amp.is_autocast_available(kind)]
    lowered = next((kind for kind in kinds if torch.is_autocast_enabled(kind)), None)
    if lowered is not None:
        raise InputError(
            f"{caller}: called within torch.autocast({lowered!r}, {torch.get_autocast_dtype(lowered)}), which would lower the "
            "precision of the derivatives too; call it outside, on a module in one dtype"
        )
    default = torch.get_default_device()
    if first is not None and default.type not in (device.type, "cpu"):
        raise InputError(
            f"{caller}: torch's default device is {default} (torch.device as a context, or set_default_device), but the "
            f"parameters are on {device}, and tensors made on the way would lie apart; call it within "
            f"torch.device({str(device)!r})"
        )


Params: TypeAlias = "str | nn.Parameter | Iterable[str | nn.Parameter] | None"
BasicIndex: TypeAlias = "tuple[int | slice | EllipsisType, ...]"
Index: TypeAlias = "tuple[BasicIndex, ...]"
T = TypeVar("T")

_INTEGER = re.compile(r"[+-]?[0-9]+")
_ITEM_FORM = "expected names, patterns or parameters of the module, e.g. params=['*.weight'] or params=list(module.parameters())"
_FORM = "expected integers, slices and at most one '...', as in [:, 0:32], or several of these as in [0:4; 12:16]"


def repeatable(params: Params) -> Params:
    """Return the argument, or a list in place of an iterator, which can be read only once."""
    return list(params) if isinstance(params, Iterator) else params


class ByName(dict[str, T]):
    """A mapping from names in ``named_parameters()`` to a value for each parameter.

    Attributes:
        aliases: The other names of tied parameters -> the listed one.
    """

    def __init__(self, items: Iterable[tuple[str, T]] = (), aliases: Mapping[str, str] | None = None) -> None:
        super().__init__(items)
        self.aliases = dict(aliases or {})


def parse_part(text: str, caller: str = "parse_part") -> tuple[str, Index | None]:
    """Split ``"name[index]"`` into the name and the index; the index is None where there are no brackets.

    An index is NumPy's basic indexing: integers, slices and ``...``, with commas between the axes. Several of them, with
    semicolons between, select one after the other: ``"w[0:4; 12:16]"`` are the rows 0 to 3 and 12 to 15.

    Returns:
        The name, and a tuple of basic indices (each one indexes a tensor by itself).

    Raises:
        InputError: If the brackets hold anything else.

    >>> parse_part("h.0.weight[:, 2:4]")
    ('h.0.weight', ((slice(None, None, None), slice(2, 4, None)),))
    >>> parse_part("h.0.weight")
    ('h.0.weight', None)
    """
    text = text.strip()
    if not text.endswith("]") or "[" not in text:
        return text, None
    name, _, index_text = text[:-1].partition("[")
    index = _parse_index(index_text)
    if index is None:
        raise InputError(f"{caller}: cannot read the index in {text!r}; {_FORM}")
    return name.strip(), index


def _parse_index(index_text: str) -> Index | None:
    parsed = [_parse_basic(part) for part in index_text.split(";")]
    return None if None in parsed else tuple(parsed)  # type: ignore[arg-type]


def _parse_basic(text: str) -> BasicIndex | None:
    items: list[int | slice | EllipsisType] = []
    for item in (t.strip() for t in text.split(",")):
        bounds = [b.strip() for b in item.split(":")]
        if item == "..." and Ellipsis not in items:
            items.append(Ellipsis)
        elif len(bounds) == 1 and _INTEGER.fullmatch(item):
            items.append(int(item))
        elif 2 <= len(bounds) <= 3 and all(not b or _INTEGER.fullmatch(b) for b in bounds):
            items.append(slice(*(int(b) if b else None for b in bounds)))
        else:
            return None
    return None if any(isinstance(item, slice) and item.step == 0 for item in items) else tuple(items)


def rows_of_part(shape: Sequence[int], index: Index | None, prefix: str = "rows_of_part") -> Tensor:
    """Return the positions in vec_r of a tensor of this shape that an index selects, all different, in NumPy's order.

    NumPy would cut a slice that reaches beyond the tensor; here every bound has to lie within it.

    Args:
        shape: Shape of the whole tensor.
        index: Result of :func:`parse_part`; None selects everything.
        prefix: Start of an error message.

    Raises:
        InputError: If the index has too many axes, reaches beyond the tensor, selects nothing or an entry twice.

    Columns 1 and 2 of a 2 x 4 matrix:

    >>> rows_of_part((2, 4), parse_part("w[:, 1:3]")[1]).tolist()
    [1, 2, 5, 6]
    """
    if index is None:
        return torch.arange(math.prod(shape), device="cpu")
    rows = torch.cat([_rows_of_basic(tuple(shape), basic, prefix) for basic in index])
    if rows.numel() == 0:
        raise InputError(f"{prefix}: the index selects nothing of shape {tuple(shape)}; ask for at least one entry")
    if len(index) > 1 and rows.unique().numel() != rows.numel():
        raise InputError(f"{prefix}: the indices between semicolons overlap; each entry may be selected once")
    return rows


def _rows_of_basic(shape: tuple[int, ...], index: BasicIndex, prefix: str) -> Tensor:
    axes = len(index) - (Ellipsis in index)
    if axes > len(shape):
        raise InputError(f"{prefix}: the index has {axes} axes, but the parameter has shape {shape}; drop {axes - len(shape)}")
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    full = [*index[:at], *[slice(None)] * (len(shape) - axes), *index[at + 1 :]]
    flat = torch.zeros(1, dtype=torch.int64, device="cpu")
    for axis, (size, item) in enumerate(zip(shape, full, strict=True)):
        axis_prefix = f"{prefix}: axis {axis} of shape {shape} has {size} entries"
        bounds = (item.start, item.stop) if isinstance(item, slice) else ()
        excess = [b for b in bounds if b is not None and not -size <= b <= size]
        if excess:
            raise InputError(f"{axis_prefix}, the slice reaches to {excess[0]}; expected bounds of {-size} to {size}")
        if isinstance(item, int) and not -size <= item < size:
            raise InputError(f"{axis_prefix}, the index is {item}; expected {-size} to {size - 1}")
        flat = (flat[:, None] * size + torch.from_numpy(np.arange(size)[item].reshape(-1).copy())).reshape(-1)
    return flat


def locate(caller: str, text: object, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, Tensor | None]:
    """Return the parameter of a name or ``"name[index]"``, and the positions in its vec_r (None: all of them).

    Other names of tied parameters are understood where ``shapes`` is :class:`ByName`.

    Raises:
        InputError: If it is no text, no parameter has that name, or the index cannot be used.

    >>> locate("example", "w[1]", {"w": (2, 3)})
    ('w', tensor([3, 4, 5]))
    """
    if not isinstance(text, str):
        kind = f"{text!r}, of type {type(text).__name__}" if isinstance(text, int) else f"of type {type(text).__name__}"
        raise InputError(f"{caller}: a parameter is asked for by its name, not by a value {kind}; {_names(list(shapes))}")
    aliases = getattr(shapes, "aliases", {})
    if (full_name := aliases.get(text, text)) in shapes:
        return full_name, None
    name, index = parse_part(text, caller)
    name = aliases.get(name, name)
    if name not in shapes:
        raise InputError(f"{caller}: no parameter {name!r}; {_close(name, list(shapes))}")
    return name, None if index is None else rows_of_part(shapes[name], index, f"{caller}: {text!r}")


def chosen(caller: str, selection: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor | None]:
    """Return the parameters that names, patterns, ``"name[index]"`` or a list of these mean, in the order of ``shapes``.

    Each comes with the positions in its vec_r, each position once; None: all of them.

    Raises:
        InputError: If nothing is asked for, something is not there, or an index cannot be used.

    >>> chosen("example", ["*.w[1]", "a.b"], {"a.w": (2, 2), "a.b": (2,)})
    {'a.w': tensor([2, 3]), 'a.b': None}
    """
    parts: dict[str, list[Tensor | None]] = {}
    for item in selection if isinstance(selection, (list, tuple, set)) else [selection]:
        for name in _meant(item, shapes):
            parameter, rows = locate(caller, name, shapes)
            parts.setdefault(parameter, []).append(rows)
    if not parts:
        raise InputError(f"{caller}: an empty list selects no parameter; pass names or patterns")
    return {name: _union(parts[name]) for name in shapes if name in parts}


def _union(rows: list[Tensor | None]) -> Tensor | None:
    """Return all positions of several selections; those of a single one in their own order."""
    positions = [at for at in rows if at is not None]
    return None if len(positions) < len(rows) else positions[0] if len(positions) == 1 else torch.cat(positions).unique()


def _meant(item: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[Any]:
    """Return the names that a pattern matches, each with the pattern's index if it has one; other items unchanged."""
    names = (*shapes, *getattr(shapes, "aliases", {}))
    if not isinstance(item, str) or item in names:
        return [item]
    matching = [name for name in names if fnmatchcase(name, item)]
    pattern, bracket, index_text = item.rpartition("[")
    if not matching and bracket and item.endswith("]"):
        matching = [f"{name}[{index_text}" for name in names if fnmatchcase(name, pattern)]
    return matching or [item]


def select(caller: str, module: nn.Module, params: Params = None) -> dict[str, Tensor]:
    """Return the parameters that ``params`` means, detached, in the order of ``named_parameters()``.

    Args:
        caller: The function on whose behalf parameters are chosen; every error message starts with it.
        params: None, all that require grad; or one of these, or an iterable of them: a name; a pattern (``"*.attn.*"``,
            ``"layers.[01].*"``, case matters), which means the parameters that require grad among its matches; a
            parameter object of the module; ``"name[index]"`` (see :func:`parse_part`; the name may be a pattern), which
            chooses the whole parameter. A tied parameter has one entry, under the name that ``named_parameters()`` gives it;
            every other name of it is understood too.

    Raises:
        InputError: If something that was asked for is not there, does not require grad, or cannot be read.

    >>> layer = nn.Linear(2, 3)
    >>> list(select("example", layer, ["weight[0]", layer.bias]))
    ['weight', 'bias']
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"{caller}: expected a torch.nn.Module, got {type(module).__name__}")
    check_context(caller, module)
    parameters = dict(module.named_parameters())
    lazy = next((name for name, p in parameters.items() if is_lazy(p)), None)
    if lazy is not None:
        raise InputError(
            f"{caller}: {lazy!r} is not initialised: a lazy module gets its shape from the first call; call the module on the "
            "inputs once before"
        )
    trained = [name for name, p in parameters.items() if p.requires_grad and p.numel()]
    if not trained and any(p.requires_grad for p in parameters.values()):
        raise InputError(f"{caller}: all parameters that require grad have no entries, so there is nothing to differentiate")
    if not trained:
        raise InputError(
            f"{caller}: the module has no parameters that require grad; call requires_grad_(True) on those of interest"
        )
    if params is None:
        return {name: parameters[name].detach() for name in trained}
    finder = _Finder(caller, module, parameters)
    items = [params] if isinstance(params, (str, Tensor)) else params
    if not isinstance(items, Iterable):
        raise InputError(f"{caller}: params is of type {type(params).__name__}; {_ITEM_FORM}")
    names = {name for item in items for name in finder.names(item)}
    if finder.unknown:
        choices = [name for name, main_name in finder.first.items() if parameters[main_name].requires_grad]
        raise InputError(
            f"{caller}: params={finder.unknown}: this {finder.kind} has no such parameter; {_close(finder.unknown[0], choices)}"
        )
    if not names:
        raise InputError(
            f"{caller}: params is empty, so there is nothing to differentiate; pass names, or None for all parameters"
        )
    return {name: parameters[name].detach() for name in trained if name in names}


class _Finder:
    """Looks up one item of ``params`` after the other in a module.

    Attributes:
        first: Every name that the module has for a parameter -> the one that is listed.
        unknown: Items that are no parameter, so that one message names all of them.
    """

    def __init__(self, caller: str, module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        self.caller, self.parameters, self.kind = caller, parameters, type(module).__name__
        self.of_object = {id(p): name for name, p in parameters.items()}
        self.first = {name: self.of_object[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
        self.unknown: list[str] = []

    def names(self, item: object) -> list[str]:
        """Return the listed names that an item means."""
        if isinstance(item, str):
            return self._of_text(item.strip())
        if not isinstance(item, Tensor):
            raise InputError(f"{self.caller}: params holds a value of type {type(item).__name__}; {_ITEM_FORM}")
        if id(item) not in self.of_object:
            kind = "a parameter" if isinstance(item, nn.Parameter) else "a tensor"
            candidates = [f"{n!r}" for n, p in self.parameters.items() if p.shape == item.shape]
            hint = f"; of that shape it has {_some(candidates)}" if candidates else ""
            raise InputError(
                f"{self.caller}: params holds {kind} of shape {tuple(item.shape)} that is not a parameter of this "
                f"{self.kind}{hint}; pass the module's own parameter (not a copy or a view of it), or its name"
            )
        return self._trained([self.of_object[id(item)]])

    def _of_text(self, text: str) -> list[str]:
        if text in self.first:
            return self._trained([self.first[text]])
        if text.endswith("]") and (name := text.partition("[")[0].strip()) in self.first:
            return self._parts([self.first[name]], text[text.index("[") + 1 : -1], text)
        matches: list[str] = []
        if any(c in text for c in "*?["):  # a pattern
            matches = self._matches(text)
            name, bracket, index_text = text[:-1].rpartition("[")
            if not matches and bracket and text.endswith("]") and _parse_index(index_text) is not None:
                matches = self._parts(self._matches(name.strip()), index_text, text)
        self.unknown += [] if matches else [text]
        return matches

    def _matches(self, pattern: str) -> list[str]:
        return self._trained(list(dict.fromkeys(x for name, x in self.first.items() if fnmatchcase(name, pattern))), pattern)

    def _trained(self, names: list[str], pattern: str = "") -> list[str]:
        """Return those of some names that can be differentiated with respect to; an error if none of them can."""
        trained = [name for name in names if self.parameters[name].requires_grad and self.parameters[name].numel()]
        if trained or not names:
            return trained
        shape = tuple(self.parameters[names[0]].shape)
        if any(self.parameters[name].requires_grad for name in names):
            reason = (
                f"what the pattern {pattern!r} matches has no entries"
                if pattern
                else f"{names[0]!r} has shape {shape}, no entries"
            )
            raise InputError(f"{self.caller}: {reason}; leave it out of params")
        subject = f"all that the pattern {pattern!r} matches ({_some([repr(n) for n in names])})" if pattern else f"{names[0]!r}"
        raise InputError(
            f"{self.caller}: {subject} does not require grad; call requires_grad_(True) on it, or leave it out of params"
        )

    def _parts(self, names: list[str], index_text: str, text: str) -> list[str]:
        """Return those of some names that can be differentiated with respect to, after a check of a part of each."""
        if (index := _parse_index(index_text)) is None:
            raise InputError(f"{self.caller}: cannot read the index in {text!r}; {_FORM}")
        trained = self._trained(names)
        for name in trained:
            rows_of_part(self.parameters[name].shape, index, f"{self.caller}: {text!r}")
        return trained


def _close(name: str, names: list[str]) -> str:
    """Return the names like this one, or the first few."""
    like = [n for n in names if n.endswith("." + name)] + nearest(name, names)
    like = list(dict.fromkeys(like))[:3]
    return f"did you mean {' or '.join(map(repr, like))}?" if like else _names(names)


def _names(names: list[str]) -> str:
    return f"there are {_some([repr(n) for n in names])}"


def _some(items: list[str], limit: int = 6) -> str:
    return ", ".join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")
