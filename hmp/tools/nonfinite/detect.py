"""detect_nonfinite(): the first op, forward or backward, that turned finite numbers into NaN or Inf.

The finder looks at the results of every ATen op, and at the arguments of those whose results are not finite.
"""

from __future__ import annotations

import cmath
import contextlib
import sys
import types
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from ...core.casting import LOW, each_tensor, has_values
from ...core.log import PACKAGES, log
from ...core.observe import Call, here, listen, modules
from ...core.rules.overflow import takes_masks
from ...core.torch_patches.module_calls import applied_policy, matches
from ...core.torch_private import memory_of, storage_of, tree_leaves, tree_map
from ...errors import HmpError, NonFiniteError
from ..aten import Facts, argument, facts, is_collective, refuse_xla, run_collective, storage_address, written_by_collective
from ..compare.distance import widened
from ..model_state import random_state_kept
from ..op_owners import AtenCall, OpOwners
from .finding import Finding, FindingKind, find, made

Tensor = torch.Tensor
FLOATS = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2}
)
# A finite extreme stands for an infinity: `finfo(dtype).min` in masks.
EXTREMES = tuple(torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16, torch.float32))
_OUTSIDE = "a tensor from outside, such as the batch"
_SCALER = "grad_scaler.py"
_OF_SCALER = frozenset({"_amp_update_scale_", "_amp_foreach_non_finite_check_and_unscale_"})


def detect_nonfinite(
    on_find: Literal["raise", "log"] = "raise", *, ignore: Collection[str] = ()
) -> contextlib.AbstractContextManager[list[Finding]]:
    """Find the first op that makes NaN or Inf out of finite arguments, in forward or backward; context manager and decorator.

    It works under hmp's casts, under torch.autocast and in plain torch. If bmm makes an Inf, and softmax a NaN out of it, bmm is the
    finding. A NaN in the data or in a parameter is reported when an op first computes with it. Not reported are:

    - infinities that the program writes (masks, fills for sampling), and uninitialised memory;
    - values that an op or its backward makes and then masks itself (the norm of zero);
    - Inf computed from integers (the log of a position 0), until it becomes a NaN;
    - overflows in backward if the GradScaler skips the step.

    A NaN that comes only from infinities that the program wrote is logged as a warning.

    Each process watches its own ops, and a finding has its `rank`. If one process raises, the others wait in their next collective until
    torchrun or torch.multiprocessing.spawn ends them.

    Only ops of the thread that entered are watched, and no values inside a kernel; compiled models run uncompiled. Each op's results are
    read once, which synchronises with a GPU.

    Args:
        on_find: "raise" stops at the first finding; "log" logs each as an error of the logger `hmp`, and continues.
        ignore: Op names, as findings have them, and globs over module paths, such as "masked_fill" and "*.mask", in which Inf is intended.
            A glob also covers the modules inside. A NaN is still reported.

    Returns:
        A context manager that gives the list of the findings so far, one for each op and line.

    Raises:
        NonFiniteError: With `.finding`, raised where the op ran.
        HmpError: `on_find` or `ignore` is invalid.

    Example:
        >>> x = torch.zeros(2)
        >>> with hmp.detect_nonfinite("log") as findings:
        ...     y = 1 / x
        >>> findings[0].made
        'Inf'
    """
    if on_find not in ("raise", "log"):
        raise HmpError(f'on_find= expected "raise" (stop at the first finding) or "log" (log each and continue), got {on_find!r}')
    if isinstance(ignore, str) or not isinstance(ignore, Collection) or not all(isinstance(each, str) for each in ignore):
        raise HmpError(f'ignore= expected a list of op names and globs over module paths, such as ["*.mask", "exp"], got {ignore!r}')
    return _Detection(on_find, ignore)


class _Detection(contextlib.ContextDecorator, contextlib.AbstractContextManager[list[Finding]]):
    """The context. Each call of a function that it decorates has one of its own."""

    def __init__(self, on_find: str, ignore: Collection[str]) -> None:
        self._on_find, self._ignored = on_find, ignore

    def _recreate_cm(self) -> _Detection:
        return _Detection(self._on_find, self._ignored)

    def __enter__(self) -> list[Finding]:
        self._findings: list[Finding] = []
        self._said: set[Any] = set()
        self._finder = NonfiniteFinder(self._report, self._ignored)
        self._listening = listen(self._finder)
        self._listening.__enter__()
        return self._findings

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self._listening.__exit__(kind, error, trace)
        if error is None:
            self._finder.close()
        elif isinstance(error, NonFiniteError):
            error.__traceback__ = _to_users_line(trace)

    def _report(self, finding: Finding) -> None:
        key = (finding.kind, finding.op, finding.aten, finding.direction, finding.module, finding.file, finding.line, finding.source)
        if key in self._said:
            return
        self._said.add(key)
        finding = replace(finding, rank=_rank_of_several())
        self._findings.append(finding)
        if self._on_find == "raise":
            raise NonFiniteError(str(finding), finding)
        log.error("%s", finding)


