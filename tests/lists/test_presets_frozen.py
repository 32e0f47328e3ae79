"""The frozen lists of a torch release are what that release registers for autocast; names without a folder stand for them."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hmp
from hmp.cli import main
from hmp.lists import presets

RELEASE = ".".join(torch.__version__.split(".")[:2])
FROZEN = [name.partition("@")[2] for name in hmp.policies() if name.startswith("torch-cpu@")]
kept_here = pytest.mark.skipif(RELEASE not in FROZEN, reason=f"no lists of torch {RELEASE} are kept")

# What the lists hold besides: ops inside which autocast reaches one of its own. tests/lists/test_presets_torch_cpu.py and
# tests/lists/test_presets_torch_cuda.py show that casting them whole gives autocast's dtypes.
INSIDE = {
    "cpu": {
        "bf16": """chain_matmul linalg.multi_dot
            bilinear.autocast corrcoef.autocast cov.autocast einsum.autocast gru.autocast gru_cell.autocast interpolate.autocast
            linalg.pinv.autocast linalg.polar.autocast linear_cross_entropy.autocast lstm.autocast lstm_cell.autocast masked.prod.autocast
            matrix_power.autocast pad.autocast pca_lowrank.autocast rnn_relu.autocast rnn_relu_cell.autocast
            rnn_tanh.autocast rnn_tanh_cell.autocast sparse.mm.autocast svd_lowrank.autocast tensordot.autocast""",
        "fp32": "lu max_unpool1d",
        "promote": "inner",
    },
    "cuda": {
        "bf16": "gru lstm rnn_relu rnn_tanh",
        "fp32": """cross_entropy cumulative_trapezoid linear_cross_entropy local_response_norm multilabel_soft_margin_loss
            normalize pairwise_distance rtruediv softmin square trapezoid trapz triplet_margin_with_distance_loss upsample_bilinear
            upsample_nearest""",
        "promote": "inner",
    },
}
# Registered under a name that is not the public one, or with a public one beside it.
PUBLIC = {"cross_entropy_loss": "cross_entropy", "multilabel_margin_loss_forward": "multilabel_margin_loss"}
CASTS = ("bf16", "fp32", "promote")
AUTOCAST = ".autocast"


def public(name: str) -> str:
    """The public name of an ATen op: linalg.qr for linalg_qr."""
    return re.sub(r"^(linalg|fft)_", r"\1.", PUBLIC.get(name, name))


def registered(key: str) -> set[str]:
    """The public names of the ops for which this torch has a kernel under a dispatch key, overloads taken together."""
    names = torch._C._dispatch_get_all_op_names()
    found = {n.removeprefix("aten::").partition(".")[0] for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, key)}
    # cuDNN's recurrent layers, in builds with CUDA, are called through torch.lstm, torch.gru and the like
    return {public(name) for name in found} - {"_cudnn_rnn"}


def inside(device: str, cast: str) -> set[str]:
    newer = {"linear_cross_entropy": torch.nn.functional, "linalg.polar": torch.linalg}
    found = INSIDE[device][cast].split()
    return {name for name in found if (bare := name.removesuffix(AUTOCAST)) not in newer or hasattr(newer[bare], bare.rpartition(".")[2])}


def every_name(policy: hmp.Policy, device: str) -> set[str]:
    return {name.removesuffix(AUTOCAST) for cast in CASTS for name in getattr(policy, cast) - inside(device, cast)}


@kept_here
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_lists_hold_every_op_that_this_torch_registers_for_autocast_and_no_other(device: str) -> None:
    policy = hmp.Policy.load(f"torch-{device}")
    assert every_name(policy, device) == registered(f"Autocast{device.upper()}")
    for cast in CASTS:
        assert inside(device, cast) <= getattr(policy, cast)


def test_xpus_ops_are_cudas_but_for_cudnns_own() -> None:
    assert registered("AutocastCUDA") - registered("AutocastXPU") <= {
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "linalg.matrix_sqrth",
    }
    assert registered("AutocastXPU") <= registered("AutocastCUDA")


@kept_here
def test_cudas_casts_are_those_of_the_header_that_torch_ships() -> None:
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.is_file():
        pytest.skip("this torch ships no headers")
    text = header.read_text()

    def macro(name: str) -> set[str]:
        body = text.partition(f"#define {name}(_)")[2].partition("\n#define")[0]
        return {public(op) for op in re.findall(r"_\((\w+)", body)}

    policy = hmp.Policy.load("torch-cuda")
    # written out in autocast_mode.cpp
    low = macro("AT_FORALL_LOWER_PRECISION_FP") | {"cudnn_convolution", "cudnn_convolution_transpose"}
    fp32 = macro("AT_FORALL_FP32") | macro("AT_FORALL_FP32_SET_OPT_DTYPE") | {"norm"}
    assert policy.bf16 - inside("cuda", "bf16") == low
    assert policy.promote - inside("cuda", "promote") == macro("AT_FORALL_PROMOTE")
    assert policy.fp32 - inside("cuda", "fp32") - fp32 <= {"binary_cross_entropy", "linalg.matrix_sqrth"}
    assert fp32 <= policy.fp32


def test_every_preset_loads_whatever_release_its_names_are_from(caplog: pytest.LogCaptureFixture) -> None:
    for name in hmp.policies():
        policy = hmp.Policy.load(name)
        assert policy.bf16
        assert policy.dtype is (torch.float16 if policy.name.startswith(("torch-cuda", "apex")) else torch.bfloat16)


@kept_here
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_lists_are_what_this_torch_answers_when_it_is_asked(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lists", f"torch-{device}", "--ask", str(tmp_path / "asked")]) == 0
    asked, kept = hmp.Policy.load(tmp_path / "asked"), hmp.Policy.load(f"torch-{device}")
    assert capsys.readouterr().out == f"{asked}\n"
    assert asked.replace(name=kept.name) == kept == hmp.Policy.load(f"torch-{device}@{RELEASE}")


@pytest.mark.parametrize(
    ("preset", "why"),
    [
        ("habana", "'habana' is no preset that torch can be asked for; write 'torch-' and a device type, such as 'torch-cuda'"),
        ("torch-hpu", f"torch {torch.__version__} has no autocast for 'hpu'; import the package that brings the device first"),
        ("torch-gpu", f"torch {torch.__version__} knows no device 'gpu': "),
    ],
)
def test_what_torch_cannot_be_asked_is_wrong_use(preset: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lists", preset, "--ask", str(tmp_path / "asked")]) == 2
    assert capsys.readouterr().err.startswith(f"hmp lists: {why}")
    assert not (tmp_path / "asked").exists()


def test_releases_with_equal_lists_share_a_folder_and_each_folder_is_named_by_one_of_its_own() -> None:
    folders = {path.name for path in presets.home().iterdir() if "@" in path.name}
    assert folders == {hmp.Policy.load(name).name for name in hmp.policies() if "@" in name}
    assert all(hmp.Policy.load(name).name == name for name in folders)
    assert len({hmp.Policy.load(name).fingerprint for name in folders}) == len(folders)


@pytest.mark.parametrize(
    ("available", "lists"),
    [((), "torch-cpu"), (("cuda",), "torch-cuda"), (("xpu",), "torch-cuda"), (("hpu",), "gaudi"), (("xla",), "torch-xla")],
    ids=str,
)
def test_autocast_is_the_list_of_the_device_in_use(monkeypatch: pytest.MonkeyPatch, available: tuple[str, ...], lists: str) -> None:
    for kind in ("cuda", "xpu", "hpu"):
        module: Any = type("device", (), {"is_available": staticmethod(lambda kind=kind: kind in available)})
        monkeypatch.setattr(torch, kind, module, raising=False)
    if "xla" in available:
        monkeypatch.setitem(sys.modules, "torch_xla", type("package", (), {"__version__": "2.9.0"}))
    assert hmp.Policy.load("autocast") == hmp.Policy.load(lists)


def _linear_on(device: str) -> torch.nn.Module:
    """A layer whose parameters are on a device that need not be there."""
    model = torch.nn.Linear(2, 2, bias=False, device="meta")
    with FakeTensorMode():
        model.weight = torch.nn.Parameter(torch.empty(2, 2, device=device))
    return model


def _pretend_cuda(monkeypatch: pytest.MonkeyPatch, computes_in_bfloat16: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or computes_in_bfloat16)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("natively", [True, False])
def test_autocast_is_the_list_of_the_device_that_the_model_is_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str, natively: bool
) -> None:
    """On a machine with CUDA: a model on the CPU has the CPU's lists, and float16 is for cards without bfloat16 alone."""
    _pretend_cuda(monkeypatch, natively)
    low = torch.bfloat16 if natively or device == "cpu" else torch.float16
    lists = hmp.Policy.load(f"torch-{device}").replace(dtype=low)
    with caplog.at_level(logging.INFO, logger="hmp"):
        model = hmp.apply(_linear_on(device), verbose=True)
    said = next(each for each in caplog.messages if each.startswith("policy "))
    assert said == str(lists) and f"'torch-{device}@" in said and f"low dtype {str(low).removeprefix('torch.')}" in said
    assert f"policy {lists.name!r}" in repr(model)
    on_cuda = hmp.Policy.load("torch-cuda").replace(dtype=torch.bfloat16 if natively else torch.float16)
    assert hmp.Policy.load("autocast") == on_cuda  # without a model: the accelerator's
    assert hmp.Policy.load("torch-cuda").dtype is torch.float16  # as torch has it


