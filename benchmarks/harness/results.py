"""The results of a part: rows of the targets table, lines of detail, and every sample."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import opening
from .reasons import reason
from .stats import Estimate

# By which torch, oneDNN and MKL run the kernels of another processor.
KERNELS_BY = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


@dataclass(frozen=True)
class Row:
    """A row of the targets table. `met` is None if nothing was measured against a target."""

    what: str
    target: str
    result: str
    met: bool | None
    within_noise: bool = False  # the result is no further from the target than its noise

    @property
    def verdict(self) -> str:
        return {True: "met", False: "missed", None: "-"}[self.met] + (", within noise" if self.within_noise else "")

    @property
    def because(self) -> str:
        """Why it misses its target, after a colon."""
        return f": {reason(self.what)}" if self.met is False and not self.within_noise and reason(self.what) else ""


def at_most(what: str, limit: float, figure: Estimate, result: str, unit: str = "") -> Row:
    """Return the row of a figure that should be at most `limit`, without a verdict if it was measured too few times."""
    target = f"≤ {limit:.2f}" if isinstance(limit, float) else f"≤ {limit}"
    if not figure.known:
        return Row(what, target + unit, result, None)
    return Row(what, target + unit, result, figure.value <= limit, within_noise=abs(figure.value - limit) < figure.noise)


@dataclass
class Found:
    """The results of one part. `samples` goes into the JSON file, `failures` fail the run.

    `opening` contains its sentences of the opening of RESULTS.md, by a topic of `opening.TOPICS`.
    """

    part: str
    rows: list[Row] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    samples: dict[str, Any] = field(default_factory=dict)
    opening: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def machine(device: str) -> dict[str, Any]:
    """Return what the figures depend on, apart from the code."""
    import hmp

    found = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hmp": hmp.__version__,
        "device": device,
        "bf16 instructions": _instructions(),
        "kernels": _kernels(),
        "bf16 matmul / float32 matmul": _matmul_ratio(device),
        "load before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    return found


def _matmul_ratio(device: str) -> float:
    """Return the time of a bfloat16 matrix product over a float32 one: above 1, casts are a small part of a model's time."""
    x = torch.randn(512, 512, device=device)
    low = x.bfloat16()

    def seconds(t: torch.Tensor) -> float:
        samples = []
        for _ in range(5):
            start = time.perf_counter()
            float((t @ t)[0, 0])  # reading a number waits for a device
            samples.append(time.perf_counter() - start)
        return min(samples)

    return round(seconds(low) / seconds(x), 2)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _instructions() -> list[str]:
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return []
    return sorted(flags & {"amx_bf16", "avx512_bf16", "avx512f", "avx2"})


def _kernels() -> str:
    """Return whose kernels torch runs, and the environment variables that chose them."""
    chosen = [f"{name}={os.environ[name]}" for name in KERNELS_BY if name in os.environ]
    return " ".join([torch.backends.cpu.get_cpu_capability(), *(["by", *chosen] if chosen else [])])


def table(rows: list[Row], markdown: bool = False) -> str:
    """Return the targets table as text."""
    cells = [("what", "target", "result", "verdict"), *((r.what, r.target, r.result, r.verdict) for r in rows)]
    if markdown:
        cells = [cells[0], *((*line[:3], line[3] + r.because) for line, r in zip(cells[1:], rows, strict=True))]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells]
        return "\n".join([lines[0], "|---|---|---|---|", *lines[1:]])
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, [*widths, 0], strict=True)).rstrip() for line in cells]
    return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:]])


def beside(before: Path, rows: list[Row]) -> list[str]:
    """Return a table of the rows that `before`, the results.json of an earlier run, has too: its results and the new ones."""
    then = json.loads(before.read_text(encoding="utf-8"))
    results = {_measured(row["what"]): row["result"] for row in then["rows"]}
    lines = [f"| {_measured(r.what)} | {results[_measured(r.what)]} | {r.result} |" for r in rows if _measured(r.what) in results]
    return [f"`{then['command']}`, load before: {then['machine']['load before']}", "", "| what | before | now |", "|---|---|---|", *lines]


def _measured(what: str) -> str:
    """Return the subject of a row, without the number of models."""
    return re.sub(r": geometric mean of \d+$", ": geometric mean", what)


def report(
    found: list[Found],
    about: dict[str, Any],
    command: str,
    seconds: float,
    plots: list[Path],
    before: tuple[str, Path] | None = None,
    name: str = "RESULTS",
) -> str:
    """Return the page `name`.md: what a user wants to know with one picture, where it was measured, the table, every part's detail; against
    a run `before`, by the name of what it measured."""
    first = [plot for plot in plots if plot.stem == "steps"]
    lines = [f"# {name.replace('_', ' ').capitalize()}", ""]
    if sentences := {topic: sentence for part in found for topic, sentence in part.opening.items()}:
        lines += [*opening.lines(sentences), ""]
    lines += _pictures(first)
    lines += [f"`{command}`, {seconds:.0f} s. Written by the command; the samples are in `{name.lower()}.json`.", ""]
    lines += [f"- {name}: {', '.join(value) if isinstance(value, list) else value}" for name, value in about.items()]
    lines += ["", table([row for part in found for row in part.rows], markdown=True), ""]
    for part in found:
        lines += [f"## {part.part}", "", "```text", *part.details, "```", ""]
    if before is not None:
        lines += [f"## Beside {before[0]}", "", *beside(before[1], [row for part in found for row in part.rows]), ""]
    lines += _pictures([plot for plot in plots if plot not in first])
    failures = [failure for part in found for failure in part.failures]
    if failures:
        lines += ["## Failed", "", *(f"- {failure}" for failure in failures), ""]
    return "\n".join(lines).rstrip() + "\n"


def _pictures(plots: list[Path]) -> list[str]:
    return [line for plot in plots for line in (f"![{plot.stem}]({plot.name})", "")]


def as_json(found: list[Found], about: dict[str, Any], command: str, seconds: float) -> str:
    """Return every sample, with the rows that were made from them."""
    content = {
        "command": command,
        "seconds": round(seconds, 1),
        "machine": about,
        "rows": [{"part": p.part, **asdict(r)} for p in found for r in p.rows],
        "samples": {part.part: part.samples for part in found},
        "failures": [failure for part in found for failure in part.failures],
    }
    return json.dumps(plain_values(content), indent=1) + "\n"


def plain_values(value: Any) -> Any:
    """Return the value for JSON: six digits, null for non-finite numbers, text for other types."""
    if isinstance(value, dict):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
