"""PyHessian's example on its own ResNet, beside hessiankit's spectrum: top eigenvalue, trace and density.

Run with the source of PyHessian, whose example wants CIFAR-10, a checkpoint and a GPU; here images are drawn, training is short::

    PYTHONPATH=HESSIANKIT:PYHESSIAN python -m benchmarks.peer_suites.pyhessian
"""

from __future__ import annotations

import numpy as np
import torch
from models.resnet import resnet
from pyhessian import hessian as peer
from torch import nn

import hessiankit as hk


def main() -> None:
    """Print the numbers of both."""
    torch.manual_seed(0)
    x, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    model = resnet(num_classes=4, depth=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    model = model.double().eval()
    optimizer.zero_grad()
    x = x.double()
    found = hk.spectrum(model, x, labels, loss="cross_entropy", k=1, bottom=0, directions=4, steps=20)
    torch.set_default_dtype(torch.float64)
    its = peer(model, nn.CrossEntropyLoss(), data=(x, labels), cuda=False)
    values, _ = its.eigenvalues(maxIter=60, tol=1e-8)
    traces = its.trace(maxIter=20, tol=0.0)
    nodes, weights = (np.array(one).real for one in its.density(iter=20, n_v=4))
    print(f"{found.size:,} parameters, residuals here {found.residuals.tolist()}")
    print("eigenvalues", found.eigenvalues.tolist(), "PyHessian", values)
    print("trace", found.trace, "PyHessian", np.mean(traces), "standard error", np.std(traces) / len(traces) ** 0.5)
    for name, power, ours in (("trace", 1, found.trace), ("squared Frobenius norm", 2, found.frobenius_squared)):
        each = np.array([(w * n**power).sum() for n, w in zip(nodes, weights, strict=True)]) * found.size
        error = each.std(ddof=1) / len(each) ** 0.5
        print(f"{name} from the density {ours}, PyHessian {each.mean():.6g}, standard error {error:.2g}")
    print(found)


if __name__ == "__main__":
    main()
