"""An OpenVINO IR from a folder of safetensors; runs in OpenVINO's environment, started by path.

Arguments: the folder, where the IR goes, and "fp32" or "int8".
"""

from __future__ import annotations

import sys

from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig


def main(source: str, target: str, precision: str) -> None:
    if precision not in ("fp32", "int8"):
        raise ValueError(f"the precision is fp32 or int8, got {precision!r}")
    # False and not None: without a word large models are compressed.
    quantization = OVWeightQuantizationConfig(bits=8) if precision == "int8" else None
    model = OVModelForCausalLM.from_pretrained(
        source, export=True, compile=False, load_in_8bit=False, quantization_config=quantization
    )
    model.save_pretrained(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
