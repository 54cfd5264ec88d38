"""Where a test run keeps the tiny checkpoints that it has built; this module imports nothing heavy."""

CACHE = "RL_VLM_TINY_CHECKPOINTS"
"""Environment variable with the folder."""
