"""List files and their entries, policies made of them, and what a policy's scoped entries mean for a model."""

from . import folders, precedence, scopes
from .entries import AUTOCAST, EVERY_OP, ListEntry, ListName, names_lists, parse_list, read_list
from .folders import optional_files, word_files
from .names import can_be_listed, ops_of, user_site
from .policy import DEFAULT, HABANA, Policy, as_policy, in_dtype, in_notebook
from .precedence import Listed
from .presets import device_preset, home, policies
from .scopes import exactness, plain_path, unwrapped

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
    "folders",
    "home",
    "in_dtype",
    "in_notebook",
    "names_lists",
    "ops_of",
    "optional_files",
    "parse_list",
    "plain_path",
    "policies",
    "precedence",
    "read_list",
    "scopes",
    "unwrapped",
    "user_site",
    "word_files",
]
