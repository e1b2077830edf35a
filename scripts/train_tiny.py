#!/usr/bin/env python3
"""Train the tiny model that the tests and the demo convert, export it as the official releases are, and check it.

    python scripts/train_tiny.py              # a few minutes on two cores: trains, writes tests/data/, checks
    python scripts/train_tiny.py --check      # checks what is there, trains nothing

Where other work shares the cores, OMP_WAIT_POLICY=PASSIVE before the command keeps threads from waiting in a spin.

Needs the `judges` extra (torch, transformers). Exit 1 when a check fails.

What is trained: a text model of eight layers (six gated delta nets, two gated attentions) on short stories that a
grammar in this file makes up, and after it, with the trunk frozen, the multi-token-prediction head that the official
releases carry as `mtp.*`. Nothing in the folder is left as it was initialised.

What is not as training made it: the gains start at noise around the means published for real checkpoints, not at zero
as transformers starts them, because a run of minutes moves a gain by hundredths where a long one spreads it.

How it is written: `Qwen3_5ForConditionalGeneration.save_pretrained` gives names, dtypes, shards and config.json. The
vision tower is taken out of the model before (it was never trained) and its keys out of config.json after. Then the
shards get the official file names and `mtp.*` joins the last of them, both of which transformers does not write.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedTokenizerBase
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5RMSNorm,
)
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

SEED = 35
STEPS, BATCH, LENGTH = 700, 8, 144
MTP_STEPS = 160
# Small, so that many words are spelt in pieces. With 640 entries every word is one, and the same world is so easy that
# gains of one too much cost as little as 0.27 nats a token: right is still better, but it convinces nobody.
VOCAB = 400
DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
END, OPEN, CLOSE = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# No two axes of equal length: hidden 48, MLP 72, conv 224 = 64 + 64 + 96, attention 160 = 4 x 40, key/value 80,
# key heads 2, value heads 6 = 3 x 2, key dim 32, value dim 16.
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 2, 1],
    },
}

# --- the story world -------------------------------------------------------------------------------------------------

PRONOUN = {
    "Mira": "she", "Otto": "he", "Lena": "she", "Bruno": "he", "Nora": "she", "Pavel": "he", "Vera": "she",
    "Emil": "he", "Ida": "she", "Hugo": "he",
}  # fmt: skip
ANIMALS = ("fox", "badger", "hare", "otter", "goose", "mole", "toad", "heron")
NATURES = ("small", "shy", "clever", "quiet", "cheerful")
HOMES = ("by the river", "under an old oak", "in a mill", "near the sea", "on a farm")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
# What the sky does decides what the traveller takes along, what is lost where it lies, and the gift what becomes of it:
# things to learn that are several words away from what tells them, as are the two names.
WEATHERS = {
    "it rained": "an umbrella",
    "it snowed": "a warm scarf",
    "the sun shone": "a straw hat",
    "there was fog": "a lantern",
    "the wind blew": "a paper kite",
}
PLACES = {
    "the market": "walked",
    "the island": "sailed",
    "the hill": "climbed",
    "the town": "rode",
    "the forest": "ran",
}
LOST = {
    "a silver key": "between two stones",
    "a glove": "on a thorn bush",
    "a red kettle": "beside the well",
    "a button": "in the grass",
    "a flute": "inside a hollow tree",
}
GIFTS = {
    "a basket of plums": "ate",
    "some fresh bread": "ate",
    "a jar of honey": "ate",
    "a pot of tea": "drank",
    "some apple juice": "drank",
}
SENTENCES = {
    "open": ("{name} the {animal} lived {home}.", "There was once a {nature} {animal} called {name}."),
    "sky": ("On {day} {weather}, so {he} took {gear}.", "On {day} {weather}, and {name} took {gear}."),
    "way": ("Then {he} {way} to {place}.", "{name} {way} all the way to {place}."),
    "meet": ("There {name} met {friend} the {other}, who had lost {lost}.",),
    "find": ("They found it {where}.", "After a while {name} found it {where}."),
    "gift": ("{friend} was glad and gave {him} {gift}.",),
    "home": ("In the evening {name} went home and {used} it all.", "Back at home {he} {used} it with joy."),
}


def make_story(rng: random.Random) -> tuple[str, str]:
    """One story of seven sentences, and the request that a reader might have made for it."""
    name, friend = rng.sample(sorted(PRONOUN), 2)
    animal, other = rng.sample(ANIMALS, 2)
    weather, gear = rng.choice(sorted(WEATHERS.items()))
    place, way = rng.choice(sorted(PLACES.items()))
    lost, where = rng.choice(sorted(LOST.items()))
    gift, used = rng.choice(sorted(GIFTS.items()))
    slots = {
        "name": name, "friend": friend, "animal": animal, "other": other, "weather": weather, "gear": gear,
        "place": place, "way": way, "lost": lost, "where": where, "gift": gift, "used": used,
        "he": PRONOUN[name], "him": "her" if PRONOUN[name] == "she" else "him",
        "nature": rng.choice(NATURES), "home": rng.choice(HOMES), "day": rng.choice(DAYS),
    }  # fmt: skip
    story = " ".join(rng.choice(forms).format(**slots) for forms in SENTENCES.values())
    return story, f"Tell me about {name} the {animal}."


def sentence_pattern() -> re.Pattern[str]:
    """What matches any sentence that the grammar can make, whatever sentence came before it."""
    values = {
        "name": PRONOUN, "friend": PRONOUN, "animal": ANIMALS, "other": ANIMALS, "weather": WEATHERS,
        "gear": WEATHERS.values(), "place": PLACES, "way": PLACES.values(), "lost": LOST, "where": LOST.values(),
        "gift": GIFTS, "used": sorted(set(GIFTS.values())), "he": ("he", "she"), "him": ("him", "her"),
        "nature": NATURES, "home": HOMES, "day": DAYS,
    }  # fmt: skip
    groups = {slot: f"(?:{'|'.join(map(re.escape, options))})" for slot, options in values.items()}
    forms = [form.replace(".", r"\.").format(**groups) for options in SENTENCES.values() for form in options]
    return re.compile(f"(?:{'|'.join(forms)})")


# --- tokenizer and batches -------------------------------------------------------------------------------------------


def make_tokenizer(rng: random.Random) -> Qwen3_5Tokenizer:
    """A byte-level BPE of at most VOCAB entries under the family's own pre-tokenizer: every text can be encoded."""
    blank = Qwen3_5Tokenizer().backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer = blank.normalizer, blank.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - 3, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator((" ".join(make_story(rng)) for _ in range(2000)), trainer)
    model = json.loads(bpe.to_str())["model"]
    merges: Any = [tuple(m) for m in model["merges"]]  # pairs, whatever the annotation says
    tokenizer = Qwen3_5Tokenizer(
        vocab=model["vocab"],
        merges=merges,
        eos_token=CLOSE,
        pad_token=END,
        unk_token=END,
        extra_special_tokens=[OPEN],
        model_max_length=TEXT["max_position_embeddings"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@dataclass(slots=True)
class Corpus:
    """Stories without end, and which of them were told."""

    rng: random.Random
    tokenizer: Qwen3_5Tokenizer
    told: set[str]

    def document(self) -> str:
        """A story as plain text, or, one time in four, as the answer in a chat."""
        story, request = make_story(self.rng)
        self.told.add(story)
        if self.rng.random() < 0.25:
            return f"{OPEN}user\n{request}{CLOSE}\n{OPEN}assistant\n{story}{CLOSE}\n{END}"
        return story + END

    def rows(self) -> Tensor:
        """A batch of rows [BATCH, LENGTH + 1]; each begins where a document begins."""
        rows = []
        for _ in range(BATCH):
            ids: list[int] = []
            while len(ids) <= LENGTH:
                ids += self.tokenizer.encode(self.document())
            rows.append(ids[: LENGTH + 1])
        return torch.tensor(rows)


# --- model and training ----------------------------------------------------------------------------------------------


class MtpHead(nn.Module):
    """The multi-token-prediction head: from the trunk's state at t and the token at t + 1 to the token at t + 2."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        """Make a head for the trunk of this config."""
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(hidden, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(hidden, eps=eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, 3)])  # 3: a layer of full attention
        self.norm = Qwen3_5RMSNorm(hidden, eps=eps)

    def forward(self, embedded: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """The state to put through lm_head, from the tokens at t + 1 and the trunk's state at t, both [B, T, H]."""
        pair = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1)
        n = embedded.shape[1]
        mask = torch.full((n, n), -math.inf).triu(1)[None, None]
        x: Tensor = self.norm(self.layers[0](self.fc(pair), position_embeddings=rotary, attention_mask=mask))
        return x


# Means and spreads as published for real checkpoints of the family; the last column bounds the noise.
GAINS = (
    (r"pre_fc_norm_embedding\.weight$", -0.46, 0.10, (-0.75, 0.2)),
    (r"pre_fc_norm_hidden\.weight$", -0.16, 0.12, (-0.5, 0.5)),
    (r"linear_attn\.norm\.weight$", 0.87, 0.03, (0.78, 0.93)),
    (r"input_layernorm\.weight$", -0.03, 0.12, (-0.45, 0.9)),
    (r"post_attention_layernorm\.weight$", -0.22, 0.07, (-0.45, 0.2)),
    (r"[qk]_norm\.weight$", 0.77, 0.35, (-0.57, 1.9)),
    (r"(^|\.)norm\.weight$", 0.94, 0.40, (-0.3, 1.9)),
)


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> None:
    """Start gains, decay and time step where trained checkpoints have them, every entry different."""
    g = torch.Generator().manual_seed(seed)
    for name, w in module.named_parameters():
        noise = torch.randn(w.shape, generator=g)
        gain = next(((m, s, b) for pattern, m, s, b in GAINS if re.search(pattern, name)), None)
        if gain:
            mean, spread, (low, high) = gain
            w.copy_((mean + spread * noise).clamp(low, high))
        elif name.endswith("A_log"):
            w.copy_(torch.empty_like(w).uniform_(math.log(0.01), math.log(1.0), generator=g))
        elif name.endswith("dt_bias"):
            w.copy_(noise)
        elif name.endswith("conv1d.weight"):
            w.copy_(0.4 * noise)
        elif name.startswith("fc.") or (name.startswith("layers.") and w.dim() == 2):
            w.copy_(w.shape[-1] ** -0.5 * noise)  # the mtp head; the trunk's matrices are as transformers starts them


def make_optimizer(module: nn.Module, rate: float) -> torch.optim.AdamW:
    """AdamW; matrices decay, gains and the like do not."""
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    vectors = [p for p in module.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))


