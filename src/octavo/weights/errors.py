"""The one error of this room."""

from __future__ import annotations


class WeightsError(ValueError):
    """A model's files are missing, damaged, unsupported or do not fit it; says which, in one sentence."""
