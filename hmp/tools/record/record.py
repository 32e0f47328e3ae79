"""record(): a report of what runs in which precision, for as long as its `with` lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...core import low_kernels
from ...core.compiler_stance import running_uncompiled
from ...core.formatting import dtype_name, provenance
from ...core.observe import listen
from .recorder import Recorder
from .report import Report


@contextmanager
def record(*, synchronize: bool = False) -> Iterator[Report]:
    """Record every op that hmp decides, in every thread, and in this one what no list decides.

    The report can be read inside as well as after, and keeps what was recorded when an exception leaves the context. Recordings nest;
    each has its own report. Outside nothing is observed and nothing is paid. What torch.compile has compiled runs uncompiled meanwhile.

    Args:
        synchronize: Whether the accelerator is waited for around each op and cast, so that times are those of its kernels. Without it they
            are what the calling thread spent.

    Yields:
        The report.

    Example:
        >>> net, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
        >>> with hmp.casts("autocast"), hmp.record() as report:
        ...     y = net(x)
        >>> report.assert_dtype("linear", torch.bfloat16)
    """
    recorder = Recorder(synchronize)
    in_float32 = {dtype_name(dtype): low_kernels.why(dtype) for dtype in low_kernels.computed_in_float32()}
    report = Report((), (), (), (), device=_device(), in_float32=in_float32, **provenance())
    report._recorder = recorder
    try:
        with running_uncompiled(), listen(recorder, recorder.models, recorder.packed):
            yield report
    finally:
        report._end()


def _device() -> str:
    # without asking, a torch that was built for CUDA names it where there is none
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type
