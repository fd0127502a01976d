"""The command line as a user meets it: a process, its two streams and its exit code."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from octavo.cli.app import exit_code

COMMANDS = [
    [],
    ["pull"],
    ["models"],
    ["run"],
    ["train"],
    ["convert"],
    ["bench"],
    ["bench", "attention"],
    ["bench", "throughput"],
    ["bench", "perplexity"],
    ["bench", "quality"],
    ["bench", "conversion"],
]


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
    # Processor time, start-up included: a busy machine must not make this fail.
    code = (
        "import sys, time\n"
        "from octavo.cli import app\n"
        "app(['run', '--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'huggingface_hub'} & set(sys.modules)\n"
        "print(sorted(heavy), time.process_time(), file=sys.stderr)"
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
        (["run", "--fly"], ["--fly"]),
        (["run", "--attention", "magic"], ["--attention", "fused, sdpa, bmm, loop", "magic"]),
        (["run", "--kv-dtype", "int3"], ["float32, float16", "int3"]),
        (["run", "--kv-cache-memory", "lots"], ["--kv-cache-memory", "2GiB", "lots"]),
        (["run", "--kv-cache-memory", "9" * 400], ["--kv-cache-memory", "a size is a number of bytes"]),
        (["run", "--block-size", "12"], ["power of two", "12"]),
        (["run", "--weights", "q2_k"], ["--weights", "auto, float32, float16, bfloat16, q8_0, q4_1"]),
        (["run", "--activations", "int4"], ["--activations", "float32, int8", "int4"]),
        (["run", "--max-model-len", "8q"], ["8k", "8q"]),
        (["run", "--max-model-len", "0"], ["--max-model-len", "'0'"]),
        (["run", "--threads", "0"], ["--threads"]),
        (["run", "--temperature", "hot"], ["--temperature"]),
        (["run", "--temperature", "999999"], ["temperature must be between 0.0 and 100.0"]),
        (["run", "--top-p", "-1"], ["top_p must be in (0, 1], got -1"]),
        (["run", "--max-tokens", "-1"], ["max_tokens must be a whole number, 0 or more, got -1"]),
        (["run", "--stop", ""], ["stop must not contain an empty string"]),
        (["run", "--json"], ["--json needs --prompt"]),
        (["run", "--raw"], ["--raw needs --prompt"]),
        (["run", "--prompt", "x", "--raw", "--system", "y"], ["--system"]),
        (["bench", "throughput", "--workloads", "z", "--repeats", "0"], ["--repeats"]),
        (["bench", "throughput", "--against", "nobody"], ["peers are transformers", "got 'nobody'"]),
        (["pull"], ["name"]),
    ],
)
def test_bad_usage_is_exit_2_and_one_sentence(args, words, capfd):
    code = exit_code(args)
    out, err = capfd.readouterr()
    refused(subprocess.CompletedProcess(args, code, out.encode(), err.encode()), 2, *words)


def test_bad_usage_ends_the_process_with_2():
    refused(octavo("fly"), 2, "fly")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full disk")
@pytest.mark.parametrize("command", [["models"], ["run", "--help"]], ids=" ".join)
def test_a_full_disk_under_stdout_is_exit_1_and_one_sentence(command):
    code = "from octavo.cli import main; main()"
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [sys.executable, "-c", code, *command], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert result.returncode == 1
    assert text(result.stderr) == "octavo: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_stream_is_no_traceback(closed):
    line = f'"{sys.executable}" -c "from octavo.cli import main; main()" models {closed}'
    result = subprocess.run(["sh", "-c", line], capture_output=True, check=False)
    assert result.returncode == 0
    assert text(result.stderr) == ""
    assert ("smollm2" in text(result.stdout)) == (closed != ">&-")


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


MODEL = "smollm2-135m-instruct"
#: One thread: on a busy machine two that wait for each other are many times slower.
SMALL = ("--temperature", "0", "--kv-cache-memory", "256MiB", "--max-model-len", "2k", "--threads", "1")


@pytest.fixture(scope="module")
def llm(smollm2_path):
    from octavo import LLM

    return LLM(MODEL, kv_cache_memory="256MiB", max_model_len=2048, num_threads=1)


@pytest.mark.real_model
class TestAnswers:
    """Many small questions to one loaded model: the commands run here, only the loading is done once."""

    @pytest.fixture
    def octavo_run(self, llm, monkeypatch, capsys):
        def call(*args: str, stdin: str = "") -> tuple[int, str, str]:
            monkeypatch.setattr("octavo.cli.run.load", lambda model, engine: llm)
            monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
            code = exit_code(["run", MODEL, "--temperature", "0", *args])
            out, err = capsys.readouterr()
            return code, out, err

        return call

    @pytest.fixture
    def ask(self, octavo_run):
        def call(*args: str) -> dict[str, Any]:
            code, out, err = octavo_run("--json", *args)
            assert (code, err) == (0, "")
            return json.loads(out)

        return call

    def test_raw_goes_on_without_the_template_and_stops_before_the_stop_text(self, ask):
        answer = ask("--raw", "--prompt", "1, 2, 3, 4, 5,", "--stop", "8", "--max-tokens", "16")
        assert answer["text"].strip().startswith("6, 7")
        assert "8" not in answer["text"]
        assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "8")

    def test_the_plain_text_is_that_of_the_json_and_stdin_is_a_prompt_too(self, ask, octavo_run):
        asked = ("--max-tokens", "8", "--system", "You are brief.")
        want = ask("--prompt", "Say hello.", *asked)["text"]
        assert octavo_run("--prompt", "-", *asked, stdin="Say hello.") == (0, want + "\n", "")

    def test_a_seed_repeats_and_the_prompt_is_cached(self, ask):
        asked = ("--prompt", "Tell a story.", "--temperature", "1", "--max-tokens", "6", "--seed")
        first, again, other = ask(*asked, "7"), ask(*asked, "7"), ask(*asked, "8")
        assert first["token_ids"] == again["token_ids"] != other["token_ids"]
        assert again["num_cached_tokens"] == again["num_prompt_tokens"] - 1

    @pytest.mark.parametrize(
        ("prompt", "words"),
        [("", ["empty"]), ("a\udcff", ["surrogate"]), ("word " * 3000, ["2048"])],
        ids=["empty", "not UTF-8", "too long"],
    )
    def test_a_prompt_that_cannot_be_served_is_one_sentence(self, octavo_run, prompt, words):
        code, out, err = octavo_run("--raw", "--prompt", prompt)
        assert (code, out) == (1, "")
        assert len(err.splitlines()) == 1
        assert all(word in err for word in words)


@pytest.mark.real_model
@pytest.mark.usefixtures("smollm2_path")
def test_one_json_object_says_everything():
    result = octavo("run", MODEL, *SMALL, "--json", "--prompt", "What is the capital of France?")
    assert result.returncode == 0, text(result.stderr)
    assert len(text(result.stdout).splitlines()) == 1
    answer = json.loads(result.stdout)
    assert "Paris" in answer["text"]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", None)
    assert answer["token_ids"]
    assert answer["num_cached_tokens"] == 0
    assert isinstance(answer["cache_miss_reason"], str)
    assert answer["attention"] == "fused"
    assert answer["isa"]
    assert (answer["weights"], answer["activations"]) == ("auto", "float32")
    timings = answer["timings"]
    assert 0 < timings["first_token_s"] <= timings["total_s"]
    assert timings["load_s"] > 0


@pytest.mark.real_model
@pytest.mark.usefixtures("smollm2_path")
def test_a_pipe_is_a_chat_that_outlives_bad_lines_and_a_full_context():
    turn = "Repeat these words to me: " + "whale " * 20
    lines = ["My name is Ada.", "/system", "What is my name?", "/fly", "/help", "/new"]
    lines += [turn] * 3 + ["whale " * 200, "Hello!", "/exit", "not sent"]
    args = ("--max-model-len", "128", "--max-tokens", "8", "--attention", "sdpa")
    result = octavo("run", MODEL, *SMALL, *args, stdin="\n".join(lines))
    out = text(result.stdout)
    assert result.returncode == 0, text(result.stderr)
    said = text(result.stderr)
    assert "cached" not in out  # a pipe carries the answers and nothing else
    assert "/" not in out
    assert len(out.splitlines()) >= 6
    summaries = [line for line in said.splitlines() if "prompt tokens cached" in line]
    assert len(summaries) == 6
    assert " 0 of " in summaries[0]
    assert " 0 of " not in summaries[1]  # the second turn reuses the first and its reply
    for words in ("No system prompt is set", "Unknown command /fly", "New conversation", "/system TEXT"):
        assert words in said
    assert re.search(r"The context is full: the oldest (turn was|\d turns were) dropped", said)
    assert "and the context holds 128: shorten it" in said


class Terminal:
    """``octavo`` in a terminal of its own: what it shows, read up to awaited words."""

    def __init__(self, *args: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # it may be ignored where the tests run
            command = [sys.executable, "-c", "from octavo.cli import main; main()", *args]
            os.execve(sys.executable, command, os.environ | {"TERM": "dumb"})
        self.unread = b""

    def type(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def await_words(self, words: bytes, press: bytes = b"") -> None:
        """``press`` is typed now and again each second, as an impatient user does."""
        deadline = time.monotonic() + 60.0
        while words not in self.unread:
            assert time.monotonic() < deadline, f"waited for {words!r}, saw {self.unread[-2000:]!r}"
            if press:
                self.type(press)
            if select.select([self.fd], [], [], 1.0)[0]:
                self.unread += os.read(self.fd, 4096)
        self.unread = self.unread.partition(words)[2]

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.real_model
@pytest.mark.usefixtures("smollm2_path")
def test_in_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves():
    terminal = Terminal("run", MODEL, *SMALL)
    try:
        terminal.await_words(b"> ")
        terminal.type(b"Write a very long story about a whale and a boy.\n")
        terminal.await_words(b"boy.\r\n")
        terminal.await_words(b" ")  # the answer has begun
        terminal.type(b"\x03")
        terminal.await_words(b"stopped")
        terminal.await_words(b"> ")
        # A signal between the prompt's appearance and the wait for a key is seen at the next key only.
        terminal.await_words(b"Ctrl-D leaves", press=b"\x03")
        terminal.await_words(b"> ")
        terminal.type(b"\x04")
        assert terminal.exit_code() == 0
    except BaseException:
        os.kill(terminal.pid, signal.SIGKILL)
        raise
    finally:
        os.close(terminal.fd)


@pytest.mark.real_model
@pytest.mark.usefixtures("smollm2_path")
def test_ctrl_c_in_a_one_shot_answer_is_exit_130():
    code = "from octavo.cli import main; main()"
    args = ["run", MODEL, *SMALL, "--max-tokens", "1500", "--raw", "--prompt", "One, two, three, four,"]
    child = subprocess.Popen(
        [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    assert child.stdout is not None
    child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.usefixtures("smollm2_path")
def test_the_throughput_bench_compares_the_same_requests(tmp_path):
    args = (
        "--workloads",
        "c",
        "--scale",
        "16",
        "--repeats",
        "2",
        "--peer-repeats",
        "1",
        "--ours",
        "octavo-fp32",
        "--against",
        "transformers,vllm",
        "--peers-dir",
        str(tmp_path / "peers"),
        "--threads",
        "1",
    )
    book = tmp_path / "book.txt"
    book.write_text("It was the best of times, it was the worst of times. " * 1500)
    result = octavo("bench", "throughput", *args, "--text", str(book), "--out", str(tmp_path / "results"))
    assert result.returncode == 0, text(result.stderr)
    assert "c: 32 requests" in text(result.stdout)
    report = json.loads((tmp_path / "results" / "throughput.json").read_text())
    assert (tmp_path / "results" / "throughput.png").stat().st_size > 10_000
    assert str(tmp_path) not in json.dumps(report)
    workload = report["workloads"]["c"]
    ours, theirs = workload["engines"]["octavo-fp32"], workload["engines"]["transformers-fp32"]
    assert (ours["repeats"], theirs["repeats"]) == (2, 1)
    # Two requests that share 64 tokens and end with 2 of their own; the cache is cold in each repeat.
    assert 60 <= ours["notes"]["num_cached_tokens"] <= 66
    assert ours["peak_bytes"] > 500e6
    assert theirs["tokens"]["chats_equal"] == 2
    assert list(report["missing"]) == ["vllm-fp32"]
    assert "not installed" in text(result.stdout)
