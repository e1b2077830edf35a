"""The documents hold true: README shows what the commands print, and every room stands on the map."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from readme import README, outputs, without_times

from qwen35conv.facts.config import LayerKind, parse_config
from qwen35conv.facts.layout import Role
from qwen35conv.planning.inventory import expected_trunk

PACKAGE = Path(__file__).parents[1] / "qwen35conv"


def test_the_readme_shows_what_the_commands_print() -> None:
    text = README.read_text(encoding="utf-8")
    assert without_times(outputs(text)) == without_times(text)


def test_the_readme_names_every_command_and_option() -> None:
    text = README.read_text(encoding="utf-8")
    source = (PACKAGE / "cli.py").read_text(encoding="utf-8")
    for option in set(re.findall(r'"(--[a-z-]+)"', source)) - {"--help"}:
        assert option in text, option


@pytest.mark.parametrize("room", [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))], ids=str)
def test_every_room_is_on_the_map(room: Path) -> None:
    if room.name == "__init__.py":
        return
    assert f"`{room}`" in (PACKAGE / "README.md").read_text(encoding="utf-8")


MODELS = {
    # hidden, heads, kv heads, value heads, MLP, experts, expert size, tied
    "Qwen3.5-0.8B": (24, 1024, 8, 2, 16, 3584, 0, 0, True),
    "Qwen3.5-2B": (24, 2048, 8, 2, 16, 6144, 0, 0, True),
    "Qwen3.5-4B": (32, 2560, 16, 4, 32, 9216, 0, 0, True),
    "Qwen3.5-9B": (32, 4096, 16, 4, 32, 12288, 0, 0, False),
    "Qwen3.5-27B": (64, 5120, 24, 4, 48, 17408, 0, 0, False),
    "Qwen3.5-35B-A3B": (40, 2048, 16, 2, 32, 0, 256, 512, False),
    "Qwen3.5-122B-A10B": (48, 3072, 32, 2, 64, 0, 256, 1024, False),
    "Qwen3.5-397B-A17B": (60, 4096, 32, 2, 64, 0, 512, 1024, False),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_table_of_models_counts_what_the_inventory_counts(name: str) -> None:
    layers, hidden, heads, kv_heads, value_heads, wide, experts, expert_size, tied = MODELS[name]
    document = {
        "model_type": "qwen3_5_moe" if experts else "qwen3_5",
        "vocab_size": 248320,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "linear_num_value_heads": value_heads,
        "intermediate_size": wide,
        "num_experts": experts,
        "moe_intermediate_size": expert_size,
        "shared_expert_intermediate_size": expert_size,
        "num_experts_per_tok": 8 if experts else 0,
    }
    config = parse_config("config.json", json.dumps(document).encode())
    tensors = list(expected_trunk(config))
    n_full = sum(kind is LayerKind.FULL for kind in config.layer_kinds)
    n_gains = sum(tensor.role is Role.GAIN for tensor in tensors)
    row = next(line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name}"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    n_written = len(tensors) + (not tied)
    assert cells[1:] == [f"{layers} ({layers - n_full} + {n_full})", str(n_written), str(n_gains)]


def test_every_promise_names_tests_that_exist() -> None:
    readme = README.read_text(encoding="utf-8")
    section = readme.split("## What is promised", 1)[1].split("\n## ", 1)[0]
    named = re.findall(r"`(test_\w+)`", section)
    assert len(named) > 20
    root = README.parent
    texts = [path.read_text(encoding="utf-8") for path in (root / "tests").rglob("test_*.py")]
    defined = {name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.M)}
    assert set(named) <= defined, set(named) - defined
    for path in re.findall(r"`((?:tests/|scripts/)?[\w/]+(?:\.py|/))`", section):
        assert any((root / folder / path).exists() for folder in ("", "tests")), path
