"""Everything that knows a target: one folder a family, with the same file names; ``gpu`` is what GPUs share."""
