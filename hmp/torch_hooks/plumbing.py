"""The code of torch that runs around a model and is never cast (R15), or that casts need to know of (R9, R14).

Optimizers, gradient scaling and clipping, initialisers, tests and printing, data loading; backward; checkpoints; replicas.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.utils.prune

from .. import torch_private
from ..caches import cast_cache, weight_cache
from ..casting import tensor_casts
from ..context import Bound, call_without_casts, state, without_casts
from ..patching import patches, subclasses
from ..wrapping import outside

# module → its functions; "Class.method" for methods
_WITHOUT_CASTS: dict[str, tuple[str, ...]] = {
    "torch.amp.grad_scaler": ("GradScaler.scale", "GradScaler.unscale_", "GradScaler.step", "GradScaler.update"),
    "torch.nn.utils.clip_grad": (
        "clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "get_total_norm", "clip_grads_with_norm_",
    ),
    # these compute a weight once, and store it
    "torch.nn.utils.spectral_norm": ("remove_spectral_norm", "spectral_norm"),
    "torch.nn.utils.weight_norm": ("remove_weight_norm", "weight_norm"),
    "torch.nn.utils.parametrizations": ("orthogonal", "spectral_norm", "weight_norm"),
    "torch.nn.utils.parametrize": ("register_parametrization", "remove_parametrizations"),
    "torch.optim.swa_utils": ("AveragedModel.update_parameters",),
    "torch.autograd.gradcheck": ("gradcheck", "gradgradcheck"),
    "torch.testing": ("assert_close", "assert_allclose", "make_tensor"),
    "torch.utils.data.dataloader": ("DataLoader.__iter__",),
    # load_state_dict(assign=True) gives parameters and buffers another dtype on purpose
    "torch.nn.modules.module": ("Module.load_state_dict",),
}  # fmt: skip


def install() -> None:
    """Puts everything of this module in place, until patches.restore()."""
    for function in _functions():
        patches.swap(function, without_casts(patches.plain(function)))
    _install_optimizers()
    patches.on_restore(cast_cache.revert)
    _install_checkpoint()
    _install_autograd()
    _install_dispatch()
    _replace("torch.nn.parallel.parallel_apply", "parallel_apply", _replicas)
    _replace("torch.backends.mha", "get_fastpath_enabled", _no_fast_path)
    _replace("torch.nn.modules.rnn", "RNNBase.check_input", _check_shape_only)
    _install_quantized()


def _functions() -> Iterator[types.FunctionType]:
    for module_name, names in _WITHOUT_CASTS.items():
        for name in names:
            function = _find(module_name, name)
            if function is not None:
                yield function
    yield from filter(None, map(_standing, torch_private.AROUND_A_MODEL))
    for name, function in vars(torch.nn.init).items():
        if inspect.isfunction(function) and not name.startswith("_"):
            yield function
    for function in (*vars(torch.nn.utils.prune).values(), *vars(torch.nn.utils.fusion).values()):
        if inspect.isfunction(function) and function.__module__.startswith("torch.nn.utils."):
            yield function
    for scheduler in vars(torch.optim.lr_scheduler).values():
        step = vars(scheduler).get("step") if inspect.isclass(scheduler) else None
        if isinstance(step, types.FunctionType):
            yield step


def _find(module_name: str, name: str) -> types.FunctionType | None:
    """The function that stands there, None where this torch has none."""
    owner: Any = importlib.import_module(module_name)
    *owners, attribute = name.split(".")
    for each in owners:
        owner = inspect.getattr_static(owner, each, None)
    return _standing(torch_private.Place(owner, attribute))


def _standing(place: torch_private.Place) -> types.FunctionType | None:
    found: Any = inspect.getattr_static(*place, None)
    found = getattr(found, "__func__", found)
    return found if isinstance(found, types.FunctionType) else None


def _replace(module_name: str, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    _swap(_find(module_name, name), make)


def _swap(function: types.FunctionType | None, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    if function is not None:
        patches.swap(function, make(patches.plain(function)))


def codes() -> set[types.CodeType]:
    """What a call has for a body that is never cast, or that sets what is, and that began before install(): backward, optimizer steps.

    But for data loading, in which a thread may wait for as long as it likes.
    """
    found = {code for function, code in patches.bodies() if not str(function.__module__).startswith("torch.utils.data")}
    return found | {torch_private.run_backward.__code__}


def _install_optimizers() -> None:
    """Every optimizer class that has been used, and through `_patch_step_function` every one that will be."""
    for cls in (torch.optim.Optimizer, *subclasses(torch.optim.Optimizer)):
        _mute_step(cls)

    def patch_step_function(original: Callable[..., Any]) -> Callable[..., Any]:
        def patched(self: Any) -> None:
            original(self)
            for cls in type(self).__mro__:
                _mute_step(cls)

        return patched

    _swap(_standing(torch_private.STEP_HOOKER), patch_step_function)


def _mute_step(cls: type) -> None:
    step = vars(cls).get("step")
    # torch hooks a class's step when its first instance is made: only that one is what users call
    if isinstance(step, types.FunctionType) and getattr(step, "hooked", False):
        patches.swap(step, _step(patches.plain(step)))


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        # the closure runs the forward: as if it were called outside
        args = tuple(Bound(a) if callable(a) else a for a in args)
        if callable(kwargs.get("closure")):
            kwargs["closure"] = Bound(kwargs["closure"])
        try:
            return call_without_casts(original, self, *args, **kwargs)
        finally:
            if weight_cache.entries():
                _free_copies(self)

    return step


def _free_copies(optimizer: Any) -> None:
    """Frees the copies of the weights that an optimizer has just written: that they are of no use shows only when a weight is used."""
    for group in getattr(optimizer, "param_groups", ()):
        for parameter in group.get("params", ()):
            weight_cache.let_go(parameter)


def _install_checkpoint() -> None:
    """A recomputation runs under the state and policy of its forward, in whatever thread backward runs (R14)."""

    def forward(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda ctx, run_function, *args: weight_cache.call_to_run_again(original, ctx, Bound(run_function), *args)

    def generator(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda fn, *args, **kwargs: original(Bound(fn), *args, **kwargs)

    _replace("torch.utils.checkpoint", "CheckpointFunction.forward", forward)
    _swap(_standing(torch_private.checkpoint_generator()), generator)


def _install_autograd() -> None:
    """User Python that autograd calls (R13): hooks and autograd.Function.backward, and what packs saved tensors inside an op."""

    def enter(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def push(self: Any) -> None:
            original(types.SimpleNamespace(pack_hook=outside(without_casts(self.pack_hook)), unpack_hook=self.unpack_hook))

        return push

    def of_users_function(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda func, *args, **kwargs: call_without_casts(original, Bound(func), *args, **kwargs)

    def transform(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
            # made anew at each call: the user's function runs under what is in force there
            return functools.wraps(func)(
                lambda *inputs, **named: call_without_casts(original(Bound(func), *args, **kwargs), *inputs, **named)
            )

        return make

    def continuing(original: Callable[..., Any]) -> Callable[..., Any]:
        """A callback that is attached in backward is user Python in backward, in whatever thread it runs: DDP's communication hooks."""

        @functools.wraps(original)
        def attach(self: Any, callback: Callable[..., Any]) -> Any:
            return original(self, functools.partial(state.call_under, state.here(), callback))

        return attach

    for name in ("then", "add_done_callback"):
        patches.rebind(torch_private.Future, name, continuing(vars(torch_private.Future)[name]))
    patches.rebind(*torch_private.ENGINE, _Engine(getattr(*torch_private.ENGINE)))
    _replace("torch.autograd.graph", "saved_tensors_hooks.__enter__", enter)
    # these put their results together with ops that may be listed
    for name in ("vjp", "jvp", "vhp", "hvp", "jacobian", "hessian"):
        _replace("torch.autograd.functional", name, of_users_function)
    for name in ("jacrev", "jacfwd"):
        _replace("torch.func", name, transform)


