"""``octavo serve`` as a process: settings, start, signals, exit codes; and OpenAI's own client."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tiny_checkpoint import write_tiny_model

from octavo.cli.app import exit_code
from octavo.cli.serve_settings import SETTINGS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk, with a long context."""
    path = tmp_path_factory.mktemp("models") / "tiny-model"
    write_tiny_model(path)
    return path


def command(*args: str) -> list[str]:
    return [sys.executable, "-c", "from octavo.cli import main; main()", "serve", *args]


ENV = os.environ | {"NO_COLOR": "1", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=180, env=ENV, check=False)


@pytest.fixture
def here(capsys, monkeypatch) -> Callable[..., subprocess.CompletedProcess[str]]:
    """As :func:`run`, in this process, which is quicker: for what ends before anything is set up."""

    def run_here(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        code = exit_code(["serve", *args])
        return subprocess.CompletedProcess(args, code, *capsys.readouterr())

    return run_here


class Process:
    def __init__(self, *args: str, **env: str) -> None:
        self._process = subprocess.Popen(
            command("--port", "0", "--threads", "1", "--kv-cache-memory", "8MiB", *args),
            stderr=subprocess.PIPE,
            text=True,
            env=ENV | env,
        )
        self.lines: list[str] = []
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)
            found = re.search(r"listening on (http://[\w.:]+)", line)
            if found:
                self.url = found[1]
                break
        else:
            raise AssertionError("".join(self.lines))
        self.http = httpx.Client(base_url=self.url, timeout=30)
        while True:
            with contextlib.suppress(httpx.ConnectError):
                if self.http.get("/ready").status_code == 200:
                    return
            time.sleep(0.02)

    def send(self, sig: signal.Signals) -> None:
        self._process.send_signal(sig)

    def wait(self) -> int:
        assert self._process.stderr is not None
        self.lines += self._process.stderr.readlines()
        return self._process.wait(20)

    def close(self) -> None:
        self.http.close()
        if self._process.poll() is None:
            self._process.kill()
            self.wait()


@pytest.fixture(scope="module")
def process(folder) -> Iterator[Process]:
    running = Process(str(folder), "--log-format", "json", "--api-key", "k1")
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=process.url + "/v1", api_key="k1", max_retries=0) as made:
        yield made


# ---- OpenAI's client


def test_openai_models(client):
    assert [model.id for model in client.models.list()] == ["tiny-model"]


def test_openai_chat_and_stream(client):
    ask = {
        "model": "tiny-model",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 12,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**ask)
    assert whole.usage.completion_tokens == 12
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_openai_completions_with_echo_and_logprobs(client):
    answer = client.completions.create(
        model="tiny-model", prompt="abc", max_tokens=2, echo=True, logprobs=1, temperature=0
    )
    assert len(answer.choices[0].logprobs.tokens) == 3 + answer.usage.completion_tokens


