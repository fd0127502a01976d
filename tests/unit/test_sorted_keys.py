import random
from bisect import bisect_left

import pytest

from octavo.cache import sorted_keys
from octavo.cache.sorted_keys import SortedKeys


def test_it_behaves_like_a_sorted_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_keys, "CHUNK", 4)  # so that chunks split and vanish all the time
    rng = random.Random(0)
    keys: SortedKeys[tuple[int, int]] = SortedKeys()
    model: list[tuple[int, int]] = []
    for step in range(4000):
        key = (rng.randrange(60), 0)
        grow = step % 1000 < 500
        if key not in model and (grow or rng.random() < 0.3):
            keys.add(key)
            model.append(key)
            model.sort()
        elif key in model and not (grow and rng.random() < 0.7):
            keys.remove(key)
            model.remove(key)
        elif key not in model:
            with pytest.raises(KeyError):
                keys.remove(key)
        assert list(keys) == model
        assert len(keys) == len(model)
        probe = (rng.randrange(-2, 64), rng.randrange(-1, 2))
        at = bisect_left(model, probe)
        assert keys.at_or_above(probe) == (model[at] if at < len(model) else None)
        assert keys.below(probe) == (model[at - 1] if at else None)
        if model:
            assert keys.first() == model[0]
