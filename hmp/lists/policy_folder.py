"""The files of a policy's folder."""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import OpListError
from ..fp8 import RECIPES
from .entries import LISTS, ListName, read_list

DTYPE_FILE, RECIPE_FILE = "dtype.txt", "recipe.txt"
LOW_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
RECIPE = "tensorwise"  # of FP8, where no policy names another


def list_files(folder: Path) -> dict[ListName, Path]:
    """The list files that a policy's folder holds, each with its list. OpListError where it holds none."""
    found: dict[ListName, Path] = {cast: folder / f"{cast}.txt" for cast in LISTS if (folder / f"{cast}.txt").is_file()}
    if not found:
        raise OpListError(f"holds none of {', '.join(f'{cast}.txt' for cast in LISTS)}; a policy's folder holds one or more", folder)
    return found


def read_dtype(folder: Path) -> torch.dtype:
    """The low dtype that dtype.txt names; bfloat16 where there is no such file."""
    return LOW_DTYPES[_word(folder / DTYPE_FILE, tuple(LOW_DTYPES), "bfloat16")]


def read_recipe(folder: Path) -> str:
    """The recipe of FP8 products that recipe.txt names; "tensorwise" where there is no such file."""
    return _word(folder / RECIPE_FILE, tuple(RECIPES), RECIPE)


def _word(file: Path, allowed: tuple[str, ...], default: str) -> str:
    """The one word in the file, one of `allowed`; `default` where there is no such file."""
    if not file.is_file():
        return default
    words = read_list(file, "bf16")
    if len(words) != 1 or words[0].text not in allowed:
        raise OpListError(f"holds {' '.join(w.text for w in words)!r}; write {' or '.join(allowed)} and nothing else", file)
    return words[0].name
