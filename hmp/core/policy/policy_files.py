"""The files that a policy is read from besides its lists: those of one word in its folder, and an Optimum Gaudi configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...errors import HmpError, OpListError
from ..fp8 import RECIPES
from ..log import log
from ..saved import FORMATS
from . import presets
from .entries import LISTS, OPTIONAL, ListName, read_text

LOW_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class WordField(NamedTuple):
    """A field of a policy that is one word in a file of its own: the file, what it may hold, and what `Policy.diff()` calls the field."""

    file: str
    allowed: tuple[str, ...]  # the first is meant where there is no such file
    title: str  # no name of an op


WORDS: Mapping[str, WordField] = {
    "dtype": WordField("dtype.txt", tuple(LOW_DTYPES), "(dtype)"),
    "fp8_recipe": WordField("recipe.txt", tuple(RECIPES), "(FP8 recipe)"),
    "fp8_kernel": WordField("kernel.txt", ("auto", "emulate"), "(FP8 kernel)"),
    "saved_recipe": WordField("saved_recipe.txt", tuple(FORMATS), "(saved recipe)"),
}
DEFAULTS = {field: word.allowed[0] for field, word in WORDS.items()}
BASE_FILE = "base.txt"
# of the files that a policy is written into, those that not every policy has
OPTIONAL_FILES = (*(f"{cast}.txt" for cast in OPTIONAL), *(word.file for word in WORDS.values()))


def low_dtype(dtype: Any) -> torch.dtype:
    """Return the low-precision dtype that is given, or named. Raise HmpError for another one."""
    for name, low in LOW_DTYPES.items():
        if dtype is low or (isinstance(dtype, str) and dtype.removeprefix("torch.") == name):
            return low
    raise HmpError(f"dtype= expected torch.bfloat16 or torch.float16, got {dtype!r}")


def list_files(folder: Path) -> dict[ListName, Path]:
    """Return the list files that a policy's folder holds, each with its list. Raise OpListError where it holds none."""
    found: dict[ListName, Path] = {cast: folder / f"{cast}.txt" for cast in LISTS if (folder / f"{cast}.txt").is_file()}
    if not found:
        raise OpListError(
            f"expected list files, got none; put {', '.join(f'{cast}.txt' for cast in LISTS)}, or some of them, there", folder
        )
    return found


def read_base(folder: Path) -> str:
    """Return the preset that base.txt names, over which the folder's lists are laid; "" where there is no such file."""
    file = folder / BASE_FILE
    return _word(file, presets.policies()) if file.is_file() else ""


def read_words(folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a policy that are one word each, as the folder's files say; those without a file as in `base`."""
    files = {field: folder / word.file for field, word in WORDS.items()}
    return {field: _word(file, WORDS[field].allowed) if file.is_file() else base[field] for field, file in files.items()}


def word_files(words: Mapping[str, str]) -> dict[str, str]:
    """Return the text of each file that holds one of the words, by the file's name, but for words that are missing or the default."""
    return {WORDS[field].file: f"{words[field]}\n" for field, default in DEFAULTS.items() if words.get(field, default) != default}


def write_words(folder: Path, words: Mapping[str, str]) -> None:
    """Write `word_files()`, and remove those that another policy has left there."""
    files = word_files(words)
    for word in WORDS.values():
        if word.file in files:
            (folder / word.file).write_text(files[word.file], encoding="utf-8")
        else:
            (folder / word.file).unlink(missing_ok=True)


def _word(file: Path, allowed: Sequence[str]) -> str:
    """Return the one word in the file, one of `allowed`."""
    lines = read_text(file).removeprefix("\ufeff").splitlines()
    words = " ".join(word for line in lines for word in line.partition("#")[0].split())
    if words not in allowed:
        raise OpListError(f"expected {' or '.join(allowed)}, got {words!r}; write one of them and nothing else", file)
    return words


# --- an Optimum Gaudi configuration ---

_GAUDI_KEYS = frozenset(
    """use_habana_mixed_precision hmp_opt_level hmp_bf16_ops hmp_fp32_ops hmp_is_verbose use_fused_adam use_fused_clip_norm
    use_torch_autocast autocast_bf16_ops autocast_fp32_ops use_dynamic_shapes log_device_mem_alloc optimum_version
    transformers_version""".split()
)


def read_gaudi_config(config: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], Path | None]:
    """Return a configuration's contents and its file, None if the contents were given. Raise OpListError where it cannot be read."""
    path = None
    if not isinstance(config, Mapping):
        path = Path(config)
        path = path / "gaudi_config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise OpListError("no such file; give a gaudi_config.json or the folder that holds it", path) from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise OpListError(f"expected JSON, got {error}; give a gaudi_config.json", path) from None
    if not isinstance(config, Mapping):
        raise OpListError(
            f"expected a JSON object with keys such as 'hmp_bf16_ops', got {type(config).__name__}; see gaudi_config.json", path
        )
    return config, path


def check_gaudi_config(config: Mapping[str, Any], path: Path | None) -> None:
    """Warn of unknown keys in a configuration, and raise HmpError where both HMP and autocast are asked for."""
    unknown = sorted(set(config) - _GAUDI_KEYS)
    if unknown:
        log.warning("%sunknown Gaudi configuration keys: %s", f"{path}: " if path else "", ", ".join(unknown))
    if config.get("use_habana_mixed_precision") and config.get("use_torch_autocast"):
        raise HmpError("use_habana_mixed_precision and use_torch_autocast are both set; set one of them to false")
