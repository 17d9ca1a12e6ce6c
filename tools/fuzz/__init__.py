"""Random specs and random calls, judged on every backend; failures are cut down and kept. See ``campaign.py``."""
