"""The tasks of GLUE (arXiv 1804.07461): their files' columns, their classes and their official metrics."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Layout:
    """Which columns hold the texts and the label; ``labels`` are the allowed ones, None = any."""

    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class GlueTask:
    """``columns`` are named where the files have no header. ``evaluation``: name -> file.

    ``labels`` are in the order of the head's outputs.
    """

    name: str
    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    columns: tuple[str, ...] | None = None
    evaluation: dict[str, str] = field(default_factory=lambda: {"dev": "dev.tsv"})

    @property
    def layout(self) -> Layout:
        return Layout(self.texts, self.label, None if self.labels == ("score",) else self.labels)


_ENTAILS = ("entailment", "not_entailment")
_ROWS = (
    GlueTask(
        "CoLA",
        ("sentence",),
        "label",
        ("0", "1"),
        ("matthews",),
        columns=("source", "label", "mark", "sentence"),
    ),
    GlueTask("SST-2", ("sentence",), "label", ("0", "1"), ("accuracy",)),
    GlueTask("MRPC", ("#1 String", "#2 String"), "Quality", ("0", "1"), ("accuracy", "f1")),
    GlueTask("STS-B", ("sentence1", "sentence2"), "score", ("score",), ("pearson", "spearman")),
    GlueTask("QQP", ("question1", "question2"), "is_duplicate", ("0", "1"), ("accuracy", "f1")),
    GlueTask(
        "MNLI",
        ("sentence1", "sentence2"),
        "gold_label",
        ("contradiction", "entailment", "neutral"),
        ("accuracy",),
        evaluation={"matched": "dev_matched.tsv", "mismatched": "dev_mismatched.tsv"},
    ),
    GlueTask("QNLI", ("question", "sentence"), "label", _ENTAILS, ("accuracy",)),
    GlueTask("RTE", ("sentence1", "sentence2"), "label", _ENTAILS, ("accuracy",)),
)
GLUE_TASKS = {row.name: row for row in _ROWS}
