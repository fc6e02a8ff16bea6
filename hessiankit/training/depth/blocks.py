"""The blocks of a model: the list of modules each of which takes the hidden state that the one before returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks import TransformerBlock
from hessiankit.blocks.placements import steps
from hessiankit.support.errors import InputError
from hessiankit.training.partition.modules import is_norm

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


def hidden_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Tensor | None]:
    """Return the position or name of the hidden state among a block's arguments, and the state: as a rule the first real tensor.

    >>> hidden_state((), {"hidden_states": Tensor([1.0]), "mask": None})
    ('hidden_states', tensor([1.]))
    """
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    if "hidden_states" in kwargs:
        arguments.insert(0, ("hidden_states", kwargs["hidden_states"]))
    return next(((key, x) for key, x in arguments if isinstance(x, Tensor) and x.is_floating_point()), ("", None))


def first_tensor(output: Any) -> Tensor | None:
    """Return the hidden state among what a block returns: the tensor itself, or a tuple's first entry."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    return first if isinstance(first, Tensor) and first.is_floating_point() else None


@contextmanager
def hooks(
    modules: Iterable[nn.Module], pre_hook: Callable[..., Any] | None = None, post_hook: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Call ``before(module, args, kwargs)`` and ``after(module, args, kwargs, output)`` around every call of the modules."""
    with ExitStack() as stack:
        for module in modules:
            if pre_hook is not None:
                stack.callback(module.register_forward_pre_hook(pre_hook, with_kwargs=True).remove)
            if post_hook is not None:
                stack.callback(module.register_forward_hook(post_hook, with_kwargs=True).remove)
        yield


@dataclass
class ModuleCall:
    """One call of a module: the hidden states that it took and returned, None where a call has none."""

    module: nn.Module
    x: Tensor | None
    y: Tensor | None = None


@contextmanager
def watching(modules: Iterable[nn.Module]) -> Iterator[list[ModuleCall]]:
    """Record the calls of the modules inside, in the order in which they begin."""
    calls: list[ModuleCall] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(ModuleCall(module, hidden_state(args, kwargs)[1]))

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        last = next((call for call in reversed(calls) if call.module is module and call.y is None), None)
        if last is not None:
            last.y = first_tensor(output)

    with hooks(modules, before, after):
        yield calls


def find_blocks(model: nn.Module, run: Callable[[], object], blocks: str | Iterable[str | nn.Module] | None = None) -> Blocks:
    """Return the blocks of a model, recognised by the tensors that modules pass on, never by their names.

    A stack is a ModuleList or Sequential, or a run of equal modules in one, whose modules are called once and in order, keep the
    shape of their input, and each take the output of the one before. Of nested stacks, the one with most parameters is taken.
    Those that ``blocks`` names are only checked. ``run`` calls the model once, without gradients.

    Raises:
        InputError: If there is no such list, there are two beside each other, or the named ones are no chain.
    """
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m)]
    blocks_of_user = None if blocks is None else _named(model, blocks)
    modules = [child for _, m in lists for child in m.children()] if blocks_of_user is None else blocks_of_user.modules
    with watching({id(m): m for m in modules}.values()) as calls:
        run()
    if blocks_of_user is not None:
        if (fault := _fault(blocks_of_user, calls)) is not None:
            argument = repr(blocks) if isinstance(blocks, str) else "[...]"
            raise InputError(f"{WHO}: blocks={argument}: {fault}; name the blocks from first to last")
        return blocks_of_user
    chains = [chain for name, m in lists for chain in _chains(name, m, calls)]
    if not chains:
        raise InputError(
            f"{WHO}: no ModuleList or Sequential of {type(model).__name__} holds modules each of which takes the hidden "
            "state that the one before returns; pass blocks=[...], the blocks (or their names) from first to last"
        )
    best = max(chains, key=lambda chain: (_size(chain.modules), -len(chain.name)))
    best_ids = {id(m) for block in best.modules for m in block.modules()}
    for rival in chains:
        rival_ids = {id(m) for block in rival.modules for m in block.modules()}
        is_disjoint = not any(id(m) in best_ids for m in rival.modules) and not all(id(m) in rival_ids for m in best.modules)
        if is_disjoint and _size(rival.modules) > NEGLIGIBLE * _size(best.modules):
            raise InputError(
                f"{WHO}: {type(model).__name__} has two stacks of blocks, {best.name!r} and {rival.name!r}; "
                f"pass blocks={best.name!r} or blocks={rival.name!r}"
            )
    return best


def are_pre_norm(blocks: Blocks, run: Callable[[], object]) -> bool:
    """Tell whether all blocks are pre-norm, by the tensors that their norms take and return in one call of the model.

    In a pre-norm block the first norm takes the stream, no norm takes what a sub-layer returns, and none returns the block's
    output; x + norm(f(x)), as in sandwich norms, has a norm behind a sub-layer. What a sub-layer has added to the stream itself,
    as T5's and BLOOM's do, is the stream. Norms of queries and keys are left out: they take another shape. A block without a
    norm is not pre-norm.
    """
    modules = {id(m): m for block in blocks.modules for m in block.modules()}
    norms = {key for key, m in modules.items() if is_norm(m)}
    with watching(modules.values()) as calls:
        run()
    for block in blocks.modules:
        inside = {id(m) for m in block.modules()}
        inner_calls = [call for call in calls if id(call.module) in inside]
        block_call = next(call for call in inner_calls if call.module is block)
        assert block_call.x is not None
        takes = [
            call for call in inner_calls if id(call.module) in norms and call.x is not None and call.x.shape == block_call.x.shape
        ]
        stream, outputs = [block_call.x], list[Tensor]()
        for call in inner_calls:
            if call.module is not block and call.y is not None:
                (stream if any(_is_sum(call.y, x, inner_calls) for x in stream) else outputs).append(call.y)
        if (
            not takes
            or not _is_same(block_call.x, takes[0].x)
            or any(_is_same(block_call.y, call.y) for call in takes if block_call.y is not None)
        ):
            return False
        if any(call.x is y for call in takes for y in outputs):
            return False
    return True


def _named(model: nn.Module, blocks: str | Iterable[str | nn.Module]) -> Blocks:
    modules = dict(model.named_modules())
    names = {id(m): name for name, m in modules.items()}
    if isinstance(blocks, str):
        if blocks not in modules or not isinstance(modules[blocks], (nn.ModuleList, nn.Sequential)):
            raise InputError(f"{WHO}: blocks={blocks!r} is no ModuleList or Sequential of the model; see model.named_modules()")
        members = list(modules[blocks].children())
        return Blocks(blocks, tuple(names[id(m)] for m in members), tuple(members))
    members = []
    for block in blocks:
        if isinstance(block, str) and block not in modules:
            raise InputError(f"{WHO}: the model has no module {block!r}, named in blocks=; see model.named_modules()")
        members.append(modules[block] if isinstance(block, str) else block)
        if id(members[-1]) not in names:
            raise InputError(f"{WHO}: a {type(block).__name__} in blocks= is no module of the model; pass its modules or names")
    if not members:
        raise InputError(f"{WHO}: blocks= is empty; pass the blocks from first to last, or None to have them found")
    return Blocks("blocks", tuple(names[id(m)] for m in members), tuple(members))


def _fault(chain: Blocks, calls: Sequence[ModuleCall]) -> str | None:
    """Return why modules are no chain of blocks, or None where they are one."""
    order, output = -1, None
    for k, (name, module) in enumerate(zip(chain.names, chain.modules, strict=True)):
        calls_of_module = [(at, call.x, call.y) for at, call in enumerate(calls) if call.module is module and call.x is not None]
        if len(calls_of_module) != 1:
            return f"{name!r} is called {len(calls_of_module)} times, expected once, with a hidden state"
        ((at, x, y),) = calls_of_module
        if y is None or y.shape != x.shape or x.ndim < 2:
            shape = "no tensor" if y is None else f"shape {tuple(y.shape)}"
            return f"{name!r} maps shape {tuple(x.shape)} to {shape}, expected tokens (..., d) to the same shape"
        if k and not (at > order and _is_same(x, output)):
            return f"{name!r} does not take the output of {chain.names[k - 1]!r}"
        order, output = at, y
    return None


def _is_same(a: Tensor, b: Tensor | None) -> bool:
    return a is b or (b is not None and a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all()))


def _chains(name: str, container: nn.Module, calls: Sequence[ModuleCall]) -> list[Blocks]:
    """Return the whole list if it is a chain, else its longest run of modules of one class that is."""

    def chain(children: Iterable[tuple[str, nn.Module]]) -> Blocks:
        keys, modules = zip(*children, strict=True)
        return Blocks(name, tuple(f"{name}.{key}".lstrip(".") for key in keys), modules)

    full_chain = chain(container.named_children())
    if all(_size([m]) for m in full_chain.modules) and _fault(full_chain, calls) is None:
        return [full_chain]
    runs = [chain(run) for _, run in groupby(container.named_children(), key=lambda child: type(child[1]))]
    runs = [run for run in runs if _size(run.modules[:1]) and _fault(run, calls) is None]
    return sorted(runs, key=lambda run: (len(run), _size(run.modules)))[-1:]


def _size(modules: Iterable[nn.Module]) -> int:
    return sum(p.numel() for m in modules for p in m.parameters())


@dataclass(eq=False)
class Stream:
    """The input and the output of every block in one forward pass.

    ``inputs[l - 1]`` is x_l and ``outputs[l - 1]`` is y_l = x_{l+1}, before the final norm, which lies behind the last block.
    """

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

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
            place = f"the input of block {blocks.names[0]!r}" if k == 0 else f"the output of block {blocks.names[k - 1]!r}"
            raise InputError(f"{WHO}: {place} is NaN or infinite, expected finite numbers; look for the cause there")


TOLERANCE = 64
"""Roundings of the stream's largest entry that x' may differ from x plus a branch."""


@contextmanager
def recording_middles(blocks: Blocks) -> Iterator[list[Tensor | None]]:
    """Record x'_l of every block in the forward pass inside; the list is filled when the block returns.

    In hessiankit's blocks x' is Y of ``hessiankit.blocks.placements``. In others it is the first input of a module, among those
    that the block itself calls, that equals the block's input plus what an earlier module or a part of it returned: the stream
    after the attention's residual sum. None without such a module.
    """
    middles: list[Tensor | None] = []
    with ExitStack() as stack:
        for block in blocks.modules:
            calls = stack.enter_context(watching(m for m in block.modules() if m is not block))

            def before(*_: Any, calls: list[ModuleCall] = calls) -> None:
                calls.clear()  # those of another block that shares the children

            def after(block: nn.Module, args: Any, kwargs: Any, output: Any, calls: list[ModuleCall] = calls) -> None:
                x = hidden_state(args, kwargs)[1]
                assert x is not None
                middles.append(_of_placement(block, x, calls) if isinstance(block, TransformerBlock) else _residual_sum(x, calls))
                calls.clear()

            stack.enter_context(hooks([block], before, after))
        yield middles


def _residual_sum(x: Tensor, calls: Sequence[ModuleCall]) -> Tensor | None:
    """Return the first input of a module, called by no other, that is x plus the output of an earlier call; in the shape of x."""
    parts = {id(m) for call in calls for m in call.module.modules() if m is not call.module}
    sums = (call.x for k, call in enumerate(calls) if id(call.module) not in parts and _is_sum(call.x, x, calls[:k]))
    return next((one.reshape(x.shape) for one in sums if one is not None), None)


def _is_sum(y: Tensor | None, x: Tensor | None, calls: Sequence[ModuleCall]) -> bool:
    """Tell whether y, also in another shape, is x plus what one of the calls returned."""
    if y is None or x is None or not y.numel() == x.numel() > 0:
        return False
    difference, tolerance = y.reshape(x.shape) - x, TOLERANCE * torch.finfo(y.dtype).eps * float(y.abs().max())
    outputs = (call.y for call in calls if call.y is not None and call.y.shape == x.shape)
    return any(float((difference - output).abs().max()) <= tolerance for output in outputs)


def _of_placement(block: TransformerBlock, x: Tensor, calls: Sequence[ModuleCall]) -> Tensor | None:
    """Return Y of the block's equation, evaluated on the recorded outputs of its branches and norms, in their order."""
    outputs = {
        name: iter([call.y for call in calls if call.module is child and call.y is not None])
        for name, child in block.named_children()
    }
    branches = {name: (lambda _, of=of: next(of)) for name, of in outputs.items()}
    scales = {name: p.detach() for name, p in block.named_parameters(recurse=False)}
    namespace = SimpleNamespace(factor=block.factor, **branches, **scales)
    return next((value for name, value in steps(block.own_placement.equation, namespace, x) if name == "Y"), None)
