"""Labelled texts from a TSV file or a folder in GLUE's own format. A bad row ends the reading."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.tokenizer.encoder import Text
from octavo.training.glue import GLUE_TASKS, GlueTask, Layout

#: The only label of a regression.
VALUE = "score"


@dataclass(frozen=True, slots=True)
class Example:
    """A text or a pair; ``label`` is a class's name, or a number where the task is a regression."""

    text: Text
    label: str | float


@dataclass(frozen=True, slots=True)
class LabelledData:
    """Examples to train on, and sets to measure on by name.

    ``labels`` are the classes, in the order of the head's outputs; VALUE as the only one is a regression.
    ``metrics`` are names of ``octavo.training.metrics``; a progress bar shows the first. ``digest`` changes
    with every change of an example.
    """

    name: str
    train: tuple[Example, ...]
    evaluation: dict[str, tuple[Example, ...]]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]

    @property
    def regression(self) -> bool:
        return self.labels == (VALUE,)

    def digest(self) -> str:
        state = hashlib.sha256(repr((self.labels, self.metrics)).encode())
        for name, examples in (("", self.train), *self.evaluation.items()):
            state.update(repr((name, len(examples))).encode())
            for example in examples:
                state.update(repr(example).encode("utf-8", "surrogatepass"))
        return state.hexdigest()


def read_data(
    path: Path, *, held_out: float = 0.1, seed: int = 0, regression: bool = False, task: str | None = None
) -> LabelledData:
    """A TSV file, of which a random share is held out to measure on, or a folder of a GLUE task.

    A TSV file has a header with ``label``, ``text`` and, for pairs, ``text2``; nothing is quoted. A folder's
    task is ``task`` or its own name. Raises ValueError for what is neither, and for the first bad row.
    """
    if path.is_dir():
        name = path.name if task is None else task
        known = {known.lower(): known for known in GLUE_TASKS}
        if name.lower() not in known:
            raise ValueError(
                f"{path.name} is a folder and its name is no GLUE task ({', '.join(GLUE_TASKS)}): "
                "give its task with --task"
            )
        return _read_glue(path, GLUE_TASKS[known[name.lower()]])
    if task is not None:
        raise ValueError(f"a GLUE task is a folder in GLUE's format, and {path.name} is none")
    if not path.exists():
        raise ValueError(f"there is no file or folder {path}")
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"the share that is held out must be more than 0 and less than 1, got {held_out}")
    return split(read_tsv(path, regression=regression), path.stem, held_out, seed)


def read_tsv(path: Path, *, regression: bool = False) -> tuple[Example, ...]:
    """Every row of a TSV file with the columns ``label``, ``text`` and maybe ``text2``, in any order."""
    lines = _lines(path)
    header = _header(path, lines)
    for column in ("label", "text"):
        if column not in header:
            raise ValueError(f"{path.name} needs a column {column!r}, its header has {', '.join(header)}")
    layout = Layout(texts=("text", "text2") if "text2" in header else ("text",), label="label", labels=None)
    examples = tuple(_rows(path, lines, header, layout, _number if regression else _class))
    if not examples:
        raise ValueError(f"{path.name} has a header and no rows")
    return examples


def split(examples: tuple[Example, ...], name: str, held_out: float, seed: int) -> LabelledData:
    """A random share held out. Raises ValueError where either part is empty or a part lacks a class."""
    order = list(range(len(examples)))
    random.Random(seed).shuffle(order)
    count = round(len(examples) * held_out)
    if not 0 < count < len(examples):
        raise ValueError(
            f"{len(examples)} rows are too few to hold out a share of {held_out}: each side needs one"
        )
    train = tuple(examples[i] for i in order[count:])
    kept = tuple(examples[i] for i in order[:count])
    if isinstance(examples[0].label, float):
        return LabelledData(name, train, {"held out": kept}, (VALUE,), ("pearson", "spearman"))
    labels = tuple(sorted({str(example.label) for example in train}))
    if unseen := sorted({str(example.label) for example in kept} - set(labels)):
        raise ValueError(
            f"the label {unseen[0]!r:.100} stands in held-out rows only: add rows, or another seed"
        )
    if len(labels) < 2:
        raise ValueError(f"a classifier needs two labels at least, {name} has only {labels[0]!r:.100}")
    return LabelledData(name, train, {"held out": kept}, labels, ("accuracy", "f1_macro"))


def _read_glue(folder: Path, task: GlueTask) -> LabelledData:
    convert = _number if task.labels == (VALUE,) else _class
    train = _read_split(folder / "train.tsv", task, convert)
    evaluation = {name: _read_split(folder / file, task, convert) for name, file in task.evaluation.items()}
    return LabelledData(task.name, train, evaluation, task.labels, task.metrics)


def _read_split(path: Path, task: GlueTask, convert: Callable[[str], str | float]) -> tuple[Example, ...]:
    if not path.is_file():
        raise ValueError(f"{task.name} needs {path.name} in {path.parent.name}, and it is not there")
    lines = _lines(path)
    header = task.columns if task.columns is not None else _header(path, lines)
    for column in (*task.layout.texts, task.layout.label):
        if column not in header:
            raise ValueError(
                f"{path.name} of {task.name} needs a column {column!r}, "
                f"its header has {', '.join(header)[:200]}"
            )
    examples = tuple(_rows(path, lines, header, task.layout, convert))
    if not examples:
        raise ValueError(f"{path.name} of {path.parent.name} has no rows")
    return examples


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, line), from 1; a line ends at "\\n" alone, so that no odd character inside a text ends it."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            number = 0
            try:
                for number, line in enumerate(file, 1):
                    yield number, line.rstrip("\r\n")
            except UnicodeDecodeError:
                raise ValueError(f"{path.name} is not UTF-8 after line {number}") from None
    except OSError as error:
        raise ValueError(f"cannot read {path.name}: {error.strerror}") from None


def _header(path: Path, lines: Iterator[tuple[int, str]]) -> tuple[str, ...]:
    first = next(lines, None)
    if first is None:
        raise ValueError(f"{path.name} is empty: a header with the columns label and text is needed")
    columns = tuple(name.strip() for name in first[1].split("\t"))
    if len(set(columns)) != len(columns):
        raise ValueError(f"the header of {path.name} names a column twice: {', '.join(columns)[:200]}")
    return columns


def _rows(
    path: Path,
    lines: Iterable[tuple[int, str]],
    header: tuple[str, ...],
    layout: Layout,
    convert: Callable[[str], str | float],
) -> Iterator[Example]:
    texts = [header.index(column) for column in layout.texts]
    label_at = header.index(layout.label)
    for number, line in lines:
        where = f"line {number} of {path.name}"
        fields = line.split("\t")
        if len(fields) != len(header):
            raise ValueError(f"{where} has {len(fields)} columns and the header {len(header)}")
        words = [fields[i].strip() for i in texts]
        if not all(words):
            raise ValueError(f"{where} has an empty {layout.texts[words.index('')]}")
        try:
            label = convert(fields[label_at].strip())
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if layout.labels is not None and label not in layout.labels:
            raise ValueError(f"{where} has the label {label!r:.100}, allowed are {', '.join(layout.labels)}")
        yield Example(words[0] if len(words) == 1 else (words[0], words[1]), label)


def _class(text: str) -> str:
    if not text:
        raise ValueError("the label is empty")
    return text


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"a regression needs a number as its label, got {text!r:.100}")
    return value
