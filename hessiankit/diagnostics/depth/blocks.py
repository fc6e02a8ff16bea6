"""The blocks of a model: the list of modules each of which takes the hidden state that the one before returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks import TransformerBlock
from hessiankit.blocks.placements import steps
from hessiankit.support.errors import InputError

WHO = "depth_diagnostics"
NEGLIGIBLE = 0.1
"""A second stack counts as one if it has more than this share of the first one's parameters."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model, first to last, with their names in ``model.named_modules()``.

    ``name`` is that of their list, or ``"blocks"`` where they were named one by one.
    """

    name: str
    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]

    def __len__(self) -> int:
        return len(self.modules)

    def parameters(self, model: nn.Module) -> list[dict[str, nn.Parameter]]:
        """Return for each block its parameters under their names in ``model.named_parameters()``.

        A parameter that several blocks share belongs to each of them.
        """
        names = {id(p): name for name, p in model.named_parameters()}
        return [{names[id(p)]: p for p in block.parameters()} for block in self.modules]


@dataclass
class _Call:
    """One call of a module: when, the hidden state that it took and the one that it returned."""

    order: int
    x: Tensor
    y: Tensor | None = None


def hidden_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Tensor | None]:
    """Return the position or name of the hidden state among a block's arguments, and the state: as a rule the first real tensor.

    >>> hidden_state((), {"hidden_states": Tensor([1.0]), "mask": None})
    ('hidden_states', tensor([1.]))
    """
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    if "hidden_states" in kwargs:
        named.insert(0, ("hidden_states", kwargs["hidden_states"]))
    return next(((key, x) for key, x in named if isinstance(x, Tensor) and x.is_floating_point()), ("", None))


def first_tensor(output: Any) -> Tensor | None:
    """Return the hidden state among what a block returns: the tensor itself, or a tuple's first entry."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    return first if isinstance(first, Tensor) and first.is_floating_point() else None


