"""A policy: lists of op names and a low-precision dtype, as an immutable value."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch

from ...errors import HmpError, OpListError
from .. import lists
from ..casting import dtype_name
from ..compiler_stance import untraced_class
from ..log import log, log_once
from . import folders, precedence, presets
from .entries import EVERY_OP, ListEntry, ListName, checked_names, list_from_env, list_of, parse_entry, parse_list, read_list, read_text
from .folders import check_gaudi_config, low_dtype, read_gaudi_config
from .names import by_op, ops_of, with_relatives
from .precedence import Listed
from .presets import policies

DEFAULT = presets.OF_DEVICE  # what casts a model or a context, where no policy is named
_OWN = ("bf16", "fp32", "promote")  # the lists that every policy has, each a field of its own
HABANA = "habana"  # what convert() makes active, and the default for list files that are not given


@untraced_class
@dataclass(frozen=True, init=False)
class Policy:
    """Which ops run in which dtype: an immutable value. Policies are equal if their lists and dtypes are, whatever their names and files.

    Lists contain names as list files spell them, also with a scope: "softmax @ decoder.*".

    Args:
        name: The name, for messages and tables.
        dtype: The low-precision dtype, torch.bfloat16 or torch.float16.
        bf16: Ops that run in the low-precision dtype.
        fp32: Ops that run in float32.
        promote: Ops that run in the widest dtype of their inputs.
        scoped: The entries of all lists that have a scope; entries with a scope in the other arguments are moved here.
        origin: The file and line of entries, by (list, name), for messages.
        **more: The other kinds of lists, and the words that say how what they name is done, each by its name: fp8 (matrix products that
            run in FP8), fp8_recipe ("tensorwise", "rowwise", "rowwise_with_gw_hp" or "mxfp8"), fp8_kernel ("auto", or "emulate" to emulate
            FP8 on every device), fp32_result (matrix products of low-precision inputs whose result stays float32), saved (ops whose saved
            activations are packed), saved_recipe ("fp8", "bf16" or "int8"), and those of plug-ins. All are attributes of the policy.

    Raises:
        OpListError: A name is unknown, or an op is on two lists that exclude each other, with the same scope or without one.
        HmpError: A dtype or another word is unknown, or the kind of list is not installed.

    Example:
        >>> policy = hmp.Policy("mine", bf16={"linear", "matmul"}, fp32={"softmax"})
        >>> with hmp.casts(policy):
        ...     torch.nn.functional.linear(torch.ones(1, 4), torch.ones(2, 4)).dtype
        torch.bfloat16
    """

    name: str = field(compare=False)
    dtype: torch.dtype
    bf16: frozenset[str]
    fp32: frozenset[str]
    promote: frozenset[str]
    scoped: tuple[ListEntry, ...] = field(compare=False)
    # (list, name) → the entry with the file and line, for messages
    origin: Mapping[tuple[ListName, str], ListEntry] = field(compare=False, repr=False)
    _more: tuple[tuple[str, Any], ...]  # the other lists that are not empty, and the words that are not the default
    _entries: frozenset[tuple[ListName, str]] = field(init=False, repr=False)  # of `scoped`, for equality

    def __init__(
        self,
        name: str = "custom",
        dtype: torch.dtype = torch.bfloat16,
        bf16: Collection[str] = frozenset(),
        fp32: Collection[str] = frozenset(),
        promote: Collection[str] = frozenset(),
        scoped: Iterable[ListEntry] = (),
        origin: Mapping[tuple[ListName, str], ListEntry] | None = None,
        **more: Any,
    ) -> None:
        more = dict(more.pop("_more", ())) | more  # as dataclasses.replace() gives it
        words, given = folders.words(), {"bf16": bf16, "fp32": fp32, "promote": promote, **more}
        unknown = [each for each in more if each not in words and each not in lists.names()]
        if unknown:
            raise HmpError(f"Policy({unknown[0]}=...): {lists.missing(unknown[0])}")
        entries, unscoped = list(scoped), {}
        for list_name in lists.names():
            names = checked_names(list_name, given.get(list_name, ()))
            entries += [parse_entry(each, list_name) for each in names if "@" in each]
            unscoped[list_name] = frozenset(each for each in names if "@" not in each)
        others: dict[str, Any] = {name: names for name, names in unscoped.items() if name not in _OWN and names}
        for word, value in ((word, more[word]) for word in words if word in more):
            allowed = words[word].allowed
            if value not in allowed:
                raise HmpError(f"{word}= expected {' or '.join(map(repr, allowed))}, got {value!r}")
            if value != allowed[0]:
                others[word] = value
        ordered = _in_order(entries)
        fields = {
            "name": name, "dtype": low_dtype(dtype), **{own: unscoped[own] for own in _OWN}, "scoped": ordered,
            "origin": {} if origin is None else origin, "_more": tuple(sorted(others.items())),
            "_entries": frozenset((entry.list_name, entry.text) for entry in ordered),
        }  # fmt: skip
        for attribute, value in fields.items():
            object.__setattr__(self, attribute, value)
        for scope in (None, *dict.fromkeys(entry.scope for entry in ordered)):
            precedence.refuse_both({each: by_op(self._listed(each, scope)) for each in lists.names()})

    def __getattr__(self, name: str) -> Any:
        """Return one of the other lists, or a word: what it is by default where the policy does not say."""
        if not name.startswith("_"):
            found = {**dict.fromkeys(lists.names(), frozenset()), **folders.default_words(), **dict(self._more)}
            if name in found:
                return found[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _listed(self, list_name: ListName, scope: str | None = None) -> list[ListEntry]:
        """Return the entries of the list that have the scope, or none."""
        if scope is not None:
            return [entry for entry in self.scoped if entry.list_name == list_name and entry.scope == scope]
        return [self.origin.get((list_name, name)) or ListEntry(name, list_name) for name in sorted(getattr(self, list_name))]

    def casts_by_op(self, cast: ListName) -> dict[str, ListEntry]:
        """Return the ops on a list, by their ids.

        Args:
            cast: The list: "bf16", "fp32", "promote", or the name of another kind.

        Returns:
            The entry that names each op, by the op's id.

        Example:
            >>> sorted(hmp.Policy("mine", bf16={"linear"}).casts_by_op("bf16"))
            ['linear']
        """
        return by_op(self._listed(cast))

    @classmethod
    def load(cls, policy: str | Path) -> Policy:
        """Load a preset, or a folder of lists.

        A folder contains at least one list: bf16.txt, fp32.txt, promote.txt and so on; the others are empty lists. base.txt names a preset
        that decides all ops that the lists do not name. dtype.txt has one word, "bfloat16" or "float16", and so has each file of
        another field that is one word.

        Args:
            policy: A preset's name (`hmp.policies()` lists them), or the path of a folder.

        Returns:
            The policy.

        Raises:
            OpListError: There is no such preset or folder, or a list cannot be used.
            HmpError: `policy` is not a string or path.

        Example:
            >>> "softmax" in hmp.Policy.load("habana").fp32
            True
        """
        if not isinstance(policy, (str, os.PathLike)):
            kind = type(policy).__name__
            raise HmpError(f"Policy.load() expected a preset's name or a folder, got {kind}; presets are {presets.names()}")
        return cls._load(policy, presets.device_in_use())

    @classmethod
    def _load(cls, policy: str | Path, device: torch.device) -> Policy:
        """Return `load()`, where "autocast" is that of `device`, also in base.txt: torch.autocast's lists for it.

        An accelerator without instructions for bfloat16 gets float16. The CPU, and a backend that does not say, have the low-precision
        dtype of their lists.
        """
        if str(policy) == presets.OF_DEVICE:
            natively = presets.computes_in_bfloat16(device)
            dtype = None if natively is None else torch.bfloat16 if natively else torch.float16
            if natively is False:
                log_once("%s has no bfloat16 instructions, so 'autocast' is in float16: train with a GradScaler", device.type)
            return as_policy(presets.device_preset(device), dtype=dtype)
        folder = presets.folder(str(policy)) if str(policy) in policies() else Path(policy)
        if not os.path.isdir(folder):
            raise folders.is_no_folder(str(policy))
        files = folders.contents(folder)
        entries = [entry for list_name, file in folders.list_files(files).items() for entry in read_list(file, list_name)]
        base = folders.read_base(files)
        under = cls._load(base, device) if base else cls()
        words = folders.read_words(files, under._words)
        if not base and {entry.list_name for entry in entries} <= {"fp32", "promote"}:
            log_once("%s: no list has an op that runs in low precision; to change a preset's lists, name it in base.txt: autocast", folder)
        return cls._laid_over(presets.title(str(policy)) or folder.name, entries, (*under.origin.values(), *under.scoped), (), **words)

    @classmethod
    def from_files(
        cls,
        bf16: str | Path | None = "",
        fp32: str | Path | None = "",
        promote: str | Path | None = "",
        *,
        dtype: Any = torch.bfloat16,
        name: str = "custom",
        **more: str | Path | None,
    ) -> Policy:
        """Load a policy from list files.

        The names in the files, and their synonyms, take precedence over the default lists, which is logged.

        Args:
            bf16: The list of ops that run in the low-precision dtype. "" and None are Habana's default list.
            fp32: The list of ops that run in float32. "" and None are Habana's default list.
            promote: The list of ops that run in the widest dtype of their inputs. "" and None are Habana's default list.
            dtype: The low-precision dtype, torch.bfloat16 or torch.float16.
            name: The policy's name.
            **more: Lists of the other kinds, by their names: `NAME="NAME.txt"`. "" and None are an empty list.

        Returns:
            The policy.

        Raises:
            OpListError: A file is missing, or cannot be used.
            HmpError: A kind of list is not installed.

        Example:
            >>> from pathlib import Path
            >>> _ = Path("mine.txt").write_text("linear")
            >>> hmp.Policy.from_files(bf16="mine.txt", name="mine").entries("bf16")
            ['linear']
        """
        files = {"bf16": bf16, "fp32": fp32, "promote": promote, **more}
        given = [entry for kind in map(lists.kind_of, files) if (file := files[kind.name]) for entry in read_list(file, kind.name)]
        replaced = [own for own in _OWN if files[own]]
        return cls._laid_over(name if given else HABANA, given, _habanas(), replaced, dtype=dtype)

    @classmethod
    def _laid_over(
        cls, name: str, given: list[ListEntry], under: Iterable[ListEntry], replaced: Collection[ListName], **words: Any
    ) -> Policy:
        """Make the policy of the entries `given`, and of those of `under` that name other ops and are on none of the lists `replaced`."""
        under = list(under)
        # Habana's promote lists hold ops of its BF16 and FP32 lists too, which win: what a copy of such a list holds takes nothing
        usual = {entry.name for entry in under if entry.list_name == "promote"}
        taken: dict[tuple[str, str], ListEntry] = {}
        for entry in given:
            if entry.scope is None and not (entry.list_name == "promote" and entry.name in usual):
                for op in with_relatives(ops_of(entry)):
                    taken.setdefault((entry.about, op), entry)
        entries = list(given)
        for entry in under:
            if entry.list_name in replaced:
                continue
            winner = next((taken[entry.about, op] for op in ops_of(entry) if (entry.about, op) in taken), None)
            if winner is None or (entry.list_name == "promote" and not {*ops_of(winner)}.isdisjoint(ops_of(entry))):
                entries.append(entry)  # of one name BF16 and FP32 win over promote anyway
            elif winner.list_name != entry.list_name and lists.kind_of(winner.list_name).instead != entry.list_name:
                said = "%s on your %s list overrides %s on the default %s list"
                log.info(said, winner.name, winner.list_name, entry.name, entry.list_name)
        return cls._from_entries(name, entries, **words)

    @classmethod
    def _from_entries(cls, name: str, entries: Iterable[ListEntry], **words: Any) -> Policy:
        entries = list(entries)
        origin = {(entry.list_name, entry.name): entry for entry in reversed(entries) if entry.scope is None}
        named: dict[str, Any] = {each: frozenset(name for on, name in origin if on == each) for each in lists.names()}
        return cls(name, scoped=[entry for entry in entries if entry.scope is not None], origin=origin, **named, **words)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Policy:
        """Load a policy from the list files that environment variables name, as Gaudi's autocast does.

        LOWER_LIST names the BF16 list and FP32_LIST the FP32 list; if unset, PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST and
        PT_HPU_AUTOCAST_FP32_OPS_LIST do. Without a variable, or with an empty one, it is Habana's default list. A name on both lists counts
        on the BF16 list, as in Gaudi's autocast.

        Args:
            environ: The environment variables; None reads those of the process.

        Returns:
            The policy.

        Raises:
            OpListError: A file is missing, or cannot be used.

        Example:
            >>> hmp.Policy.from_env({}) == hmp.Policy.load("habana")
            True
        """
        environ = os.environ if environ is None else environ
        lower = list_from_env("bf16", environ)
        fp32 = list_from_env("fp32", environ)
        given: list[ListEntry] = list(lower or ())
        low = {scope: by_op(entry for entry in lower or () if entry.scope == scope) for scope in {entry.scope for entry in fp32 or ()}}
        given += [entry for entry in fp32 or () if precedence.same_op(ops_of(entry), low[entry.scope]) is None]
        replaced = [own for own, entries in (("bf16", lower), ("fp32", fp32)) if entries is not None]
        return cls._laid_over("environment" if given else HABANA, given, _habanas(), replaced)

    @classmethod
    def from_gaudi_config(cls, config: str | Path | Mapping[str, Any]) -> Policy:
        """Load the policy of an Optimum Gaudi configuration.

        The keys hmp_bf16_ops and hmp_fp32_ops (with use_torch_autocast: autocast_bf16_ops and autocast_fp32_ops) are the lists. Without
        them they are BERT's, as Optimum documents. hmp_opt_level "O2" is the preset "habana-o2". Unknown keys are ignored with a warning.

        Args:
            config: A gaudi_config.json, a folder with one, or its contents.

        Returns:
            The policy.

        Raises:
            OpListError: There is no such file, or a list cannot be used.
            HmpError: The configuration asks for HMP and autocast at once, or has other invalid values.

        Example:
            >>> hmp.Policy.from_gaudi_config({"hmp_bf16_ops": ["linear"], "hmp_fp32_ops": ["softmax"]}).bf16
            frozenset({'linear'})
        """
        config, path = read_gaudi_config(config)
        check_gaudi_config(config, path)
        kind = "autocast" if config.get("use_torch_autocast") else "hmp"
        if kind == "hmp" and config.get("hmp_opt_level") == "O2":
            return cls.load("habana-o2")
        bert = cls.load("bert")
        entries = bert._listed("promote")
        for cast, default in (("bf16", bert.bf16), ("fp32", bert.fp32)):
            names = config.get(f"{kind}_{cast}_ops")
            names = sorted(default) if names is None else names
            if isinstance(names, str) or not all(isinstance(n, str) for n in names):
                raise OpListError(f"{kind}_{cast}_ops: expected a list of op names, got {names!r}; write for example ['linear']", path)
            entries += [entry._replace(line=None) for name in names for entry in parse_list(name, cast, path)]
        return cls._from_entries("gaudi-config" if path is None else path.stem, entries)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Policy:
        """Return the policy of a dict that `to_dict()` returned.

        Args:
            values: Name, dtype, lists and recipes. Missing lists are empty.

        Returns:
            The policy.

        Raises:
            HmpError: `values` is not a dict, or has unknown keys or values.
            OpListError: A list cannot be used.

        Example:
            >>> policy = hmp.Policy.load("habana")
            >>> hmp.Policy.from_dict(policy.to_dict()) == policy
            True
        """
        if not isinstance(values, Mapping):
            raise HmpError(f"Policy.from_dict() expected a dict, got {type(values).__name__}; pass what Policy.to_dict() gives")
        fields = (*lists.names(), *(word for word in folders.words() if word != "dtype"))
        unknown = sorted(set(values) - {"schema_version", "name", "dtype", "fingerprint", *fields})
        if unknown:
            has = f"a policy has no {', '.join(map(repr, unknown))}; it has name, dtype, {', '.join(fields)}"
            raise HmpError(f"{has}. A list of another kind needs the import of the module that adds it with hmp.core.lists.add()")
        given = {name: values[name] for name in fields if name in values}
        return cls(values.get("name", "custom"), low_dtype(values.get("dtype", torch.bfloat16)), **given)

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as plain values for JSON.

        Returns:
            Name, dtype, sorted lists, recipes and fingerprint.

        Example:
            >>> hmp.Policy("mine", bf16={"linear"}).to_dict()["bf16"]
            ['linear']
        """
        values: dict[str, Any] = {"name": self.name, "dtype": dtype_name(self.dtype)}
        values |= {each: self.entries(each) for each in self.lists}
        said, defaults = self._of_optional_lists, folders.default_words()
        values |= {field: word for field, word in self._words.items() if field in said or word != defaults[field]}
        return {**values, "fingerprint": self.fingerprint}

    @property
    def _words(self) -> dict[str, str]:
        return {field: dtype_name(self.dtype) if field == "dtype" else getattr(self, field) for field in folders.words()}

    @property
    def _of_optional_lists(self) -> list[str]:
        """Return the fields that say how what the policy's optional lists name is done."""
        return [word.field for list_name in self.lists for word in lists.kind_of(list_name).words]

    @property
    def lists(self) -> tuple[ListName, ...]:
        """Return the policy's lists; those that most policies lack only if it names something there."""
        return tuple(kind.name for kind in lists.kinds() if not kind.is_optional or self.entries(kind.name))

    def entries(self, cast: ListName) -> list[str]:
        """Return a list as list files spell it.

        Args:
            cast: The list: "bf16", "fp32", "promote", or the name of another kind.

        Returns:
            The names, sorted, then the entries that have a scope.

        Example:
            >>> hmp.Policy("mine", fp32={"softmax", "log @ head"}).entries("fp32")
            ['softmax', 'log @ head']
        """
        return [*sorted(getattr(self, cast)), *(entry.text for entry in self.scoped if entry.list_name == cast)]

    @functools.cached_property
    def unscoped(self) -> Policy:
        """Return the policy without its scoped entries: the one of modules that none of them matches."""
        return self._with(scoped=()) if self.scoped else self

    @functools.cached_property
    def _in_other_dtype(self) -> Policy:  # cached, as training loops run `with hmp.casts(policy, dtype=...)` at each step
        return self.replace(dtype=torch.bfloat16 if self.dtype is torch.float16 else torch.float16)

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits, a hash of the lists and the low-precision dtype: the same for equal policies on every machine."""
        recipe = [getattr(self, field) for field in self._of_optional_lists]
        text = json.dumps([str(self.dtype), *map(self.entries, self.lists), *recipe])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def replace(self, **changes: Any) -> Policy:
        """Return a policy with some fields changed.

        Args:
            **changes: Arguments of `hmp.Policy`.

        Returns:
            The new policy.

        Raises:
            OpListError: A list cannot be used.

        Example:
            >>> policy = hmp.Policy.load("habana")
            >>> "erfinv" in policy.replace(fp32=policy.fp32 | {"erfinv"}).fp32
            True
        """
        changed = self.name if set(changes) <= {"name", "dtype"} else f"{self.name.removesuffix(' (changed)')} (changed)"
        return self._with(**{"name": changed, **changes})

    def _with(self, **changes: Any) -> Policy:
        return type(self)(**{**self._arguments, **changes})

    @property
    def _arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "dtype", *_OWN, "scoped", "origin")} | dict(self._more)

    def __reduce__(self) -> tuple[Any, ...]:  # through the constructor, which knows which kinds of lists are installed
        return functools.partial(type(self), **self._arguments), ()

    def __deepcopy__(self, memo: Any) -> Policy:
        return self

    def move(self, name: str, to: ListName) -> Policy:
        """Return this policy with an op on another list.

        The op and its synonyms are taken off the other lists that decide a dtype, as a list file's names win over those of base.txt.
        Entries with another scope stay.

        Args:
            name: The op as list files spell it, "softmax", or an entry with a scope, "softmax @ decoder.*", which is moved among the
                entries with this scope.
            to: The list that it is put on: "bf16", "fp32", "promote" or another one that decides a dtype. A dtype is its list: "float32",
                and the policy's own, such as "float16".

        Returns:
            The new policy.

        Raises:
            OpListError: `name` is not an op, or one that this list cannot contain.
            HmpError: `to` is not one of these lists.

        Example:
            >>> policy = hmp.Policy("mine", bf16={"linear", "matmul"}).move("matmul", "fp32")
            >>> sorted(policy.bf16), sorted(policy.fp32)
            (['linear'], ['matmul'])
        """
        decide = lists.deciding()
        to = list_of(to, (self.dtype,))
        if to not in decide:
            adds = f"; for the {to} list, use replace({to}=...)" if to in lists.names() else ""
            raise HmpError(f"Policy.move(): expected one of the lists {', '.join(map(repr, decide))}, got {to!r}{adds}")
        if not isinstance(name, str):
            raise HmpError(f"Policy.move(): expected an op as list files spell it, such as 'softmax', got {name!r}")
        moved = parse_entry(name, to)
        gone = set(with_relatives(ops_of(moved)))
        entries = {each: set(self.entries(each)) for each in decide}
        for entry in (entry for each in decide if each != to for entry in self._listed(each, moved.scope)):
            means = ops_of(entry)
            if not gone.isdisjoint(means):
                entries[entry.list_name].remove(entry.text)
                # a name that means several ops leaves the others there
                left = (entry._replace(name=op) for op in means if op not in gone)
                entries[entry.list_name] |= {each.text for each in left if gone.isdisjoint(ops_of(each))}
        entries[to].add(moved.text)
        return self.replace(scoped=[entry for entry in self.scoped if entry.list_name not in decide], **entries)

    def save(self, folder: str | Path) -> Path:
        """Write the policy into a folder, which `Policy.load()` reads.

        Args:
            folder: The folder, which is created if it is missing. bf16.txt, fp32.txt and promote.txt are written; the other lists, and
                the files of one word (dtype.txt and so on), if they differ from the defaults.

        Returns:
            The folder.

        Raises:
            HmpError: `folder` is a file, or its lists were written by hand: a base.txt, or comments in them, would be lost.

        Example:
            >>> policy = hmp.Policy("mine", bf16={"linear"})
            >>> hmp.Policy.load(policy.save("my_lists")) == policy
            True
        """
        target = Path(folder)
        try:
            target.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise HmpError(f"{target}: expected a folder for the lists, got a file; name another folder, which is created") from None
        there = {name: read_text(file) for name, file in folders.files_in(target).items()}
        if there and (folders.BASE_FILE in there or Policy.load(target)._texts() != there):
            raise HmpError(f"{target}: expected a new folder or one that save() wrote, got lists written by hand; name another folder")
        folders.write(target, self._texts())
        return target

    def _texts(self) -> dict[str, str]:
        """Return the text of each file that save() writes, without a base.txt: all entries are in the lists."""
        texts = folders.word_files(self._words)
        for kind in map(lists.kind_of, self.lists):
            texts[kind.file] = folders.list_text(kind, sorted(self.entries(kind.name), key=lambda name: ("@" in name, name == EVERY_OP)))
        return texts

    def diff(self, other: Policy | str | Path) -> dict[str, tuple[str | None, str | None]]:
        """Compare two policies.

        Args:
            other: The other policy, a preset's name or a folder.

        Returns:
            Name → (list in this policy, list in the other), None for unlisted, for each name that decides an op differently; synonyms, such
            as `mul` for `multiply`, don't count as one. `(dtype)` and the other fields that are one word come first, if they differ.

        Raises:
            OpListError: There is no such policy.

        Example:
            >>> mine = hmp.Policy("mine", bf16={"linear"}, fp32={"softmax"})
            >>> mine.diff(mine.replace(fp32={"log"}))
            {'log': (None, 'fp32'), 'softmax': ('fp32', None)}
        """
        against = as_policy(other)

        here, there = Listed(self), Listed(against)
        # of a name on several lists the first counts: BF16 and FP32 before promote
        mine, theirs = ({name: each for each in reversed(lists.deciding()) for name in of.entries(each)} for of in (self, against))
        words = zip(self._words.items(), against._words.values(), strict=True)
        found: dict[str, tuple[str | None, str | None]] = {
            folders.words()[field].title: (one, other) for (field, one), other in words if one != other
        }
        for name in sorted(mine.keys() | theirs.keys()):
            pair = mine.get(name), theirs.get(name)
            ops = () if "@" in name or name == EVERY_OP else ops_of(ListEntry(name, "bf16"))
            differing = [(one, another) for op in ops if (one := here.decides(op)) != (another := there.decides(op))]
            if pair[0] == pair[1] or (ops and not differing):
                continue
            if differing and None in pair and differing[0][0][0] != differing[0][1][0]:
                pair = differing[0][0][0], differing[0][1][0]
            found[name] = pair
        for kind in lists.adding():
            entries, others = ({*of.entries(kind.name)} for of in (self, against))
            for name in sorted(entries ^ others):
                found[f"{name} ({kind.name})"] = (kind.name, None) if name in entries else (None, kind.name)
        return found

    def __str__(self) -> str:
        counts = ", ".join(f"{cast} {len(getattr(self, cast))}" for cast in self.lists)
        scoped = f", {len(self.scoped)} for single modules" if self.scoped else ""
        said = [
            f"low-precision dtype {dtype_name(self.dtype)}",
            *filter(None, (lists.kind_of(cast).described(self) for cast in self.lists)),
        ]
        return f"policy {self.name!r}: {counts} ops{scoped}, {', '.join(said)}, {self.fingerprint}"

    def _repr_html_(self) -> str:
        lines = [textwrap.fill(f"{cast}: {', '.join(self.entries(cast)) or 'no op'}", 120) for cast in self.lists]
        return in_notebook("\n".join([str(self), *lines]))


def in_notebook(text: str) -> str:
    """Return the text, as print() shows it, as HTML: wide tables scroll."""
    return f'<pre style="white-space:pre;overflow-x:auto">{escape(text)}</pre>'


def _in_order(entries: Iterable[ListEntry]) -> tuple[ListEntry, ...]:
    """Entries with a scope, sorted by list, scope and name, without duplicates; of equal ones the first with a file stays."""
    found: dict[tuple[ListName, str], ListEntry] = {}
    order = lists.names()
    for entry in entries:
        if entry.scope is None or entry.list_name not in order:
            raise OpListError(f"expected an entry with a scope on one of {', '.join(order)}, got {entry!r}; write 'op @ module'")
        key = entry.list_name, entry.text
        if key not in found or (found[key].path is None and entry.path is not None):
            found[key] = entry
    return tuple(sorted(found.values(), key=lambda entry: (order.index(entry.list_name), str(entry.scope), entry.name)))


def _habanas() -> Iterator[ListEntry]:
    """Return the entries of Habana's default lists."""
    return (entry for own in _OWN for entry in read_list(presets.folder(HABANA) / f"{own}.txt", own))


