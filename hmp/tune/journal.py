"""What was measured before: tune.json of a search that has the same task goes on, another's is refused."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import HmpError
from ..formatting import of_json
from ..lists import Policy
from .files import JSON_FILE
from .identity import differences
from .result import TuneResult, result_of
from .trial import Flow, Trial, Unit, trial_of


class Journal:
    """The trials and measurements of an earlier search with this key; empty where there is none.

    HmpError where the folder holds those of another task, and for a file that is none of hmp's.
    """

    def __init__(self, folder: Path | None, key: dict[str, str], resume: bool) -> None:
        self.trials: dict[str, Trial] = {}
        self.units: tuple[Unit, ...] = ()
        self.flows: tuple[Flow, ...] = ()
        self.result: TuneResult | None = None  # of a search that ended by itself
        file = None if folder is None else folder / JSON_FILE
        if file is None or not resume or not file.is_file():
            return
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            known = values["key"]
            if known != key:
                # what an older hmp wrote tells no parts
                another = differences(key, known) if isinstance(known, dict) else "release of hmp"
                raise HmpError(
                    f"{file}: is of a search with another {another}; name another folder, or give resume=False (--no-resume) to start anew"
                )
            self.trials = {_id(trial.name, trial.policy): trial for trial in map(trial_of, values["trials"])}
            self.units = tuple(of_json(Unit, each) for each in values["units"])
            self.flows = tuple(of_json(Flow, each) for each in values["flows"])
            if values["stopped"] == "solved":
                self.result = result_of(values)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise HmpError(
                f"{file}: is no tune.json of hmp ({type(error).__name__}: {error}); take it away, or name another folder"
            ) from None

    def trial(self, name: str, policy: Policy) -> Trial | None:
        """The trial of that policy, None where it was not made."""
        return self.trials.get(_id(name, policy))


def _id(name: str, policy: Policy) -> str:
    return name if name == "float32" else policy.fingerprint  # float32 runs without hmp
