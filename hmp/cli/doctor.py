"""``hmp doctor``: what hmp can run with here, and what prevents a run."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import hmp

from ..errors import to_install
from ..tools.extras import EXTRAS, lacking
from .output import add_json, give_json
from .parser import Parser

# The flags of /proc/cpuinfo that say how fast a low-precision dtype is.
_SIZE, _ROUNDS = 256, 5  # of the products that are timed: a fifth of a second where the kernel takes 90 times float32's time
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_int8", "bf16", "fphp", "asimdhp")


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "doctor",
        example="hmp doctor\nhmp doctor --json -",
        help="show what hmp can run with here, and what prevents a run",
        description="Prints versions, devices, which low-precision dtypes have kernels, the processor's instructions for them, which "
        "extras are installed, what is converted, and other hmp's on the path. "
        "Exit status 0, 1 if something prevents a run, 2 for wrong use.",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0, 1 if something prevents a run, 2 if the JSON cannot be written."""
    found = _found()
    if give_json(options.json, found):
        _say(found)
    return 1 if found["problems"] else 0


def _found() -> dict[str, Any]:
    problems: list[str] = []
    home = Path(hmp.__file__).resolve().parent
    found: dict[str, Any] = {"hmp": hmp.__version__, "folder": str(home), "python": platform.python_version(), "torch": None}
    try:
        import torch

        found |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "devices": _devices(torch)}
        found |= {"low_kernels": _low_kernels(torch), "patched": _patched()}
        found |= {"autocast": hmp.Policy.load("autocast").name, "converted": hmp.is_converted()}
    except hmp.HmpError as error:
        problems.append(str(error))
    except ImportError as error:
        problems.append(f"torch cannot be imported ({error}): install it first, see https://pytorch.org/get-started")
    except Exception as error:  # a torch that lacks something
        problems.append(f"hmp does not work with torch {found['torch']}: {error}")
    found["instructions"] = _instructions()
    found["extras"] = {extra: [name for name in names if lacking(extra, name)] for extra, names in EXTRAS.items()}
    found["others"] = _others(home)
    problems += [f"{other}: another hmp, which an import may find instead of this one; take it away" for other in found["others"]]
    return {**found, "problems": problems}


def _devices(torch: Any) -> dict[str, Any]:
    """Return each device's name, which low-precision dtypes have kernels there, and why no copies of casts are kept, "" where they are."""
    from ..core.cast_cache import mark_proof

    devices = [torch.device("cpu")]
    if torch.accelerator.is_available():
        devices += [torch.device(torch.accelerator.current_accelerator().type, at) for at in range(torch.accelerator.device_count())]
    return {
        str(device): {"name": _name(torch, device), "kernels": _kernels(torch, device), "copies": mark_proof.what_fails(device)}
        for device in devices
    }


def _name(torch: Any, device: Any) -> str:
    tell = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return platform.processor() or platform.machine() if tell is None or device.type == "cpu" else str(tell(device))


def _kernels(torch: Any, device: Any) -> dict[str, bool]:
    """Return whether a product of matrices runs in each low-precision dtype."""
    from ..core.torch_private import scaled_mm

    def product(dtype: Any) -> Any:
        x = torch.ones(16, 16, device=device).to(dtype)
        if dtype in (torch.bfloat16, torch.float16):
            return x @ x
        one = torch.ones((), device=device)
        assert scaled_mm is not None
        return scaled_mm(x, x.t(), one, one, out_dtype=torch.bfloat16)

    found = {}
    for name in ("bfloat16", "float16", "float8_e4m3fn"):
        try:
            with hmp.disable_casts():
                found[name] = bool((product(getattr(torch, name)).float() == 16).all())
        except Exception:  # torch refuses in as many ways as it has kernels
            found[name] = False
    return found


