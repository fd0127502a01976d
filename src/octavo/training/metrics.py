"""The metrics of GLUE, by scikit-learn and scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence

METRICS = ("accuracy", "f1", "f1_macro", "matthews", "pearson", "spearman")


def check_installed() -> None:
    """Raises ValueError, with what to install, where the extra ``train`` is missing."""
    try:
        import safetensors  # noqa: F401  (only looked for, as the next)
        import scipy  # noqa: F401 - only whether it is there
        import sklearn  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ValueError(
            f"training needs {error.name}, which is not installed: pip install 'octavo[train]'"
        ) from None


def measure(names: Sequence[str], found: Sequence[float], true: Sequence[float]) -> dict[str, float]:
    """Each metric of ``found`` against ``true``: numbers of classes, or values of a regression.

    "f1" is that of class 1. A correlation with something constant is undefined, and nan.
    """
    return {name: _measure(name, found, true) for name in names}


def _measure(name: str, found: Sequence[float], true: Sequence[float]) -> float:
    from scipy import stats
    from sklearn import metrics

    if name == "accuracy":
        return float(metrics.accuracy_score(true, found))
    if name == "f1":
        return float(metrics.f1_score(true, found, pos_label=1, zero_division=0.0))
    if name == "f1_macro":
        return float(metrics.f1_score(true, found, average="macro", zero_division=0.0))
    if name == "matthews":
        if len({*found, *true}) == 1:  # undefined; scikit-learn gives 0 too, with a warning
            return 0.0
        return float(metrics.matthews_corrcoef(true, found))
    if name in ("pearson", "spearman"):
        if len(found) < 2 or len(set(found)) == 1 or len(set(true)) == 1:
            return math.nan
        correlate = stats.pearsonr if name == "pearson" else stats.spearmanr
        return float(correlate(found, true).statistic)
    raise ValueError(f"metrics are {', '.join(METRICS)}, got {name!r:.100}")
