"""The import that brings torch along is made without Python's collector, and leaves it as it was."""

import subprocess
import sys

import pytest

LOOKS = "sum(generation['collections'] for generation in gc.get_stats())"


def say(code: str) -> list[str]:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


def test_nothing_is_looked_at_while_torch_is_imported_and_little_afterwards():
    looks, young, enabled, frozen = say(
        f"import gc, octavo; before = {LOOKS}; octavo.LLM; looks = {LOOKS} - before; "
        "print(looks, gc.get_count()[0], gc.isenabled(), gc.get_freeze_count())"
    )
    # One look at the few objects that were made since, if any.
    assert int(looks) <= 1
    assert int(young) < 700
    assert (enabled, frozen) == ("True", "0")


def test_what_was_made_is_still_looked_at_by_a_whole_collection():
    code = (
        "import gc, weakref, octavo\n"
        "class Cycle: pass\n"
        "cycle = Cycle(); cycle.itself = cycle; gone = weakref.ref(cycle)\n"
        "octavo.LLM; del cycle; gc.collect(); print(gone() is None)"
    )
    assert say(code) == ["True"]


@pytest.mark.parametrize("first", ["gc.disable()", "gc.freeze()", "import torch"])
def test_a_program_that_has_its_own_way_keeps_it(first: str):
    code = f"import gc, octavo; {first}; octavo.LLM; print(gc.isenabled(), gc.get_freeze_count() > 0)"
    assert say(code) == [str(first != "gc.disable()"), str(first == "gc.freeze()")]
