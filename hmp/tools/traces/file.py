"""A capture, and its file: safetensors, whose metadata hold the calls as JSON, and whose tensors are read when they are asked for."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...errors import HmpError
from ..compare.distance import as_real, widened
from ..extras import needed
from ..formatting import of_json

Tensor = torch.Tensor
FORM = 4  # of the file: another one is refused
_KEY = "hmp_capture"
INPUTS = "(inputs)"  # what the outermost module was called with is stored as a module of this name
TOKENS, MASK = "input_ids", "attention_mask"  # of these: which tokens, and which places count


def rank() -> str:
    """Return the number of this process, where several run the program."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return str(torch.distributed.get_rank())
    return os.environ.get("RANK", "0")


def of_rank(path: Path, number: str = "") -> Path:
    """Return the file of the process of that number, of this one without: `a.rank1.capture` of rank 1."""
    number = number or rank()
    return path if number == "0" else path.with_name(f"{path.stem}.rank{number}{path.suffix}")


def check(path: Path) -> None:
    """Raise HmpError where the file could not be written, ImportError where the extra is missing: better now than when the work is done."""
    if path.is_dir():
        raise HmpError(f"{path}: expected a file to write, got a folder; give a file's name")
    try:
        tempfile.TemporaryFile(dir=path.absolute().parent).close()
    except OSError as error:
        raise HmpError(f"{path}: can't write into the folder {path.parent}: {error}; give a file in another folder") from None
    _safetensors("numpy")


def write(path: Path, about: Mapping[str, str], notes: Sequence[str], calls: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the file, whole or not at all: under its name there is never a part of it."""
    library = _safetensors("numpy")
    metadata = {_KEY: str(FORM), "about": json.dumps(dict(about)), "notes": json.dumps(list(notes)), "calls": json.dumps(list(calls))}
    being_written = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        library.torch.save_file(dict(tensors), being_written, metadata=metadata)
        being_written.replace(path)
    except (library.SafetensorError, OSError) as error:
        raise HmpError(f"{path} was not written: {error}; give a file where there is space, or capture less: calls=1") from error
    finally:
        being_written.unlink(missing_ok=True)


def opened(path: Path) -> Any:
    """Return the library's handle of the file, which has read the header alone.

    Raise HmpError if it isn't a capture, is cut off, or has another form.
    """
    if not path.is_file():
        what = "expected a capture, got a folder" if path.is_dir() else "no such file"
        raise HmpError(f"{path}: {what}; give a file that hmp.capture() or hmp run --capture wrote")
    library = _safetensors()
    try:
        handle = library.safe_open(path, "pt")
    except (library.SafetensorError, OSError) as error:
        raise HmpError(f"{path}: expected a capture, got another or a truncated file: {error}; copy it again, or capture again") from None
    metadata = handle.metadata() or {}
    form = metadata.get(_KEY)
    if form != str(FORM):
        got = "another safetensors file" if form is None else f"format {form}, of another hmp"
        raise HmpError(f"{path}: expected a capture of format {FORM}, got {got}; capture again with this hmp")
    return handle


def _safetensors(*also: str) -> Any:
    """Return the library, imported when a file is read or written. It writes by numpy, which it does not bring: `also` names that."""
    with needed("a capture needs", "capture", "safetensors", *also):
        import safetensors
        import safetensors.torch
    return safetensors


def values_of(tensor: Tensor) -> Tensor:
    """Return the real numbers of a tensor, in a dtype that torch computes in; of a complex one two for each element, side by side."""
    values = as_real(widened(tensor.detach().resolve_neg()))
    return values.flatten(-2) if tensor.is_complex() and tensor.dim() else values


def bits(values: Tensor) -> str:
    """Return a hash of the bytes, in the order of the elements."""
    plain = values.detach().to("cpu").reshape(-1).contiguous()
    return hashlib.blake2b(plain.view(torch.uint8).numpy().data, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Output:
    """A tensor that a module returned.

    `path` in what it returned ("" where it is all of it), shape, dtype, and a hash of its bytes.

    `is_whole` says if the file holds its values; those of large outputs are not kept. Where torch does not give the values (a meta tensor,
    a shard), `bits` is "".
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    bits: str = ""
    is_whole: bool = False


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module, noted when it returned.

    `module` is its path in the model ("" for the model itself, `(inputs)` for what that was given), `kind` its class; `root` the prefix of
    the model ("" for the first), `step` which call of the model it belongs to, `number` which call of the module it is, both from 0;
    `is_leaf` whether it holds no other modules. `inputs` and `weights` are the dtypes of the floating tensors that it was given and of its
    own parameters, `policy` is what was active ("" for none).
    """

    module: str
    kind: str
    root: str
    step: int
    number: int
    is_leaf: bool
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    policy: str
    outputs: tuple[Output, ...]


class Capture:
    """What `hmp.capture()` wrote into a file. `calls` are in the order in which modules returned; `values()` reads one tensor of the file.

    `about` says model, device, date and versions, `notes` what was not seen. Nothing but the file's header is read before it is asked for.

    Example:
        >>> net, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
        >>> with hmp.capture("trainer.capture", net):
        ...     y = net(x)
        >>> found = hmp.types.Capture.load("trainer.capture")
        >>> torch.equal(found.values(0, 0), y), len(found.calls)
        (True, 2)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.is_written = True  # not in the context of capture(): what is there is an earlier one, or none

    @classmethod
    def load(cls, path: str | Path) -> Capture:
        """Return the capture in a file.

        Args:
            path: The file.

        Returns:
            The capture.

        Raises:
            HmpError: It isn't a capture, is cut off, or was written in a form that this hmp does not read.
        """
        found = cls(path)
        found._file  # noqa: B018  # it is opened here and now
        return found

    @cached_property
    def _file(self) -> Any:
        if not self.is_written:
            raise HmpError(f"{self.path} is written when the `with hmp.capture(...)` block ends; read it after the block")
        return opened(self.path)

    def _read(self, name: str) -> Any:
        return json.loads(self._file.metadata()[name])

    @cached_property
    def name(self) -> str:
        """Return the file's name without its ending."""
        return self.path.stem

    @property
    def about(self) -> dict[str, str]:
        """Return the model's class, device, date, and the versions of hmp and torch."""
        found: dict[str, str] = self._read("about")
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what was not seen, or not kept."""
        return tuple(self._read("notes"))

    @cached_property
    def calls(self) -> tuple[ModuleCall, ...]:
        """Return every call that was noted."""
        calls = self._read("calls")
        return tuple(replace(of_json(ModuleCall, each), outputs=tuple(of_json(Output, one) for one in each["outputs"])) for each in calls)

    def values(self, call: int, output: int) -> Tensor:
        """Return the values of an output whose `is_whole` is true.

        Args:
            call: The position of its call in `calls`.
            output: The position of the output in the call's `outputs`.

        Returns:
            The tensor.
        """
        found: Tensor = self._file.get_tensor(f"{call}.{output}")
        return found