def rate_at(step: int, steps: int) -> float:
    """The share of the full learning rate: a short rise, then half a cosine down to a fiftieth."""
    warm = min(1.0, (step + 1) / 30)
    return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def descend(loss: Tensor, module: nn.Module, optimizer: torch.optim.AdamW, rate: float) -> None:
    """One optimiser step."""
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def train_trunk(model: Qwen3_5ForCausalLM, corpus: Corpus) -> None:
    """Train the text model in place."""
    optimizer, begin = make_optimizer(model, 6e-3), time.perf_counter()
    for step in range(STEPS):
        rows = corpus.rows()
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        descend(loss, model, optimizer, 6e-3 * rate_at(step, STEPS))
        if step % 50 == 0 or step == STEPS - 1:
            print(f"trunk  step {step:4d}  loss {loss.item():.3f}  {time.perf_counter() - begin:4.0f} s", flush=True)


def mtp_loss(model: Qwen3_5ForCausalLM, head: MtpHead, rows: Tensor) -> Tensor:
    """Mean loss of the head over the rows [B, n + 2], the trunk frozen."""
    n = rows.shape[1] - 2
    with torch.no_grad():
        hidden = model.model(input_ids=rows[:, :n], use_cache=False).last_hidden_state
        embedded = model.model.embed_tokens(rows[:, 1 : n + 1])
        positions = torch.arange(n).view(1, 1, -1).expand(3, rows.shape[0], -1)
        rotary = model.model.rotary_emb(hidden, positions)
    return F.cross_entropy(model.lm_head(head(embedded, hidden, rotary)).flatten(0, 1), rows[:, 2:].flatten())


