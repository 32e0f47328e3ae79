"""hmp under transformers' own Trainer, which stays as it is: HMPCallback."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

import hmp

from .. import HmpError, Policy
from ..core.convert import in_dtype
from ..core.formatting import versioned
from ..core.observing import log
from ..core.policy import DEFAULT, as_policy
from ..tools.extras import needed
from ..tools.report.record import record
from ..tools.report.violations import check_allowed

with needed("hmp.compat.transformers needs", "transformers", "transformers"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, trainer_callback
    from transformers import __version__ as transformers_version
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

__all__ = ["HMPCallback"]

POLICY_FILE = "hmp_policy.json"


# What checkpoints keep a callback by, from transformers 4.41 on.
_KEEPS_CALLBACKS = hasattr(trainer_callback, "ExportableState")
_ExportableState: Any = trainer_callback.ExportableState if _KEEPS_CALLBACKS else object


class HMPCallback(TrainerCallback, _ExportableState):  # type: ignore[misc]
    """Casts inside the model of a Trainer: `Trainer(..., callbacks=[HMPCallback("habana")])`.

    Every call of the model runs under the policy, in training, evaluation and prediction, and gives its floating tensors in float32;
    the optimizer, and whatever is called outside the model, runs without casts. The policy has the last word inside a Trainer's own
    bf16=True or fp16=True, too. `policy` is a Policy, a preset's name, a folder, or what `Policy.to_dict()` gave; `verbose` logs it and
    every distinct cast once. The model stays so after the Trainer, until `detach()`. With `verify` the first step of a run is recorded, and
    raises hmp.ViolationError where a call in it ran otherwise than the line of its list says; `allow` is as for hmp.verify().

    Checkpoints hold the policy, in trainer_state.json and for people in hmp_policy.json; a run that goes on from one under another policy
    says so in the log. Before transformers 4.41 only the second holds it, and the log says to compare.
    """

    def __init__(
        self,
        policy: Policy | str | Path | Mapping[str, Any] = DEFAULT,
        *,
        verbose: bool = False,
        verify: bool = False,
        allow: Collection[str] = (),
    ) -> None:
        self._given = policy
        self.policy = Policy.from_dict(policy) if isinstance(policy, Mapping) else as_policy(policy)
        self._verbose, self._verify, self._allow = verbose, verify, allow
        check_allowed(allow)
        self._to_verify = False
        self._first_step: Any = None  # what ends its recording, and the report
        self._model: torch.nn.Module | None = None
        self._hook: Any = None

    def attach(self, model: torch.nn.Module) -> None:
        """Has every call of `model` run under the policy from now on. A Trainer that is given the callback does this."""
        if self._model is not None and self._model is not model:
            self.detach()
        if self._given == DEFAULT:
            self.policy = as_policy(DEFAULT, model)
        hmp.apply(model, self.policy, verbose=self._verbose)
        for key in [key for key, hook in model._forward_hooks.items() if hook is _in_float32]:
            del model._forward_hooks[key]  # another callback's
        self._model, self._hook = model, model.register_forward_hook(_in_float32)

    def detach(self) -> None:
        """Leaves the model as it was; `hmp.revert()` takes hmp's patches off torch."""
        self._drop_recording()
        if self._model is not None:
            hmp.remove(self._model)
            self._hook.remove()
        self._model = self._hook = None

    def __deepcopy__(self, memo: dict[int, Any]) -> HMPCallback:
        return HMPCallback(
            DEFAULT if self._given == DEFAULT else copy.deepcopy(self.policy, memo),
            verbose=self._verbose,
            verify=self._verify,
            allow=self._allow,
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the callback: the policy."""
        return {"args": {"policy": self.policy.to_dict()}, "attributes": {}}

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The Trainer is made: its model is attached to."""
        if kwargs.get("model") is not None:  # a Trainer with model_init= makes its model when it trains
            self.attach(kwargs["model"])

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A run begins, maybe from a checkpoint: its model may be a new one, its policy another one."""
        self._drop_recording()  # of a run that ended in its first step
        self._to_verify = self._verify
        model = kwargs["model"]
        if model is not self._model:
            self.attach(model)
        if state.global_step > 0 and not _KEEPS_CALLBACKS:
            log.warning(
                "this run goes on under policy %r (%s); transformers %s keeps no callback in a checkpoint, as 4.41 and later do: "
                "compare it with the policy in the checkpoint's %s",
                self.policy.name, self.policy.fingerprint, transformers_version, POLICY_FILE,
            )  # fmt: skip
        before = _policy_in(state)
        if before is not None and before != self.policy:
            log.warning(
                "the checkpoint was written under policy %r (%s), this run goes on under %r (%s); its numbers will differ. "
                "To go on as before give HMPCallback(Policy.from_dict(...)) the policy in the checkpoint's %s",
                before.name, before.fingerprint, self.policy.name, self.policy.fingerprint, POLICY_FILE,
            )  # fmt: skip

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The first step is recorded, where it is to be verified."""
        if self._to_verify:
            self._to_verify = False
            recording = contextlib.ExitStack()
            self._first_step = recording, recording.enter_context(record())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """ViolationError where a call of the first step ran otherwise than the line of its list says."""
        report = self._drop_recording()
        if report is not None:
            report.verify(self._allow)

    def _drop_recording(self) -> Any:
        """End the recording of the first step, which an exception may have ended, and return its report."""
        first, self._first_step = self._first_step, None
        if first is None:
            return None
        recording, report = first
        recording.close()
        return report

    def on_prediction_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A batch was evaluated: without casts, where the callback was added to a Trainer that exists."""
        if self._model is None:
            raise HmpError(
                "HMPCallback was added after the Trainer was made, and this evaluation began without casts; "
                "give it to the Trainer, Trainer(..., callbacks=[HMPCallback()]), or call attach(trainer.model) first"
            )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint was written: the policy is put beside it."""
        folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if args.should_save and folder.is_dir():
            (folder / POLICY_FILE).write_text(json.dumps(versioned(self.policy.to_dict()), indent=1) + "\n", encoding="utf-8")


def _policy_in(state: TrainerState) -> Policy | None:
    """The policy that a run's state was saved with; None where it was saved without one."""
    callbacks: Any = getattr(state, "stateful_callbacks", None)
    kept = (callbacks or {}).get(HMPCallback.__name__)
    if isinstance(kept, list):
        kept = kept[-1]
    return None if kept is None else Policy.from_dict(kept["args"]["policy"])


def _in_float32(module: torch.nn.Module, args: Any, output: Any) -> Any:
    """A module's output with its low-precision tensors in float32, as accelerate gives it under its own mixed precision."""
    return in_dtype(output, torch.float32)
