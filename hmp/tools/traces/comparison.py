"""The result of compare_captures(): where two programs part, how the gap grows with depth, and what each computed in."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..formatting import count, json_values, two_digits, versioned
from ..pages.page import Page, Result
from ..record.models import pattern
from .trace import INPUTS, Capture

OTHER_BITS = "its values differ"


@dataclass(frozen=True)
class Side:
    """One of the two captures.

    Its name and file, its model's class, the dtypes of its modules' weights and of what they returned, each with the number of calls, and
    the policies that were active.
    """

    name: str
    path: str
    model: str
    weights: dict[str, int]
    outputs: dict[str, int]
    policies: tuple[str, ...]
    about: dict[str, str]

    def __str__(self) -> str:
        weights = f"weights {_counted(self.weights)}" if self.weights else "no weights"
        policies = " and ".join(f"policy {name!r}" if "torch.autocast" not in name else name for name in self.policies) or "no policy"
        return f"{weights}; outputs {_counted(self.outputs)}; {policies}"


@dataclass(frozen=True)
class Computed:
    """In what one side computed a module's call: the dtypes of what it was given, of its own weights and of the output, and the shape."""

    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    output: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        given = ", ".join(self.inputs)
        said = f"{given} → {self.output}" if given and given != self.output else self.output
        return f"{said}, {', '.join(self.weights)} weights" if self.weights and self.weights != (self.output,) else said


@dataclass(frozen=True)
class Gap:
    """An output of a module's call in both programs, and how far it is apart.

    `module` is its name in the second program, `module_a` in the first; `kind` the class, `number` which call of it; `output` the path in
    what it returned. `relative` is ||a - b|| / ||b|| over what stands for the same rows and places, None where that is unknown; what
    is NaN, infinite or beyond 2**100 in both, as masks are, does not count. `how` says what was compared: "bits" (all are the same),
    "values" or "", and then `why` not.
    """

    module: str
    module_a: str
    kind: str
    number: int
    step: int
    is_leaf: bool
    output: str
    a: Computed
    b: Computed
    relative: float | None
    how: str
    why: str = ""

    @property
    def rounding(self) -> float:
        """Return the largest relative error of one rounding to the wider spaced of both dtypes; 0 for integers."""
        dtypes = [getattr(torch, each.output) for each in (self.a, self.b)]
        return max((torch.finfo(dtype).eps / 2 for dtype in dtypes if dtype.is_floating_point or dtype.is_complex), default=0.0)

    @property
    def named(self) -> str:
        """Return the module, with the path of the output, and the number of a later call."""
        name = self.module or "(the model)"
        return f"{name}{f'[{self.output}]' if self.output else ''}{f', call {self.number + 1}' if self.number else ''}"


