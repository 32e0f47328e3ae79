"""What the presets hold, op by op, for the page of lists."""

from __future__ import annotations

import hmp
from hmp.core.policy import presets

COLUMNS = ("torch-cpu", "torch-cuda", "gaudi", "apex-o1", "habana", "bert", "resnet50")


def inserted() -> str:
    """Return a row for each op on a list of one of these presets, and which frozen presets have equal lists."""
    columns: dict[str, dict[str, str]] = {}
    for name in COLUMNS:
        policy = hmp.Policy.load(name)
        columns[name] = {op: cast for cast in reversed(policy.lists) for op in getattr(policy, cast)}
    ops = sorted(set().union(*columns.values()))
    head = "| op | " + " | ".join(f"`{name}`" for name in columns) + " |\n|---" + "|---" * len(columns) + "|"
    rows = "\n".join(f"| `{op}` | " + " | ".join(held.get(op, "") for held in columns.values()) + " |" for op in ops)
    frozen = {name: presets.folder(name).name for name in hmp.policies() if "@" in name}
    same = ", ".join(f"`{name}` has the lists of `{of}`" for name, of in frozen.items() if name != of)
    return f"""## What each preset holds, op by op

An empty cell: on none of its lists. `bf16` is the list of the low-precision dtype, also where that is float16. `torch-cpu` and `torch-cuda`
are those of the torch that this page was built with. {same}.

<div class="filtered" markdown>

{head}
{rows}

</div>
"""
