# %% [markdown]
# # `check` in your own tests
#
# torch computes the derivative of your own module, but some of torch's routes compute a wrong second derivative. This
# notebook writes a pytest file for a small attention block, runs it, breaks the block, and runs it again.
#
# 1. A test of one line; `pytest --hessian` lists what the tests of a project compared.
# 2. A layer whose backward is wrong: what the test says.
# 3. A reference that is wrong: it is named and not counted.

# %%
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import hessiankit as hk

os.chdir(tempfile.mkdtemp())  # the folder of a project
Path("block.py").write_text('''
import torch
from torch import nn


class Block(nn.Module):
    """Pre-norm attention of one head with a gated residual connection."""

    def __init__(self, d):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.gate = nn.Parameter(torch.ones(d))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        a = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return x + torch.tanh(self.gate) * self.out(a @ v)
''')

Path("test_block.py").write_text('''
import torch
from block import Block
from hessiankit.verify.testing import assert_hessian_matches


def perturbed(module):
    """Gains that are 1 and biases that are 0 hide errors."""
    with torch.no_grad():
        for p in module.parameters():
            p += 0.3 * torch.randn_like(p)
    return module


def test_second_derivatives():
    torch.manual_seed(0)
    assert_hessian_matches(perturbed(Block(4)), torch.randn(2, 3, 4), torch.randn(2, 3, 4), loss="mse")
''')


def run(*arguments):
    """Run pytest in this folder and return what it printed, without the time it took."""
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False).stdout.rsplit(" in ", 1)[0]


listed = run("test_block.py", "--hessian")
print(listed)
assert "1 passed" in listed

# %% [markdown]
# ## 2. A layer whose derivative is wrong
#
# Second derivatives often go wrong in a function with its own backward. The gradient below is right, but it is computed
# from a detached value, so autograd loses the second derivative. A test of the gradient passes; `gradgradcheck` would
# notice, and so does this test.

# %%
broken = Path("block.py").read_text().replace("torch.tanh(self.gate)", "Tanh.apply(self.gate)")
Path("block.py").write_text(
    broken
    + '''

class Tanh(torch.autograd.Function):
    """tanh with a backward that forgets how its own value depends on the input."""

    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.y = y.detach()
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.y**2)
'''
)
said = run("test_block.py", "--tb=short")
assert "1 failed" in said
errors = [line for line in said.splitlines() if line.startswith("E ")]
print("\n".join(line for line in errors if "NOT VERIFIED: " in line or "UNHEALTHY: " in line))

# %% [markdown]
# The backward is right, but its derivative is not: autograd's result and central differences of the gradient differ. So
# no reference counts, and a check passes only with two that do.

# %% [markdown]
# ## 3. A reference that is wrong
#
# `torch.func.hessian` loses a term through `nn.LayerNorm` with a gain. Every reference is tested for symmetry and against
# the others before it counts. Requested by name, this one is reported as unhealthy, and the three others decide.

# %%
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
against = ["reverse-over-reverse", "jvp(grad)", "central-differences", "torch.func.hessian"]
report = hk.check(net, torch.randn(5, 3), torch.randn(5, 2), loss="mse", against=against)
print("\n".join(report.health_lines()))
print(report.verdict)
assert report
