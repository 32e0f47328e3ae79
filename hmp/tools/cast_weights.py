"""cast_weights(): each weight of a model is stored in the dtype in which its ops use it."""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.active import disable_casts
from ..core.cast_cache import clear_cache
from ..core.casting import each_tensor
from ..core.compiler_stance import running_uncompiled
from ..core.formatting import dtype_name, share, size, some, versioned
from ..core.observe import Listener, listen
from ..core.policy import Policy
from ..core.torch_private import memory_of, storage_of
from ..errors import HmpError
from . import model_call
from .aten import Facts, argument, facts
from .model_state import preserve_state, same_bytes
from .pages.page import Cell, Page, Result, Section, Table, flow, module, nbytes

Tensor = torch.Tensor
LOW = (torch.bfloat16, torch.float16)
_MOVES = frozenset({"clone", "_lazy_clone"})  # a copy with the values of the original, and no use of them


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of a model, by its first name.

    The ops that took it, its dtype and bytes before and after, and why it stayed as it was, "" where it did not. Tied weights are one.
    """

    name: str
    ops: tuple[str, ...]
    before: str
    after: str
    bytes_before: int
    bytes_after: int
    why: str = ""


@dataclass(frozen=True, repr=False)
class CastWeights(Result):
    """What `hmp.cast_weights()` did; str() is a table, in which weights that differ by a number in their name alone share a line.

    Example:
        >>> net, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
        >>> hmp.cast_weights(net.eval(), x, "habana").to_dict()["bytes_after"]
        20
    """

    weights: tuple[Weight, ...]
    policy: str

    def __getitem__(self, name: str) -> Weight:
        for weight in self.weights:
            if weight.name == name:
                return weight
        raise KeyError(f"expected a weight of the model, got {name!r}; it has {', '.join(repr(weight.name) for weight in self.weights)}")

    @property
    def bytes_before(self) -> int:
        """Bytes of all weights before."""
        return sum(weight.bytes_before for weight in self.weights)

    @property
    def bytes_after(self) -> int:
        """Bytes of all weights after."""
        return sum(weight.bytes_after for weight in self.weights)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON values.

        Returns:
            The policy, totals, and the weights.
        """
        totals = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after}
        return versioned({"policy": self.policy, **totals, "weights": [asdict(weight) for weight in self.weights]})

    def _page(self) -> Page:
        groups: dict[tuple[Any, ...], list[Weight]] = defaultdict(list)
        for each in self.weights:
            groups[re.sub(r"(?<=\.)\d+(?=\.)", "*", each.name), each.ops, each.before, each.after, each.why].append(each)
        rows = []
        for (name, ops, before, after, why), group in groups.items():
            named = f"{name} ({len(group)})" if len(group) > 1 else group[0].name
            dtype = flow(before) if before == after else flow(before, after)
            sizes = [nbytes(sum(getattr(each, of) for each in group)) for of in ("bytes_before", "bytes_after")]
            rows.append([module(named), Cell(some(ops)), dtype, *sizes, Cell(why, "why")])
        cast = sum(each.before != each.after for each in self.weights)
        return Page(
            title="hmp cast_weights",
            verdict=f"{cast} of {len(self.weights)} weights cast; {size(self.bytes_before)} became {size(self.bytes_after)}, "
            f"{share(self.bytes_after, self.bytes_before)} of before, under policy {self.policy!r}",
            sections=[
                Section(
                    "weights", "Weights", "", [Table(("weight", "ops", "dtype", ">bytes", ">now", "stayed because"), rows, most=len(rows))]
                )
            ],
        )


