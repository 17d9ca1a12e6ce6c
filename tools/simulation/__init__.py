"""Attention over several devices on paper: what the planner predicts that ranks take."""
