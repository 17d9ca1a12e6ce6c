"""What of a long list runs in `make test`; the rest runs in `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_of(every: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the first of each ``every`` as they are, others marked slow. A tuple is a row of them.

    What is marked already stays as it is, and is not counted.
    """
    found: list[Any] = []
    counted = 0
    for value in values:
        each = pytest.param(*(value if isinstance(value, tuple) else (value,))) if not _is_param(value) else value
        if not each.marks:
            each = pytest.param(*each.values, marks=pytest.mark.slow if counted % every else ())
            counted += 1
        found.append(each)
    return found


# Tests that take more than some seconds of a core, most of them because each case compiles: of their cases one in so
# many runs in `make test`; of 0 none does. Measured with nothing compiled before.
LONG = {
    "tests/benchmark/test_figures.py::test_data_without_pictures_is_kept_and_drawn_later": 0,
    "tests/benchmark/test_figures.py::test_the_page_shows_what_was_measured": 0,
    "tests/benchmark/test_sweeps.py::test_a_budget_that_is_spent_ends_a_sweep": 2,
    "tests/benchmark/test_sweeps.py::test_block_sweep_pins_what_it_says": 0,
    "tests/benchmark/test_sweeps.py::test_length_sweep_measures_time_memory_and_bytes": 0,
    "tests/cli/test_bench_sweep.py::test_length_as_json_and_plot": 0,
    "tests/cli/test_bench_sweep.py::test_tables_and_plots": 2,
    "tests/cli/test_build.py::test_a_constant_is_overridden": 0,
    "tests/cli/test_check.py::test_broken_text_is_diagnosed_in_time": 3,
    "tests/cli/test_fuzz.py::test_calls_of_a_file": 0,
    "tests/cli/test_fuzz.py::test_what_was_kept_is_judged_again": 0,
    "tests/cli/test_run.py::test_bench_says_why_a_peer_is_missing": 0,
    "tests/cli/test_tune.py::test_tune_shows_keeps_and_clears": 0,
    "tests/cli/test_usage.py::test_a_wrong_option_is_wrong_usage": 3,
    "tests/cpu_primitives/test_convert.py::test_to_float": 3,
    "tests/cpu_primitives/test_matrix_product.py::test_product": 3,
    "tests/cuda/test_distances.py::test_gradients": 3,
    "tests/cuda/test_from_tile_to_tile.py::test_from_tile_to_tile": 2,
    "tests/cuda/test_from_tile_to_tile.py::test_mistakes_from_tile_to_tile": 3,
    "tests/cuda/test_gallery.py::test_the_emulator_agrees_with_the_reference": 2,
    "tests/cuda/test_halves_of_dq.py::test_results_and_bytes": 3,
    "tests/cuda/test_hopper.py::test_the_emulator_agrees_with_the_reference": 2,
    "tests/cuda/test_key_tiles_in_turn.py::test_key_tiles_in_turn": 3,
    "tests/cuda/test_key_tiles_in_turn.py::test_mistakes_in_turn": 3,
    "tests/cuda/test_selected.py::test_results_gradients_and_bytes": 2,
    "tests/cuda/test_sequences.py::test_mistakes_of_both_passes_show": 3,
    "tests/cuda/test_sequences_on_hopper.py::test_mistakes_show": 3,
    "tests/cuda/test_tensor_copies.py::test_mistakes_in_a_kernel_that_was_right": 4,
    "tests/documents/test_error_page.py::test_the_example_gives_the_code_and_the_cure_does_not": 3,
    "tests/documents/test_pages.py::test_the_page_runs": 4,
    "tests/emit/test_cpu.py::test_the_planner_counts_the_bytes_that_the_templates_keep": 3,
    "tests/emit/test_names.py::test_names_made_of_others_are_other_names": 2,
    "tests/emit/test_names.py::test_words_compile": 3,
    "tests/examples/test_long_range.py::test_standard_attention_does_not_fit_where_flashgen_does": 0,
    "tests/examples/test_mean_flow.py::test_losses_are_those_of_the_math_path": 2,
    "tests/flash/test_dense.py::test_slopes_of_alibi_and_their_gradients": 2,
    "tests/flash/test_dense.py::test_the_formula": 3,
    "tests/flex/test_calls.py::test_half_types_on_kernels": 2,
    "tests/flex/test_mods.py::test_mods_are_what_they_are_to_flex_attention": 2,
    "tests/flex/test_random_mods.py::test_on_kernels": 2,
    "tests/fuzz/test_corpus.py::test_kept_cases": 3,
    "tests/masks/test_lists_of_a_call.py::test_blocks_take_the_longest_lists_first": 2,
    "tests/masks/test_lists_of_a_call.py::test_other_kernels": 3,
    "tests/masks/test_lists_of_a_call.py::test_results_and_bytes": 2,
    "tests/masks/test_numbers.py::test_blocks_and_tiles_that_do_not_go_together": 4,
    "tests/masks/test_numbers.py::test_nothing_is_kept": 3,
    "tests/nn/test_multihead.py::test_in_an_encoder_layer_of_pytorch": 2,
    "tests/nn/test_multihead.py::test_it_is_pytorchs_where_the_spec_is_plain": 2,
    "tests/nn/test_multihead.py::test_masks_are_pytorchs": 2,
    "tests/numeric/test_bounded_scores.py::test_against_the_reference": 3,
    "tests/numeric/test_cpu_kinds.py::test_each_kind": 2,
    "tests/numeric/test_decode.py::test_each_sequence_is_a_part_of_a_dense_call": 3,
    "tests/numeric/test_decode.py::test_heads_of_one_query_are_rows": 2,
    "tests/numeric/test_decode.py::test_splits_of_the_keys_are_merged": 3,
    "tests/numeric/test_decode_on_gpus.py::test_each_sequence_is_a_part_of_a_dense_call": 3,
    "tests/numeric/test_determinism.py::test_every_result_is_repeatable": 3,
    "tests/numeric/test_elements_of_nothing.py::test_on_cpus": 3,
    "tests/numeric/test_elements_of_nothing.py::test_on_the_emulator": 3,
    "tests/numeric/test_extreme_scores.py::test_on_cpus": 3,
    "tests/numeric/test_extreme_scores.py::test_on_the_emulator": 4,
    "tests/numeric/test_f8.py::test_numbers_times_their_factors_are_what_is_attended_to": 3,
    "tests/numeric/test_forward_mode.py::test_tangents_of_all_that_moves": 3,
    "tests/numeric/test_gallery.py::test_other_head_dims": 2,
    "tests/numeric/test_large_head_dims.py::test_results_and_bytes": 2,
    "tests/numeric/test_matrix_products.py::test_every_element_type": 4,
    "tests/numeric/test_matrix_products.py::test_what_is_not_finite": 3,
    "tests/numeric/test_memory.py::test_64k_tokens": 3,
    "tests/numeric/test_opcheck.py::test_opcheck": 3,
    "tests/numeric/test_pruned_scores.py::test_against_the_reference": 3,
    "tests/numeric/test_pruned_scores.py::test_rows_that_keep_nothing": 2,
    "tests/numeric/test_ragged.py::test_sizes_are_those_of_the_sequence": 2,
    "tests/numeric/test_ragged_on_gpus.py::test_of_the_gallery": 2,
    "tests/numeric/test_repeatable.py::test_bits_do_not_depend_on_the_number_of_threads": 3,
    "tests/numeric/test_selected.py::test_results_and_gradients": 3,
    "tests/numeric/test_weight_forms.py::test_kernels_agree_with_the_reference": 2,
    "tests/pipeline/test_pipeline.py::test_a_damaged_manifest_says_what_to_do": 3,
    "tests/pipeline/test_pipeline.py::test_constants_can_be_overridden": 0,
    "tests/reference/test_algorithms.py::test_rabe_and_staats": 3,
    "tests/runtime/test_conversion.py::test_ids_of_any_integer_type": 3,
    "tests/runtime/test_emulator_backend.py::test_both_passes": 2,
    "tests/runtime/test_explain.py::test_tiles_of_short_calls_are_right": 2,
    "tests/runtime/test_explain.py::test_what_is_explained_is_what_the_emulator_ran": 3,
    "tests/runtime/test_exported_programs.py::test_a_program_runs_in_a_process_that_imported_flashgen_alone": 0,
    "tests/runtime/test_exported_programs.py::test_one_spec_is_one_operator_however_it_was_made": 0,
    "tests/runtime/test_op.py::test_two_threads_with_different_shapes": 2,
    "tests/runtime/test_parts.py::test_they_are_what_other_kernels_write_before_it_is_rounded": 2,
    "tests/runtime/test_parts.py::test_where_warpgroups_divide_columns": 2,
    "tests/runtime/test_selected.py::test_derivatives_of_derivatives_read_the_lists": 2,
    "tests/runtime/test_slices.py::test_they_are_what_other_kernels_write": 4,
}


def long_ones(names: Iterable[str]) -> list[int]:
    """Places of the tests among these names, not slow so far, that ``LONG`` leaves to `make test-all`."""
    found, counted = [], dict.fromkeys(LONG, 0)
    for n, name in enumerate(names):
        function = name.partition("[")[0]
        every = LONG.get(function)
        if every is None:
            continue
        if every == 0 or counted[function] % every:
            found.append(n)
        counted[function] += 1
    return found


def _is_param(value: Any) -> bool:
    return isinstance(value, type(pytest.param()))
