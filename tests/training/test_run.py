"""A whole run: killed, it goes on to the same weights; what it writes is a model like any other."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_encoder
import torch
from safetensors.torch import load_file

from octavo.cli.app import exit_code
from octavo.cli.train import KINDS
from octavo.llm import LLM
from octavo.training import run as run_module
from octavo.training import state
from octavo.training.data import LabelledData, read_data
from octavo.training.run import train
from octavo.training.settings import ATTENTION, AttentionChoice, TrainSettings

CHOICES = {
    "mha": AttentionChoice(),
    "linformer": AttentionChoice(kind="linformer", projected_len=6),
    "c2psa": AttentionChoice(kind="c2psa", compress_rate=2, topk=3),
}
each = pytest.mark.parametrize("name", list(CHOICES))
# 64 rows: 8 steps an epoch, 16 in all.
TOLD = TrainSettings(epochs=2, batch_size=8, lr=1e-3, dropout=0.2, save_every=3)


def quiet(line: str) -> None:
    pass


def go(
    model: Path,
    out: Path | None,
    name: str = "mha",
    told: TrainSettings = TOLD,
    data: LabelledData | None = None,
    say: Any = quiet,
) -> dict[str, Any]:
    data = tiny_encoder.labelled() if data is None else data
    return train(model, data, out, told, CHOICES[name], say=say, progress=False)


class Killed(BaseException):
    """Not an Exception: nothing may catch it on the way."""


def kill_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    steps = run_module.Trainer.steps

    def until(self: Any, first: int) -> Any:
        for number, loss in steps(self, first):
            if number == step:
                raise Killed  # the step is done and not saved
            yield number, loss

    monkeypatch.setattr(run_module.Trainer, "steps", until)


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        *(("mha", stops) for stops in ([2], [4], [8], [9], [3, 9, 14])),
        ("linformer", [13]),
        ("c2psa", [7]),
        ("c2psa", [5, 16]),
    ],
)
def test_a_killed_run_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stops: list[int]
) -> None:
    """Killed before the first save, behind one, at an epoch's end, behind it, in the second, and thrice."""
    model = tiny_encoder.write_encoder(tmp_path / "model")
    want_report = go(model, tmp_path / "whole", name)
    for step in stops:
        with monkeypatch.context() as patch:
            kill_after(patch, step)
            with pytest.raises(Killed):
                go(model, tmp_path / "stopped", name)
    lines: list[str] = []
    report = go(model, tmp_path / "stopped", name, say=lines.append)
    saved = max((step for step in (3, 6, 8, 9, 12, 15) if step < stops[-1]), default=0)
    assert (f"going on after step {saved} of 16" in lines) == (saved > 0)
    assert report == want_report
    whole, stopped = (load_file(tmp_path / at / "model.safetensors") for at in ("whole", "stopped"))
    assert whole.keys() == stopped.keys()
    assert all(torch.equal(whole[key], stopped[key]) for key in whole)
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == sorted(
        path.name for path in (tmp_path / "stopped").iterdir()
    )


