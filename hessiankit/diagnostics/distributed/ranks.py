"""The processes of a call: process group, collectives with error handling, and checks that all ranks hold the same model.

Work of one rank goes through :meth:`Ranks.together`: if it fails on any rank, all ranks raise the same line, and none waits for
a rank that has stopped. If a rank disappears, the others notice by its closed connections or by the process group's time-out.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import hessiankit.support.errors
from hessiankit.diagnostics.digest import digest
from hessiankit.support.errors import HessiankitError, InputError
from hessiankit.support.package import __version__

R = TypeVar("R")
_CONNECTION = ("/gloo/", "NCCL", "ncclComm", "Connection closed", "Connection reset", "Timed out waiting")


class RankError(HessiankitError, RuntimeError):
    """Another process of the group stopped, or did not answer in time."""


class Ranks:
    """The ranks of a process group (None: all processes) in one call of the function ``who``, the prefix of every message.

    Without torch.distributed, or ``alone``, this process is rank 0 of 1.
    """

    def __init__(self, who: str, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        self.who, self.group = who, group
        active = not alone and dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if active else 0
        self.size = dist.get_world_size(group) if active else 1
        if self.rank < 0:
            raise InputError(f"{who}: this process is not in the process group it was given; call it on the group's ranks only")

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.exchange():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        if self.size == 1:
            return value
        held = [value]
        with self.exchange():
            dist.broadcast_object_list(held, group=self.group, group_src=0)
        return held[0]

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over the ranks, to every rank the same bits, in the tensor's dtype; ``value`` is overwritten."""
        if self.size == 1:
            return value
        value = value.contiguous()  # the same memory layout on every rank
        reached = value.device.type in str(dist.get_backend_config(self.group))
        place = value if reached else value.to(_device(self.group))
        with self.exchange():
            dist.all_reduce(place, group=self.group)
        return place.to(value.device)

    def whole(self, value: Tensor) -> Tensor:
        """Return all of a tensor that ``fully_shard`` has spread over the ranks; of others the tensor itself."""
        if not isinstance(value, DTensor):
            return value
        with self.exchange():
            return value.full_tensor()

    def together(self, work: Callable[[], R]) -> R:
        """Do the work of this rank; if it fails on any rank, raise the same line on all of them.

        Raises:
            InputError: Or another of the library's errors, as the first rank that failed raised it.
            RankError: If that rank failed with anything else.
        """
        result, own = None, None
        try:
            result = work()
        except RankError:
            raise
        except Exception as error:  # of any kind: the other ranks raise it too
            own = error
        failed = [(rank, line) for rank, line in enumerate(self.gather(self._line(own))) if line is not None]
        if failed:
            raise self._joint(failed) from own
        return result  # type: ignore[return-value]

    def agree(self, remedy: str = "make the same call everywhere, only with the rank's own data", /, **options: Any) -> None:
        """Raise an error on every rank unless all of them passed the same options, which are compared as they print."""
        held = self.gather({name: repr(value) for name, value in options.items()})
        for name in held[0]:  # rank 0's, so that every rank says the same
            for rank, other in enumerate(held):
                if other.get(name) != held[0].get(name):
                    raise InputError(
                        f"{self.who}: {name} is {held[0].get(name)} on rank 0 and {other.get(name)} on rank {rank}; expected "
                        f"the same on every rank: {remedy}"
                    )

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """A collective call: what torch raises where it has lost another rank becomes a :class:`RankError`."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            said = None if isinstance(error, RankError) else _communication(error) or _communication(error.__cause__)
            if said is None:
                raise
            after = f"{time.monotonic() - began:.1f} s"
            raise RankError(
                f"{self.who}: rank {self.rank} of {self.size} lost the others after {after}: one was killed, is stuck, or raised "
                f"an error of its own; read the logs of all ranks, and start all again (torch: {said})"
            ) from error

    def _line(self, error: Exception | None) -> tuple[str, str] | None:
        if error is None:
            return None
        text = " ".join(str(error).split()).removeprefix(f"{self.who}: ")
        return type(error).__name__, text

    def _joint(self, failed: list[tuple[int, tuple[str, str]]]) -> HessiankitError:
        rank, (kind, text) = failed[0]
        everywhere = len(failed) == self.size and len({line for _, line in failed}) == 1
        on = "" if everywhere or self.size == 1 else f"on rank {rank} of {self.size}: "
        known = getattr(hessiankit.support.errors, kind, None)
        if isinstance(known, type) and issubclass(known, HessiankitError):
            error: HessiankitError = known(f"{self.who}: {on}{text}")
            return error
        return RankError(f"{self.who}: {on}{kind}: {text}")


def _communication(error: BaseException | None) -> str | None:
    """Return torch's message of a failed exchange; None for any other error."""
    if not isinstance(error, RuntimeError):
        return None
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, dist.DistError) or any(word in said for word in _CONNECTION):
        return said.split("] ", 1)[-1].split(". This is")[0]
    return None


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return a device whose tensors the group's backend can send."""
    if "cpu" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def check_versions(ranks: Ranks) -> None:
    """Raise an error on every rank unless all of them run the same releases."""
    python = ".".join(platform.python_version_tuple()[:2])
    ranks.agree(**{"the version of hessiankit": __version__, "of torch": torch.__version__, "of Python": python})


def check_same_tensors(ranks: Ranks, tensors: Mapping[str, Tensor], what: str) -> None:
    """Raise an error on every rank unless all of them hold the same tensors, bit by bit; ``what`` names them, as in
    ``"parameter"``.
    """
    if ranks.size > 1:
        counted = {f"the number of {what}s": len(tensors)}
        own = {f"the {what} {name!r}": described(x) for name, x in tensors.items()}
        ranks.agree("load one checkpoint everywhere, or broadcast the state from rank 0", **counted, **own)


def described(x: Tensor) -> str:
    """Return the shape and the dtype of a tensor, and a digest of its values.

    >>> described(torch.zeros(2))
    '(2,), float32, digest b8c91d53eb483d77'
    """
    return f"{tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}, digest {digest(x)[:16]}"
