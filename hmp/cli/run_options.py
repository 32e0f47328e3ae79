"""What ``hmp run`` makes of options behind the script's name, of the environment, and of having been asked for nothing."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import hmp

__all__ = ["POLICY", "from_environment", "refuse_behind", "say_where_nothing_was_cast"]

# The environment variable that names a policy where no option does.
POLICY = "HMP_POLICY"
NAMING_FILES = ("policy", "fp8", "bf16", "fp32")
CASTING = (*NAMING_FILES, "opt_level")


def refuse_behind(options: argparse.Namespace, script: str, arguments: Sequence[str]) -> None:
    """HmpError for an option of hmp's behind the script's name: it would do nothing there, in silence, or it is the script's own.

    Behind a `--` of the script's all is the script's; so is `--verbose` where hmp could not take it.
    """
    known = {name for name in options.parser._option_string_actions if name.startswith("--")} - {"--help"}
    if all(getattr(options, name) is None for name in CASTING):
        known -= {"--verbose"}
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    found = next((each for each in own if each in known or each.partition("=")[0] in known), None)
    if found is None:
        return
    before, behind = ("-m ", "-m -- ") if options.is_module else ("", "-- ")
    raise hmp.HmpError(
        f"{found} stands behind {script}, where arguments are the script's own, and hmp has an option of that name. Is it for hmp? Then "
        f"write it before: hmp run {found} ... {before}{script}. Is it the script's? Then say so with --: "
        f"hmp run {behind}{script} {found} ..."
    )


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


def say_where_nothing_was_cast(script: str) -> None:
    """A line on stderr where torch computed and nobody, neither options nor script, asked hmp for anything."""
    if "torch" in sys.modules and "hmp.session" not in sys.modules:
        print(
            f"hmp run: nothing was cast: no option asks for it, and {script} does not use hmp; "
            f"hmp run --policy autocast {script} runs it under torch.autocast's lists",
            file=sys.stderr,
        )