def cast_weights(
    model: torch.nn.Module,
    batch: Any,
    policy: Policy | str | Path | None = None,
    *,
    only: str | None = None,
    frozen: bool = False,
) -> CastWeights:
    """Store each weight of `model`, in place, in the low-precision dtype that its ops use, for inference in half the memory.

    The model is called once with `batch`. A weight that every op uses in the same low-precision dtype is stored in that dtype. Weights that
    an op uses in float32 (norms, an embedding on no list), running statistics, and weights that the batch doesn't reach are left unchanged.
    Then the model is called again: a weight whose cast would change the outputs by a bit is left unchanged too.

    Args:
        model: The module, on any device except meta. Tied weights stay tied, and parameters stay the same objects.
        batch: The arguments of the call: a mapping as keywords, a tuple or list as positional arguments, anything else as the only one.
        policy: A Policy, a preset's name or a folder. Default: the policy applied to the model, else the active one, else "autocast". From
            then on the model has to run under it: `hmp.apply(model, policy)`.
        only: A glob, such as "lm_head.*". Only weights whose name, or whose module's path, matches are cast.
        frozen: Cast only parameters that require no gradient, and call the model with gradients enabled: for fine-tuning with LoRA.

    Returns:
        What was done to each weight, as a table to print; bytes are those of all parameters and buffers.

    Raises:
        HmpError: For anything but a module, weights that are sharded or on the meta device, a policy with empty BF16 and FP8 lists, an
            `only` that matches nothing, and a model whose outputs differ between calls. The model is then unchanged.

    Example:
        >>> net, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
        >>> result = hmp.cast_weights(net.eval(), x, "habana")
        >>> net = hmp.apply(net, "habana")
    """
    model_call.check_module(model, "cast_weights()")
    chosen = model_call.chosen_policy(model, policy)
    _refuse_without_low(chosen)
    found = _weights_of(model)
    _refuse(model, found)
    taken = {name for name in found if only is None or _matches(name, only)}
    if not taken:
        raise HmpError(f"only={only!r} matches no weight of the model; its weights are {some(list(found), 5)}")
    uses, was = _Uses(found), {name: (tensor.dtype, tensor.nbytes) for name, tensor in found.items()}
    with torch.inference_mode(mode=False):  # in which weights would become tensors that nothing can be trained with
        before = _outputs(model, batch, chosen, frozen, uses)
        uses.copies.clear()
        stays = {name: _why_not(name, tensor, uses, taken, frozen) for name, tensor in found.items()}
        dtypes = {found[name]: next(iter(uses.dtypes[name])) for name, why in stays.items() if not why}

        def is_same(tensors: list[Tensor]) -> bool:
            stored = _Stored(model, {tensor: dtypes[tensor] for tensor in tensors})
            try:
                stored.cast()
                after = _outputs(model, batch, chosen, frozen, None)
            except Exception:  # code that takes no low weights
                return False
            finally:
                stored.put_back()
            return len(before) == len(after) and all(map(_same_bits, before, after))

        kept = list(dtypes)
        if kept and not is_same(kept):
            if not is_same([]):
                raise HmpError(
                    "the model returns different numbers for the same batch, so the cast weights can't be checked; call model.eval() first"
                )
            kept = _most_of(kept, is_same, [])
        _Stored(model, {tensor: dtypes[tensor] for tensor in kept}).cast()
        clear_cache()
    others = dtypes.keys() - set(kept)
    stays |= {name: "the outputs would change" for name, tensor in found.items() if tensor in others}
    rows = []
    for name, tensor in found.items():
        dtype, nbytes = was[name]
        rows.append(Weight(name, tuple(uses.ops[name]), dtype_name(dtype), dtype_name(tensor.dtype), nbytes, tensor.nbytes, stays[name]))
    return CastWeights(tuple(rows), chosen.name)


def _most_of(tensors: list[Tensor], is_same: Callable[[list[Tensor]], bool], beside: list[Tensor]) -> list[Tensor]:
    """Return those of the tensors that may be cast, besides others, with the same outputs: found by halves."""
    if not tensors or is_same(beside + tensors):
        return tensors
    if len(tensors) == 1:
        return []
    first = _most_of(tensors[: len(tensors) // 2], is_same, beside)
    return first + _most_of(tensors[len(tensors) // 2 :], is_same, beside + first)


def _refuse_without_low(policy: Policy) -> None:
    if not (policy.entries("bf16") or policy.entries("fp8")):
        raise HmpError(
            f"policy {policy.name!r} has empty BF16 and FP8 lists, so no weight would be cast; give a policy that lists matrix "
            "multiplications"
        )


def _weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the floating parameters and buffers of a model, each by its first name."""
    found: dict[str, Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise HmpError(f"{name} is a lazy parameter without a shape; call the model once with a batch, then cast its weights")
        if tensor.is_floating_point():
            found[name] = tensor
    return found


def _refuse(model: torch.nn.Module, found: Mapping[str, Tensor]) -> None:
    """Raise HmpError for weights that are not whole here."""
    if not found:
        raise HmpError(f"{type(model).__name__} has no floating parameters or buffers to cast")
    for name, tensor in found.items():
        if tensor.is_inference():
            raise HmpError(
                f"{name} was created under torch.inference_mode(), so torch does not allow changing it; create the model outside"
            )
        if tensor.is_meta:
            raise HmpError(f"{name} is on the meta device and has no values; load the model's weights first")
        if hasattr(tensor, "ds_id"):
            raise HmpError(f"{name} is sharded by DeepSpeed; cast the model's weights before deepspeed.initialize()")
        if type(tensor.data).__name__ == "DTensor" or type(tensor).__name__ == "FlatParameter":
            raise HmpError(f"{name} is sharded; cast the model's weights before fully_shard() or FSDP")


def _matches(name: str, only: str) -> bool:
    """Return True if the glob matches the weight's name, or the path of a module around it."""
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:length]), only) for length in range(1, len(parts) + 1))