def in_dtype(policy: Policy, dtype: Any) -> Policy:
    """Return `policy` with this low-precision dtype, itself for None. Raise HmpError for any other dtype than the two."""
    return policy if dtype is None or low_dtype(dtype) is policy.dtype else policy._in_other_dtype


@functools.cache
def _preset(name: str, device: torch.device) -> Policy | None:
    """Return the preset of that name, None if it is missing. Cached, as training loops run `with hmp.casts("habana")` at each step."""
    return Policy._load(name, device) if name in policies() else None


def as_policy(policy: Policy | str | Path, model: torch.nn.Module | None = None, dtype: Any = None) -> Policy:
    """Return `policy` itself, or the policy of the preset or folder that it names. "autocast" is that of the device that `model` is on.

    Its low-precision dtype is `dtype`, if that is given. Raises OpListError if it names none, HmpError for other types and dtypes.
    """
    if isinstance(policy, (str, os.PathLike)):
        name, found = presets.title(str(policy)) or str(policy), None
        if name != presets.OF_DEVICE:  # which means another one once "hpu" is a device
            found = _preset(name, presets.device_in_use(model) if presets.has_base(name) else torch.device("cpu"))
        policy = found or Policy._load(name, presets.device_in_use(model))
    elif not isinstance(policy, Policy):
        raise HmpError(f"expected an hmp.Policy, a preset's name or a folder, got {policy!r}; presets are {presets.names()}")
    return in_dtype(policy, dtype)
