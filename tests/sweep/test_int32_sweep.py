"""Every op of op_db with int32 in the place of each index: what torch refuses, the table of hmp.compat.habana.int32 has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hmp.compat import habana
from hmp.compat.habana import int32
from hmp.ops import sites_of
from sweep_cases import OP_DB, title

SAMPLES = 60
Path = tuple[Any, ...]


def indices(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where in a call's arguments there are tensors of int64."""
    if isinstance(value, torch.Tensor):
        if value.dtype is torch.int64:
            yield path
    elif isinstance(value, (list, tuple, dict)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from indices(each, (*path, key))


def fresh(value: Any, narrow: Path | None, path: Path = ()) -> Any:
    """The arguments, copied, with int32 at the path `narrow` and floating tensors that need gradients."""
    if isinstance(value, torch.Tensor):
        copy = value.detach().clone()
        return copy.int() if path == narrow else copy.requires_grad_() if copy.is_floating_point() else copy
    if isinstance(value, dict):
        return {key: fresh(each, narrow, (*path, key)) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(fresh(each, narrow, (*path, at)) for at, each in enumerate(value))
    return value


def run(call: Callable[..., Any], arguments: Any, narrow: Path | None = None) -> list[torch.Tensor]:
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


def calls() -> Iterator[tuple[str, Callable[..., Any], Any, Path]]:
    """Every form of every op with sample arguments, and where an index stands in them. Values are floating, where the op takes these: an
    int64 tensor among them is an index, a class or a count."""
    for info in OP_DB:
        dtype = torch.float32 if torch.float32 in info.dtypes else torch.int64
        for sample in list(info.sample_inputs("cpu", dtype))[:SAMPLES] if dtype in info.dtypes else ():
            arguments = (sample.input, sample.args, sample.kwargs)
            for path in indices(arguments):
                for form in filter(None, (info.op, info.method_variant, info.inplace_variant)):
                    yield title(info), form, arguments, path


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_torch_takes_int32_or_the_table_has_it() -> None:
    refused, tried = [], 0
    for name, form, arguments, path in calls():
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
    with habana.install("cpu"):
        # op_db took its names before
        standing = {
            site.original: getattr(site.owner, site.attribute) for wide in int32.in_force() for op in wide.ops for site in sites_of(op)
        }
        for name, form, arguments, path, wanted in refused:
            try:
                found = run(standing.get(form, form), arguments, path)
            except (RuntimeError, IndexError) as error:
                wrong[name, path] = str(error).partition("\n")[0]
                continue
            if len(found) != len(wanted) or not all(map(torch.equal, found, wanted)):
                wrong[name, path] = "another result"
    assert not wrong