def test_a_process_that_is_killed_outright(tmp_path: Path) -> None:
    """SIGKILL, wherever it falls; also in the middle of a save."""
    model = tiny_encoder.write_encoder(tmp_path / "model")
    rows = tmp_path / "rows.tsv"
    lines = [f"{example.label}\t{example.text}" for example in tiny_encoder.examples(64)]
    rows.write_text("\n".join(["label\ttext", *lines]) + "\n")
    out, whole = tmp_path / "out", tmp_path / "whole"
    words = ["train", str(model), "--data", str(rows), "--batch-size", "8", "--epochs", "99"]
    words += ["--max-steps", "60", "--save-every", "1", "--threads", "1", "--out", str(out)]
    command = [sys.executable, "-c", "from octavo.cli import main; main()", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (out / state.FILE).exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    step = state.read_progress(out)["step"]
    assert 1 <= step < 60
    told = TrainSettings(batch_size=8, epochs=99, max_steps=60)
    lines: list[str] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for folder in (out, whole):
            train(model, read_data(rows), folder, told, AttentionChoice(), say=lines.append, progress=False)
    finally:
        torch.set_num_threads(threads)
    assert f"going on after step {step} of 60" in lines
    stopped, full = (load_file(folder / "model.safetensors") for folder in (out, whole))
    assert all(torch.equal(stopped[key], full[key]) for key in full)


@each
@pytest.mark.parametrize("family", list(tiny_encoder.CONFIGS))
def test_llm_loads_what_was_written_and_says_the_same(tmp_path: Path, name: str, family: str) -> None:
    model = tiny_encoder.write_encoder(tmp_path / "model", family)
    data = tiny_encoder.labelled(pairs=family == "bert")
    report = go(model, tmp_path / "out", name, data=data)
    llm = LLM(tmp_path / "out", num_threads=1)
    held_out = data.evaluation["held out"]
    outputs = llm.classify([example.text for example in held_out])
    right = [output.label == example.label for output, example in zip(outputs, held_out, strict=True)]
    assert report["measured"][-1]["held out"]["accuracy"] == pytest.approx(sum(right) / len(right))
    assert list(outputs[0].scores) == ["down", "up"]
    assert json.loads((tmp_path / "out" / "training.json").read_text()) == report
    assert not (tmp_path / "out" / state.FILE).exists()
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
    kinds = {"mha": "MultiHeadAttention", "linformer": "LinformerAttention", "c2psa": "C2PSA"}
    assert type(llm.encoder.encoder.layers[0].attention).__name__ == kinds[name]


def test_a_written_model_trains_on(tmp_path: Path) -> None:
    """Also one of C2PSA, which stays what it is."""
    model = tiny_encoder.write_encoder(tmp_path / "model")
    go(model, tmp_path / "first", "c2psa")
    train(
        tmp_path / "first", tiny_encoder.labelled(), tmp_path / "second", TOLD, AttentionChoice(), say=quiet
    )
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert config["c2psa"] == {"compress_rate": 2, "topk": 3}


@pytest.mark.parametrize("family", list(tiny_encoder.CONFIGS))
def test_transformers_reads_what_was_written(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny_encoder.write_encoder(tmp_path / "model", family)
    go(model, tmp_path / "out")
    theirs, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    llm = LLM(tmp_path / "out", num_threads=1)
    for example in tiny_encoder.examples(10, seed=5):
        ids = llm.encoder.tokenizer.encode(example.text, max_tokens=24, truncate=False).ids
        with torch.no_grad():
            want = theirs.eval()(input_ids=torch.tensor([ids])).logits[0].softmax(-1)
        (got,) = llm.classify([example.text])
        torch.testing.assert_close(torch.tensor(list(got.scores.values())), want, atol=1e-5, rtol=1e-5)


def test_a_regression(tmp_path: Path) -> None:
    examples = tuple(type(e)(e.text, 3.0 if e.label == "up" else -1.0) for e in tiny_encoder.examples(128))
    data = LabelledData("values", examples[:96], {"dev": examples[96:]}, ("score",), ("pearson", "spearman"))
    told = TrainSettings(epochs=20, batch_size=16, lr=3e-3)
    report = go(tiny_encoder.write_encoder(tmp_path / "model"), tmp_path / "out", told=told, data=data)
    assert report["measured"][-1]["dev"]["pearson"] > 0.8
    outputs = LLM(tmp_path / "out", num_threads=1).classify([e.text for e in data.evaluation["dev"]])
    found = torch.tensor([output.score for output in outputs])
    want = torch.tensor([float(e.label) for e in data.evaluation["dev"]])
    assert float(torch.corrcoef(torch.stack([found, want]))[0, 1]) == pytest.approx(
        report["measured"][-1]["dev"]["pearson"], abs=1e-4
    )


def test_folders_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_encoder.write_encoder(tmp_path / "model")
    with pytest.raises(ValueError, match="cannot be written into the folder of the one"):
        go(model, model)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file: --out must be a folder"):
        go(model, tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"is not empty \(notes.txt\)"):
        go(model, tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        kill_after(patch, 5)
        with pytest.raises(Killed):
            go(model, out)
    other = tiny_encoder.labelled(seed=3)
    for told, data, name, what in (
        (TrainSettings(epochs=3, batch_size=8, lr=1e-3, dropout=0.2), None, "mha", "epochs"),
        (TOLD, other, "mha", "data"),
        (TOLD, None, "c2psa", "kind"),
    ):
        with pytest.raises(ValueError, match=f"holds an interrupted run with another {what}"):
            go(model, out, name, told, data)
    damaged = tmp_path / "damaged"
    shutil.copytree(out, damaged)
    with (damaged / state.FILE).open("r+b") as file:
        file.write(b"\xff" * 16)
    with pytest.raises(ValueError, match=r"training.safetensors in damaged is damaged"):
        go(model, damaged)
    go(model, out)
    with pytest.raises(ValueError, match="holds a finished model"):
        go(model, out)


def test_texts_that_are_cut_are_counted(tmp_path: Path) -> None:
    lines: list[str] = []
    told = TrainSettings(epochs=1, batch_size=32, max_tokens=6)
    go(tiny_encoder.write_encoder(tmp_path / "model"), None, told=told, say=lines.append)
    long = sum(len(example.text.split()) >= 4 for example in tiny_encoder.labelled().train)
    assert f"train: {long} of 64 texts have 6 tokens or more; what is longer is cut there" in lines


def test_what_is_no_encoder_is_refused(tmp_path: Path) -> None:
    model = tiny_encoder.write_encoder(tmp_path / "model")
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "llama"}))
    with pytest.raises(ValueError, match="is no encoder of the families BERT, RoBERTa and DistilBERT"):
        go(model, None)


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(
        ValueError, match=r"needs scipy, which is not installed: pip install 'octavo\[train\]'"
    ):
        go(tmp_path, None)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_encoder.write_encoder(tmp_path / "model")
    rows = tmp_path / "rows.tsv"
    lines = [f"{example.label}\t{example.text}" for example in tiny_encoder.examples(40)]
    rows.write_text("\n".join(["label\ttext", *lines]) + "\n")
    words = ["train", str(model), "--data", str(rows), "--out", str(tmp_path / "out"), "--epochs", "1"]
    assert exit_code([*words, "--attention", "c2psa", "--topk", "4", "--threads", "1"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("held out: accuracy ")
    assert "C2PSA: 2 heads share one projection, 4 keys a query" in shown.err
    assert LLM(tmp_path / "out").classify("the cat")[0].label in ("up", "down")
    rows.write_text(rows.read_text() + "up\n")
    assert exit_code(words) == 1
    assert capsys.readouterr().err == "octavo: line 42 of rows.tsv has 1 columns and the header 2\n"
    assert exit_code([*words, "--attention", "flash"]) == 2
    assert (
        capsys.readouterr().err == "octavo: --attention must be one of mha, linformer, c2psa, got 'flash'\n"
    )


def test_the_help_names_every_setting(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert exit_code(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    for field in (*TrainSettings.__dataclass_fields__, *AttentionChoice.__dataclass_fields__):
        option = {"kind": "attention", "checkpoint_attention": "no-checkpoint"}.get(field, field)
        assert f"--{option.replace('_', '-')}" in shown


def test_the_words_of_the_command_line_are_those_of_the_settings() -> None:
    assert KINDS == ATTENTION
