"""The file of an Optimum Gaudi configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import HmpError, OpListError
from ..observing import log

_GAUDI_KEYS = frozenset(
    """use_habana_mixed_precision hmp_opt_level hmp_bf16_ops hmp_fp32_ops hmp_is_verbose use_fused_adam use_fused_clip_norm
    use_torch_autocast autocast_bf16_ops autocast_fp32_ops use_dynamic_shapes log_device_mem_alloc optimum_version
    transformers_version""".split()
)


def read_gaudi_config(config: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], Path | None]:
    """A configuration's contents, and the file that it was read from, None where these were given. Unknown keys are warned of.

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
    return config, path
