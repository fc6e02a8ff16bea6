"""A block's parts as stages at a point: what ``b.attention``, ``b.norm_1`` ... of an equation stand for in a derivation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from derivations.arrays import Array
from derivations.stage import Stage, leaf
from hessiankit.derivation.block_at import BlockAt
from hessiankit.derivation.branches import attention_stage, feedforward_stage
from hessiankit.derivation.factor import Factor, spelling
from hessiankit.derivation.recording import Parameter, Value, run
from hessiankit.derivation.symbols import hat


@dataclass
class Parts(BlockAt):
    """A block at a point, under the names that its equation uses.

    Args:
        spelt: whether the number ``b.factor`` of an equation is a letter.
    """

    spelt: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sums = [self.letter("R"), self.letter("S")]

    def attention(self, X: Value) -> Value:
        """The self-attention branch, F."""
        return Value(lambda name: attention_stage(self, name, X.stage), lambda: self.letter("F"), self.sums)

    def feedforward(self, Y: Value) -> Value:
        """The feed-forward branch, M."""
        return Value(lambda name: feedforward_stage(self, name, Y.stage), lambda: self.letter("M"), self.sums)

    def __getattr__(self, name: str) -> Any:
        """Norms, numbers and parameters of the block, under the names that its equation uses."""
        if name.startswith("__") or "block" not in self.__dict__:
            raise AttributeError(name)
        part = getattr(self.block, name)
        if isinstance(part, nn.Parameter):
            return Parameter(self.symbols[name], self.parameters[name])
        if isinstance(part, nn.Module):
            return lambda X: Value(lambda symbol: self.norm(symbol, X.stage, part, name), lambda: hat(X.stage.symbol), self.sums)
        if name == "factor" and self.spelt and (written := spelling(self.block)) is not None:
            return Factor(part, written.letter)
        return part


def block_stage(parts: Parts, X: Stage) -> Stage:
    """Return the output of a block as a stage on its parameters and its input."""
    return run(parts.block.equation, parts, Value(lambda name: X, lambda: X.symbol, parts.sums))


def input_stage(X: Array) -> Stage:
    """Return the tokens X."""
    return leaf("X", X)
