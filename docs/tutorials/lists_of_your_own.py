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
# # Find the cheapest op lists for your model with hmp tune
#
# A preset (lists that come with hmp) is not made for your model. The model of this tutorial breaks under presets: one of its matrix
# multiplications must not run in bfloat16, while all others may. `hmp.tune` finds such ops: it trains the model under many lists, keeps
# the cheapest that are as good as float32, and writes them to files. This takes less than a minute on a CPU, and needs
# `pip install scikit-learn`.

# %%
import subprocess
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import hmp

torch.set_num_threads(1)  # networks this small are fastest on one thread

# %% [markdown]
# ## The task
#
# The data are scikit-learn's handwritten digits with an offset: each pixel is 8200 counts of light, plus at most 16. One part of the data
# is for training, one for the metric, and one that tune never sees.

# %%
digits = load_digits()
counts = 8200 + torch.tensor(digits.images, dtype=torch.float32).flatten(1)
labels = torch.tensor(digits.target)
batches = list(zip(counts[:1200].split(100), labels[:1200].split(100), strict=True))
held_out = counts[1200:1500], labels[1200:1500]
unseen = counts[1500:], labels[1500:]


# %% [markdown]
# The first layer multiplies by a fixed matrix and subtracts the offset. After it comes an ordinary network.


# %%
class Calibration(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("matrix", torch.eye(64) + 0.01 * torch.rand(64, 64))
        self.register_buffer("black", 8200 * self.matrix.sum(0))

    def forward(self, counts):
        return (counts @ self.matrix - self.black) / 16


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(Calibration(), nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 10))


# %% [markdown]
# tune needs the parts of a training loop: a loss, an optimizer and, if you have one, a metric. A larger metric is better.


# %%
def loss(model, batch):
    images, targets = batch
    return F.cross_entropy(model(images), targets)


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


@torch.no_grad()
def accuracy(model, part=held_out):
    images, targets = part
    return (model(images).argmax(1) == targets).float().mean().item()


# %% [markdown]
# ## The search
#
# The search starts from the preset `habana`. The accuracy after 60 steps of training may be at most 2 % worse than float32's. On a CPU
# without bfloat16 instructions lists can't save time, so here the search minimises the activation memory of a step.

# %%
result = hmp.tune(
    new_model(),
    batches,
    loss=loss,
    metric=accuracy,
    optimizer=optimizer,
    start="habana",
    tolerance={"metric": 0.02},
    objective="memory",
    steps=60,
    max_trials=20,
    folder="tuned",
)
print(result)

# %% [markdown]
# Each row of the table is one training under some lists. Under `habana` the network only guesses: one in ten is right. The same happens
# under `torch-cpu`, which has the lists of `torch.autocast`. The chosen lists reach float32's accuracy.

# %%
assert not result["habana"].fits
assert result["habana"].metric < 0.2
assert result.best.fits

# %% [markdown]
# They save little more than half of float32's bytes for backward, ...

# %%
print(f"{result.best.saved_bytes / result['float32'].saved_bytes:.2f} of the bytes, accuracy {result.best.metric:.1%}")
assert result.best.saved_bytes < 0.7 * result["float32"].saved_bytes

# %% [markdown]
# ... and the one op that they leave in float32, unlike both presets, is the matrix multiplication of the first layer. This makes sense:
# bfloat16 has eight significant bits, so its numbers around 8200 are 64 apart, but all pixels are within 16 counts.

# %%
assert "matmul" in result.policy.fp32
assert {"linear", "layer_norm"} <= result.policy.bf16
assert torch.tensor([8200.0, 8216.0]).bfloat16().tolist() == [8192.0, 8192.0]

# %% [markdown]
# ## The files
#
# The folder has one text file for each list, with the reason next to each name. `tune.json` has all measurements. Names of ops that this
# model never calls stay on the preset's lists.

# %%
print(sorted(path.name for path in Path("tuned").iterdir()))
print("\n".join(Path("tuned/bf16.txt").read_text().splitlines()[:12]))

# %% [markdown]
# These are ordinary lists: read them, edit them, put them under version control, load them by the folder's name.

# %%
policy = hmp.Policy.load("tuned")
assert policy == result.policy

# %% [markdown]
# `hmp check` explains each entry and reports errors in the files; exit status 0 means that it found none. Run it after you edit lists by
# hand, and in CI.

# %%
checked = subprocess.run([sys.executable, "-m", "hmp", "check", "tuned"], capture_output=True, text=True)
print("\n".join(checked.stdout.splitlines()[:3]))
assert checked.returncode == 0, checked.stdout

# %% [markdown]
# ## Verify the result
#
# tune has verified the lists only for these batches, this number of steps and one seed. Here is a training that tune did not run: with
# another seed, twice as long, and measured on digits that it never saw.


# %%
def trained(policy=None):
    model = new_model()
    torch.manual_seed(1)
    for layer in (model[1], model[4]):
        layer.reset_parameters()
    if policy is not None:
        hmp.apply(model, policy)
    steps = optimizer(model)
    for _ in range(10):
        for batch in batches:
            steps.zero_grad()
            loss(model, batch).backward()
            steps.step()
    return model


# %%
found = {name: accuracy(trained(lists), unseen) for name, lists in [("float32", None), ("habana", "habana"), ("tuned", "tuned")]}
print("\n".join(f"{name:8} {value:.1%}" for name, value in found.items()))

# %%
assert found["habana"] < 0.2
assert abs(found["tuned"] - found["float32"]) < 0.03

# %% [markdown]
# And `hmp.record()` shows that the ops follow the lists:

# %%
model = hmp.apply(new_model(), "tuned")
with hmp.record() as report:
    model(unseen[0])
report.assert_dtype("matmul", torch.float32)
report.assert_dtype("linear", torch.bfloat16)

# %% [markdown]
# ## From the shell, and other goals
#
# `hmp tune recipe.py --tolerance 0.01 --seconds 600 --out tuned` runs such a search from the shell. `recipe.py` defines `model()`,
# `batches()`, `loss`, `optimizer` and `metric`; `hmp init` writes one to start from.
# `hmp run --policy tuned train.py` runs a script under the lists.
#
# | argument | what it does |
# |---|---|
# | `objective="time"` (default), `"memory"` | minimise the time of a step, or its activation memory |
# | `objective="bytes"` | also write `saved.txt`: activations in 8 bits, as far as the tolerance allows |
# | `levels=("fp8", "bf16", "fp32")` | also move as many matrix multiplication FLOPs to `fp8.txt` as the tolerance allows |
# | `tolerance=0.01` | how much worse than float32's the loss may be, or the metric if there is one (0.01 is 1 %) |
# | `per_module=True` | decide each op separately in each module, with entries such as `softmax @ decoder.0` |
# | `seconds=`, `max_trials=`, `steps=` | limit the search, and how long each trial trains |
# | `start=` | the lists to start from |
#
# tune adds ops to the low-precision list in a fixed order: first those that change the loss least for what they save. If all of them
# together exceed the tolerance, bisection finds how many can be added. Ops that gain nothing by themselves come after that: between other
# ops they may spare casts. At any time, even after Ctrl-C, the folder has the best lists verified so far.
