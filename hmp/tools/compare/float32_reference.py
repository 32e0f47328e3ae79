"""Every ATen op that runs, computed again in float32: on its own inputs, and on what float32 would have made of them so far.

A listener below autograd sees the ops of forward and backward with the plain tensors that they run on, so that hmp and torch
decide as they do without it. Each of these tensors has its reference, for as long as it lives.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...core.casting import each_tensor, map_tensors
from ...core.observe import Call, here, modules
from ...core.torch_private import without_torch_function
from ..aten import Facts, argument, facts, is_collective, is_point_to_point, local, run_collective, storage_address, written_by_collective
from ..model_state import States, put_back, random_state
from ..op_owners import AtenCall, OpOwners
from .distance import distance

Tensor = torch.Tensor
# FP8 data without its rounding is what its scale gives the values back from.
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDE = {**dict.fromkeys((torch.bfloat16, torch.float16, *_FP8), torch.float32), torch.complex32: torch.complex64}
_CASTS = frozenset({"_to_copy"})


Seen = Callable[[AtenCall, str, torch.dtype, float | None, float, bool], None]
Unit = tuple[str, str]  # an op, and the module that called it


class Float32Reference(OpOwners):
    """Computes each ATen op once more in float32.

    `seen` is called with each floating output of an op that computes: the call, the ATen op's name, its dtype, its distance from the same
    op in float32 (None where that cannot be computed) and from the float32 run, and whether its own error is counted in that of the op that
    it is a part of.
    """

    follows_tensors = True

    def __init__(self, seen: Seen, guarded: dict[int, list[Tensor]]) -> None:
        super().__init__()
        self._seen = seen
        self._references = WeakTensorKeyDictionary()
        self._casts = WeakTensorKeyDictionary()  # copies that an op made of its inputs → the inputs, also for its backward
        self._inside = WeakTensorKeyDictionary()  # what the op in progress has made → the same in float32
        self._received = WeakTensorKeyDictionary()  # what collectives wrote
        self._unrounded = WeakTensorKeyDictionary()  # what an op has computed in float32 and may yet round → how to report it
        self._origins = WeakTensorKeyDictionary()  # what an op has computed → where most of its error began, and how large it is
        self._node: Any = None
        self.calls: Counter[Unit] = Counter()  # of ops
        self.blame: dict[Unit, float] = {}  # the largest accumulated error that began at each
        self._guarded = guarded  # storage → tensors: what must be as before when all is over
        self.written: list[tuple[Tensor, Tensor]] = []

    def reference(self, tensor: Tensor) -> Tensor:
        """Return the float32 run's counterpart of `tensor`, of a DTensor of this process's part; what no op has made is its own."""
        tensor = local(tensor)
        found = self._known(tensor)
        return tensor.detach().to(WIDE.get(tensor.dtype, tensor.dtype)) if found is None else found

    def end(self, call: Call) -> None:
        """Count the call. After an op of hmp's what comes next takes its result as it is, rounded."""
        if call.ruled is not None or (here.call is None and not call.decided):  # else its calls are those of the ops in it
            self.calls[call.op, modules.path] += 1
        if call.ruled is None:
            return
        self._inside.clear()
        for tell in self._unrounded.values():  # it was not rounded
            tell()
        self._unrounded.clear()
        for tensor in _tensors(call.result):
            self._casts.pop(tensor, None)

    def aten(self, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the op and return its result; also compute it in float32, on the reference inputs and on the same inputs."""
        flat = _flat(args, kwargs)
        known = facts(func)
        call = self.owned(known.name)
        node = None if call.node is None else (call.node._sequence_nr(), call.node.name())
        if node != self._node:
            self._node = node
            self._inside.clear()
        if is_collective(func):
            with without_torch_function():
                return self._communicate(func, run, args, kwargs)
        if not any(isinstance(a, Tensor) or type(a) is torch.dtype for a in flat) or self._is_received(known, args):
            return run(*args, **kwargs)
        with without_torch_function():  # what is computed here isn't a call of the model's
            written = [a for at in known.writes for a in _tensors(argument(args, kwargs, at))]
            for tensor in written:
                self._before_write(tensor)
            is_written = {id(t) for t in written}
            wide = [WIDE.get(a, a) if type(a) is torch.dtype else a for a in flat]
            references = [self._stand_in(a, self._reference_of, is_written) for a in wide]
            exact = None
            if not known.is_view and self._is_low(flat):
                exact = [self._stand_in(a, lambda t: self._exact_of(t, id(t) in is_written), is_written) for a in wide]
            state = random_state(filter(torch.is_tensor, flat)) if known.is_random and not known.draws else None
        out = run(*args, **kwargs)
        with without_torch_function():
            if known.draws or known.unwritten:
                self._take_over(out)
                return out
            if known.name == "native_dropout" and args[2]:
                func, state = _Dropout(func, out[1]), None
            again = functools.partial(_again, func, args, kwargs, state)
            self._keep(func, known, call, out, written, again, references, exact, wide)
        return out

    def _communicate(self, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return a collective's own result.

        All processes do it once more with their references, so that one has what came of the others'.
        """
        written = written_by_collective(func, args)
        if is_point_to_point(func):
            for tensor in written:
                self._references.pop(tensor, None)  # it stands for itself when its values are there
            return run_collective(func, args, kwargs, run)
        for tensor in written:
            self._before_write(tensor)
        own = {id(tensor) for tensor in written}
        references = map_tensors(args, lambda tensor: self._stand_in(tensor, self._reference_of, own))
        out = run_collective(func, args, kwargs, run)
        again = run_collective(func, references, kwargs)
        for tensor, reference in zip(_tensors(out), _tensors(again), strict=True):
            if _has_reference(tensor):
                self._references[tensor] = reference
        self._received.update(dict.fromkeys(written, True))
        return out

    def _is_received(self, known: Facts, args: Any) -> bool:
        """Return True if the op writes the result of a collective that is there: those of gloo write it at each wait."""
        if known.name != "copy_" or args[0] not in self._received or args[1] in self._references:
            return False
        return torch.equal(args[0], args[1])

    def _keep(  # noqa: PLR0913
        self, func: Any, known: Facts, call: AtenCall, out: Any, written: list[Tensor], again: Any, references: Any, exact: Any, wide: Any
    ) -> None:
        made = _tensors(out)
        reference_outs = again(references, made)
        if reference_outs is None:
            # torch has no such op in float32: the reference goes on from here with the values that there are
            self._take_over(out)
            return
        writes_only = bool(written) and not func._schema.returns
        if exact is None or known.takes_workspace or writes_only:
            exact_outs = None
        elif all(map(operator.is_, exact, references)):  # as where a weight is cast: nothing has been rounded before
            exact_outs = reference_outs
        else:
            exact_outs = again(exact, made)
        if writes_only:
            made, reference_outs = written, [self.reference(t) for t in written]
        if known.is_view:
            self._keep_views(func, made, reference_outs, wide, again)
            return
        held = {id(t) for t in written}
        for tensor, reference, in_float32 in zip(made, reference_outs, exact_outs or [None] * len(made), strict=True):
            if tensor.is_floating_point() or tensor.is_complex():
                if id(tensor) not in held:
                    self._references[tensor] = reference
                self._keep_result(known, call, tensor, reference, in_float32, exact is None, wide)
            elif known.has_workspace and tensor.dtype is torch.uint8:
                self._references[tensor] = reference

    def _keep_result(
        self, known: Facts, call: AtenCall, tensor: Tensor, reference: Tensor, in_float32: Tensor | None, is_exact: bool, given: list[Any]
    ) -> None:
        """Keep what the op gives in float32 of the same inputs, and count how far its own result is from that and from the reference.

        `is_exact`: no input is in a low-precision dtype, so that the op's own result is what float32 gives.
        """
        is_inside, first = here.call is not None, given[0]
        # a product that was computed in float32 is reported where it is rounded, as the kernel's would be
        rounded = self._unrounded.pop(first, None) if known.name in _CASTS and isinstance(first, Tensor) else None
        # the error of a copy that the op made of its input is part of the op's own
        is_part = known.name in _CASTS and is_inside and rounded is None
        if in_float32 is not None and (is_inside or call.node is not None):
            (self._casts if is_part else self._inside)[tensor] = in_float32
        if tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel():
            accumulated = distance(tensor, reference)
            if in_float32 is None:
                own = 0.0 if is_exact else None
            else:
                own = accumulated if in_float32 is reference else distance(tensor, in_float32)
            self._trace(call, tensor, own, accumulated, given)
            name = known.name if rounded is None else rounded.args[1]
            tell = functools.partial(self._seen, call, name, tensor.dtype, own, accumulated, is_part)
            computes_wide = in_float32 is not None and is_inside and tensor.dtype is torch.float32 and _may_be_rounded(call)
            if computes_wide and not is_part:
                self._unrounded[tensor] = tell
            elif not (computes_wide and first in self._casts):  # a low-precision copy that is widened again
                tell()

    def _trace(self, call: AtenCall, tensor: Tensor, own: float | None, accumulated: float, given: list[Any]) -> None:
        """Note where most of the tensor's error began: at this op, if its own is half of it, else where that of its inputs did."""
        found = [self._origins[t] for t in given if isinstance(t, Tensor) and t in self._origins]
        origin = max(found, key=operator.itemgetter(1), default=(None, 0.0))[0]
        if origin is None or own is None or 2 * own >= accumulated:
            origin = call.owner.op, call.owner.place.module
        self._origins[tensor] = origin, accumulated
        if call.node is None:
            self.blame[origin] = max(self.blame.get(origin, 0.0), min(accumulated, 1.0))

    def _keep_views(self, func: Any, made: list[Tensor], reference_outs: list[Tensor], wide: list[Any], again: Any) -> None:
        sources = [t for t in wide if isinstance(t, Tensor)]
        for tensor in made if sources and sources[0] in self._origins else ():
            self._origins[tensor] = self._origins[sources[0]]
        if any(t in self._references for t in sources):
            for tensor, reference in zip(made, reference_outs, strict=True):
                if tensor.is_floating_point() or tensor.is_complex():
                    self._references[tensor] = reference
        for store in (self._casts, self._inside):
            if any(t in store for t in sources):
                outs = again([self._stand_in(a, lambda t: store.get(t, t)) for a in wide], made)  # noqa: B023
                for tensor, exact in zip(made, outs or (), strict=False):
                    store[tensor] = exact

    def _known(self, tensor: Tensor) -> Tensor | None:
        """Return the reference of `tensor`, or None.

        For a view that was made unobserved it is the same view of the reference of its base.
        """
        found: Tensor | None = self._references.get(tensor)
        if found is None and tensor._base is not None:
            found = self._in_base(tensor, tensor._base)
            if found is not None:
                self._references[tensor] = found
        return found

    def _in_base(self, tensor: Tensor, base: Tensor) -> Tensor | None:
        """Return the view of the base's reference that `tensor` is of the base, or None."""
        whole: Tensor | None = self._references.get(base) if base.dtype is tensor.dtype else None
        if whole is None or whole.stride() != base.stride():
            return None
        return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset() - base.storage_offset() + whole.storage_offset())

    def _reference_of(self, tensor: Tensor) -> Tensor:
        found = self._known(tensor)
        return tensor.to(WIDE[tensor.dtype]) if found is None and tensor.dtype in WIDE else tensor if found is None else found

    def _exact_of(self, tensor: Tensor, is_written: bool) -> Tensor:
        found: Tensor | None = self._inside.get(tensor)
        if found is None:
            found = self._casts.get(tensor)
        if found is None:
            found = tensor.to(WIDE[tensor.dtype]) if tensor.dtype in WIDE else tensor
        return found.clone() if is_written and (tensor.dtype not in WIDE or found is not tensor) else found

    def _stand_in(self, value: Any, of: Callable[[Tensor], Tensor], written: set[int] = frozenset()) -> Any:  # type: ignore[assignment]
        if not isinstance(value, Tensor):
            return value
        if _has_reference(value):
            return of(value)
        return value.clone() if id(value) in written else value  # a counter counts once

    def _is_low(self, flat: list[Any]) -> bool:
        return any(
            (a.dtype in WIDE or a in self._inside or a in self._casts) if isinstance(a, Tensor) else type(a) is torch.dtype and a in WIDE
            for a in flat
        )

    def _before_write(self, tensor: Tensor) -> None:
        """Give what is written a reference of its own, and remember what is the model's."""
        owners = self._guarded.pop(storage_address(tensor), ())
        self.written.extend((owner, owner.detach().clone()) for owner in owners)
        if self._known(tensor) is not None or not _has_reference(tensor):
            return
        base, found = tensor._base, None
        if base is not None and base.dtype is tensor.dtype:
            if base not in self._references:
                self._references[base] = base.detach().to(WIDE.get(base.dtype, base.dtype), copy=True)
            found = self._in_base(tensor, base)
        self._references[tensor] = tensor.detach().to(WIDE.get(tensor.dtype, tensor.dtype), copy=True) if found is None else found

    def _take_over(self, out: Any) -> None:
        """Copy the values of these tensors into their references."""
        for tensor in _tensors(out):
            if _has_reference(tensor):
                found = self._references.get(tensor)
                if found is not None and found.shape == tensor.shape:
                    found.copy_(tensor)
                else:
                    self._references[tensor] = tensor.to(WIDE.get(tensor.dtype, tensor.dtype), copy=True)


