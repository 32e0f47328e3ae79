"""R11: an op that has no kernel in the low-precision dtype, or one that gives garbage, runs in float32; what fails is remembered."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import hmp
import preset_sweep
from ops import list_name, op_db, seed, title
from torch_has import TORCH
from trap_kit import listable

X = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)
POSITIVE = X @ X.T + 4 * torch.eye(4)


def low(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return POSITIVE.to(dtype)


# looked up at the call: hmp does not reach a function taken before it was converted
KNOWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fft.fft": lambda x: torch.fft.fft(x),
    "fft.rfftn": lambda x: torch.fft.rfftn(x),
    "linalg.inv": lambda x: torch.linalg.inv(x),
    "inverse": lambda x: torch.inverse(x),
    "Tensor.inverse": lambda x: x.inverse(),
    "Tensor.logdet": lambda x: x.logdet(),
    "linalg.cholesky": lambda x: torch.linalg.cholesky(x),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "quantile": lambda x: x.quantile(0.3),
    "avg_pool3d": lambda x: F.avg_pool3d(x[None, None, None], (1, 2, 2)),
    "lp_pool3d": lambda x: F.lp_pool3d(x[None, None, None].abs() + 1, 2.0, (1, 2, 2)),
    "special.bessel_j0": lambda x: torch.special.bessel_j0(x),
    "stft": lambda x: torch.stft(x.flatten(), 4, window=torch.ones(4), return_complex=True),
}
if hasattr(torch.linalg, "matrix_sqrth"):  # torch 2.15 and later
    KNOWN["linalg.matrix_sqrth"] = lambda x: torch.linalg.matrix_sqrth(x)
BY_ARGUMENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norm(nuc)": lambda x: x.norm("nuc"),
    "linalg.norm(2)": lambda x: torch.linalg.norm(x, 2),
    "torch.norm(nuc)": lambda x: torch.norm(x, "nuc"),
    "matrix_power(-1)": lambda x: torch.matrix_power(x, -1),
    "interpolate(antialias)": lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear", antialias=True),
}


@pytest.mark.native_kernels  # matrix_power computes in float32 and rounds where the processor has no instructions for a low-precision dtype
@pytest.mark.parametrize("policy", ["habana", hmp.Policy("every op low", bf16={"*"})], ids=lambda p: getattr(p, "name", p))
def test_r11_op_without_a_low_kernel_runs_in_float32(policy: str | hmp.Policy) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        with hmp.convert(policy=policy, dtype=dtype):
            for name, op in {**KNOWN, **BY_ARGUMENTS}.items():
                given = low(dtype) if "stft" not in name else low()
                with hmp.disable_casts():
                    expected = op(given.float())
                result, again = op(given), op(given)
                assert result.dtype is expected.dtype, name
                assert result.dtype in (torch.float32, torch.complex64), name
                # arithmetic before the op (x + 1) rounds once more where the policy has it in the low-precision dtype
                torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
                torch.testing.assert_close(again, result, rtol=0, atol=0)


@pytest.mark.skipif(TORCH >= (2, 15), reason="torch has the kernel")
def test_r11_op_without_a_low_backward_kernel_runs_in_float32_where_a_gradient_is_needed() -> None:
    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(torch.special.i1(x).sum(), x)
    with hmp.convert(policy=hmp.Policy(bf16={"special.i1"})):
        found = torch.special.i1(x)
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert found.dtype is torch.float32 and torch.special.i1(X).dtype is torch.bfloat16
    torch.testing.assert_close(gradient, expected, rtol=0, atol=0)


def test_r11_out_gets_the_float32_result_in_its_own_dtype() -> None:
    spectrum = torch.empty(4, 4, dtype=torch.complex64)
    with hmp.convert():
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.empty(0, dtype=dtype)
            assert torch.linalg.inv(low(), out=out) is out and out.dtype is dtype
            with hmp.disable_casts():
                torch.testing.assert_close(out, torch.linalg.inv(low().float()).to(dtype), rtol=0, atol=0)
        assert torch.fft.fft(low(), out=spectrum) is spectrum
    torch.testing.assert_close(spectrum, torch.fft.fft(low().float()), rtol=0, atol=0)


def test_r11_in_place_writes_into_the_tensor_that_it_is_given() -> None:
    x = X.half()
    base = torch.stack([x, x])
    torch.manual_seed(0)
    expected = torch.rrelu(X.half().float(), training=True).half()
    with hmp.convert(dtype=torch.float16):
        torch.manual_seed(0)
        assert F.rrelu(x, training=True, inplace=True) is x
        torch.manual_seed(0)
        torch.rrelu_(base[0], training=True)
    assert x.dtype is torch.float16
    torch.testing.assert_close(x, expected, rtol=0, atol=0)
    torch.testing.assert_close(base[0], expected, rtol=0, atol=0)


def test_r11_failure_is_remembered_and_the_low_dtype_not_tried_again() -> None:
    x = X.bfloat16()[None, None]
    with hmp.convert(), torch.profiler.profile() as profile:
        dtypes = [F.interpolate(x, scale_factor=2.0, mode="bilinear", antialias=True).dtype for _ in range(3)]
    assert dtypes == [torch.float32] * 3
    # the first call is refused and runs in float32; the others run in float32 at once
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::_upsample_bilinear2d_aa") == 4
    with hmp.convert():
        F.interpolate(x, scale_factor=2.0, mode="bilinear", antialias=True)
        # other arguments are another question
        assert F.interpolate(x, scale_factor=2.0, mode="bilinear").dtype is torch.bfloat16


def test_r11_layout_is_part_of_what_is_remembered() -> None:
    csr = torch.eye(4).to_sparse_csr()
    with hmp.convert():
        assert (csr @ X).dtype is torch.float32
        assert (csr @ X).dtype is torch.float32
        assert (X @ X).dtype is torch.bfloat16
    with hmp.convert(policy="torch-cpu"):  # and so is whether it is a matrix or a vector
        for _ in range(2):
            assert torch.linalg.norm(low()[0], 2).dtype is torch.bfloat16
            assert torch.linalg.norm(low(), 2).dtype is torch.float32


def test_r11_an_error_that_float32_does_not_mend_is_torchs_own() -> None:
    with pytest.raises(RuntimeError) as plain:
        torch.linalg.norm(low(), 7)
    with hmp.convert():
        for _ in range(2):
            with pytest.raises(RuntimeError) as cast:
                torch.linalg.norm(low(), 7)
            assert str(cast.value) == str(plain.value)
            assert cast.value.__cause__ is None
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.matmul(X, X[:3])
        assert hmp.fallbacks() == {}


def test_r11_a_forward_derivative_that_mixes_dtypes_says_nothing_of_calls_without_one() -> None:
    """torch's formula of a mixed layer_norm has a float32 tangent beside a bfloat16 result, and that of linear refuses such a pair."""
    x, norm, weight = low(), torch.ones(4), torch.eye(4)
    with hmp.convert(policy="torch-cpu"):
        torch.func.jvp(lambda x: F.linear(F.layer_norm(x, (4,), norm), weight), (x,), (x,))
        assert F.linear(x, weight).dtype is torch.bfloat16


