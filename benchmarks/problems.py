"""The problems that are measured, by name: a module, a batch and a loss, the same numbers on every call.

The sizes are those of the post-norm block of Closing the Curvature Gap: one head, ReLU, no biases, norms without a gain.
``paper-mnist`` has the P = 2816 parameters of its MNIST row. A name that ends in ``-affine`` has norms with gain and bias,
which is where several routes of automatic differentiation go wrong; ``-xN`` stacks N blocks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from benchmarks.gpt2 import TinyGPT2
from hessiankit import TransformerBlock
from hessiankit.support.errors import InputError


@dataclass(frozen=True)
class Size:
    """Tokens L, width d and hidden width d_ff of a block."""

    tokens: int
    d_model: int
    d_ff: int


SIZES = {
    "tiny": Size(4, 4, 8),
    "small": Size(16, 8, 32),
    "paper-mnist": Size(49, 16, 64),
    "medium": Size(64, 32, 128),
    "large": Size(256, 256, 1024),
}
GPT2 = ("gpt2-untied", "gpt2-tied")
RECURRENCE = "recurrence"  # 60 steps of a loop in Python over shared weights
STEPS = 60
VOCABULARY, CONTEXT = 64, 16
BATCHES = (1, 8, 32, 128)
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_NAME = re.compile(r"(?P<size>.+?)(?P<affine>-affine)?(?:-x(?P<layers>\d+))?")
_CUSTOM = re.compile(r"L(\d+)d(\d+)f(\d+)")  # a size that has no name: L16d8f32


class Recurrence(nn.Module):
    """A loop of tanh units over the tokens of a sequence, B x L x 2 -> B x L x 1; 33 parameters."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inward, self.across, self.out = nn.Linear(2, width), nn.Linear(width, width, bias=False), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all steps."""
        h, states = x.new_zeros(len(x), self.across.in_features), []
        for step in x.unbind(1):
            h = torch.tanh(self.inward(step) + self.across(h))
            states.append(h)
        return self.out(torch.stack(states, 1))


@dataclass(frozen=True, eq=False)
class Case:
    """A module with one batch and the loss that compares them; parameters in the order of ``named_parameters()``.

    Attributes:
        spec: What the problem is: the block's size, the number of layers; None where it is no stack of blocks.
        wanted: Names of the parameters to differentiate with respect to; None: all.
    """

    name: str
    module: nn.Module
    inputs: Tensor
    target: Tensor
    loss: str
    spec: Size | None = None
    layers: int = 1
    affine: bool = False
    wanted: tuple[str, ...] | None = None

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Name -> value, detached."""
        return {n: p.detach() for n, p in self.module.named_parameters() if self.wanted is None or n in self.wanted}

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each parameter lies in ``theta``."""
        found, start = {}, 0
        for name, value in self.parameters.items():
            found[name] = slice(start, start + value.numel())
            start += value.numel()
        return found

    @cached_property
    def theta(self) -> Tensor:
        """The flat vector of all parameters."""
        return torch.cat([value.reshape(-1) for value in self.parameters.values()])

    @property
    def size(self) -> int:
        """Number of parameters P."""
        return sum(value.numel() for value in self.parameters.values())

    @property
    def rows(self) -> int:
        """Tokens in the batch: B L."""
        return int(self.inputs.shape[0] * self.inputs.shape[1])

    def outputs(self, theta: Tensor) -> Tensor:
        """Return the module's outputs at a flat vector of parameters."""
        parts = {name: theta[self.slices[name]].view(value.shape) for name, value in self.parameters.items()}
        return functional_call(self.module, parts, (self.inputs,))

    def loss_of(self, outputs: Tensor) -> Tensor:
        """Return the loss of some outputs; squared error written out, since ``jvp(grad(mse_loss))`` raises."""
        if self.loss == "mse":
            return (outputs - self.target).square().mean()
        return cross_entropy(outputs.flatten(0, -2), self.target.flatten())

    def flat_loss(self, theta: Tensor) -> Tensor:
        """Return the loss at a flat vector of parameters."""
        return self.loss_of(self.outputs(theta))


def names() -> tuple[str, ...]:
    """Return the names of all problems that the suites use."""
    return (*SIZES, *(f"{size}-affine" for size in SIZES), *GPT2, RECURRENCE)


def make(
    name: str, batch: int, dtype: str = "float64", device: str = "cpu", wanted: tuple[str, ...] | None = None, seed: int = 0
) -> Case:
    """Return the problem of this name with a batch of so many sequences.

    Raises:
        InputError: There is no such problem.

    >>> make("paper-mnist", 1).size, make("small", 8).size, make("paper-mnist-affine", 1).size
    (2816, 704, 2880)
    """
    kind, where = DTYPES[dtype], torch.device(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name in GPT2:
            module: nn.Module = TinyGPT2(VOCABULARY, CONTEXT, tied=name == "gpt2-tied")
            tokens = torch.randint(VOCABULARY, (batch, CONTEXT + 1))
            inputs, target, loss = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), "cross_entropy"
            return Case(name, module.to(where, kind), inputs.to(where), target.to(where), loss, wanted=wanted)
        if name == RECURRENCE:
            recurrence = Recurrence().to(where, kind)
            inputs, target = (torch.randn(batch, STEPS, n, dtype=torch.float64).to(where, kind) for n in (2, 1))
            return Case(name, recurrence, inputs, target, "mse", wanted=wanted)
        size, layers, affine = read(name)
        blocks = [TransformerBlock(size.d_model, size.d_ff, affine=affine) for _ in range(layers)]
        module = nn.Sequential(*blocks) if layers > 1 else blocks[0]
        inputs, target = (torch.randn(batch, size.tokens, size.d_model, dtype=torch.float64) for _ in range(2))
    if affine:
        _move_norms(module, seed)
    return Case(name, module.to(where, kind), inputs.to(where, kind), target.to(where, kind), "mse", size, layers, affine, wanted)


def read(name: str) -> tuple[Size, int, bool]:
    """Return the size, the number of layers and whether the norms have a gain, of a problem made of blocks."""
    found = _NAME.fullmatch(name)
    assert found is not None
    custom = _CUSTOM.fullmatch(found["size"])
    size = Size(*map(int, custom.groups())) if custom else SIZES.get(found["size"])
    if size is None:
        raise InputError(f"benchmarks: no problem is called {name!r}; there are: {', '.join(names())}, and sizes like L16d8f32")
    return size, int(found["layers"] or 1), found["affine"] is not None


def parameters_of(name: str) -> int:
    """Return P without making the problem.

    >>> parameters_of("medium"), parameters_of("small-x3")
    (11264, 2112)
    """
    if name in (*GPT2, RECURRENCE):
        return make(name, 1).size
    size, layers, affine = read(name)
    return layers * (3 * size.d_model**2 + 2 * size.d_model * size.d_ff + (4 * size.d_model if affine else 0))


def tokens_of(name: str) -> int:
    """Return the tokens L of one sequence."""
    if name == RECURRENCE:
        return STEPS
    return CONTEXT if name in GPT2 else read(name)[0].tokens


def _move_norms(module: nn.Module, seed: int) -> None:
    """Give gains and biases generic values: at ones and zeros some terms vanish."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.LayerNorm):
                layer.weight.add_(0.3 * torch.randn(layer.weight.shape, generator=generator))
                layer.bias.add_(0.3 * torch.randn(layer.bias.shape, generator=generator))
