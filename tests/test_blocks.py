"""FP8 sources: dequantised as float32 NumPy does it, refused without being asked, whatever the experts' form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_view import bits

from qwen35conv import Options, make_plan, open_source, open_view, read_checkpoint, write
from qwen35conv.planning.plan import Mtp

BLOCK = (8, 10)  # no size of a tiny model is a multiple of both
ASKED = Options(dequantize=True)


def made(folder: Path, block: tuple[int, int] = BLOCK, **kinds: Any) -> tuple[Path, tiny.Tensors]:
    """An FP8 checkpoint, and the raw tensors that it stands for."""
    sizes = kinds.pop("sizes", tiny.SMALL)
    scale_dtype = kinds.pop("scale_dtype", tiny.BF16)
    plain = tiny.make(sizes, **kinds)
    tensors = quantized.coded(plain.raw, block, scale_dtype=scale_dtype)
    return tiny.save(folder, tensors, quantized.config_of(plain.config, block)), quantized.decoded(tensors, block)


def converted(source: Path, folder: Path, options: Options = ASKED, **how: Any) -> Path:
    opened = open_source(str(source))
    write(opened, make_plan(read_checkpoint(opened), options), folder, **how)
    return folder


@given(
    sizes=st.builds(
        tiny.Sizes,
        layers=st.integers(2, 4),
        interval=st.integers(2, 3),
        experts=st.sampled_from([0, 3]),
        expert_size=st.sampled_from([8, 14, 21]),
    ),
    block=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    experts=st.sampled_from(["fused", "single", "pairs"]),
    scale_dtype=st.sampled_from([tiny.BF16, np.dtype("f4")]),
    options=st.builds(
        Options,
        dequantize=st.just(True),
        mtp=st.sampled_from(Mtp),
        keep_vision=st.booleans(),
        max_shard_bytes=st.sampled_from([None, 5000]),
    ),
)
@settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))
def test_dequantised_equals_the_conversion_of_the_float32_reference(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: tiny.Sizes,
    block: tuple[int, int],
    experts: str,
    scale_dtype: np.dtype[Any],
    options: Options,
) -> None:
    folder = tmp_path_factory.mktemp("fp8")
    kinds = {"sizes": sizes, "experts": experts, "scale_dtype": scale_dtype}
    source, reference = made(folder / "fp8", block, **kinds)
    plain = tiny.save(folder / "plain", reference, tiny.make(sizes, experts=experts).config)
    found = tiny.load(converted(source, folder / "out", options, check=False))
    tiny.assert_same(found, tiny.load(converted(plain, folder / "want", replace(options, dequantize=False))))
    opened = open_source(str(source))
    view = open_view(opened, make_plan(read_checkpoint(opened), options))
    tiny.assert_same({name: bits(view[name]) for name in view}, found)
