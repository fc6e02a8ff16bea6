"""Which parameters a user means: every spelling, every refusal, and the positions of a part against NumPy's own indexing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from curvature_reference import assert_one_clear_error
from torch import nn

from hessiankit.request.selection import locate, parse_part, rows_of_part, select


class Tied(nn.Module):
    """An embedding whose weight is the head's too, two layers, one frozen norm."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": nn.Linear(4, 6), "mlp": nn.Linear(6, 4)}) for _ in range(3))
        self.norm = nn.LayerNorm(4).requires_grad_(False)
        self.lm_head = nn.Linear(4, 7, bias=False)
        self.lm_head.weight = self.wte.weight


MODEL = Tied()
EVERY = [n for n, p in MODEL.named_parameters() if p.requires_grad]


def chosen(*params: object) -> list[str]:
    return list(select("who", MODEL, params))  # type: ignore[arg-type]


CHOSEN: dict[str, tuple[object, list[str]]] = {
    "everything that requires grad": (None, EVERY),
    "a name": ("wte.weight", ["wte.weight"]),
    "a pattern": ("layers.*.attn.bias", [f"layers.{i}.attn.bias" for i in range(3)]),
    "a parameter": (MODEL.wte.weight, ["wte.weight"]),
    "a set": ({"wte.weight", "layers.1.mlp.bias"}, ["wte.weight", "layers.1.mlp.bias"]),
    "an iterator": (iter(["layers.1.mlp.bias", "wte.weight"]), ["wte.weight", "layers.1.mlp.bias"]),
    "*.attn.*": ("*.attn.*", [n for n in EVERY if ".attn." in n]),
    "[!0]": ("layers.[!0].mlp.bias", ["layers.1.mlp.bias", "layers.2.mlp.bias"]),
    "*": ("*", EVERY),
    "the other name of a tied one": ("lm_head.*", ["wte.weight"]),
    "in any order, some twice": (
        ["layers.2.mlp.bias", MODEL.lm_head.weight, "lm_head.weight", "wte.*", "layers.0.attn.bias", "layers.0.attn.b*"],
        ["wte.weight", "layers.0.attn.bias", "layers.2.mlp.bias"],
    ),
    "parts": (
        ["lm_head.weight[:, 0:2]", "layers.1.attn.weight[-1]", "wte.weight [2:4, ...]"],
        ["wte.weight", "layers.1.attn.weight"],
    ),
    "a part of each match": ("layers.[02].attn.weight[0:2]", ["layers.0.attn.weight", "layers.2.attn.weight"]),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen(name: str) -> None:
    params, expected = CHOSEN[name]
    found = select("who", MODEL, params)  # type: ignore[arg-type]
    assert list(found) == expected
    for n, value in found.items():  # whole parameters, in place
        assert not value.requires_grad
        assert (value.data_ptr(), value.shape) == (MODEL.get_parameter(n).data_ptr(), MODEL.get_parameter(n).shape)


def test_names_of_other_modules() -> None:
    one, odd = nn.Linear(2, 2), nn.Module()
    odd.register_parameter("a[0]", nn.Parameter(torch.zeros(2)))
    assert list(select("who", nn.Sequential(one, one), ["1.bias", "1.weight"])) == ["0.weight", "0.bias"]
    assert list(select("who", odd, "a[0]")) == ["a[0]"]  # a name before it is a part


INDICES = ["-1", "...", "1:3", ":, 0:2", "1, ..., 0", "::2", "3:0:-1", "-2:, -3:-1", "0, 0, 0", "2, :, ::-1"]


@pytest.mark.parametrize("index", INDICES)
def test_positions_are_numpys(index: str) -> None:
    shape = (4, 3, 5)
    values = np.arange(60).reshape(shape)
    spelled = index.replace("...", "Ellipsis")
    expected = values[eval(f"np.s_[{spelled}]")].reshape(-1)
    name, parsed = parse_part(f"w[{index}]")
    assert name == "w"
    rows = rows_of_part(shape, parsed)
    assert rows.dtype == torch.int64
    assert rows.tolist() == expected.tolist()


def test_positions_of_several_indices_follow_one_another() -> None:
    rows = rows_of_part((6, 2), parse_part("w[4:6; 0; 2:3, 1]")[1])
    assert rows.tolist() == [8, 9, 10, 11, 0, 1, 5]


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "unknown name": (lambda: chosen("wte.wieght"), r"who: params=\['wte.wieght'\]: this Tied has no such parameter; did you mean 'wte.weight'"),
    "a name without its prefix": (lambda: chosen("attn.weight"), "did you mean 'layers"),
    "pattern without a match": (lambda: chosen("blocks.*"), r"\['blocks.\*'\]: this Tied has no such parameter"),
    "frozen": (lambda: chosen("norm.weight"), r"'norm.weight' does not require grad; call requires_grad_\(True\)"),
    "pattern of frozen ones": (lambda: chosen("norm.*"), r"'norm.\*' matches \('norm.weight', 'norm.bias'\) does not require"),
    "everything frozen": (lambda: select("who", nn.Linear(2, 2).requires_grad_(False)), "no parameters that require grad"),
    "parameter of another module": (lambda: chosen(nn.Linear(4, 6).weight), r"a parameter of shape \(6, 4\) .* it has 'layers.0.attn.w"),
    "a view": (lambda: chosen(MODEL.wte.weight.detach()), r"a tensor of shape \(7, 4\) that is not a parameter"),
    "not iterable": (lambda: select("who", MODEL, 3), "params is of type int"),  # type: ignore[arg-type]
    "pairs": (lambda: chosen(*MODEL.named_parameters()), "of type tuple"),
    "empty": (lambda: chosen(), "params is empty"),
    "not a module": (lambda: select("who", "wte", None), "expected a torch.nn.Module, got str"),  # type: ignore[arg-type]
    "column out of range": (lambda: chosen("wte.weight[0, 4]"), r"'wte.weight\[0, 4\]': axis 1 of shape \(7, 4\) has 4 entries, the index is 4"),
    "slice out of range": (lambda: chosen("wte.weight[:, 0:32]"), "has 4 entries, the slice reaches to 32"),
    "too many axes": (lambda: chosen("wte.weight[0, 0, 0]"), r"has 3 axes, but the parameter has shape \(7, 4\); drop 1"),
    "nothing selected": (lambda: chosen("wte.weight[3:3]"), "selects nothing"),
    "overlap": (lambda: chosen("wte.weight[0:3; 2]"), "overlap"),
    "a name in the index": (lambda: chosen("wte.weight[__import__('os')]"), "cannot read the index in"),
    "new axis": (lambda: chosen("wte.weight[None]"), "cannot read the index"),
    "two ellipses": (lambda: chosen("wte.weight[..., ...]"), "cannot read the index"),
    "step 0": (lambda: chosen("wte.weight[::0]"), "cannot read the index"),
    "four bounds": (lambda: parse_part("w[0:1:2:3]"), "parse_part: cannot read the index"),
    "locate an unknown name": (lambda: locate("who", "q[0]", {"w": (2,)}), "no parameter 'q'; there are 'w'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_one_clear_error(case: str) -> None:
    assert_one_clear_error(*BAD[case])
