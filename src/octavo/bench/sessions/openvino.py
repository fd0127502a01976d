"""OpenVINO GenAI's continuous batching, with its prefix cache on."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

PACKAGES = ("openvino-genai", "openvino", "optimum-intel", "nncf")
CACHE_GB = 2


class Session:
    """``model`` is a folder with an exported IR; ``options`` go to the CPU plug-in.

    There is no way to empty its prefix cache, so :meth:`reset` makes the pipeline again, which costs a
    load but no measured time.
    """

    def __init__(self, model: str, threads: int, shape: dict[str, int], options: dict[str, Any]) -> None:
        self._model = model
        self._properties = {"INFERENCE_NUM_THREADS": threads} | options
        self._num_seqs = shape["num_seqs"]
        self.reset()

    def reset(self) -> None:
        self._pipe = None  # before the next is made: two would double the peak memory
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        scheduler.max_num_seqs = max(self._num_seqs, 1)
        self._pipe = genai.ContinuousBatchingPipeline(self._model, scheduler, "CPU", self._properties)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float, float]:
        config = genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.min_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        pipe: Any = self._pipe
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        start = time.monotonic()
        handles = [pipe.add_request(number, tensor, config) for number, tensor in enumerate(tensors)]
        answers: list[list[int]] = [[] for _ in prompts]
        firsts: dict[int, float] = {}
        while pipe.has_non_finished_requests():
            pipe.step()
            for number, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        answers[number] += output.generated_ids
                    firsts.setdefault(number, time.monotonic() - start)
        total_s = time.monotonic() - start
        return answers, max(firsts.values()), total_s

    def notes(self) -> dict[str, Any]:
        return {"kv_cache_gb": CACHE_GB, "properties": self._properties}
