"""vLLM's CPU engine, in one process, its prefix cache on."""

from __future__ import annotations

import os
import time
from typing import Any

# Read when vllm is imported. In one process its memory is one process's, and no core polls another's queue.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM, SamplingParams

PACKAGES = ("vllm-cpu", "torch", "transformers")


class Session:
    """``model`` is a folder of safetensors; ``options`` go to ``vllm.LLM``."""

    def __init__(self, model: str, threads: int, shape: dict[str, int], options: dict[str, Any]) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(
            map(str, sorted(os.sched_getaffinity(0))[:threads])
        )
        self._llm = LLM(
            model,
            skip_tokenizer_init=True,
            max_model_len=shape["max_len"] + 1,
            max_num_seqs=max(shape["num_seqs"], 1),
            enable_prefix_caching=True,
            **options,
        )
        self._next_id = 0

    def reset(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise ValueError("vllm did not empty its prefix cache")

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float, float]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        engine = self._llm.llm_engine
        ids = [str(self._next_id + number) for number in range(len(prompts))]
        self._next_id += len(prompts)
        start = time.monotonic()
        for request_id, prompt in zip(ids, prompts, strict=True):
            engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        answers: dict[str, list[int]] = {}
        firsts: dict[str, float] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                firsts.setdefault(output.request_id, time.monotonic() - start)
                answers[output.request_id] = list(output.outputs[0].token_ids)
        total_s = time.monotonic() - start
        return [answers[request_id] for request_id in ids], max(firsts.values()), total_s

    def notes(self) -> dict[str, Any]:
        return {"kv_cache_gb": os.environ["VLLM_CPU_KVCACHE_SPACE"], "dtype": "float32"}
