"""cast_weights(): each weight of a model is stored in the dtype in which its ops use it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core import lists
from ..core.active.regions import disable_casts
from ..core.casting import LOW, dtype_name, each_tensor
from ..core.compiler_stance import running_uncompiled
from ..core.convert import casts
from ..core.copies import clear_cache
from ..core.observe import Listener, listen, nbytes_of
from ..core.policy.policy import Policy
from ..core.policy.scopes import hint, unwrapped
from ..core.tables import lock
from ..core.torch_patches import module_calls
from ..core.torch_patches.module_calls import applied_policy, matches, names_of, paths_of
from ..errors import HmpError
from . import model_call
from .aten import Facts, argument, facts, storage_address
from .formatting import share, size, some
from .model_state import is_equal, preserve_state
from .pages.page import Cell, Page, Result, Section, Table, flow, module, nbytes

Tensor = torch.Tensor
_MOVES = frozenset({"clone"})  # a copy with the values of the original, and no use of them


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of a model, by its first name.

    The ops that took it, its dtype and bytes before and after, and why it stayed as it was, "" where it did not. `undecided` weights stayed
    because nothing showed which ops use them. Tied weights are one.
    """

    name: str
    ops: tuple[str, ...]
    before: str
    after: str
    bytes_before: int
    bytes_after: int
    why: str = ""
    undecided: bool = False


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
    _totals = ("bytes_before", "bytes_after")

    def __getitem__(self, name: str) -> Weight:
        return self._named(self.weights, name, "a weight of the model")

    @property
    def bytes_before(self) -> int:
        """Bytes of all weights before."""
        return sum(weight.bytes_before for weight in self.weights)

    @property
    def bytes_after(self) -> int:
        """Bytes of all weights after."""
        return sum(weight.bytes_after for weight in self.weights)

    @property
    def undecided(self) -> tuple[str, ...]:
        """Names of the weights that stayed because nothing showed which ops use them."""
        return tuple(weight.name for weight in self.weights if weight.undecided)

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
        undecided = f", {len(self.undecided)} undecided" if self.undecided else ""
        return Page(
            title="hmp cast_weights",
            verdict=f"{cast} of {len(self.weights)} weights cast{undecided}; {size(self.bytes_before)} became {size(self.bytes_after)}, "
            f"{share(self.bytes_after, self.bytes_before)} of before, under policy {self.policy!r}",
            sections=[
                Section(
                    "weights", "Weights", "", [Table(("weight", "ops", "dtype", ">bytes", ">now", "stayed because"), rows, most=len(rows))]
                )
            ],
        )


