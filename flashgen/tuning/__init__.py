"""Measures tiles on the device at hand and keeps what was found."""
