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
# Habana's mixed precision package, HMP, was removed from its software in release 1.12; scripts that import it do not start any more.
# Under hmp they run again, on the device that there is. This page runs one as it was published, then one with lists of its own, looks
# at what its lines do, and ends with the form that new code should have. It needs no Gaudi and takes less than a minute on a CPU.

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
# By itself it fails at its second line, and on a Gaudi with a present release too:


# %%
def run(*command):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True)


failed = run("example.py")
print(failed.stderr.splitlines()[-1])
assert failed.returncode == 1

# %% [markdown]
# `hmp run --habana` puts stand-ins for Habana's packages in place and then runs the script as it is. `--device-map` says where "hpu" is
# to be: here the CPU, else `hpu=cuda`, or `hpu=auto` for whatever accelerator torch finds. In a shell:
#
# ```sh
# hmp run --habana --device-map hpu=cpu --report report.json example.py
# ```

# %%
done = run("-m", "hmp", "run", "--habana", "--device-map", "hpu=cpu", "--report", "report.json", "example.py")
assert done.returncode == 0, done.stderr

# %% [markdown]
# It ran. In which precision? `--report` wrote that down: `linear` was in bfloat16 all 500 times, and nothing of the optimizer's step was
# cast, which is what `disable_casts()` was for.

# %%
report = hmp.Report.load("report.json")
report.assert_dtype("linear", torch.bfloat16)
print(report)

# %% [markdown]
# ## A script with lists of its own
#
# Scripts carried two text files, with the ops that run in bfloat16 and in float32, one a line. They mean what they meant.

# %%
Path("ops_bf16_digits.txt").write_text("linear\nrelu\n")
Path("ops_fp32_digits.txt").write_text("cross_entropy\nlog_softmax\nnll_loss\n")

# %% [markdown]
# `hmp check` reads such a file and says for each name what it stands for. A name that is misspelt is an error with the line and the
# nearest real name, not a line without effect.

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
# From here on the cells are an old script: its imports, its device, its call of `convert`.

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
# `convert` casts from now on in the whole process. A file takes the place of Habana's own list; for a path that is not given, Habana's
# list is taken, as in the first script.

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
# Inside this region torch is exactly torch. Around `optimizer.step()` it is still right, and no longer needed: hmp never casts what an
# optimizer does.

# %%
print("converted:    ", model(images[:2]).dtype)
with old_hmp.disable_casts():
    print("disable_casts:", model(images[:2]).dtype)
    assert model(images[:2]).dtype == torch.float32

# %% [markdown]
# ### Why the whole process is too much
#
# Habana's default list, which scripts without files run under, holds `mul`, and `convert` reaches every line of the program. A sum of
# losses weighted by the batch size, as many scripts keep it, is then rounded to bfloat16, which has eight significant bits:

# %%
old_hmp.convert()
mean_loss = torch.tensor(0.7)
weighted = mean_loss * 32
print(weighted)
assert weighted.item() == 22.375  # 0.7 x 32 = 22.4

# %% [markdown]
# `hmp.revert()` takes all of it back, and `uninstall()` the stand-ins.

# %%
hmp.revert()
shim.uninstall()
assert abs((mean_loss * 32).item() - 22.4) < 1e-5

# %% [markdown]
# ## The modern form
#
# `hmp.apply` casts the calls of one model and leaves the rest of the program alone. The old files are read as `convert` reads them.
# There is no device "hpu", no `mark_step`, no `disable_casts`. One thing is to be written that `convert` did unseen: the loss is outside
# of the model now, so its input is made float32 by hand.

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
# It is the same training: every loss, to the last bit.

# %%
losses = train(model)
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses == old_losses

# %% [markdown]
# And outside of the model nothing is rounded, while the policy is in force inside:

# %%
assert abs((mean_loss * 32).item() - 22.4) < 1e-5
assert model(images[:2]).dtype == torch.bfloat16

# %% [markdown]
# | what was | what to write now |
# |---|---|
# | `hmp.convert(opt_level="O1", bf16_file_path=b, fp32_file_path=f)` | `hmp.apply(model, hmp.Policy.from_files(b, f))` |
# | `hmp.convert()` | `hmp.apply(model)`, torch.autocast's lists, or `hmp.apply(model, "habana")`, Habana's |
# | `hmp.convert(opt_level="O2")` | `hmp.apply(model, "habana-o2")` |
# | `with hmp.disable_casts(): optimizer.step()` | `optimizer.step()` |
# | `isVerbose=True` | `hmp.apply(model, policy, verbose=True)`, or `with hmp.record() as report:` |