def cast_weights(
    model: torch.nn.Module,
    batch: Any = None,
    policy: Policy | str | Path | None = None,
    *,
    only: str | None = None,
    frozen: bool = False,
    keep: Iterable[str] | str = (),
) -> CastWeights:
    """Store each weight of `model`, in place, in the low-precision dtype that its ops use, for inference in half the memory.

    A weight that every op uses in the same low-precision dtype is stored in that dtype. Weights that an op uses in float32 (norms, an
    embedding on no list) and running statistics are left unchanged, and so are tied weights whose ops disagree.

    Without a batch, each module of torch that has weights (Linear, Conv2d, Embedding, LayerNorm, LSTM, MultiheadAttention, ...) is called
    alone, under the policy that holds in it, with a small made-up input. Weights of other modules are left unchanged; the result names
    them as undecided. With a batch, the model is called with it, and every op is seen. Weights that the batch doesn't reach are left
    unchanged. Then the same is called again: a weight whose cast would change the outputs by a bit is left unchanged too.

    Args:
        model: The module, on any device except meta. Tied weights stay tied, and parameters stay the same objects.
        batch: The arguments of the call: a mapping as keywords, a tuple or list as positional arguments, anything else as the only one.
            Give one if the model's own code uses weights of torch's modules: in float32, outside of the module's calls, or with casts off.
        policy: A Policy, a preset's name or a folder. Default: the policy applied to the model, else the active one, else "autocast". From
            then on the model has to run under it: `hmp.apply(model, policy)`.
        only: A glob, such as "lm_head.*". Only weights whose name, or whose module's path, matches are cast.
        frozen: Cast only parameters that require no gradient, and call with gradients enabled: for fine-tuning with LoRA.
        keep: Globs, such as ["*.inv_freq", "lm_head.*"]. Weights and buffers whose name, or whose module's path, matches one are not cast.
            If a policy is applied to the model, `model.to(torch.bfloat16)`, `.half()` and `.bfloat16()` leave them in float32 too, until
            `hmp.remove(model)` or another `cast_weights()`.

    Returns:
        What was done to each weight, as a table to print; bytes are those of all parameters and buffers.

    Raises:
        HmpError: For anything but a module, a policy or a string as the batch, weights that are sharded or on the meta device, a policy
            without a list that puts inputs into a low-precision dtype, a pattern of `only` or `keep` that matches nothing, and a model
            whose outputs differ between calls. The model is then unchanged.

    Example:
        >>> net = hmp.apply(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.LayerNorm(2)).eval(), "habana")
        >>> result = hmp.cast_weights(net)
        >>> net[0].weight.dtype, net[1].weight.dtype
        (torch.bfloat16, torch.float32)
    """
    model_call.check_module(model, "cast_weights()", "a torch.nn.Module")
    if isinstance(batch, (Policy, str, Path)):
        raise HmpError(
            f"cast_weights(): expected a batch as the second argument, got {batch!r}; write policy={batch!r}, "
            "or batch=(text,) for a model that takes a string"
        )
    chosen = model_call.chosen_policy(model, policy)
    if not any(map(chosen.entries, lists.low())):
        raise HmpError(f"policy {chosen.name!r} has an empty BF16 list, so no weight would be cast; give one with matrix multiplications")
    found, globs = _weights_of(model), (keep,) if isinstance(keep, str) else tuple(keep)
    _refuse(model, found)
    deselected = _deselected(model, found, only, globs, frozen)
    run = _Run(model, batch, chosen, frozen)
    uses, was = _Uses(found), {name: (tensor.dtype, nbytes_of(tensor)) for name, tensor in found.items()}
    with torch.inference_mode(mode=False):  # in which weights would become tensors that nothing can be trained with
        before = run.outputs(uses)
        uses.copies.clear()
        undecided = run.undecided(found, uses)
        stays = {name: deselected.get(name) or undecided.get(name) or uses.why_not(name, tensor) for name, tensor in found.items()}
        dtypes = {found[name]: next(iter(uses.dtypes[name])) for name, why in stays.items() if not why}

        def is_same(tensors: list[Tensor]) -> bool:
            put_back = _cast(model, {tensor: dtypes[tensor] for tensor in tensors})
            try:
                after = run.outputs()
            except Exception:  # code that takes no low weights
                return False
            finally:
                put_back()
            return len(before) == len(after) and all(map(disable_casts(is_equal), before, after))

        kept = list(dtypes)
        if kept and not is_same(kept):
            before = run.outputs()  # without looking on, under which torch gives other bits for a few ops
            if not is_same([]):
                raise HmpError("the model's outputs differ for one batch, so the cast weights can't be checked; call model.eval() first")
            kept = _most_of(kept, is_same, [])
        _cast(model, low := {tensor: dtypes[tensor] for tensor in kept})
        clear_cache()
    _keep(model, globs)
    stays |= {name: "the outputs would change" for name, tensor in found.items() if tensor in dtypes and tensor not in low}
    rows = []
    for name, tensor in found.items():
        (dtype, nbytes), why = was[name], stays[name]
        after = dtype_name(tensor.dtype), nbytes, nbytes_of(tensor)
        rows.append(Weight(name, tuple(uses.ops[name]), dtype_name(dtype), *after, why, undecided=bool(why) and why == undecided.get(name)))
    return CastWeights(tuple(rows), chosen.name)


