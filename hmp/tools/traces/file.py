"""The file of a capture: safetensors, whose metadata hold the calls as JSON, and whose tensors are read one by one."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import HmpError
from ..compare.distance import as_real, widened
from ..extras import needed

FORM = 3  # of the file: another one is refused
_KEY = "hmp_capture"


@dataclass
class Opened:
    """A capture's file: its header, `calls` as they were written, and the library's handle, which reads the values."""

    about: dict[str, str]
    notes: list[str]
    calls: list[dict[str, Any]]
    handle: Any

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor of the file, which alone is read."""
        found: torch.Tensor = self.handle.get_tensor(name)
        return found


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


def opened(path: Path) -> Opened:
    """Open the file and read its header alone. Raise HmpError if it isn't a capture, is cut off, or has another form."""
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
    about, notes, calls = (json.loads(metadata[name]) for name in ("about", "notes", "calls"))
    return Opened(about, notes, calls, handle)


def _safetensors(*also: str) -> Any:
    """Return the library, imported when a file is read or written. It writes by numpy, which it does not bring: `also` names that."""
    with needed("a capture needs", "capture", "safetensors", *also):
        import safetensors
        import safetensors.torch
    return safetensors


Tensor = torch.Tensor
_BLOCK = 2**18  # elements at a time: a copy in float64 of a large tensor would be large itself


def values_of(tensor: Tensor) -> Tensor:
    """Return the real numbers of a tensor, in a dtype that torch computes in; of a complex one two for each element, side by side."""
    values = as_real(widened(tensor.detach().resolve_neg()))
    return values.flatten(-2) if tensor.is_complex() and tensor.dim() else values


def bits(values: Tensor) -> str:
    """Return a hash of the bytes, in the order of the elements."""
    plain = values.detach().to("cpu").reshape(-1).contiguous()
    return hashlib.blake2b(plain.view(torch.uint8).numpy().data, digest_size=16).hexdigest()


def norm(values: Tensor) -> float:
    """Return the Euclidean norm of the finite elements."""
    blocks = values.reshape(-1).split(_BLOCK)
    return math.sqrt(sum(float(block.to(torch.float64).nan_to_num(0.0, 0.0, 0.0).square().sum()) for block in blocks))
