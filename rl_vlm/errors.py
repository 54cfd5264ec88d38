"""The errors a user can meet. Each message names what was found, where, and the way out."""


class RLVLMError(Exception):
    """Base class: the command line prints its message without a traceback and exits with status 2."""


class ConfigError(RLVLMError):
    """A setting that cannot be used: unknown key, bad value, or a combination without a solution."""


class DataError(RLVLMError):
    """A dataset, row or image that cannot be used; the message names the row and the file."""


class ModelError(RLVLMError):
    """A checkpoint or model family that cannot be used: missing or unexpected weights, an unknown family."""


class RolloutError(RLVLMError):
    """A rollout engine that cannot be used, is lost, or does not answer for the policy that it was sent."""


class RewardError(RLVLMError):
    """A reward function that cannot be loaded. Faults while it runs mask rows instead; see docs/rewards.md."""


class CheckpointError(RLVLMError):
    """A checkpoint that cannot be written or read; earlier checkpoints are left as they were."""


class LaunchError(RLVLMError):
    """The processes that were launched are not the processes that the run sees."""


class TrainingError(RLVLMError):
    """The run cannot go on, for instance after three non-finite losses in a row."""