def _most_of(tensors: list[Tensor], is_same: Callable[[list[Tensor]], bool], beside: list[Tensor]) -> list[Tensor]:
    """Return those of the tensors that may be cast, besides others, with the same outputs: found by halves."""
    if not tensors or is_same(beside + tensors):
        return tensors
    if len(tensors) == 1:
        return []
    first = _most_of(tensors[: len(tensors) // 2], is_same, beside)
    return first + _most_of(tensors[len(tensors) // 2 :], is_same, beside + first)


def _keep(model: nn.Module, globs: tuple[str, ...]) -> None:
    """Have `.to(torch.bfloat16)`, `.half()` and `.bfloat16()` leave the float32 weights whose names match, while the model has a policy."""
    with lock:
        module_calls.keep(module_calls.inside_compiled(model), globs)


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
            raise HmpError(f"{name} was created under torch.inference_mode(), so torch lets nobody change it; create the model outside")
        if tensor.is_meta:
            raise HmpError(f"{name} is on the meta device and has no values; load the model's weights first")
        if hasattr(tensor, "ds_id"):
            raise HmpError(f"{name} is sharded by DeepSpeed; cast the model's weights before deepspeed.initialize()")
        if type(tensor.data).__name__ == "DTensor" or type(tensor).__name__ == "FlatParameter":
            raise HmpError(f"{name} is sharded; cast the model's weights before fully_shard() or FSDP")


def _deselected(model: torch.nn.Module, found: Mapping[str, Tensor], only: str | None, keep: Sequence[str], frozen: bool) -> dict[str, str]:
    """Return the weights that cannot be cast or that the caller wants as they are, with the reason. Each pattern has to match one."""
    every = names_of(model)
    names = {name: every[tensor] for name, tensor in found.items()}
    matched_by = {
        glob: {name for name in found if any(matches(each, glob) for each in names[name])} for glob in (only, *keep) if glob is not None
    }
    for glob, matched in matched_by.items():
        if not matched:
            paths = dict.fromkeys(path for each in names.values() for name in each for path in paths_of(name))
            raise HmpError(f"{'only' if glob == only else 'keep'}={glob!r} matches no weight of the model: {hint(glob, list(paths))}")
    why: dict[str, str] = {}
    for name, tensor in found.items():
        kept = next((glob for glob in keep if name in matched_by[glob]), None)
        if tensor.dtype not in (torch.float32, *LOW):
            why[name] = f"is {dtype_name(tensor.dtype)}"
        elif tensor.layout is not torch.strided:
            why[name] = f"has the layout {tensor.layout}"
        elif type(tensor) not in (Tensor, torch.nn.Parameter):
            why[name] = f"is a {type(tensor).__name__}"
        elif kept is not None:
            why[name] = f"`keep` names it: {kept}"
        elif only is not None and name not in matched_by[only]:
            why[name] = "not selected by `only`"
        elif frozen and tensor.requires_grad:
            why[name] = "is trained"
    return why


class _Run:
    """What is called to see the weights' uses: the model with a batch, or without one each of its modules alone."""

    def __init__(self, model: torch.nn.Module, batch: Any, chosen: Policy, frozen: bool) -> None:
        self._model, self._batch, self._policy, self._frozen = model, batch, chosen, frozen
        self._alone = None if batch is not None else _Alone(model, chosen)

    def outputs(self, uses: _Uses | None = None) -> list[Tensor]:
        """Return what is returned under the policy; buffers and random numbers are then as before. `uses` sees the first call."""
        clear_cache()  # a weight that was cast before would not be seen
        alone = self._alone
        with (
            preserve_state(self._model, self._model.parameters()),
            running_uncompiled(),
            torch.set_grad_enabled(self._frozen),
            nullcontext() if alone is not None else model_call.policy_context(self._model, self._policy, self._model),
            listen(*([] if uses is None else [uses])),
        ):
            output = model_call.call(self._model, self._batch) if alone is None else alone.call(first=uses is not None)
            return [tensor.detach() for tensor in each_tensor((output,))]

    def undecided(self, found: Mapping[str, Tensor], uses: _Uses) -> dict[str, str]:
        """Return the weights whose uses no call showed, by name, with the reason."""
        if self._alone is None:
            return {name: "the batch does not reach it" for name in found if not uses.is_used(name)}
        why = self._alone.undecided()
        reasons = {name: why[tensor] for name, tensor in found.items() if tensor in why}
        reasons |= {name: "its module alone does not use it" for name in found.keys() - reasons.keys() if not uses.is_used(name)}
        return {name: f"no batch was given, and {reason}" for name, reason in reasons.items()}


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
                first = self._of.setdefault(storage_address(tensor), name)
                if first != name:
                    self.tied |= {name: first, first: name}

    def aten(self, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the op's own result; which weights it took is noted."""
        given = [(tensor, storage_address(tensor)) for tensor in each_tensor((args, kwargs))]
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

    def is_used(self, name: str) -> bool:
        """Return True if an op took the weight, or another weight that shares its memory."""
        return bool(self.dtypes[name]) or name in self.written or name in self.tied

    def why_not(self, name: str, tensor: Tensor) -> str:
        """Return why what was seen has a weight stay as it is, "" where it has not."""
        used = self.dtypes[name]
        if name in self.tied:
            return f"shares its memory with {self.tied[name]}"
        if name in self.written:
            return "the model may write to it"
        if used == {tensor.dtype}:
            return f"is used in {dtype_name(tensor.dtype)}"
        if len(used) > 1:
            return f"is used in {' and '.join(sorted(map(dtype_name, used)))}"
        return ""

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
        table[storage_address(tensor)] = name
        self.copies.append(tensor)


def _cast(model: torch.nn.Module, dtypes: Mapping[Tensor, torch.dtype]) -> Callable[[], None]:
    """Store tensors of a model in these dtypes, all of them or none. Return what puts them back."""
    before = [(tensor, tensor.data, tensor.grad) for tensor in dtypes]
    low = ((each, data.to(dtypes[each]), None if grad is None else grad.to(dtypes[each])) for each, data, grad in before)
    try:
        _store(model, low)
    except BaseException:
        _store(model, before)
        raise
    return partial(_store, model, before)


def _store(model: torch.nn.Module, values: Iterable[tuple[Tensor, Tensor, Tensor | None]]) -> None:
    """Give tensors of a model these elements and gradients, and cuDNN's recurrent layers the weights that are there then."""
    with disable_casts(), torch.no_grad():
        for tensor, data, gradient in values:
            tensor.grad = None
            tensor.data = data
            tensor.grad = gradient
        for each in model.modules():
            if isinstance(each, torch.nn.RNNBase):
                each.flatten_parameters()


# --- modules of torch that are called alone: what their ops do with their weights shows without a batch ---

Shapes = Sequence[Sequence[int]]
_ROWS = 16  # FP8 products take no fewer
_DIMS = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3, nn.InstanceNorm1d: 1, nn.InstanceNorm2d: 2, nn.InstanceNorm3d: 3}


def _convolved(module: Any) -> Shapes:
    padding = (0,) * len(module.kernel_size) if isinstance(module.padding, str) else module.padding
    sizes = zip(module.kernel_size, module.dilation, padding, strict=True)
    return [(2, module.in_channels, *(dilation * (kernel - 1) + 1 + pad for kernel, dilation, pad in sizes))]


def _normed_channels(module: Any) -> Shapes:
    dims = next(dims for cls, dims in _DIMS.items() if isinstance(module, cls))
    return [(2, module.num_features, *(2,) * dims)]


# By its forward, the shapes of the floating-point inputs of a module. One that looks rows up has none: it takes indices.
_SHAPES: dict[Callable[..., Any], Callable[[Any], Shapes]] = {
    nn.Linear.forward: lambda module: [(_ROWS, module.in_features)],
    nn.Bilinear.forward: lambda module: [(2, module.in1_features), (2, module.in2_features)],
    nn.LayerNorm.forward: lambda module: [(2, *module.normalized_shape)],
    nn.RMSNorm.forward: lambda module: [(2, *module.normalized_shape)],
    nn.GroupNorm.forward: lambda module: [(2, module.num_channels, 2)],
    nn.MultiheadAttention.forward: lambda module: [(2, 2, module.embed_dim), (2, 2, module.kdim), (2, 2, module.vdim)],
    nn.Embedding.forward: lambda module: [],
    nn.EmbeddingBag.forward: lambda module: [],
    **{cls.forward: _normed_channels for cls in _DIMS},
    **{cls.forward: lambda module: [(2, 2, module.input_size)] for cls in (nn.LSTM, nn.GRU, nn.RNN)},
    **{cls.forward: _convolved for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d)},
    **{cls.forward: _convolved for cls in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)},
}
_OF_LIBRARIES: dict[str, Callable[[Any], Shapes]] = {
    "transformers.pytorch_utils.Conv1D": lambda module: [(_ROWS, module.weight.shape[0])],  # GPT-2's linear layers
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Alone:
    """The modules of a model that hold weights: those that can be called alone, and of the others why not.

    A call gives each one input in float32 and one in the low-precision dtype, as nobody knows which the model gives it. Modules in a part
    that has a policy of its own can't be called.
    """

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        self._model = model = unwrapped(model)
        self._policy, self._why_not = policy, dict[nn.Module, str]()
        parts = [part for part in model.modules() if part is not model and applied_policy(part) is not None]
        others = {module for part in parts for module in part.modules()}
        for each in model.modules():
            why_not = "is in a part with a policy of its own" if each in others else _why_not(each)
            if why_not:
                self._why_not[each] = f"{type(each).__name__} {why_not}"

    def call(self, *, first: bool) -> list[Any]:
        """Call each module, and return what all return. On the `first` call, a module that raises is left out from then on."""
        generator = torch.Generator().manual_seed(0)
        found: list[Any] = []
        with casts(self._policy, model=self._model):
            for module in self._model.modules():
                if module in self._why_not or next(_held(module), None) is None:
                    continue
                try:
                    found += [module(*_inputs(module, dtype, generator)) for dtype in (torch.float32, self._policy.dtype)]
                except Exception as error:
                    if not first:
                        raise
                    self._why_not[module] = f"{type(module).__name__} alone raised {type(error).__name__}"
        return found

    def undecided(self) -> dict[Tensor, str]:
        """Return the weights of which a module could not be called, with the reason."""
        return {tensor: why for module, why in self._why_not.items() for tensor in _held(module)}


def _why_not(module: nn.Module) -> str:
    """Return why a module can't be called alone, "" where it can."""
    if _shapes_of(module) is None:
        return "does not say which op uses it"
    return "has hooks" if any(getattr(module, name, None) for name in _HOOKS) else ""


def _held(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _shapes_of(module: nn.Module) -> Callable[[Any], Shapes] | None:
    """Return the function that gives the shapes of a module's inputs; None where a forward that hmp does not know computes its output."""
    if "forward" in vars(module):
        return None
    owner: Any = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return _SHAPES.get(owner.forward) or _OF_LIBRARIES.get(f"{owner.__module__}.{owner.__qualname__}")


def _inputs(module: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    device, shapes = next(_held(module)).device, _shapes_of(module)
    assert shapes is not None
    found = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes(module)]
    return found or [torch.zeros(1, 1, dtype=torch.long, device=device)]