def train_mtp(model: Qwen3_5ForCausalLM, head: MtpHead, corpus: Corpus) -> None:
    """Train the head in place; the trunk stays as it is."""
    model.requires_grad_(False)
    optimizer = make_optimizer(head, 4e-3)
    for step in range(MTP_STEPS):
        loss = mtp_loss(model, head, corpus.rows())
        descend(loss, head, optimizer, 4e-3 * rate_at(step, MTP_STEPS))
        if step % 40 == 0 or step == MTP_STEPS - 1:
            print(f"mtp    step {step:4d}  loss {loss.item():.3f}", flush=True)


# --- export ----------------------------------------------------------------------------------------------------------


def keeps_float32(name: str) -> bool:
    """Whether the official releases store this tensor as float32."""
    return name.endswith(("A_log", "linear_attn.norm.weight"))


def export(model: Qwen3_5ForCausalLM, head: MtpHead, tokenizer: Qwen3_5Tokenizer, folder: Path) -> None:
    """Write the checkpoint folder: weights in two shards, index, configs, tokenizer, card and licence."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    ends = [tokenizer.convert_tokens_to_ids(t) for t in (CLOSE, END)]
    text = Qwen3_5TextConfig(**TEXT, eos_token_id=ends[1])
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": text.hidden_size}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    whole = Qwen3_5ForConditionalGeneration(config)
    del whole.model.visual
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.lm_head.load_state_dict(model.lm_head.state_dict())
    for name, w in whole.named_parameters():
        if not keeps_float32(name):
            w.data = w.data.to(torch.bfloat16)
    config.dtype = text.dtype = torch.bfloat16  # only now: a model made under it would round what stays float32
    whole.generation_config = transformers.GenerationConfig.from_dict(
        {"eos_token_id": ends, "pad_token_id": ends[1], "do_sample": False}
    )
    whole.save_pretrained(folder, max_shard_size="400KB")
    tokenizer.save_pretrained(folder, save_jinja_files=False)

    mtp = {f"mtp.{k}": v.detach().to(torch.bfloat16).contiguous() for k, v in head.state_dict().items()}
    finish_shards(folder, mtp)
    path = folder / "config.json"
    written = json.loads(path.read_text())
    for key in ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        del written[key]
    path.write_text(json.dumps(written, indent=2) + "\n")
    (folder / "README.md").write_text(CARD)
    (folder / "LICENSE").write_text(LICENSE)


def finish_shards(folder: Path, mtp: dict[str, Tensor]) -> None:
    """Give the shards their official names and put the mtp head into the last one, index included."""
    shards = sorted(folder.glob("model-*.safetensors"))
    named: dict[str, str] = {}
    total = 0
    for i, shard in enumerate(shards, 1):
        tensors = load_file(shard) | (mtp if i == len(shards) else {})
        official = f"model.safetensors-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / official, metadata={"format": "pt"})
        shard.unlink()
        named |= dict.fromkeys(tensors, official)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(named.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


CARD = """\
---
license: mit
language: en
pipeline_tag: text-generation
---

