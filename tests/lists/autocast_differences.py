"""Where hmp differs from torch.autocast, with reasons: what the sweep may find, and the page that says so.

`PYTHONPATH=tests/support python tests/lists/autocast_differences.py` runs the sweep over op_db and writes
docs/pages/explain/differences-from-autocast.md.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

from preset_sweep import OPS, RELEASE, Difference, named
from test_presets_torch_cpu_recurrent import ALL as RECURRENT

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pages" / "explain" / "differences-from-autocast.md"

MIXTURE = "the first input decides (R7); this release computes the mixture in the matrix's dtype, later ones refuse it"
NUMBERS = "Python code of torch draws the random samples in the input's dtype before autocast casts both; here the input is cast first"
PRODUCTS = "C++ code with products inside, which autocast runs in the low dtype; hmp promotes the inputs of the whole op"

# Ops of op_db that give another dtype or other bits under `torch-cpu`, and on which releases of torch. One that no longer differs
# fails the sweep.
EXCEPTIONS = {
    "inner": Difference(PRODUCTS, "2.7"),
    "addmv": Difference(MIXTURE, "2.7"),
    "nn.functional.fractional_max_pool2d": Difference(NUMBERS, "2.7"),
    "nn.functional.fractional_max_pool3d": Difference(NUMBERS, "2.7"),
}

# (what, torch.autocast, hmp, reason): what the calls of op_db do not show. The page's Python shows the first ones.
OTHERS = (
    ("an `attn_mask` whose finite values lie beyond the low dtype (`finfo(float32).min`)",
     "becomes -inf; a row that is masked whole has no mean", "saturates; such a row has the mean", "R12: no mask makes NaN"),
    ("a scalar beyond the low dtype in `masked_fill`, `pad`, `clamp` and the like", "raises, or becomes infinite", "saturates", "R12"),
    ("an op that has no kernel in the low dtype, with an input in it", "raises", "runs in float32, and the log says so", "R11"),
    ("products, convolutions and recurrent ops on a processor without instructions for the low dtype",
     "run by torch's kernels, which are slow",
     "compute in float32 on the rounded inputs and round their result; with `HMP_LOW_KERNELS=native` as under torch.autocast",
     "R11: the last bit of an accumulation differs. `gru`, `gru_cell` and `lstm_cell` round their input and weights, and keep state and "
     "result in float32, as under torch.autocast; an LSTM or RNN rounds its result alone, not each step's"),
    ("a mixture of dtypes that torch refuses", "raises, but for the ops on its lists", "runs in the first input's dtype", "R7"),
    ("`out=`", "the op runs as without autocast", "runs under its list, and the result arrives in `out`'s dtype", "R6: one op, one rule"),
    ("an op that writes into a low-dtype tensor, with float32 operands", "raises, where torch does", "runs in that tensor's dtype", "R5"),
    ("a weight or an activation that several calls use", "is cast once in a region; the gradients of its uses are summed in the low dtype",
     "is cast once; the gradients of its uses, those of the steps of one recurrent layer too, are summed in float32 (R21)",
     "such sums lose bits: over 500 steps of `nn.GRU` (32 to 64, on the CPU) the gradients are 0.84 % off float64's under torch.autocast, "
     "0.27 % under hmp and under torch.autocast without its cache; of a `GRUCell` 2.16 %, 0.23 % and 0.23 %"),
    ("`torch.ops.aten.*`, and ops that a C++ extension calls", "are cast", "are left to torch", "hmp stands at torch's Python names"),
    ("`nn.MultiheadAttention` and `nn.TransformerEncoderLayer` in eval, without gradients",
     "run a fused kernel", "run op by op, as in training; `nn.TransformerEncoder` leaves zeros at padded positions where torch does",
     "R8: one module has one precision"),
    (
        "`cross_entropy` on CUDA",
        "takes `log_softmax` in the low dtype and the rest in float32",
        "runs in float32",
        "it stands on the FP32 list of `torch-cuda`, and on torch's own page",
    ),
    (
        "`nn.LSTM`, `nn.GRU`, `nn.RNN` on CUDA under bfloat16",
        "run in float16",
        "run in bfloat16",
        "R1: the policy's dtype is the one that runs",
    ),
    ("`binary_cross_entropy` on CUDA", "raises", "runs in float32", "it stands on the FP32 list of `torch-cuda`"),
    ("ops without elements, such as the inverse of a 0x0 matrix", "keep the low dtype", "may give float32",
     "R11's table knows ops and not sizes"),
    ("products inside `inner` of matrices, `affine_grid` and `lobpcg`", "run in the low dtype", "run in float32",
     "`inner` is on the list for its mixtures of dtypes, the others are on none; op_db has no such samples"),
    ("`torch.func.vmap` of `linear` with a bias", "is taken apart, and gives float32", "runs in the low dtype", "R8"),
    ("`backward()` inside of the region, which torch advises against", "runs products of the float32 parts of forward in the low dtype",
     "runs them in float32", "R13: no list applies to backward"),
    ("`backward()`, outside of the region, of `torch.sparse.mm` with a dense matrix",
     "raises: what is kept for backward is float32, the gradient bfloat16", "has the gradients of operands that were cast",
     "the operands are cast in the graph"),
    ("`linalg.lstsq`", "", "", "the same call does not give the same bits twice; it is compared to four digits"),
)  # fmt: skip

_SHOWN = '''```python
import torch
import torch.nn.functional as F

import hmp


def both(call):
    """What the call gives under torch.autocast and under hmp; the error in the place of a result."""
    found = []
    for region in (torch.autocast("cpu", dtype=torch.bfloat16), hmp.casts("torch-cpu")):
        with region:
            try:
                found.append(call())
            except (RuntimeError, NotImplementedError) as error:
                found.append(error)
    return found


a, b, low = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4).bfloat16()
lowest = torch.finfo(torch.float32).min

# an attention mask beyond bfloat16, over a whole row
mask = torch.zeros(4, 4)
mask[0] = lowest
theirs, ours = both(lambda: F.scaled_dot_product_attention(a[None, None], a[None, None], a[None, None], attn_mask=mask))
assert ours.isfinite().all() and not torch.equal(ours, theirs)
# a scalar beyond it
theirs, ours = both(lambda: low.masked_fill(a > 0, lowest))
assert isinstance(theirs, Exception) and ours.isfinite().all()
# no kernel
theirs, ours = both(lambda: torch.special.bessel_j0(low))
assert isinstance(theirs, Exception) and ours.dtype is torch.float32
# a mixture
theirs, ours = both(lambda: torch.lerp(low, a, 0.5))
assert isinstance(theirs, Exception) and ours.dtype is torch.bfloat16
# out=
theirs, ours = both(lambda: torch.mm(a, b, out=torch.empty(4, 4)))
assert torch.equal(theirs, a @ b) and torch.equal(ours, (a.bfloat16() @ b.bfloat16()).float())
# in place
theirs, ours = both(lambda: low.clone().addmm_(a, b))
assert isinstance(theirs, Exception) and ours.dtype is torch.bfloat16
# a weight that is used five times
gradients = []
layer = torch.nn.Linear(64, 64)
for region in (torch.autocast("cpu", dtype=torch.bfloat16), hmp.casts("torch-cpu")):
    torch.manual_seed(0)
    with region:
        loss = sum(layer(torch.randn(32, 64)).float().square().sum() for _ in range(5))
    gradients += torch.autograd.grad(loss, [layer.weight])
assert not torch.equal(*gradients) and torch.allclose(*gradients, rtol=0.1, atol=1.0)
# products that autocast reaches inside other ops
theirs, ours = both(lambda: torch.inner(a, b))
assert theirs.dtype is torch.bfloat16 and torch.equal(ours, torch.inner(a, b))
theirs, ours = both(lambda: F.affine_grid(torch.ones(2, 2, 3), (2, 1, 8, 8), align_corners=False))
assert theirs.dtype is torch.bfloat16 and ours.dtype is torch.float32
# backward inside of the region, of a part that ran in float32
def gradient():
    weight = torch.ones(4, 4, requires_grad=True)
    with torch.autocast("cpu", enabled=False):
        loss = (weight @ a).square().sum()
    loss.backward()
    return weight.grad


theirs, ours = both(gradient)
assert not torch.equal(theirs, ours) and torch.allclose(ours, 2 * torch.ones(4, 4) @ a @ a.T)
# torch's dispatcher, called by name
theirs, ours = both(lambda: torch.ops.aten.mm(a, b))
assert theirs.dtype is torch.bfloat16 and ours.dtype is torch.float32
```
'''


def page(counts: Mapping[str, int]) -> str:
    """The page, with the numbers of a sweep."""
    rows = [f"| `{op}` | {d.releases or 'all'} | {d.reason} |" for op, d in EXCEPTIONS.items()]
    others = ["| " + " | ".join(part or "-" for part in row) + " |" for row in OTHERS]
    return "\n".join((
        "# Where hmp differs from torch.autocast",
        "",
        "`PYTHONPATH=tests/support python tests/lists/autocast_differences.py` writes this page. It calls every op of torch's own table",
        "of operators (op_db), by every name, in float32, in bfloat16 and in two mixtures, under",
        "`torch.autocast(\"cpu\", dtype=torch.bfloat16)` and under the preset `torch-cpu` with `HMP_LOW_KERNELS=native`,",
        "and compares dtypes and bits of the results.",
        "",
        f"With torch {counts['release'] // 1000}.{counts['release'] % 1000}: {counts['cases']} calls by {counts['spellings']} names, "
        f"and {counts['refused']} more that torch.autocast refuses. hmp raises for none of these calls.",
        f"{counts['differing']} ops differ, besides {counts['empty']} calls without elements (below).",
        "",
        "| op of op_db that differs | in torch | reason |",
        "|---|---|---|",
        *rows,
        "",
        "Recurrent modules (LSTM, GRU, RNN and their cells; layers, directions, projections, packed sequences, states, training,",
        f"gradients: {len(RECURRENT)} configurations) have the same results, dtypes and gradients of inputs, bit for bit; gradients of "
        "weights as with `cache_enabled=False`.",
        "",
        "## What op_db does not show",
        "",
        "| what | under torch.autocast | under hmp | reason |",
        "|---|---|---|---|",
        *others,
        "",
        "The presets for CUDA pass torch's own test cases for autocast with the kernels of the CPU; on an H100 eight small models "
        "(convolutions, attention, recurrent layers) gave torch.autocast's bits in bfloat16 and float16, but for the two rows about CUDA "
        "above.",
        "",
        _SHOWN,
    ))  # fmt: skip


_NUMBERS = {
    "release": r"With torch (\d+\.\d+):",
    "cases": r"(\d+) calls by",
    "spellings": r"by (\d+) names",
    "refused": r"and (\d+) more",
    "differing": r"^(\d+) ops differ",
    "empty": r"besides (\d+) calls",
}


def counts_in(text: str) -> dict[str, int]:
    """The numbers that a page holds; of the release 2013 for 2.13."""
    found = {name: re.search(pattern, text, re.M) for name, pattern in _NUMBERS.items()}
    return {name: _number(match.group(1)) for name, match in found.items() if match is not None}


def _number(text: str) -> int:
    major, dot, minor = text.partition(".")
    return int(major) * 1000 + int(minor) if dot else int(text)


def counts_of(sweep: object) -> dict[str, int]:
    """The numbers of a sweep."""
    return {**sweep.counts(), "release": _number(RELEASE), "differing": len(sweep.differing)}  # type: ignore[attr-defined]


def write() -> None:
    """Runs the sweep and writes the page; fails where something differs that the table does not name."""
    from autocast_sweep import Sweep

    os.environ["HMP_LOW_KERNELS"] = "native"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sweep = Sweep().run(OPS)
    if sweep.raising or sweep.differing.keys() != named(EXCEPTIONS):
        sys.exit(f"the table names {sorted(named(EXCEPTIONS))}, the sweep found {sorted(sweep.differing)}; {sweep.raising[:5]}")
    PAGE.write_text(page(counts_of(sweep)), encoding="utf-8")


if __name__ == "__main__":
    write()
