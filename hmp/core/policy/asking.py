"""What torch.autocast casts on a device, as the installed torch answers: each of its kernels for autocast is called, and what it hands on
to the op is looked at. No device is needed: the tensors have no memory."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from ...errors import HmpError
from ..formatting import dtype_name
from ..torch_dispatcher import dispatch_key, operators, temporary_kernels, without_memory
from ..torch_private import TORCH
from . import policy_folder, presets, spelling
from .entries import AUTOCAST, CASTS, ListName, parse_list

_F32, _LOW = torch.float32, torch.bfloat16
# The dtypes of a call's tensors, the last one for all that follow.
_CALLS = ((_F32,), (_LOW,), (_LOW, _F32))
# The dtypes that the op is given in each of these calls → its list.
_LISTS: dict[tuple[frozenset[torch.dtype] | None, ...], ListName | None] = {
    (frozenset({_LOW}),) * 3: "bf16",
    (frozenset({_F32}),) * 3: "fp32",
    (frozenset({_F32}), frozenset({_LOW}), frozenset({_F32})): "promote",
    tuple(map(frozenset, _CALLS)): None,
}
# ATen's name where no rule gives the public one.
_PUBLIC = {"cross_entropy_loss": "cross_entropy", "multilabel_margin_loss_forward": "multilabel_margin_loss"}
# Called through torch.lstm, torch.gru and the like, with weights in a layout of its own.
_NOT_ASKED = "_cudnn_rnn"
_VALUES: dict[str, Any] = {"int": 1, "SymInt": 1, "number": 1, "float": 0.5, "bool": False, "str": "valid"}
_RUNS_IN = {"bf16": "the low dtype", "fp32": "float32", "promote": "the widest dtype of their inputs"}


def write(preset: str, folder: str | Path) -> Path:
    """The folder, with the lists of the installed torch: of `torch-cuda` what its torch.autocast("cuda") casts.

    Below these stand the ops inside which autocast reaches others, as in the newest lists that hmp keeps of that device.
    """
    prefix, _, device = preset.partition("-")
    if prefix != "torch" or not device.isalnum():
        raise HmpError(f"{preset!r} is no preset that torch can be asked for; write 'torch-' and a device type, such as 'torch-cuda'")
    casts, kept, target = asked(device), presets.newest(preset), Path(folder)
    others = {cast: [] if kept is None else _still_so(kept / f"{cast}.txt", cast, casts) for cast in CASTS}
    entries = {cast: [entry for text in others[cast] for entry in parse_list(text, cast)] for cast in CASTS}
    decided_inside = {entry.name.removesuffix(AUTOCAST) for entry in entries["bf16"] if entry.is_autocasts}
    target.mkdir(parents=True, exist_ok=True)
    for cast in CASTS:
        held = decided_inside.union(entry.name for entry in entries[cast])
        names = sorted((name for name, its in casts.items() if its == cast and name not in held), key=lambda name: (name[0] == "_", name))
        head = f'# The ops that torch.autocast("{device}") of torch {TORCH[0]}.{TORCH[1]} runs in {_RUNS_IN[cast]}.'
        text = "\n\n".join(["\n".join([head, *names]), *others[cast]])
        (target / f"{cast}.txt").write_text(f"{text}\n", encoding="utf-8")
    policy_folder.write_words(target, {"dtype": dtype_name(torch.get_autocast_dtype(device))})
    return target


def _still_so(file: Path, cast: ListName, casts: Mapping[str, ListName]) -> list[str]:
    """The paragraphs below the first of a list file, without the names that this torch lacks, or casts otherwise itself."""
    found = []
    for text in file.read_text(encoding="utf-8").rstrip().split("\n\n")[1:]:
        lines = []
        for line in text.splitlines():
            entries = parse_list(line, cast, file)
            if all(spelling.resolve(entry) and (entry.is_autocasts or casts.get(entry.name, cast) == cast) for entry in entries):
                lines.append(line)
        if any(not line.startswith("#") for line in lines):
            found.append("\n".join(lines))
    return found


def asked(device: str) -> dict[str, ListName]:
    """The public names of the ops that torch.autocast casts on a device, each with its list. HmpError where that cannot be told."""
    try:
        overloads = operators(dispatch_key("Autocast", device))
    except RuntimeError as error:  # torch says which types of devices there are
        raise HmpError(f"torch {torch.__version__} knows no device {device!r}: {str(error).splitlines()[0]}") from error
    if not overloads:
        raise HmpError(f"torch {torch.__version__} has no autocast for {device!r}; import the package that brings the device first")
    _fake(device, _F32)  # the first one computes on the CPU, which is not to be looked at
    every, autograd = operators(), dispatch_key("Autograd", device)
    found: dict[str, ListName | None] = {}
    for base in sorted(overloads.keys() - {_NOT_ASKED}):
        with temporary_kernels() as library, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they stand in another's place, as they are meant to
            for name in every[base]:
                library.impl(name, _hand_on, autograd)
            answers = {tuple(_given(name, dtypes, device) for dtypes in _CALLS) for name in overloads[base]}
        answers = {answer for answer in answers if None not in answer}
        told = {_LISTS[answer] for answer in answers & _LISTS.keys()}
        if len(told) != 1 or answers - _LISTS.keys():
            raise HmpError(f"what torch.autocast({device!r}) of torch {torch.__version__} does with {base} cannot be told")
        found[_public(base)] = told.pop()
    return {name: cast for name, cast in found.items() if cast is not None}


def _public(name: str) -> str:
    return re.sub(r"^(linalg|fft)_", r"\1.", _PUBLIC.get(name, name))


class _HandedOnError(Exception):
    """Ends a call where autocast hands it on to the op; its args are the call's."""