# A tiny storyteller

A Qwen3.5-architecture text model of 0.8 MB, trained by `scripts/train_tiny.py` of qwen35conv on stories that the same
script makes up. It knows that world and nothing else; it exists so that a conversion can be tried, tested and judged
by what the model says.

Weights are in the raw generation, as transformers exports it: names `model.language_model.*`, convolutions
`[C, 1, K]`, norm gains stored as gamma - 1, and a trained multi-token-prediction head under `mtp.*`. There is no vision
tower.
"""

LICENSE = """\
MIT License

Copyright (c) 2026 the qwen35conv authors

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


# --- the checks, on what the folder holds ----------------------------------------------------------------------------


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every stored tensor, by its stored name and in its stored dtype."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def load_trunk(folder: Path) -> Qwen3_5ForCausalLM:
    """The text model as transformers loads the folder, weights read as float32."""
    model: Qwen3_5ForCausalLM = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


@torch.no_grad()
def round_gains(model: Qwen3_5ForCausalLM) -> None:
    """Make every zero-centred gain what bfloat16(1 + delta) leaves of it, as a conversion stores it."""
    for module in model.modules():
        if isinstance(module, Qwen3_5RMSNorm):
            module.weight.copy_((1 + module.weight).to(torch.bfloat16).float() - 1)


@torch.no_grad()
def losses(model: Qwen3_5ForCausalLM, rows: list[Tensor], shift: float) -> list[float]:
    """Mean loss of each row [1, T] with `shift` added to every zero-centred gain (0 is the right fold)."""
    gains = [m.weight for m in model.modules() if isinstance(m, Qwen3_5RMSNorm)]
    for w in gains:
        w.add_(shift)
    out = [F.cross_entropy(model(input_ids=r, use_cache=False).logits[0, :-1], r[0, 1:]).item() for r in rows]
    for w in gains:
        w.sub_(shift)
    return out


