"""The devices that tests and `.ci/device` run on: why one cannot be had here, and what brings it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ("cuda", "hpu", "xla", "pretend", "cpu")
# The pip name of what brings Gaudi's "hpu" to torch; it comes from Habana's own index, with the driver's release.
BRIDGE, BRIDGE_PACKAGE = "habana_frameworks", "habana-torch-plugin"


def missing(device: str) -> str:
    """Why there is no such device here, and what would bring it; "" where there is one."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        return f"torch {torch.__version__} (built for {built}) sees no CUDA device here"
    if device == "hpu":
        return _missing_bridge()
    if device == "xla" and find_spec("torch_xla") is None:
        return "there is no torch_xla here: pip install torch==2.9.0 torch_xla==2.9.0, or `.ci/versions xla`"
    if device == "pretend":
        import pretend_device

        return pretend_device.unavailable()
    return ""


# on Gaudi: importing habana_frameworks.torch makes "hpu" a device of torch's, and torch.hpu.is_available() says whether one is free.
def _missing_bridge() -> str:
    import torch

    if find_spec(BRIDGE) is None:
        return f"there is no {BRIDGE} here, Gaudi's bridge to torch: pip install {BRIDGE_PACKAGE}, of the release of the driver's software"
    importlib.import_module(f"{BRIDGE}.torch")
    found = bool(torch.hpu.is_available())  # type: ignore[attr-defined]
    return "" if found else f"{BRIDGE} is here and sees no HPU: `hl-smi` lists those that the driver sees"


def set_up(device: str) -> None:
    """Makes the device known to torch. To be called before the first backward, which makes a thread for each device that there is."""
    if device == "pretend":
        import pretend_device

        pretend_device.set_up()
    elif device == "xla":
        importlib.import_module("torch_xla").device()
    elif device == "hpu":
        importlib.import_module(f"{BRIDGE}.torch")


def environment(device: str) -> dict[str, str]:
    """The variables of a process whose tests run on the device. hmp and the helpers come from this checkout."""
    paths = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("device", "support"))]
    found = {**os.environ, "HMP_TEST_DEVICE": device, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    # Bits are compared: cuBLAS may else choose another algorithm for the same product, and hmp other kernels than torch on a processor
    found |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HMP_LOW_KERNELS": "native"}
    if device == "cpu":  # "the device in use" is then the CPU for hmp too
        found["CUDA_VISIBLE_DEVICES"] = ""
    if device == "xla":  # on the machine's own processor; XLA would else leave out casts to bfloat16 and back, and bits are compared
        found |= {"PJRT_DEVICE": "CPU", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false"}
    return found


def rule_tests() -> list[str]:
    """The files of tests/rules that say something of another device than the CPU: caches, FP8 and saved lists have parts of their own."""
    return [str(file) for name in ("test_r[0-9]*.py", "test_devices.py") for file in sorted((ROOT / "tests" / "rules").glob(name))]


def run_tests(device: str, *arguments: str, seconds: float = 550) -> None:
    """Runs pytest in a process on the device. Fails where it fails, or where no test ran."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--disable-warnings", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment(device), capture_output=True, text=True, timeout=seconds)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout + run.stderr