def test_openai_errors_are_their_own_kinds(client, process):
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="gpt-9", messages=messages)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny-model", messages=messages, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.completions.create(model="tiny-model", prompt="x" * 8193)
    with (
        openai.OpenAI(base_url=process.url + "/v1", api_key="no", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).chat.completions.create(
            model="tiny-model", messages=messages, max_tokens=4000, extra_body={"ignore_eos": True}
        )


def test_openai_hang_up_frees_the_request(client, process):
    stream = client.chat.completions.create(
        model="tiny-model",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    headers = {"Authorization": "Bearer k1"}
    end = time.monotonic() + 10
    while process.http.get("/v1/cache", headers=headers).json()["blocks"]["used"]:
        assert time.monotonic() < end


def test_the_example_of_the_documents_runs(process, capsys):
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    changes = {
        "http://127.0.0.1:8000": process.url,
        '"none"': '"k1"',
        "smollm2-135m-instruct": "tiny-model",
    }
    for documented, here in changes.items():
        assert example.count(documented) == 1
        example = example.replace(documented, here)
    names: dict[str, Any] = {}
    exec(example, names)
    answer = names["answer"]
    assert json.loads(answer.choices[0].message.content).keys() == {"name", "toothed"}
    assert answer.usage.prompt_tokens_details.cached_tokens == 0  # under a salt of its own
    assert capsys.readouterr().out.endswith(f"{answer.choices[0].message.content} 0\n")


# ---- life


def test_start_says_what_is_served_in_a_few_lines(process):
    lines = [json.loads(line)["event"] for line in process.lines]
    assert len(lines) == 3, lines
    assert lines[0].startswith("tiny-model loaded in")
    assert re.search(r"\d+ KV blocks of 16 tokens: \d+ tokens at once", lines[1])
    assert str(process.url) in lines[2]


def test_h09_no_line_of_the_log_tells_what_was_asked(folder):
    """Whatever becomes of the call, at the most talkative level."""
    process = Process(str(folder), "--log-level", "debug", "--max-model-len", "512")
    secret = "xyzzyplugh"
    calls = [
        ("/v1/completions", {"prompt": secret, "max_tokens": 2}, 200),
        ("/v1/completions", {"prompt": secret, "max_tokens": 2, "echo": True, "logprobs": 1}, 200),
        ("/v1/completions", {"prompt": secret, "stop": secret, "max_tokens": 2, "user": secret}, 200),
        ("/v1/completions", {"prompt": secret * 60}, 400),
        ("/v1/completions", {"prompt": "x", secret: 1}, 400),
        ("/v1/completions", {"prompt": "x", "temperature": secret}, 400),
        ("/v1/completions", {"prompt": "x", "model": secret}, 404),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": secret}], "max_tokens": 2}, 200),
        ("/v1/chat/completions", {"messages": [{"role": secret}]}, 400),
        ("/tokenize", {"prompt": secret}, 200),
        ("/detokenize", {"tokens": [secret]}, 400),
        ("/v1/embeddings", {"input": secret}, 501),
    ]
    for path, body, status in calls:
        assert process.http.post(path, json=body).status_code == status, (path, body)
    broken = b'{"prompt": "' + secret.encode() + b"\xff"
    headers = {"Content-Type": "application/json"}
    assert process.http.post("/v1/completions", content=broken, headers=headers).status_code == 400
    body = {"prompt": secret, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with process.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())  # and hang up
    process.send(signal.SIGTERM)
    assert process.wait() == 0
    said = "".join(process.lines)
    assert said.count("request") >= 5
    assert secret not in said


def test_h07_sigterm_drains_and_exits_0(folder):
    process = Process(str(folder), "--drain-timeout", "20")
    body = {"prompt": "x", "max_tokens": 600, "ignore_eos": True, "stream": True, "temperature": 0}
    with process.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        process.send(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert process.wait() == 0
    assert "Traceback" not in "".join(process.lines)


def test_two_interrupts_stop_at_once(folder):
    process = Process(str(folder), "--drain-timeout", "60")
    body = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    start = time.monotonic()
    with process.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        process.send(signal.SIGINT)
        time.sleep(0.2)
        process.send(signal.SIGINT)
        assert process.wait() == 1
    assert time.monotonic() - start < 30  # of the 60 that draining may take
    assert "Traceback" not in "".join(process.lines)


# ---- settings


def refused(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert result.returncode == code, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr


def test_command_line_before_environment_before_file_before_default(here, tmp_path):
    path = tmp_path / "octavo.toml"
    path.write_text('port = 1\nmax-queue = 2\nmax_num_seqs = 3\nhost = "0.0.0.0"\napi_key = ["hidden"]\n')
    env = {"OCTAVO_PORT": "4", "OCTAVO_MAX_QUEUE": "5"}
    result = here("--config", str(path), "--print-config", "--port", "6", "--max-body", "1MiB", **env)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "port = 6  # command line" in lines
    assert "max_body = 1048576  # command line" in lines
    assert "max_queue = 5  # environment" in lines
    assert "max_num_seqs = 3  # config file" in lines
    assert 'host = "0.0.0.0"  # config file' in lines
    assert "block_size = 16  # default" in lines
    assert "hidden" not in result.stdout


@pytest.mark.parametrize(
    "given",
    [
        [],
        [
            "x",
            "--max-model-len",
            "8k",
            "--attn-topk",
            "auto",
            "--dense-layers",
            "0,1",
            "--kv-cache-memory=1GiB",
        ],
        [
            "--no-prefix-caching",
            "--served-model-name=a",
            "--served-model-name=b",
            "--seed=3",
            "--attn-topk-tail",
        ],
    ],
)
def test_what_print_config_shows_is_a_file_that_says_the_same(here, tmp_path, given):
    shown = here(*given, "--print-config").stdout.splitlines()
    path = tmp_path / "octavo.toml"
    path.write_text("\n".join(shown))
    again = here("--config", str(path), "--print-config")
    assert again.returncode == 0, again.stderr
    values, origins = zip(*(line.rsplit("  # ", 1) for line in again.stdout.splitlines()), strict=True)
    assert list(values) == [line.rsplit("  # ", 1)[0] for line in shown]
    assert set(origins) == {"config file", "default"}
    assert all(
        (origin == "default") == ("is not set" in value)
        for value, origin in zip(values, origins, strict=True)
    )


def test_help_has_every_setting_in_its_group(here):
    text = here("--help", COLUMNS="120").stdout
    groups = [line.split()[1] for line in text.splitlines() if line.startswith("╭─")]
    assert groups[2:] == [
        "Configuration",
        "Server",
        "Limits",
        "Model",
        "KV",
        "Compact",
        "Prefix",
        "Scheduling",
        "Top-k",
        "Logging",
    ]
    for setting in SETTINGS:
        assert f"--{setting.name.replace('_', '-')} " in text
        assert setting.variable in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", ["'prot' is not a setting", "port"]),
        ("port = ", ["not valid TOML"]),
        ('port = "many"', ["--port", "integer"]),
        ("port = 70000", ["65535"]),
        ('kv_dtype = "int1"', ["float32", "int1"]),
        ("[server]\nport = 1", ["'server' is not a setting"]),
        ("max_queue = -1", ["0 or more"]),
    ],
)
def test_a_bad_file_gets_one_sentence(here, tmp_path, text, words):
    path = tmp_path / "octavo.toml"
    path.write_text(text)
    refused(here("--config", str(path)), 2, *words)


def test_other_bad_settings_get_one_sentence(here, tmp_path):
    refused(here("--config", str(tmp_path / "none.toml")), 2, "none.toml")
    refused(here("--max-body", "much"), 2, "a size")
    refused(here("--api-key", ""), 2, "empty")
    refused(run("no-such-model", "--port", "0"), 1, "no-such-model")


def test_an_address_that_is_taken_is_refused_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(run("--port", str(port)), 1, f"cannot listen on 127.0.0.1:{port}")
