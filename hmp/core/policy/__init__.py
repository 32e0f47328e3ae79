"""List files and their entries, policies made of them, and what a policy's scoped entries mean for a model."""

from . import policy_files, precedence, scopes, spelling
from .entries import AUTOCAST, EVERY_OP, ListEntry, ListName, names_lists, parse_list, read_list
from .policy import DEFAULT, HABANA, Policy, as_policy, in_dtype, in_notebook
from .policy_files import optional_files, word_files
from .precedence import Listed
from .presets import device_preset, home, policies
from .scopes import exactness, plain_path, unwrapped
from .spelling import can_be_listed, resolve

__all__ = [
    "AUTOCAST",
    "DEFAULT",
    "EVERY_OP",
    "HABANA",
    "ListEntry",
    "ListName",
    "Listed",
    "Policy",
    "as_policy",
    "can_be_listed",
    "device_preset",
    "exactness",
    "home",
    "in_dtype",
    "in_notebook",
    "names_lists",
    "optional_files",
    "parse_list",
    "plain_path",
    "policies",
    "policy_files",
    "precedence",
    "read_list",
    "resolve",
    "scopes",
    "spelling",
    "unwrapped",
    "word_files",
]
