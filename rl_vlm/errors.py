"""Errors that a user can get. Each message names the problem, its place and a solution."""

import difflib
import errno
import importlib.util
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from traceback import TracebackException
from typing import Literal, NamedTuple, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Problem(NamedTuple):
    """A kind of problem, and its remedy."""

    kind: str
    remedy: str


class RLVLMError(Exception):
    """Base class. The command line prints the message without a traceback and exits with `exit_status`."""

    exit_status = 2
    on_all_ranks = False
    """Whether every rank raises this error at the same place, so that they can save a checkpoint together."""
    problem: Problem | None = None
    """Kind and remedy, if the error knows them. Checks show errors of one kind together."""


class ConfigError(RLVLMError):
    """A setting that cannot be used: unknown key, bad value, or a combination without a solution."""


class DataError(RLVLMError):
    """A dataset, row or image that cannot be used; the message names the row and the file."""

    def __init__(self, message: str, problem: Problem | None = None) -> None:
        super().__init__(message)
        self.problem = problem


class ModelError(RLVLMError):
    """A checkpoint or model family that cannot be used: missing or unexpected weights, an unknown family."""


class RolloutError(RLVLMError):
    """A rollout engine that cannot be used, is lost, or samples with other weights than it was sent."""


class RewardError(RLVLMError):
    """A reward function that cannot be loaded, or that fails on more completions than `max_fault_fraction` allows.

    Other failures during a call mask completions; see docs/rewards.md.
    """


class CheckpointError(RLVLMError):
    """A checkpoint that cannot be written or read; earlier checkpoints are not changed."""


class LaunchError(RLVLMError):
    """A mismatch between the launched processes and the processes that the run finds."""


class RankLost(LaunchError):
    """Another rank that has died, failed or hangs. The message names it, with its traceback or position."""

    exit_status = 1


class Stopped(RLVLMError):
    """A run that stops because of a signal. Its exit status is 128 + the signal's number."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_status = 128 + signum

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.args[0]).name}"


class TrainingError(RLVLMError):
    """A run that cannot continue, for instance after three consecutive non-finite losses."""


class OutOfMemory(RLVLMError):
    """Work that does not fit in memory and cannot be split further."""


OF_MACHINE = {
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT,
    errno.EAGAIN, errno.EBUSY, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN,
}  # fmt: skip
"""Numbers of system errors that say nothing about a file's content."""


def is_of_machine(error: BaseException) -> bool:
    """Return whether an error is about the machine, such as its memory, disks or open files, and not about a file."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in OF_MACHINE)


ALLOCATOR_ERRORS = (
    "DefaultCPUAllocator: ",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
)
"""Texts of out-of-memory errors without a class of their own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation of PyTorch failed, on a device or in host memory."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in ALLOCATOR_ERRORS)


class Problems:
    """Collects the errors of several calls, so that a user gets all of them at once."""

    def __init__(self) -> None:
        self.errors: list[RLVLMError] = []

    def call(self, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T | None:
        """Call a function. If it raises an RLVLMError, keep the error and return None. Raise `Stopped` again."""
        try:
            return function(*arguments, **keywords)
        except Stopped:
            raise
        except RLVLMError as error:
            self.errors.append(error)
            return None

    def refuse(self) -> None:
        """Raise one error with all messages, if any. Its class is the class of the errors, or ConfigError if they
        differ."""
        if not self.errors:
            return
        if len(self.errors) == 1:
            raise self.errors[0]
        classes = {type(error) for error in self.errors}
        raise (classes.pop() if len(classes) == 1 else ConfigError)("\n".join(map(str, self.errors)))


Severity = Literal["error", "warning", "info"]
"""error: the run stops, or does not train as intended. warning: it runs, but its result is worse or misleading. info:
worth knowing."""


@dataclass(frozen=True)
class Finding:
    """One result of a check before a run. Findings of the same kind are shown together."""

    severity: Severity
    kind: str
    what: str
    remedy: str = ""
    data: str | None = None
    """The dataset of the row."""
    row: int | None = None
    """The row, if the finding is about one row."""
    function: str | None = None
    """The reward function, if the finding is about one function."""
    rows: tuple[int, ...] = ()
    """Example rows, if the finding is about a function."""


def require_bitsandbytes(setting: str) -> None:
    """Raise ConfigError if bitsandbytes is not installed, which `setting` needs."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"{setting} needs bitsandbytes, which is not installed: pip install -e '.[bitsandbytes]', or leave it out"
        )


def shorten(text: object, length: int = 300) -> str:
    """Shorten the text to at most `length` characters; an ellipsis replaces the rest."""
    whole = str(text)
    return whole if len(whole) <= length else whole[: length - 1] + "…"


def text_of(error: BaseException) -> str:
    """Return the text of an exception on one line. If its `__str__` raises, return a note instead. Never raises."""
    try:
        refuse_shadow()
        from rewards.contract import text_of

        return text_of(error)
    except Exception:  # another `rewards`, which `rl_vlm.reward` refuses, must not replace the error at hand
        return " ".join(str(TracebackException.from_exception(error)).split())


def refuse_shadow() -> None:
    """Raise RewardError if `import rewards` would find something other than the package next to `rl_vlm`."""
    ours = Path(__file__).resolve().parents[1] / "rewards" / "__init__.py"
    spec = importlib.util.find_spec("rewards")
    found = spec and (spec.origin or list(spec.submodule_search_locations or []))
    if not isinstance(found, str) or Path(found).resolve() != ours:
        raise RewardError(
            f"`import rewards` finds {found} instead of rl-vlm's own {ours}; rename yours, or start from another "
            "directory (reward functions are named `file.py:function`, so their file may have any name)"
        )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def listed(names: Iterable[str]) -> str:
    """Return the names in order, separated by commas."""
    return ", ".join(sorted(names)) or "none"
