"""hmp in transformers' own Trainer: HMPCallback."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import hmp
from hmp import HmpError, Policy

from ..core.log import log
from ..core.policy.policy import DEFAULT, as_policy
from ..core.torch_patches.module_calls import in_dtype
from ..tools.extras import needed
from ..tools.formatting import versioned
from ..tools.record.recorder import record

with needed("hmp.compat.transformers needs", "transformers", "transformers"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

__all__ = ["HMPCallback"]

POLICY_FILE = "hmp_policy.json"


class HMPCallback(TrainerCallback, ExportableState):
    """Casts inside the model of a Trainer: `Trainer(..., callbacks=[HMPCallback("habana")])`.

    Every call of the model, in training, evaluation and prediction, runs under the policy and returns its floating-point tensors in
    float32. The optimizer and other code outside the model run without casts. The policy takes precedence over the Trainer's own bf16=True
    or fp16=True. It stays on the model after the Trainer, until `detach()`.

    Checkpoints contain the policy in trainer_state.json, and readable in hmp_policy.json; resuming under another policy logs a warning.

    Args:
        policy: A policy, a preset's name, a folder of lists, or the result of `Policy.to_dict()`.
        verbose: Log the policy, and each distinct cast once.
        verify: Record the first step of a run, and raise if a call in it did not follow its list.

    Raises:
        HmpError: The policy is unknown, or the callback was added to a Trainer after that was created.
        ViolationError: With `verify`, a call did not follow its list.

    Example:
        >>> from hmp.compat.transformers import HMPCallback
        >>> model, callback = torch.nn.Linear(4, 2), HMPCallback("habana")
        >>> callback.attach(model)  # Trainer(..., callbacks=[callback]) does this
        >>> model(torch.ones(1, 4)).dtype
        torch.float32
        >>> callback.detach()
    """

    def __init__(
        self,
        policy: Policy | str | Path | Mapping[str, Any] = "autocast",
        *,
        verbose: bool = False,
        verify: bool = False,
    ) -> None:
        self._given = policy
        self.policy = Policy.from_dict(policy) if isinstance(policy, Mapping) else as_policy(policy)
        self._verbose, self._verify = verbose, verify
        self._to_verify = False
        self._first_step: Any = None  # the recording, and its report
        self._model: torch.nn.Module | None = None
        self._hook: Any = None

    def attach(self, model: torch.nn.Module) -> None:
        """Run every call of a model under the policy from now on. A Trainer with the callback does this.

        Args:
            model: The model.
        """
        if self._model is not None and self._model is not model:
            self.detach()
        if self._given == DEFAULT:
            self.policy = as_policy(DEFAULT, model)
        hmp.apply(model, self.policy, verbose=self._verbose)
        for key in [key for key, hook in model._forward_hooks.items() if hook is _in_float32]:
            del model._forward_hooks[key]  # another callback's
        self._model, self._hook = model, model.register_forward_hook(_in_float32)

    def detach(self) -> None:
        """Restore the model. `hmp.revert()` removes hmp's patches of torch."""
        self._drop_recording()
        if self._model is not None:
            hmp.remove(self._model)
            self._hook.remove()
        self._model = self._hook = None

    def __deepcopy__(self, memo: dict[int, Any]) -> HMPCallback:
        policy = DEFAULT if self._given == DEFAULT else copy.deepcopy(self.policy, memo)
        return HMPCallback(policy, verbose=self._verbose, verify=self._verify)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the callback: the policy."""
        return {"args": {"policy": self.policy.to_dict()}, "attributes": {}}

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Attach to the model of a new Trainer."""
        if kwargs.get("model") is not None:  # a Trainer with model_init= creates its model when it trains
            self.attach(kwargs["model"])

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Attach to the model of the run, and compare the policy with that of its checkpoint."""
        self._drop_recording()  # that of a run that ended in its first step
        self._to_verify = self._verify
        model = kwargs["model"]
        if model is not self._model:
            self.attach(model)
        before = _policy_in(state)
        if before is not None and before != self.policy:
            log.warning(
                "expected the checkpoint's policy %r (%s), got %r (%s), so the numbers will differ. To continue as before use "
                "HMPCallback(Policy.from_dict(...)) with the policy in the checkpoint's %s",
                before.name, before.fingerprint, self.policy.name, self.policy.fingerprint, POLICY_FILE,
            )  # fmt: skip

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begin to record the first step, with `verify`."""
        if self._to_verify:
            self._to_verify = False
            recording = contextlib.ExitStack()
            self._first_step = recording, recording.enter_context(record())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise ViolationError if a call of the first step did not follow its list."""
        report = self._drop_recording()
        if report is not None:
            report.verify()

    def _drop_recording(self) -> Any:
        """End the recording of the first step, which an exception may have ended, and return its report."""
        first, self._first_step = self._first_step, None
        if first is None:
            return None
        recording, report = first
        recording.close()
        return report

    def on_prediction_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise HmpError if a batch was evaluated without casts."""
        if self._model is None:
            raise HmpError(
                "expected HMPCallback in Trainer(..., callbacks=[HMPCallback()]), but it was added later, and this evaluation runs without "
                "casts; pass it to the Trainer, or call attach(trainer.model) before evaluate()"
            )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the policy into a new checkpoint."""
        folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if args.should_save and folder.is_dir():
            (folder / POLICY_FILE).write_text(json.dumps(versioned(self.policy.to_dict()), indent=1) + "\n", encoding="utf-8")


def _policy_in(state: TrainerState) -> Policy | None:
    """Return the policy in the state of a run, or None."""
    callbacks: Any = state.stateful_callbacks
    kept = (callbacks or {}).get(HMPCallback.__name__)
    if isinstance(kept, list):
        kept = kept[-1]
    return None if kept is None else Policy.from_dict(kept["args"]["policy"])


def _in_float32(module: torch.nn.Module, args: Any, output: Any) -> Any:
    """Return a module's output with low-precision tensors in float32, as accelerate does with its own mixed precision."""
    return in_dtype(output, torch.float32)
