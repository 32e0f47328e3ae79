"""Turns a policy into wrappers, one for each torch function that it changes, and puts in its place a dispatcher that calls the wrapper."""

from . import deciding, dispatchers, function_protocol, fx_interpreter, placement, user_functions
from .user_functions import bf16_function, fp32_function, promote_function

__all__ = [
    "bf16_function",
    "deciding",
    "dispatchers",
    "fp32_function",
    "function_protocol",
    "fx_interpreter",
    "placement",
    "promote_function",
    "user_functions",
]
