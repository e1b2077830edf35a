"""Peak memory of a forward pass over a checkpoint of 4 GB, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from model_draws import draw_config

from qwen35conv.facts.header import Dtype, TensorInfo, build_header
from qwen35conv.facts.layout import HEAD_MODULE, TRUNK_PREFIX, Role
from qwen35conv.planning.inventory import expected_head, expected_trunk

LIMIT = 1_200_000_000
SIZES = {
    "hidden_size": 2048,
    "vocab_size": 248_320,
    "num_hidden_layers": 20,
    "layer_types": None,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
    "rms_norm_eps": 1e-6,
}
PROGRAM = """
import json, resource, sys
from pathlib import Path
from qwen35conv.reading import read_checkpoint
from qwen35conv.source import open_source
from qwen35conv.verify import Step, VerifyOptions, plan_to_verify, verify
source = open_source(sys.argv[1])
checkpoint = read_checkpoint(source)
options = VerifyOptions(steps=(Step.PROMPT,), tokens=(5, 77, 200_000, 1234), max_memory=0, backend="ops")
(check,) = verify(source, plan_to_verify(checkpoint), checkpoint, options).checks
status = Path("/proc/self/status")
if status.exists():  # on Linux ru_maxrss is at least what the parent process had
    peak = next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"peak": peak, "details": dict(check.details), "passed": check.passed}))
"""


def write_large(folder: Path) -> int:
    """A canonical checkpoint whose weights repeat a few MB of noise; its bytes."""
    config = draw_config(**SIZES)
    random = np.random.default_rng(0)
    noise = random.standard_normal(3_000_017).astype(np.float32)
    entries: list[TensorInfo] = []
    drawn: list[bytes] = []  # by tensor; a few MB each, made once for each kind
    kinds: dict[float, bytes] = {}
    end = 0
    for e in (*expected_trunk(config), expected_head(config)):
        module = HEAD_MODULE if e.module == "lm_head" else TRUNK_PREFIX + e.module
        n = int(np.prod(e.shape))
        scale = -1.0 if e.role in (Role.GAIN, Role.CONTROL) else 0.5 if n < 2**20 else e.shape[-1] ** -0.5
        values = 1 + 0.1 * noise if scale < 0 else noise * np.float32(scale)
        kinds.setdefault(scale, (values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
        drawn.append(kinds[scale])
        entries.append(TensorInfo(f"{module}.{e.parameter}".rstrip("."), Dtype.BF16, e.shape, end, end + 2 * n))
        end += 2 * n
    with (folder / "model.safetensors").open("wb") as file:
        file.write(build_header(tuple(entries), {"format": "mlx"}))
        for entry, blob in zip(entries, drawn, strict=True):
            for begin in range(0, entry.n_bytes, len(blob)):
                file.write(blob[: entry.n_bytes - begin])
    (folder / "config.json").write_text(json.dumps(config.document))
    return end


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no resource module")
def test_a_prompt_over_4_gb_takes_little_memory(tmp_path: Path) -> None:
    n_bytes = write_large(tmp_path)
    assert n_bytes > 4e9
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True, timeout=280
    )
    found = json.loads(done.stdout)
    (tmp_path / "model.safetensors").unlink()
    assert found["details"]["layers run"] == 20
    assert found["peak"] < LIMIT, found