A, W = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
NORM = torch.nn.LayerNorm(4)
CONV, GROUPS = torch.nn.Conv1d(2, 3, 1), torch.nn.GroupNorm(1, 2)


def _attention(x: torch.Tensor) -> torch.Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # torch's other kernels have no forward derivative on a CPU
        return F.scaled_dot_product_attention(x, x, x)


# what torch's formulas give after a norm of a bfloat16 input with float32 weights: a float32 tangent beside a bfloat16 result
AFTER_A_NORM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda x: F.linear(NORM(F.linear(x, W)), W),
    "conv1d": lambda x: CONV(GROUPS(F.linear(x, W).reshape(2, 2, 4))),
    "attention": lambda x: _attention(NORM(F.linear(x, W))[None]),
    "unlisted": lambda x: torch.lerp(NORM(F.linear(x, W)), F.linear(x, W), F.linear(x, W)),
}


def _dual(function: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    with forward_ad.dual_level():
        return list(forward_ad.unpack_dual(function(forward_ad.make_dual(A, W))))


DERIVATIVES: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], list[torch.Tensor]]] = {
    "jvp": lambda f: list(torch.func.jvp(f, (A,), (W,))),
    "dual_level": _dual,
    "jvp of vmap": lambda f: list(torch.func.jvp(torch.func.vmap(lambda x: f(x.expand(4, 4).clone())), (A[:, None],), (W[:, None],))),
    "hessian": lambda f: [torch.func.hessian(lambda x: f(x).float().square().sum())(A)],
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@given(st.sampled_from(sorted(AFTER_A_NORM)), st.sampled_from([torch.bfloat16, torch.float16]))
def test_r7_a_tangent_in_another_dtype_is_a_mixture_and_no_missing_kernel(derivative: str, name: str, low: torch.dtype) -> None:
    function, run = AFTER_A_NORM[name], DERIVATIVES[derivative]
    want = run(function)  # in float32
    try:
        with torch.autocast("cpu", dtype=low):
            dtypes = [x.dtype for x in run(function)]
    except RuntimeError:  # torch.autocast leaves the mixture to torch
        dtypes = [low if len(want) == 2 else torch.float32] * len(want)
    with hmp.casts(hmp.Policy.load("torch-cpu").replace(dtype=low)):
        got = run(function)
        assert hmp.fallbacks() == {}
    # under vmap torch.autocast loses its dtype where torch takes a norm apart
    assert derivative == "jvp of vmap" or [x.dtype for x in got] == dtypes
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.1, atol=0.1 * float(other.abs().max()))


