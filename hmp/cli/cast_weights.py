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
from .output import Parser, add_json, check_folder, give

if TYPE_CHECKING:
    import torch


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "cast-weights",
        example="hmp cast-weights model.safetensors --model mymodel:make --policy autocast -o half.safetensors",
        help="write a file of weights in the dtypes in which ops use them under a policy",
        description="Loads a safetensors file into the model that MODULE:FUNCTION returns, and writes the weights. A weight that every op "
        "uses in bfloat16 or float16 is written in that dtype; all others are written unchanged. If the function also returns a batch, the "
        "model is run on it to see its ops; without one its modules say which op uses a weight (see hmp.cast_weights()). Exit status 0 "
        "done, 2 for wrong use.",
    )
    parser.add_argument("file", metavar="FILE", help="the model's weights, a safetensors file")
    made = "a function that returns the model, or (model, batch), in a module that python can import from here"
    parser.add_argument("--model", required=True, metavar="MODULE:FUNCTION", help=made)
    parser.add_argument("--policy", default="autocast", metavar="NAME", help="a preset's name or a folder of list files (default autocast)")
    parser.add_argument("--only", metavar="GLOB", help="cast only weights whose name, or whose module's path, matches")
    parser.add_argument(
        "--keep", action="append", default=[], metavar="GLOB", help="leave weights whose name, or whose module's path, matches; repeatable"
    )
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="the file to write")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0, 2 if file, model or policy cannot be used."""
    check_folder(options.output, "-o")
    if Path(options.output).exists() and Path(options.output).samefile(options.file):
        raise hmp.HmpError(f"-o {options.output}: expected another file than the one that is read; give another name")
    if lacks := lacking("weights"):
        raise hmp.HmpError(f"needs {lacks}: {to_install('weights')}")
    from safetensors.torch import save_model

    policy = hmp.Policy.load(options.policy)
    model, batch = _made(options.model)
    _load(model, options.file)
    result = hmp.cast_weights(model.eval(), batch, policy, only=options.only, keep=options.keep)
    save_model(model, options.output, metadata={"format": "pt"})
    give(options, result)
    return 0


def _made(text: str) -> tuple[torch.nn.Module, Any]:
    """Return the model that `package.module:function` returns, and its batch, or None."""
    import torch

    module, _, function = text.partition(":")
    if not (module and function):
        raise hmp.HmpError(f"--model {text}: expected MODULE:FUNCTION, such as mymodel:make")
    sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise hmp.HmpError(f"--model {text}: python finds no module {module!r}; start hmp in its folder, or set PYTHONPATH") from None
    if not callable(make):
        raise hmp.HmpError(f"--model {text}: {module} has no function {function!r}; name one that returns the model, or (model, batch)")
    made = make()
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise hmp.HmpError(f"--model {text}: expected {function}() to return a model, or (model, batch), got {type(made).__name__}")
    return model, batch


def _load(model: torch.nn.Module, file: str) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    try:
        load_model(model, file)
    except (FileNotFoundError, SafetensorError) as error:
        raise hmp.HmpError(f"{file}: expected a safetensors file: {error}") from None
    except RuntimeError as error:  # torch's and safetensors' words for missing, unknown and misshapen weights
        raise hmp.HmpError(f"{file}: expected the weights of this model; give another --model: {' '.join(str(error).split())}") from None
