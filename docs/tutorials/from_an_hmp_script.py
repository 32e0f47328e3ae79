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
# # From a script written for Habana's HMP
#
# Habana removed its mixed precision package, HMP, from its software in release 1.12, so scripts that import it no longer start. Under hmp
# they run again, on any device. This tutorial runs such a script as it was published, and then one with its own op lists. It explains
# what their lines do, and ends with the form that new code should have. It needs no Gaudi and takes less than a minute on a CPU.

# %%
import subprocess
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import hmp

torch.set_num_threads(1)  # networks this small are fastest on one thread

# %% [markdown]
# ## The published example, unchanged
#
# This is the usage example of Habana's documentation. It imports Habana's package and asks for the device "hpu".

# %%
SCRIPT = """\
import torch
from habana_frameworks.torch.hpex import hmp

x = torch.randn(64, 1024, device=torch.device("hpu"))
y = torch.randn(64, 512, device=torch.device("hpu"))
hmp.convert(bf16_file_path="", fp32_file_path="", isVerbose=False)
model = torch.nn.Linear(1024, 512).to(torch.device("hpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for t in range(500):
    y_pred = model(x)
    loss = torch.nn.functional.mse_loss(y_pred, y)
    optimizer.zero_grad()
    loss.backward()
    with hmp.disable_casts():
        optimizer.step()
"""
Path("example.py").write_text(SCRIPT)


# %% [markdown]
# Without hmp it fails at its second line, even on a Gaudi with a current release:


# %%
def run(*command):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True)


failed = run("example.py")
print(failed.stderr.splitlines()[-1])
assert failed.returncode == 1

# %% [markdown]
# `hmp run --habana` provides fake versions of Habana's packages and runs the script unchanged. `--device-map` sets the
# device that "hpu" means: here the CPU; others are `hpu=cuda`, and `hpu=auto` for the accelerator that torch finds. In a shell:
#
# ```sh
# hmp run --habana --device-map hpu=cpu --report report.json example.py
# ```

# %%
done = run("-m", "hmp", "run", "--habana", "--device-map", "hpu=cpu", "--report", "report.json", "example.py")
assert done.returncode == 0, done.stderr

# %% [markdown]
# It ran, and `--report` recorded the dtypes: `linear` ran in bfloat16 all 500 times. Nothing in the optimizer's step was cast,
# which is the purpose of `disable_casts()`.

# %%
report = hmp.types.Report.load("report.json")
report.assert_dtype("linear", torch.bfloat16)
print(report)

# %% [markdown]
# ## A script with lists of its own
#
# Scripts came with two text files of op names, one per line: the ops that run in bfloat16 and those that run in float32. hmp reads these
# files with the same meaning.

# %%
Path("ops_bf16_digits.txt").write_text("linear\nrelu\n")
Path("ops_fp32_digits.txt").write_text("cross_entropy\nlog_softmax\nnll_loss\n")

# %% [markdown]
# `hmp check` reads such a file and explains each name. A misspelt name is an error, reported with its line and the nearest real name; it
# is not silently ignored.

# %%
Path("misspelt_bf16.txt").write_text("linear\nrellu\n")
checked = run("-m", "hmp", "check", "misspelt_bf16.txt")
print(checked.stdout + checked.stderr)
assert checked.returncode != 0
assert "relu" in checked.stdout + checked.stderr

# %% [markdown]
# ### In a notebook: `install()`
#
# What `--habana` does for a script, `hmp.compat.habana.install()` does for a running Python.

# %%
import hmp.compat.habana

shim = hmp.compat.habana.install("cpu")

# %% [markdown]
# The following cells are an old script, with its imports, its device and its call of `convert`.

# %%
import habana_frameworks.torch.core as htcore
from habana_frameworks.torch.hpex import hmp as old_hmp

device = torch.device("hpu")
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1).to(device) / 16
labels = torch.tensor(digits.target).to(device)


# %%
def new_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def train_as_it_was(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in zip(images[:1500].split(100), labels[:1500].split(100), strict=True):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        htcore.mark_step()  # lazy mode's; without a Gaudi it does nothing
        with old_hmp.disable_casts():
            optimizer.step()
        losses.append(loss.item())
    return losses


# %% [markdown]
# After `convert`, hmp casts in the whole process. A file replaces Habana's own list. If you give no path, Habana's list is used, as in the
# first script.

# %%
old_hmp.convert(opt_level="O1", bf16_file_path="ops_bf16_digits.txt", fp32_file_path="ops_fp32_digits.txt", isVerbose=False)
model = new_model().to(device)
with hmp.record() as report:
    old_losses = train_as_it_was(model)
print(f"loss {old_losses[0]:.3f} -> {old_losses[-1]:.3f}")

# %%
report.assert_dtype("linear", torch.bfloat16)
report.assert_dtype("cross_entropy", torch.float32)
assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

# %% [markdown]
# ### `disable_casts()`
#
# Inside this block torch behaves as without hmp. Around `optimizer.step()` it still works but is no longer needed: hmp never casts in an
# optimizer's step.

# %%
print("converted:    ", model(images[:2]).dtype)
with old_hmp.disable_casts():
    print("disable_casts:", model(images[:2]).dtype)
    assert model(images[:2]).dtype == torch.float32

# %% [markdown]
# ### Why not cast the whole process
#
# Scripts without files use Habana's default list. It contains `mul`, and `convert` affects every line of the program. Many scripts sum up
# losses weighted by the batch size. That sum is then rounded to bfloat16, which has eight significant bits:

# %%
old_hmp.convert()
mean_loss = torch.tensor(0.7)
weighted = mean_loss * 32
print(weighted)
assert weighted.item() == 22.375  # 0.7 x 32 = 22.4

# %% [markdown]
# `hmp.revert()` undoes `convert`, and `uninstall()` removes the fake packages.

# %%
hmp.revert()
shim.uninstall()
assert abs((mean_loss * 32).item() - 22.4) < 1e-5

# %% [markdown]
# ## The modern form
#
# `hmp.apply` casts the calls of one model and leaves the rest of the program alone. The old files are read as `convert` reads them.
# The device "hpu", `mark_step` and `disable_casts` are gone. One thing that `convert` did by itself you now have to write: the loss is
# outside of the model, so you convert its input to float32.

# %%
policy = hmp.Policy.from_files("ops_bf16_digits.txt", "ops_fp32_digits.txt")
model = hmp.apply(new_model(), policy)


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in zip(images[:1500].split(100), labels[:1500].split(100), strict=True):
        loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% [markdown]
# The training is the same: every loss is equal, bit for bit.

# %%
losses = train(model)
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses == old_losses

# %% [markdown]
# Outside of the model nothing is rounded, while the policy is active inside it:

# %%
assert abs((mean_loss * 32).item() - 22.4) < 1e-5
assert model(images[:2]).dtype == torch.bfloat16

# %% [markdown]
# | old script | new code |
# |---|---|
# | `hmp.convert(opt_level="O1", bf16_file_path=b, fp32_file_path=f)` | `hmp.apply(model, hmp.Policy.from_files(b, f))` |
# | `hmp.convert()` | `hmp.apply(model)`, torch.autocast's lists, or `hmp.apply(model, "habana")`, Habana's |
# | `hmp.convert(opt_level="O2")` | `hmp.apply(model, "habana-o2")` |
# | `with hmp.disable_casts(): optimizer.step()` | `optimizer.step()` |
# | `isVerbose=True` | `hmp.apply(model, policy, verbose=True)`, or `with hmp.record() as report:` |
