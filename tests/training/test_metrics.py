"""The metrics against their definitions, written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.training.metrics import METRICS, measure

CLASSES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=30)
# Whole numbers, so that many are equal: ranks of ties are their mean.
VALUES = st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=2, max_size=30)


@settings(max_examples=100, deadline=None)
@given(CLASSES)
def test_of_classes(pairs):
    found, true = zip(*pairs, strict=True)
    tp, tn, fp, fn = (pairs.count(pair) for pair in ((1, 1), (0, 0), (1, 0), (0, 1)))
    got = measure(("accuracy", "f1", "matthews"), found, true)
    assert got["accuracy"] == pytest.approx((tp + tn) / len(pairs))
    assert got["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn) if tp + fp + fn else 0.0)
    below = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert got["matthews"] == pytest.approx((tp * tn - fp * fn) / below if below else 0.0)


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_of_values(pairs):
    found, true = zip(*pairs, strict=True)
    got = measure(("pearson", "spearman"), found, true)
    if len(set(found)) == 1 or len(set(true)) == 1:
        assert all(math.isnan(value) for value in got.values())
        return
    assert got["pearson"] == pytest.approx(float(np.corrcoef(found, true)[0, 1]), abs=1e-9)
    ranks = [
        [(np.sum(np.array(xs) < x) + np.sum(np.array(xs) <= x) + 1) / 2 for x in xs] for xs in (found, true)
    ]
    assert got["spearman"] == pytest.approx(float(np.corrcoef(*ranks)[0, 1]), abs=1e-9)


def test_an_unknown_metric_is_refused():
    with pytest.raises(ValueError, match=f"metrics are {', '.join(METRICS)}, got 'bleu'"):
        measure(("bleu",), [0], [0])
