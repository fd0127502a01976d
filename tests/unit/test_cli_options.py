"""The command line's own copies of names, made so that --help needs no torch, agree with the rooms'."""

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli import bench_output, options


def test_the_choices_are_those_of_the_engine():
    from octavo.cache.kv_cache import DTYPES
    from octavo.kernels.api import BACKENDS

    assert sorted(options.ATTENTION) == sorted(BACKENDS)
    assert sorted(options.KV_DTYPES) == sorted(DTYPES)


@given(st.integers(1, 10**6))
def test_a_length_is_a_number_or_a_multiple_of_1024(n):
    assert options.parse_length(str(n)) == n
    assert options.parse_length(f" {n}k ") == options.parse_length(f"{n}K") == 1024 * n


@pytest.mark.parametrize("text", ["", "0", "-1", "k", "1.5k", "8kk", "8M", "0k", "²", "9" * 5000])
def test_anything_else_is_no_length(text):
    with pytest.raises(typer.BadParameter, match="such as 4096 or 8k"):
        options.parse_length(text)


@pytest.mark.parametrize("size", [1, 2, 16, 256])
def test_block_sizes_are_powers_of_two(size):
    assert options.check_block_size(size) == size


@pytest.mark.parametrize("size", [-16, 0, 3, 12, 512])
def test_other_block_sizes_are_refused(size):
    with pytest.raises(typer.BadParameter, match="power of two"):
        options.check_block_size(size)


def test_a_recorded_command_names_no_folder_of_the_machine(monkeypatch):
    args = [
        "octavo",
        "bench",
        "throughput",
        "/home/me/model.gguf",
        "--text=/srv/a book.txt",
        "--out",
        "here/x",
    ]
    monkeypatch.setattr("sys.argv", args)
    assert (
        bench_output.command_line() == "octavo bench throughput model.gguf '--text=a book.txt' --out here/x"
    )
