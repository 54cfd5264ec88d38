"""Output of a command or a Python session: the log and bars of rl_vlm, without other libraries' bars."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rl_vlm.config.secrets import without_secrets


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
    """Print rl_vlm's log during the block: info and warnings of the first process, warnings of the others."""
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