def _low_kernels(torch: Any) -> dict[str, Any]:
    """Return how long a product of matrices takes on the CPU, as a multiple of float32's time.

    `kernel` is torch's for the dtype, `rounded` a float32 product of rounded inputs; `computes_in` is which of the two hmp uses.
    """
    from ..core import low_kernels
    from ..tools.benchmark.timing import least_seconds

    found, threads = {}, torch.get_num_threads()
    x = torch.ones(_SIZE, _SIZE)
    torch.set_num_threads(1)  # a second one waits for whatever else the machine does
    try:
        for name in ("bfloat16", "float16"):
            low = getattr(torch, name)
            y = x.to(low)
            steps = (lambda: torch.mm(x, x), lambda: torch.mm(y, y), lambda: torch.mm(x.to(low).float(), x.to(low).float()).to(low))  # noqa: B023
            with hmp.disable_casts(), torch.no_grad():
                least_seconds(steps, 1, x.device)  # the first call of each chooses its kernel
                in_float32, kernel, rounded = least_seconds(steps, _ROUNDS, x.device)
            computes_in = "float32" if low in low_kernels.computed_in_float32() else name
            found[name] = {"kernel": kernel / in_float32, "rounded": rounded / in_float32, "computes_in": computes_in}
    finally:
        torch.set_num_threads(threads)
    return {"choice": low_kernels.choice(), "products": found}


def _patched() -> dict[str, int]:
    """Return how many names of torch's ops a list of `linear` alone patches, by the rule that each is patched for."""
    from ..core.dispatch import decisions

    decided = decisions.to_patch(decisions.decide(hmp.Policy("one op", bf16=frozenset({"linear"}))))
    counted: Counter[str] = Counter()
    for each in decided.values():
        counted[each.kind.number] += len(each.sites)
    return dict(sorted(counted.items(), key=lambda pair: -pair[1]))


def _instructions() -> list[str]:
    """Return the processor's flags for low-precision dtypes, as Linux reports them; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    flags = {word for line in text.splitlines() if line.lower().startswith(("flags", "features")) for word in line.split()}
    return [name for name in _INSTRUCTIONS if name in flags]


def _others(home: Path) -> list[str]:
    """Return packages and modules on the path, and distributions, that are called hmp and are not this one."""
    found = []
    for entry in dict.fromkeys(os.path.realpath(each or os.getcwd()) for each in sys.path):
        for place, source in ((Path(entry) / "hmp", "__init__.py"), (Path(entry) / "hmp.py", "")):
            if (place / source).is_file() and place.resolve() != home:
                found.append(str(place))
    return found + sorted({f"distribution {each.name} {each.version}" for each in importlib.metadata.distributions() if each.name == "hmp"})


def _verdict(name: str, kernel: float, rounded: float, computes_in: str) -> str:
    from ..core.formatting import two_digits  # which imports torch: only where there is one

    in_kernel, in_float32 = two_digits(kernel), two_digits(rounded)
    times = f"products in {name} take {in_kernel} times float32's time by torch's kernel, {in_float32} times in float32 on rounded inputs"
    if computes_in == "float32":
        return f"{times}: hmp computes them so; HMP_LOW_KERNELS=native has it use the kernel"
    return f"{times}: hmp uses the kernel; HMP_LOW_KERNELS=float32 has it compute in float32"


def _say(found: dict[str, Any]) -> None:
    print(f"hmp {found['hmp']} in {found['folder']}, Python {found['python']}, torch {found['torch'] or 'missing'}")
    for device, told in found.get("devices", {}).items():
        kernels = ", ".join(f"{name} {'yes' if runs else 'no'}" for name, runs in told["kernels"].items())
        copies = f"no copies are kept: {told['copies']}" if told["copies"] else "copies are kept"
        print(f"  {device}: {told['name']}; products in {kernels}; {copies}")
    if "threads" in found:
        print(f"  threads: {found['threads']}")
    print(f"  instructions for low-precision dtypes: {', '.join(found['instructions']) or 'none known'}")
    if "low_kernels" in found:
        for name, told in found["low_kernels"]["products"].items():
            print(f"  {_verdict(name, told['kernel'], told['rounded'], told['computes_in'])}")
    if "patched" in found:
        by_rule = ", ".join(f"{rule} {count}" for rule, count in found["patched"].items())
        print(f"  a list of linear alone patches {sum(found['patched'].values())} names of torch's ops, by rule: {by_rule}")
    if "autocast" in found:
        print(f"  policy autocast is {found['autocast']} here; {'a' if found['converted'] else 'no'} policy is in force for the process")
    for extra in found["extras"]:
        lacks = lacking(extra)
        print(f"  extra {extra}: {f'needs {lacks}: {to_install(extra)}' if lacks else 'installed'}")
    for problem in found["problems"]:
        print(f"problem: {problem}")
    print(f"{len(found['problems'])} problems" if len(found["problems"]) != 1 else "1 problem")
