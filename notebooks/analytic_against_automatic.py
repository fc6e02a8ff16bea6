# %% [markdown]
# # Analytic against automatic: the Hessian of one transformer block
#
# One post-norm block, $Y = \mathrm{LN}(X + F(X))$ and $Z = \mathrm{LN}(Y + \mathrm{FFN}(Y))$, and the squared error $\|Z
# - T\|_F^2 / (L d_V)$. Its Hessian with respect to all parameters is computed in four ways:
#
# 1. analytically, by `hessiankit.hessian`: one closed form for each operation, no automatic differentiation;
# 2. analytically, by the $\mathrm{vec}_r$ formulas of *Closing the Curvature Gap*, in their corrected form;
# 3. automatically, by reverse mode through the graph of reverse mode;
# 4. automatically, by `torch.func.hessian`, which is wrong here; the last section finds the terms that it drops.
#
# Weights multiply from the right, and $\mathrm{vec}_r$ stacks the rows of a matrix, so the Hessian has the entries of a
# weight `W` in the order of `W.reshape(-1)`.

# %%
import torch
from torch.func import functional_call

import hessiankit
from derivations.matrix import Identity, kron
from derivations.transformer import PostNormBlockAt
from hessiankit.curvature.plots import heatmap, side_by_side

# %% [markdown]
# ## The block
#
# All sizes differ, so that a swapped index shows. The gains and shifts of the norms are random too, because some errors
# of a formula are invisible at their initial values, 1 and 0.

# %%
L, d_V, d_K, d_ff = 3, 4, 2, 6

torch.manual_seed(0)
block = hessiankit.TransformerBlock(d_V, d_ff, d_k=d_K).double()
with torch.no_grad():
    for norm in (block.norm_1, block.norm_2):
        norm.weight += 0.5 * torch.randn(d_V)
        norm.bias += 0.5 * torch.randn(d_V)
X, T = torch.randn(2, L, d_V, dtype=torch.float64)

# %% [markdown]
# ## 1. Analytic, as you would call it

# %%
H = hessiankit.hessian(block, X, T, loss="mse")
H

# %% [markdown]
# The Hessian entry by entry, in log scale, with every block drawn equally large. The picture shows:
#
# - Grey is an exact zero. The output is linear in the last norm's gain and shift, and no output depends on those of two
#   features.
# - The dark band of $W_1$ is its third row: the first norm made the third feature of $Y$ small. The dark band of $W_2$ is
#   its second row: that hidden unit is switched on by one token only.
# - The Gauss-Newton part alone would put everything on the diagonal blocks of $W_1$ and $W_2$. Most of the rows of
#   attention is the functional part, which makes the matrix indefinite.

# %%
eigenvalues = torch.linalg.eigvalsh(H.matrix)
print(f"outer-product part {H.outer().norm():.1f}, functional part {H.functional().norm():.1f} (Frobenius norms)")
print(f"eigenvalues from {eigenvalues[0]:.1f} to {eigenvalues[-1]:.1f}")
heatmap(H.matrix, H.names, H.slices, title="Analytic Hessian", pixels=480)

# %% [markdown]
# ## 2. Analytic, as the paper writes it
#
# With $S = Y + \mathrm{FFN}(Y)$, $B_i = \partial S/\partial W_i$ and $\xi_{ij} = \partial B_i/\partial W_j$, each block of the
# Hessian is
#
# $$H^{(i,j)} = \frac{2}{L d_V}\left[J_i^\top J_j +
#   \left(\operatorname{vec}_r(Z-T)^\top\otimes I_{n_i}\right) H_{tr}^{(i,j)}\right], \qquad
#   H_{tr}^{(i,j)} = \left(J_Z\otimes I_{n_i}\right)\xi_{ij} + \left(I_{L d_V}\otimes B_i^\top\right) H_Z B_j$$
#
# with $J_i = J_Z B_i$ for the weights (Eq. 7 and 12; the printed second term lacks the factor $2/(L d_V)$). Here it is
# for queries and values, letter by letter:

# %%
weights = {name.rpartition(".")[2]: p.detach() for name, p in block.named_parameters() if "norm" not in name}
gains = {f"gamma_{k}": getattr(block, f"norm_{k}").weight.detach() for k in (1, 2)}
shifts = {f"beta_{k}": getattr(block, f"norm_{k}").bias.detach() for k in (1, 2)}
point = PostNormBlockAt(X, **weights, **gains, **shifts, eps=block.norm_1.eps)

