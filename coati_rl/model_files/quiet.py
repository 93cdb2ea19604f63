"""Keep transformers from writing to the terminal while it loads a model."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars, which would overwrite the run's own progress display."""
    from transformers.utils import logging as hf_logging

    were_on = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            hf_logging.enable_progress_bar()


@contextmanager
def held_load_report() -> Iterator[list[str]]:
    """Hold back transformers' report, as `no_load_report` does, and provide its text."""
    logger, held = logging.getLogger("transformers.modeling_utils"), list[str]()

    def hold(record: logging.LogRecord) -> bool:
        held.append(record.getMessage())
        return False

    logger.addFilter(hold)
    try:
        yield held
    finally:
        logger.removeFilter(hold)


@contextmanager
def no_load_report() -> Iterator[None]:
    """Hide transformers' report of tensors that are missing or unused; what it says is checked by name."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
