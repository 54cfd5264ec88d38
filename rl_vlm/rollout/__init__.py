"""Rollouts: engines that generate completions, and windows of generated groups."""

import rl_vlm.reward  # noqa: F401  checks that the imports of `rewards` find ours
