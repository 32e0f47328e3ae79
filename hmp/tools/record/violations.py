"""Calls that did not follow the entry of their list, and what overrode it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields

from ...errors import HmpError
from ..formatting import Word
from .rows import group_rows


class OverrideKind(Word):
    """What made a call run otherwise than the entry of its list says; `remedy` is what to do about it."""

    REGION = "region", "close the autocast context first, or enter hmp.casts() or call the applied model inside it"
    ISLAND = "island", "remove the autocast(enabled=False) context or, if float32 is right here, take the op off the list"
    DISABLE_CASTS = "disable_casts", "move the call out of disable_casts(), or take the op off the list"
    NO_KERNEL = "no_kernel", "take the op off the list on this device, or list it only for modules where it has a kernel: `op @ modules`"
    OUTSIDE = "outside", "call the model itself, or name the method: hmp.apply(model, methods=('forward', 'encode'))"
    BYPASSED = "bypassed", "hmp.unreachable() shows the reference; take it after hmp patched torch, or look the function up at each call"
    BACKWARD = "backward", "cast in that code with .to(), or decorate it with torch.amp.custom_fwd and custom_bwd"
    ROUNDED_BEFORE = (
        "rounded_before",
        "keep weight and input in float32: no model.half(), and no FSDP2 param_dtype or DeepSpeed bf16 for this module",
    )
    TORCH = "torch", "hmp left the call to torch because of its arguments; see the rules for when it does"

    remedy: str

    def __new__(cls, value: str, remedy: str = "") -> OverrideKind:
        """Return a kind, which is its value as a string."""
        made = str.__new__(cls, value)
        made._value_ = value
        made.remedy = remedy
        return made


def check_allowed(allow: Collection[str]) -> None:
    """Raise HmpError unless `allow` is a list of kinds of violations."""
    known = [each.value for each in OverrideKind]
    if isinstance(allow, str) or not isinstance(allow, Collection) or any(kind not in known for kind in allow):
        raise HmpError(f"allow= expected a list of kinds of violations, got {allow!r}; the kinds are {', '.join(map(repr, known))}")


@dataclass(frozen=True)
class Violation:
    """Calls of one op in one place that ran otherwise than an entry of a list says.

    `source` is the line, with file and number where it has one; `wanted` the dtype that it asks for, `got` those that the calls computed
    in; `kind` what overrode it, a value of OverrideKind, and `by` what that was in words: a torch.autocast context with the line that
    opened it. `module`, `file` and `line` say who called, `calls` how often.
    """

    op: str
    source: str
    wanted: str
    got: str
    kind: str
    by: str
    module: str = ""
    file: str = ""
    line: int = 0
    calls: int = 0

    @property
    def place(self) -> str:
        """Return `module at file:line`, what of it is known."""
        return " at ".join(part for part in (self.module, f"{self.file}:{self.line}" if self.file else "") if part)

    @property
    def remedy(self) -> str:
        """Return what may be done about it."""
        return OverrideKind(self.kind).remedy

    def __str__(self) -> str:
        line = f" ({self.source})" if self.source else ""
        times = "once" if self.calls == 1 else f"{self.calls} times"
        return f"{self.op}{line} in {self.place}: wanted {self.wanted}, got {self.got}, {times}; caused by {self.by}"


def together(found: Iterable[Violation]) -> list[Violation]:
    """Return the violations, those that differ in nothing but the number of calls added up, most calls first."""
    same = [each.name for each in fields(Violation) if each.name != "calls"]
    return sorted(group_rows(found, same, {"calls": sum}), key=lambda each: -each.calls)


def kinds(found: Iterable[Violation]) -> list[str]:
    """Return the kinds of the violations, each once."""
    return list(dict.fromkeys(each.kind for each in found))


def in_lines(found: Iterable[Violation]) -> str:
    """Return the violations as lines of text, each kind with its remedy."""
    listed = list(found)
    lines = []
    for kind in kinds(listed):
        lines += [f"  {each}" for each in listed if each.kind == kind]
        lines.append(f"    to fix: {OverrideKind(kind).remedy}")
    return "\n".join(lines)
