"""Every op of torch's op_db, in every form, under four policies and mixtures of dtypes, against explicit casts in plain torch; and with
int32 in the place of each index: what torch refuses, the table of hmp.compat.habana.int32 has.

P1 (tests/properties) draws such calls by default; a named subset that holds every kind of op is slow, the whole sweep is nightly.
"""

from __future__ import annotations

import functools
import itertools
import pkgutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hmp
import sweep_exceptions
from attempt import accepted
from hmp.compat import habana
from hmp.compat.habana import int32
from one_call import Case, attempted, case_of, cases_into, wrong
from ops import calls, list_name, mixtures, op_db, samples, title
from oracle import BF16, F32, LISTS, Lists

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


# Two names of one function object of torch's: no list can tell them apart.
_ONE_FUNCTION = {"pos": "positive", "dsmm": "mm", "spmm": "mm", "hsmm": "hspmm", "saddmm": "sspaddmm", "log_sigmoid": "logsigmoid"}


def random_policies(seed: int = 3) -> tuple[hmp.Policy, hmp.Policy]:
    """Two policies with every op on the BF16 or the FP32 list: a random half, and its complement."""
    called = {list_name(each) for info in op_db() for each in (info.name, *(alias.name for alias in info.aliases))}
    presets = map(hmp.Policy.load, hmp.policies())
    listed = {name for preset in presets for name in preset.bf16 | preset.fp32 | preset.promote}
    names = []
    for op in sorted((called | listed | {f"{name}_" for name in called}) - {"*"} - sweep_exceptions.OUT_OF_REACH):
        try:
            alone = hmp.Policy(bf16=frozenset({op})).casts_by_op("bf16")
        except hmp.OpListError:
            continue
        if set(alone) == {op}:
            names.append(op)
    # by name and not by place: an op that torch gains moves no other one
    low = frozenset(op for op in names if zlib.crc32(_ONE_FUNCTION.get(op, op).encode(), seed) % 2)
    wide = frozenset(names) - low
    return hmp.Policy("random A", bf16=low, fp32=wide), hmp.Policy("random B", bf16=wide, fp32=low)


@functools.cache
def policies() -> dict[str, tuple[hmp.Policy, Lists]]:
    """The policies of the sweep, each with its lists as the oracle reads them."""
    release = ".".join(torch.__version__.split(".")[:2])
    found = {}
    for name, folder in (("habana", "habana"), ("torch-cpu", f"torch-cpu@{release}")):
        policy = hmp.Policy.load(name)
        # lists of every release are not kept: then the preset is the nearest one's, and says itself what it holds
        kept = (LISTS / folder).is_dir()
        found[name] = (policy, Lists.read(folder) if kept else Lists(policy.bf16, policy.fp32, policy.promote))
    for policy in random_policies():
        found[policy.name] = (policy, Lists(policy.bf16, policy.fp32, policy.promote))
    return found


def cases(info: Any, lists: Lists, count: int) -> Iterator[Case]:
    """The op in every form with up to `count` samples in each mixture of dtypes."""
    found = samples(info)
    for call in calls(info):
        kind = lists.of(call.name)
        for number, sample in enumerate(itertools.islice((s for s in found if accepted(call, s)), count)):
            for dtypes in mixtures(sample, float64=number == 0 and not call.out):
                if call.out:
                    outs = [("full", BF16)]
                    if set(dtypes) != {BF16}:
                        outs.append(("empty" if dtypes[:1] == (BF16,) else "full", F32))
                    yield from cases_into(call, sample, dtypes, kind, outs)
                elif (case := case_of(call, sample, dtypes, kind)).expected.allowed:
                    yield case


