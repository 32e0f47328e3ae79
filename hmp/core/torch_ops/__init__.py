"""Facts about torch's ops: their ids, their sites, their synonyms and their parameters."""

from . import op_facts, sites
from .composites import calling
from .names import name_of, parameters
from .sites import NAMESPACES, PYTHON_OPS, Site, ancestry, aten_names, every_op, function_site, op_id, op_of, sites_of, takes_tensor

__all__ = [
    "NAMESPACES",
    "PYTHON_OPS",
    "Site",
    "ancestry",
    "aten_names",
    "calling",
    "every_op",
    "function_site",
    "name_of",
    "op_facts",
    "op_id",
    "op_of",
    "parameters",
    "sites",
    "sites_of",
    "takes_tensor",
]
