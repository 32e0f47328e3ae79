"""A policy: three lists of op names and a low dtype, as a frozen value."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as dataclass_replace
from pathlib import Path
from typing import Any

import torch

from ..errors import HmpError, OpListError
from ..formatting import dtype_name, html
from ..observing import log
from ..ops import sites
from . import conflicts, presets, spelling
from .entries import CASTS, EVERY_OP, ListEntry, ListName, parse_entry, parse_list, read_list
from .presets import policies

DEFAULT = "autocast"  # what casts a model or a region, where no policy is named
HABANA = "habana"  # what convert() puts in force, and what stands in for list files that are not given
DTYPE_FILE = "dtype.txt"
LOW_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_GAUDI_KEYS = frozenset(
    """use_habana_mixed_precision hmp_opt_level hmp_bf16_ops hmp_fp32_ops hmp_is_verbose use_fused_adam use_fused_clip_norm
    use_torch_autocast autocast_bf16_ops autocast_fp32_ops use_dynamic_shapes log_device_mem_alloc optimum_version
    transformers_version""".split()
)


@dataclass(frozen=True)
class Policy:
    """Which ops run in the low dtype, which in float32, which in the widest dtype of their inputs.

    `bf16`, `fp32` and `promote` hold names as list files spell them; `dtype` is the low dtype, torch.bfloat16 or
    torch.float16. `scoped` holds the rules that have a scope, list by list; an entry such as "softmax @ decoder.*" among the names of a
    list becomes one. Equality looks at all of these, not at `name` nor at where rules were read. Raises OpListError for a name that
    nothing knows and for an op on both the BF16 and the FP32 list, everywhere or in one scope.
    """

    name: str = field(default="custom", compare=False)
    dtype: torch.dtype = torch.bfloat16
    bf16: frozenset[str] = frozenset()
    fp32: frozenset[str] = frozenset()
    promote: frozenset[str] = frozenset()
    scoped: tuple[ListEntry, ...] = field(default=(), compare=False)
    # where each (list, name) was read, for messages
    origin: Mapping[tuple[ListName, str], ListEntry] = field(default_factory=dict, compare=False, repr=False)
    _entries: frozenset[tuple[ListName, str]] = field(init=False, repr=False)  # of `scoped`, for equality

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _low_dtype(self.dtype))
        scoped = list(self.scoped)
        for cast in CASTS:
            names = getattr(self, cast)
            if isinstance(names, str):
                raise OpListError(f"{cast}={names!r} is a string; give a set of op names, or a file to Policy.from_files")
            scoped += [parse_entry(name, cast) for name in names if "@" in name]
            object.__setattr__(self, cast, frozenset(name for name in names if "@" not in name))
        object.__setattr__(self, "scoped", _in_order(scoped))
        object.__setattr__(self, "_entries", frozenset((rule.cast, rule.text) for rule in self.scoped))
        self.casts_by_op("promote")
        conflicts.refuse_both(self.casts_by_op("bf16"), self.casts_by_op("fp32"))
        for scope in dict.fromkeys(rule.scope for rule in self.scoped):
            by_cast: dict[ListName, dict[str, ListEntry]] = {cast: {} for cast in CASTS}
            for rule in self.scoped:
                if rule.scope == scope:
                    by_cast[rule.cast].update(dict.fromkeys(spelling.resolve(rule), rule))
            conflicts.refuse_both(by_cast["bf16"], by_cast["fp32"])

    def casts_by_op(self, cast: ListName) -> dict[str, ListEntry]:
        """The ids of the ops on one of the lists, each with the rule that put it there."""
        found: dict[str, ListEntry] = {}
        for name in sorted(getattr(self, cast)):
            rule = self.origin.get((cast, name)) or ListEntry(name, cast)
            for op in spelling.resolve(rule):
                if op not in found or name == op:  # its own name says more than another's that stands for it too
                    found[op] = rule
        return found

    @classmethod
    def load(cls, policy: str | Path) -> Policy:
        """The preset of that name, or the policy in a folder holding bf16.txt, fp32.txt and promote.txt, or any of these.

        A list whose file is missing is empty. The low dtype is bfloat16 unless dtype.txt says "float16".
        OpListError where there is no such preset or folder.
        """
        folder = presets.folder(str(policy)) if str(policy) in policies() else Path(policy)
        if not folder.is_dir():
            raise OpListError(presets.unknown(str(policy)))
        found = list_files(folder)
        rules = [rule for cast, file in found.items() for rule in read_list(file, cast)]
        return cls._from_rules(folder.name, rules, _read_dtype(folder / DTYPE_FILE))

    @classmethod
    def from_files(
        cls,
        bf16: str | Path = "",
        fp32: str | Path = "",
        promote: str | Path = "",
        *,
        dtype: Any = torch.bfloat16,
        name: str = "custom",
    ) -> Policy:
        """The policy of these list files; "" means the default list of that kind.

        A list that is given, with the synonyms of its names, wins over a default list (R4), and the log says so.
        """
        files = {"bf16": bf16, "fp32": fp32, "promote": promote}
        given: list[ListEntry] = []
        for cast in CASTS:
            if str(files[cast]):
                given += read_list(files[cast], cast)
        defaults = [cast for cast in CASTS if not str(files[cast])]
        return cls._over_defaults(name if given else HABANA, given, defaults, dtype)

    @classmethod
    def _over_defaults(cls, name: str, given: list[ListEntry], defaults: Iterable[ListName], dtype: Any = torch.bfloat16) -> Policy:
        taken: dict[str, ListEntry] = {}
        for rule in given:
            # a name on a given promote list takes nothing from a default list: BF16 and FP32 win over promote
            if rule.cast != "promote" and rule.scope is None:
                for op in spelling.resolve(rule):
                    for relative in (op, *sites.relatives(op)):
                        taken.setdefault(relative, rule)
        rules = list(given)
        for cast in defaults:
            for rule in read_list(presets.folder(HABANA) / f"{cast}.txt", cast):
                winner = next((taken[op] for op in spelling.resolve(rule) if op in taken), None)
                if winner is None or cast == "promote":
                    rules.append(rule)
                elif winner.cast != cast:
                    log.info("%s on the given %s list wins over %s on the default %s list", winner.name, winner.cast, rule.name, cast)
        return cls._from_rules(name, rules, dtype)

    @classmethod
    def _from_rules(cls, name: str, rules: Iterable[ListEntry], dtype: Any = torch.bfloat16) -> Policy:
        rules = list(rules)
        origin = {(rule.cast, rule.name): rule for rule in reversed(rules) if rule.scope is None}
        lists = {cast: frozenset(n for c, n in origin if c == cast) for cast in CASTS}
        scoped = tuple(rule for rule in rules if rule.scope is not None)
        return cls(name, dtype, lists["bf16"], lists["fp32"], lists["promote"], scoped, origin)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Policy:
        """The policy that LOWER_LIST and FP32_LIST name (or PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST and
        PT_HPU_AUTOCAST_FP32_OPS_LIST); the default list where a variable is unset or empty.

        A name on both lists follows the lower-precision list, as Gaudi's autocast has it.
        """
        lower = _list_from_env("bf16", environ, "LOWER_LIST", "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST")
        fp32 = _list_from_env("fp32", environ, "FP32_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST")
        given: list[ListEntry] = list(lower or ())
        low: dict[str | None, dict[str, ListEntry]] = {}
        for rule in given:
            low.setdefault(rule.scope, {}).update(dict.fromkeys(spelling.resolve(rule), rule))
        given += [rule for rule in fp32 or () if conflicts.same_op(spelling.resolve(rule), low.get(rule.scope, {})) is None]
        lists: dict[ListName, tuple[ListEntry, ...] | None] = {"bf16": lower, "fp32": fp32, "promote": None}
        defaults = [cast for cast, rules in lists.items() if rules is None]
        return cls._over_defaults("environment" if given else HABANA, given, defaults)

    @classmethod
    def from_gaudi_config(cls, config: str | Path | Mapping[str, Any]) -> Policy:
        """The policy of an Optimum Gaudi configuration: a gaudi_config.json, the folder that holds one, or its contents.

        BERT's lists stand in for keys that are absent, as documented there. Unknown keys are kept out with a warning.
        Raises HmpError where both HMP and autocast are asked for.
        """
        path = None
        if not isinstance(config, Mapping):
            path = Path(config)
            path = path / "gaudi_config.json" if path.is_dir() else path
            try:
                config = json.loads(path.read_text(encoding="utf-8"))
            except FileNotFoundError:
                raise OpListError("no such file; give a gaudi_config.json or the folder that holds it", path) from None
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                raise OpListError(f"is no JSON ({error}); give a gaudi_config.json", path) from None
        if not isinstance(config, Mapping):
            raise OpListError("is no JSON object; a Gaudi configuration maps keys such as 'hmp_bf16_ops' to values", path)
        unknown = sorted(set(config) - _GAUDI_KEYS)
        if unknown:
            log.warning("%sunknown Gaudi configuration keys: %s", f"{path}: " if path else "", ", ".join(unknown))
        if config.get("use_habana_mixed_precision") and config.get("use_torch_autocast"):
            raise HmpError("use_habana_mixed_precision and use_torch_autocast are both set; set one of them to false")
        kind = "autocast" if config.get("use_torch_autocast") else "hmp"
        if kind == "hmp" and config.get("hmp_opt_level") == "O2":
            return cls.load("habana-o2")
        bert = cls.load("bert")
        rules = [rule for (cast, _), rule in bert.origin.items() if cast == "promote"]
        for cast, default in (("bf16", bert.bf16), ("fp32", bert.fp32)):
            names = config.get(f"{kind}_{cast}_ops")
            names = sorted(default) if names is None else names
            if isinstance(names, str) or not all(isinstance(n, str) for n in names):
                raise OpListError(f"{kind}_{cast}_ops is no list of op names", path)
            for name in names:
                rules += [rule._replace(line=None) for rule in parse_list(name, cast, path)]  # type: ignore[arg-type]
        return cls._from_rules("gaudi-config" if path is None else path.stem, rules)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Policy:
        """The policy that `to_dict()` described."""
        unknown = sorted(set(values) - {"schema_version", "name", "dtype", "fingerprint", *CASTS})
        if unknown:
            raise HmpError(f"a policy has no {', '.join(map(repr, unknown))}; it has name, dtype, bf16, fp32, promote")
        return cls(values.get("name", "custom"), _low_dtype(values.get("dtype", torch.bfloat16)), *(values.get(c, ()) for c in CASTS))

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain JSON values: name, dtype, sorted lists, fingerprint."""
        values: dict[str, Any] = {"name": self.name, "dtype": dtype_name(self.dtype)}
        values |= {str(cast): self.entries(cast) for cast in CASTS}
        return {**values, "fingerprint": self.fingerprint}

    def entries(self, cast: ListName) -> list[str]:
        """What is on one of the lists, as list files spell it: names, sorted, and then the entries that have a scope."""
        return [*sorted(getattr(self, cast)), *(rule.text for rule in self.scoped if rule.cast == cast)]

    @property
    def unscoped(self) -> Policy:
        """The policy without its scoped rules, the same object each time: what holds where none of them speaks of a module."""
        return self._without_scoped if self.scoped else self

    @functools.cached_property
    def _without_scoped(self) -> Policy:
        return dataclass_replace(self, scoped=())

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits of the contents, the same for equal policies on every machine."""
        text = json.dumps([str(self.dtype), *map(self.entries, CASTS)])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def replace(self, **changes: Any) -> Policy:
        """A policy with these fields changed: `policy.replace(bf16=policy.bf16 | {"gelu"})`."""
        changes.setdefault("name", self.name if set(changes) <= {"name", "dtype"} else f"{self.name} (changed)")
        return dataclass_replace(self, **changes)

    def save(self, folder: str | Path) -> Path:
        """Writes bf16.txt, fp32.txt and promote.txt, and dtype.txt where the low dtype is float16, into `folder`; returns it.

        The folder is made if need be.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for cast in CASTS:
            names = sorted(self.entries(cast), key=lambda name: ("@" in name, name == EVERY_OP))
            (target / f"{cast}.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
        if self.dtype is torch.bfloat16:
            (target / DTYPE_FILE).unlink(missing_ok=True)  # what another policy may have left there
        else:
            (target / DTYPE_FILE).write_text(f"{dtype_name(self.dtype)}\n", encoding="utf-8")
        return target

    def diff(self, other: Policy) -> dict[str, tuple[str | None, str | None]]:
        """The names that the two policies treat differently: name → (list here, list there), None for unlisted."""

        def table(policy: Policy) -> dict[str, str]:
            # the first list that holds a name wins: BF16 and FP32 before promote (R4)
            return {name: cast for cast in reversed(CASTS) for name in policy.entries(cast)}

        mine, theirs = table(self), table(other)
        names = sorted(mine.keys() | theirs.keys())
        return {name: (mine.get(name), theirs.get(name)) for name in names if mine.get(name) != theirs.get(name)}

    def __str__(self) -> str:
        counts = ", ".join(f"{cast} {len(getattr(self, cast))}" for cast in CASTS)
        scoped = f", {len(self.scoped)} for single modules" if self.scoped else ""
        return f"policy {self.name!r}: {counts} ops{scoped}, low dtype {dtype_name(self.dtype)}, {self.fingerprint}"

    def _repr_html_(self) -> str:
        dtype = html.chip(dtype_name(self.dtype))
        parts = [html.Html(f"policy <b>{html.text(self.name)}</b>, low dtype {dtype}, {html.code(self.fingerprint)}")]
        for cast in CASTS:
            names = self.entries(cast)
            shown = " ".join(map(html.code, names)) or "no op"
            folded = "" if len(names) > 40 else " open"
            parts.append(html.Html(f"<details{folded}><summary>{cast}: {len(names)} names</summary>{shown}</details>"))
        return html.box(*parts)


def list_files(folder: Path) -> dict[ListName, Path]:
    """The list files that a policy's folder holds, each with its list. OpListError where it holds none."""
    found: dict[ListName, Path] = {cast: folder / f"{cast}.txt" for cast in CASTS if (folder / f"{cast}.txt").is_file()}
    if not found:
        raise OpListError(f"holds none of {', '.join(f'{cast}.txt' for cast in CASTS)}; a policy's folder holds one or more", folder)
    return found


def _low_dtype(dtype: Any) -> torch.dtype:
    for name, low in LOW_DTYPES.items():
        if dtype is low or (isinstance(dtype, str) and dtype.removeprefix("torch.") == name):
            return low
    raise HmpError(f"dtype {dtype!r} is no low dtype; use torch.bfloat16 or torch.float16")


def _in_order(rules: Iterable[ListEntry]) -> tuple[ListEntry, ...]:
    """Rules with a scope in the order of lists, scopes and names, each once, with the first place that it was read from."""
    found: dict[tuple[ListName, str], ListEntry] = {}
    for rule in rules:
        if rule.scope is None or rule.cast not in CASTS:
            raise OpListError(f"{rule!r} is no rule for single modules: it needs a scope and a list, one of {', '.join(CASTS)}")
        known = found.setdefault((rule.cast, rule.text), rule)
        if known.path is None and rule.path is not None:
            found[rule.cast, rule.text] = rule
    return tuple(sorted(found.values(), key=lambda rule: (CASTS.index(rule.cast), str(rule.scope), rule.name)))


def _list_from_env(cast: ListName, environ: Mapping[str, str], *variables: str) -> tuple[ListEntry, ...] | None:
    """The rules in the file that the first of these variables names that is set; None where none is."""
    for variable in variables:
        if environ.get(variable):
            try:
                return read_list(environ[variable], cast)
            except OpListError as error:
                told = OpListError(f"{error}; the environment variable {variable} names it")
                told.path, told.line = error.path, error.line
                raise told from None
    return None


def _read_dtype(file: Path) -> torch.dtype:
    """The low dtype that the file of a policy's folder names: bfloat16 where there is no file."""
    if not file.is_file():
        return torch.bfloat16
    words = read_list(file, "bf16")
    if len(words) != 1 or words[0].text not in LOW_DTYPES:
        raise OpListError(f"holds {' '.join(w.text for w in words)!r}; write bfloat16 or float16 and nothing else", file)
    return LOW_DTYPES[words[0].name]


@functools.cache
def _named(name: str) -> Policy | None:
    """The preset of that name, read once: `with hmp.casts("habana")` stands in training loops. None for no preset."""
    return Policy.load(name) if name in policies() else None


def as_policy(policy: Policy | str | Path) -> Policy:
    """`policy` itself, or the preset or folder that it names. OpListError where it names none."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return _named(policy) or Policy.load(policy)
    if isinstance(policy, os.PathLike):
        return Policy.load(policy)
    raise HmpError(f"{policy!r} is no policy; give an hmp.Policy, a preset's name ({', '.join(policies())}) or a folder")
