"""Which parameters a user means: every spelling, every refusal, and the positions of a part against NumPy's own indexing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from curvature_reference import assert_one_clear_error
from torch import nn

import hessiankit as hk
from hessiankit.engine.problem.selection import locate, parse_part, rows_of_part, select


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
    "a dict": (dict.fromkeys(["wte.weight", "layers.1.mlp.bias"]), ["wte.weight", "layers.1.mlp.bias"]),
    "*.attn.*": ("*.attn.*", [n for n in EVERY if ".attn." in n]),
    "[01]": ("layers.[01].*", [n for n in EVERY if n.startswith(("layers.0", "layers.1"))]),
    "[!0]": ("layers.[!0].mlp.bias", ["layers.1.mlp.bias", "layers.2.mlp.bias"]),
    "?": ("layers.?.mlp.weight", [f"layers.{i}.mlp.weight" for i in range(3)]),
    "[s]": ("layers.0.attn.bia[s]", ["layers.0.attn.bias"]),
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


INDICES = ["0", "-1", ":", "...", "1:3", ":, 0:2", "..., 1", "1, ..., 0", "::2", "3:0:-1", "-2:, -3:-1", "0, 0, 0", "2, :, ::-1"]


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


def test_positions_of_a_scalar_and_of_the_whole() -> None:
    assert rows_of_part((), parse_part("w[...]")[1]).tolist() == [0]
    assert rows_of_part((2, 3), None).tolist() == list(range(6))


def test_a_block_of_a_hessian_can_be_cut_with_the_positions() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    found = hk.hessian(layer, x, torch.zeros(5, 2, dtype=torch.float64))
    name, rows = locate("who", "weight[1, 0:2]", found.shapes)
    block = found.block(name, name)[rows][:, rows]
    torch.testing.assert_close(block, x[:, :2].T @ x[:, :2] / 5, rtol=0, atol=1e-13)
    assert locate("who", "bias", found.shapes) == ("bias", None)


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "unknown name": (lambda: chosen("wte.wieght"), r"who: params=\['wte.wieght'\]: this Tied has no such parameter; did you mean 'wte.weight'"),
    "unknown names are told together": (lambda: chosen("a", "wte.weight", "b"), r"\['a', 'b'\]"),
    "a name without its prefix": (lambda: chosen("attn.weight"), "did you mean 'layers"),
    "nothing like it": (lambda: chosen("zzzz"), "there are 'wte.weight', .* more"),
    "pattern without a match": (lambda: chosen("blocks.*"), r"\['blocks.\*'\]: this Tied has no such parameter"),
    "case counts": (lambda: chosen("*.ATTN.*"), "has no such parameter"),
    "pattern with an index, no match": (lambda: chosen("q.*.weight[:, 0]"), "has no such parameter"),
    "part of an unknown name": (lambda: chosen("wte.weights[:, 0:2]"), r"\['wte.weights\[:, 0:2\]'\]"),
    "frozen": (lambda: chosen("norm.weight"), r"'norm.weight' does not require grad; call requires_grad_\(True\)"),
    "frozen object": (lambda: chosen(MODEL.norm.bias), "'norm.bias' does not require grad"),
    "part of a frozen one": (lambda: chosen("norm.weight[0]"), "'norm.weight' does not require grad"),
    "pattern of frozen ones": (lambda: chosen("norm.*"), r"'norm.\*' matches \('norm.weight', 'norm.bias'\) does not require"),
    "everything frozen": (lambda: select("who", nn.Linear(2, 2).requires_grad_(False)), "no parameters that require grad"),
    "parameter of another module": (lambda: chosen(nn.Linear(4, 6).weight), r"a parameter of shape \(6, 4\) .* it has 'layers.0.attn.w"),
    "a view": (lambda: chosen(MODEL.wte.weight.detach()), r"a tensor of shape \(7, 4\) that is not a parameter"),
    "a module": (lambda: chosen(MODEL.layers[0]), "params holds a value of type ModuleDict; expected names"),
    "a number": (lambda: chosen(3), "type int"),
    "not iterable": (lambda: select("who", MODEL, 3), "params is of type int"),  # type: ignore[arg-type]
    "pairs": (lambda: chosen(*MODEL.named_parameters()), "of type tuple"),
    "empty": (lambda: chosen(), "params is empty"),
    "not a module": (lambda: select("who", "wte", None), "expected a torch.nn.Module, got str"),  # type: ignore[arg-type]
    "column out of range": (lambda: chosen("wte.weight[0, 4]"), r"'wte.weight\[0, 4\]': axis 1 of shape \(7, 4\) has 4 entries, the index is 4"),
    "row out of range": (lambda: chosen("wte.weight[-8]"), "expected -7 to 6"),
    "slice out of range": (lambda: chosen("wte.weight[:, 0:32]"), "has 4 entries, the slice reaches to 32"),
    "too many axes": (lambda: chosen("wte.weight[0, 0, 0]"), r"has 3 axes, but the parameter has shape \(7, 4\); drop 1"),
    "nothing selected": (lambda: chosen("wte.weight[3:3]"), "selects nothing"),
    "overlap": (lambda: chosen("wte.weight[0:3; 2]"), "overlap"),
    "a name in the index": (lambda: chosen("wte.weight[__import__('os')]"), "cannot read the index in"),
    "an expression": (lambda: chosen("wte.weight[1+1]"), "cannot read the index"),
    "a list": (lambda: chosen("wte.weight[[0, 1]]"), "cannot read the index"),
    "new axis": (lambda: chosen("wte.weight[None]"), "cannot read the index"),
    "empty brackets": (lambda: chosen("wte.weight[]"), "cannot read the index"),
    "two ellipses": (lambda: chosen("wte.weight[..., ...]"), "cannot read the index"),
    "step 0": (lambda: chosen("wte.weight[::0]"), "cannot read the index"),
    "other digits": (lambda: chosen("wte.weight[١]"), "cannot read the index"),
    "four bounds": (lambda: parse_part("w[0:1:2:3]"), "parse_part: cannot read the index"),
    "locate an unknown name": (lambda: locate("who", "q[0]", {"w": (2,)}), "no parameter 'q'; there are 'w'"),
    "locate out of range": (lambda: locate("who", "w[2]", {"w": (2,)}), r"who: 'w\[2\]': axis 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_one_clear_error(case: str) -> None:
    assert_one_clear_error(*BAD[case])


def test_a_text_with_a_line_break_stays_on_one_line() -> None:
    with pytest.raises(hk.InputError) as caught:
        chosen("wte.weight[0\n, q]")
    assert "\n" not in str(caught.value)