def _may_be_rounded(call: AtenCall) -> bool:
    ruled = call.owner.ruled
    return ruled is not None and ruled.facts.needs_instructions and ruled.rule.calls is None


class _Dropout:
    """Dropout with a mask that is drawn already."""

    def __init__(self, func: Any, mask: Tensor) -> None:
        self._schema = func._schema
        self._mask = mask

    def __call__(self, values: Tensor, p: float, train: bool) -> tuple[Tensor, Tensor]:
        return values * self._mask * (0.0 if p == 1 else 1 / (1 - p)), self._mask


def _has_reference(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.uint8


def _flat(args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments one by one, those in lists too: an ATen op takes no deeper ones."""
    return [each for value in (*args, *kwargs.values()) for each in (value if type(value) in (list, tuple) else (value,))]


def _filled(args: Any, kwargs: Any, values: list[Any]) -> tuple[Any, Any]:
    """Arguments like these, with `values` in the places of what `_flat` found."""
    left = iter(values)

    def fill(value: Any) -> Any:
        return type(value)(itertools.islice(left, len(value))) if type(value) in (list, tuple) else next(left)

    return tuple(fill(value) for value in args), {name: fill(value) for name, value in kwargs.items()}


def _again(func: Any, args: Any, kwargs: Any, state: States | None, values: list[Any], made: list[Tensor]) -> list[Tensor] | None:
    """Return the tensors that `func` makes of `values` instead of its arguments; None if torch cannot or they do not fit `made`."""
    args, kwargs = _filled(args, kwargs, values)
    if "half_to_float" in (a.name for a in func._schema.arguments):
        # the flag widens what is low; here nothing is
        args = (*args[:2], False)
    after = None
    if state is not None:
        after = random_state(filter(torch.is_tensor, values))
        put_back(state)
    try:
        outs = _tensors(func(*args, **kwargs))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError):
        return None
    finally:
        if after is not None:
            put_back(after)
    fits = len(outs) == len(made) and all(a.shape == b.shape for a, b in zip(outs, made, strict=True) if a.dtype is not torch.uint8)
    return outs if fits else None


def _tensors(value: Any) -> list[Tensor]:
    return list(each_tensor((value,)))