@torch.no_grad()
def continue_text(model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """What the model says after the text, always the likeliest token, up to an end token or 120 tokens."""
    ids = tokenizer.encode(text)
    ends = {tokenizer.convert_tokens_to_ids(t) for t in (END, CLOSE)}
    begin = len(ids)
    while len(ids) < begin + 120 and ids[-1] not in ends:
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return str(tokenizer.decode(ids[begin:]))


def is_story(said: str, sentence: re.Pattern[str]) -> tuple[bool, str]:
    """Whether a continuation is whole sentences of the world and then an end token, and its text without that."""
    told = said.removesuffix(END).removesuffix(CLOSE).strip()
    return bool(told) and said.endswith((END, CLOSE)) and not sentence.sub("", told).strip(), told


@dataclass(slots=True)
class Checks:
    """A running list of verdicts, printed as they come."""

    failed: int = 0

    def say(self, good: bool, what: str) -> None:
        """Print one verdict and remember a bad one."""
        print(f"{'ok  ' if good else 'FAIL'} {what}")
        self.failed += not good


def check_gains(checks: Checks, folder: Path) -> None:
    """The stored gains look like those of real raw exports: spread, negatives, off the 1/256 grid, gamma positive."""
    tensors = read_tensors(folder)
    trunk = {k: v.float() for k, v in tensors.items() if not k.startswith("mtp.")}
    anchors = [v for k, v in trunk.items() if k.endswith("_layernorm.weight")]
    stats = [
        (w.mean().item(), w.std().item(), (w < 0).float().mean().item(), (w * 256 % 1 != 0).float().mean().item())
        for w in anchors
    ]
    means, spreads, negatives, off_grid = (sorted(s) for s in zip(*stats, strict=True))
    print(
        f"     {len(anchors)} anchors: means {means[0]:.3f} to {means[-1]:.3f}, spreads from {spreads[0]:.3f}, "
        f"negatives from {negatives[0]:.0%}, off the 1/256 grid from {off_grid[0]:.0%}"
    )
    checks.say(means[-1] < 0.35 and means[0] > -0.35, "every layer norm's mean is within 0.35 of zero")
    checks.say(spreads[0] > 0.03 and negatives[0] > 0.05 and off_grid[0] > 0.05, "spread, negatives and grid as raw")
    zero_centred = [v.float() for k, v in tensors.items() if "norm" in k and "linear_attn" not in k]
    low = min(v.min().item() for v in zero_centred)
    checks.say(low > -1, f"every gamma is positive (lowest {1 + low:.3f})")
    heads = [v for k, v in tensors.items() if k.endswith(("A_log", "dt_bias"))]
    checks.say(all(len(set(v.tolist())) == len(v) for v in heads), "A_log and dt_bias differ from head to head")
    gated = [v.mean().item() for k, v in tensors.items() if k.endswith("linear_attn.norm.weight")]
    checks.say(min(gated) > 0.5 and max(gated) < 1.3, f"gated norms average {min(gated):.3f} to {max(gated):.3f}")


def check(data: Path) -> int:
    """Judge the files in `data`; the number of checks that failed."""
    checks, folder = Checks(), data / "tiny"
    model, tokenizer = load_trunk(folder), transformers.AutoTokenizer.from_pretrained(folder)
    check_gains(checks, folder)

    prompts = (data / "tiny-prompts.txt").read_text().splitlines()
    rows = [torch.tensor([tokenizer.encode(p)]) for p in prompts]
    right, more, less = (losses(model, rows, shift) for shift in (0, 1, -1))
    print("     nats a token   right   gains+1  gains-1")
    for r, m, s in zip(right, more, less, strict=True):
        print(f"                   {r:6.3f}   {m:6.3f}   {s:6.3f}")
    checks.say(len(set(prompts)) == 10, "ten different prompts")
    checks.say(max(right) < 1.5, f"the right fold reads them: at most {max(right):.3f} nats a token")
    margin = min(min(m, s) - r for r, m, s in zip(right, more, less, strict=True))
    checks.say(margin > 1, f"both wrong folds are told apart on each: by {margin:.3f} nats a token at least")

    sentence, good, kept = sentence_pattern(), 0, 0
    for prompt in prompts:
        begin = " ".join(re.findall(r"[^.]*\.", prompt)[:2]).replace("  ", " ")
        said = continue_text(model, tokenizer, begin)
        fluent, told = is_story(said, sentence)
        good += fluent
        kept += bool(re.search(r"met (\w+) the .*\. \1 was glad", told))
        print(f"     {begin}\n     -> {said}")
    checks.say(good == len(prompts), f"{good} of {len(prompts)} continuations are sentences of the world, and end")
    print(f"     {kept} of them keep the friend's name")
    request = [{"role": "user", "content": "Tell me about Vera the otter."}]
    asked = str(tokenizer.apply_chat_template(request, tokenize=False, add_generation_prompt=True))
    said = continue_text(model, tokenizer, asked)
    print(f"     {asked!r}\n     -> {said}")
    first = set(re.findall(r"\w+", said.split(".")[0]))
    checks.say(is_story(said, sentence)[0], "the answer in a chat is a story of the world, and ends")
    print(f"     of the request it takes up {sorted({'Vera', 'otter'} & first)}")

    head = MtpHead(model.config)
    head.load_state_dict({k[4:]: v.float() for k, v in read_tensors(folder).items() if k.startswith("mtp.")})
    with torch.no_grad():
        drafts = [mtp_loss(model, head, r).item() for r in rows]
    checks.say(max(drafts) < 1.5, f"the mtp head reads one token further: at most {max(drafts):.3f} nats a token")

    stored = load_file(data / "tiny-logits.safetensors")
    with torch.no_grad():
        off = (model(input_ids=stored["input_ids"].long()).logits - stored["logits"]).abs().max().item()
        round_gains(model)
        off_rounded = (model(input_ids=stored["input_ids"].long()).logits - stored["logits_rounded"]).abs().max().item()
        gap = (stored["logits"] - stored["logits_rounded"]).abs().max().item()
    checks.say(max(off, off_rounded) < 1e-3, f"stored logits are the model's (off by {max(off, off_rounded):.1e})")
    print(f"     rounding gamma to bfloat16 moves a logit by up to {gap:.3f}")
    n_bytes = sum(f.stat().st_size for f in folder.iterdir())
    n_weights = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    checks.say(n_weights < 900_000, f"{n_weights:,} bytes of weights, {n_bytes:,} in the folder")
    return checks.failed


def write_references(data: Path, rng: random.Random, told: set[str]) -> None:
    """Write the ten held-out prompts, and the logits of the beginning of one more."""
    prompts: list[str] = []
    while len(prompts) < 11:
        story, _ = make_story(rng)
        if story not in told and story not in prompts:
            prompts.append(story)
    (data / "tiny-prompts.txt").write_text("\n".join(prompts[:10]) + "\n")
    model, tokenizer = load_trunk(data / "tiny"), transformers.AutoTokenizer.from_pretrained(data / "tiny")
    ids = torch.tensor([tokenizer.encode(prompts[10])[:22]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits.contiguous()
        round_gains(model)
        rounded = model(input_ids=ids).logits.contiguous()
    tensors = {"input_ids": ids.int(), "logits": logits, "logits_rounded": rounded}
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    save_file(tensors, data / "tiny-logits.safetensors", metadata=versions)


def train(data: Path) -> None:
    """Train, export and write the references."""
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    tokenizer = make_tokenizer(rng)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TEXT))
    randomise(model, SEED)
    head = MtpHead(model.config)
    randomise(head, SEED + 1)
    begin = {k: v.detach().clone() for m in (model, head) for k, v in m.named_parameters() if v.dim() == 1}
    corpus = Corpus(rng, tokenizer, set())
    train_trunk(model, corpus)
    train_mtp(model, head, corpus)
    named = [item for m in (model, head) for item in m.named_parameters()]
    moved = [(v.detach() - begin[k]).abs().mean().item() for k, v in named if k in begin]
    print(f"gains, A_log and dt_bias moved by {min(moved):.3f} to {max(moved):.3f} in the mean of their entries")
    export(model, head, tokenizer, data / "tiny")
    write_references(data, random.Random(SEED + 2), corpus.told)


def main() -> int:
    """Train unless told only to check; 1 when a check fails."""
    parser = argparse.ArgumentParser(description="Train, export and check the tiny model of the tests and the demo.")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder to write tiny/ and its references into")
    parser.add_argument("--check", action="store_true", help="only check what is there")
    args = parser.parse_args()
    torch.set_num_threads(2)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if not args.check:
        train(args.data)
    return 1 if check(args.data) else 0


if __name__ == "__main__":
    sys.exit(main())