def test_r7_the_models_own_tangents_may_have_other_dtypes() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4).half())
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    with hmp.casts(hmp.Policy.load("torch-cpu").replace(dtype="float16")):
        out, tangent = torch.func.jvp(lambda p: torch.func.functional_call(model, p, (X.half(),)), (parameters,), (parameters,))
        assert (out.dtype, tangent.dtype, hmp.fallbacks()) == (torch.float16, torch.float16, {})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_r11_no_mixture_of_op_db_is_called_a_missing_kernel() -> None:
    """Calls of op_db's ops in one low dtype that torch runs; a mixture in their inputs is no missing kernel."""
    checked, wrong = 0, []
    for info in op_db():
        call = lambda given, op=info.op: op(*given[0], **given[1])  # noqa: E731
        for sample in preset_sweep.samples(info, first=6):
            one, mixture = (preset_sweep.mixed(sample, kind, torch.bfloat16) for kind in ("low", "first low"))
            if one is None or mixture is None or any(not t.numel() for t in pytree.tree_leaves(one) if isinstance(t, torch.Tensor)):
                continue  # of no elements torch computes anything, kernel or not
            with contextlib.suppress(Exception):
                call(one)
                checked += 1
                with hmp.casts(hmp.Policy("none")):
                    before = hmp.fallbacks()
                    with contextlib.suppress(Exception):
                        call(mixture)
                    if hmp.fallbacks() != before:
                        wrong.append(info.name)
    assert not wrong
    assert checked > 200


def test_r11_is_logged_once_an_op_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hmp"), hmp.convert():
        for _ in range(3):
            torch.fft.fft(low())
        low().norm("nuc")
        low().norm("nuc")
        assert hmp.fallbacks() == {"fft.fft": 3, "norm": 2}
    messages = [r.getMessage() for r in caplog.records if "R11" in r.getMessage()]
    here = X.device.type
    assert [m.split(":")[0] for m in messages] == [f"fft.fft has no bfloat16 kernel on {here}", f"norm has no bfloat16 kernel on {here}"]
    hmp.revert()
    assert hmp.fallbacks() == {}


def test_r11_explain_says_where_an_op_has_no_kernel() -> None:
    anywhere = "without a kernel on any device in bfloat16 and float16, it runs in float32 there (R11)"
    assert anywhere in str(hmp.explain("linalg.inv", "habana"))
    assert "without a kernel on cpu in bfloat16 and float16" in str(hmp.explain("avg_pool3d", "habana"))
    assert "R11" not in str(hmp.explain("relu", "habana"))


