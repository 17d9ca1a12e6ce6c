"""Times of an operator beside its peers, measured in the same run."""