def test_autocast_of_a_model_without_parameters_or_on_meta_or_on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_cuda(monkeypatch, True)
    for model in (torch.nn.ReLU(), torch.nn.Linear(2, 2, device="meta"), torch.nn.Sequential(torch.nn.Linear(2, 2), _linear_on("cuda"))):
        assert "'torch-cuda@" in repr(hmp.apply(model))
    assert "'torch-cpu@" in repr(hmp.apply(torch.nn.BatchNorm1d(2, affine=False)))  # it has buffers


def test_what_is_laid_over_autocast_is_laid_over_that_of_the_models_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _pretend_cuda(monkeypatch, True)
    (tmp_path / "base.txt").write_text("autocast\n")
    (tmp_path / "fp32.txt").write_text("linear\n")
    for policy in ("saved8", tmp_path):
        with hmp.record() as report:
            hmp.apply(torch.nn.Linear(2, 2), policy)(torch.ones(1, 2))
        (ran_under,) = report.policies
        assert set(ran_under["fp32"]) - {"linear"} == hmp.Policy.load("torch-cpu").fp32
        assert set(hmp.Policy.load(policy).entries("fp32")) - {"linear"} == hmp.Policy.load("torch-cuda").fp32


def test_the_report_says_which_lists_and_low_dtype_autocast_is() -> None:
    with hmp.record() as report:
        hmp.apply(torch.nn.Linear(2, 2))(torch.ones(1, 2))
    assert re.match(r"hmp record: policy torch-cpu@[0-9.]+ \(bfloat16, ", str(report).splitlines()[0])


