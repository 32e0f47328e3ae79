"""`torch-cuda` gives over op_db the dtypes of torch.autocast("cuda"), which fake CUDA tensors tell without a GPU. What differs is named."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hmp
from ops import title
from oracle import BF16
from preset_sweep import RELEASE, cases, mixed, outcome, shard

SHARDS = 4
PYTHON = "R8: Python code of torch is one op; autocast decides for each op that it calls"
ZERO_DIM = "R3: a 0-dim tensor widens no other one; autocast counts it"
SUMS = "it sums, in float32, where there is something to sum, and else returns its input: autocast's dtype depends on the shapes"
TWIN = "a name covers its twin in torch.linalg; autocast has no rule for this one"
STATISTICS = "CUDA's kernels return statistics in other dtypes than the CPU's"
POWER = "C++ code with a power inside, which autocast computes in float32"
FAKE = "fake tensors take a mixture that torch refuses"

EXCEPTIONS = {  # the op, why it differs, and on which releases of torch; "" is all
    "addcdiv": (ZERO_DIM, ""),
    "addcmul": (ZERO_DIM, ""),
    "atan2": (ZERO_DIM, ""),
    "linalg.cross": (TWIN, ""),
    "masked.prod": (PYTHON, ""),
    "nn.functional.interpolate/area": (PYTHON, ""),
    "nn.functional.linear_cross_entropy/chunked": (PYTHON, ""),
    "nn.functional.linear_cross_entropy/chunked_none": (PYTHON, ""),
    "sum_to_size": (SUMS, ""),
    "native_group_norm": (STATISTICS, ""),
    "_softmax_backward_data": (STATISTICS, ""),
    "native_batch_norm": (STATISTICS, "2.15"),
    "_native_batch_norm_legit": (STATISTICS, "2.15"),
    "_batch_norm_with_update": (STATISTICS, "2.15"),
    "grid_sampler_2d": (FAKE, "2.15"),
    "ldexp": (POWER, "2.7"),
    "heaviside": (FAKE, ""),
    "normal": (FAKE, "2.7 2.13"),
}
NAMED = {op for op, (_, releases) in EXCEPTIONS.items() if RELEASE in (releases or RELEASE).split()}


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """torch.autocast("cuda", dtype=torch.bfloat16), which without a GPU would switch itself off."""
    torch.set_autocast_dtype("cuda", BF16)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)


def fake(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cuda")


def autocasts(call: Any, sample: Any, mixture: str) -> list[torch.dtype] | None:
    """The dtypes of the results on CUDA under autocast; None where they cannot be told without values, or torch refuses."""
    with FakeTensorMode():
        try:
            arguments = mixed(sample, mixture, BF16, fake)
        except RuntimeError:  # sparse tensors
            return None
        results = None if arguments is None else outcome(call, arguments, cuda_autocast())
    return None if results is None or isinstance(results, Exception) else [t.dtype for t in results if isinstance(t, torch.Tensor)]


def sweep(infos: list[Any], counts: Counter[str]) -> dict[str, list[str]]:
    """What differs, by op; `counts` says how many cases there were and how many could not be compared."""
    differing: dict[str, list[str]] = {}
    policy = hmp.Policy.load("torch-cuda").replace(dtype=BF16)
    for op, case, call, sample, mixture in cases(infos, most=3):
        want = autocasts(call, sample, mixture)
        arguments = mixed(sample, mixture, BF16) if want is not None else None
        if want is None or arguments is None:
            continue
        fallen_back = sum(hmp.fallbacks().values())
        results = outcome(call, arguments, hmp.casts(policy))
        if isinstance(results, Exception):
            counts["refused on the CPU"] += 1  # fake tensors take more than real ones
        elif sum(hmp.fallbacks().values()) > fallen_back:
            counts["without CPU kernel"] += 1
        else:
            counts["compared"] += 1
            got = [t.dtype for t in results if isinstance(t, torch.Tensor)]
            if got != want:
                differing.setdefault(op, []).append(f"{case}: {got}, autocast gives {want}")
    return differing


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors log a traceback for each call that is refused."""
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(SHARDS))
def test_op_db_has_cuda_autocasts_dtypes(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    infos, counts = shard(number, SHARDS), Counter[str]()
    differing = sweep(infos, counts)
    unnamed = [line for op, lines in differing.items() if op not in NAMED for line in lines[:3]]
    assert not unnamed, "\n".join(unnamed)
    assert differing.keys() == NAMED & set(map(title, infos)), "take an op that no longer differs out of the table"
    with capsys.disabled():
        print(f"\ntorch-cuda against autocast, shard {number}: {dict(counts)}, {len(differing)} of {len(NAMED)} named exceptions")