n_Q = block.attention.W_Q.numel()
J_Z, H_Z, B_Q, B_V = point.J_Z, point.H_Z, point.B("Q"), point.B("V")
H_tr = kron(J_Z, Identity(n_Q)) @ point.xi("Q", "V") + kron(Identity(L * d_V), B_Q.T) @ H_Z @ B_V

residual = (point.Z - T).reshape(1, -1)
outer = 2 / (L * d_V) * (J_Z @ B_Q).dense().T @ (J_Z @ B_V).dense()
functional = 2 / (L * d_V) * torch.kron(residual, torch.eye(n_Q)) @ H_tr.dense()

H_QV = H.block("attention.W_Q", "attention.W_V")
print(f"H_tr^(Q,V): {H_tr.shape[0]} x {H_tr.shape[1]}; H^(Q,V): {n_Q} x {d_V**2}, largest entry {H_QV.abs().max():.4f}")
print(f"  outer-product part {outer.abs().max():.4f}, functional part {functional.abs().max():.4f}")
print(f"  formula minus hessiankit.hessian: {(outer + functional - H_QV).abs().max():.1e}")

# %% [markdown]
# The formula is an expression, not an array, until `.dense()` is called, so it can be read as well as computed. This is
# the second derivative of attention with respect to $W_Q$ and $W_V$ (Lemma 2), a part of $\xi_{QV}$. `W_V` occurs
# linearly, so only the first derivative of the softmax appears:

# %%
point.Phi("Q", "V")

# %% [markdown]
# `PostNormBlockAt.loss_hessian` does the same for every pair of parameters. The whole matrix:

# %%
letters = {"norm_1.weight": "gamma_1", "norm_1.bias": "beta_1", "norm_2.weight": "gamma_2", "norm_2.bias": "beta_2"}
letters = {name: letters.get(name, name.rpartition(".")[2]) for name in H.names}
formulas = torch.cat(
    [torch.cat([point.loss_hessian(T, letters[i], letters[j]).total.dense() for j in H.names], dim=1) for i in H.names]
)

# %% [markdown]
# ## 3. Automatic: reverse over reverse
#
# The loss is a function of one vector of all parameters. Its gradient is differentiated again, entry by entry.

# %%
theta = torch.cat([p.detach().reshape(-1) for p in block.parameters()])


def unpack(vector):
    parts = vector.split([p.numel() for p in block.parameters()])
    return {name: part.reshape(p.shape) for (name, p), part in zip(block.named_parameters(), parts, strict=True)}


def loss(vector):
    return (functional_call(block, unpack(vector), (X,)) - T).square().mean()


def reverse_over_reverse(function, at):
    at = at.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(at), at, create_graph=True)
    return torch.stack([torch.autograd.grad(entry, at, retain_graph=True)[0] for entry in gradient])


empirical = reverse_over_reverse(loss, theta)

# %% [markdown]
# ## 4. Automatic: `torch.func.hessian`
#
# This is forward mode over reverse mode, `jacfwd(jacrev)`. The second call is the same, with the norm of the block
# written out in elementary operations.

# %%
func_hessian = torch.func.hessian(loss)(theta)


def layer_norm(x, gain, shift, eps):
    centred = x - x.mean(-1, keepdim=True)
    return gain * centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() + shift


def loss_by_hand(vector):
    p = unpack(vector)
    norms = [(p[f"norm_{k}.weight"], p[f"norm_{k}.bias"], block.norm_1.eps) for k in (1, 2)]
    Q, K, V = (X @ p[f"attention.W_{letter}"] for letter in "QKV")
    Y = layer_norm(X + torch.softmax(Q @ K.T / d_K**0.5, dim=-1) @ V, *norms[0])
    Z = layer_norm(Y + torch.relu(Y @ p["feedforward.W_1"]) @ p["feedforward.W_2"], *norms[1])
    return (Z - T).square().mean()


func_hessian_by_hand = torch.func.hessian(loss_by_hand)(theta)

# %% [markdown]
# ## The numbers
#
# Each block pair is compared on its own: the largest difference from `hessiankit.hessian` relative to the largest entry
# of that pair, so that no small block hides behind a large one. The wrong matrix has plausible eigenvalues; only its
# asymmetry reveals the error.

# %%


def worst(other):
    """Return the largest error of all block pairs, and the pair where it occurs."""
    errors = {
        (i, j): float((other[H.slices[i], H.slices[j]] - H.block(i, j)).abs().max() / H.block(i, j).abs().max())
        for i in H.names
        for j in H.names
    }
    pair = max(errors, key=errors.get)
    return errors[pair], pair


