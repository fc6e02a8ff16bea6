# %% [markdown]
# # A trained classifier: its spectrum, and what its approximations miss
#
# One transformer block on scikit-learn's digits, small enough for the whole Hessian. Where the matrix does not fit, all of this
# works by products alone.
#
# 1. Train, and take the top of the spectrum: `spectrum`.
# 2. How far does the quadratic model hold along the top eigenvectors? `loss_slices`.
# 3. Which approximation is close to the curvature? `approximations`.
# 4. Which parameters does a Kronecker factorisation miss?

# %%
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hessiankit as hk
from hessiankit.blocks import VisionTransformer

torch.manual_seed(0)
pixels, classes = load_digits(return_X_y=True)
pixels, _, classes, _ = train_test_split(pixels, classes, test_size=0.2, stratify=classes, random_state=0)
images = torch.from_numpy(pixels[:200] / 16).reshape(200, 2, 4, 2, 4).transpose(2, 3).reshape(200, 4, 16)  # patches of 4 x 4
labels = torch.from_numpy(classes[:200])
model = VisionTransformer(16, 4, 10, d_model=6, d_ff=8, placement="pre", final_norm=True, activation="gelu").double()
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(images)} images of {images.shape[1]} tokens")

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
for _ in range(150):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}, {float((model(images).argmax(1) == labels).double().mean()):.0%} right")

# %% [markdown]
# ## 1. Spectrum
#
# The residual of an eigenpair bounds its error: some eigenvalue is within $\|Hu - \lambda u\|$ of $\lambda$.

# %%
S = hk.spectrum(model, images, labels, loss="cross_entropy", k=12, bottom=12)
S

# %%
S.plot()

# %% [markdown]
# The Gauss-Newton matrix is a sum over samples of $J^\top(\mathrm{diag}(p) - pp^\top)J$; the middle factor has rank $C -
# 1 = 9$. In a trained perceptron the widest gap of the spectrum comes after the ninth eigenvalue (the figure `spectrum`
# of the gallery). In this small transformer no gap between neighbours stands out.

# %%
G = hk.spectrum(model, images, labels, loss="cross_entropy", k=12, kind="ggn")
top = G.eigenvalues[: G.top]
print("eigenvalues", [f"{x:.3g}" for x in top.tolist()])
print("ratios     ", [f"{x:.2f}" for x in (top[:-1] / top[1:]).tolist()])

# %% [markdown]
# ## 2. Loss slices
#
# The loss along the top eigenvectors is shown beside the quadratic model of the exact Hessian, with the radius within
# which the model is off by at most a tenth of its change. (With ReLU in place of GELU the first radius is $2\cdot
# 10^{-5}$: the nearest kink.)

# %%
slices = hk.loss_slices(model, images, labels, loss="cross_entropy", along=S.eigenvectors[:, :2], span=(-1.0, 1.0))
print(slices)
slices.plot()

# %% [markdown]
# ## 3. Approximations
#
# Each approximation $C$ is compared with the exact matrix $A$: by relative errors, by the cosine of the damped step $(C +
# \delta I)^{-1}g$ with the exact one, and by the condition number after preconditioning with $C$.

# %%
report = hk.approximations(model, images, labels, loss="cross_entropy", against="ggn")
report

# %%
report.plot()

# %% [markdown]
# ## 4. By pair of parameters
#
# A factorisation by layer omits everything between layers. Its errors within layers show on the diagonal.

# %%
report.plot_pairs("kfac")
