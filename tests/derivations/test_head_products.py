"""Scores and mixtures against torch.einsum differentiated twice; one head prints as the paper does."""

from fractions import Fraction

import pytest
from second_order_reference import check_all_blocks, random_point, relative_error
from structured_reference import check_exact_equals_floats, check_structure_of_all_blocks, integers
from torch import einsum

from derivations.arrays import to_float
from derivations.head_products import HeadProductAt
from derivations.matrix import letters

L, S, K, V = 2, 3, 5, 4


def point(kind, heads):
    width, columns = (K, K) if kind == "scores" else (S, V)
    return random_point(heads, P=(heads * L, width), R=(heads * S, columns))


def reference(kind, heads, c):
    subscripts = "hlk,hsk->hls" if kind == "scores" else "hls,hsv->hlv"

    def product(P, R):
        stacked = einsum(subscripts, P.view(heads, L, -1), R.view(heads, S, -1))
        return c * stacked.reshape(heads * L, -1)

    return product


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("kind", ["scores", "mix"])
def test_all_blocks_equal_autograd(kind, heads):
    at = point(kind, heads)
    operation = HeadProductAt(**at, heads=heads, kind=kind, scale=0.75)
    check_all_blocks(operation, reference(kind, heads, 0.75), at)
    check_structure_of_all_blocks(operation, at["P"], sharp=("P", "R"))


def test_default_scale():
    for kind, c in (("scores", K**-0.5), ("mix", 1.0)):
        at = point(kind, 2)
        assert relative_error(HeadProductAt(**at, heads=2, kind=kind).value, reference(kind, 2, c)(**at)) <= 1e-14
    scores = HeadProductAt(**point("scores", 1), heads=1, kind="scores")
    assert scores.jacobian("P").latex() == r"\frac{\sqrt{5}}{5}\,\left(I_{2}\otimes R\right)"


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kind", ["scores", "mix"])
def test_exact_numbers_stay_exact(kind, heads):
    at = {name: integers(heads, *value.shape) for name, value in point(kind, heads).items()}
    options = {"heads": heads, "kind": kind, "scale": Fraction(1, 4)}
    floats = {name: to_float(value) for name, value in at.items()}
    check_exact_equals_floats(HeadProductAt(**at, **options), HeadProductAt(**floats, **options))


def printed(kind, heads, names):
    at = point(kind, heads)
    operation = HeadProductAt(**at, heads=heads, kind=kind, scale=Fraction(1, 2) if kind == "scores" else None)
    with letters(names):
        return [operation.jacobian(name).latex() for name in ("P", "R")]


def test_latex():
    assert printed("scores", 1, {"P": "Q", "R": "K"}) == [
        r"\frac{1}{2}\,\left(I_{2}\otimes K\right)",
        r"\frac{1}{2}\,\left(Q\otimes I_{3}\right)\,K_{5,3}",
    ]
    assert printed("mix", 1, {"P": "A", "R": "V"}) == [r"I_{2}\otimes V^\top", r"A\otimes I_{4}"]
    assert printed("scores", 2, {"P": "Q", "R": "K"}) == [
        r"\frac{1}{2}\,\operatorname{blockdiag}_h(I_{2}\otimes K_h)",
        r"\frac{1}{2}\,\operatorname{blockdiag}_h(\left(Q_h\otimes I_{3}\right)\,K_{5,3})",
    ]
    assert printed("mix", 2, {"P": "A", "R": "V"}) == [
        r"\operatorname{blockdiag}_h(I_{2}\otimes V_h^\top)",
        r"\operatorname{blockdiag}_h(A_h\otimes I_{4})",
    ]


def test_errors():
    at = point("scores", 2)
    with pytest.raises(ValueError, match=r"with 4 heads, scores need P \(4 L, k\) and R \(4 S, k\), got \(4, 5\) and \(6, 5\)"):
        HeadProductAt(**at, heads=4, kind="scores")
    with pytest.raises(ValueError, match=r"with 2 heads, a mixture needs P \(2 L, S\) and R \(2 S, v\)"):
        HeadProductAt(**at, heads=2, kind="mix")
    with pytest.raises(ValueError, match="there is no kind 'score'; the kinds are 'scores' and 'mix'"):
        HeadProductAt(**at, heads=2, kind="score")
    with pytest.raises(ValueError, match="no argument is called 'Q'"):
        HeadProductAt(**at, heads=2, kind="scores").jacobian("Q")
