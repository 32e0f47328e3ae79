"""Functions whose code is exchanged stay ordinary functions to whoever looks at them."""

from __future__ import annotations

import sys

import pytest
import torch

import hmp


def test_r16_the_frames_of_patched_functions_can_be_looked_at():
    """Debuggers, tracebacks and libraries that walk the stack read the locals of every frame; closures are the hard case."""
    seen = []

    class Looking(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            frame = sys._getframe()
            while frame is not None:
                seen.append((frame.f_code.co_name, dict(frame.f_locals)))
                frame = frame.f_back
            return super().__torch_function__(func, types, args, kwargs or {})

    with hmp.convert(policy="resnet50"):
        x = torch.randn(1, 1, 4, 4).as_subclass(Looking)
        for swapped in (torch.nn.functional.max_pool2d, torch.nn.functional.relu, torch.Tensor.__rsub__, torch.nn.utils.clip_grad_norm_):
            assert callable(swapped)
        torch.nn.functional.max_pool2d(x, 2)
        torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0)
        with pytest.raises(TypeError) as error:
            torch.nn.functional.max_pool2d(x)
        str(error.getrepr(showlocals=True))
    assert seen