@contextmanager
def hooks(
    modules: Iterable[nn.Module], before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Call ``before(module, args, kwargs)`` and ``after(module, args, kwargs, output)`` around every call of the modules."""
    handles = []
    try:
        for module in modules:
            if before is not None:
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            if after is not None:
                handles.append(module.register_forward_hook(after, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def find_blocks(model: nn.Module, run: Callable[[], object], blocks: str | Iterable[str | nn.Module] | None = None) -> Blocks:
    """Return the blocks of a model, found by the tensors that modules pass on, never by their names.

    A stack is a ModuleList or Sequential, or a run of equal modules in one, whose modules are called once and in order, keep the
    shape of their input, and each take the output of the one before. Of nested stacks, the one with most parameters is taken.
    Those that ``blocks`` names are only checked. ``run`` calls the model once, without gradients.

    Raises:
        InputError: If there is no such list, there are two beside each other, or the named ones are no chain.
    """
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m)]
    if blocks is not None:
        chosen = _named(model, blocks)
        calls = _watch(chosen.modules, run)
        if (fault := _fault(chosen, calls)) is not None:
            asked = repr(blocks) if isinstance(blocks, str) else "[...]"
            raise InputError(f"{WHO}: blocks={asked}: {fault}; name the blocks from first to last")
        return chosen
    calls = _watch([child for _, m in lists for child in m.children()], run)
    chains = [chain for name, m in lists for chain in _chains(name, m, calls)]
    if not chains:
        raise InputError(
            f"{WHO}: no ModuleList or Sequential of {type(model).__name__} holds modules each of which takes the hidden "
            "state that the one before returns; pass blocks=[...], the blocks (or their names) from first to last"
        )
    best = max(chains, key=lambda chain: (_size(chain.modules), -len(chain.name)))
    inside = {id(m) for block in best.modules for m in block.modules()}
    for other in chains:
        within = {id(m) for block in other.modules for m in block.modules()}
        apart = not any(id(m) in inside for m in other.modules) and not all(id(m) in within for m in best.modules)
        if apart and _size(other.modules) > NEGLIGIBLE * _size(best.modules):
            raise InputError(
                f"{WHO}: {type(model).__name__} has two stacks of blocks, {best.name!r} and {other.name!r}; "
                f"pass blocks={best.name!r} or blocks={other.name!r}"
            )
    return best


def _named(model: nn.Module, blocks: str | Iterable[str | nn.Module]) -> Blocks:
    modules = dict(model.named_modules())
    names = {id(m): name for name, m in modules.items()}
    if isinstance(blocks, str):
        if blocks not in modules or not isinstance(modules[blocks], (nn.ModuleList, nn.Sequential)):
            raise InputError(f"{WHO}: blocks={blocks!r} is no ModuleList or Sequential of the model; see model.named_modules()")
        chosen = list(modules[blocks].children())
        return Blocks(blocks, tuple(names[id(m)] for m in chosen), tuple(chosen))
    chosen = []
    for block in blocks:
        if isinstance(block, str) and block not in modules:
            raise InputError(f"{WHO}: the model has no module {block!r}, named in blocks=; see model.named_modules()")
        chosen.append(modules[block] if isinstance(block, str) else block)
        if id(chosen[-1]) not in names:
            raise InputError(f"{WHO}: a {type(block).__name__} in blocks= is no module of the model; pass its modules or names")
    if not chosen:
        raise InputError(f"{WHO}: blocks= is empty; pass the blocks from first to last, or None to have them found")
    return Blocks("blocks", tuple(names[id(m)] for m in chosen), tuple(chosen))


def _watch(modules: Iterable[nn.Module], run: Callable[[], object]) -> dict[int, list[_Call]]:
    """Run the model and return the calls of each module, by its id."""
    calls: dict[int, list[_Call]] = {}
    count = 0

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal count
        x = hidden_state(args, kwargs)[1]
        count += 1
        if x is not None:
            calls.setdefault(id(module), []).append(_Call(count, x))

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if id(module) in calls:
            calls[id(module)][-1].y = first_tensor(output)

    with hooks({id(m): m for m in modules}.values(), before, after):
        run()
    return calls


def _fault(chain: Blocks, calls: dict[int, list[_Call]]) -> str | None:
    """Return why modules are no chain of blocks, or None where they are one."""
    before: _Call | None = None
    for k, (name, module) in enumerate(zip(chain.names, chain.modules, strict=True)):
        seen = calls.get(id(module), [])
        if len(seen) != 1:
            return f"{name!r} is called {len(seen)} times, expected once, with a hidden state"
        (call,) = seen
        if call.y is None or call.y.shape != call.x.shape or call.x.ndim < 2:
            shape = "no tensor" if call.y is None else f"shape {tuple(call.y.shape)}"
            return f"{name!r} maps shape {tuple(call.x.shape)} to {shape}, expected tokens (..., d) to the same shape"
        if before is not None and not (call.order > before.order and _is_same(call.x, before.y)):
            return f"{name!r} does not take the output of {chain.names[k - 1]!r}"
        before = call
    return None


def _is_same(a: Tensor, b: Tensor | None) -> bool:
    return a is b or (b is not None and a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all()))


def _chains(name: str, container: nn.Module, calls: dict[int, list[_Call]]) -> list[Blocks]:
    """Return the whole list if it is a chain, else its longest run of modules of one class that is."""

    def chain(children: Sequence[tuple[str, nn.Module]]) -> Blocks:
        return Blocks(name, tuple(f"{name}.{key}".lstrip(".") for key, _ in children), tuple(m for _, m in children))

    whole = chain(list(container.named_children()))
    if all(_size([m]) for m in whole.modules) and _fault(whole, calls) is None:
        return [whole]
    runs = [chain(list(run)) for _, run in groupby(container.named_children(), key=lambda child: type(child[1]))]
    runs = [run for run in runs if _size(run.modules[:1]) and _fault(run, calls) is None]
    return sorted(runs, key=lambda run: (len(run), _size(run.modules)))[-1:]


def _size(modules: Iterable[nn.Module]) -> int:
    return sum(p.numel() for m in modules for p in m.parameters())


class Stream:
    """The input and the output of every block in one forward pass.

    ``inputs[l - 1]`` is x_l and ``outputs[l - 1]`` is y_l = x_{l+1}, before the final norm, which lies behind the last block.
    """

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    @property
    def states(self) -> list[Tensor]:
        """x_1, ..., x_{L+1}."""
        return [*self.inputs, self.outputs[-1]]


@contextmanager
def recording(blocks: Blocks, *, leaves: str = "none") -> Iterator[Stream]:
    """Record the stream of the forward passes inside; each one replaces the one before.

    The inputs of ``leaves`` are cut off from what comes before and made leaves of autograd: of ``"none"`` of the blocks, of the
    ``"first"`` (so that y_L is a function of x_1) or of ``"each"`` (so that y_l is a function of x_l alone).
    """
    stream = Stream()
    first = blocks.modules[0]

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key, x = hidden_state(args, kwargs)
        assert x is not None
        if module is first:
            stream.inputs.clear()
            stream.outputs.clear()
        cut = leaves == "each" or (leaves == "first" and module is first)
        stream.inputs.append(x.detach().requires_grad_() if cut else x)
        if not cut:
            return None
        if isinstance(key, int):
            return (*args[:key], stream.inputs[-1], *args[key + 1 :]), kwargs
        return args, {**kwargs, key: stream.inputs[-1]}

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        y = first_tensor(output)
        assert y is not None
        stream.outputs.append(y)

    with hooks(blocks.modules, before, after):
        yield stream


def check_finite(stream: Stream, blocks: Blocks) -> None:
    """Raise InputError if a hidden state is not finite, naming the first block that returned it."""
    for k, x in enumerate(stream.states):
        if not bool(torch.isfinite(x).all()):
            where = f"the input of block {blocks.names[0]!r}" if k == 0 else f"the output of block {blocks.names[k - 1]!r}"
            raise InputError(f"{WHO}: {where} is NaN or infinite, expected finite numbers; look for the cause there")


TOLERANCE = 64
"""Roundings of the stream's largest entry that x' may differ from x plus a branch."""


@contextmanager
def recording_middles(blocks: Blocks) -> Iterator[list[Tensor | None]]:
    """Record x'_l of every block in the forward pass inside; the list is filled when the block returns.

    In hessiankit's blocks x' is Y of ``hessiankit.blocks.placements``. In others it is the input of a child that equals the
    block's input plus the output of an earlier child: the stream after the attention's residual sum. None without such a child.
    """
    middles: list[Tensor | None] = []
    with ExitStack() as stack:
        for block in blocks.modules:
            calls = _Children(block, middles)
            stack.enter_context(hooks([block], calls.begin, calls.end))
            stack.enter_context(hooks(block.children(), calls.before, calls.after))
        yield middles


class _Children:
    """The hidden states that the children of one block take and return during its call."""

    def __init__(self, block: nn.Module, middles: list[Tensor | None]) -> None:
        self.block, self.middles = block, middles
        self.names = {child: name for name, child in block.named_children()}
        self._forget()

    def _forget(self) -> None:
        """Wait for the next call; until then, calls of the children are those of another block that shares them."""
        self.x: Tensor | None = None
        self.outputs: dict[str, list[Tensor]] = {}
        self.sum: Tensor | None = None

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.x = hidden_state(args, kwargs)[1]

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = hidden_state(args, kwargs)[1]
        if self.sum is None and x is not None and self._is_sum(x):
            self.sum = x

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        y = first_tensor(output)
        if y is not None and self.x is not None and y.shape == self.x.shape:
            self.outputs.setdefault(self.names[module], []).append(y)

    def end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.middles.append(self._of_placement(self.block) if isinstance(self.block, TransformerBlock) else self.sum)
        self._forget()

    def _is_sum(self, candidate: Tensor) -> bool:
        """Return whether this is x plus the output of an earlier child."""
        if self.x is None or candidate.shape != self.x.shape or isinstance(self.block, TransformerBlock):
            return False
        rest = candidate - self.x
        allowed = TOLERANCE * torch.finfo(candidate.dtype).eps * float(candidate.abs().max())
        return any(float((rest - f).abs().max()) <= allowed for calls in self.outputs.values() for f in calls)

    def _of_placement(self, block: TransformerBlock) -> Tensor | None:
        """Return the Y of the block's equation, evaluated on the recorded outputs of its branches and norms, in their order."""
        calls = {name: iter(outputs) for name, outputs in self.outputs.items()}
        branches = {name: (lambda _, outputs=outputs: next(outputs)) for name, outputs in calls.items()}
        scales = {name: p.detach() for name, p in block.named_parameters(recurse=False)}
        recorded = SimpleNamespace(factor=block.factor, **branches, **scales)
        return next((value for name, value in steps(block.own_placement.equation, recorded, self.x) if name == "Y"), None)
