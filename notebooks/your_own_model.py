# %% [markdown]
# # Your own Hugging Face model: from `check` to learning rates by block type
#
# A tiny GPT-2, made from a config so that nothing is downloaded, takes the place of your model. Everything below takes a
# `torch.nn.Module`; nothing depends on names of parameters that you would have to adapt.
#
# 1. Are second derivatives of this model right? `check`.
# 2. Which entries of a fused weight are the queries? `named_slices`. How do queries and keys curve together? `hessian`.
# 3. Which block is sharp? `block_types`, `sharpness` with intervals.
# 4. Learning rates by block type, with a slice of a fused tensor at a rate of its own: `blockwise_lr`.
# 5. What happens to the blocks in training: `Monitor`.

# %%
import argparse
import inspect
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hessiankit as hk

torch.manual_seed(0)
sizes = {"vocab_size": 256, "n_positions": 32, "n_embd": 12, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="eager")).eval()
model.loss_type = "ForCausalLM"  # what transformers falls back on, with a warning
print(f"{sum(p.numel() for p in model.parameters()):,} parameters")

text = torch.tensor(list(inspect.getsource(argparse).encode()))  # every byte is a token
training, held_out = text[:-10_000], text[-10_000:]


def sequences(tokens, count, length, seed):
    """Return sequences that start at random places, (count, length)."""
    starts = torch.randint(len(tokens) - length, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([tokens[start : start + length] for start in starts])


tokens = sequences(training, 2, 12, seed=0)
batch = {"input_ids": tokens, "labels": tokens}

# %% [markdown]
# ## 1. Check
#
# The Hessian in closed form is compared with references that do not share a path with it or with each other. With
# `loss=None` the model's own loss is used. Transformers computes it in float32, even in a float64 model; `check` notices,
# says where, and uses the tolerance of float32.

# %%
model.double()
report = hk.check(model, batch, loss=None, params="transformer.h.1.attn.c_attn.*", directions=1)
print("\n".join(report.health_lines()))
print(report.verdict)
assert report

# %% [markdown]
# ## 2. Slices of a fused weight
#
# GPT-2 keeps query, key and value in one tensor, `c_attn`. An index string names a slice, and every function takes it in
# place of a parameter's name. (`dry_run=True` forecasts memory and time of a Hessian without computing it.)

# %%
slices = hk.named_slices(model, heads=True)
for name in list(slices)[:6]:
    print(f"{name:42} {slices[name]}")

query, key = (slices[f"transformer.h.0.attn.{role}.head_0.weight"] for role in ("query", "key"))
H = hk.hessian(model, batch, loss=None, params=[query, key])
for row, column in ((query, query), (query, key), (key, key)):
    print(f"{row} x {column}: norm {H.spectral_norm(row, column):.2e}")

# %% [markdown]
# All heads of the first layer at once, entry by entry:

# %%
names = [f"transformer.h.0.attn.{role}.head_{head}.weight" for role in ("query", "key", "value") for head in (0, 1)]
matrix = torch.cat([torch.cat([H.block(slices[row], slices[column]) for column in names], dim=1) for row in names])
cell, labels = len(matrix) // 6, [f"${role}_{head}$" for role in "QKV" for head in (1, 2)]

figure, axes = plt.subplots(figsize=(4.5, 3.8), layout="constrained")
image = axes.imshow(matrix.abs(), norm="log", interpolation="nearest", vmin=1e-9)
axes.set_title("c_attn at initialisation")
axes.set_xticks([cell * (k + 0.5) for k in range(6)], labels)
axes.set_yticks([cell * (k + 0.5) for k in range(6)], labels)
for k in range(1, 6):
    axes.axhline(k * cell - 0.5, color="white", lw=0.8)
    axes.axvline(k * cell - 0.5, color="white", lw=0.8)
figure.colorbar(image, label="$|H_{ij}|$")
plt.show()

# %% [markdown]
# The diagonal blocks of queries and keys, $Q_1Q_1$ to $K_2K_2$, are two orders of magnitude below the block between the
# queries and the keys of the same head. The logits $x^\top W_Q W_K^\top x$ are a product of two small matrices: the
# derivative with respect to one is as small as the other. The Gauss-Newton part has two such factors, the mixed second
# derivative none. Its stripes are $I_{d_K}$: feature $k$ of a query meets feature $k$ of a key and no other. A diagonal
# approximation does not contain this block.

# %% [markdown]
# ## 3. Which block is sharp
#
# Block types come from modules and the flow of the forward pass, not from parts of names. The tied head is part of the
# embedding.

# %%
model.float()
types = hk.block_types(model)
print("\n".join(str(types).splitlines()[-8:]))

# %% [markdown]
# Average sharpness is $N\,\mathbb{E}[g^2]$ per entry, with labels drawn from the model's own softmax (Eq. 3-4 of *The
# Sharpness Disparity Principle*): the mean of the Fisher information's diagonal. The randomness of the labels gives the
# intervals. Micro-batches of one sequence cost the same and make the intervals narrower.

# %%
measured_on = sequences(held_out, 8, 32, seed=1)
data = {"input_ids": measured_on, "labels": measured_on}
at_start = hk.sharpness(model, data, draws=8, micro_batch=1)
print(at_start)

# %% [markdown]
# The paper's order is Emb < QK < FFN < VO < Norm. This model at initialisation has another: queries and keys are four to
# seven orders of magnitude below the rest, for the reason seen above, and the embedding, tied to the head, is among the
# sharp ones. An order is a property of a model at a step of its training, and so are learning rates derived from it.
#
# ## 4. Learning rates by block type
#
# `"paper"` is the preset with the paper's ratios, from 10 for embeddings to 1 for norms. `c_attn` is one tensor with two
# rates: it is in one group with the larger rate, and after each step of the optimizer the step of its value slice is
# reduced to that slice's rate.

# %%
groups = hk.blockwise_lr(model, 1e-3, "paper")
print(groups)

# %% [markdown]
# `"measured"` takes $r = (S_{\mathrm{Norm}}/S)^{1/2}$ from a report, within $[1/4, 4]$, and uses the end of each interval
# that is nearest to one. Measured at initialisation, it would invert the paper's ratios for all but queries and keys.
# That is a reason to measure, and a reason not to trust one early measurement.

# %%
hk.blockwise_lr(model, 1e-3, "measured", sharpness=at_start)

# %% [markdown]
# ## 5. A short training, monitored
#
# The monitor measures on held-out bytes and changes nothing that training reads.

# %%
STEPS = 200
folder = Path(tempfile.mkdtemp())
optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
schedule = hk.blockwise_schedule(optimizer, warmup=10, steps=STEPS)
what = {"norms": {}, "sharpness": {"micro_batch": 1}}
monitor = hk.Monitor(model, data, folder / "run.jsonl", every=40, log_spaced=True, what=what)
model.train()
monitor.step(0)
for step in range(1, STEPS + 1):
    seen = sequences(training, 16, 32, seed=step)
    model(input_ids=seen, labels=seen).loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    monitor.step(step)
model.eval()
log = hk.Monitor.read(monitor.path)
print(log)

# %%
log.plot(title="A tiny GPT-2")

# %%
at_end = hk.sharpness(model, data, draws=8, micro_batch=1)
print(f"at the start: {at_start.ordering}")
print(f"at the end:   {at_end.ordering}")
for kind in at_end.order:
    if kind != "Norm":
        print(f"S_Norm / S_{kind:4} {at_start.ratio(kind).value:10.3g} at the start, {at_end.ratio(kind)} at the end")
print(hk.blockwise_lr(model, 1e-3, "measured", sharpness=at_end))

# %% [markdown]
# In 200 steps the sharpness of queries and keys has risen by four orders of magnitude, as the model begins to attend, and
# that of the norms by two. Norms are near the sharp end now, as in the paper, but VO is sharper and embeddings are not the
# flattest. Except for queries and keys, the ratios of this measurement are nearer to 1 than the paper's. One tiny
# model and one seed show how to use the tool; they are no evidence for or against an order.
#
# Whether ratios by type train better than one rate is another question, which needs a base rate tuned for each side.
# `python -m papers tune-lr` makes that comparison, with seeds and intervals.
