"""The kinds of lists that a policy may have: BF16, FP32 and promote, and those that plug-ins add.

A kind of list is a `ListKind`, and `add()` is all that brings one in: its file in a policy's folder, the argument of `convert()` and of
`Policy`, the option of `hmp run`, its place in explain(), `hmp check` and reports follow. The core adds its own three in the same way.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import HmpError
from . import locks

if TYPE_CHECKING:
    import torch

    from .observe import Call
    from .policy.entries import ListEntry
    from .policy.policy import Policy
    from .rules.op import CastRule, Op, OpUnderRule

GROUP = "hmp.lists"  # the group of entry points by which an installed distribution brings its kinds


class WordFile(NamedTuple):
    """One word of a policy that says how the ops of a list are done: a field of the policy, and a file of its own in a folder.

    Args:
        field: The policy's field: "stochastic_bits".
        file: The file: "bits.txt".
        allowed: What it may hold; the first is meant where there is no such file.
        title: What `Policy.diff()` calls the field: "(stochastic bits)". No name of an op.
    """

    field: str
    file: str
    allowed: tuple[str, ...]
    title: str


def _nothing(*_: Any) -> str:
    return ""


@dataclass(frozen=True, eq=False, kw_only=True)
class SearchLevel:
    """A step down that hmp.tune() may try: as many ops as the tolerance allows move to the list.

    Args:
        gains: What an op gains on the list: "seconds", "bytes", or what is counted, such as "matrix multiplication FLOPs".
        changes: What is changed that an op's place in the order depends on: "the loss", or "the saved activations".
        objective: The word of tune(objective=) that means "memory" with this level; "" where tune(levels=) asks for it by the list's name.
        ops: The ops that may move to the list; None for all.
        gain: For a list that decides: gets torch's function, the op, the arguments and the policy, and returns what the call gains on the
            list, and of how much.
        recording: For a list that adds: gets the function that gives the name for a module's path, and returns a listener whose `rows()`
            have `op`, `module`, `nbytes` without the list, those `left` with it, and the relative `error`.
        words: Fields of the policy that say how the ops of the list are done.
        shows: Gets the objective, the policy and the device, and says whether a step there costs less for being on the list. Else what
            gains most within the tolerance is taken, however much it costs: an emulated step takes longer.
    """

    gains: str
    changes: str = "the loss"
    objective: str = ""
    ops: Collection[str] | None = None
    gain: Callable[[Op, str, tuple[Any, ...], dict[str, Any], Policy], tuple[float, float]] | None = None
    recording: Callable[[Callable[[str], str]], Any] | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    shows: Callable[[str, Policy, torch.device], bool] = lambda objective, policy, device: True


@dataclass(frozen=True, eq=False, kw_only=True)
class ListKind:
    """What a kind of list is.

    Args:
        name: Its name: `NAME.txt` in a folder, `Policy(NAME={...})`, `convert(NAME_file_path=...)`, `hmp run --list NAME=FILE`.
        title: What messages call the list: "stochastic" for "the stochastic list".
        contents: Which ops are on it, for helps: "ops whose results are rounded stochastically".
        module: The module that adds it, `__name__` there: a list that a policy saves names it, and torch.compile compiles none of its code.
        rule: The rule of the ops on it. A list that `adds` needs one for those that no other list names.
        adds: Whether it adds to what is done with an op, whatever list decides what that computes in. Else it decides that, and of the
            lists that do one names an op.
        over: The lists that it comes before, where both name an op.
        excludes: The lists that may not name an op of it.
        instead: The list whose rule an op on it has where `rule` does not hold for the op: "bf16"; "" for none.
        is_low: Whether its ops compute with inputs in a low-precision dtype.
        computes_in: Dtypes that its ops may compute in besides that of its rule.
        words: The words that say how its ops are done.
        aliases: Further words for it in the names of files: "random" for "ops_random.txt".
        is_optional: Whether most policies have no such list: then it is not written where it is empty.
        takes_functions: Whether it may name users' own functions.
        refusal: Gets an entry and the ids of the ops that it means, and says why the list can't have it; "" where it can.
        every_op: Returns the ops that `*` means on it; None for all that torch computes with.
        needs: Raises HmpError where this torch, or this machine, cannot do what the list asks for.
        described: Gets the policy, and says how its ops are done: "stochastic bits 8"; for the policy's text.
        explained: Gets an op, the entry that puts it on a list that `adds`, and the policy: the line that explain() prints.
        without_effect: What `hmp check` says of an entry of a list that `adds` for an op that its `*` would not mean.
        around: For a list that `adds`: gets the function that computes the op, and the op under its rule, whose `words` are those of the
            policy; returns the function to call in its place.
        around_cast: For a list that `adds`: gets the function that casts, and returns the one to call in its place.
        columns: What a call adds to its row of a report, and to a policy's of hmp.benchmark(), by the column's name: each function gets the
            finished call and returns a number.
        report: Makes the part of a report that is the list's own; see `hmp.tools.record.rows.ReportPart`.
        level: How hmp.tune() tries the list; None where it does not.
    """

    name: str
    title: str
    contents: str
    module: str
    rule: CastRule
    adds: bool = False
    over: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    instead: str = ""
    is_low: bool = False
    computes_in: tuple[torch.dtype, ...] = ()
    words: tuple[WordFile, ...] = ()
    aliases: tuple[str, ...] = ()
    is_optional: bool = True
    takes_functions: bool = False
    refusal: Callable[[ListEntry, tuple[str, ...]], str] = _nothing
    every_op: Callable[[], Collection[str]] | None = None
    needs: Callable[[], object] = _nothing
    described: Callable[[Policy], str] = _nothing
    explained: Callable[[str, ListEntry, Policy], str] = _nothing
    without_effect: str = "has no effect"
    around: Callable[[Op, OpUnderRule], Op] | None = None
    around_cast: Callable[[Any], Any] | None = None
    columns: Mapping[str, Callable[[Call], float]] = field(default_factory=dict)
    report: Callable[[], Any] | None = None
    level: SearchLevel | None = None

    @property
    def file(self) -> str:
        """Return the name of its file in a policy's folder."""
        return f"{self.name}.txt"

    @property
    def argument(self) -> str:
        """Return the argument of `convert()` that takes the path of such a list."""
        return f"{self.name}_file_path"