class _Uses(Listener):
    """Sees in which dtypes the ops of a run take each weight. A weight's own views and copies count as the weight."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.dtypes: dict[str, set[torch.dtype]] = defaultdict(set)
        self.ops: dict[str, dict[str, None]] = defaultdict(dict)  # as they ran
        self.written: set[str] = set()
        self.tied: dict[str, str] = {}  # by memory that another weight has, too
        self._of: dict[int, str] = {}  # memory → weight
        self._rounded: dict[int, str] = {}  # memory of a copy in a low-precision dtype → weight
        self.copies: list[Tensor] = []  # held, so that no other tensor gets their memory
        for name, tensor in weights.items():
            if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and tensor.numel():
                first = self._of.setdefault(_memory(tensor), name)
                if first != name:
                    self.tied |= {name: first, first: name}

    def aten(self, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the op's own result; which weights it took is noted."""
        given = [(tensor, _memory(tensor)) for tensor in each_tensor((args, kwargs)) if tensor.layout is torch.strided]
        result = run(*args, **kwargs)
        known = facts(func)
        for tensor, memory in given:
            if memory in self._of:
                self._note(self._of[memory], tensor, known, args, kwargs, result)
            elif memory in self._rounded and not known.is_view:
                if known.name == "_to_copy":
                    self._follow(result, self._rounded, self._rounded[memory])
                else:
                    self.ops[self._rounded[memory]].setdefault(known.name)
        return result

    def _note(self, name: str, tensor: Tensor, known: Facts, args: Any, kwargs: Any, result: Any) -> None:
        if any(tensor is each for each in each_tensor(argument(args, kwargs, at) for at in known.writes)):
            self.written.add(name)
        elif known.is_view:
            return
        elif known.name == "_to_copy" and kwargs.get("dtype") in LOW:
            self.dtypes[name].add(kwargs["dtype"])
            self._follow(result, self._rounded, name)
        elif known.name == "copy_" and args[0].dtype in LOW:  # into a buffer of several weights
            self.dtypes[name].add(args[0].dtype)
            self._follow(args[0], self._rounded, name)
        elif known.name in _MOVES:
            self._follow(result, self._of, name)
        else:
            self.dtypes[name].add(tensor.dtype)
            self.ops[name].setdefault(known.name)

    def _follow(self, tensor: Tensor, table: dict[int, str], name: str) -> None:
        table[_memory(tensor)] = name
        self.copies.append(tensor)


def _memory(tensor: Tensor) -> int:
    return memory_of(storage_of(tensor))


def _why_not(name: str, tensor: Tensor, uses: _Uses, taken: set[str], frozen: bool) -> str:
    """Return why a weight stays as it is, "" where it does not."""
    used = uses.dtypes[name]
    if tensor.dtype not in (torch.float32, *LOW):
        return f"is {dtype_name(tensor.dtype)}"
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return f"is a {type(tensor).__name__}"
    if name not in taken:
        return "not selected by `only`"
    if frozen and tensor.requires_grad:
        return "is trained"
    if name in uses.tied:
        return f"shares its memory with {uses.tied[name]}"
    if name in uses.written:
        return "the model may write to it"
    if not used:
        return "the batch does not reach it"
    if used == {tensor.dtype}:
        return f"is used in {dtype_name(tensor.dtype)}"
    if len(used) > 1:
        return f"is used in {' and '.join(sorted(map(dtype_name, used)))}"
    return ""


def _outputs(model: torch.nn.Module, batch: Any, chosen: Policy, frozen: bool, uses: _Uses | None) -> list[Tensor]:
    """Return what the model returns for the batch under the policy; buffers and random numbers are then as before."""
    watching: AbstractContextManager[Any] = nullcontext() if uses is None else listen(uses)
    clear_cache()  # a weight that was cast before would not be seen
    with (
        preserve_state(model, model.parameters()),
        running_uncompiled(),
        torch.set_grad_enabled(frozen),
        model_call.policy_context(model, chosen, model),
        watching,
    ):
        return [tensor.detach() for tensor in each_tensor((model_call.call(model, batch),))]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    with disable_casts():
        return torch.equal(one, other) or same_bytes(one, other)


class _Stored:
    """Tensors of a model, to be stored in other dtypes and as they were; all of them or none."""

    def __init__(self, model: torch.nn.Module, dtypes: Mapping[Tensor, torch.dtype]) -> None:
        self._model, self._dtypes = model, dtypes
        self._before: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def cast(self) -> None:
        try:
            with disable_casts(), torch.no_grad():
                for tensor, dtype in self._dtypes.items():
                    self._before.append((tensor, tensor.data, tensor.grad))
                    _store(tensor, tensor.data.to(dtype), None if tensor.grad is None else tensor.grad.to(dtype))
                _flatten(self._model)
        except BaseException:
            self.put_back()
            raise

    def put_back(self) -> None:
        with disable_casts(), torch.no_grad():
            for before in self._before:
                _store(*before)
            _flatten(self._model)


def _store(tensor: Tensor, data: Tensor, gradient: Tensor | None) -> None:
    tensor.grad = None
    tensor.data = data
    tensor.grad = gradient


def _flatten(model: torch.nn.Module) -> None:
    for each in model.modules():
        if isinstance(each, torch.nn.RNNBase):
            each.flatten_parameters()
