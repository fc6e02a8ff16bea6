"""Subject of ``derive``: a value at a point, and the same value at sizes that are printed as letters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sympy import Symbol, solve, symbols
from torch import Tensor, nn

from derivations.arrays import Array
from derivations.stage import Stage, leaf
from hessiankit.blocks import TransformerBlock
from hessiankit.blocks.norms import GroupNorm, norm_of
from hessiankit.request.checks import check_labels, check_same_shape, check_tensor, check_tensors
from hessiankit.support.errors import InputError, unknown
from hessiankit.theory.formulas.block_at import BlockAt, Exact, attention_stage, block_stage
from hessiankit.theory.formulas.symbols import EPSILON, SCALE, SizeName, index_of, prime_copy, sizes_for, spelling, symbol_of

WORDS = {
    "query": "W_Q", "key": "W_K", "value": "W_V", "output": "W_O", "up": "W_1", "down": "W_2", "gate": "W_G", "input": "X",
    "weight": r"\gamma", "bias": r"\beta",
}  # fmt: skip
"""Words for the arguments, by their symbols; dotted names and the papers' letters (Q, W_Q, 1, ...) work too."""
LOSSES = ("mse", "cross_entropy")
LOSS = r"\mathcal{L}"


@dataclass(frozen=True)
class Subject:
    """A value that depends on named arguments."""

    point: Mapping[str, Array]  # argument -> array; the input is one of them
    symbols: Mapping[str, str]  # argument -> its letter
    wrt: tuple[str, ...]  # what is differentiated by default
    # the value at a point, as a stage on the letters of the arguments; for arrays of exact entries too
    stage: Callable[[Mapping[str, Array]], Stage]
    printed: Callable[[], tuple[Stage, SizeName]]  # the stage at sizes that are different primes, and the names of the sizes
    known: Sequence[tuple[str, str]] = ()  # (letter, value) of numbers that print as letters
    values: Sequence[tuple[str, str]] = ()  # (symbol, formula) of the values on the way, where they are not stages
    title: str = ""  # what it is of, in words
    words: Mapping[str, str] = field(default_factory=dict)  # other names of arguments
    claims: tuple[str, ...] = ()  # ids of the ledger, for a theorem
    loss: str | None = None  # the loss that a theorem takes the derivative of
    numbers: Mapping[Symbol, float] = field(default_factory=dict)  # symbols of numbers such as eps, with their values
    sizes: Mapping[str, int] = field(default_factory=dict)  # numbers of the sizes that print as letters
    frozen: int | None = None  # row of the argument that has no gradient: the padding of an embedding

    def names(self, wrt: object) -> tuple[str, ...]:
        """Return the requested arguments."""
        if not isinstance(wrt, (str, list, tuple)):
            raise InputError(f"derive: wrt is a {type(wrt).__name__}; expected a name, or a list of one or two names")
        names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
        if not 1 <= len(names) <= 2 or not all(isinstance(name, str) for name in names):
            raise InputError(f"derive: wrt={wrt!r} is not one or two names; pass one for a Jacobian, two for a Hessian block")
        argument_of: dict[str, str] = {}
        for argument, symbol in self.symbols.items():
            for name in (argument, symbol, symbol.lstrip("\\"), index_of(symbol)):
                argument_of.setdefault(name, argument)
        by_symbol = {symbol: argument for argument, symbol in self.symbols.items()}
        words = {word: by_symbol[symbol] for word, symbol in WORDS.items() if symbol in by_symbol} | dict(self.words)
        for name in names:
            if name not in argument_of and name not in words:
                choices = [*(word for word in words if word not in ("input", "weight", "bias")), *self.symbols]
                raise unknown("derive", "wrt", name, choices)
        return tuple({**words, **argument_of}[name] for name in names)


def of_block(block: nn.Module, inputs: Tensor | None, length: int, seed: int, *, branch: bool = False) -> Subject:
    """Return a block's output as a subject, or with ``branch`` that of its attention, S."""
    if not isinstance(block, TransformerBlock):
        path = next(name for name, part in block.named_modules() if isinstance(part, TransformerBlock))
        dotted, _, number = path.rpartition(".")
        one = f"pass one of them, such as model.{f'{dotted}[{number}]' if number.isdigit() else path}"
        raise InputError(f"derive: a {type(block).__name__} is a stack, and a formula is of one block; {one}")
    check_tensors(block, dict(block.named_parameters()), one_dtype=True)
    parameters = {name: p for name, p in block.named_parameters() if not branch or name.startswith("attention.")}
    X = sequence(inputs, length, block.d_model, seed, next(iter(block.parameters())))
    point = {name: p.detach() for name, p in parameters.items()} | {"X": X}
    symbols = {name: "X" if name == "X" else symbol_of(name) for name in point}
    factor = spelling(block)
    of, title = _OfBlock(block, branch, seed), "of a transformer block"
    values = [factor[1]] if factor else []
    default = ("attention.W_Q", "attention.W_V")
    return Subject(
        point, symbols, default, of.stage, of.printed, values, title=title, numbers=of.numbers(), sizes=of.sizes(len(X))
    )


