"""A plugin of pytest that runs tests with tensors on the device that HMP_TEST_DEVICE names: `-p device_tensors`.

The device becomes torch's default, as by `with torch.device(...)` around every test: a tensor that a test makes without saying where is
made there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

import devices_here

DEVICE = os.environ.get("HMP_TEST_DEVICE", "cpu")
devices_here.set_up(DEVICE)
if DEVICE == "xla":  # whose generator torch.manual_seed leaves alone
    import torch_xla

    _plain_seed = torch.manual_seed

    def _seed(seed: int) -> torch.Generator:
        torch_xla.manual_seed(seed)
        return _plain_seed(seed)

    torch.manual_seed = torch.random.manual_seed = _seed
# before conftest.py notes what torch is like
torch.set_default_device(DEVICE)

_HOST = "it writes by the CPU's own ways; tests/device/on_caches.py asks the same of the device"
_CPU_S_AUTOCAST = 'it enters torch.autocast("cpu"), which leaves tensors of other devices alone'
_WAITS = "whether a dense tensor of the scores' dtype and shape is a mask is asked on the CPU alone: a device would be waited for"
_THREADS = "a device's thread has another default device"
# File or test → why it says nothing about another device than the CPU.
NOT_ON_A_DEVICE = {
    "test_devices.py": "its tensors are fake ones of every device",
    "test_r15_dataloader.py": "a forked worker of a DataLoader cannot use the device",
    "test_p3_copies.py": _HOST,
    "test_r12_infinities_stay_so_and_an_operand_that_needs_a_gradient_gets_the_plain_cast": _WAITS,
    "test_r12_a_row_that_is_masked_wholly_is_finite_however_the_mask_is_added": _WAITS,
    "test_r12_a_broadcast_mask_in_the_scores_dtype_is_finite": _WAITS,
    "test_r13_a_graph_that_was_made_under_a_policy_is_helped_where_backward_runs_outside_of_it": _THREADS,
    "test_r17_custom_fwd_with_cast_inputs_is_an_island": _CPU_S_AUTOCAST,
    "test_r18_counted.py": _CPU_S_AUTOCAST,
    "test_r21_many_uses_have_the_error_of_a_cast_for_each_and_keep_what_autocast_keeps": _CPU_S_AUTOCAST,
    "test_r18_copies.py": _HOST,
    "test_r17_custom_fwd_keeps_real_autocast_as_torch_has_it": _CPU_S_AUTOCAST,
    "test_r11_no_instructions.py": "products compute in float32 on processors without instructions alone",
    "test_r9_files_of_weights_are_read_and_written_as_they_are": "files are read into the CPU's memory",
    "test_r11_no_op_gives_garbage_in_a_low_dtype": "it is about the CPU's kernels",
    "test_r11_ops_whose_low_kernels_give_garbage_run_in_float32": "it is about the CPU's kernels",
    "test_r1_a_foreign_type_still_gets_its_turn_in_an_operator": "its foreign type computes with numpy",
}
_LAYOUTS = "the device has strided tensors alone"
_LACKS = "its kernels are the CPU's, whose lacks hmp knows as the CPU's"
_MIXES = "XLA computes with a mixture that torch's kernels refuse"
_CHOOSES = "where() gives XLA the dtype of a 0-dim value, an integer's too, in plain torch"
_TAKES = "XLA writes what does not fit into integers"
_WARNS = "torch_xla makes torch believe that there is CUDA's autocast, and nothing warns"
_KERNELS = "it is about kernels that the CPU lacks; tests/device/on_rules.py asks which the device has"
# By device: test → why it says nothing about that one.
NOT_ON = {
    "cuda": {
        "test_r11_in_place_writes_into_the_tensor_that_it_is_given": _KERNELS,
        "test_r11_failure_is_remembered_and_the_low_dtype_not_tried_again": _KERNELS,
        "test_r11_layout_is_part_of_what_is_remembered": _KERNELS,
        "test_r11_is_logged_once_an_op_and_counted": _KERNELS,
        "test_r11_op_without_a_low_kernel_runs_in_float32": _KERNELS,
        "test_r1_sparse_tensors_are_cast": "plain torch has no product of sparse bfloat16 matrices on CUDA",
        "test_r15_plumbing_computes_what_it_computes_without_hmp": "plain torch cannot average integers on CUDA (addcdiv)",
    },
    "pretend": {
        "test_r1_float8_and_quantized_tensors_are_never_cast": _LAYOUTS,
        "test_r1_sparse_tensors_are_cast": _LAYOUTS,
        "test_r10_the_views_of_a_sparse_tensor_are_not_cast": _LAYOUTS,
        "test_r9_a_norm_of_nested_tensors_has_no_mixed_kernel": _LAYOUTS,
        "test_r9_the_table_of_an_embedding_keeps_its_dtype_and_gets_its_gradient": _LAYOUTS,
        "test_r9_sums_of_rows_are_of_cast_rows_but_where_the_gradient_is_sparse": _LAYOUTS,
        "test_r11_layout_is_part_of_what_is_remembered": _LAYOUTS,
        "test_r12_nested_tensors_are_no_masks": _LAYOUTS,
        "test_r15_plumbing_computes_what_it_computes_without_hmp": _LAYOUTS,
        "test_r7_a_tangent_in_another_dtype_is_a_mixture_and_no_missing_kernel": "its attention is torch's Python, which takes a mixture",
        "test_r11_in_place_writes_into_the_tensor_that_it_is_given": _LACKS,
        "test_r11_op_without_a_low_kernel_runs_in_float32": _LACKS,
        "test_r11_op_without_a_low_backward_kernel_runs_in_float32_where_a_gradient_is_needed": _LACKS,
        "test_r11_failure_is_remembered_and_the_low_dtype_not_tried_again": "a profiler sees each of its ops twice, the CPU's too",
        "test_r17_what_is_put_around_an_applied_models_forward_counts_as_outside": "nn.DataParallel scatters by a function of CUDA's",
    },
    "xla": {
        "test_r7_r11_a_refused_call_is_not_tried_again_where_a_hook_is": _MIXES,
        "test_r7_a_mixture_under_a_mode_raises_torchs_own_error_and_the_mode_sees_it_once": _MIXES,
        "test_r7_a_tangent_in_another_dtype_is_a_mixture_and_no_missing_kernel": _MIXES,
        "test_r7_outside_of_a_policy_a_mixture_raises_what_torch_raises": _MIXES,
        "test_r12_integers_keep_torchs_error": _TAKES,
        "test_r6_an_unlisted_op_takes_an_out_of_one_of_its_inputs_dtypes": _TAKES,
        "test_r5_what_has_an_input_that_is_no_castable_tensor_is_left_to_torch": _TAKES,
        "test_r13_a_low_gradient_and_a_float32_weight_meet_in_a_users_backward": _MIXES,
        "test_r13_disable_casts_around_backward_leaves_torch_exactly_torch_in_it": _MIXES,
        "test_r10_the_views_of_a_sparse_tensor_are_not_cast": _LAYOUTS,
        "test_r9_a_norm_of_nested_tensors_has_no_mixed_kernel": _LAYOUTS,
        "test_r9_sums_of_rows_are_of_cast_rows_but_where_the_gradient_is_sparse": _LAYOUTS,
        "test_r11_op_without_a_low_backward_kernel_runs_in_float32_where_a_gradient_is_needed": _LACKS,
        "test_r11_op_without_a_low_kernel_runs_in_float32": "XLA has one of those kernels",
        "test_r11_in_place_writes_into_the_tensor_that_it_is_given": _LACKS,
        "test_r11_layout_is_part_of_what_is_remembered": _LAYOUTS,
        "test_r12_nested_tensors_are_no_masks": _LAYOUTS,
        "test_r11_an_error_that_float32_does_not_mend_is_torchs_own": "its words for shapes that do not fit are its own",
        "test_r15_plumbing_computes_what_it_computes_without_hmp": "torch has no fused optimizers there",
        "test_r17_a_region_that_torch_itself_disables_is_no_request_to_disable": _WARNS,
        "test_r1_sparse_tensors_are_cast": _LAYOUTS,
        "test_r6_an_out_of_another_shape_is_resized_with_torchs_warning": "XLA resizes without a warning",
        "test_r6_errors_are_torchs_and_out_is_untouched": _TAKES,
        "test_r7_recurrent_nets_run_in_their_inputs_dtype_with_float32_weights": _MIXES,
        "test_r7_recurrent_nets_cast_a_float32_state_along_and_take_packed_sequences": "torch_xla has no packed sequences",
        "test_r8_attention_has_the_same_precision_in_eval_as_in_training": "a view of an inference tensor fails there, in plain torch too",
        "test_r9_the_table_of_an_embedding_keeps_its_dtype_and_gets_its_gradient": _LAYOUTS,
        "test_r9_transformers_models_are_the_same_when_made_or_loaded_after_convert": "safetensors writes none of XLA's tensors",
        "test_r15_gradcheck_passes_and_casts_nothing": "XLA compiles a program for each of its evaluations, for minutes",
        "test_r16_remove_undoes_the_patches_that_a_tool_made_meanwhile[compare]": "compare() refuses XLA",
        "test_r10_a_view_of_a_subclass_is_its_view": "torch's subclass of two tensors has no views there, in plain torch too",
        "test_r12_a_row_that_is_masked_wholly_by_a_choice_is_finite": _CHOOSES,
        "test_r12_sums_of_masks_in_compiled_code_are_those_of_eager_code": _CHOOSES,
        "test_r9_statistics_of_a_third_dtype_are_written_in_training_alone": "plain torch_xla takes no mixture in a batch norm on the CPU",
        "test_r9_norms_with_float32_weights_give_under_vmap_what_they_give_without": "plain torch_xla has no such gradient either",
        "test_r15_a_closure_runs_as_if_it_were_called_outside": "XLA compiles a step of LBFGS for minutes, in plain torch too",
    },
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        names = (Path(str(item.path)).name, getattr(item, "originalname", item.name), item.name)
        here = {name: f"not on {DEVICE}: {why}" for name, why in NOT_ON.get(DEVICE, {}).items()}
        reasons = {name: f"only on the CPU: {why}" for name, why in NOT_ON_A_DEVICE.items()} | here
        reason = next((reasons[name] for name in names if name in reasons), None)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """An error inside a kernel makes a device useless to its process: this one then ends, and xdist starts another.

    XLA computes all tensors that are alive together: one whose program failed, which the failure of its test keeps, fails every later call.
    """
    result = yield
    for kept in ("last_exc", "last_value", "last_traceback"):
        vars(sys).pop(kept, None)
    if DEVICE == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"{item.nodeid} left the device unusable: {error}", file=sys.stderr, flush=True)
            os._exit(70)
    return result
