"""Fuzz what reads a stranger's bytes: headers, indexes, configs, names, and whole folders (pip install '.[fuzz]').

    python scripts/fuzz.py header --seconds 60

Whatever comes in, a fact comes out or one clear error: no crash, no hang, no memory beyond the limit. What was run and
how much memory it took is printed at the end; an input that breaks the promise is saved as `crash-…` by the fuzzer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["qwen35conv"]):
    from qwen35conv.errors import Qwen35ConvError
    from qwen35conv.facts.checkpoint import parse_index
    from qwen35conv.facts.config import parse_config
    from qwen35conv.facts.header import LENGTH_BYTES, build_header, parse_header, parse_length
    from qwen35conv.facts.layout import is_known, parse_name
    from qwen35conv.inspection import inspect_checkpoint
    from qwen35conv.reading import read_checkpoint
    from qwen35conv.report.console import clean
    from qwen35conv.report.documents import inspection_document
    from qwen35conv.source import open_source

LIMIT_MB = 200
_DICTIONARY = (
    "__metadata__", "dtype", "shape", "data_offsets", "BF16", "F32", "U8", "format", "weight_map", "text_config",
    "model_type", "qwen3_5", "num_hidden_layers", "layer_types", "rope_parameters", "quantization", "bits", "mtp.",
    "model.language_model.layers.0.", ".weight", "1e999", "9223372036854775808", "\\ud800", "NaN", "null", "[[[[[[[[",
)  # fmt: skip


def fuzz_header(raw: bytes) -> None:
    """One file: its length and header, and if it is accepted the same facts once it is built again."""
    n_header = parse_length("fuzzed", raw[:LENGTH_BYTES], len(raw))
    header = parse_header("fuzzed", raw[LENGTH_BYTES : LENGTH_BYTES + n_header], len(raw))
    again = build_header(header.tensors, dict(header.metadata))
    n_data = header.data_end - header.data_begin
    parsed = parse_header("built", again[LENGTH_BYTES:], len(again) + n_data)
    assert (parsed.tensors, parsed.metadata) == (header.tensors, header.metadata)


def fuzz_json_header(raw: bytes) -> None:
    """The JSON of a header alone: no length has to be guessed."""
    parse_header("fuzzed", raw, LENGTH_BYTES + len(raw) + 64)


def fuzz_index(raw: bytes) -> None:
    """An index: the files that it names stay in their folder."""
    for file in parse_index(raw).values():
        assert Path("/folder", file).parent == Path("/folder")
        assert file.isprintable()


def fuzz_config(raw: bytes) -> None:
    """config.json."""
    config = parse_config("config.json", raw)
    assert config.n_layers == len(config.layer_kinds)


def fuzz_name(raw: bytes) -> None:
    """A tensor's name."""
    place = parse_name(raw.decode(errors="replace"))
    if place is not None:
        is_known(place)


def fuzz_folder(raw: bytes) -> None:
    """A folder of three files, cut from the bytes; the whole way to a document."""
    parts = raw.split(b"\x00cut", 2)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        for file, part in zip(
            ("model.safetensors", "config.json", "model.safetensors.index.json"), parts, strict=False
        ):
            Path(name, file).write_bytes(part)
        found = inspect_checkpoint(read_checkpoint(open_source(name)))
        json.dumps(inspection_document(found, all_tensors=True), allow_nan=False)


def check(error: Qwen35ConvError) -> None:
    """An error is short, printable, and says what to do next."""
    text = clean(str(error))
    assert text
    assert len(text) < 3000
    assert text.isprintable()
    assert error.hint


TARGETS: dict[str, Callable[[bytes], None]] = {
    "header": fuzz_header,
    "json-header": fuzz_json_header,
    "index": fuzz_index,
    "config": fuzz_config,
    "name": fuzz_name,
    "folder": fuzz_folder,
}


def _seeds() -> list[bytes]:
    """Valid inputs to begin with."""
    entry = {"dtype": "BF16", "shape": [3, 5], "data_offsets": [0, 30]}
    header = {"__metadata__": {"format": "pt"}, "model.language_model.norm.weight": entry}
    text = json.dumps(header).encode()
    config = {
        "model_type": "qwen3_5",
        "text_config": {"model_type": "qwen3_5_text", "hidden_size": 24, "num_hidden_layers": 4, "vocab_size": 50,
                        "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": {"rope_theta": 1e7}},
        "quantization": {"bits": 4, "group_size": 32, "lm_head": False},
    }  # fmt: skip
    index = {"weight_map": {"model.language_model.norm.weight": "model.safetensors"}}
    file = len(text).to_bytes(8, "little") + text + b"\0" * 30
    documents = [json.dumps(document).encode() for document in (config, index, header)]
    return [
        file,
        *documents,
        b"\x00cut".join([file, *documents[:2]]),
        b"model.language_model.layers.3.mlp.up_proj.weight",
    ]


def main() -> None:
    """Run one target until its time or its runs are over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--runs", type=int, default=-1)
    parser.add_argument("--longest", type=int, default=2000, help="bytes of an input, at most")
    options = parser.parse_args()
    target = TARGETS[options.target]
    counts = {"accepted": 0, "refused": 0}
    begun = time.monotonic()
    slowest = 0.0

    def one(raw: bytes) -> None:
        nonlocal slowest
        start = time.monotonic()
        try:
            target(raw)
            counts["accepted"] += 1
        except Qwen35ConvError as error:
            counts["refused"] += 1
            check(error)
        slowest = max(slowest, time.monotonic() - start)
        if sum(counts.values()) == options.runs or time.monotonic() - begun > options.seconds:
            tell()
            os._exit(0)  # the fuzzer never comes back, and its own end runs no Python

    def tell() -> None:
        status = Path("/proc/self/status")
        peak = status.read_text().split("VmHWM:")[1].split()[0] if status.exists() else "0"
        n_runs, seconds = sum(counts.values()), time.monotonic() - begun
        print(
            f"{options.target}: {n_runs:,} inputs in {seconds:.0f} s, {counts['accepted']:,} accepted, slowest "
            f"{slowest * 1000:.0f} ms, peak memory {int(peak) / 1024:.0f} MB",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as folder:
        for i, seed in enumerate(_seeds()):
            Path(folder, f"seed{i}").write_bytes(seed)
        words = Path(folder).with_suffix(".dict")
        words.write_text("".join(f'"{json.dumps(word)[1:-1]}"\n' for word in _DICTIONARY))
        atheris.Setup(
            [
                *(sys.argv[0], folder, f"-dict={words}", f"-max_len={options.longest}"),
                *(f"-rss_limit_mb={LIMIT_MB}", "-timeout=10", "-verbosity=0"),
            ],
            one,
        )  # fmt: skip
        atheris.Fuzz()


if __name__ == "__main__":
    main()
