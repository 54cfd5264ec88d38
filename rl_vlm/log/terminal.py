"""What a command or a Python session shows: the log of rl_vlm and its bars, without those of other libraries."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rl_vlm.config.secrets import without_secrets


class BarAwareHandler(logging.Handler):
    """Prints messages without secrets on standard error, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(without_secrets(self.format(record)), file=sys.stderr)


@contextmanager
def shown_log() -> Iterator[None]:
    """Print what rl_vlm logs while the block runs: everything of the first process, and warnings of the others."""
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
    """Hide the bars that transformers and datasets show for every file, so that only those of the run are shown."""
    import datasets
    from transformers.utils.logging import disable_progress_bar

    datasets.disable_progress_bars()
    disable_progress_bar()


def is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def is_first_of_machine() -> bool:
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"
