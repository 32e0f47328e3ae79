"""GaudiConfig: the contents of a gaudi_config.json, as in `optimum.habana`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ... import HmpError, Policy
from ...core.policy.folders import read_gaudi_config
from .. import transformers  # noqa: F401  # raises if transformers is not installed

GAUDI_CONFIG_NAME = "gaudi_config.json"
# Configurations of the model hub that are known without a download: BERT's lists, and both fused kernels.
_LIKE_BERT = ("Habana/bert-base-uncased", "Habana/albert-large-v2")
# Arguments for a download, which scripts pass.
_OF_THE_HUB = frozenset(
    "cache_dir force_download local_files_only proxies resume_download revision subfolder token trust_remote_code use_auth_token".split()
)


class GaudiConfig(SimpleNamespace):
    """A Gaudi configuration.

    Args:
        **values: The keys of a gaudi_config.json. By default switches are False, hmp_opt_level is "O1", and the op lists are BERT's.
            Unknown keys are kept.

    Example:
        >>> from hmp.compat.optimum_habana.configuration import GaudiConfig
        >>> GaudiConfig(use_fused_adam=True).use_fused_adam
        True
    """

    def __init__(self, **values: Any) -> None:
        bert = Policy.load("bert")
        switches = ("use_habana_mixed_precision", "hmp_is_verbose", "use_fused_adam", "use_fused_clip_norm", "use_torch_autocast")
        lists = {"hmp_opt_level": "O1", "hmp_bf16_ops": bert.entries("bf16"), "hmp_fp32_ops": bert.entries("fp32")}
        super().__init__(**{**dict.fromkeys(switches, False), **lists, **values})

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **values: Any) -> GaudiConfig:
        """Read a configuration. Nothing is downloaded.

        Args:
            name_or_path: A file, a folder with a gaudi_config.json, or one of the names on the model hub that hmp knows.
            **values: Keys that replace those of the file. Arguments for a download have no effect.

        Returns:
            The configuration.

        Raises:
            HmpError: There is no such file and hmp does not know the name, or the file is not a JSON object.
        """
        path = Path(name_or_path)
        if path.is_file() or (path / GAUDI_CONFIG_NAME).is_file():
            found = dict(read_gaudi_config(path)[0])
        elif str(name_or_path) in _LIKE_BERT:
            found = dict.fromkeys(("use_habana_mixed_precision", "use_fused_adam", "use_fused_clip_norm"), True)
        else:
            raise HmpError(
                f"from_pretrained() expected a file, a folder with a {GAUDI_CONFIG_NAME}, or one of {', '.join(_LIKE_BERT)}, got "
                f"{str(name_or_path)!r}; hmp downloads nothing: download the file, or use GaudiConfig(...) with its values"
            )
        return cls(**{**found, **{name: value for name, value in values.items() if name not in _OF_THE_HUB}})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GaudiConfig:
        """Return the configuration of these keys."""
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return every key and its value."""
        return dict(vars(self))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write gaudi_config.json into `folder`, which is created if it is missing."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        (target / GAUDI_CONFIG_NAME).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @property
    def policy(self) -> Policy | None:
        """The policy, or None if neither use_habana_mixed_precision nor use_torch_autocast is set."""
        policy = Policy.from_gaudi_config(self.to_dict())  # warns of unknown keys, raises for invalid values
        return policy if self.use_habana_mixed_precision or self.use_torch_autocast else None
