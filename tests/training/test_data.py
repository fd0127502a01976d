"""Labelled texts from files: what is written is what is read, and a bad row is named by its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.training.data import Example, read_data, read_tsv, split
from octavo.training.glue import GLUE_TASKS

TEXT = st.text(
    st.characters(exclude_characters="\t\n\r", exclude_categories=("Cs",)), min_size=1, max_size=30
).filter(lambda text: text.strip())
ROWS = st.lists(st.tuples(st.sampled_from(["0", "1", "so so"]), TEXT, TEXT), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(ROWS, st.booleans(), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_what_is_written_is_read(tmp_path_factory, rows, pairs, end, mark):
    """Quotes, commas, odd line ends and odd spaces inside a text are text."""
    file = tmp_path_factory.mktemp("tsv") / "rows.tsv"
    columns = ["text", "label", "text2"] if pairs else ["text", "label"]
    lines = ["\t".join(columns)]
    lines += ["\t".join([a, label, b] if pairs else [a, label]) for label, a, b in rows]
    file.write_bytes((("\ufeff" if mark else "") + end.join(lines) + end).encode())
    want = [Example((a.strip(), b.strip()) if pairs else a.strip(), label) for label, a, b in rows]
    assert list(read_tsv(file)) == want


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "rows.tsv is empty"),
        ("label\ttext\n", "has a header and no rows"),
        ("label\twords\n1\ta\n", "needs a column 'text', its header has label, words"),
        ("label\ttext\ttext\n", "names a column twice"),
        ("label\ttext\n1\tgood\n0\n", "line 3 of rows.tsv has 1 columns and the header 2"),
        ("label\ttext\n1\tgood\n0\tbad\tworse\n", "line 3 of rows.tsv has 3 columns and the header 2"),
        ("label\ttext\n1\tgood\n\tbad\n", "line 3 of rows.tsv: the label is empty"),
        ("label\ttext\n1\tgood\n0\t  \n", "line 3 of rows.tsv has an empty text"),
        ("label\ttext\n1\tgood\n\n0\tbad\n", "line 3 of rows.tsv has 1 columns"),
        (b"label\ttext\n1\tgood\n0\tb\xffd\n", "rows.tsv is not UTF-8"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, content: str | bytes, reason: str) -> None:
    file = tmp_path / "rows.tsv"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=reason) as error:
        read_tsv(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("label", ["good", "nan", "inf", ""])
def test_a_regression_needs_numbers(tmp_path: Path, label: str) -> None:
    file = tmp_path / "rows.tsv"
    file.write_text(f"label\ttext\n1.5\ta\n{label}\tb\n")
    with pytest.raises(ValueError, match=r"line 3 of rows.tsv: a regression needs a number"):
        read_tsv(file, regression=True)
    file.write_text("label\ttext\n1.5\ta\n-2\tb\n")
    data = read_data(file, held_out=0.5, regression=True)
    assert data.regression
    assert sorted(example.label for example in (*data.train, *data.evaluation["held out"])) == [-2.0, 1.5]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(1, 40), st.integers(0, 5))
def test_a_split_takes_every_row_once(held_out, more, seed):
    # Of each label more rows than are held out, so that no label can be missing.
    rows = tuple(Example(f"text {i}", str(i % 2)) for i in range(2 * (held_out + more)))
    share = held_out / len(rows)
    data = split(rows, "rows", share, seed)
    both = (*data.train, *data.evaluation["held out"])
    assert sorted(both, key=repr) == sorted(rows, key=repr)
    assert len(data.evaluation["held out"]) == held_out
    assert data.labels == ("0", "1")
    assert split(rows, "rows", share, seed).digest() == data.digest()


def test_the_digest_changes_with_every_example():
    rows = [Example(f"text {i}", str(i % 2)) for i in range(20)]
    digests = {split(tuple(rows), "rows", 0.2, seed).digest() for seed in range(3)}
    rows[3] = Example("text 3", "0")
    assert len(digests | {split(tuple(rows), "rows", 0.2, 0).digest()}) == 4


@pytest.mark.parametrize(
    ("labels", "reason"),
    [(["1"] * 10, "needs two labels at least"), (["0", "1"], "too few|two labels at least")],
)
def test_too_few_rows_or_labels(labels, reason):
    with pytest.raises(ValueError, match=reason):
        split(tuple(Example("text", label) for label in labels), "rows", 0.1, 0)


# The headers of GLUE's own files, and a row of each.
GLUE = {
    "CoLA": (None, ["gj04", "1", "", "A sentence."], "A sentence.", "1"),
    "SST-2": ("sentence\tlabel", ["a fine film", "1"], "a fine film", "1"),
    "MRPC": (
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        ["0", "7", "8", "One.", "Two."],
        ("One.", "Two."),
        "0",
    ),
    "STS-B": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        ["0", "news", "MSR", "2012", "1", "none", "none", "One.", "Two.", "3.800"],
        ("One.", "Two."),
        3.8,
    ),
    "QQP": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        ["1", "2", "3", 'What is "x"?', "What?", "1"],
        ('What is "x"?', "What?"),
        "1",
    ),
    "MNLI": (
        "index\tpromptID\tpairID\tgenre\tsentence1\tsentence2\tlabel1\tgold_label",
        ["0", "1", "1n", "fiction", "One.", "Two.", "neutral", "neutral"],
        ("One.", "Two."),
        "neutral",
    ),
    "QNLI": (
        "index\tquestion\tsentence\tlabel",
        ["0", "Why?", "So.", "entailment"],
        ("Why?", "So."),
        "entailment",
    ),
    "RTE": (
        "index\tsentence1\tsentence2\tlabel",
        ["0", "One.", "Two.", "not_entailment"],
        ("One.", "Two."),
        "not_entailment",
    ),
}


def write_glue(folder: Path, task: str, row: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    header = GLUE[task][0]
    for name in ("train.tsv", *GLUE_TASKS[task].evaluation.values()):
        lines = ["\t".join(row)] if header is None else [header, "\t".join(row)]
        (folder / name).write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("task", list(GLUE_TASKS))
def test_a_glue_folder(tmp_path: Path, task: str) -> None:
    _, row, text, label = GLUE[task]
    write_glue(tmp_path / task, task, row)
    data = read_data(tmp_path / task)
    assert data.train == (Example(text, label),)
    assert all(rows == data.train for rows in data.evaluation.values())
    assert data.regression == (task == "STS-B")
    assert data.regression or label in data.labels
    # Another name, and the task is asked for; told, it is the same.
    (tmp_path / task).rename(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"is no GLUE task .*--task"):
        read_data(tmp_path / "mine")
    assert read_data(tmp_path / "mine", task=task.lower()) == data


@pytest.mark.parametrize("task", list(GLUE_TASKS))
def test_a_wrong_row_of_a_glue_file(tmp_path: Path, task: str) -> None:
    header, row, _, label = GLUE[task]
    line = 1 if header is None else 2
    write_glue(
        tmp_path / task, task, ["hidden" if cell == str(label) or cell == "3.800" else cell for cell in row]
    )
    with pytest.raises(ValueError, match=f"line {line} of train.tsv"):
        read_data(tmp_path / task)
    write_glue(tmp_path / task, task, row[:-1])
    with pytest.raises(ValueError, match=f"line {line} of train.tsv has {len(row) - 1} columns"):
        read_data(tmp_path / task)
    (tmp_path / task / "train.tsv").unlink()
    with pytest.raises(ValueError, match=f"{task} needs train.tsv in {task}"):
        read_data(tmp_path / task)


def test_metrics_are_glues_own():
    """arXiv 1804.07461, table 1."""
    assert {name: task.metrics for name, task in GLUE_TASKS.items()} == {
        "CoLA": ("matthews",),
        "SST-2": ("accuracy",),
        "MRPC": ("accuracy", "f1"),
        "STS-B": ("pearson", "spearman"),
        "QQP": ("accuracy", "f1"),
        "MNLI": ("accuracy",),
        "QNLI": ("accuracy",),
        "RTE": ("accuracy",),
    }
