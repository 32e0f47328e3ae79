"""The lists of torch.autocast on the device are what torch answers when it is asked, and give over op_db the dtypes of torch.autocast.

XLA is lazy: dtypes are known, and nothing is computed.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import hmp
from device_kit import BF16, DEVICE, preset
from ops import title
from preset_sweep import MIXTURES, mixed, outcome, samples, shard, spellings

ROOT = Path(__file__).resolve().parents[2]

# Ops of op_db that have another dtype.
DIFFERING = {
    "the first input decides a mixture (R7); autocast promotes": "addmv",
    "a tensor without elements widens no other one (R3); autocast counts it": "cat",
    "torch.ops is left to torch": "torch.ops.aten._safe_softmax.default",
    "hmp has it in float32 on every device (R11); XLA has a kernel in bfloat16, or autocast leaves it to one of the CPU's": """lu_solve
        matrix_exp nn.functional.pdist linalg.det linalg.cholesky linalg.cholesky_ex linalg.cond linalg.eigh linalg.eigvalsh
        linalg.ldl_factor linalg.ldl_factor_ex linalg.slogdet linalg.solve linalg.solve_ex linalg.svdvals""",
}


def test_the_lists_are_what_torch_answers() -> None:
    if preset() != f"torch-{DEVICE}" or preset() not in hmp.policies():
        pytest.skip(f"hmp keeps no lists of torch.autocast({DEVICE!r})")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
        sys.argv[1:] = [preset(), folder]
        runpy.run_path(str(ROOT / ".ci" / "autocast-lists"))
        kept = hmp.Policy.load(preset())
        assert hmp.Policy.load(folder).replace(name=kept.name) == kept
    assert kept == hmp.Policy.load("autocast")
    print(said.getvalue())


def _dtypes(results: Any) -> Any:
    return type(results) if isinstance(results, Exception) else [t.dtype for t in results if isinstance(t, torch.Tensor)]


def _there(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().clone().to(dtype).to(DEVICE)


def test_op_db_has_autocasts_dtypes() -> None:
    if DEVICE != "xla":
        pytest.skip("the tests of the presets for the CPU and for CUDA ask that")
    policy = hmp.Policy.load(preset())
    calls = [(info, next(spellings(info))[1]) for info in shard(0, 1)]  # while nothing is patched
    compared, found = 0, {}
    for info, call in calls:
        for sample in samples(info, first=6, most=3):
            for mixture in MIXTURES:
                try:
                    arguments, again = (mixed(sample, mixture, BF16, _there) for _ in range(2))
                except NotImplementedError:  # sparse tensors
                    continue
                want = outcome(call, arguments, torch.autocast(DEVICE, dtype=BF16)) if arguments is not None else None
                if want is None or again is None or isinstance(want, Exception):
                    continue
                compared += 1
                got = _dtypes(outcome(call, again, hmp.casts(policy)))
                if got != _dtypes(want):
                    found.setdefault(title(info), f"{title(info)}, {mixture}: {got}, autocast gives {_dtypes(want)}")
    named = {op for ops in DIFFERING.values() for op in ops.split()}
    assert found.keys() == named, "\n".join(line for op, line in found.items() if op not in named) or f"no longer: {named - found.keys()}"
    assert compared > 4000
    print(f"{compared} calls, {len(named)} ops differ")