routes = {
    "vec_r formulas": formulas,
    "reverse over reverse": empirical,
    "torch.func.hessian": func_hessian,
    "torch.func.hessian, norm by hand": func_hessian_by_hand,
}
print(f"{'against hessiankit.hessian':34}{'error':>9}{'|H - H^T|':>11}{'eigenvalues from':>18}{'to':>10}")
for name, matrix in routes.items():
    error, pair = worst(matrix)
    asymmetry = float((matrix - matrix.T).abs().max() / matrix.abs().max())
    eigenvalues = torch.linalg.eigvals(matrix).real
    where = f"  in {pair[0]} x {pair[1]}" if error > 1e-10 else ""
    print(f"{name:34}{error:9.0e}{asymmetry:11.0e}{eigenvalues.min():18.6f}{eigenvalues.max():10.6f}{where}")

for name in ("vec_r formulas", "reverse over reverse", "torch.func.hessian, norm by hand"):
    assert worst(routes[name])[0] < 1e-10, f"{name} disagrees with hessiankit.hessian"
assert H.asymmetry < 1e-12
wrong = worst(func_hessian)[0] > 1e-10
print(f"torch.func.hessian is {'WRONG' if wrong else 'right'} in torch {torch.__version__}; the others agree")

# %% [markdown]
# ## The differences, entry by entry
#
# Both pictures have one colour scale. On the left there is only rounding; grey entries agree to the last bit. On the
# right, bright entries are wrong in the first digits: the rows of the gains $\gamma_1$ and $\gamma_2$, along every
# parameter that comes before their norm. The transposed blocks are right, so the matrix is not symmetric.

# %%
side_by_side(
    [H.matrix - empirical, H.matrix - func_hessian],
    H.names,
    H.slices,
    titles=("reverse over reverse", "torch.func.hessian"),
    title="Analytic Hessian minus that of",
    limits=(1e-17, 10.0),
    zero_below=0.0,
    pixels=600,
)

# %% [markdown]
# ## Why `torch.func.hessian` is wrong
#
# One row and a linear loss suffice: $f(x, \gamma) = t^\top\,(\gamma\odot\hat x)$ with $\hat x = (x - \mu)/s$. The
# gradient with respect to the gain is $t\odot\hat x$. It depends on $x$ in three ways, directly and through $\mu$ and
# $s$:
#
# $$\frac{\partial^2 f}{\partial\gamma\,\partial x}
#   = \mathrm{diag}(t)\,\frac1s\Big(I - \tfrac1d 1 1^\top - \tfrac1d\hat x\hat x^\top\Big).$$
#
# torch returns $\mathrm{diag}(t)/s$, to the last digit. The backward formula of `layer_norm` takes the mean and the
# standard deviation that the forward pass saved. When forward mode differentiates the gain's gradient, these saved values
# have no tangent, so two of three terms are lost.

# %%
d = 4
x, gain, t = torch.randn(3, d, dtype=torch.float64)


def one_row(v):
    return t @ torch.nn.functional.layer_norm(v[:d], (d,), weight=v[d:])


at = torch.cat([x, gain])
s = (x.var(correction=0) + 1e-5).sqrt()
unit = (x - x.mean()) / s
right = torch.diag(t) @ (torch.eye(d) - torch.ones(d, d) / d - torch.outer(unit, unit) / d) / s
by_reverse = reverse_over_reverse(one_row, at)[d:, :d]
by_func = torch.func.hessian(one_row)(at)[d:, :d]

print(f"closed form minus reverse over reverse: {(right - by_reverse).abs().max():.0e}")
print(f"closed form minus torch.func.hessian:   {(right - by_func).abs().max():.2f}")
print(f"diag(t) / s minus torch.func.hessian:   {(torch.diag(t) / s - by_func).abs().max():.0e}")
assert (right - by_reverse).abs().max() < 1e-12

# %% [markdown]
# Each row of the true matrix is orthogonal to $1$, since a shift of $x$ changes nothing. Such identities need no second
# implementation to compare with. `hessiankit.check` tests them beside the references, and a reference that is not symmetric
# does not count.

# %%
print("torch.func.hessian times 1:", (by_func @ torch.ones(d, dtype=torch.float64)).numpy().round(3))
print("closed form times 1:       ", (right @ torch.ones(d, dtype=torch.float64)).abs().max().item() < 1e-15)

# %%
report = hessiankit.check(block, X[None], T[None], against=("reverse-over-reverse", "jvp(grad)", "torch.func.hessian"))
print("\n".join(report.health_lines()))
print(report.verdict)