def _load_installed() -> None:
    from importlib.metadata import entry_points  # here, since it takes longer to import than all of this module

    for point in entry_points(group=GROUP):
        point.load()


_kinds: tuple[ListKind, ...] = ()  # those that decide first, each before what it comes over; then those that add
_labels: dict[str, CastRule] = {}  # the rules that reports and logs call by a word
_providers: list[Callable[[], object]] = [_load_installed]  # what is called when somebody first asks for the kinds
_lock = locks.RLock()


def add(kind: ListKind) -> None:
    """Add a kind of list. To be called when the plug-in's module is imported, before a policy that has such a list is made.

    Args:
        kind: The kind of list.

    Raises:
        HmpError: There is one of that name or file already, or another rule has the label of its rule.

    Example:
        See "A list of your own kind" in the manual.
    """
    global _kinds
    with _lock:
        taken = {known.name for known in _kinds} | {word.field for known in _kinds for word in known.words}
        for name in (kind.name, *(word.field for word in kind.words)):
            if name in taken:
                raise HmpError(f"lists.add(): there is a list or a word {name!r} already; choose another name")
        if not kind.name.isidentifier():
            raise HmpError(f"lists.add(): expected a name such as 'stochastic', got {kind.name!r}")
        add_rule(kind.rule)
        at = next((at for at, known in enumerate(_kinds) if known.name in kind.over or (known.adds and not kind.adds)), len(_kinds))
        _kinds = (*_kinds[:at], kind, *_kinds[at:])


def add_rule(rule: CastRule) -> None:
    """Note a rule, of which reports and logs print the label. Raise HmpError if another rule has the same one."""
    if rule.label and _labels.setdefault(rule.label, rule) is not rule:
        raise HmpError(f"expected a label that no other rule has, got {rule.label!r} of {rule.name}; {_labels[rule.label].name} has it")


def provide(*modules: str) -> None:
    """Name modules that add kinds of lists when they are imported, which is when somebody first asks for the kinds."""
    _providers[:0] = [functools.partial(importlib.import_module, module) for module in modules]


def kinds() -> tuple[ListKind, ...]:
    """Return all kinds of lists: those that decide what an op computes in, by precedence, then those that add to that."""
    if _providers:
        with _lock:
            while _providers:
                _providers.pop(0)()
    return _kinds


def names() -> tuple[str, ...]:
    """Return the names of all kinds of lists."""
    return tuple(kind.name for kind in kinds())


def deciding() -> tuple[str, ...]:
    """Return the names of the lists of which one decides what an op computes in, by precedence."""
    return tuple(kind.name for kind in kinds() if not kind.adds)


def adding() -> tuple[ListKind, ...]:
    """Return the kinds of lists that add to what is done with an op."""
    return tuple(kind for kind in kinds() if kind.adds)


def low() -> tuple[str, ...]:
    """Return the names of the lists whose ops compute with inputs in a low-precision dtype."""
    return tuple(kind.name for kind in kinds() if kind.is_low)


def for_functions() -> tuple[str, ...]:
    """Return the names of the lists that may name users' own functions."""
    return tuple(kind.name for kind in kinds() if kind.takes_functions)


def kind_of(name: str) -> ListKind:
    """Return the kind of list of that name. Raise HmpError where it is not installed."""
    found = next((kind for kind in kinds() if kind.name == name), None)
    if found is None:
        raise HmpError(missing(name))
    return found


def missing(name: str) -> str:
    """Return the message for a list of a kind that is not installed."""
    return (
        f"no kind of list {name!r} is installed, expected one of {', '.join(names())}; import the module that adds it with "
        f"hmp.core.lists.add(), or, which hmp's commands need, install a package with an entry point for it in the group {GROUP!r}"
    )


def columns() -> dict[str, Callable[[Call], float]]:
    """Return the columns that the kinds of lists bring, by name: what a call adds."""
    return {name: of for kind in kinds() for name, of in kind.columns.items()}


def words() -> Iterator[WordFile]:
    """Yield the words that the kinds of lists bring."""
    for kind in kinds():
        yield from kind.words
