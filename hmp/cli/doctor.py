"""``hmp doctor``: what hmp can run with here, and what prevents a run."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hmp

from ..errors import to_install
from ..tools.extras import EXTRAS, lacking
from .output import Parser, add_json, give_json

_ROUNDS = 15
# The flags of /proc/cpuinfo that say how fast a low-precision dtype is.
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_int8", "bf16", "fphp", "asimdhp")


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "doctor",
        example="hmp doctor",
        help="check your setup, and print what prevents hmp from running",
        description="Prints versions, devices, the low-precision dtypes that they have kernels for, the processor's instructions for them, "
        "how long they take there, the installed extras, which references to torch's functions hmp can't replace, and other packages "
        "called hmp. Exit status 0 if hmp can run, 1 if not, 2 for wrong use.",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0, 1 if something prevents a run, 2 if the JSON cannot be written."""
    home = Path(hmp.__file__).resolve().parent
    found: dict[str, Any] = {"hmp": hmp.__version__, "folder": str(home), "python": platform.python_version(), "torch": None}
    others, problems = _others(home), []
    try:
        found |= _of_torch()
    except hmp.HmpError as error:
        problems.append(str(error))
    except ImportError as error:
        problems.append(f"torch cannot be imported ({error}); install it, see https://pytorch.org/get-started")
    except Exception as error:  # a torch that lacks something
        problems.append(f"hmp does not work with this torch: {error}")
    info = Path("/proc/cpuinfo")
    flags = info.read_text(encoding="utf-8", errors="replace").split() if info.is_file() else []
    found["instructions"] = [name for name in _INSTRUCTIONS if name in flags]
    found["extras"] = {extra: [name for name in names if lacking(extra, name)] for extra, names in EXTRAS.items()}
    problems += [f"{other}: another hmp, which `import hmp` may find instead of this one; uninstall or remove it" for other in others]
    found |= {"others": others, "problems": problems}
    give_json(options.json, found)
    print(*_sentences(found), sep="\n")
    return 1 if problems else 0


def _of_torch() -> dict[str, Any]:
    """Return what torch has here, and what hmp makes of it.

    `products` is how long a product of matrices takes on the CPU in torch's kernel for the dtype, and in float32 on rounded inputs, as
    multiples of float32's time; `patched` how many names of torch's ops a list of `linear` alone patches.
    """
    import torch
    from torch.utils.benchmark import Timer

    from ..core import tables
    from ..core.casting import dtype_name
    from ..core.rules import emulation
    from ..core.torch_private import scaled_mm

    def runs(device: torch.device, dtype: torch.dtype) -> bool:
        one, x = torch.ones((), device=device), torch.ones(16, 16, device=device)
        try:
            low = x.to(dtype)
            product = low @ low if dtype.itemsize == 2 or scaled_mm is None else scaled_mm(low, low.t(), one, one, out_dtype=torch.bfloat16)
            return bool((product.float() == 16).all())
        except Exception:  # torch refuses in as many ways as it has kernels
            return False

    devices = [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        devices += [torch.device(accelerator.type, at) for at in range(torch.accelerator.device_count())]
    x = torch.ones(256, 256)
    with hmp.disable_casts(), torch.no_grad():
        lows = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
        kernels = {device: {dtype_name(dtype): runs(device, dtype) for dtype in lows} for device in devices}
        calls = {"float32": functools.partial(torch.mm, x, x)}
        for dtype in lows[:2]:
            calls[f"{dtype_name(dtype)} kernel"] = functools.partial(torch.mm, x.to(dtype), x.to(dtype))
            calls[f"{dtype_name(dtype)} rounded"] = functools.partial(_rounded, x, dtype)
        timers = {name: Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads()) for name, call in calls.items()}
        rounds = [{name: timer.timeit(1).median for name, timer in timers.items()} for _ in range(_ROUNDS)]
    best = {name: min(seconds[name] for seconds in rounds) for name in timers}  # what else the machine does only adds to a time
    products = {}
    for dtype in lows[:2]:
        times = {how: best[f"{dtype_name(dtype)} {how}"] / best["float32"] for how in ("kernel", "rounded")}
        computed = torch.float32 if dtype in emulation.computed_in_float32() else dtype
        products[dtype_name(dtype)] = {**times, "computes_in": dtype_name(computed)}
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "devices": {str(device): {"kernels": kernels[device]} for device in devices},
        "low_kernels": {"choice": emulation.choice(), "products": products},
        "patched": sum(len(each.sites) for each in tables.patched_by(hmp.Policy("one op", bf16=frozenset({"linear"}))).values()),
        "autocast": hmp.Policy.load("autocast").name,
        "converted": hmp.is_converted(),
        "unreachable": list(map(str, hmp.unreachable())),
    }


def _rounded(x: Any, dtype: Any) -> Any:
    low = x.to(dtype).float()
    return (low @ low).to(dtype)


def _others(home: Path) -> list[str]:
    """Return packages and modules on the path, and distributions, that are called hmp and are not this one."""
    found = []
    for entry in dict.fromkeys(os.path.realpath(each or os.getcwd()) for each in sys.path):
        for place, source in ((Path(entry) / "hmp", "__init__.py"), (Path(entry) / "hmp.py", "")):
            if (place / source).is_file() and place.resolve() != home:
                found.append(str(place))
    return found + sorted({f"distribution {each.name} {each.version}" for each in importlib.metadata.distributions() if each.name == "hmp"})


def _sentences(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was found, a line each."""
    yield f"hmp {found['hmp']} in {found['folder']}, with Python {found['python']}."
    if found["torch"] is not None:
        yield f"torch {found['torch']}, number of threads: {found['threads']}. The preset autocast means {found['autocast']} here."
        for device, values in found["devices"].items():
            kernels = [name for name, runs in values["kernels"].items() if runs]
            yield f"{device} multiplies matrices in {', '.join(kernels) or 'no low-precision dtype'}."
        yield f"The processor's instructions for low precision: {', '.join(found['instructions']) or 'none that hmp knows'}."
        for name, times in found["low_kernels"]["products"].items():
            chosen = "rounds the inputs and computes in float32" if times["computes_in"] == "float32" else "calls torch's kernel"
            yield (
                f"A matrix multiplication in {name} on the CPU takes {times['kernel']:.3g} of float32's time in torch's kernel, and "
                f"{times['rounded']:.3g} in float32 on rounded inputs. hmp {chosen} (HMP_LOW_KERNELS is {found['low_kernels']['choice']})."
            )
        if found["converted"]:
            yield "This process is converted (hmp.convert())."
        yield from (f"hmp can't replace a reference: {each}" for each in found["unreachable"])
    yield "Extras:"
    yield from (f"  {extra}: {f'needs {lacks}: {to_install(extra)}' if (lacks := lacking(extra)) else 'installed'}" for extra in EXTRAS)
    yield from (f"Problem: {each}" for each in found["problems"])
    if not found["problems"]:
        yield "Nothing prevents hmp from running."
