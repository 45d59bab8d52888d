"""The error that a recipe shows to its user without a traceback."""

import contextlib
from collections.abc import Iterator


class UserError(Exception):
    """Something the user can put right. The message names what is wrong (key and value) and the remedy."""


@contextlib.contextmanager
def writing(said: str) -> Iterator[None]:
    """Of what is written inside, says what cannot be; `said` is the key and value that chose the place."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{said}: cannot write {error.filename or 'there'} ({error.strerror}). Choose another folder, or make room there.") from error
