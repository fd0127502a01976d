"""The demo, as CI runs it: no terminal, few tokens."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "shared_prompt.py"


@pytest.mark.real_model
@pytest.mark.usefixtures("smollm2_path")
def test_the_demo_serves_its_chats_from_one_prefix():
    result = subprocess.run(
        [sys.executable, str(DEMO), "--max-tokens", "2", "--chats", "5", "--threads", "1"],
        capture_output=True,
        text=True,
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "100"},
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "5/5" in result.stdout
    cached = re.search(r"(\d+) of (\d+) prompt tokens", result.stdout)
    assert cached, result.stdout
    # Four of the five take the system prompt, nearly all that they send, from the first.
    assert int(cached[1]) / int(cached[2]) > 0.7
    for words in ("tokens/s", "time to first token", "blocks used", "loop", "bmm", "sdpa", "fused"):
        assert words in result.stdout
