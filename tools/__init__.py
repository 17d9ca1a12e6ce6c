"""What developers of flashgen run from a checkout: fuzzing, benchmarks, the algorithms of the paper, simulation."""
