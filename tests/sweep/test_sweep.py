"""Every op of torch's op_db, in every form, under four policies and mixtures of dtypes, against explicit casts in plain torch.

The whole sweep is slow; a named subset that holds every kind of op runs by default.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sweep_exceptions
from sweep_cases import OP_DB, title
from sweep_run import Finding, Sweep, policies, sweep

POLICIES = ("habana", "torch-cpu", "random A", "random B")
SHARDS = 8

# Ops of every kind.
SUBSET = """
    add sub mul div/no_rounding_mode true_divide pow float_power maximum clamp where addcmul lerp heaviside atan2 xlogy exp log sigmoid
    special.i1 sum mean amax std_mean var logsumexp norm/nuc cumsum topk sort median mm bmm addmm baddbmm matmul __rmatmul__ einsum
    trace tensordot inner addr mv dot nn.functional.linear nn.functional.bilinear nn.functional.conv2d nn.functional.conv_transpose1d
    nn.functional.batch_norm nn.functional.layer_norm nn.functional.group_norm nn.functional.relu nn.functional.leaky_relu
    nn.functional.prelu nn.functional.threshold nn.functional.dropout softmax log_softmax/with_dtype nn.functional.cross_entropy
    nn.functional.nll_loss nn.functional.mse_loss nn.functional.huber_loss nn.functional.gaussian_nll_loss nn.functional.kl_div
    nn.functional.embedding nn.functional.embedding_bag nn.functional.scaled_dot_product_attention
    nn.functional.multi_head_attention_forward nn.functional.grid_sample nn.functional.max_pool2d nn.functional.avg_pool3d
    nn.functional.interpolate/bilinear nn.functional.normalize linalg.solve linalg.svd linalg.inv linalg.matrix_norm linalg.cholesky fft.fft
    fft.irfft stft index_put index_add scatter masked_fill masked_scatter index_fill take_along_dim __getitem__ t transpose expand
    view_as reshape unbind_copy to zeros_like empty_like cat stack column_stack __rsub__ __rdiv__ __rpow__ masked.softmax
    signal.windows.hann uniform bernoulli cdist histogram quantile
""".split()


def _torch_autocast_decides(info: Any, policy: str) -> bool:
    """Whether no rule says what comes of the op: the policy's list has it with `.autocast`. test_presets_torch_cpu compares those."""
    name = title(info).partition("/")[0].removeprefix("nn.functional.")
    lines = (Path(__file__).parents[2] / "op_lists/torch-cpu@2.13/bf16.txt").read_text().split()
    # linalg.matrix_power follows the line of matrix_power
    return policy == "torch-cpu" and not {f"{name}.autocast", f"{name.removeprefix('linalg.')}.autocast"}.isdisjoint(lines)


def complaints(infos: list[Any], policy: str, count: int, *, whole: bool) -> list[str]:
    """What is wrong, as lines; nothing where hmp does what the rules ask and the table of exceptions says no more than is so."""
    infos = [info for info in infos if not _torch_autocast_decides(info, policy)]
    done: Sweep = sweep(infos, policy, *policies()[policy], count=count)
    titles = [title(info) for info in infos]
    lines = [str(finding) for finding in sweep_exceptions.unexplained(done.findings)]
    lines += [f"{op}: not one call was made" for op in titles if not done.calls[op] and op not in sweep_exceptions.NOT_ON_CPU]
    lines += [f"{op}: runs here, take it off NOT_ON_CPU" for op in titles if done.calls[op] and op in sweep_exceptions.NOT_ON_CPU]
    if whole:
        lines += sweep_exceptions.stale(policy, titles, done.findings)
    return lines


def _report(lines: list[str]) -> str:
    return f"{len(lines)} complaints:\n  " + "\n  ".join(lines[:60])


@pytest.mark.parametrize(
    ("policy", "third"),
    [
        ("habana", 0),
        pytest.param("habana", 1, marks=pytest.mark.slow),
        pytest.param("random A", 2, marks=pytest.mark.slow),
        *(pytest.param(policy, third, marks=pytest.mark.nightly) for policy in ("torch-cpu", "random B") for third in range(3)),
    ],
)
def test_op_db_subset_follows_the_rules(policy: str, third: int) -> None:
    """Of the subset every third op at a time: the lines of the table hold ops of one kind side by side."""
    chosen = [info for info in OP_DB if title(info) in SUBSET[third::3]]
    lines = complaints(chosen, policy, 1, whole=False)
    assert not lines, _report(lines)


@pytest.mark.nightly
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("policy", POLICIES)
def test_op_db_follows_the_rules(policy: str, shard: int) -> None:
    lines = complaints(list(OP_DB[shard::SHARDS]), policy, 6, whole=True)
    assert not lines, _report(lines)


TABLES_TORCH = pytest.mark.skipif(
    not torch.__version__.startswith(sweep_exceptions.TORCH + "."), reason="the table was made with another torch"
)


def test_the_subsets_names_are_in_op_db() -> None:
    assert sorted(set(SUBSET) - {title(info) for info in OP_DB}) == []


@TABLES_TORCH
def test_the_tables_names_are_in_op_db() -> None:
    tables = sweep_exceptions
    named = {*(entry.op for entry in tables.EXCEPTIONS), *tables.STRUCTURE}
    assert sorted(named - {title(info) for info in OP_DB}) == []
    assert sorted((tables.OUT_OF_REACH | tables.UNINITIALISED | tables.ROUGH.keys()) - {info.name for info in OP_DB}) == []


def test_an_exception_covers_what_it_names_and_nothing_else() -> None:
    entry = sweep_exceptions.EXCEPTIONS[0]
    finding = Finding(entry.op, "method", "habana", "first bf16", "dtype", "got torch.bfloat16")
    assert sweep_exceptions.unexplained([finding]) == []
    for change in ({"op": "sub"}, {"variant": "in-place"}, {"policy": "torch-cpu"}, {"mixture": "fp32"}, {"what": "values"}):
        other = replace(finding, **change)
        assert sweep_exceptions.unexplained([finding, other]) == [other]


@TABLES_TORCH
def test_an_exception_with_nothing_to_except_is_a_complaint() -> None:
    entry = sweep_exceptions.EXCEPTIONS[0]
    assert f"{entry.op}, {entry.what}: nothing found for dtype, function, keywords, method, first bf16" in sweep_exceptions.stale(
        "habana", [entry.op], []
    )
    assert sweep_exceptions.stale("random A", [entry.op], []) == []


def test_exceptions_are_counted_and_named() -> None:
    lines = sweep_exceptions.summary()
    assert lines[0].startswith(f"op_db sweep: {len(sweep_exceptions.EXCEPTIONS)} exceptions; ")
    assert len(lines) == 1 + len(sweep_exceptions.EXCEPTIONS)
