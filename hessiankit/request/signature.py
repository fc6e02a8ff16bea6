"""The arguments that every call shares: declared once, spelled out in ``help()``, and known to type checkers."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypedDict, TypeVar

from hessiankit.request.data import Weights
from hessiankit.request.loss import LossArgument
from hessiankit.request.read import read_request
from hessiankit.request.second_order import Handshaking
from hessiankit.request.selection import Params

F = TypeVar("F", bound=Callable[..., object])


class RequestArguments(TypedDict, total=False):
    """Arguments of a call that computes second derivatives, with what ``help()`` says of them.

    Functions take them as ``**asked: Unpack[RequestArguments]`` under :func:`asks`; the defaults are those of
    :func:`~hessiankit.request.read.read_request`.
    """

    loss: Annotated[
        LossArgument,
        """``"auto"``: the loss that a Hugging Face model computes from the labels of its batch (a mapping with ``"labels"``, or
            inputs and integer labels), that of a module made by :func:`hessiankit.from_function`, ``"mse"`` for any other module.
            ``"mse"``: mean over all entries of the squared difference, the papers' 1/(L d_V) ||Z - T||_F^2.
            ``"cross_entropy"``: mean over the labels that are not -100. Both read the module's output, as torch's own losses do,
            such as ``nn.CrossEntropyLoss(label_smoothing=0.1)``: one tensor, the ``logits`` of an object or dict, or the only
            tensor of a tuple that is no scalar. Another callable ``(outputs, target) -> scalar`` is given exactly what the module
            returns. None: the module returns the loss: a scalar, ``loss`` of an object or dict, or the only scalar of a
            tuple.""",
    ]
    params: Annotated[
        Params,
        """Parameters to differentiate with respect to: a name, a pattern such as ``"*.attn.*"``, a parameter of the module,
            ``"name[index]"`` (the whole parameter, of which :meth:`Hessian.block` can return the part), or several of them. All
            that require grad by default; those that do not are constants.""",
    ]
    weights: Annotated[
        Weights,
        """For several batches and a loss that is a mean over an unknown number of terms (loss=None, a callable of
            your own): the number of terms of each batch, in a list or as a callable (inputs, target) -> number. A causal
            language model that shifts its labels counts ``(labels[:, 1:] != -100).sum()``. The named losses and torch's
            own loss modules are weighted by what they average over.""",
    ]
    reduction: Annotated[
        str | None,
        """``"mean"`` or ``"sum"`` over all terms; by default what the loss does itself. With a callable or
            loss=None, "sum" adds up the losses of the batches.""",
    ]
    handshake: Annotated[
        Handshaking,
        """Comparison of loss and gradient of the trace with those of the module's own call, before a result: one forward and
            one backward of torch. False leaves it out, and the result says so. ``"second order"``: compare H v too, along one
            generic vector v, with central differences of the module's own gradient: two gradients more.""",
    ]


class CurvatureArguments(RequestArguments, total=False):
    """Arguments of a call that takes other matrices than the Hessian too."""

    kind: Annotated[
        str,
        """``"hessian"``. ``"ggn"``: the outer-product part J^T L'' J. ``"fisher"``: the Fisher information J^T E[g g^T] J, g
            the gradient of a term of the loss with respect to the outputs, with labels of the model's own distribution: for
            the two named losses (a Gaussian of variance 1/2, the softmax's categorical distribution) it equals the GGN.
            ``"fisher-mc"``: the mean over drawn labels in place of the expectation. ``"fisher-empirical"``: the data's labels
            in place of drawn ones, which is no estimate of the Fisher information. A term is a label, or a row of the output
            under squared error: of N rows with C entries, which are N samples where the output has two axes, the empirical
            matrix is sum_n g_n g_n^T / (N C) with the gradients g_n of ||z_n - y_n||^2, as in curvlinops: C times the mean of
            g_n g_n^T with the gradients of the mean over a row.""",
    ]
    seed: Annotated[
        int, """Seed of the labels drawn for ``"fisher-mc"``; they do not depend on how the data are divided into batches."""
    ]
    draws: Annotated[int, """Labels drawn for each term."""]


class Alias(str):
    """The text of a type alias in a signature: what an argument takes, which the request checks itself."""


MARK = "        **asked: "
"""Start of the line of a docstring that stands for the arguments that are spelled out here."""


def asks(arguments: type[Any]) -> Callable[[F], F]:
    """Return a decorator that spells the arguments ``**asked`` out, in the signature and in the docstring.

    >>> @asks(RequestArguments)
    ... def norm(module, inputs, target=None, **asked): ...
    >>> list(inspect.signature(norm).parameters)
    ['module', 'inputs', 'target', 'loss', 'params', 'weights', 'reduction', 'handshake']
    """
    hints = arguments.__annotations__
    request_parameters = inspect.signature(read_request, eval_str=True).parameters

    def spelled(function: F) -> F:
        signature = inspect.signature(function)
        own_parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        data, options = (
            [p for p in own_parameters if p.kind is not p.KEYWORD_ONLY],
            [p for p in own_parameters if p.kind is p.KEYWORD_ONLY],
        )
        shared_parameters = [_readable(request_parameters[name]) for name in hints if name not in signature.parameters]
        function.__signature__ = signature.replace(parameters=[*data, *shared_parameters, *options])  # type: ignore[attr-defined]
        words = [f"        {p.name}: {hints[p.name].__metadata__[0]}" for p in shared_parameters]
        lines = (function.__doc__ or "").split("\n")
        mark_lines = [k for k, line in enumerate(lines) if line.startswith(MARK)]
        for k in mark_lines:
            lines[k : k + 1] = words
        function.__doc__ = "\n".join(lines)
        return function

    return spelled


def _readable(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter with the text of an alias for its annotation, in place of the alias."""
    annotation = parameter.annotation
    return parameter.replace(annotation=Alias(annotation)) if isinstance(annotation, str) else parameter
