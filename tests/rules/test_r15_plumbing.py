"""R15: the plumbing of a training loop computes what it computes without hmp, bit for bit, under a policy that casts all it can."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import hmp
from optimizers import OPTIMIZERS as ALL_OPTIMIZERS
from trap_kit import policy, same

LOW = torch.bfloat16
# every op that an optimizer, an averager or a scaler is made of
HOSTILE = """add sub mul div truediv pow sqrt rsqrt reciprocal neg abs sign lerp addcmul addcdiv clamp maximum minimum
norm linalg.vector_norm mean sum matmul mm bmm addmm addmv dot outer exp log square isclose stack cat erfinv qr linalg.qr""".split()


def everything() -> hmp.Policy:
    """A policy with all of that on its BF16 list."""
    return policy(bf16=HOSTILE, name="hostile")


OPTIMIZERS = ALL_OPTIMIZERS | {
    "SGD-loop": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.1, weight_decay=0.01, foreach=False, maximize=True),
    "SGD-tensor-lr": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.01), momentum=0.9),
    "Adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01, amsgrad=True),
    "ASGD-t0": lambda p: torch.optim.ASGD(p, lr=0.01, weight_decay=0.01, t0=2),
    "NAdam-decoupled": lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.01, decoupled_weight_decay=True),
    "RMSprop-centered": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9, weight_decay=0.01),
}


def _trajectory(make, steps: int = 8):
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 20).reshape(4, 5)), torch.nn.Parameter(torch.linspace(0.1, 2, 7))]
    optimizer = make(parameters)
    # the scheduler of a tensor lr multiplies tensors, and R15 does not name schedulers
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, steps if torch.is_tensor(optimizer.param_groups[0]["lr"]) else 3, 0.7)
    for step in range(steps):
        for p in parameters:
            p.grad = _gradient(p, step)
        optimizer.step()
        if step < steps - 1:
            scheduler.step()
    return parameters, optimizer.state_dict()


def _gradient(p, step):
    with hmp.disable_casts():
        return torch.sin(torch.arange(float(p.numel())) * 1.7 + step).reshape(p.shape)


@pytest.mark.parametrize("name", ["Adadelta", "RAdam-foreach", "SGD-tensor-lr"])
def test_r15_an_optimizer_keeps_the_step_that_its_class_had_before(name):
    """A learning rate scheduler puts it on the optimizer itself."""

    def trained(policy):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = OPTIMIZERS[name]([parameter])
        torch.optim.lr_scheduler.StepLR(optimizer, 100)
        seen = []

        def closure():
            seen.append(F.silu(parameter).dtype)
            return parameter.sum()

        with hmp.disable_casts() if policy is None else hmp.convert(policy=policy):
            for step in range(5):
                parameter.grad = _gradient(parameter, step)
                optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
                seen.append((parameter.detach() * 1.0).dtype)
        return parameter, optimizer.state_dict(), seen

    *ours, seen = trained(everything().replace(bf16={*HOSTILE, "silu"}))
    *theirs, _ = trained(None)
    same(ours, theirs)
    assert seen == [LOW] * 10


def _clipped(foreach, norm_type):
    parameters = [torch.nn.Parameter(torch.zeros(50)) for _ in range(2)]
    for p in parameters:
        p.grad = _gradient(p, 3)
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters], norm_type, foreach=foreach)
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0, norm_type, foreach=foreach)
    first = [p.grad.clone() for p in parameters]
    torch.nn.utils.clip_grad_value_(parameters, 0.0123, foreach=foreach)
    return total, norm, first, [p.grad for p in parameters]


AVERAGES = {
    "ema": {"avg_fn": torch.optim.swa_utils.get_ema_avg_fn(0.99)},
    "multi-ema": {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)},
    "buffers": {"use_buffers": True},
    "users": {"avg_fn": lambda averaged, current, count: averaged * 0.99 + current * (1 - 0.99)},
}


def _averaged(options):
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    average = torch.optim.swa_utils.AveragedModel(model, **options)
    for step in range(5):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(_gradient(p, step))
        average.update_parameters(model)
    return average.state_dict()


INITS = {
    "uniform_": (-1, 1), "normal_": (), "trunc_normal_": (), "constant_": (0.3,), "eye_": (), "dirac_": (), "xavier_uniform_": (),
    "xavier_normal_": (), "kaiming_uniform_": (), "kaiming_normal_": (), "orthogonal_": (), "sparse_": (0.1,), "ones_": (), "zeros_": (),
}  # fmt: skip


def _initialised(name):
    torch.manual_seed(4)
    weight = torch.empty((4, 4, 3) if name == "dirac_" else (6, 4))
    assert getattr(torch.nn.init, name)(weight, *INITS[name]) is weight
    return weight


def _rates():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    return optimizer.param_groups[0]["lr"]


PLUMBING = {
    **{f"steps of {name}": partial(_trajectory, make) for name, make in OPTIMIZERS.items()},
    **{f"clipping, {f}, {norm}": partial(_clipped, f, norm) for f in (None, True, False) for norm in (2.0, float("inf"), 1.0)},
    **{f"average, {name}": partial(_averaged, options) for name, options in AVERAGES.items()},
    **{f"init.{name}": partial(_initialised, name) for name in INITS},
}


@pytest.mark.parametrize("casts", [lambda: hmp.casts(everything()), hmp.convert], ids=["every op in bfloat16", "convert"])
def test_r15_plumbing_computes_what_it_computes_without_hmp(casts):
    runs = PLUMBING | ({"rates of a scheduler": _rates} if casts is hmp.convert else {})
    plain = {name: run() for name, run in runs.items()}
    differ = []
    with casts():
        for name, run in runs.items():
            try:
                same(run(), plain[name])
            except AssertionError as error:
                differ.append(f"{name}: {error}")
    assert not differ, "\n".join(differ)


def test_r15_a_closure_runs_as_if_it_were_called_outside():
    p, seen = torch.nn.Parameter(torch.ones(2, 2)), []

    def closure():
        p.grad = None
        y = torch.mm(p, p)
        seen.append(y.dtype)
        loss = y.float().sum()
        loss.backward()
        return loss

    for make in (torch.optim.LBFGS, torch.optim.SGD, torch.optim.Adam):
        optimizer = make([p], lr=0.1)
        for region, dtype in ((hmp.enable_casts, LOW), (hmp.disable_casts, torch.float32)):
            for step in (lambda o=optimizer: o.step(closure), lambda o=optimizer: o.step(closure=closure)):
                seen.clear()
                with hmp.casts("habana"), region():
                    loss = step()
                assert set(seen) == {dtype}
                assert loss.dtype == torch.float32


def test_r15_an_exception_in_a_step_or_a_closure_leaves_no_trace():
    def closure():
        raise KeyError

    broken = type("Broken", (torch.optim.SGD,), {"step": lambda self, closure=None: closure()})
    p = torch.nn.Parameter(torch.ones(2))
    hmp.convert()
    for optimizer in (broken([p]), torch.optim.SGD([p]), torch.optim.LBFGS([p])):
        for region, on in ((hmp.enable_casts, True), (hmp.disable_casts, False)):
            with region():
                with pytest.raises(KeyError):
                    optimizer.step(closure)
                assert hmp.casts_enabled() == on
        assert hmp.casts_enabled()


def test_r15_a_users_optimizer_is_plumbing_too():
    seen: list[torch.dtype] = []
    inside: list[torch.dtype] = []

    def classes():
        class Users(torch.optim.Optimizer):
            def __init__(self, params):
                super().__init__(params, {})

            @torch.no_grad()
            def step(self, closure=None):
                loss = closure() if closure is not None else None
                seen.extend((p * 0.5).dtype for p in self.param_groups[0]["params"])
                return loss

        class Derived(Users):
            def step(self, closure=None):
                seen.append((torch.ones(1) * 1).dtype)
                return super().step(closure)

        return Users, Derived

    p, before = torch.nn.Parameter(torch.ones(1)), classes()
    optimizers = [each([p]) for each in before]
    hmp.convert()
    for optimizer in [*optimizers, *(each([p]) for each in (*before, *classes()))]:
        optimizer.step(lambda: inside.append((torch.ones(1) * 1).dtype))
        optimizer.step()
    assert set(seen) == {torch.float32}
    assert set(inside) == {LOW}


def _scaled(found_inf: bool):
    p = torch.nn.Parameter(torch.linspace(-1, 1, 6))
    optimizer = torch.optim.RAdam([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=1)
    results = []
    for step in range(3):
        optimizer.zero_grad()
        loss = scaler.scale(p.square().sum() + 0.123)
        results += [loss.detach(), scaler.get_scale()]
        loss.backward()
        if found_inf and step == 1:
            p.grad[0] = float("inf")
        scaler.unscale_(optimizer)
        results.append(p.grad.clone())
        scaler.step(optimizer)
        scaler.update()
    return results, p.detach(), scaler.state_dict()


@pytest.mark.parametrize("found_inf", [False, True])
def test_r15_the_scaler_scales_as_without_hmp(found_inf):
    plain, dtype = _scaled(found_inf), torch.float16
    # the loss itself is the user's: only ops of the scaler are listed
    lists = [each for each in HOSTILE if each not in ("sum", "square", "add")]
    with hmp.casts(policy(bf16=lists, dtype=dtype)):
        same(_scaled(found_inf), plain)


def test_r15_gradcheck_passes_and_casts_nothing():
    x, weight = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with hmp.casts("habana"), warnings.catch_warnings():
        for call in (F.linear, lambda x, w: F.softmax(x @ w, -1), lambda x, w: F.layer_norm(x * w, (3,)) / 3):
            assert torch.autograd.gradcheck(call, (x, weight))
            assert torch.autograd.gradgradcheck(call, (x, weight))
        warnings.simplefilter("ignore")  # torch doubts float32, rightly
        small = [t.detach().float().requires_grad_() for t in (x, weight)]
        assert torch.autograd.gradcheck(F.linear, small, eps=1e-3, atol=1e-2, rtol=1e-2)


def test_r15_assert_close_sees_what_it_sees_without_hmp():
    a = torch.tensor([1.0, 2.0])
    wrong = a + 1e-4
    with pytest.raises(AssertionError) as plain:
        torch.testing.assert_close(a, wrong)
    with hmp.casts(everything()):
        torch.testing.assert_close(a, a.clone())
        with pytest.raises(AssertionError) as caught:
            torch.testing.assert_close(a, wrong)
    assert str(caught.value) == str(plain.value)


def test_r15_a_tensor_is_shown_as_without_hmp():
    tensors = [
        *(torch.tensor([1.2345, 1e-5, 12345.678]), torch.randn(30, 50), torch.tensor(3.14159), torch.tensor([1e10, 1e-10])),
        *(torch.tensor([1.5 + 2j]), torch.ones(2, dtype=LOW) / 3, torch.empty(0, 3)),
    ]
    tensors += [torch.nn.Parameter(t) for t in tensors]
    plain = [(repr(t), str(t), f"{t}") for t in tensors]
    lists = [each for each in HOSTILE if each not in ("isclose",)] + ["masked_select", "ceil", "isfinite", "max", "min", "ne"]
    with hmp.casts(policy(bf16=lists)):
        assert [(repr(t), str(t), f"{t}") for t in tensors] == plain


def test_r15_load_state_dict_keeps_the_checkpoints_dtypes_as_torch_does():
    checkpoint = torch.nn.BatchNorm1d(2).bfloat16().state_dict()
    with hmp.convert():
        model = torch.nn.BatchNorm1d(2)
        model.load_state_dict(checkpoint, assign=True)
    assert model.weight.dtype == model.running_mean.dtype == torch.bfloat16
