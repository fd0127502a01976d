import pytest

from octavo.cache.block_pool import BlockPool


def test_a_block_goes_from_free_to_used_to_kept_to_free() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    assert (pool.num_free, pool.num_used, pool.num_kept) == (2, 1, 0)
    pool.share(block)
    pool.release(block, keep=True)
    assert (pool.num_free, pool.num_used, pool.num_kept) == (2, 1, 0)
    pool.release(block, keep=True)
    assert (pool.num_free, pool.num_used, pool.num_kept) == (2, 0, 1)
    pool.share(block)
    assert (pool.num_used, pool.num_kept) == (1, 0)
    pool.release(block, keep=True)
    pool.reclaim(block)
    assert (pool.num_free, pool.num_used, pool.num_kept) == (3, 0, 0)
    pool.check_invariants([], [])


def test_blocks_are_distinct_until_the_pool_is_empty() -> None:
    pool = BlockPool(5)
    assert {pool.allocate() for _ in range(5)} == set(range(5))
    with pytest.raises(RuntimeError, match="no free block"):
        pool.allocate()


def test_misuse_is_refused() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    with pytest.raises(RuntimeError, match="still in 1 block tables"):
        pool.reclaim(block)
    pool.release(block, keep=False)
    with pytest.raises(RuntimeError, match="in no block table"):
        pool.release(block, keep=False)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        BlockPool(0)


def test_the_check_finds_wrong_books() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.check_invariants([[block]], [])
    with pytest.raises(AssertionError, match="block tables"):
        pool.check_invariants([[block], [block]], [])
    with pytest.raises(AssertionError, match="block tables"):
        pool.check_invariants([], [])
    pool.release(block, keep=True)
    pool.check_invariants([], [block])
    with pytest.raises(AssertionError, match="kept"):
        pool.check_invariants([], [])
