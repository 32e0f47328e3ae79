"""The checks of tests/support/accelerator_checks.py on a real accelerator, whose backward runs on a thread of its own.

There they run on a device made of Python, here on tensors of the device. Those that compare with the CPU's bits are left out: no two
devices round alike, and on_rules.py compares with plain torch on the same device.
"""

from __future__ import annotations

from device_kit import DEVICE, ON_CPU, Checks, NotRun

check = Checks()


def _checks_of_the_rules() -> Checks:
    import python_device

    # what accelerator_checks imports by name
    python_device.NAME = DEVICE
    python_device.to_device = lambda t: t.detach().to(DEVICE).requires_grad_(t.requires_grad)
    python_device.to_cpu = lambda value: value.cpu() if hasattr(value, "cpu") else value
    import accelerator_checks

    found = Checks()
    for name, function in accelerator_checks.CHECKS.items():
        if "agree" not in function.__code__.co_names and "_agree_at_all_sites" not in function.__code__.co_names:
            found.all[name] = _no_checkpoint if DEVICE == "xla" and name.startswith("r14_") else function
    return found


def _no_checkpoint() -> None:
    raise NotRun("torch.utils.checkpoint knows no XLA; on_rules.py tries that of torch_xla")


if ON_CPU:

    @check
    def backward_on_a_thread_of_the_device() -> None:
        raise NotRun("only on an accelerator: the CPU's backward runs on the calling thread")

else:
    check = _checks_of_the_rules()
