"""``hmp doctor``: what hmp can run with here, and what prevents a run."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hmp

from ..errors import to_install
from ..tools.extras import EXTRAS, lacking
from .output import Parser, add_json, give_json

# The flags of /proc/cpuinfo that say how fast a low-precision dtype is.
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_int8", "bf16", "fphp", "asimdhp")


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "doctor",
        example="hmp doctor\nhmp doctor --json -",
        help="check your setup, and print what prevents hmp from running",
        description="Prints versions, devices, the low-precision dtypes that they have kernels for, the processor's instructions for them, "
        "the installed extras, whether the process is converted, which references to torch's functions hmp then can't replace, and other "
        "packages called hmp. Exit status 0 if hmp can run, 1 if not, 2 for wrong use.",
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
    if give_json(options.json, found):
        extras = {extra: f"needs {lacks}: {to_install(extra)}" if (lacks := lacking(extra)) else "installed" for extra in EXTRAS}
        print(*_lines(found | {"extras": extras}), sep="\n")
    return 1 if problems else 0


def _of_torch() -> dict[str, Any]:
    """Return what torch has here, and what hmp makes of it.

    `products` is how long a product of matrices takes on the CPU in torch's kernel for the dtype, and in float32 on rounded inputs, as
    multiples of float32's time; `patched` how many names of torch's ops a list of `linear` alone patches, by rule.
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

    def seconds(product: Callable[[], object]) -> float:
        return float(Timer("product()", globals={"product": product}).timeit(3).median)

    devices, products, patched = [torch.device("cpu")], {}, Counter[str]()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        devices += [torch.device(accelerator.type, at) for at in range(torch.accelerator.device_count())]
    x = torch.ones(256, 256)
    with hmp.disable_casts(), torch.no_grad():
        lows = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
        kernels = {device: {dtype_name(dtype): runs(device, dtype) for dtype in lows} for device in devices}
        wide = seconds(lambda: x @ x)
        for dtype in lows[:2]:
            y, computed = x.to(dtype), torch.float32 if dtype in emulation.computed_in_float32() else dtype
            rounded = functools.partial(_rounded, x, dtype)
            times = {"kernel": seconds(functools.partial(torch.mm, y, y)) / wide, "rounded": seconds(rounded) / wide}
            products[dtype_name(dtype)] = {**times, "computes_in": dtype_name(computed)}
    for each in tables.patched_by(hmp.Policy("one op", bf16=frozenset({"linear"}))).values():
        patched[each.ruled.rule.number or each.ruled.rule.label] += len(each.sites)
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "devices": {str(device): {"kernels": kernels[device]} for device in devices},
        "low_kernels": {"choice": emulation.choice(), "products": products},
        "patched": dict(patched.most_common()),
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


def _lines(values: dict[str, Any], indent: str = "") -> Iterator[str]:
    """Yield a line for each value; below a line of its own those of a dict that holds dicts."""
    for name, value in values.items():
        if isinstance(value, dict) and any(isinstance(each, dict) for each in value.values()):
            yield f"{indent}{name}:"
            yield from _lines(value, f"{indent}  ")
        else:
            yield f"{indent}{name}: {_said(value)}"


def _said(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{name} {_said(each)}" for name, each in value.items()]
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if isinstance(value, float):
        return f"{value:.2g} of float32's time"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
