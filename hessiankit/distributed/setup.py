"""Meeting the other processes: what torchrun says in the environment, the backend, and the time-out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hessiankit.errors import InputError

WHO = "distributed.init"
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """Which of the processes this one is.

    Attributes:
        rank: Its number, from 0.
        size: How many there are.
        device: Where its model and data belong.
    """

    rank: int
    size: int
    device: torch.device


def init(*, timeout: float = 300.0, backend: str | None = None) -> Place:
    """Meet the other processes of the run that torchrun started; a program that was started by itself is the only one.

    Not needed where the program has its own process group: everything here works with that one, and with its time-out.

    Args:
        timeout: Seconds that a rank waits for the others in any exchange before it stops with an error. It has to cover how
            far the slowest rank can be behind the fastest.
        backend: What torch.distributed sends with. By default gloo, with nccl for CUDA tensors where there are GPUs: messages
            go through gloo, whose failures are exceptions that can be read.

    Raises:
        InputError: If the environment says only half of which rank this is, the time-out is not a positive number, or there is
            a process group already.
    """
    if not timeout > 0:
        raise InputError(f"{WHO}: timeout={timeout}; expected a positive number of seconds")
    if dist.is_initialized():
        raise InputError(f"{WHO}: there is a process group already; leave this call out, and set the time-out where it is made")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    missing = [name for name in _NEEDED if name not in os.environ]
    if len(missing) == len(_NEEDED):
        return Place(0, 1, device)
    if missing:
        raise InputError(
            f"{WHO}: {', '.join(missing)} not in the environment, though other variables of torchrun are; start the program with "
            "torchrun (torchrun --nproc-per-node 2 program.py), or set all of them for each process"
        )
    usual = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend or usual, timeout=timedelta(seconds=timeout))
    return Place(dist.get_rank(), dist.get_world_size(), device)
