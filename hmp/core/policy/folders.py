"""The files that a policy is read from: a folder's, by their names, those of one word, and an Optimum Gaudi configuration."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import HmpError, OpListError
from .. import lists
from ..casting import LOW, dtype_name, dtype_named
from ..lists import WordFile
from ..log import log
from . import presets
from .entries import ListName, parse_list, read_text
from .names import is_op

_DTYPE = WordFile("dtype", "dtype.txt", tuple(map(dtype_name, LOW)), "(dtype)")
BASE_FILE = "base.txt"


def words() -> dict[str, WordFile]:
    """Return the fields of a policy that are one word in a file of their own, by the field."""
    return {word.field: word for word in (_DTYPE, *lists.words())}


def default_words() -> dict[str, str]:
    """Return what each of the fields is where there is no such file."""
    return {field: word.allowed[0] for field, word in words().items()}


def low_dtype(dtype: Any) -> torch.dtype:
    """Return the low-precision dtype that is given, or named. Raise HmpError for another one."""
    found = dtype_named(dtype, LOW)
    if found is None:
        raise HmpError(f"dtype= expected torch.bfloat16 or torch.float16, got {dtype!r}")
    return found


def file_names() -> tuple[str, ...]:
    """Return what a policy's folder may contain: the files that are read."""
    return (*(kind.file for kind in lists.kinds()), BASE_FILE, *(word.file for word in words().values()))


# Words that say nothing about which file it is.
_FILLERS = frozenset("txt text list lists lst op ops file copy old new orig bak my preset policy".split())


def lists_named(name: str) -> set[ListName]:
    """Return the lists that a file's name shows: one for "ops_bf16_bert.txt"."""
    plain = re.sub(r"[\W_]", "", name.casefold())
    marks = {mark: kind.name for kind in lists.kinds() for mark in (kind.name.replace("_", ""), *kind.aliases) if mark in plain}
    return {name for mark, name in marks.items() if not any(mark in other and mark != other for other in marks)}


def _nearly(name: str) -> str | None:
    """Return the file of a policy's folder whose name `name` nearly is: "bf16.txt" for "BF_16.text"; None for any other file.

    Files of other kinds (README.md, base.py), hidden ones and editors' copies (bf16.txt~) aren't nearly one.
    """
    kind = name.rpartition(".")[2].casefold() if "." in name else "txt"
    is_text = kind in _FILLERS or kind.isdigit() or difflib.SequenceMatcher(None, kind, "txt").ratio() > 0.6
    if not is_text or name.startswith((".", "#")) or name.endswith("~"):
        return None
    stems = {right.removesuffix(".txt").replace("_", ""): right for right in file_names()}
    for part in (name, name.partition(".")[0]):
        plain = "".join(word for word in re.split(r"[\W_]+", part.casefold()) if word not in _FILLERS).removesuffix("txt")
        # one letter wrong, missing, more or swapped with the next, which of three letters is a third
        for cutoff, among in ((0.75, stems), (0.66, [stem for stem in stems if len(stem) < 4])):
            if near := difflib.get_close_matches(plain, among, n=1, cutoff=cutoff):
                return stems[near[0]]
    return next((f"{each}.txt" for each in lists.names() if each in lists_named(name)), None)


def files_in(folder: Path) -> dict[str, Path]:
    """Return what the folder contains under the names of a policy's files, by name, whether it can be read or not."""
    there = _names_in(folder)
    return {name: folder / name for name in file_names() if name in there}


def _others_in(folder: Path) -> list[Path]:
    return [folder / name for name in sorted(_names_in(folder).difference(file_names()))]


def misnamed(folder: Path) -> dict[Path, str]:
    """Return each file in the folder whose name is nearly that of a policy's file, with the right name."""
    others = (file for file in _others_in(folder) if "." in file.name or not file.is_dir())  # a folder is another policy
    return {file: right for file in others if (right := _nearly(file.name)) is not None}


