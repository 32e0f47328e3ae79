"""GaudiConfig: what a gaudi_config.json says, as `optimum.habana` gives it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ... import HmpError, Policy
from .. import transformers  # noqa: F401  # it says what to install where transformers is not

GAUDI_CONFIG_NAME = "gaudi_config.json"
# Configurations on the model hub that are known without it: they hold BERT's lists, and ask for both fused kernels.
_LIKE_BERT = ("Habana/bert-base-uncased", "Habana/albert-large-v2")
# Where and how to download, which scripts pass on.
_OF_THE_HUB = frozenset(
    "cache_dir force_download local_files_only proxies resume_download revision subfolder token trust_remote_code use_auth_token".split()
)


class GaudiConfig:
    """A Gaudi configuration: `GaudiConfig(use_fused_adam=True)`, or `GaudiConfig.from_pretrained(folder)`.

    Switches that are not given are off, the level is O1, and the op lists are BERT's. Keys that are not known are kept.
    """

    use_habana_mixed_precision: bool
    hmp_opt_level: str
    hmp_bf16_ops: list[str]
    hmp_fp32_ops: list[str]
    hmp_is_verbose: bool
    use_fused_adam: bool
    use_fused_clip_norm: bool
    use_torch_autocast: bool

    def __init__(self, **values: Any) -> None:
        bert = Policy.load("bert")
        given = {
            "use_habana_mixed_precision": False,
            "hmp_opt_level": "O1",
            "hmp_bf16_ops": bert.entries("bf16"),
            "hmp_fp32_ops": bert.entries("fp32"),
            "hmp_is_verbose": False,
            "use_fused_adam": False,
            "use_fused_clip_norm": False,
            "use_torch_autocast": False,
        }
        vars(self).update(given | values)

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **values: Any) -> GaudiConfig:
        """The configuration in a file, or in a folder's gaudi_config.json; `values` replace what it says.

        Arguments that say where and how to download are taken and mean nothing, for nothing is downloaded: of the
        names on the model hub those are known whose configuration hmp has, and others are an HmpError.
        """
        path = Path(name_or_path)
        if path.is_dir():
            path = path / GAUDI_CONFIG_NAME
        if path.is_file():
            found = _read(path)
        elif str(name_or_path) in _LIKE_BERT:
            found = dict.fromkeys(("use_habana_mixed_precision", "use_fused_adam", "use_fused_clip_norm"), True)
        else:
            raise HmpError(
                f"Gaudi configuration {str(name_or_path)!r}: there is no such file or folder with a {GAUDI_CONFIG_NAME}, and nothing is "
                f"downloaded; give the path of one that you have, GaudiConfig(...) with its values, or a name that hmp knows: "
                f"{', '.join(_LIKE_BERT)}"
            )
        return cls(**{**found, **{name: value for name, value in values.items() if name not in _OF_THE_HUB}})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GaudiConfig:
        """The configuration of these keys."""
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Every key and its value."""
        return dict(vars(self))

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes gaudi_config.json into `folder`, which is made if need be."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        (target / GAUDI_CONFIG_NAME).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @property
    def policy(self) -> Policy | None:
        """The casts that are asked for; None where neither use_habana_mixed_precision nor use_torch_autocast is set."""
        policy = Policy.from_gaudi_config(self.to_dict())  # tells of unknown keys, and refuses what cannot be meant
        return policy if self.use_habana_mixed_precision or self.use_torch_autocast else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GaudiConfig) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"GaudiConfig({json.dumps(self.to_dict(), indent=2, sort_keys=True, default=str)})"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise HmpError(f"{path}: is no JSON ({error}); give a {GAUDI_CONFIG_NAME}") from None
    if not isinstance(found, dict):
        raise HmpError(f"{path}: is no JSON object; a Gaudi configuration maps keys such as 'hmp_bf16_ops' to values")
    return found