def test_r11_a_failed_call_with_out_raises_or_has_its_result_there() -> None:
    """`out` is among the keywords: a retry that cast it would write into a copy."""
    out, norm = torch.zeros((), dtype=torch.bfloat16, device=X.device), torch.linalg.matrix_norm(X, "nuc")
    with hmp.casts(hmp.Policy("listed", bf16={"linalg.matrix_norm"})):
        with pytest.raises(RuntimeError, match="BFloat16"):
            torch.linalg.matrix_norm(X, "nuc", out=out)
        torch.linalg.matrix_norm(X, "nuc")
        assert torch.linalg.matrix_norm(X, "nuc", out=out) is out
        torch.testing.assert_close(out, norm, check_dtype=False, rtol=0.01, atol=0)


F32, F64 = torch.float32, torch.float64
SAMPLES = 3
# Beyond this relative error of the whole result its kernel is at fault, not the rounding of what it computes.
MOST = {torch.bfloat16: 0.5, torch.float16: 0.2}
# Results that are random, or not determined by the inputs, or counts of rounding itself; near zero nothing is left of x - tanh(x).
UNDETERMINED = re.compile(
    r".*(dropout|rand|normal|uniform|lowrank|resize|svd|eig|arg|scaled_mm|fractional|householder|ormqr|geqrf|pinv|matrix_rank|histogram).*"
    r"|bernoulli|multinomial|exponential|cauchy|geometric|rrelu|poisson|(new_)?empty.*|nextafter|frexp|sort|topk|mode|unique.*|(linalg.)?qr"
    r"|(linalg.)?(lu|ldl).*|.*tanhshrink|floor.*|ceil|round|trunc|remainder|fmod|frac|sign|heaviside|histc|div|multi_head_attention_forward"
)


def _cast(tree: Any, dtype: torch.dtype, only: torch.dtype) -> Any:
    return pytree.tree_map(lambda x: x.detach().to(dtype) if isinstance(x, torch.Tensor) and x.dtype is only else x, tree)


def _found(name: str) -> Any:
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def garbage(info: Any, low: torch.dtype) -> list[str]:
    """What is wrong with the op's samples: a line each."""
    name = list_name(info.name)
    if UNDETERMINED.fullmatch(name) or not callable(_found(info.name)) or not listable(name):
        return []
    seed()
    lines, policy = [], hmp.Policy("low", dtype=low, bf16={name})
    for sample in itertools.islice(info.sample_inputs_func(info, "cpu", F32, False), SAMPLES):
        args, kwargs = _cast(((sample.input, *sample.args), sample.kwargs), low, F32)
        wide = _cast((args, kwargs), F64, low)
        try:
            seed()
            want = [t for t in pytree.tree_leaves(_found(info.name)(*wide[0], **wide[1])) if isinstance(t, torch.Tensor)]
            with hmp.casts(policy):
                seed()
                got = [t for t in pytree.tree_leaves(_found(info.name)(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):
            continue  # which other tests look at
        for one, other in zip(got, want, strict=True):
            if other.dtype is not F64 or one.layout is not torch.strided or not other.numel() or one.shape != other.shape:
                continue
            finite = other.isfinite() & (other.abs() < torch.finfo(low).max / 2)
            error = ((one.double() - other)[finite].norm() / other[finite].norm().clamp_min(1e-6)).item() if finite.any() else 0.0
            if not error <= MOST[low]:
                lines.append(f"{title(info)} in {low}: off by {error if math.isfinite(error) else 'NaN'}")
    return lines[:1]


@pytest.mark.slow
@pytest.mark.parametrize("low", MOST, ids=str)
def test_r11_no_op_gives_garbage_in_a_low_dtype(low: torch.dtype) -> None:
    assert not [line for info in op_db() for line in garbage(info, low)]


@pytest.mark.parametrize("low", MOST, ids=str)
def test_r11_ops_whose_low_kernels_give_garbage_run_in_float32(low: torch.dtype) -> None:
    x = torch.randn(3, 4, 4).to(low)
    with hmp.casts(hmp.Policy("low", dtype=low, bf16={"matrix_exp"})):
        got = torch.matrix_exp(x)
    want = torch.matrix_exp(x.double())
    assert float((got.double() - want).norm() / want.norm()) < MOST[low] / 10
