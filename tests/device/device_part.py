"""Runs one part's checks: `python device_part.py PART`, on the device that HMP_TEST_DEVICE names. .ci/device calls it.

Each check is printed when it is done, and appended as a line of JSON to the file HMP_DEVICE_RESULTS.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import warnings
from pathlib import Path


def main(part: str) -> int:
    """Returns 1 where a check failed."""
    import device_kit

    logging.getLogger("hmp").setLevel(logging.ERROR)  # that an op ran in float32 for want of a kernel, among others
    warnings.simplefilter("ignore")
    failed = 0
    for found in device_kit.results(part):
        line = found.said.strip().splitlines()[-1 if found.outcome == "failed" else 0] if found.said.strip() else ""
        print(f"  {found.outcome:8} {found.seconds:5.1f} s  {found.name}  {line}"[:300], flush=True)
        path = os.environ.get("HMP_DEVICE_RESULTS")
        if path:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(found)) + "\n")
        failed += found.outcome == "failed"
    return 1 if failed else 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    # Without the end of Python: torch's thread for backward on the device lets go of the last graph after backward() has returned, and
    # takes the GIL for that. Python ends a thread that asks when it has ended itself: "terminate called without an active exception".
    sys.stderr.flush()
    os._exit(code)