def complaints(infos: list[Any], name: str, count: int) -> list[str]:
    """What is wrong, as lines; nothing where hmp does what the rules ask."""
    policy, lists = policies()[name]
    infos = [info for info in infos if not _torch_autocast_decides(info, name)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = [case for info in infos for case in cases(info, lists, count)]
        with hmp.convert(policy=policy):
            attempted(prepared)
        hmp.revert()
        lines = [line for case in prepared for line in wrong(case)]
    called = {case.call.op for case in prepared}
    not_here = sweep_exceptions.NOT_ON_CPU
    lines += [f"{op}: not one call was made" for op in map(title, infos) if op not in called and op not in not_here]
    return lines + [f"{op}: runs here, take it off NOT_ON_CPU" for op in map(title, infos) if op in called and op in not_here]


def _report(lines: list[str]) -> str:
    return f"{len(lines)} complaints:\n  " + "\n  ".join(lines[:60])


@pytest.mark.parametrize(
    ("policy", "third"),
    [
        pytest.param("habana", 0, marks=pytest.mark.slow),
        pytest.param("random A", 2, marks=pytest.mark.slow),
        *(pytest.param(policy, third, marks=pytest.mark.nightly) for policy in ("torch-cpu", "random B") for third in range(3)),
    ],
)
def test_op_db_subset_follows_the_rules(policy: str, third: int) -> None:
    """Of the subset every third op at a time: the lines of the table hold ops of one kind side by side."""
    chosen = [info for info in op_db() if title(info) in SUBSET[third::3]]
    lines = complaints(chosen, policy, 1)
    assert not lines, _report(lines)


@pytest.mark.nightly
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("policy", POLICIES)
def test_op_db_follows_the_rules(policy: str, shard: int) -> None:
    lines = complaints(list(op_db()[shard::SHARDS]), policy, 6)
    assert not lines, _report(lines)


TABLES_TORCH = pytest.mark.skipif(
    not torch.__version__.startswith(sweep_exceptions.TORCH + "."), reason="the table was made with another torch"
)


@pytest.mark.slow  # to import op_db takes seconds
@TABLES_TORCH
def test_the_subsets_and_the_tables_names_are_in_op_db() -> None:
    assert sorted(set(SUBSET) - {title(info) for info in op_db()}) == []
    tables = sweep_exceptions
    named = {*(op for op, _ in tables.EXCEPTIONS), *tables.STRUCTURE}
    assert sorted(named - {title(info) for info in op_db()}) == []
    assert sorted((tables.OUT_OF_REACH | tables.UNINITIALISED | tables.ROUGH.keys()) - {info.name for info in op_db()}) == []


SAMPLES = 60
Place = tuple[Any, ...]


def indices(value: Any, path: Place = ()) -> Iterator[Place]:
    """Where in a call's arguments there are tensors of int64."""
    if isinstance(value, torch.Tensor):
        if value.dtype is torch.int64:
            yield path
    elif isinstance(value, (list, tuple, dict)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from indices(each, (*path, key))


def fresh(value: Any, narrow: Place | None, path: Place = ()) -> Any:
    """The arguments, copied, with int32 at the path `narrow` and floating tensors that need gradients."""
    if isinstance(value, torch.Tensor):
        copy = value.detach().clone()
        return copy.int() if path == narrow else copy.requires_grad_() if copy.is_floating_point() else copy
    if isinstance(value, dict):
        return {key: fresh(each, narrow, (*path, key)) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(fresh(each, narrow, (*path, at)) for at, each in enumerate(value))
    return value


def run(call: Callable[..., Any], arguments: Any, narrow: Place | None = None) -> list[torch.Tensor]:
    """What a call returns, and the gradients that come of it."""
    torch.manual_seed(0)
    first, args, kwargs = fresh(arguments, narrow)
    inplace = getattr(call, "__name__", "").endswith("_")
    with torch.set_grad_enabled(not inplace):
        result = call(first, *args, **kwargs)
    found = [each for each in (result if isinstance(result, (list, tuple)) else (result,)) if isinstance(each, torch.Tensor)]
    ends = [each.sum() for each in found if each.requires_grad and each.is_floating_point()]
    leaves = [each for each in (first, *args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.requires_grad]
    gradients = torch.autograd.grad(ends, leaves, allow_unused=True) if ends and leaves and not inplace else ()
    return [*found, *(each for each in gradients if each is not None)]


def calls_with_an_index() -> Iterator[tuple[str, Callable[..., Any], Any, Place]]:
    """Every form of every op with sample arguments, and where an index stands in them. Values are floating, where the op takes these: an
    int64 tensor among them is an index, a class or a count."""
    for info in op_db():
        dtype = torch.float32 if torch.float32 in info.dtypes else torch.int64
        for sample in list(info.sample_inputs("cpu", dtype))[:SAMPLES] if dtype in info.dtypes else ():
            arguments = (sample.input, sample.args, sample.kwargs)
            for path in indices(arguments):
                for form in filter(None, (info.op, info.method_variant, info.inplace_variant)):
                    yield title(info), form, arguments, path


def sites(op: str) -> tuple[str, ...]:
    """Where the op is called in torch, as explain() has it; nothing for an op that this torch lacks."""
    try:
        return hmp.explain(op).sites
    except hmp.OpListError:
        return ()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_torch_takes_int32_or_the_table_has_it() -> None:
    refused, tried = [], 0
    for name, form, arguments, path in calls_with_an_index():
        try:
            wanted = run(form, arguments)
        except (RuntimeError, IndexError, TypeError):
            continue  # an in-place form that cannot hold its result, a method that takes other arguments
        tried += 1
        try:
            run(form, arguments, path)
        except (RuntimeError, IndexError):
            refused.append((name, form, arguments, path, wanted))
    print(f"torch {torch.__version__}: {tried} calls; refused without a map: {sorted({name for name, *_ in refused})}")
    assert tried > 1000
    assert refused
    wrong = {}
    places = [line.partition(": ")[0] for wide in int32.active_rows() for op in wide.ops for line in sites(op)]
    originals = {place: pkgutil.resolve_name(place) for place in places}
    with habana.install("cpu"):
        # op_db took its names before
        standing = {original: pkgutil.resolve_name(place) for place, original in originals.items()}
        for name, form, arguments, path, wanted in refused:
            try:
                found = run(standing.get(form, form), arguments, path)
            except (RuntimeError, IndexError) as error:
                wrong[name, path] = str(error).partition("\n")[0]
                continue
            if len(found) != len(wanted) or not all(map(torch.equal, found, wanted)):
                wrong[name, path] = "another result"
    assert not wrong
