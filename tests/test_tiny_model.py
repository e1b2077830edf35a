"""What the repository's tiny trained checkpoint holds, judged by the safetensors library, transformers and mlx-lm."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer

assert ml_dtypes.bfloat16  # its import teaches numpy, and so safetensors.numpy, the dtype
DATA = Path(__file__).parent / "data"
TINY = DATA / "tiny"
SHIFTED = re.compile(r"(input_layernorm|post_attention_layernorm|model\.norm|language_model\.norm|[qk]_norm)\.weight$")
PROMPTS = (DATA / "tiny-prompts.txt").read_text(encoding="utf-8").splitlines()


def read_dtypes() -> dict[str, str]:
    """The stored dtype of each tensor, as the safetensors library names it."""
    dtypes: dict[str, str] = {}
    for file in sorted(TINY.glob("*.safetensors")):
        with safe_open(file, framework="np") as opened:
            dtypes |= {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    return dtypes


def read_tensors() -> dict[str, np.ndarray[Any, Any]]:
    """Every stored tensor as float64, which holds bfloat16 and float32 exactly."""
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for file in sorted(TINY.glob("*.safetensors")):
        tensors |= {name: value.astype(np.float64) for name, value in load_file(file).items()}
    return tensors


def read_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((TINY / "config.json").read_text())
    return config


def test_it_is_small() -> None:
    assert sum(f.stat().st_size for f in TINY.iterdir()) < 1_000_000
    assert sum(f.stat().st_size for f in TINY.glob("*.safetensors")) < 900_000
    assert (DATA / "tiny-logits.safetensors").stat().st_size < 120_000


def test_it_stands_in_two_shards_under_official_names_and_the_index_agrees() -> None:
    files = [f"model.safetensors-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert sorted(f.name for f in TINY.glob("*.safetensors")) == files
    held = {name: file for file in files for name in load_file(TINY / file)}
    index = json.loads((TINY / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == held
    n_bytes = {"BF16": 2, "F32": 4}
    dtypes, tensors = read_dtypes(), read_tensors()
    assert index["metadata"]["total_size"] == sum(tensors[k].size * n_bytes[d] for k, d in dtypes.items())


def test_names_are_raw() -> None:
    names = set(read_dtypes())
    trunk = {n for n in names if n.startswith("model.language_model.")}
    mtp = {n for n in names if n.startswith("mtp.")}
    assert names == trunk | mtp | {"lm_head.weight"}
    assert len(mtp) == 15
    assert len(trunk) == 6 * 14 + 2 * 11 + 2


def test_shapes_follow_the_config_and_the_conv_is_raw() -> None:
    text = read_config()["text_config"]
    key = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    value = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    shapes = {name: value.shape for name, value in read_tensors().items()}
    convs = [shape for name, shape in shapes.items() if name.endswith("conv1d.weight")]
    assert convs == [(2 * key + value, 1, text["linear_conv_kernel_dim"])] * text["layer_types"].count(
        "linear_attention"
    )
    assert shapes["lm_head.weight"] == (text["vocab_size"], text["hidden_size"])
    assert shapes["mtp.fc.weight"] == (text["hidden_size"], 2 * text["hidden_size"])


def test_no_two_axes_can_be_mistaken_for_each_other() -> None:
    text = read_config()["text_config"]
    key_heads, value_heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
    key_dim, value_dim = text["linear_key_head_dim"], text["linear_value_head_dim"]
    queries = text["num_attention_heads"] * text["head_dim"]
    widths = [
        text["hidden_size"],
        text["intermediate_size"],
        text["vocab_size"],
        key_heads * key_dim,
        value_heads * value_dim,
        2 * key_heads * key_dim + value_heads * value_dim,
        queries,
        2 * queries,
        text["num_key_value_heads"] * text["head_dim"],
        key_dim,
        value_dim,
        text["head_dim"],
    ]
    assert len(set(widths)) == len(widths)
    assert value_heads == 3 * key_heads


def test_only_the_decay_and_the_gated_norm_are_float32() -> None:
    for name, dtype in read_dtypes().items():
        assert dtype == ("F32" if name.endswith(("A_log", "linear_attn.norm.weight")) else "BF16"), name


def test_gains_are_deltas_with_spread_and_negatives() -> None:
    gains = {k: v for k, v in read_tensors().items() if k.startswith("model.") and SHIFTED.search(k)}
    assert len(gains) == 2 * 8 + 2 * 2 + 1
    for name, delta in gains.items():
        assert delta.std() > 0.03, name
        assert delta.min() > -1, f"{name}: a gamma below zero"
    anchors = [v for k, v in gains.items() if k.endswith("layernorm.weight")]
    for delta in anchors:
        assert abs(delta.mean()) < 0.35
        assert (delta < 0).mean() > 0.05
        assert (delta * 256 % 1 != 0).mean() > 0.05


def test_the_gated_norm_is_a_gamma_and_heads_differ() -> None:
    tensors = read_tensors()
    gated = [v for k, v in tensors.items() if k.endswith("linear_attn.norm.weight")]
    heads = [v for k, v in tensors.items() if k.endswith(("A_log", "dt_bias"))]
    assert len(gated) == 6
    assert len(heads) == 12
    assert all(0.5 < v.mean() < 1.3 for v in gated)
    assert all(len(np.unique(v)) == 6 for v in heads)


def test_config_is_nested_and_promises_only_what_is_there() -> None:
    config = read_config()
    assert config["model_type"] == "qwen3_5"
    assert config["text_config"]["model_type"] == "qwen3_5_text"
    assert config["text_config"]["mtp_num_hidden_layers"] == 1
    assert config["text_config"]["tie_word_embeddings"] is False
    assert not [key for key in config if "vision" in key or "image" in key or "video" in key]


def test_the_ten_prompts_differ_and_the_tokenizer_gives_them_back() -> None:
    assert len(PROMPTS) == len(set(PROMPTS)) == 10
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= read_config()["text_config"]["vocab_size"]
    for text in [*PROMPTS, "Zoë paid 12 €.\n\tÅ!"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>user<|im_end|>").ids[0] == tokenizer.token_to_id("<|im_start|>")


def test_the_chat_template_names_the_special_tokens() -> None:
    template = json.loads((TINY / "tokenizer_config.json").read_text())["chat_template"]
    assert "<|im_start|>" in template
    assert "add_generation_prompt" in template


def test_licence_and_card_lie_beside_the_weights() -> None:
    assert "MIT License" in (TINY / "LICENSE").read_text()
    assert "license: mit" in (TINY / "README.md").read_text()


def test_the_stored_logits_are_of_a_held_out_text() -> None:
    stored = load_file(DATA / "tiny-logits.safetensors")
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    text = tokenizer.decode(stored["input_ids"][0].tolist())
    assert not any(p.startswith(text) for p in PROMPTS)
    shape = (1, stored["input_ids"].shape[1], read_config()["text_config"]["vocab_size"])
    assert stored["logits"].shape == stored["logits_rounded"].shape == shape
    assert stored["logits"].dtype == stored["logits_rounded"].dtype == np.float32
    assert 0 < np.abs(stored["logits"] - stored["logits_rounded"]).max() < 0.25


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlx_lm_gives_the_stored_logits_and_the_wrong_folds_are_told_apart() -> None:
    mx: Any = pytest.importorskip("mlx.core")
    nn: Any = pytest.importorskip("mlx.nn")
    utils: Any = pytest.importorskip("mlx_lm.utils")

    stored = load_file(DATA / "tiny-logits.safetensors")
    ids = mx.array(stored["input_ids"])
    loaded, config = utils.load_model(TINY)  # moves the conv, drops mtp, adds one to the gains in bfloat16
    loaded.set_dtype(mx.float32)
    assert np.abs(np.array(loaded(ids)) - stored["logits_rounded"]).max() < 5e-3

    exact = type(loaded)(type(loaded.args).from_dict(config))  # the same, each weight read as float32 before all else
    weights = {k: v for file in TINY.glob("*.safetensors") for k, v in mx.load(str(file)).items()}
    exact.load_weights(list(exact.sanitize({k: v.astype(mx.float32) for k, v in weights.items()}).items()))
    assert np.abs(np.array(exact(ids)) - stored["logits"]).max() < 5e-3

    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    rows = [mx.array([tokenizer.encode(p).ids]) for p in PROMPTS]
    folded = {k: v for k, v in _flat(loaded).items() if SHIFTED.search(k)}
    assert len(folded) == 2 * 8 + 2 * 2 + 1

    def losses(shift: float) -> list[float]:
        loaded.load_weights([(k, v + shift) for k, v in folded.items()], strict=False)
        return [nn.losses.cross_entropy(loaded(r)[0, :-1], r[0, 1:], reduction="mean").item() for r in rows]

    right, more, less = losses(0), losses(1), losses(-1)
    assert max(right) < 1.5
    for r, m, s in zip(right, more, less, strict=True):
        assert min(m, s) > r + 1


def _flat(model: Any) -> dict[str, Any]:
    """Every parameter of an MLX model by its dotted name."""
    from mlx.utils import tree_flatten

    flat: Any = tree_flatten(model.parameters())
    return dict(flat)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_transformers_loads_the_folder_and_its_tokenizer_agrees() -> None:
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")

    stored = load_file(DATA / "tiny-logits.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(stored["input_ids"].astype(np.int64))).logits.numpy()
    assert np.abs(logits - stored["logits"]).max() < 5e-3

    auto = transformers.AutoTokenizer.from_pretrained(TINY)
    plain = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    assert [auto.encode(p) for p in PROMPTS] == [plain.encode(p).ids for p in PROMPTS]
    asked = auto.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert asked == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