@pytest.mark.parametrize(
    ("kind", "said"), [("mtia", []), ("mps", ["hmp keeps no autocast lists of mps; those of CUDA, torch-cuda, stand for them here"])]
)
def test_autocast_is_cudas_list_on_another_accelerator_and_a_warning_where_torch_has_others_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, said: list[str]
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    presets._of_another.cache_clear()
    low = torch.bfloat16 if kind == "mtia" else torch.float16  # torch.mtia says that it has bfloat16, torch.mps does not say
    lists = hmp.Policy.load("torch-cuda").replace(dtype=low)
    assert hmp.Policy.load("autocast") == lists == hmp.Policy.load("autocast")
    assert [record.getMessage() for record in caplog.records if "stand for them" in record.getMessage()] == said


def test_autocast_takes_a_device_that_cannot_say_whether_it_is_there_for_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "hpu", type("device", (), {}), raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hmp.Policy.load("autocast") == hmp.Policy.load("torch-cpu")


@pytest.mark.parametrize(
    ("version", "release", "warned"),
    [
        ("2.13.0+cpu", "2.13", False),
        ("2.7.1", "2.7", False),
        ("2.11.0+cu130", "2.7", False),
        ("2.14.1", "2.15", False),
        ("2.99.0a0+git1", "2.15", True),
        ("2.4.0", "2.7", True),
    ],
)
def test_a_torch_whose_lists_are_not_known_has_those_of_the_nearest_older_release_and_a_warning(
    version: str, release: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert [f"2.{minor}" for minor in range(7, 16)] == FROZEN, "change the versions above with the lists that are kept"
    presets._frozen.cache_clear()
    monkeypatch.setattr(torch, "__version__", version)
    with caplog.at_level(logging.WARNING, logger="hmp"):
        assert hmp.Policy.load("torch-cpu").name == f"torch-cpu@{release}"
        hmp.Policy.load("torch-cpu")
    said = [r.getMessage() for r in caplog.records if "torch-cpu stands for" in r.getMessage()]
    why = f"hmp keeps no autocast lists of torch {version}; torch-cpu stands for torch-cpu@{release} here."
    assert said == ([f"{why} This torch's own: hmp lists torch-cpu --ask FOLDER"] if warned else [])
    presets._frozen.cache_clear()
