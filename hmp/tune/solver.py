"""The cheapest choice of units for the low dtype, as an integer programme: own costs, costs of casts between units, a bound on what the
loss may change by, and sets that were seen to fail together."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import HmpError
from ..extras import needed
from .decisions import Key


@dataclass(frozen=True)
class Model:
    """What is known of the units. `costs` are of a unit in the low dtype beside float32 (negative is a gain), `flows` those of the casts
    where one of two units is in the low dtype and the other is not; `sensitivities` the relative change of the loss, infinite for what
    cannot be in the low dtype. Costs are seconds or bytes of a step."""

    costs: Mapping[Key, float]
    flows: Mapping[tuple[Key, Key], float]
    sensitivities: Mapping[Key, float]

    def cost(self, low: Collection[Key]) -> float:
        """What these units in the low dtype cost beside float32."""
        chosen = frozenset(low)
        own = sum(self.costs[key] for key in chosen)
        return own + sum(cost for (one, other), cost in self.flows.items() if (one in chosen) != (other in chosen))


def solve(
    model: Model,
    *,
    limit: float = math.inf,
    barred: Collection[Key] = (),
    failed: Collection[frozenset[Key]] = (),
) -> frozenset[Key]:
    """The units to have in the low dtype: the cheapest set whose sensitivities add up to `limit` at most, without `barred` units, and
    that holds none of the sets `failed` as a whole. Optimal for the model (HiGHS, through scipy). ImportError without scipy.
    """
    optimize, sparse, numpy = scipy()
    keys = sorted(model.costs, key=str)
    if not keys:
        return frozenset()
    at = {key: i for i, key in enumerate(keys)}
    flows = [(pair, cost) for pair, cost in sorted(model.flows.items(), key=str) if cost > 0 and pair[0] != pair[1]]
    size = len(keys) + len(flows)
    objective = numpy.array([model.costs[key] for key in keys] + [cost for _, cost in flows])
    scale = float(numpy.abs(objective).max()) or 1.0
    rows: list[dict[int, float]] = []
    most: list[float] = []
    for i, ((one, other), _) in enumerate(flows):
        # the flow's variable is 1 where exactly one of the two is low
        for sign in (1.0, -1.0):
            rows.append({at[one]: sign, at[other]: -sign, len(keys) + i: -1.0})
            most.append(0.0)
    upper = numpy.ones(size)
    for key in keys:
        if key in barred or model.sensitivities[key] > limit or math.isinf(model.sensitivities[key]):
            upper[at[key]] = 0.0
    if 0 < limit < math.inf:
        rows.append({at[key]: model.sensitivities[key] / limit for key in keys if model.sensitivities[key] <= limit})
        most.append(1.0)
    for together in failed:
        known = [at[key] for key in together if key in at]
        rows.append(dict.fromkeys(known, 1.0))
        most.append(len(known) - 1.0)
    constraints = []
    if rows:
        matrix = sparse.lil_matrix((len(rows), size))
        for i, row in enumerate(rows):
            for j, value in row.items():
                matrix[i, j] = value
        constraints.append(optimize.LinearConstraint(matrix.tocsr(), -numpy.inf, numpy.array(most)))
    integrality = numpy.array([1] * len(keys) + [0] * len(flows))
    found = optimize.milp(objective / scale, integrality=integrality, bounds=optimize.Bounds(0.0, upper), constraints=constraints)
    if found.x is None:
        raise HmpError(f"the solver found no choice of units: {found.message}")
    return frozenset(key for key in keys if found.x[at[key]] > 0.5)


def scipy() -> tuple[Any, Any, Any]:
    """scipy.optimize, scipy.sparse and numpy. ImportError names the command that brings them."""
    with needed("hmp.tune needs", "tune", "scipy"):
        import numpy
        from scipy import optimize, sparse
    return optimize, sparse, numpy
