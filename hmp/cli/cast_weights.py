"""``hmp cast-weights FILE --model package:make -o OUT``: a file of weights, each in the dtype in which its ops use it."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hmp

from ..errors import to_install
from ..tools.extras import lacking
from .output import add_json, check_folder, give
from .parser import Parser

if TYPE_CHECKING:
    import torch


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "cast-weights",
        example="hmp cast-weights model.safetensors --model mymodel:make --policy autocast -o half.safetensors",
        help="write a file of weights in the dtypes in which a policy uses them",
        description="Loads a safetensors file into the model that MODULE:FUNCTION makes, calls it once with the batch that comes with it, "
        "and writes the weights in the low-precision dtype in which every op took them; the others stay "
        "(hmp.cast_weights()). Exit status 0 done, 2 for wrong use.",
    )
    parser.add_argument("file", metavar="FILE", help="the model's weights, a safetensors file")
    made = "a function of a module on the path or in this folder, which returns the model and a batch"
    parser.add_argument("--model", required=True, metavar="MODULE:FUNCTION", help=made)
    parser.add_argument("--policy", default="autocast", metavar="NAME", help="a preset's name or a folder of list files (default autocast)")
    parser.add_argument("--only", metavar="GLOB", help="take only weights whose name, or a module around whom, matches")
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="the file to write")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0, 2 if file, model or policy cannot be used."""
    check_folder(options.output, "-o ")
    if Path(options.output).exists() and Path(options.output).samefile(options.file):
        raise hmp.HmpError(f"-o {options.output} is the file that is read; give another name")
    if lacks := lacking("weights"):
        raise hmp.HmpError(f"needs {lacks}: {to_install('weights')}")
    from safetensors.torch import save_model

    policy = hmp.Policy.load(options.policy)
    model, batch = _made(options.model)
    _load(model, options.file)
    result = hmp.cast_weights(model.eval(), batch, policy, only=options.only)
    save_model(model, options.output, metadata={"format": "pt"})
    give(options, result)
    return 0


def _made(text: str) -> tuple[torch.nn.Module, Any]:
    """Return the model and the batch that `package.module:function` returns."""
    import torch

    module, _, function = text.partition(":")
    if not (module and function):
        raise hmp.HmpError(f"--model {text}: give a module and a function in it, such as mymodel:make")
    sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise hmp.HmpError(f"--model {text}: there is no module {module!r} on the path or in this folder") from None
    if not callable(make):
        raise hmp.HmpError(f"--model {text}: {module} has no function {function!r}")
    made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
        raise hmp.HmpError(f"--model {text}: {function}() has to return (model, batch), and returned a {type(made).__name__}")
    return made


def _load(model: torch.nn.Module, file: str) -> None:
    """Load the file into the model, tensor by tensor."""
    import torch
    from safetensors import SafetensorError, safe_open
    from tqdm import tqdm

    found = model.state_dict()
    try:
        with safe_open(file, "pt") as weights:
            names = list(weights.keys())
            unknown = [name for name in names if name not in found]
            loaded = {found[name].data_ptr() for name in names if name in found}
            missing = [name for name, tensor in found.items() if tensor.data_ptr() not in loaded]  # tied weights are saved once
            if unknown or missing:
                lacks = f"has no {missing[0]!r}" if missing else f"has {unknown[0]!r}, which the model lacks"
                raise hmp.HmpError(f"{file} is not of this model: it {lacks} ({len(missing)} missing, {len(unknown)} unknown)")
            with torch.no_grad():
                for name in tqdm(names, f"loading {file}", leave=False, disable=None):  # None: if stderr isn't a terminal
                    found[name].copy_(weights.get_tensor(name))
    except (FileNotFoundError, SafetensorError) as error:
        raise hmp.HmpError(f"{file} cannot be read as a safetensors file: {error}") from None
