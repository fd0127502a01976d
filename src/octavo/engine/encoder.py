"""The encoder engine: texts to embeddings or classes, packed into batches without padding."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from octavo.encoder_config import MODEL_TYPES, EncoderConfig, SentenceFiles
from octavo.models.encoder import Encoder, EncoderBatch, canonical
from octavo.tokenizer.encoder import Encoded, EncoderTokenizer, Text
from octavo.weights.hf import read_json
from octavo.weights.load import Checkpoint, load_model

#: Tokens of one forward pass, unless one text alone is longer.
BATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """``scores`` by label: probabilities, or the value itself where the head has a single output."""

    label: str
    score: float
    scores: dict[str, float]


class EncoderEngine:
    """An encoder with its tokenizer."""

    def __init__(self, encoder: Encoder, tokenizer: EncoderTokenizer, device: str = "cpu") -> None:
        self.config = encoder.config
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.device = device

    def embed(self, texts: Sequence[Text], *, truncate: bool = False) -> torch.Tensor:
        """``[len(texts), hidden_size]`` float32, in the order of the texts; raises as :meth:`encode`."""
        return self.embed_encoded(self.encode(texts, truncate=truncate))

    @torch.inference_mode()
    def embed_encoded(self, encoded: Sequence[Encoded]) -> torch.Tensor:
        """``[len(encoded), hidden_size]`` float32 of what :meth:`encode` gave, in its order."""
        return self._run(encoded, self.encoder.embed, self.config.hidden_size)

    def encode(self, texts: Sequence[Text | list[int]], *, truncate: bool = False) -> list[Encoded]:
        """Token ids of texts and of pairs; a list of ids stands for itself, with nothing put around it.

        Raises ValueError, which names the text, for one that is too long (``truncate`` cuts texts, never
        lists of ids), for an id that the model does not know, and for what is no text.
        """
        encoded = []
        for i, text in enumerate(texts):
            try:
                encoded.append(self._encode(text, truncate))
            except ValueError as error:
                raise ValueError(f"text {i}: {error}" if len(texts) > 1 else str(error)) from None
        return encoded

    def _encode(self, text: Any, truncate: bool) -> Encoded:
        most = self.config.max_tokens
        if isinstance(text, list) and not any(isinstance(item, str) for item in text):
            item = self.tokenizer.from_ids(text, max_tokens=most)
        else:
            item = self.tokenizer.encode(text, max_tokens=most, truncate=truncate)
        if max(item.ids) >= self.config.vocab_size:
            raise ValueError(f"token {max(item.ids)} is not one of the model's {self.config.vocab_size}")
        return item

    @torch.inference_mode()
    def classify(self, texts: Sequence[Text], *, truncate: bool = False) -> list[ClassificationOutput]:
        """The head's answer for each text or pair. Raises ValueError as :meth:`embed`, and without a head."""
        labels = self.config.labels
        if not labels:
            raise ValueError("this checkpoint has no classification head: only embed() works")
        logits = self._run(self.encode(texts, truncate=truncate), self.encoder.classify, len(labels))
        if len(labels) > 1:
            logits = logits.sigmoid() if self.config.multi_label else logits.softmax(-1)
        outputs = []
        for row in logits.tolist():
            best = max(range(len(labels)), key=row.__getitem__)
            outputs.append(ClassificationOutput(labels[best], row[best], dict(zip(labels, row, strict=True))))
        return outputs

    def _run(self, encoded: Sequence[Encoded], forward: Any, width: int) -> torch.Tensor:
        return in_batches(encoded, self.config, forward, width, self.device)


def in_batches(
    encoded: Sequence[Encoded],
    config: EncoderConfig,
    forward: Callable[[EncoderBatch], torch.Tensor],
    width: int,
    device: str,
) -> torch.Tensor:
    """``forward`` on each text, ``[len(encoded), width]`` float32 on the CPU, in the order of the texts."""
    out = torch.empty(len(encoded), width)
    for members in batches(encoded):
        batch = pack([encoded[i] for i in members], config, device)
        out[torch.tensor(members)] = forward(batch).float().cpu()
    return out


def pack(items: Sequence[Encoded], config: EncoderConfig, device: str) -> EncoderBatch:
    """Texts as one batch; those of one length should stand side by side."""
    lengths = [len(item.ids) for item in items]
    runs = tuple((len(list(same)), length) for length, same in groupby(lengths))
    tensor = partial(torch.tensor, device=device)
    first = config.first_position
    two_segments = config.type_vocab_size > 1
    return EncoderBatch(
        token_ids=tensor([i for item in items for i in item.ids]),
        positions=tensor([p for length in lengths for p in range(first, first + length)]),
        segments=tensor([s if two_segments else 0 for item in items for s in item.segments]),
        runs=runs,
    )


def batches(encoded: Sequence[Encoded]) -> Iterator[list[int]]:
    """Which of ``encoded`` go through the model together: places, each once.

    By length, so that texts of one length lie side by side and are one attention call.
    """
    batch: list[int] = []
    tokens = 0
    for i in sorted(range(len(encoded)), key=lambda i: len(encoded[i].ids)):
        if batch and tokens + len(encoded[i].ids) > BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(i)
        tokens += len(encoded[i].ids)
    if batch:
        yield batch


def is_encoder(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is of a family that this engine runs."""
    return checkpoint.kind == "hf" and checkpoint.metadata.get("model_type") in MODEL_TYPES


def read_encoder_config(checkpoint: Checkpoint) -> EncoderConfig:
    """From config.json and the files beside it. Raises ValueError for what is not supported."""
    return EncoderConfig.from_hf(checkpoint.metadata, sentence_files(checkpoint.path))


def load_encoder(checkpoint: Checkpoint, device: str = "cpu") -> EncoderEngine:
    """Read config, tokenizer and weights. Raises ValueError for what is damaged or not supported."""
    config = read_encoder_config(checkpoint)
    encoder = load_weights(config, checkpoint, device)
    return EncoderEngine(encoder.eval(), EncoderTokenizer(checkpoint.path), device)


def load_weights(config: EncoderConfig, checkpoint: Checkpoint, device: str = "cpu") -> Encoder:
    """The encoder that ``config`` describes, in training mode. Raises ValueError where weights do not fit."""
    with torch.device("meta"):
        encoder = Encoder(config)
    weights = sum(parameter.numel() for parameter in encoder.parameters())
    if weights > 2 * checkpoint.num_bytes:
        raise ValueError(
            f"the config of {checkpoint.path.name} describes a model of {weights} weights, "
            f"but its files have {checkpoint.num_bytes} bytes"
        )
    encoder = encoder.to_empty(device=device)
    load_model(encoder, checkpoint, tied=False, canonical=partial(canonical, config))
    return encoder


def sentence_files(folder: Path) -> SentenceFiles:
    """What sentence-transformers' files in a folder say. Raises ValueError for damaged ones."""
    path = folder / "modules.json"
    if not path.is_file():
        return SentenceFiles()
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"modules.json of {folder.name} is not valid JSON: {error}") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"modules.json of {folder.name} must be a list of objects")
    names = [
        str(module.get("path", "")) for module in modules if str(module.get("type")).endswith(".Pooling")
    ]
    if any(Path(name).name != name for name in names):
        raise ValueError(f"modules.json of {folder.name} names a path outside its folder")
    pooling = read_json(folder / names[0] / "config.json") if names else {}
    bert = folder / "sentence_bert_config.json"
    return SentenceFiles.read(modules, pooling, read_json(bert) if bert.is_file() else {})