@dataclass(frozen=True, repr=False)
class CaptureComparison(Result):
    """How far two programs are apart, module by module; str() is a table.

    `gaps` are in the order in which the first program's modules returned, what they were given first. `unmatched_a` and `unmatched_b` are
    the modules that one program alone called.

    Example:
        >>> net, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
        >>> for name in ("a.capture", "b.capture"):
        ...     with hmp.capture(name, net):
        ...         y = net(x)
        >>> found = hmp.compare_captures("a.capture", "b.capture")
        >>> found.verdict()
        ['they do not differ: 2 outputs that can be compared are equal']
        >>> found.layers(), found.computed(), found.to_dict()["first"]
        ({}, [], None)
        >>> json, page = found.to_json("captures.json"), found.to_html("captures.html")
    """

    a: Side
    b: Side
    gaps: tuple[Gap, ...]
    unmatched_a: tuple[str, ...] = ()
    unmatched_b: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Gap | None:
        """Return where they part: the first output of which one value is another. None where all are equal."""
        return next((gap for gap in self.gaps if gap.relative), None)

    @property
    def beyond_rounding(self) -> Gap | None:
        """Return the first output that is further apart than one rounding to its dtype explains, or None."""
        return next((gap for gap in self.gaps if gap.relative is not None and gap.relative > gap.rounding), None)

    @property
    def last(self) -> Gap | None:
        """Return the first output of the outermost module's last call that is compared."""
        whole = [gap for gap in self.gaps if not gap.module and gap.relative is not None]
        return next((gap for gap in whole if gap.number == whole[-1].number), None)

    def layers(self) -> dict[str, list[Gap]]:
        """Return the repeated modules, by their name with `*` for the last number: `model.layers.*`.

        Returns:
            Each with its first output in every layer of the first call, the outermost ones first.
        """
        found: dict[str, dict[int, Gap]] = {}
        for gap in self.gaps:
            name = re.fullmatch(r"(?:(.*)\.)?(\d+)", gap.module)
            if name is not None and gap.relative is not None and not gap.number:
                found.setdefault(f"{name[1]}.*" if name[1] else "*", {}).setdefault(int(name[2]), gap)
        several = {name: [gap for _, gap in sorted(gaps.items())] for name, gaps in found.items() if len(gaps) > 1}
        return dict(sorted(several.items(), key=lambda item: item[0].count(".")))

    def computed(self) -> list[tuple[str, str, str, int]]:
        """Return the modules that were computed in other dtypes in the two programs.

        Returns:
            Their names, with `*` for numbers, what each program computed them in, and how many they are, in the order of the calls.
        """
        found = Counter((pattern(gap.module), str(gap.a), str(gap.b)) for gap in self.gaps if gap.kind and not gap.number)
        return [(*names, number) for names, number in found.items() if names[1] != names[2]]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values.

        Returns:
            The values that `to_json()` writes.
        """
        ends = {"first": self.first, "beyond_rounding": self.beyond_rounding, "last": self.last}
        named = {name: None if gap is None else gap.named for name, gap in ends.items()}
        return versioned(json_values({**asdict(self), **named}))

    def _page(self) -> Page:
        from .page import captures_page  # here: it imports this module

        return captures_page(self)

    def verdict(self) -> list[str]:
        """Return where they part, where rounding alone no longer explains the gap, and how far the whole is apart.

        Returns:
            Sentences.
        """
        first, beyond, last = self.first, self.beyond_rounding, self.last
        if first is None:
            known = sum(gap.relative is not None for gap in self.gaps)
            others = [gap for gap in self.gaps if gap.why.startswith(OTHER_BITS)]
            if others:
                return [f"they differ, by an unknown amount, in {count(len(others), 'output')}, first {others[0].named}"]
            if not known:
                return ["they may or may not differ: no output can be compared"]
            return [f"they do not differ: {count(known, 'output')} that can be compared {'is' if known == 1 else 'are'} equal"]
        kind = f" ({first.kind})" if first.kind else ""
        unknown = sum(gap.relative is None for gap in self.gaps[: self.gaps.index(first)])
        since = f"; {count(unknown, 'output')} before it could not be compared" if unknown else ""
        within = "no output differs by more than one rounding to its dtype explains"
        further = beyond and f"they first differ by more than one rounding explains ({two_digits(beyond.rounding)}) at {beyond.named}: "
        said = [
            f"they first differ at {first.named}{kind}: by {two_digits(first.relative)}, {first.a} against {first.b}{since}",
            within if beyond is None else f"{further}by {two_digits(beyond.relative)}",
        ]
        if last is not None:
            said.append(f"the model's output{f' {last.output}' if last.output else ''} differs by {two_digits(last.relative)}")
        return said


def side_of(capture: Capture) -> Side:
    """Return what a capture says of its program."""
    calls = [call for call in capture.calls if not call.module.endswith(INPUTS)]
    weights = Counter(dtype for call in calls if not call.number for dtype in call.weights)
    outputs = Counter(dtype for call in calls for dtype in dict.fromkeys(output.dtype for output in call.outputs))
    policies = tuple(dict.fromkeys(call.policy for call in calls if call.policy))
    about = capture.about
    return Side(capture.name, str(capture.path), about.get("model", ""), dict(weights), dict(outputs), policies, about)


def _counted(dtypes: dict[str, int]) -> str:
    """Dtypes with how many calls, most first; without the number where there is one."""
    most = sorted(dtypes.items(), key=lambda item: -item[1])
    return ", ".join(f"{dtype} ({number})" for dtype, number in most) if len(most) > 1 else "".join(dtypes)
