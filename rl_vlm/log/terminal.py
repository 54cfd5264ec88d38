"""Output of a command or a Python session: the log and bars of rl_vlm, without bars and known lines of libraries."""

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rl_vlm.config.secrets import without_secrets

KNOWN_LINES = {
    # vLLM names layers without new weights at every sync: frozen layers, and layers without weights.
    "vllm.model_executor.model_loader.reload.layerwise": (r"\w+: Failed to load weights", "Allocating .* MB of device"),
    # A run does not bind threads to cores. The warning comes with every prompt.
    "vllm.v1.worker.cpu_worker": ("CPU backend doesn't allow to use `torch.set_num_threads`",),
    # The trainer's random states are restored after vLLM has started.
    "vllm.engine.arg_utils": ("The global random seed is set to",),
    # Consequences of `max_num_seqs` and of `vllm_enforce_eager`, or of a CPU.
    "vllm.config.scheduler": ("max_num_batched_tokens .* exceeds max_num_seqs",),
    "vllm.config.vllm": ("Enforce eager set, disabling", "Inductor compilation was disabled by user settings"),
    "vllm.platforms.cpu": ("Reset SSM cache type",),
    # `save_pretrained` imports DeepSpeed wherever it is installed.
    "DeepSpeed": ("Setting accelerator to CPU",),
    # A build of torch for GPUs, on a machine without.
    "torch.utils.cpp_extension": ("No CUDA runtime is found, using CUDA_HOME",),
}
"""Lines of other libraries that concern no user, by logger: patterns of how they begin."""
KNOWN_WARNINGS: tuple[tuple[type[Warning], str], ...] = (
    # Calls of DeepSpeed, at every step, and of vLLM cause it.
    (FutureWarning, r"`torch\.distributed\..*` is deprecated"),
    # vLLM's call of the processor.
    (FutureWarning, "Passing `min_pixels` and `max_pixels` to a processor call is deprecated"),
    # PEFT, of an adapter on a tied LM head. Exports with this adapter merged in are not tied.
    (UserWarning, "Model has `tie_word_embeddings=True` and a tied layer is part of the adapter"),
)
"""Python warnings of other libraries that concern no user: category, and pattern of how they begin."""


class KnownLines(logging.Filter):
    """Drops the lines that begin with one of the patterns."""

    def __init__(self, patterns: Iterable[str]) -> None:
        super().__init__()
        self.pattern = re.compile("|".join(patterns))

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to keep the line."""
        return self.pattern.match(record.getMessage()) is None


FILTERS = {name: KnownLines(patterns) for name, patterns in KNOWN_LINES.items()}


def drop_known_lines() -> None:
    """Drop `KNOWN_LINES` and `KNOWN_WARNINGS` in this process. Other lines of the same loggers stay."""
    for name, known in FILTERS.items():
        logging.getLogger(name).addFilter(known)
    for category, pattern in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=pattern, category=category)


class BarAwareHandler(logging.Handler):
    """Prints messages without secrets on standard error, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        text = without_secrets(self.format(record))
        if "tqdm" in sys.modules:
            sys.modules["tqdm"].tqdm.write(text, file=sys.stderr)
        else:  # there is no bar
            print(text, file=sys.stderr, flush=True)


@contextmanager
def shown_log() -> Iterator[None]:
    """Print rl_vlm's log during the block: info and warnings of the first process, warnings of the others.

    Drop known lines of other libraries.
    """
    drop_known_lines()
    logger, handler = logging.getLogger("rl_vlm"), BarAwareHandler()
    level = logger.level
    logger.setLevel(logging.INFO if is_first_process() else logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def hide_bars_of_libraries() -> None:
    """Hide the bars that transformers and datasets show for every file, so that only the run's bars are shown."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if "datasets" in sys.modules:
        sys.modules["datasets"].disable_progress_bars()
    else:  # it is imported if data is read with it, which takes a second, and reads this variable
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def is_first_of_machine() -> bool:
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"
