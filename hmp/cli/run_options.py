"""What ``hmp run`` makes of the environment, and of having cast nothing."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import hmp

# The environment variable that names a policy where no option does.
POLICY = "HMP_POLICY"
NAMING_FILES = ("policy", "fp8", "saved", "bf16", "fp32")
CASTING = (*NAMING_FILES, "opt_level")


def from_environment(options: argparse.Namespace) -> None:
    """Takes the policy that HMP_POLICY names, where no option says what is cast. HmpError where it names none."""
    named = os.environ.get(POLICY, "")
    if not named or any(getattr(options, name) is not None for name in CASTING):
        return
    try:
        hmp.Policy.load(named)
    except hmp.HmpError as error:
        raise hmp.HmpError(f"{error}; the environment variable {POLICY} names it") from None
    options.policy = named


def say_what_matched_nothing(called: Any) -> None:
    """A line on stderr for each scoped entry that matched none of the modules that the script called."""
    if called is None or not called.unmatched:
        return
    from ..core.observing import speaks  # here: it imports torch

    where = f" of {', '.join(sorted(called.classes))}, which the script called" if called.classes else ": this process called none"
    for entry in called.unmatched if speaks() else ():
        at = f"{entry.place}: " if entry.path else ""
        print(f"hmp run: {at}{entry.text!r} matched no module{where}", file=sys.stderr)


def say_where_nothing_was_cast(options: argparse.Namespace, script: str, arguments: Sequence[str], *, is_wrong_use: bool = False) -> None:
    """A line on stderr where torch was there and hmp cast nothing: for an option of hmp's name behind the script, which was perhaps meant
    for hmp, and of which the script may have said that it does not know it; and where nobody, neither options nor script, asked for
    anything."""
    is_in_use = "hmp.core.convert" in sys.modules
    if "torch" not in sys.modules:
        return
    from ..core.observing import speaks  # here, as what is next: it imports torch

    if is_in_use:
        from ..core.convert import any_policy_used

        if any_policy_used():
            return

    target = f"-m {script}" if options.is_module else script
    known = {name for name in options.parser._option_string_actions if name.startswith("--")} - {"--help"}
    behind = [name for name in dict.fromkeys(each.partition("=")[0] for each in arguments) if name in known]
    if behind:
        told = (
            f"nothing was cast by hmp in this process: what stands behind {script} is the script's own, also {', '.join(behind)}; "
            f"an option for hmp stands before: hmp run {behind[0]} ... {target}"
        )
    elif not is_in_use and not is_wrong_use and options.capture is None:
        told = (
            f"nothing was cast: no option asks for it, and {script} does not use hmp; "
            f"hmp run --policy autocast {target} runs it under torch.autocast's lists"
        )
    else:
        return
    if speaks():
        print(f"hmp run: {told}", file=sys.stderr)
