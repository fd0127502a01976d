"""lm-eval's local-completions client (echo and logprobs) against the server.

It is not among our dependencies: `pip install 'lm-eval[api]'` into an environment of its own, and put that
one's `lm-eval` on PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from octavo.llm import LLM
from octavo.request import SamplingParams

LM_EVAL = shutil.which("lm-eval")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.real_model,
    pytest.mark.skipif(LM_EVAL is None, reason="needs lm-eval on PATH"),
]

QUESTIONS = [
    ("The capital of France is", [" Paris", " Rome", " seven"]),
    ("Two and two is", [" four", " nine", " a river"]),
    ("Snow is cold and fire is", [" hot", " wet", " Tuesday"]),
    ("She opened the door with her", [" key", " soup", " weather"]),
]
TASK = """\
task: small_choices
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list:
  - metric: acc
"""


def test_lm_eval_gets_the_offline_engines_log_probabilities(tmp_path: Path) -> None:
    from octavo.bench.serve_client import ServerProcess

    model = "smollm2-135m-instruct"
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"context": c, "choices": o}) + "\n" for c, o in QUESTIONS))
    (tmp_path / "small.yaml").write_text(TASK.format(data=data))
    with ServerProcess(model, ["--kv-cache-memory=256MiB"]) as server:
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        arguments = f"model={model},base_url={url},tokenizer_backend=remote,num_concurrent=4,max_retries=1"
        done = subprocess.run(
            [
                LM_EVAL,
                "run",
                "--model=local-completions",
                f"--model_args={arguments}",
                "--tasks=small_choices",
                f"--include_path={tmp_path}",
                f"--output_path={tmp_path / 'out'}",
                "--log_samples",
            ],
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    llm = LLM(model, kv_cache_memory="256MiB")
    assert len(found) == len(QUESTIONS)
    for sample in found:
        context = sample["doc"]["context"]
        for choice, ((scored, _),) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            whole = llm.tokenizer.encode(context + choice)
            start = len(llm.tokenizer.encode(context))
            params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
            (output,) = llm.generate([whole], params, use_tqdm=False)
            assert output.prompt_logprobs is not None
            scores = zip(whole[start:], output.prompt_logprobs[start:], strict=True)
            want = sum(entry[token].logprob for token, entry in scores if entry is not None)
            assert float(scored) == pytest.approx(want, abs=1e-4)
    assert sum(float(sample["acc"]) for sample in found) >= 3