class _Engine:
    """autograd's engine, which backward() and autograd.grad() ask, and some call themselves."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        return state.call_in_backward(self._engine.run_backward, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _install_dispatch() -> None:
    """What runs below an op is not decided again (R8): under a dispatch mode that is Python code, FakeTensorMode's for one, and for
    tensor subclasses with a `__torch_dispatch__`."""

    def enter(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def entered(self: Any) -> Any:
            _mute_dispatch(type(self))
            return original(self)

        return entered

    _swap(_standing(torch_private.Place(torch_private.TorchDispatchMode, "__enter__")), enter)
    fake_tensor_mode = torch_private.fake_tensor_mode()
    if fake_tensor_mode is not None:
        _mute_dispatch(fake_tensor_mode)  # one may have been entered before
    for cls in subclasses(torch.Tensor):
        _mute_dispatch(cls)

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        super(torch.Tensor, cls).__init_subclass__(**kwargs)
        _mute_dispatch(cls)

    patches.rebind(torch.Tensor, "__init_subclass__", classmethod(init_subclass))


def _mute_dispatch(cls: type) -> None:
    handlers = [inspect.getattr_static(cls, "__torch_dispatch__", None)]
    # torch calls a DTensor's dispatcher from C++, which calls its methods
    handlers += vars(type(vars(cls).get("_op_dispatcher"))).values() if "_op_dispatcher" in vars(cls) else ()
    for handler in handlers:
        function = getattr(handler, "__func__", handler)
        if isinstance(function, types.FunctionType) and function not in _muted and function.__name__ != "__init__":
            _muted.add(function)
            patches.swap(function, outside(without_casts(patches.plain(function))))
            patches.on_restore(functools.partial(_muted.discard, function))


_muted: set[types.FunctionType] = set()


def _install_quantized() -> None:
    """Dynamically quantized modules have kernels for float32 alone, behind torch.ops, where no rule reaches: R11."""
    for name, module in tuple(sys.modules.items()):
        if name.startswith("torch.ao.nn.quantized.dynamic.modules."):
            for cls in vars(module).values():
                forward = vars(cls).get("forward") if inspect.isclass(cls) and cls.__module__ == name else None
                if isinstance(forward, types.FunctionType):
                    patches.swap(forward, _in_float32(patches.plain(forward)))


def _in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if state.casts_enabled():
            cast_args, kwargs = tensor_casts.cast_call(args, kwargs, torch.float32, tensor_casts.cast)
            return original(self, *cast_args, **kwargs)
        return original(self, *args, **kwargs)

    return forward


def _replicas(original: Callable[..., Any]) -> Callable[..., Any]:
    """nn.DataParallel's threads inherit the caller's state."""

    def parallel_apply(modules: Any, *args: Any, **kwargs: Any) -> Any:
        return original([Bound(module) for module in modules], *args, **kwargs)

    return parallel_apply


def _no_fast_path(original: Callable[[], bool]) -> Callable[[], bool]:
    """Where casts are on attention runs op by op, in eval as in training (R8): the fused kernel is one op that no rule reaches."""

    def get_fastpath_enabled() -> bool:
        return not state.casts_enabled() and original()

    return get_fastpath_enabled


def _check_shape_only(original: Callable[..., None]) -> Callable[..., None]:
    """RNNBase refuses an input whose dtype is not the weights'; where casts are on, R7 gives them one."""

    def check_input(self: Any, input: torch.Tensor, batch_sizes: Any) -> None:
        weight = self._flat_weights[0]
        if input.dtype is not weight.dtype and state.casts_enabled():
            # the original looks at dtype and shape alone
            input = torch.empty(input.shape, dtype=weight.dtype, device="meta")
        original(self, input, batch_sizes)

    return check_input
