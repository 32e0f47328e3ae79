"""The report of a recording: rows, sums of them, checks for tests, and its forms as text, JSON and page."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...core import lists
from ...core.casting import dtype_name
from ...errors import HmpError, ViolationError
from ..formatting import count, of_json, some, versioned
from ..pages.page import Page, Result, table
from .models import Model, merge_models
from .rows import UNLISTED, Row, Violation, check_allowed, grouped, in_lines, in_order, report_parts, together

if TYPE_CHECKING:
    from .recorder import Recorder

FORMAT = 1
SHOWN = 40  # entries that no call matched; `never_called` has them all
_TOLD = ("policies", "never_called", "uncast_calls")  # what a recording knows by itself


class Report(Result):
    """What ran in which precision, while it is recorded and afterwards; `print(report)` shows it by op, most cast time first.

    Attributes:
        rows: The distinct calls, with what was counted of them.

    Example:
        >>> net, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
        >>> with hmp.casts("autocast"), hmp.record() as report:
        ...     y = net(x)
        >>> [row.compute for row in report.grouped("op") if row.op == "linear"]
        ['bfloat16']
        >>> report.violations()
        []
        >>> report.assert_dtype("linear", torch.bfloat16)
        >>> path = report.to_json("report.json")
        >>> report.diff(hmp.types.Report.load(path))
        []
        >>> both = report.merge(hmp.types.Report.from_dict(report.to_dict())).gather()
        >>> both.about["ranks"]
        2
        >>> page = report.to_html("report.html")
    """

    def __init__(self, rows: Iterable[Row] = (), violations: Iterable[Violation] = (), models: Iterable[Model] = (), **about: Any) -> None:
        self._recorder: Recorder | None = None
        parts = {name: about.pop(name, ()) for name in report_parts()}
        told = {"rows": rows, **parts, "violations": violations, "models": models}
        self._lists: dict[str, tuple[Any, ...]] = {name: tuple(of) for name, of in told.items()}
        self._about: dict[str, Any] = {
            "policies": [], "never_called": [], "uncast_calls": 0, "seconds": 0.0, "ranks": 1, "device": "cpu",
            "torch": torch.__version__,
        } | about  # fmt: skip

    @property
    def is_recording(self) -> bool:
        """Return True if the recording goes on."""
        return self._recorder is not None

    # --- what was recorded ---

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return the distinct calls, in the order in which they were first made."""
        return tuple(self._told("rows"))

    def grouped(self, by: str = "op", sort: str = "cast_seconds", *, unlisted: bool = True) -> list[Row]:
        """Return the rows added up.

        Args:
            by: What a row adds up: "op", "module", "line" or "call".
            sort: The field of Row by which they are sorted, the largest first.
            unlisted: Whether what no list decides is among them.

        Returns:
            The rows; what differs within one is left empty.

        Raises:
            HmpError: `by` or `sort` isn't one of these.
        """
        return in_order(grouped([row for row in self.rows if unlisted or row.rule != UNLISTED], by), sort)

    @property
    def policies(self) -> list[dict[str, Any]]:
        """Return the policies that were active, as `Policy.to_dict()` has them."""
        return list(self._told("policies"))

    @property
    def never_called(self) -> list[str]:
        """Return your entries on their lists that no call matched. A preset's are not among them: it has the ops of many models."""
        return list(self._told("never_called"))

    @property
    def unlisted(self) -> list[Row]:
        """Return what was called and no list decides, by op, most time first. Seen in the thread that recorded."""
        return [row for row in self.grouped("op", "op_seconds") if row.rule == UNLISTED]

    def __getattr__(self, name: str) -> list[Any]:
        """Return the rows of a part that a list brings: `fp8` (each tensor that was quantised), `kept` (bytes before and after packing)."""
        if name.startswith("_") or name not in self._lists:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return list(self._told(name))

    def violations(self) -> list[Violation]:
        """Return the calls that did not follow the list that decides their dtype, most calls first.

        Calls where no list could decide, inside disable_casts() or by a name from before, are seen in the thread that recorded.

        Returns:
            The violations, each with what overrode the list, and where.
        """
        return list(self._told("violations"))

    @property
    def models(self) -> list[Model]:
        """Return the models that ran, in the order in which they first returned.

        Their parameters, and what a call of each keeps for backward.
        """
        return list(self._told("models"))

    @property
    def no_kernel(self) -> list[Row]:
        """Return what ran in float32 for want of a kernel in the low-precision dtype, by op."""
        return [row for row in self.grouped("op", "no_kernel") if row.no_kernel]

    @property
    def uncast_calls(self) -> int:
        """Return how many calls ran where no casts were active.

        Inside `disable_casts()`, in the optimizer's step, outside of a context or of a model that hmp.apply() was called for.
        """
        return int(self._told("uncast_calls"))

    @property
    def about(self) -> dict[str, Any]:
        """Return how it was recorded: "device", "torch" (its version), "seconds" that it took, "ranks" or runs that are added up.

        Where hmp recorded it, "model" (the classes of the outermost modules with parameters), "date" and the version of "hmp", too.
        """
        told = {name: self._about[name] for name in ("device", "torch", "ranks")} | {"seconds": self._told("seconds")}
        model = ", ".join(dict.fromkeys(each.name for each in self.models)) or self._about.get("model")
        return told | ({"model": model} if model else {}) | {name: self._about[name] for name in ("date", "hmp") if name in self._about}

    @property
    def notes(self) -> list[str]:
        """Return what a reader must know of how this was recorded."""
        raised = sum(row.raised for row in self.rows)
        return [f"{count(raised, 'call')} ended in an exception."] if raised else []

    def _told(self, name: str) -> Any:
        """Return what is known by that name: now, while it is recorded."""
        return {**self._about, **self._lists}[name] if self._recorder is None else self._recorder.told(name)

    def _end(self) -> None:
        """Nothing more is recorded."""
        if self._recorder is not None:
            self._about |= {name: self._told(name) for name in (*_TOLD, "seconds")}
            self._lists = {name: tuple(self._told(name)) for name in self._lists}
            self._recorder = None

    # --- checks ---

    def assert_dtype(self, op: str, dtype: torch.dtype) -> None:
        """Raise unless an op was called, and computed in one dtype every time.

        Args:
            op: The op's name, as lists spell it; "linear @ lm_head" for its calls in modules that match.
            dtype: The dtype that it must have computed in.

        Raises:
            AssertionError: It was not called, or computed in another dtype; the message says where.
        """
        name, _, scope = op.partition(" @ ")
        rows = [row for row in self.rows if row.op == name and row.compute and (not scope or fnmatch.fnmatchcase(row.module, scope))]
        wanted = dtype_name(dtype)
        if not rows:
            called = ", ".join(sorted({row.op for row in self.rows})) or "nothing"
            raise AssertionError(f"expected a call of {op} with a floating-point tensor, got none; called were {called}")
        wrong = [row for row in rows if row.compute != wanted]
        if wrong:
            lines = [f"  {row.calls} in {row.compute} (rule: {row.rule_in_words}) in {row.place}" for row in wrong]
            raise AssertionError("\n".join([f"{op} did not compute in {wanted} in {sum(r.calls for r in wrong)} calls:", *lines]))

    def verify(self, allow: Collection[str] = ()) -> Report:
        """Raise unless every call on a list that decides its dtype ran as its entry says.

        Args:
            allow: Kinds of violations that do not raise: "region" (an enabled torch.autocast), "island" (a model's own
                torch.autocast(enabled=False)), "disable_casts", "no_kernel", "outside" (a part of an applied model, or another method of
                it, called outside of its calls), "bypassed" (a reference taken before hmp patched torch), "rounded_before" (an op on the
                FP32 list whose weight came in a low-precision dtype, or whose input did before hmp made any), "torch".

        Returns:
            The report itself.

        Raises:
            ViolationError: Calls did not follow their lists. It is an AssertionError, whose message has for each op, entry, module, the
                dtype that was wanted and the one that it got, what overrode the list, and the remedy.
            HmpError: No op on a list was called, so nothing was verified, or `allow` isn't a list of kinds.

        Example:
            >>> net, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
            >>> with hmp.casts("autocast"), hmp.record() as report:
            ...     y = net(x)
            >>> checked = report.verify()
        """
        check_allowed(allow)
        found = [each for each in self.violations() if each.kind not in allow]
        if found:
            calls = sum(each.calls for each in found)
            told = f"{count(calls, 'call')} did not follow {'its list' if calls == 1 else 'their lists'}"
            raise ViolationError(f"{told}:\n{in_lines(found)}{self.never_called_notice}", self)
        if not any(row.source for row in self.rows):
            raise HmpError(
                "nothing was verified, because no op on a list was called; give a policy, or call hmp.apply(model, policy) first"
                + self.never_called_notice
            )
        return self

    @property
    def never_called_notice(self) -> str:
        """Return a line that names the user's entries that no call matched; "" for none."""
        names, attention = self.never_called, "scaled_dot_product_attention"
        is_inside = any(name.partition(" @ ")[0] == "softmax" for name in names) and any(row.op == attention for row in self.rows)
        inside = f"; the softmax of {attention}, which was called, is part of that op: list it instead" if is_inside else ""
        return f"\nnotice: entries of your lists that no call matched: {some(names, SHOWN)}{inside}" if names else ""

    def diff(self, other: Report) -> list[str]:
        """Return what ran in other dtypes in another report: ops that compute otherwise, that came or went.

        Args:
            other: The other report. Numbers of calls are not compared.

        Returns:
            A line for each op.
        """
        mine, theirs = _dtypes_by_op(self), _dtypes_by_op(other)
        changed = sorted(op for op in mine.keys() | theirs.keys() if mine.get(op) != theirs.get(op))
        return [f"{op}: {mine.get(op, 'not called')} -> {theirs.get(op, 'not called')}" for op in changed]

    # --- taking several together ---

    def merge(self, *others: Report) -> Report:
        """Return one report of several runs, whose seconds are added up. Of ranks, which run at the same time, gather() makes one.

        Args:
            *others: The other reports.

        Returns:
            A new report.
        """
        return self._together((self, *others), sum)

    def _together(self, reports: Sequence[Report], seconds: Callable[[Iterable[float]], float]) -> Report:
        called = set[str]().union(*(each._called() for each in reports))
        never = set[str]().union(*(each.never_called for each in reports)) - called
        policies = {each["fingerprint"]: each for report in reports for each in report.policies}
        return Report(
            grouped([row for report in reports for row in report.rows], "call"),
            together(each for report in reports for each in report.violations()),
            merge_models(each for report in reports for each in report.models),
            **self._about
            | {
                "policies": list(policies.values()),
                "never_called": sorted(never),
                "uncast_calls": sum(each.uncast_calls for each in reports),
                "seconds": seconds(each._about["seconds"] for each in reports),
                "ranks": sum(each._about["ranks"] for each in reports),
                **{name: part.merged(row for report in reports for row in report._told(name)) for name, part in report_parts().items()},
            },
        )

    def _called(self) -> set[str]:
        """Return the entries on the lists of its policies of which an op was called."""
        return {name for policy in self.policies for cast in lists.names() for name in policy.get(cast, ())} - set(self.never_called)

    def gather(self) -> Report:
        """Return the reports of all ranks as one; every rank must call it.

        Returns:
            On rank 0 the reports of all, with the seconds of the slowest; elsewhere the rank's own. Alone the report itself.
        """
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
            return self
        found: list[Any] | None = [None] * distributed.get_world_size() if distributed.get_rank() == 0 else None
        distributed.gather_object(self.to_dict(), found)
        if found is None:
            return self
        reports = [Report.from_dict(each) for each in found]
        return reports[0]._together(reports, max)

    # --- forms ---

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values; times are in seconds.

        Returns:
            What `from_dict()` takes.
        """
        about = {name: self._told(name) for name in _TOLD}
        rows = {name: [_without_empty(asdict(each)) for each in self._told(name)] for name in self._lists}
        return versioned({"hmp_report": FORMAT, **self._about, **self.about, **about, "notes": self.notes, **rows})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """Return the report that `to_dict()` described.

        Args:
            values: What `to_dict()` gave.

        Returns:
            The report.

        Raises:
            HmpError: It is something else, or of another version.
        """
        kinds: dict[str, Any] = {"rows": Row, "violations": Violation, "models": Model}
        kinds |= {name: part.row for name, part in report_parts().items()}
        try:
            if values["hmp_report"] != FORMAT or "rows" not in values:
                raise HmpError(f"hmp_report {values['hmp_report']!r}")
            # which reports of older releases have not all of
            found = {name: [of_json(kind, each) for each in values.get(name, ())] for name, kind in kinds.items()}
        except (HmpError, LookupError, TypeError, ValueError) as error:
            told = f"expected what Report.to_dict() returned, with rows and hmp_report {FORMAT}, got something else ({error})"
            raise HmpError(f"{told}; record it again with this hmp") from None
        about = {name: value for name, value in values.items() if name not in ("schema_version", "hmp_report", "notes")}
        return cls(**about | found)

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Return the report in a file.

        Args:
            path: A file that `to_json()` wrote.

        Returns:
            The report.

        Raises:
            HmpError: There is no such file, or no report in it.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (HmpError, OSError, TypeError, ValueError) as error:  # ValueError: not UTF-8, or not JSON
            raise HmpError(f"{path}: cannot be read ({error}); give a file that Report.to_json() wrote") from None

    def table(self, by: str = "op", sort: str = "cast_seconds") -> str:
        """Return the rows that a list decided as a table to print, one line for each op, module, line or call.

        Args:
            by: What a line of the table adds up: "op", "module", "line" or "call".
            sort: The field of a row by which the lines are sorted, the largest first.

        Returns:
            The table as text.

        Raises:
            HmpError: `by` or `sort` isn't one of these.

        Example:
            >>> print(hmp.types.Report().table("module"))  # of a recording, a line for each module
            module  calls  casts  avoided  bytes cast  in casts  in ops
            -----------------------------------------------------------
        """
        from .page import rows_table  # here: it imports this module

        found = rows_table(self, by, sort)
        return table(replace(found, most=len(found.rows)))

    def _page(self) -> Page:
        from .page import report_page  # here: it imports this module

        return report_page(self)


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    """Return a row's values without `more`, where no plug-in has added a column."""
    return {name: value for name, value in values.items() if name != "more" or value}


def _dtypes_by_op(report: Report) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for row in report.rows:
        if row.compute:
            found.setdefault(row.op, set()).add(row.compute)
    return {op: " and ".join(sorted(dtypes)) for op, dtypes in found.items()}