@dataclass(frozen=True)
class _OfBlock:
    """A block's output as a stage, or that of its attention: at a point, and at sizes that print as letters."""

    block: TransformerBlock
    branch: bool
    seed: int

    def printed(self) -> tuple[Stage, SizeName]:
        sizes = sizes_for(self.block)
        parameters, tokens = prime_copy(self.block, sizes, self.seed)
        return self._output(BlockAt(self.block, parameters, sizes=sizes, spelt=True), tokens), SizeName(sizes)

    def stage(self, point: Mapping[str, Array]) -> Stage:
        parameters, X = {name: value for name, value in point.items() if name != "X"}, point["X"]
        if isinstance(X, Tensor):
            return self._output(BlockAt(self.block, parameters), X)
        letters = Exact(eps=lambda name, rows, norm: self._epsilons()[norm][0], scale=SCALE)
        return self._output(BlockAt(self.block, parameters, exact=letters, spelt=True), X)

    def numbers(self) -> dict[Symbol, float]:
        """The values of the letters of numbers: eps, the factor of the logits, and the block's factor."""
        factor, numbers = spelling(self.block), dict(self._epsilons().values())
        if factor is not None:
            (letter,) = factor[0].free_symbols
            numbers[letter] = float(solve(factor[0] - self.block.factor, letter)[0])
        return numbers | {SCALE: self.block.attention.d_k**-0.5}

    def sizes(self, length: int) -> dict[str, int]:
        """The block's own sizes by their letters."""
        block, part = self.block, self.block.attention
        groups = max((norm_of(norm)[1] for norm in self._epsilons()), default=1)
        widths = {"d": block.d_model, "d_K": part.d_k, "d_v": part.d_v, r"d_{ff}": block.feedforward.W_2.shape[0]}
        heads = {"H": part.n_heads, r"H_{KV}": part.n_kv_heads, "r": part.n_heads // part.n_kv_heads}
        return {"L": length, **widths, **heads, "g": groups, "d_g": block.d_model // groups}

    def _epsilons(self) -> dict[nn.Module, tuple[Symbol, float]]:
        """Letter and value of the eps of each norm: one letter for equal values."""
        dtype = next(iter(self.block.parameters())).dtype
        norms = [norm for norm in self.block.modules() if isinstance(norm, (nn.LayerNorm, nn.RMSNorm, GroupNorm))]
        values = {norm: norm_of(norm, dtype)[2] for norm in norms}
        distinct = list(dict.fromkeys(values.values()))
        letters = [EPSILON] if len(distinct) == 1 else symbols(rf"\varepsilon_1:{len(distinct) + 1}", positive=True)
        return {norm: (letters[distinct.index(value)], value) for norm, value in values.items()}

    def _output(self, parts: BlockAt, tokens: Array) -> Stage:
        X = leaf("X", tokens)
        return attention_stage(parts, "S", X) if self.branch else block_stage(parts, X)


def sequence(inputs: Any, length: int, width: int, seed: int, like: Tensor) -> Tensor:
    """Return one sequence (L, width), drawn where none is given, in the arithmetic of ``like``."""
    if inputs is None:
        if length < 1:
            raise InputError(f"derive: length={length}, expected at least 1")
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(length, width, generator=generator, dtype=torch.float64, device="cpu").to(like)
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        got = getattr(inputs, "dtype", type(inputs).__name__)
        raise InputError(f"derive: inputs are {got}; pass a tensor of floating point, (L, {width})")
    X = inputs[0] if inputs.ndim == 3 and inputs.shape[0] == 1 else inputs
    if X.ndim != 2 or X.shape[1] != width:
        raise InputError(f"derive: inputs have shape {tuple(inputs.shape)}; a formula is of one sequence, so pass (L, {width})")
    check_tensor("inputs", X, None, X.device)
    return X.detach().to(like)


def target_of(loss: str | None, target: Tensor | None, X: Any, seed: int) -> Any:
    """Return the target of a loss, drawn where none is given: an array like X, labels, or None without a loss."""
    length, d = X.shape
    if loss is None:
        if target is not None:
            raise InputError("derive: there is a target and no loss; pass loss='mse' or 'cross_entropy', or drop target=")
        return None
    if loss not in LOSSES:
        raise unknown("derive", "loss", loss, LOSSES)
    if target is None:
        generator = torch.Generator().manual_seed(seed + 1)
        if loss == "mse":
            return torch.randn(length, d, generator=generator, dtype=torch.float64, device="cpu").to(X)
        return torch.randint(d, (length,), generator=generator, device="cpu").tolist()
    if not isinstance(target, Tensor) or (loss == "mse" and not target.is_floating_point()):
        raise InputError(f"derive: the target is a {type(target).__name__}; pass a tensor, for mse of floating point")
    goal = target[0] if target.ndim == 2 + (loss == "mse") and len(target) == 1 else target
    check_tensor("target", goal, None, goal.device)
    if loss == "mse":
        check_same_shape(goal, X.shape)
        return goal.detach().to(X)
    check_labels(goal, X.shape)
    if bool((goal < 0).any()):
        raise InputError(f"derive: a label is {int(goal.min())}, and a formula has no tokens that are ignored; leave them out")
    return goal.tolist()
