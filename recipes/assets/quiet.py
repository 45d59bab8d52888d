"""Keeps transformers' progress bars off the terminal."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

from transformers.utils import logging


@contextmanager
def no_progress_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        # Its GGUF reader has a bar of its own, which no setting turns off. Log handlers keep the stream they began with.
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
