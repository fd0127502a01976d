"""What a user can cause ends in one sentence on stderr and an exit code, never in a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

USAGE = 2
FAILURE = 1
INTERRUPTED = 130


class CommandError(Exception):
    """One sentence for the user and the exit code that goes with it."""

    def __init__(self, message: str, exit_code: int = FAILURE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def plainly(exit_code: int = FAILURE) -> Iterator[None]:
    """Turn the errors that bad input and a bad world raise into a :class:`CommandError`.

    ``ValueError`` is how every room refuses bad input; ``OSError`` is a file, the disk or the
    network. Anything else is a fault of ours and keeps its traceback.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(os_sentence(error), FAILURE) from error
    except ValueError as error:
        raise CommandError(str(error), exit_code) from error


def os_sentence(error: OSError) -> str:
    """What the system said, with the file that it is about."""
    if error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
