"""What has been written so far of a matrix on disk, and of which computation: a small JSON file beside it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hessiankit.compiled.library import built, kernels
from hessiankit.errors import InputError
from hessiankit.request.calling import Loss
from hessiankit.request.loss_trace import LossTrace
from hessiankit.request.task import Task

FORMAT = 1
OPERATIONS = "the operations of module and loss"
OF_THE_MACHINE = ("number of threads", "processor")  # which round alike only with the same of these


@dataclass
class Journal:
    """A record that is replaced as a whole, and so is always one of its states.

    Attributes:
        path: Of the journal.
        fingerprint: A digest of everything that the matrix depends on, by what it is of.
        plan: Chunks and panels.
        panels: What is known of the finished ones, by number.
        result: What is known of the whole: loss, asymmetry, fallbacks, seconds.
        complete: Whether the matrix is in its place.
    """

    path: Path
    fingerprint: dict[str, str]
    plan: dict[str, Any]
    panels: dict[str, dict[str, Any]] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    complete: bool = False

    def save(self) -> None:
        """Write the journal so that whoever reads it sees this state or the one before."""
        content = {name: getattr(self, name) for name in ("fingerprint", "plan", "panels", "result", "complete")}
        partial = self.path.with_name(self.path.name + ".new")
        with open(partial, "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, **content}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.path)
        sync_folder(self.path.parent)

    @classmethod
    def load(cls, who: str, path: Path) -> Journal:
        """Read a journal.

        Raises:
            InputError: The file is something else.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT:
                raise ValueError("another format")
            return cls(path, **content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{who}: {path} is no journal of a matrix ({error}). Pass overwrite=True to start again, or another out=..."
            ) from error

    def differences(self, fingerprint: Mapping[str, str]) -> list[str]:
        """Return what differs between this computation and another."""
        names = list(dict.fromkeys([*self.fingerprint, *fingerprint]))
        skip = OF_THE_MACHINE if self.complete else ()
        found = [n for n in names if n not in skip and self.fingerprint.get(n) != fingerprint.get(n)]
        return [n for n in found if n != OPERATIONS] or found  # other numbers have other values: only worth saying alone


def sync_folder(folder: Path) -> None:
    """Make a new name in a folder last, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def fingerprint(
    tasks: Sequence[Task], shares: Sequence[float], batch_size: int | None, traced: Iterable[LossTrace]
) -> dict[str, str]:
    """Return digests of everything that the bytes of the matrix depend on, by a name that an error can show.

    The module's own code is there as the operations that it runs on the first samples, with their values.
    """
    from hessiankit import __version__

    first = tasks[0]
    device = next(iter(first.parameters.values())).device
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    found = {f"{name!r} of the module": digest(value) for name, value in first.state.values.items()}
    found["the chosen parameters"] = digest(list(first.parameters))
    found["training or evaluation mode"] = digest(list(first.state.modes))
    for n, (task, share) in enumerate(zip(tasks, shares, strict=True)):
        found[f"the inputs of batch {n}"] = digest([*task.keywords, task.inputs])
        found[f"the target of batch {n}"] = digest(task.target)
        found[f"the weight of batch {n}"] = digest(share)
    found["the loss"] = named(first.loss)
    found["batch_size"] = str(batch_size)
    found[OPERATIONS] = digest([_operations(one) for one in traced])
    found["version of hessiankit"], found["version of torch"] = __version__, torch.__version__
    found["compiled kernels"] = "none" if kernels() is None else built().parent.name
    found["number of threads"], found["processor"] = str(torch.get_num_threads()), processor
    return found


def named(loss: Loss) -> str:
    """Return a name for a loss that is the same in another process.

    >>> named("mse"), named(torch.nn.MSELoss()), named(None)
    ('mse', 'torch.nn.modules.loss.MSELoss', 'None')
    """
    if loss is None or isinstance(loss, str):
        return str(loss)
    kind = loss if hasattr(loss, "__qualname__") else type(loss)
    return f"{kind.__module__}.{kind.__qualname__}"


def digest(x: Any) -> str:
    """Return a digest of tensors and plain values, nested in any way.

    >>> digest([torch.ones(2), 1]) == digest([torch.ones(2), 1]), digest(torch.ones(2)) == digest(torch.ones(2, 1))
    (True, False)
    """
    found = hashlib.sha256()
    leaves, spec = torch.utils._pytree.tree_flatten(x)
    found.update(str(spec).encode() if len(leaves) != 1 else b"")
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            found.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            found.update(repr(leaf).encode())
        else:
            found.update(type(leaf).__qualname__.encode())
    return found.hexdigest()


def _operations(traced: LossTrace) -> list[Any]:
    one = traced.trace
    steps = [[type(a.primitive).__qualname__, *(-1 if at is None else at for at in a.inputs), a.output] for a in one.applications]
    return [*steps, one.values[one.output]]