def _to_users_line(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback without hmp's frames, up to the user's last one. Python 3.10 shows all of them nevertheless."""
    frames: list[types.TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    shown = None
    for each in reversed(frames):
        if not each.tb_frame.f_code.co_filename.startswith(PACKAGES if shown is None else PACKAGES[0]):
            shown = types.TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown


def _rank_of_several() -> int | None:
    """Return the rank of this process, None where there is no other."""
    group = torch.distributed
    return group.get_rank() if group.is_available() and group.is_initialized() and group.get_world_size() > 1 else None


OriginKind = Literal["known", "pending", "inside", "outside"]


@dataclass(frozen=True)
class Origin:
    """Where the NaN or Inf in some memory comes from.

    It is known (the user wrote it, nobody wrote the memory, its finding was reported or waits for the GradScaler), pending (not yet known
    to matter), inside of what made it, or came in from outside. `received` is memory that a collective wrote.
    """

    kind: OriginKind
    finding: Finding | None = None
    source: str = ""
    received: bool = False


@dataclass(eq=False)
class Held:
    """A finding inside a call or an autograd node that has not ended.

    Whether it is one for the GradScaler, depends on memory that was written in place, and was computed with, as in `1 / inf`.
    """

    finding: Finding
    waits: bool
    in_place: bool
    used: bool = False


class NonfiniteFinder(OpOwners):
    """Looks at the results of each ATen op.

    `report` is called with each finding, and may raise; an Inf of an op or a module that `ignore` names counts as written.
    """

    def __init__(self, report: Callable[[Finding], None], ignore: Collection[str]) -> None:
        super().__init__()
        self._ignored = ignore
        self._report = report
        self._origins: dict[int, tuple[StorageWeakRef, Origin]] = {}
        self._of_integers = WeakTensorKeyDictionary()  # floating tensors that were computed from integers and nothing else
        self._scaled = False
        self._waiting: list[Finding] = []
        self._held: list[Held] = []
        self._unit: Any = None  # what is judged by what comes out of it: a call of a torch function, a node of autograd's
        self._warned: set[Any] = set()
        # the last result of an op that may yet be rounded, what made it, and of what
        self._unrounded: tuple[Tensor, Facts, list[Tensor]] | None = None
        self._models: WeakSet[torch.nn.Module] = WeakSet()  # the outermost modules that have run

    def close(self) -> None:
        """Handle the end of the context: what waited for a GradScaler that did not come is a finding."""
        self._unit_ended()
        self._settle(skipped=False)

    def entered(self, module: torch.nn.Module) -> None:
        """Note an outermost module."""
        if len(modules.running) == 1:
            self._models.add(module)

    def aten(self, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the op's own result, which was looked at."""
        known = facts(func)
        call = self.owned(known.name)
        unit = call.node if call.node is not None and not call.by_user else here.function
        if unit is not self._unit:
            self._unit_ended()
            self._unit = unit
        if is_collective(func):
            return self._communicate(func, run, args, kwargs)
        if known.is_view:
            out = run(*args, **kwargs)
            self._follow_integers(known, tree_leaves((args, kwargs)), out)
            return out
        if known.name == "copy_" and getattr(self._origin(args[0]), "received", False) and self._origin(args[1]) is None:
            return run(*args, **kwargs)  # a collective of gloo's writes its result at each wait
        written = list(each_tensor(argument(args, kwargs, at) for at in known.writes))
        positions = [at for at in known.writes if not isinstance(at, str)] if known.reads_written else []
        read = list(each_tensor(argument(args, kwargs, at) for at in positions))
        odd_before = {id(t): _has_nan(t) for t in read if not _is_finite(t)}
        out = run(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        self._follow_integers(known, leaves, out)
        if known.name == "_amp_update_scale_":  # its arguments: scale, growth_tracker, found_inf, ...
            # at scale 1 it is no longer the scale that overflows
            self._settle(skipped=bool(args[2]) and float(args[0]) >= 1.0)
            self._scaled = False
        if known.name in _OF_SCALER:
            return out
        if known.unwritten or (known.name == "all_gather_copy_in" and all(map(_is_finite, args[0]))):  # FSDP's: what is to be gathered
            self._mark(each_tensor((out,)), Origin("known"))
            return out
        if not self._scaled and known.name == "mul" and _inside_scaler():
            self._scaled = True
        results = list(each_tensor((out,))) or written
        odd = [t for t in results if not _is_finite(t)]
        self._note_unrounded(call, known, leaves, results)
        if self._held and not odd:
            self._went_away(known, leaves, written, results)
        if odd:
            unread = {id(t) for t in written} - {id(t) for t in read}
            self._look(call, func, args, kwargs, unread, odd_before, odd)
        return out

    def _note_unrounded(self, call: AtenCall, known: Facts, leaves: list[Any], results: list[Tensor]) -> None:
        ruled = call.owner.ruled
        if ruled is None or not ruled.facts.needs_instructions:
            self._unrounded = None
        elif results and not known.moves:
            self._unrounded = results[0], known, [t for t in leaves if isinstance(t, Tensor)]

    def _communicate(self, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return a collective's own result. What came from other ranks is theirs to find; what this one sent comes back to it."""
        sent = [self._origin(t) for t in each_tensor((args, kwargs)) if not _is_finite(t)]
        origin = next((each for each in sent if each is not None and each.finding is not None), Origin("known"))
        out = run_collective(func, args, kwargs, run)
        self._mark([*written_by_collective(func, args), *each_tensor((out,))], replace(origin, received=True))
        for each in self._held:
            each.in_place |= each.finding is origin.finding
        return out

    def _look(
        self, call: AtenCall, func: Any, args: Any, kwargs: Any, unread: set[int], before: dict[int, bool], odd: list[Tensor]
    ) -> None:
        """Results are not finite: why."""
        known, ignored, leaves = facts(func), set(unread), tree_leaves((args, kwargs))
        if known.name in ("addmm", "baddbmm", "addbmm", "addmv", "addr") and kwargs.get("beta", 1) == 0:
            ignored.add(id(args[0]))  # torch reads nothing of it
        made_here = {id(t) for t in odd}
        inputs = [t for t in leaves if isinstance(t, Tensor) and t.dtype in FLOATS and id(t) not in ignored]
        bad = [t for t in inputs if (id(t) in before if id(t) in made_here else not _is_finite(t))]
        has_nan = any(_has_nan(t) for t in odd)
        ruled = call.owner.ruled
        quantises = ruled is not None and ruled.rule.hides_dtypes  # which makes NaN of Inf by that number, and nobody wrote it
        if known.draws or (any(isinstance(a, (float, complex)) and not cmath.isfinite(a) for a in leaves) and not quantises):
            self._mark(odd, Origin("known"))
        elif not bad:
            is_low = any(t.dtype in LOW for t in (*inputs, *odd))
            in_float32 = _made_in_float32(func, args, kwargs) if is_low and not known.writes else None
            self._made(call, known, inputs, odd, has_nan, in_float32)
        else:
            nan_came = any(before[id(t)] if id(t) in made_here else _has_nan(t) for t in bad)
            self._handed_on(call, known, inputs, bad, odd, has_nan and not nan_came, nan_came)

    def _made(self, call: AtenCall, known: Facts, inputs: list[Tensor], odd: list[Tensor], has_nan: bool, in_float32: str | None) -> None:
        rounded, of_product, of_inputs = self._unrounded or (None, known, inputs)
        if known.name == "_to_copy" and rounded is not None and storage_address(inputs[0]) == storage_address(rounded):
            # the product overflows where it is rounded: it is reported with the inputs that it was given, which lose nothing by this
            known, inputs = of_product, [t.to(odd[0].dtype) for t in of_inputs]
        finding = find(call, known, inputs, odd, scope=self._scope(call.owner.place.module), in_float32=in_float32)
        if not has_nan and self._is_ignored(finding):
            self._mark(odd, Origin("known"))
            return
        if not has_nan and self._may_be_meant(call, known, inputs):
            self._mark(odd, Origin("pending", finding))
            return
        waits = not has_nan and self._scaled and (call.direction == "backward" or _inside_scaler())
        self._mark(odd, Origin("inside", finding))
        self._held.append(Held(finding, waits, bool(known.writes)))
        if self._unit is None:
            self._unit_ended()

    # Units: a torch function or a node of autograd's that masks what its own steps made, such as the norm of a zero, made nothing

    def end(self, call: Call) -> None:
        """Handle the end of a call of a torch function."""
        if call.ruled is not None or call.error is not None:
            return
        if self._held:
            self._judge({id(origin.finding) for origin in map(self._origin, each_tensor((call.result,))) if origin is not None})
        self._unit = None

    def _unit_ended(self) -> None:
        """Handle the end of a node, or of anything but a unit: what is still in memory came out."""
        if self._held:
            self._judge({id(each.finding) for each in self._held})

    def _judge(self, came_out: set[int]) -> None:
        """Decide the findings held so far.

        Those that were used count, and those in `came_out` or in memory written in place that are still in memory.
        """
        held, self._held = self._held, []
        alive = {id(origin.finding) for weak, origin in self._origins.values() if not weak.expired()}
        matters = [e for e in held if e.used or (id(e.finding) in alive and (e.in_place or id(e.finding) in came_out))]
        for each in held:
            kind: OriginKind = "known" if each in matters else "pending"
            for key, (weak, origin) in self._origins.items():
                if origin.finding is each.finding:
                    self._origins[key] = weak, replace(origin, kind=kind)
        for each in matters:
            if each.waits:
                self._waiting.append(each.finding)
            else:
                self._report(each.finding)

    def _went_away(self, known: Facts, leaves: list[Any], written: list[Tensor], results: list[Tensor]) -> None:
        """Results are finite: what was not was masked, or computed with."""
        if not known.moves and any(t.dtype in FLOATS for t in results):
            origins = [self._origin(t) for t in leaves if isinstance(t, Tensor)]
            inside = {id(origin.finding) for origin in origins if origin is not None and origin.kind == "inside"}
            for each in self._held:
                each.used |= id(each.finding) in inside
        for tensor in written:
            origin = self._origin(tensor)
            if origin is not None and origin.kind == "inside" and tensor.nbytes == storage_of(tensor).nbytes():
                del self._origins[memory_of(storage_of(tensor))]

    def _is_ignored(self, finding: Finding) -> bool:
        """Return True if the finding is of an op or of a module that the user has named."""
        names = self._ignored
        return finding.op in names or finding.aten in names or any(finding.module and matches(finding.module, glob) for glob in names)

    def _may_be_meant(self, call: AtenCall, known: Facts, inputs: list[Tensor]) -> bool:
        """Return True if an Inf is a mask's, or made of positions and counts and nothing else: it matters if a NaN comes of it."""
        ruled = call.owner.ruled
        if known.name == "_to_copy" and ruled is not None and takes_masks(ruled):
            return True  # hmp puts the finite extreme in its place
        if not inputs or all(t in self._of_integers for t in inputs):
            return True
        return any(float(t.detach().abs().max()) in EXTREMES for t in inputs if t.numel() and not t.is_complex())

    def _handed_on(
        self, call: AtenCall, known: Facts, inputs: list[Tensor], bad: list[Tensor], odd: list[Tensor], nan_of_inf: bool, nan_came: bool
    ) -> None:
        """Handle an argument that was not finite: the op isn't a finding, but what it got may be."""
        origins = [(t, self._origin(t)) for t in bad]
        origin = next((o for _, o in origins if o is not None and o.finding is not None), None)
        if origin is None:
            origin = next((o for _, o in origins if o is not None), None)
        if origin is None and (nan_came or nan_of_inf):
            tensor = next((t for t in bad if _has_nan(t)), bad[0])
            origin = Origin("outside" if nan_came else "known", source=self._name(tensor))
        if origin is None:
            return  # Inf came in, and went on: a mask
        if origin.kind == "inside":
            self._mark(odd, origin)
            for each in self._held:
                each.in_place |= each.finding is origin.finding and bool(known.writes)
        elif known.moves and not nan_of_inf:
            self._mark(odd, origin)
        elif origin.kind == "outside":
            source = next((name for name in (origin.source, *map(self._name, bad)) if name != _OUTSIDE), _OUTSIDE)
            came: FindingKind = "parameter" if source.startswith(("parameter", "buffer")) else "data"
            finding = find(call, known, inputs, odd, came, source=source)
            self._mark(odd, Origin("known", finding))
            self._report(finding)
        elif origin.kind == "pending" and (nan_of_inf or nan_came) and origin.finding is not None:
            self._mark(odd, Origin("known", origin.finding))
            self._report(origin.finding)
        else:
            if nan_of_inf:
                self._warn(call, origin)
            self._mark(odd, origin)

    def _warn(self, call: AtenCall, origin: Origin) -> None:
        """NaN was made of Inf: no finding of its own, and said once for each place."""
        op, place = call.owner.op, call.owner.place
        if (op, place) not in self._warned:
            self._warned.add((op, place))
            made = origin.finding
            what = "infinities in its inputs, such as a row that is masked throughout" if made is None else f"the Inf that `{made.op}` made"
            log.warning("`%s` made NaN out of %s: %s", op, what, place)

    # The GradScaler

    def _settle(self, skipped: bool) -> None:
        waiting, self._waiting = self._waiting, []
        if not skipped:
            for finding in waiting:
                self._report(finding)

    # Where the values of some memory come from

    def _mark(self, tensors: Iterable[Tensor], origin: Origin) -> None:
        if len(self._origins) > 1000:
            self._origins = {key: value for key, value in self._origins.items() if not value[0].expired()}
        for tensor in tensors:
            if storage_address(tensor):
                weak = StorageWeakRef(storage_of(tensor))
                self._origins[weak.cdata] = (weak, origin)

    def _origin(self, tensor: Tensor) -> Origin | None:
        if not storage_address(tensor):
            return None
        found = self._origins.get(memory_of(storage_of(tensor)))
        return None if found is None else found[1]

    def _follow_integers(self, known: Facts, leaves: list[Any], out: Any) -> None:
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        if tensors and all(t.dtype not in FLOATS or t in self._of_integers for t in tensors):
            for tensor in each_tensor((out,)):
                if tensor.dtype in FLOATS and not known.draws:
                    self._of_integers[tensor] = True

    def _scope(self, path: str) -> str:
        """Return the path of a module in the model that has a policy of its own, or in the outermost one; "" for that model itself."""
        for model in self._models:
            inside = dict(model.named_modules())
            if path in inside:
                parts = path.split(".")
                applied = [at for at in range(1, len(parts) + 1) if applied_policy(inside[".".join(parts[:at])]) is not None]
                return ".".join(parts[max(applied, default=0) :])
        return ""

    def _name(self, tensor: Tensor) -> str:
        """Return what a tensor is that no op has made: a parameter or buffer of the running model, or nothing of it."""
        address = storage_address(tensor)
        root = next(iter(modules.running), None)
        if root is not None and address:
            for what, named in (("parameter", root.named_parameters()), ("buffer", root.named_buffers())):
                for name, each in named:
                    if storage_address(each) == address:
                        return f"{what} `{name}` of {type(root).__name__}"
        return _OUTSIDE


def _made_in_float32(func: Any, args: Any, kwargs: Any) -> str | None:
    """Return what the op makes of its inputs in float32, as `made()` says it; None where it can't be run again."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in LOW:
            return value.float()
        return torch.float32 if isinstance(value, torch.dtype) and value in LOW else value

    args, kwargs = tree_map(wide, (args, kwargs))
    tensors = list(each_tensor((args, kwargs)))
    if not tensors or any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors):
        return None  # an op of DTensors would wait for the other ranks
    try:
        with random_state_kept(tensors[0].device):
            return made(each_tensor((func(*args, **kwargs),)))
    except Exception:  # no kernel, no memory
        return None


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype not in FLOATS or tensor.layout is not torch.strided or not has_values(tensor):
        return True
    refuse_xla(tensor.device, "detect_nonfinite()")
    tensor = widened(tensor)
    # one kernel; a sum may overflow, and then each element is asked
    return cmath.isfinite(tensor.detach().sum().item()) or bool(torch.isfinite(tensor).all())


def _has_nan(tensor: Tensor) -> bool:
    return bool(torch.isnan(widened(tensor)).any())


def _inside_scaler() -> bool:
    """Return True if GradScaler.scale() is running."""
    frame: Any = sys._getframe(2)
    for _ in range(12):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith(_SCALER) and frame.f_code.co_name in ("scale", "apply_scale"):
            return True
        frame = frame.f_back
    return False
