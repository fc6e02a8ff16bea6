# %% [markdown]
# # From a formula to C, to a bound, to a plot
#
# `hessiankit.derive` gives the second derivative of LayerNorm as an expression in $\mathrm{vec}_r$. `.sympy()` gives it as a list
# of short assignments, `.function()` as code, and `hk.identical` compares it with a formula of one's own.

# %%
import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import sympy
import torch
from sympy import Matrix, MatrixSymbol, Symbol, diag, eye, ones, sqrt

import hessiankit as hk

torch.manual_seed(0)
X = torch.randn(2, 3).double()
second = hk.derive(torch.nn.LayerNorm(3).double(), wrt=("X", "X"), inputs=X)
second

# %% [markdown]
# ## Named assignments
#
# `replacements, (matrix,) = second.sympy()` has the form of `sympy.cse`: each name is an expression in earlier names. Nothing is
# expanded unless it is asked for. The entries of $X$ and $\gamma$ and the number $\varepsilon$ are symbols.

# %%
listed = second.sympy()
replacements, (matrix,) = listed
print(*(f"{name} = {meaning}" for name, meaning in replacements[:8]), "...", sep="\n")
print(len(replacements), "assignments,", listed.count_ops(), "operations,", listed.parameters)
(eps,) = listed.parameters
print(
    "without eps:", listed.subs({eps: 0}).count_ops(), "operations; derivative with respect to eps:", listed.diff(eps).count_ops()
)

# %% [markdown]
# ## C
#
# SymPy's printer writes the list as a function in C. Its numbers are those of the formula.

# %%
source = second.function("c", "layernorm_hessian")
print("\n".join(source.splitlines()[:6]), "\n   ...")
if compiler := shutil.which("cc"):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layernorm_hessian"
        path.with_suffix(".c").write_text(source)
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", path, path.with_suffix(".c"), "-lm"], check=True)
        library, out = ctypes.CDLL(str(path)), np.empty(second.shape)
        pointers = [array.ctypes.data_as(ctypes.POINTER(ctypes.c_double)) for array in (X.numpy(), np.ones(3), out)]
        library.layernorm_hessian(*pointers[:2], ctypes.c_double(1e-5), pointers[2])
    print("C minus the formula:", np.abs(out - second.dense().numpy()).max())
    assert np.allclose(out, second.dense(), rtol=0, atol=1e-12)

# %% [markdown]
# ## torch, and the Hessian of a loss
#
# As a function of torch the list runs on any device, and torch differentiates it. With a loss it is a block of the Hessian that
# `hessiankit.hessian` computes without a formula.

# %%
module, target = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3)).double(), torch.zeros(2, 3).double()
names = ("0.weight", "1.weight")
block = hk.derive(module, wrt=names, inputs=X, loss="mse", target=target)  # one's own module, by its trace
function = block.function("torch")
W_0, b_0, gamma_1, b_1 = (p.detach() for p in module.parameters())
values = function(W_0, b_0, gamma_1, b_1, X, target)
H = hk.hessian(module, X, target, loss="mse")
print(block)
print("formula minus hessiankit.hessian:", float((values - H.block(*names)).abs().max()))
assert torch.allclose(values, H.block(*names), rtol=0, atol=1e-12)
third = torch.autograd.functional.jacobian(lambda gain: function(W_0, b_0, gain, b_1, X, target).sum(), gamma_1)
print("derivative of the sum of its entries with respect to the gain:", third)

# %% [markdown]
# ## A formula of one's own
#
# With $c$ the centred row, $s^2 = \|c\|^2/d + \varepsilon$ and $y = c/s$, the Jacobian of a row is
# $\frac1s(C - \frac1d yy^\top)\,$ before the gain. `hk.identical` compares it with the derived one, at every point. Where the
# factor $\frac1d$ is forgotten it shows a point at which the two differ.

# %%
rows, gain = Matrix(MatrixSymbol("X", 2, 3)), diag(*Matrix(MatrixSymbol("gamma", 3, 1)))


def jacobian(share):
    blocks = []
    for row in (rows.row(0), rows.row(1)):
        c = row - ones(1, 3) * sum(row) / 3
        s = sqrt((c * c.T)[0] / 3 + Symbol("eps"))
        blocks.append(gain * (eye(3) - ones(3, 3) / 3 - share * c.T * c / s**2) / s)
    return diag(*blocks)


first = hk.derive(torch.nn.LayerNorm(3).double(), wrt="X", inputs=X)
print(hk.identical(first, jacobian(sympy.Rational(1, 3))))
print(str(hk.identical(first, jacobian(1)))[:90], "...")

# %% [markdown]
# ## A bound, and a plot
#
# The expression bounds its own norm. The function of the list takes $\varepsilon$ by keyword, so the norm over $\varepsilon$ is a
# loop over calls. Both fall like $\varepsilon^{-1}$ where $\varepsilon$ is large beside the variance.

# %%
function, sizes = second.function(), np.logspace(-5, 2, 30)
true = [np.linalg.norm(function(X.numpy(), np.ones(3), varepsilon=size), 2) for size in sizes]
bound = []
for size in sizes:
    norm = torch.nn.LayerNorm(3, eps=float(size)).double()
    bound.append(hk.derive(norm, wrt=("X", "X"), inputs=X).norm_bound())
assert all(b >= t for b, t in zip(bound, true, strict=True))
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
axes.loglog(sizes, bound, color="#d55e00", label="bound")
axes.loglog(sizes, true, color="#0072b2", label="norm")
axes.set(xlabel=r"$\varepsilon$", ylabel="spectral norm of the second derivative")
axes.legend()
plt.show()
