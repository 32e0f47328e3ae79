"""The page of a report: sums, charts, and the module tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.formatting import count, share, short_entry, size, some, typeset_duration
from ...core.rules import rules
from ..pages.page import (
    Cell,
    Heading,
    Items,
    Legend,
    Names,
    Page,
    Part,
    Section,
    Split,
    Table,
    Text,
    Tree,
    amount,
    bar,
    chips,
    code,
    colour_class,
    duration,
    flow,
    left_out,
    made_of,
    module,
    nbytes,
    number,
    op,
    part,
    parts_of,
    place,
    whole,
)
from .fp8_stats import Fp8Row
from .models import Model, pattern, shares
from .packing_stats import merged as merged_packing
from .report import Report
from .rows import BYPASSED, GROUPS, UNLISTED, Row, grouped, total
from .violations import OverrideKind, Violation, kinds

UNLISTED_OPS, FP8_ROWS, MODELS, KEPT_ROWS = 15, 200, 12, 12
# What reports call a rule → the sentences of all rules that they call so.
RULES: dict[str, list[str]] = {}
for _rule in rules.RULES:
    if _rule.in_reports:
        RULES.setdefault(_rule.in_reports, []).append(_rule.sentence)
RULES[UNLISTED] = ["on no list: left to torch"]
RULES[BYPASSED] = ["on a list, and called by a name that Python code took before: hmp.unreachable() says where"]
OUTSIDE = "(outside every module)"
TABLE_ROWS = 1000  # what a browser sorts at once, and what keeps the page below 2 MB; the JSON has them all
TREE_LINES = 1200
_BARS, _PLACES = 14, 8  # ops of the chart, and lines with most time in casts
_OPEN_LINES = 26  # lines of the tree that are unfolded at first: about a screen


def report_page(report: Report) -> str:
    """Return the page of `report`, as HTML."""
    rows, sums = report.rows, total(report.rows)
    about = report.about
    recorded = [f"{typeset_duration(about['seconds'])} recorded"]
    if about["ranks"] > 1:
        recorded.append(f"{about['ranks']} recordings added up")
    sections = [
        _violations(report.violations()),
        _time(rows),
        _places(report, sums),
        _tree(rows),
        _models(report.models),
        _in_fp8(report.fp8),
        _packed(report),
        _calls(report),
        _lists(report, sums),
    ]
    return Page(
        title="hmp report",
        verdict=verdict(report, sums),
        made=made_of(about, *recorded),
        policies=[_policy(each) for each in report.policies] or [("no policy was active", "")],
        cards=_cards(report, sums),
        opening=_opening(report, sums),
        sections=[each for each in sections if each is not None],
        closing=RULES,
        closing_text=_CLOSING,
    ).html()


_CLOSING = (
    "Dtypes are those of the floating inputs as the caller gave them, of the first input as torch's op got it, and of the result. Times "
    "are those that the calling thread spent; on an accelerator they are those of the kernels only with `hmp.record(synchronize=True)`. "
    "What autograd runs by itself in a backward pass is not in it: no list applies there. Bytes cast are those of tensors before their "
    "casts; saved are the casts that a cache made unnecessary."
)
_UNCAST = (
    "calls ran where no casts are active (disable_casts(), optimizer steps, outside of a region or of an applied model), and are not "
    "counted here."
)


def _policy(policy: Mapping[str, Any]) -> tuple[str, str]:
    lists = [f"{len(policy[cast])} names on its {cast.upper()} list" for cast in ("bf16", "fp32", "promote")]
    lists += [f"{len(policy['fp8'])} on FP8 ({policy['fp8_recipe']})"] if policy.get("fp8") else []
    lists += [f"{len(policy['saved'])} on saved ({policy['saved_recipe']})"] if policy.get("saved") else []
    return f"policy {policy['name']} {policy['fingerprint']}", f"{policy['dtype']}; {', '.join(lists)}"


def _cards(report: Report, sums: Row) -> list[tuple[str, str, str]]:
    decided = sum(row.calls for row in report.rows if row.rule not in (BYPASSED, UNLISTED))
    cards = [
        ("in casts", typeset_duration(sums.cast_seconds), f"{share(sums.cast_seconds, sums.seconds)} of the time in ops and casts"),
        ("in ops", typeset_duration(sums.op_seconds), f"{sums.calls:,} calls, {decided:,} by a rule"),
        ("casts", f"{sums.casts:,}", f"{size(sums.cast_bytes)}; {sums.casts_saved:,} more saved by the caches"),
    ]
    models = report.models
    if models:
        of_several = f", of the first of {len(models):,} models" if len(models) > 1 else ""
        cards.append(("parameters", amount(models[0].size), f"{models[0].dtypes}; {size(models[0].parameter_bytes)}{of_several}"))
        if models[0].kept:
            cards.append(("kept for backward", size(models[0].kept_bytes), "by a call of it" if of_several else "by a call"))
    cards.append(("float32 for want of a kernel", f"{sum(row.no_kernel for row in report.no_kernel):,}", "calls (R11)"))
    cards.append(("listed, never called", f"{len(report.never_called):,}", "names, see the lists below"))
    return cards


def _opening(report: Report, sums: Row) -> list[Part]:
    times = parts(report.rows)
    said = {"casts": "casts", "other": "ops without a floating input"}
    entries = [
        (each.name, f"{said.get(each.name, f'ops in {each.name}')} {typeset_duration(each.seconds)} ({share(each.seconds, sums.seconds)})")
        for each in times
    ]
    notes = [*report.notes, *([f"{report.uncast_calls:,} {_UNCAST}"] if report.uncast_calls else [])]
    return parts_of(
        Split([(name, text, each.seconds / sums.seconds) for (name, text), each in zip(entries, times, strict=True)]) if times else None,
        Legend(entries) if times else None,
        Text(headline(report)) if headline(report) else None,
        Items(notes, is_notes=True) if notes else None,
    )


def _violations(found: list[Violation]) -> Section | None:
    if not found:
        return None
    rows = [
        [op(each.op), code(short_entry(each.source), each.source), chips(each.wanted), chips(each.got), module(each.module), place(each),
         Cell(each.by), whole(each.calls)]
        for each in found
    ]  # fmt: skip
    columns = ("op", "entry", "wanted", "got", "module", "place", "overridden by", ">calls")
    table = Table(columns, rows, label="Calls that did not follow their list")
    remedies = Items([f"{kind}: {OverrideKind(kind).remedy}" for kind in kinds(found)])
    return Section("violations", "Did not follow", "Calls that did not follow their list", [table, remedies])


def _time(rows: Sequence[Row]) -> Section | None:
    bars = op_bars(rows)
    if not bars:
        return None
    computed = sorted({dtype for each in bars for dtype in each.seconds}, key=lambda dtype: (dtype == "other", dtype))
    longest, most = max(each.total for each in bars), max(sum(each.calls.values()) for each in bars)
    lines = []
    for each in bars:
        calls = [(colour_class(dtype), float(each.calls.get(dtype, 0))) for dtype in computed]
        seconds = [*((colour_class(dtype), each.seconds.get(dtype, 0.0)) for dtype in computed), ("casts", each.cast_seconds)]
        lines.append([op(each.op), duration(each.total), bar(longest, *seconds), whole(sum(each.calls.values())), bar(most, *calls)])
    colours = [(dtype, "no floating dtype" if dtype == "other" else f"computes in {dtype}") for dtype in computed] + [
        ("casts", "its casts")
    ]
    table = Table(("op", ">time", "in the op and in its casts", ">calls", "by dtype"), lines)
    return Section("time", "Time", "Time and calls by op and dtype", [Legend(colours), table])


def _places(report: Report, sums: Row) -> Section | None:
    found = cast_places(report)
    if not found:
        return None
    rows = [
        [place(row), module(modules_of(report, row)), op(row.op), flow(row.inputs, row.compute, row.output), whole(row.casts),
         nbytes(row.cast_bytes), duration(row.cast_seconds), bar(sums.cast_seconds, ("casts", row.cast_seconds))]
        for row in found
    ]  # fmt: skip
    columns = ("line", "module", "op", "inputs → compute → output", ">casts", ">bytes cast", ">time in casts", "share")
    return Section("places", "Where", "Where casts are made", [Table(columns, rows)])


def _tree(rows: Sequence[Row]) -> Section | None:
    root = tree(rows)
    return Section("tree", "Casts by module", "The flow of casts through the modules", [Tree(root)]) if root.branches else None


def _models(models: list[Model]) -> Section | None:
    if not models:
        return None
    shown = models[:MODELS]
    rows = [
        [op(f"{each.name} ({each.count:,} of them)" if each.count > 1 else each.name), whole(each.size), whole(each.trainable),
         Cell(each.dtypes), nbytes(each.parameter_bytes), nbytes(each.kept_bytes)]
        for each in shown
    ]  # fmt: skip
    columns = ("model", ">parameters", ">to be trained", "dtypes", ">bytes", ">kept for backward by a call")
    found: list[Part] = [Table(columns, rows, note=left_out(shown, len(models), "models", "`Report.to_json()`"))]
    for each in shown:
        kept = shares(each.kept or {})
        if kept:
            lines = [
                [module(f"{row.path} ({row.modules:,} modules)" if row.modules > 1 else row.path), nbytes(row.bytes),
                 part(row.bytes, each.kept_bytes), bar(each.kept_bytes, ("ops", row.bytes))]
                for row in kept[:KEPT_ROWS]
            ]  # fmt: skip
            more = f"… and {len(kept) - KEPT_ROWS} more." if len(kept) > KEPT_ROWS else ""
            found += [
                Heading(f"Kept for backward by a call of {each.name}"),
                Table(("module", ">kept", ">of all", "share"), lines, note=more),
            ]
    if len(found) > 1:
        told = (
            "Of a model's first call that autograd recorded: each storage once, for the first module that keeps it, parameters left out, "
            'their copies in a low-precision dtype not. Layers whose names differ in a number are taken together; `report.table("module")` '
            "has each."
        )
    else:
        told = "Nothing is known to be kept for backward: autograd recorded no call of a model, or this release of torch does not tell."
    return Section("models", "Models", "The models, and what they keep for backward", [*found, Text(told, is_soft=True)])


def _in_fp8(found: list[Fp8Row]) -> Section | None:
    if not found:
        return None
    shown = sorted(found, key=lambda row: (-row.flushed, -row.saturated))[:FP8_ROWS]
    rows = [
        [op(row.op), module(row.module), Cell(row.role), whole(row.tensors), number(row.amax, f"{row.amax:.3g}"),
         number(row.least_scale, f"{row.least_scale:.2g}"), number(row.greatest_scale, f"{row.greatest_scale:.2g}"),
         number(row.saturated, f"{100 * row.saturated:.2f} %"), number(row.flushed, f"{100 * row.flushed:.2f} %")]
        for row in shown
    ]  # fmt: skip
    told = (
        'Of each product\'s left operand ("input"), right operand ("weight") and of its result\'s gradient ("grad"). Saturated are the '
        "elements at the format's largest number, flushed those that became 0 and were not. Where much is flushed, the values of one "
        "tensor span more than the format does: a recipe with a scale for each row or block, or the low-precision dtype for this module "
        "(`linear @ module` in bf16.txt), keeps them."
    )
    columns = ("op", "module", "role", ">tensors", ">amax", ">least scale", ">greatest scale", ">saturated", ">flushed to 0")
    note = left_out(shown, len(found), "rows, with most flushed", "`report.fp8`")
    table = Table(columns, rows, label="What quantising did, by op, module and role", note=note)
    return Section("fp8", "In FP8", "What FP8 did to the operands of products", [Text(told), table])


def _packed(report: Report) -> Section | None:
    found = sorted(merged_packing(report.kept), key=lambda row: -row.nbytes)
    if not found:
        return None
    rows = [
        [op(row.op), module(row.module), whole(row.tensors), nbytes(row.nbytes), nbytes(row.left),
         number(row.error, f"{100 * row.error:.2f} %"),
         duration(row.seconds)]
        for row in found
    ]  # fmt: skip
    told = (
        "What the ops on the saved list kept until backward: the bytes that torch would keep and those that packing left, the error of "
        "what backward got, and the time in packing and unpacking. Nothing is left of a weight's low-precision copy, which backward "
        "makes again."
    )
    columns = ("op", "module", ">tensors", ">bytes", ">packed", ">error", ">in packing")
    table = Table(columns, rows, label="What was kept for backward, by op and module")
    return Section("kept", "Kept", "Kept for backward, packed", [Text(told), table])


def _calls(report: Report) -> Section:
    found = sorted(report.grouped("call"), key=lambda row: -row.seconds)
    shown = found[:TABLE_ROWS]
    rows = [
        [op(row.op), Cell(row.rule, title=short_entry(row.source)), flow(row.inputs, row.compute, row.output), module(row.module),
         place(row), whole(row.calls), whole(row.casts), whole(row.casts_saved), nbytes(row.cast_bytes), duration(row.cast_seconds),
         duration(row.op_seconds)]
        for row in shown
    ]  # fmt: skip
    table = Table(
        ("op", "rule", "inputs → compute → output", "module", "line", ">calls", ">casts", ">saved", ">bytes cast", ">in casts", ">in ops"),
        rows,
        label="Every distinct call, with what was counted of it",
        note=left_out(shown, len(found), "with most time", "`Report.to_json()`"),
        filter="op, module, file, dtype",
        choice="Rule",
        choices=list(RULES),
        groups=[row.rule for row in shown],
    )
    return Section("calls", "All calls", "All calls", [table])


def _lists(report: Report, sums: Row) -> Section:
    unlisted, found = report.unlisted, list[Part]()
    if unlisted:
        rows = [
            [
                op(row.op),
                flow(row.inputs, row.compute, row.output),
                whole(row.calls),
                duration(row.op_seconds),
                part(row.op_seconds, sums.seconds),
            ]
            for row in unlisted[:UNLISTED_OPS]
        ]
        more = f"… and {len(unlisted) - UNLISTED_OPS} more in the table above." if len(unlisted) > UNLISTED_OPS else ""
        told = "These run in the dtype of their inputs. Most time first."
        table = Table(("op", "inputs → compute → output", ">calls", ">in ops", ">share"), rows, note=more)
        found += [Heading("On no list"), Text(told), table]
    found.append(Heading("In float32 for want of a kernel (R11)"))
    lacking = report.no_kernel
    if lacking:
        listed = [f", listed as {short_entry(row.source)}" if row.source else "" for row in lacking]
        calls = [f"{row.no_kernel:,} of {row.calls:,} calls" for row in lacking]
        found.append(Items([f"`{row.op}`: {told}{where}" for row, told, where in zip(lacking, calls, listed, strict=True)]))
    else:
        found.append(Text("Nothing: every op had a kernel in the dtype that its rule asked for."))
    found.append(Heading("Listed and never called", id="never"))
    never = never_called(report)
    if never:
        found.append(
            Text(
                "Names that this program did not use while it was recorded. A list may hold more than one model needs; a name that you "
                "expected to see above may be the wrong one for what the model calls."
            )
        )
        found += [Names(f"{cast}.txt", names) for cast, names in never.items()]
    else:
        found.append(Text("None: every listed name was called."))
    return Section("lists", "Lists", "The lists and this program", found)


@dataclass
class Branch:
    """A module in the tree: its own calls, by op, and the modules below it; `sums` are of both."""

    name: str
    path: str
    rows: list[Row] = field(default_factory=list)
    branches: dict[str, Branch] = field(default_factory=dict)
    sums: Row = field(default_factory=lambda: total(()))
    dtypes: list[str] = field(default_factory=list)  # that its calls compute in, most calls first
    open: bool = False
    hidden: int = 0  # lines below it that the page leaves out

    def walk(self) -> Iterator[Branch]:
        """Yield the branch and all below it."""
        yield self
        for branch in self.branches.values():
            yield from branch.walk()

    @property
    def lines(self) -> int:
        """Return the lines that unfolding it adds."""
        return len(self.branches) + len(self.rows)


def tree(rows: Iterable[Row]) -> Branch:
    """Return the modules of `rows` as a tree in the order of their first calls; the part with most cast time is unfolded."""
    root = Branch("all modules", "", open=True)
    for row in rows:
        branch = root
        for name in row.module.split(".") if row.module else [OUTSIDE]:
            path = f"{branch.path}.{name}" if branch.path else name
            branch = branch.branches.setdefault(name, Branch(name, path))
        branch.rows.append(row)
    _add_up(root)
    _unfold(root)
    _cut(root)
    return root


def _add_up(branch: Branch) -> list[Row]:
    own = branch.rows
    below = [row for each in branch.branches.values() for row in _add_up(each)]
    branch.rows = sorted(grouped(own, "line"), key=lambda row: -row.seconds)
    branch.sums = total([*own, *below])
    calls: Counter[str] = Counter()
    for row in (*own, *below):
        calls[row.compute] += row.calls
    branch.dtypes = [dtype for dtype, _ in calls.most_common() if dtype]
    return [*own, *below]


def _unfold(root: Branch) -> None:
    left = _OPEN_LINES - root.lines
    closed = list(root.branches.values())
    while closed:
        chosen = max(closed, key=lambda branch: (branch.sums.cast_seconds, branch.sums.op_seconds))
        closed.remove(chosen)
        if chosen.lines <= left:
            chosen.open = True
            left -= chosen.lines
            closed += chosen.branches.values()


def _cut(root: Branch) -> None:
    """Leave out the lines of ops with the least time where there are too many, and then the innermost modules."""
    order = sorted((row for branch in root.walk() for row in branch.rows), key=lambda row: -row.seconds)
    modules = sum(1 for _ in root.walk())
    kept = {id(row) for row in order[: max(TREE_LINES - modules, TREE_LINES // 4)]}
    for branch in root.walk():
        shown = [row for row in branch.rows if id(row) in kept]
        branch.hidden += len(branch.rows) - len(shown)
        branch.rows = shown
    room = TREE_LINES
    level = [root]
    while level:
        below = sorted((each for branch in level for each in branch.branches.values()), key=lambda branch: -branch.sums.seconds)
        dropped = {id(each) for each in below[room:]}
        for branch in level:
            for name, each in list(branch.branches.items()):
                if id(each) in dropped:
                    branch.hidden += sum(1 + inner.hidden + len(inner.rows) for inner in branch.branches.pop(name).walk())
        level = below[:room]
        room -= len(level)


@dataclass(frozen=True)
class OpBar:
    """One op of the first table: seconds and calls by compute dtype, and seconds in casts."""

    op: str
    seconds: dict[str, float]
    calls: dict[str, int]
    cast_seconds: float

    @property
    def total(self) -> float:
        """Return all its seconds."""
        return sum(self.seconds.values()) + self.cast_seconds


def op_bars(rows: Iterable[Row]) -> list[OpBar]:
    """Return the ops with most time, most first; those that are left are one bar, "n others"."""
    bars = sorted(_bars(rows, lambda row: row.op), key=lambda bar: (-bar.total, -sum(bar.calls.values())))
    if len(bars) <= _BARS + 1:
        return bars
    names = {bar.op for bar in bars[_BARS:]}
    (others,) = _bars([row for row in rows if row.op in names], lambda row: f"{len(names)} others")
    return [*bars[:_BARS], others]


def _bars(rows: Iterable[Row], named: Callable[[Row], str]) -> list[OpBar]:
    found: dict[str, OpBar] = {}
    for row in rows:
        bar = found.setdefault(named(row), OpBar(named(row), {}, {}, 0.0))
        dtype = row.compute or "other"
        bar.seconds[dtype] = bar.seconds.get(dtype, 0.0) + row.op_seconds
        bar.calls[dtype] = bar.calls.get(dtype, 0) + row.calls
        found[bar.op] = OpBar(bar.op, bar.seconds, bar.calls, bar.cast_seconds + row.cast_seconds)
    return list(found.values())


@dataclass(frozen=True)
class TimePart:
    """A part of the whole time: "bfloat16", ..., or "casts"."""

    name: str
    seconds: float


def parts(rows: Iterable[Row]) -> list[TimePart]:
    """Return where the time went: into ops by compute dtype, and into casts."""
    found: dict[str, float] = {}
    for row in rows:
        dtype = row.compute or "other"
        found[dtype] = found.get(dtype, 0.0) + row.op_seconds
    casts = sum(row.cast_seconds for row in rows)
    return [TimePart(name, found[name]) for name in sorted(found) if found[name]] + ([TimePart("casts", casts)] if casts else [])


def cast_places(report: Report) -> list[Row]:
    """Return the lines of the program that spent most time in casts."""
    return [row for row in report.grouped("line", "cast_seconds")[:_PLACES] if row.casts]


def modules_of(report: Report, row: Row) -> str:
    """Return the modules in which the calls of a row of `cast_places()` were made; "layer.*.dense (12 modules)" for repeated ones."""
    known = [getattr(row, name) for name in GROUPS["line"]]
    return in_short(each.module for each in report.rows if [getattr(each, name) for name in GROUPS["line"]] == known)


def in_short(modules: Iterable[str]) -> str:
    """Return the names of modules, those that differ in a number taken together."""
    found: dict[str, set[str]] = {}
    for path in modules:
        found.setdefault(pattern(path), set()).add(path)
    return some([(next(iter(kept)) or OUTSIDE) if len(kept) == 1 else f"{same} ({len(kept)} modules)" for same, kept in found.items()], 2)


def verdict(report: Report, sums: Row) -> str:
    """Return what was seen, in a sentence."""
    if all(row.rule in (BYPASSED, UNLISTED) for row in report.rows):
        return f"No policy decided any of {count(sums.calls, 'call')}: all ran as torch has them."
    dtypes = sorted({policy["dtype"] for policy in report.policies})
    low = sum(row.calls for row in report.rows if row.compute in dtypes)
    casts = f"; casts took {share(sums.cast_seconds, sums.seconds)} of the time in ops and casts" if sums.seconds else ""
    return f"{low:,} of {sums.calls:,} call{'s' if sums.calls != 1 else ''} computed in {' or '.join(dtypes)}{casts}."


def headline(report: Report) -> str:
    """Return which op, and which line, spent most time in casts; "" where none was made."""
    ops = sorted(_bars(report.rows, lambda row: row.op), key=lambda bar: -bar.cast_seconds)
    whole = sum(bar.cast_seconds for bar in ops)
    if not whole:
        return ""
    named = [f"{bar.op} ({share(bar.cast_seconds, whole)})" for bar in ops[:3] if bar.cast_seconds >= 0.05 * whole]
    lines: dict[tuple[str, str, int], list[Row]] = {}
    for row in report.rows:
        lines.setdefault((row.op, row.file, row.line), []).append(row)  # calls in several dtypes and modules
    (op, path, line), rows = max(lines.items(), key=lambda found: sum(row.cast_seconds for row in found[1]))
    file = path.replace("\\", "/").rpartition("/")[2]
    return (
        f"Most cast time: {', '.join(named)}. The line with most of it: {file}:{line}, {op} in "
        f"{in_short(row.module for row in rows)}, {share(sum(row.cast_seconds for row in rows), whole)}."
    ).replace(" %", "\u00a0%")


def never_called(report: Report) -> dict[str, list[str]]:
    """Return the listed names that were never called, by list."""
    never = set(report.never_called)
    found = {}
    for cast in ("bf16", "fp32", "promote"):
        names = sorted({name for policy in report.policies for name in policy[cast]} & never)
        if names:
            found[cast] = names
    return found
