"""Kinds of calls: dense, ragged, over a cache, … One file declares each, and no other place lists them."""
