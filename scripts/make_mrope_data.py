"""Write the angles that transformers' own rotary embedding gives to random three-axis positions.

    python scripts/make_mrope_data.py tests/data

Needs torch and transformers. Writes mrope.safetensors, with positions [3, B, T] and, for each case, cos and sin
[B, T, rotary_dim]; and mrope.json, with the sizes of each case and the versions that made it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

BATCH, STEPS, LARGEST = 2, 7, 300
CASES: dict[str, dict[str, Any]] = {
    "release": {"head_dim": 256, "partial_rotary_factor": 0.25, "rope_theta": 1e7, "mrope_section": [11, 11, 10]},
    "uneven": {"head_dim": 40, "partial_rotary_factor": 0.6, "rope_theta": 1e4, "mrope_section": [6, 4, 2]},
}


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    positions = torch.randint(0, LARGEST, (3, BATCH, STEPS), generator=torch.Generator().manual_seed(0))
    arrays = {"positions": positions.to(torch.int32)}
    for name, sizes in CASES.items():
        rope = {key: sizes[key] for key in ("rope_theta", "partial_rotary_factor", "mrope_section")}
        config = Qwen3_5TextConfig(
            head_dim=sizes["head_dim"],
            rope_parameters={**rope, "rope_type": "default", "mrope_interleaved": True},
        )
        cos, sin = Qwen3_5TextRotaryEmbedding(config)(torch.zeros(1), positions)
        arrays |= {f"{name}.cos": cos.contiguous(), f"{name}.sin": sin.contiguous()}
    save_file(arrays, folder / "mrope.safetensors")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    (folder / "mrope.json").write_text(json.dumps({"cases": CASES, "versions": versions}, indent=2) + "\n")


if __name__ == "__main__":
    main()
