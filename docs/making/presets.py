"""The page of what each preset holds, as one table."""

from __future__ import annotations

import hmp


def page() -> str:
    """A row for each name on any preset's list, a column for each preset."""
    named = {name: hmp.Policy.load(name) for name in hmp.policies()}
    policies = {name: policy for name, policy in named.items() if "@" not in name or policy.name == name}
    same = "\n".join(f"| `{name}` | `{policy.name}` |" for name, policy in named.items() if "@" in name and policy.name != name)
    columns: dict[str, dict[str, str]] = {}
    for name, policy in policies.items():
        columns[name] = {op: cast for cast in reversed(policy.lists) for op in getattr(policy, cast)}
    ops = sorted(set().union(*columns.values()))
    dtypes = {name: str(policy.dtype).removeprefix("torch.") for name, policy in policies.items()}
    short = "\n".join(
        " | ".join(
            [f"| `{name}`", dtypes[name], *(str(len(getattr(policy, cast))) for cast in ("bf16", "fp32", "promote", "fp8", "saved"))]
        )
        + " |"
        for name, policy in policies.items()
    )
    head = "| op | " + " | ".join(f"`{name}`" for name in columns) + " |\n|---" + "|---" * len(columns) + "|"
    rows = "\n".join(f"| `{op}` | " + " | ".join(held.get(op, "") for held in columns.values()) + " |" for op in ops)
    return f"""# What each preset holds

Which to take: [Choosing a preset](../start/choosing-a-preset.md). `autocast`, `torch-cpu`, `torch-cuda` and `torch-xla` follow the
torch that is installed; here it is the one that this site was built with. `hmp check NAME` prints one, `hmp diff A B` compares two.

| preset | low dtype | low (bf16) | fp32 | promote | fp8 | saved |
|---|---|---|---|---|---|---|
{short}

torch was asked what it casts, release by release (`.ci/autocast-lists PRESET FOLDER`). Equal lists are kept once, under the name of one of
their releases:

| name | has the lists of |
|---|---|
{same}

## Op by op

An empty cell: on none of its lists. Of a name on two, the list that counts is shown (R4). `bf16` is the list of the low dtype, also where
that is float16.

<div class="filtered" markdown>

{head}
{rows}

</div>
"""
