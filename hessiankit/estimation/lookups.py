"""Which rows of an embedding the data look up: the rest have no gradient through it (claim D7 of the paper's review)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks.embeddings import TokenEmbedding
from hessiankit.parts import Part


@contextmanager
def watch_lookups(model: nn.Module, parts: Sequence[Part]) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that forward passes fill: parameter -> which of its rows were looked up, booleans (rows,).

    Only for whole parameters of type Emb that an ``nn.Embedding`` or a ``TokenEmbedding`` owns.
    """
    wanted = {part.parameter for part in parts if part.type == "Emb" and part.axis is None}
    own = {id(p): name for name, p in model.named_parameters() if name in wanted}
    seen: dict[str, Tensor] = {}
    handles = []
    for module in model.modules():
        tables = {letter: own[id(p)] for letter, p in module.named_parameters(recurse=False) if id(p) in own}
        if not tables:
            continue
        if isinstance(module, nn.Embedding):
            seen[tables["weight"]] = torch.zeros(module.weight.shape[0], dtype=torch.bool, device=module.weight.device)
            handles.append(module.register_forward_pre_hook(_marking(seen[tables["weight"]], None)))
        elif isinstance(module, TokenEmbedding):
            for name in tables.values():
                p = model.get_parameter(name)
                seen[name] = torch.zeros(p.shape[0], dtype=torch.bool, device=p.device)
            tokens = seen.get(tables.get("W_E", ""))
            handles.append(module.register_forward_pre_hook(_marking(tokens, seen.get(tables.get("P", "")))))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _marking(tokens: Tensor | None, positions: Tensor | None) -> Any:
    def mark(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        ids = inputs[0] if inputs else None
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            return
        if tokens is not None and ids.numel() and int(ids.min()) >= 0 and int(ids.max()) < tokens.numel():
            tokens[ids.reshape(-1).long()] = True
        if positions is not None and ids.ndim:
            positions[: ids.shape[-1]] = True

    return mark
