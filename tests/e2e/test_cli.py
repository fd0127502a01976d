"""The command line as a user meets it: a process, its two streams and its exit code."""

import json
import os
import subprocess
import sys

import pytest

COMMANDS = [[], ["pull"], ["models"], ["run"], ["bench"], ["bench", "attention"], ["bench", "throughput"]]


def octavo(*args: str, stdin: str | bytes = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``octavo`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "from octavo.cli import main; main()", *args],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"} | env,
        check=False,
        timeout=120,
    )


def text(stream: bytes) -> str:
    return stream.decode("utf-8")


def refused(result, exit_code: int, *words: str) -> None:
    """One clear sentence on stderr, no traceback, nothing on stdout."""
    err = text(result.stderr)
    assert result.returncode == exit_code, err
    assert "Traceback" not in err
    assert text(result.stdout) == ""
    assert len(err.strip().splitlines()) == 1, err
    for word in words:
        assert word in err


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(command):
    result = octavo(*command, "--help")
    assert result.returncode == 0, text(result.stderr)
    assert "Usage: octavo" in text(result.stdout)
    assert text(result.stderr) == ""


def test_help_imports_no_torch_and_is_quick():
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "from octavo.cli import app\n"
        "app(['run', '--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'huggingface_hub'} & set(sys.modules)\n"
        "print(sorted(heavy), time.perf_counter() - start, file=sys.stderr)"
    )
    seconds = []
    for _ in range(3):
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        heavy, _, taken = result.stderr.rpartition(" ")
        assert heavy == "[]"
        seconds.append(float(taken))
    assert min(seconds) < 0.5


def test_without_a_command_the_help_is_shown_and_it_is_a_usage_error():
    result = octavo()
    assert result.returncode == 2
    assert "Usage: octavo" in text(result.stdout)


def test_version():
    result = octavo("--version")
    assert result.returncode == 0
    assert text(result.stdout).startswith("octavo ")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["fly"], ["fly"]),
        (["run", "--fly"], ["--fly"]),
        (["run", "--attention", "magic"], ["--attention", "fused, sdpa, bmm, loop", "magic"]),
        (["run", "--kv-dtype", "int3"], ["float32, float16", "int3"]),
        (["run", "--kv-cache-memory", "lots"], ["--kv-cache-memory", "2GiB", "lots"]),
        (["run", "--block-size", "12"], ["power of two", "12"]),
        (["run", "--max-model-len", "8q"], ["8k", "8q"]),
        (["run", "--max-model-len", "0"], ["--max-model-len", "'0'"]),
        (["run", "--threads", "0"], ["--threads"]),
        (["run", "--temperature", "hot"], ["--temperature"]),
        (["run", "--temperature", "999999"], ["temperature must be between 0.0 and 100.0"]),
        (["run", "--top-p", "-1"], ["top_p must be in (0, 1], got -1"]),
        (["run", "--max-tokens", "-1"], ["max_tokens must be 0 or more, got -1"]),
        (["run", "--stop", ""], ["stop must not contain an empty string"]),
        (["run", "--json"], ["--json needs --prompt"]),
        (["run", "--raw"], ["--raw needs --prompt"]),
        (["run", "--prompt", "x", "--raw", "--system", "y"], ["--system"]),
        (["bench", "throughput", "--workloads", "z", "--repeats", "0"], ["--repeats"]),
        (["bench", "throughput", "--peers", "nobody"], ["peers are transformers, got 'nobody'"]),
        (["pull"], ["name"]),
    ],
)
def test_bad_usage_is_exit_2_and_one_sentence(args, words):
    refused(octavo(*args), 2, *words)


def test_a_missing_text_is_exit_1_and_names_the_file(tmp_path):
    missing = tmp_path / "none.txt"
    refused(octavo("bench", "throughput", "--text", str(missing), "--out", str(tmp_path)), 1, "none.txt")


@pytest.mark.parametrize("model", ["no/such-folder/at-all/here", "./missing.gguf", "no-such-model"])
def test_an_unknown_model_is_exit_1_and_names_it(model):
    result = octavo("run", model, "--prompt", "hi", HF_HUB_OFFLINE="1")
    refused(result, 1, model.removeprefix("./"))


def test_models_lists_the_table():
    result = octavo("models")
    assert result.returncode == 0, text(result.stderr)
    for word in ("smollm2-135m-instruct", "Apache-2.0", "gemma3-270m", "pulled"):
        assert word in text(result.stdout)


def test_a_reader_that_leaves_is_no_traceback():
    script = f'"{sys.executable}" -c "from octavo.cli import main; main()" models | true'
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.stderr == ""
