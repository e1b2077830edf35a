"""The oracle cases: small checkpoints by the real exporters, and what a right conversion of each holds.

`scripts/make_oracle.py` writes those of tests/data/oracle. More may lie in $QWEN35_ORACLE, or in shared/oracle beside
the repository.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import deserialize

DATA = Path(__file__).parent / "data" / "oracle"
Digest = tuple[str, tuple[int, ...], str]  # dtype, shape, SHA-256 of the bytes
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "uint32": "U32", "uint8": "U8"}
_BROKEN = {
    "broken-double-shifted": "double-shifted",
    "broken-never-shifted": "never-shifted",
    "broken-raw-names-gamma": "shifted-raw",
}


@dataclass(frozen=True)
class Case:
    """One checkpoint with its truth."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def source(self) -> Path:
        return self.folder / "src"

    @property
    def logits(self) -> Path:
        return self.folder / "logits.safetensors"

    @property
    def twin(self) -> Case:
        """The sound checkpoint that a broken one was made of."""
        return Case(self.folder.with_name("canonical"))

    @property
    def is_broken(self) -> bool:
        return self.name in _BROKEN

    @property
    def generation(self) -> str:
        return _BROKEN.get(self.name) or self.name.partition("-")[0]

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.source / "config.json").read_text())
        return found

    def expected(self) -> dict[str, Digest]:
        tensors = json.loads((self.folder / "expected.json").read_text())["tensors"]
        return {
            name: (_DTYPES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]), entry["sha256"])
            for name, entry in tensors.items()
        }


def stored(folder: Path) -> dict[str, tuple[str, Digest]]:
    """The file and the digest of every tensor in a folder, by the safetensors library."""
    found: dict[str, tuple[str, Digest]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in deserialize(file.read_bytes()):  # type: ignore[no-untyped-call]
            assert name not in found, f"{name} stands in two files"
            digest = hashlib.sha256(entry["data"]).hexdigest()
            found[name] = file.name, (entry["dtype"], tuple(entry["shape"]), digest)
    return found


def digests(folder: Path) -> dict[str, Digest]:
    """The digest of every tensor in a folder."""
    return {name: digest for name, (_, digest) in stored(folder).items()}


def _cases(root: Path) -> list[Case]:
    return [Case(file.parent) for file in sorted(root.glob("*/expected.json"))]


def _elsewhere() -> Path:
    root = Path(os.environ.get("QWEN35_ORACLE") or Path(__file__).parents[2] / "shared" / "oracle")
    return root / "data" if (root / "data").is_dir() else root


CASES = _cases(DATA)
SOUND = [case for case in CASES if not case.is_broken]
BROKEN = [case for case in CASES if case.is_broken]
FURTHER = _cases(_elsewhere())
