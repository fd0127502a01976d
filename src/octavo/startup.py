"""What makes a start shorter without changing what the program does."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_imports() -> Iterator[None]:
    """For the import that brings torch along: what it makes lasts as long as the process.

    Python's collector would look at all of it again and again while it grows, a fifth of the time until the
    first token. So it is off meanwhile, and afterwards counts what there is as old. Where torch is there
    already, or the collector is off or has been told to leave objects alone, nothing is done.
    """
    if "torch" in sys.modules or not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # Out of the young generations and back into the oldest one: the only way to get there without a look.
        gc.freeze()
        gc.unfreeze()
        gc.enable()