def _hand_on(*args: Any, **kwargs: Any) -> NoReturn:
    raise _HandedOnError(*args, *kwargs.values())


def _given(name: str, dtypes: tuple[torch.dtype, ...], device: str) -> frozenset[torch.dtype] | None:
    """The dtypes that an overload is given under autocast, or is told to compute in, as `sum(dtype=float32)` is; float32 where autocast
    refuses the call and asks for that. None where it cannot be called."""
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")
    tensors = itertools.chain(dtypes, itertools.repeat(dtypes[-1]))
    args, kwargs = [], {}
    for each in op._schema.arguments:
        if not each.has_default_value() or "Tensor" in str(each.type):
            value = _value(str(each.type), tensors, device)
        elif each.kwarg_only:
            continue
        else:
            value = each.default_value
        if each.kwarg_only:
            kwargs[each.name] = value
        else:
            args.append(value)
    try:
        with _autocast(device):
            op(*args, **kwargs)
    except _HandedOnError as call:
        given = list(_flat(call.args))
        told = frozenset(value for value in given if isinstance(value, torch.dtype))
        return told or frozenset(value.dtype for value in given if isinstance(value, torch.Tensor) and value.is_floating_point())
    except RuntimeError as error:
        return frozenset({_F32}) if "unsafe to autocast" in str(error) else None
    return None


@contextmanager
def _autocast(device: str) -> Iterator[None]:
    """torch.autocast, which for a device that is not here does nothing."""
    was = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, _LOW)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, was[0])
        torch.set_autocast_dtype(device, was[1])
        torch.clear_autocast_cache()


def _value(kind: str, dtypes: Iterator[torch.dtype], device: str) -> Any:
    """Something that a schema's type takes; an op that would not have it is not reached."""
    if kind in ("Tensor", "Optional[Tensor]"):
        return _fake(device, next(dtypes))
    if kind == "List[Tensor]":
        return [_fake(device, next(dtypes)), _fake(device, next(dtypes))]
    if kind == "List[Optional[Tensor]]":  # indices
        return [_fake(device, torch.int64)]
    return None if kind.startswith("Optional") else [1, 1] if kind.startswith("List") else _VALUES.get(kind)


def _fake(device: str, dtype: torch.dtype) -> torch.Tensor:
    with without_memory():
        return torch.empty(2, 2, dtype=dtype, device=device)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
