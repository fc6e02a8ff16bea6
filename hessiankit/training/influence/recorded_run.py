"""A training run as it is recorded: the samples and the settings of every step, and checkpoints of parameters and state."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError
from hessiankit.support.files import write_bytes
from hessiankit.training.influence.updates import COUNT, RULES, THETA, Update, Values, rule_of, settings_of

WHO = "RecordedRun"


class RecordedStep(NamedTuple):
    """One step: the numbers of its samples, and the settings of each group of parameters."""

    samples: tuple[int, ...]
    settings: tuple[dict[str, float], ...]


class RecordedRun:
    """Record of a run of SGD, Adam or AdamW, which :func:`hessiankit.influence` replays backwards; training is unchanged.

    The loop draws its batches from :meth:`batches`, which knows the numbers of the samples; or it names them by :meth:`use`
    before each step. Changes of the gradients between ``backward`` and ``step``, such as clipping, are not recorded.

    Attributes:
        names: Names of the parameters that the optimizer moves, in the order of ``named_parameters()``.
        steps: Steps so far.

    >>> from torch.utils.data import TensorDataset
    >>> model = nn.Linear(2, 1)
    >>> loader = DataLoader(TensorDataset(torch.ones(4, 2), torch.ones(4, 1)), batch_size=2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> run = RecordedRun(model, optimizer)
    >>> for x, y in run.batches(loader):
    ...     optimizer.zero_grad()
    ...     torch.nn.functional.mse_loss(model(x), y).backward()
    ...     optimizer.step()
    >>> [step.samples for step in run.steps]
    [(0, 1), (2, 3)]
    """

    @checked(WHO)
    def __init__(self, model: nn.Module, optimizer: Optimizer, *, every: int = 10) -> None:
        """Begin to record.

        Args:
            model: Model that is trained.
            optimizer: SGD, Adam or AdamW of torch with parameters of the model.
            every: Steps from one checkpoint to the next. A replay holds as many states at once.

        Raises:
            InputError: The optimizer is of another kind, or has parameters that are none of the model's.
        """
        if every < 1:
            raise InputError(f"{WHO}: every={every}; pass 1 or more")
        self.rule, self.kind, self.every = rule_of(optimizer), type(optimizer).__name__, every
        group_of = {id(p): k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._parameters = {name: p for name, p in model.named_parameters() if id(p) in group_of}
        if len(self._parameters) < len(group_of):
            raise InputError(
                f"{WHO}: {len(group_of) - len(self._parameters)} parameters of the optimizer are none of the model's"
            )
        self.names, self.groups = tuple(self._parameters), [group_of[id(p)] for p in self._parameters.values()]
        self.sizes = [p.numel() for p in self._parameters.values()]
        self.steps: list[RecordedStep] = []
        self.checkpoints: dict[int, Values] = {}
        self._samples: tuple[int, ...] | None = None
        optimizer.register_step_pre_hook(self._record)

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the batches of one pass through a loader over a data set with numbered samples, for one step each."""
        if loader.batch_sampler is None or not hasattr(loader.dataset, "__getitem__"):
            raise InputError(f"{WHO}: the loader has no batches of numbered samples; name them by .use(numbers) before each step")
        for numbers in loader.batch_sampler:
            self.use(numbers)
            yield loader.collate_fn([loader.dataset[k] for k in numbers])

    def use(self, samples: Sequence[int] | Tensor) -> None:
        """Name the samples of the next step, by their numbers in the training data."""
        self._samples = tuple(int(k) for k in samples)

    def save(self, path: Path | str) -> None:
        """Write the record to a file."""
        parts = {key: getattr(self, key) for key in ("kind", "every", "names", "groups", "sizes", "checkpoints")}
        buffer = io.BytesIO()
        torch.save({**parts, "steps": [tuple(step) for step in self.steps]}, buffer)
        write_bytes(WHO, Path(path), buffer.getbuffer())

    @classmethod
    def load(cls, path: Path | str) -> RecordedRun:
        """Return the record that :meth:`save` wrote."""
        run, data = cls.__new__(cls), torch.load(path, weights_only=True)
        vars(run).update(data, steps=[RecordedStep(*step) for step in data["steps"]])
        run.rule = next(rule for kind, rule in RULES.items() if kind.__name__ == run.kind)
        return run

    @torch.no_grad()
    def _record(self, optimizer: Optimizer, *_: Any) -> None:
        if self._samples is None:
            raise InputError(
                f"{WHO}: the samples of this step are not known; draw them from .batches(loader), or call .use(numbers)"
            )
        if len(self.steps) % self.every == 0:
            states = [optimizer.state.get(p, {}) for p in self._parameters.values()]
            checkpoint = {THETA: torch.cat([p.detach().reshape(-1) for p in self._parameters.values()])}
            for key in self.rule.state:
                pairs = zip(states, self._parameters.values(), strict=True)
                checkpoint[key] = torch.cat([_entry(state, key, p).reshape(-1) for state, p in pairs])
            counts = [float(state.get(COUNT, state.get(self.rule.state[0]) is not None)) for state in states]
            checkpoint[COUNT] = checkpoint[THETA].new_tensor(counts)
            self.checkpoints[len(self.steps)] = checkpoint
        settings = tuple(settings_of(optimizer, group, self.rule) for group in optimizer.param_groups)
        self.steps.append(RecordedStep(self._samples, settings))
        self._samples = None

    def update(self, step: RecordedStep, moves: Sequence[bool]) -> Update:
        """Return the update of a step, in which some parameters have a gradient."""
        return Update(self.rule, [step.settings[group] for group in self.groups], moves, self.sizes)


def _entry(state: Any, key: str, p: Tensor) -> Tensor:
    value = state.get(key)
    return torch.zeros_like(p) if value is None else value
