"""A user's script that mypy checks as strictly as it can, which pyproject.toml asks for; it never runs."""

import torch
from torch import nn

import hessiankit as hk
from hessiankit.verify.testing import assert_hessian_matches


def script() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    x, target = torch.randn(3, 3), torch.randn(3, 2)
    H: hk.Hessian = hk.hessian(module, x, target)
    matrix: torch.Tensor = hk.hessian_function(module, x, target)().matrix
    A: hk.HessianOperator = hk.hessian_operator(module, x, target)
    J: hk.JacobianOperator = hk.jacobian_operator(module, x)
    agrees: bool = bool(hk.check(module, x, target))
    slack: float = hk.bounds(module, x, target).ratio("certified")
    latex: str = hk.derive(hk.TransformerBlock(4, 5), wrt=("W_Q", "W_V")).latex()
    model = hk.Transformer(11, 4, 6, 1, 2)
    report = hk.sharpness(model, (x, target))
    optimizer = torch.optim.AdamW(hk.blockwise_lr(model, 1e-3, "measured", sharpness=report))
    schedule = hk.blockwise_schedule(optimizer, warmup=1, steps=2)
    monitor = hk.Monitor(model, (x, target), "run.jsonl")
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    multiple: float = hk.critical_sharpness(module, x, target, optimizer=sgd).multiple
    print(
        hk.__version__, report.order, hk.spectrum(module, x, target).eigenvalues, hk.depth_diagnostics(model, (x, target)).blocks
    )
    print(H, matrix, A, J, agrees, slack, latex, schedule, monitor, multiple)
    assert_hessian_matches(module, x, target)
