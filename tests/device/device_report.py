"""The results of .ci/device as one page of markdown, named after the device."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

from device_parts import PARTS, Outcome

_LONGEST = 4000  # characters of one error


def device_name(device: str) -> str:
    """The device in words: "NVIDIA H200", "GAUDI2"; of a CPU its model."""
    import torch

    # on Gaudi: torch.hpu.get_device_name() names the chip, "GAUDI2".
    if device in ("cuda", "hpu"):
        return str(torch.get_device_module(device).get_device_name())
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        found = ""
    return f"{device if device != 'cpu' else 'CPU'}: {found or platform.processor() or platform.machine()}"


def file_name(name: str) -> str:
    """ "nvidia-h200.md" for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".md"


def machine(device: str) -> list[tuple[str, str]]:
    """What the results depend on, apart from the code."""
    import torch

    import hmp

    found = [("device", device_name(device)), ("torch", torch.__version__), ("Python", platform.python_version()), ("hmp", hmp.__version__)]
    if device == "cuda":
        about = torch.cuda.get_device_properties(torch.cuda.current_device())
        found.append(("compute capability", f"{about.major}.{about.minor}, {about.total_memory / 2**30:.0f} GiB"))
        found.append(("CUDA, cuDNN", f"{torch.version.cuda}, {torch.backends.cudnn.version()}"))
    return found


def summary(outcomes: list[Outcome]) -> list[tuple[str, ...]]:
    """A line for each part: what it is, how many checks passed, failed and were not run, and how long it took."""
    return [
        (o.part, PARTS[o.part].about, *(str(o.counts(kind)) for kind in ("passed", "failed", "not run")), f"{o.seconds:.0f} s")
        for o in outcomes
    ]


def page(about: list[tuple[str, str]], command: str, outcomes: list[Outcome]) -> str:
    """The whole page."""
    lines = [f"# {about[0][1]}", "", f"Written by `{command}`.", "", "| what | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in about]
    lines += ["", "| part | what | passed | failed | not run | took |", "|---|---|---|---|---|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in summary(outcomes)]
    for outcome in outcomes:
        lines += ["", f"## {outcome.part}", "", *_part(outcome)]
    return "\n".join(lines) + "\n"


def _part(outcome: Outcome) -> list[str]:
    lines = []
    for kind in ("failed", "not run", "passed"):
        found = [check for check in outcome.checks if check["outcome"] == kind and (kind != "passed" or check["said"])]
        if not found:
            continue
        lines += ["", f"{kind[0].upper()}{kind[1:]}:" if kind != "passed" else "Seen:", ""]
        lines += _failures(found) if kind == "failed" else _by_reason(found)
    for table in outcome.tables:
        lines += ["", table]
    return lines[1:] if lines else ["All passed."]


def _by_reason(found: list[dict[str, Any]]) -> list[str]:
    """A line for each reason, with the checks that have it."""
    reasons: dict[str, list[str]] = {}
    for check in found:
        reasons.setdefault(check["said"].strip(), []).append(check["name"].rpartition("::")[2])
    lines = []
    for reason, names in reasons.items():
        who = f"`{names[0]}`" if len(names) == 1 else f"{len(names)} checks, `{names[0]}` among them"
        first, *rest = reason.splitlines() or [""]
        lines.append(
            f"- {who}: {first}" if not rest else f"- {who}:\n\n" + "\n".join(f"      {line}".rstrip() for line in [first, *rest]) + "\n"
        )
    return lines


def _failures(found: list[dict[str, Any]]) -> list[str]:
    lines = []
    for check in found:
        said = check["said"].strip()
        said = said if len(said) <= _LONGEST else said[: _LONGEST // 4] + "\n[...]\n" + said[-3 * _LONGEST // 4 :]
        lines += [f"`{check['name']}`", "", "```text", said, "```", ""]
    return lines


def quoted(arguments: list[str]) -> str:
    """The command as it was given, where it wrote left out."""
    kept, skip = [], False
    for each in arguments:
        if skip or each.startswith("--write="):
            skip = False
            continue
        if each == "--write":
            skip = True
            continue
        kept.append(each)
    return " ".join([".ci/device", *kept])
