# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Fix a NaN in float16 training
#
# A network learns in float32 but gives NaN in float16. Which op makes the NaN, and what is the smallest change that repairs it? With hmp
# you move one op to another list. This tutorial shows all steps: the NaN, the op that made it, the repaired list, and a comparison with
# float32. It takes less than a minute on a CPU, and needs `pip install scikit-learn`.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import hmp

torch.set_num_threads(1)  # networks this small are fastest on one thread

# %% [markdown]
# ## The data and the model
#
# scikit-learn brings 1797 handwritten digits of 8 x 8 pixels. Here they are bytes, 0 to 255, as most image files have them.

# %%
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32) * (255 / 16)
labels = torch.tensor(digits.target)
train, test = slice(0, 1400), slice(1400, None)

# %% [markdown]
# The model compares the rows of an image with each other, and its columns: all dot products of two rows, divided by their mean square.
# The division makes the features independent of the brightness, so the bytes were not scaled down.


# %%
class Likeness(nn.Module):
    def forward(self, rows):
        products = rows @ rows.transpose(-1, -2)
        energy = products.diagonal(dim1=-2, dim2=-1).mean(-1)
        return products / energy[:, None, None]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.likeness = Likeness()
        self.classify = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images):
        rows, columns = self.likeness(images), self.likeness(images.transpose(-1, -2))
        return self.classify(torch.cat([rows.flatten(1), columns.flatten(1)], 1))


# %% [markdown]
# Training is a plain loop. `hmp.apply(model, policy)` is the only call of hmp in it. From then on hmp casts inside each call of the model,
# as the policy's lists say, and nowhere else. Parameters stay float32.


# %%
def trained(policy=None, epochs=10):
    torch.manual_seed(0)
    model = Model()
    if policy is not None:
        hmp.apply(model, policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(epochs):
        for batch in torch.randperm(1400).split(50):
            loss = F.cross_entropy(model(images[batch]).float(), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model, loss.item()


@torch.no_grad()
def accuracy(model):
    return (model(images[test]).argmax(1) == labels[test]).float().mean().item()


# %%
in_float32, loss = trained()
print(f"float32: loss {loss:.3f}, test accuracy {accuracy(in_float32):.1%}")

# %% [markdown]
# ## The NaN
#
# The preset `torch-cuda@2.13` has the lists of `torch.autocast` on CUDA in torch 2.13: matrix multiplications in float16, sums and losses
# in float32. hmp follows them on any device, a CPU too.

# %%
policy = hmp.Policy.load("torch-cuda@2.13")
broken, loss = trained(policy, epochs=1)
print(f"float16: loss {loss}, test accuracy {accuracy(broken):.1%}")

# %%
assert loss != loss  # NaN, the only number that differs from itself

# %% [markdown]
# ## The finding
#
# After one step everything is NaN, so you can't see where it began. `hmp.detect_nonfinite()` stops at the first op that makes NaN or Inf
# out of finite inputs, in forward or backward.

# %%
try:
    with hmp.detect_nonfinite():
        trained(policy, epochs=1)
except hmp.NonFiniteError as error:
    finding = error.finding
print(finding)

# %% [markdown]
# Read it from the top. The first op to fail made Inf and not NaN: `matmul`, in the module `likeness`, at the line of the `@`. Its inputs
# are at most 255. But a sum of eight products of them reaches 8 x 255 x 255 = 520,200, and the largest number in float16 is 65,504. Two
# lines later, Inf divided by Inf gave NaN.

# %%
assert (finding.op, finding.made, finding.module) == ("matmul", "Inf", "likeness")
assert torch.finfo(torch.float16).max < 8 * 255 * 255

# %% [markdown]
# ## The repaired list
#
# You can paste the last line of the finding. It moves `matmul` from the low-precision list to the float32 list; every other op keeps its
# precision. (The low-precision list is called `bf16` even if its dtype is float16.)

# %%
policy = hmp.Policy.load("torch-cuda@2.13")
repaired = policy.move("matmul", "fp32")

# %%
assert '.move("matmul", "fp32")' in finding.remedy
print(policy.diff(repaired))

# %% [markdown]
# Run the detector again for one epoch under the repaired list, because one repair can uncover the next overflow. Here it finds nothing.

# %%
with hmp.detect_nonfinite():
    trained(repaired, epochs=1)

# %%
in_float16, loss = trained(repaired)
print(f"repaired: loss {loss:.3f}, test accuracy {accuracy(in_float16):.1%}")
assert abs(accuracy(in_float16) - accuracy(in_float32)) < 0.02

# %% [markdown]
# ## What runs in float16 now
#
# `hmp.record()` records the dtype that each op computed in. The layers with parameters, which do most of the work, still run in float16.

# %%
with hmp.record() as report:
    in_float16(images[test])
report.assert_dtype("matmul", torch.float32)
report.assert_dtype("linear", torch.float16)

# %% [markdown]
# ## The comparison with float32
#
# The loss is finite, but is it right? `hmp.compare` compares each op of forward and backward with float32, and measures what the output
# gains when an op of one module computes in float32. First the original lists:


# %%
def loss_of(output):
    return F.cross_entropy(output, labels[:100])


before = hmp.compare(in_float32, images[:100], policy, loss=loss_of)
print(before)

# %% [markdown]
# All of the error comes from `matmul`. Now the repaired lists, with the same weights and the same batch:

# %%
after = hmp.compare(in_float32, images[:100], repaired, loss=loss_of)
print(after)

# %% [markdown]
# The remaining error is the rounding to float16 in the two linear layers. It changes the output by less than a thousandth.

# %%
assert not before.output < float("inf")
assert after.output < 0.001

# %% [markdown]
# ## Keep it
#
# Save the policy as a folder of text files. `hmp.apply(model, "repaired")` and `hmp run --policy repaired train.py` load it.

# %%
repaired.save("repaired")
assert hmp.Policy.load("repaired") == repaired

# %% [markdown]
# Two remarks. First, bfloat16 has the range of float32, so `policy.replace(dtype="bfloat16")` would have avoided this overflow too, but
# with fewer digits everywhere; the finding also says so. Second, small gradients can underflow in float16, so for longer training scale the
# loss with `torch.amp.GradScaler`, with hmp as without it.
