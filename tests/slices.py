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


# Tests that take more than ten seconds of a core, most of them because each case compiles: of their cases one in so
# many runs in `make test`; of 0 none does. Measured with nothing compiled before.
LONG = {
    "tests/benchmark/test_figures.py::test_the_page_shows_what_was_measured": 0,
    "tests/benchmark/test_sweeps.py::test_a_budget_that_is_spent_ends_a_sweep": 2,
    "tests/benchmark/test_sweeps.py::test_block_sweep_pins_what_it_says": 0,
    "tests/cli/test_bench_sweep.py::test_tables_and_plots": 2,
    "tests/cli/test_build.py::test_a_constant_is_overridden": 0,
    "tests/cli/test_fuzz.py::test_calls_of_a_file": 0,
    "tests/cli/test_fuzz.py::test_what_was_kept_is_judged_again": 0,
    "tests/cuda/test_distances.py::test_gradients": 3,
    "tests/cuda/test_from_tile_to_tile.py::test_from_tile_to_tile": 2,
    "tests/cuda/test_from_tile_to_tile.py::test_mistakes_from_tile_to_tile": 3,
    "tests/cuda/test_gallery.py::test_the_emulator_agrees_with_the_reference": 2,
    "tests/cuda/test_hopper.py::test_the_emulator_agrees_with_the_reference": 2,
    "tests/cuda/test_key_tiles_in_turn.py::test_key_tiles_in_turn": 3,
    "tests/cuda/test_key_tiles_in_turn.py::test_mistakes_in_turn": 3,
    "tests/cuda/test_selected.py::test_results_gradients_and_bytes": 2,
    "tests/cuda/test_sequences.py::test_mistakes_of_both_passes_show": 3,
    "tests/cuda/test_sequences_on_hopper.py::test_mistakes_show": 3,
    "tests/cuda/test_tensor_copies.py::test_mistakes_in_a_kernel_that_was_right": 4,
    "tests/fuzz/test_corpus.py::test_kept_cases": 3,
    "tests/masks/test_lists_of_a_call.py::test_results_and_bytes": 2,
    "tests/masks/test_numbers.py::test_blocks_and_tiles_that_do_not_go_together": 4,
    "tests/masks/test_numbers.py::test_nothing_is_kept": 3,
    "tests/numeric/test_decode.py::test_each_sequence_is_a_part_of_a_dense_call": 3,
    "tests/numeric/test_decode.py::test_heads_of_one_query_are_rows": 2,
    "tests/numeric/test_decode.py::test_splits_of_the_keys_are_merged": 3,
    "tests/numeric/test_gallery.py::test_other_head_dims": 2,
    "tests/numeric/test_matrix_products.py::test_every_element_type": 2,
    "tests/numeric/test_matrix_products.py::test_what_is_not_finite": 3,
    "tests/numeric/test_opcheck.py::test_opcheck": 3,
    "tests/runtime/test_conversion.py::test_ids_of_any_integer_type": 3,
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
