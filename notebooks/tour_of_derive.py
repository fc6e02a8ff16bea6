# %% [markdown]
# # A tour of `derive`: from two names to a formula, to numbers, to a bound
#
# `hessiankit.derive` takes a transformer block and the names of one or two of its parameters and returns the derivative
# as an expression in $\mathrm{vec}_r$: a thing to read (`print`, LaTeX), to compute (`.dense()`) and to bound
# (`.norm_bound()`). It knows the derivatives of the parts (attention, a norm, a feed-forward network) and the chain rule
# to second order. It knows no theorem about blocks, so its result for a placement can be compared with the one that a
# paper prints.

# %%
import matplotlib.pyplot as plt
import torch
from torch.func import functional_call

import hessiankit as hk
from derivations.matrix.named import definitions

torch.manual_seed(0)
block = hk.TransformerBlock(d_model=4, d_ff=6, d_k=2).double()  # post-norm: Y = LN(X + F(X)), Z = LN(Y + FFN(Y))
with torch.no_grad():
    for norm in (block.norm_1, block.norm_2):
        norm.weight += 0.3 * torch.randn(4)
        norm.bias += 0.3 * torch.randn(4)
X = torch.randn(3, 4).double()

# %% [markdown]
# ## One name: a Jacobian
#
# `"up"` is the first matrix of the feed-forward network; `"W_1"` or `"feedforward.W_1"` would do. Read from the right: a
# change of $W_1$ changes $U = YW_1$ by $Y\otimes I$, passes where ReLU is active, and goes through $W_2$. The last norm
# removes from each row its mean and its component along the normalised row.

# %%
first = hk.derive(block, wrt="up", inputs=X)
first

# %% [markdown]
# ## Two names: a second derivative
#
# $W_Q$ and $W_V$ meet in attention, and again in each of the two norms above it. The result is the theorem of *Closing the
# Curvature Gap* (Eq. 6 and 12): every norm adds one term with its first derivative and one with its second.

# %%
second = hk.derive(block, wrt=("query", "value"), inputs=X)
second

# %% [markdown]
# ### With the rule that made each line

# %%
print(second.explain().split("\n\nvec_r(M)")[0])  # after that: what each symbol stands for

# %% [markdown]
# ## The same question, another placement
#
# In a pre-norm block no norm follows the second branch, so $J_Z$ and $H_Z$ disappear. The second norm acts within its
# branch, beside an identity that passes $\Phi_{Q,V}$ unchanged.

# %%
pre = hk.derive(hk.TransformerBlock(4, 6, d_k=2, placement="pre").double(), wrt=("query", "value"), inputs=X)
pre

# %% [markdown]
# Some derivatives vanish for a structural reason, which `derive` recognises: with ReLU and no norm above, $Z$ is linear
# in $W_2$.

# %%
print(hk.derive(hk.TransformerBlock(4, 6, placement="pre").double(), wrt=("down", "down"), inputs=X))
print(str(hk.derive(block, wrt=("down", "down"), inputs=X)).splitlines()[0], "  (post-norm: the norm above bends)")

# %% [markdown]
# ## Numbers
#
# `.dense()` evaluates the printed expression and nothing else. The reference is reverse mode twice, entry by entry of the
# output; it shares no line with `derive`.

# %%
names = ("attention.W_Q", "attention.W_V")
W_Q, W_V = (block.get_parameter(name).detach().clone().requires_grad_() for name in names)
Z = functional_call(block, dict(zip(names, (W_Q, W_V), strict=True)), (X,))
rows = []
for z in Z.reshape(-1):  # vec_r(Z)
    (gradient,) = torch.autograd.grad(z, W_Q, create_graph=True)
    rows += [torch.autograd.grad(entry, W_V, retain_graph=True)[0].reshape(-1) for entry in gradient.reshape(-1)]
reference = torch.stack(rows)
error = float((second.dense() - reference).abs().max() / reference.abs().max())
print(f"{second.shape[0]} x {second.shape[1]}; largest difference {error:.1e} of the largest entry")
assert error < 1e-12

# %% [markdown]
# With a loss the expression is a block of the loss's Hessian, split into the Gauss-Newton part and the rest. It must
# equal the block that `hessiankit.hessian` computes without writing down a formula.

# %%
target = torch.zeros_like(X)
loss = hk.derive(block, wrt=("query", "value"), inputs=X, loss="mse", target=target)
H = hk.hessian(block, X[None], target[None], loss="mse")
difference = (loss.dense() - H.block(*names)).abs().max()
print(str(loss).splitlines()[0])
print(f"formula minus hessiankit.hessian: {difference:.1e}")
assert difference < 1e-12

# %% [markdown]
# ## The tree of inequalities
#
# A formula in products, sums and Kronecker products bounds itself: norms multiply, add and multiply. This is how every a-priori
# bound of the papers is made.

# %%
print(second.explain_bound())

# %% [markdown]
# How good is it? Each object of the tree is an expression too, so its true norm can be compared with its bound.

# %%
tree = [("result", second.matrix), *((f"${one.symbol}$", one.matrix) for one in definitions(second.matrix))]
true = torch.stack([torch.linalg.matrix_norm(matrix.dense(), 2) for _, matrix in tree])
bound = torch.tensor([matrix.norm_bound() for _, matrix in tree], dtype=torch.float64)
assert (bound > true * (1 - 1e-12)).all()

order = (bound / true).argsort()
figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
axes.hlines(range(len(tree)), true[order], bound[order], color="#b0b0b0", zorder=1)
axes.plot(true[order], range(len(tree)), "o", color="#0072b2", label="norm")
axes.plot(bound[order], range(len(tree)), "s", color="#d55e00", label="bound from the norms of its factors")
axes.set(xscale="log", xlabel="spectral norm", yticks=range(len(tree)), yticklabels=[tree[k][0] for k in order])
axes.legend(loc="lower right")
plt.show()

# %% [markdown]
# The leaves are exact: $V_Y$, $V_Z$ and $\partial A/\partial T$ are block diagonal, and such a matrix has the norm of its
# largest block. The slack arises in sums and products. For example, $\|J_Y\|$ is bounded by $1 + 1$ times its other
# factors, although the matrix in its bracket is nearly a projection. Every level multiplies the slack of those below. At
# the top it is more than four orders of magnitude. A bound that keeps signs and common factors stays within a factor of
# two: see `bounds_and_slack`.

# %%
print(f"result: norm {true[0]:.3g}, bound {bound[0]:.3g}, {bound[0] / true[0]:.1e} times as large")
