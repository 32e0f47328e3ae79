"""A capture: what each call of each module returned, read from its file when it is asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...errors import HmpError
from ..formatting import count, of_json, versioned
from ..pages.page import Cell, Items, Page, Result, Section, Table, chips, error, made_of, module
from . import file

Tensor = torch.Tensor
INPUTS = "(inputs)"  # what the outermost module was called with is stored as a module of this name
TOKENS, MASK = "input_ids", "(mask)"  # of these: which tokens, and which places count as capture(mask=...) said
_SHOWN = 40


@dataclass(frozen=True)
class Output:
    """A tensor that a module returned.

    `path` in what it returned ("" where it is all of it), shape, dtype, the norm of its finite elements and a hash of its bytes.

    `is_whole` says if the file holds its values; those of large outputs are not kept. Where torch does not give the values (a meta tensor,
    a shard), `bits` is "" and the norm is 0.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    norm: float = 0.0
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


class Capture(Result):
    """What `hmp.capture()` wrote into a file. `calls` are in the order in which modules returned; `values()` reads one tensor of the file.

    `about` says model, device, date and versions, `notes` what was not seen. Nothing but the file's header is read before it is asked for.

    Example:
        >>> net, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
        >>> with hmp.capture("trainer.capture", net):
        ...     y = net(x)
        >>> found = hmp.Capture.load("trainer.capture")
        >>> torch.equal(found.values(0, 0), y), len(found.to_dict()["calls"])
        (True, 2)
        >>> json, page = found.to_json("calls.json"), found.to_html("calls.html")
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
    def _file(self) -> file.Opened:
        if not self.is_written:
            raise HmpError(f"{self.path} is written when the `with hmp.capture(...)` block ends; read it after the block")
        return file.opened(self.path)

    @property
    def name(self) -> str:
        """Return the file's name without its ending."""
        return self.path.stem

    @property
    def about(self) -> dict[str, str]:
        """Return the model's class, device, date, and the versions of hmp and torch."""
        return dict(self._file.about)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what was not seen, or not kept."""
        return tuple(self._file.notes)

    @cached_property
    def calls(self) -> tuple[ModuleCall, ...]:
        """Return every call that was noted."""
        return tuple(_call_of(each) for each in self._file.calls)

    def values(self, call: int, output: int) -> Tensor:
        """Return the values of an output whose `is_whole` is true.

        Args:
            call: The position of its call in `calls`.
            output: The position of the output in the call's `outputs`.

        Returns:
            The tensor.
        """
        return self._file.tensor(f"{call}.{output}")

    def to_dict(self) -> dict[str, Any]:
        """Return the capture without its values as plain JSON values.

        Returns:
            What it is of, its notes, and its calls.
        """
        return versioned({"about": self.about, "notes": list(self.notes), "calls": [asdict(call) for call in self.calls]})

    def _page(self) -> Page:
        calls = self.calls
        rows = [
            [module(call.module, "(the model)"), Cell(call.kind), chips(", ".join(call.inputs)), chips(", ".join(call.weights)),
             Cell(f"{each.path} {list(each.shape)} {each.dtype}".strip()), error(each.norm)]
            for call in calls for each in call.outputs
        ]  # fmt: skip
        policies = ", ".join(repr(name) for name in dict.fromkeys(call.policy for call in calls) if name) or "no policy"
        modules = len({call.module for call in calls})
        of = f"{count(len(calls), 'call')} of {count(modules, 'module')} of {self.about.get('model', '')}, {policies}"
        table = Table(
            ("module", "class", "inputs", "weights", "output", ">norm"), rows, label="Calls", where=".calls holds them", most=_SHOWN
        )
        notes = [Items(self.notes, is_notes=True)] if self.notes else []
        return Page(str(self.path), of, made_of(self.about), opening=notes, sections=[Section("calls", "Calls", "", [table])])


def _call_of(values: dict[str, Any]) -> ModuleCall:
    return replace(of_json(ModuleCall, values), outputs=tuple(of_json(Output, each) for each in values["outputs"]))