def _names_in(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError as error:
        raise OpListError(f"this folder cannot be read: {error.strerror or error}; check its permissions", folder) from error


def what_is_meant(right: str) -> str:
    """Return the message for a file whose name is nearly `right`."""
    return f"did you mean {right!r}? hmp does not read a file of this name: rename it, or move it out of the folder"


def contents(folder: Path) -> dict[str, Path]:
    """Return `files_in(folder)`. Raise OpListError where it has no list, or a file that is nearly one of these and would be left out."""
    wrong = misnamed(folder)
    if wrong:
        (file, right), *others = wrong.items()
        also = "".join(f"; {other}: {what_is_meant(its)}" for other, its in others)
        raise OpListError(f"{what_is_meant(right)}{also}", file)
    for file in _others_in(folder):
        _refuse_unknown_kind(file)
    files = files_in(folder)
    if not list_files(files):
        raise OpListError(
            f"expected list files, got none; put {', '.join(kind.file for kind in lists.kinds())}, or some of them, there", folder
        )
    return files


_BROUGHT_BY = "# the kind of list is added by: "  # the first words of a file that Policy.save() writes for a plug-in's list


def _refuse_unknown_kind(file: Path) -> None:
    """Raise OpListError for a list of a kind that is not installed: a file that says which module adds it, or that holds ops alone."""
    if file.suffix != ".txt" or not file.is_file():
        return
    text = file.read_text(encoding="utf-8", errors="replace")
    first = text.partition("\n")[0]
    if first.startswith(_BROUGHT_BY):
        brings = f"the file says that importing {first.removeprefix(_BROUGHT_BY).strip()!r} adds it"
        raise OpListError(f"{lists.missing(file.stem)}; {brings}", file)
    try:
        entries = parse_list(text, "", file)
    except OpListError:
        return  # no list
    if entries and all(is_op(entry.name) for entry in entries):
        raise OpListError(f"{lists.missing(file.stem)}; or move the file, which names ops alone, out of the folder", file)


def list_text(kind: lists.ListKind, names: Iterable[str]) -> str:
    """Return the text of a list file; that of a plug-in's list says first what brings such lists."""
    brought = "" if kind.module.startswith("hmp.") else f"{_BROUGHT_BY}{kind.module}\n"
    return brought + "".join(f"{name}\n" for name in names)


def is_no_folder(given: str) -> OpListError:
    """Return the error for what is neither a preset nor a folder: the nearest of these, and for a file how to use it."""
    path = Path(given)
    if os.path.isfile(path):
        named = lists_named(path.name)
        alone = f"policy=hmp.Policy.from_files({named.pop() if len(named) == 1 else 'bf16'}={given!r})"
        return OpListError(f"this is a file; pass its folder, {str(path.parent)!r}, or for one list alone {alone}", path)
    near = difflib.get_close_matches(given.casefold(), presets.policies())
    if path.parent.is_dir() and os.access(path.parent, os.R_OK):
        folders = [path.parent / name for name in difflib.get_close_matches(path.name, os.listdir(path.parent))]
        near = [str(each) for each in folders if any(os.path.isfile(each / file) for file in file_names())] + near
    meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return OpListError(f"unknown policy {given!r}; {meant}presets are {presets.names()}, or name a folder of list files")


def list_files(files: Mapping[str, Path]) -> dict[ListName, Path]:
    """Return the lists among the files of a policy's folder."""
    return {kind.name: files[kind.file] for kind in lists.kinds() if kind.file in files}


def read_base(files: Mapping[str, Path]) -> str:
    """Return the preset that base.txt names, over which the folder's lists are laid; "" where there is no such file."""
    if BASE_FILE not in files:
        return ""
    return _word(files[BASE_FILE], presets.policies(), "a preset's name", f"presets are {presets.names()}")


def read_words(files: Mapping[str, Path], base: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a policy that are one word each, as the folder's files say; those without a file as in `base`."""
    return {field: _word(files[word.file], word.allowed) if word.file in files else base[field] for field, word in words().items()}


def word_files(given: Mapping[str, str]) -> dict[str, str]:
    """Return the text of each file that holds one of the words, by the file's name, but for words that are missing or the default."""
    found = words().items()
    return {word.file: f"{given[field]}\n" for field, word in found if given.get(field, word.allowed[0]) != word.allowed[0]}


def write(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the texts into files of these names, and remove the other files that a policy may have left there."""
    for name in file_names():
        if name in texts:
            (folder / name).write_text(texts[name], encoding="utf-8")
        else:
            (folder / name).unlink(missing_ok=True)


def _word(file: Path, allowed: Sequence[str], expected: str = "", remedy: str = "write one of them and nothing else") -> str:
    """Return the one word in the file, one of `allowed`."""
    lines = read_text(file).removeprefix("\ufeff").splitlines()
    said = " ".join(word for line in lines for word in line.partition("#")[0].split())
    if said not in allowed:
        near = difflib.get_close_matches(said, allowed, n=1)
        meant = f"did you mean {near[0]!r}?" if near else remedy
        raise OpListError(f"expected {expected or ' or '.join(allowed)}, got {said!r}; {meant}", file)
    return said


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
        except (OSError, ValueError) as error:  # also of the encoding, and of JSON
            raise OpListError(f"cannot be read: {error}; give a gaudi_config.json or the folder that holds it", path) from None
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
