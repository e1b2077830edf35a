"""Verification: each step passes on what is right, and fails on the fault that it is there for."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from model_draws import oracle
from safetensors.numpy import save_file
from tiny import BF16, SPARSE, Made, Sizes, make, save
from tokenizers import Tokenizer, models, pre_tokenizers

from qwen35conv.errors import SourceError
from qwen35conv.facts.checkpoint import Checkpoint
from qwen35conv.kernels import gated_delta
from qwen35conv.model.decoder import load_decoder
from qwen35conv.model.gated_delta_net import DeltaCache, GatedDeltaNet
from qwen35conv.model.weights import Weights
from qwen35conv.planning.plan import Plan, make_plan
from qwen35conv.reading import read_checkpoint
from qwen35conv.source import Source, open_source
from qwen35conv.verify import (
    QUICK,
    Check,
    Original,
    RunDtype,
    Step,
    VerifyOptions,
    plan_like,
    plan_to_verify,
    verify,
)
from qwen35conv.verify.forward import Scores, run_layers, score
from qwen35conv.verify.prompt import judge_losses
from qwen35conv.verify.reference import read_reference
from qwen35conv.verify.tokens import TextError, encode, read_tokenizer
from qwen35conv.view import open_view

GAINS = ("_layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight", "language_model.norm.weight")
SHARP = Sizes(hidden=40, vocab=60)


def opened(folder: Path) -> tuple[Source, Plan, Checkpoint]:
    source = open_source(str(folder))
    checkpoint = read_checkpoint(source)
    return source, plan_to_verify(checkpoint), checkpoint


def run(folder: Path, **options: Any) -> dict[str, Check]:
    return {check.name: check for check in verify(*opened(folder), VerifyOptions(**options)).checks}


def raw(folder: Path, made: Made) -> Path:
    return save(folder, made.raw, made.config)


def canonical(folder: Path, made: Made, changed: Mapping[str, np.ndarray] | None = None) -> Path:
    return save(folder, {**made.canonical, **(changed or {})}, made.config, metadata={"format": "mlx"})


def moved(tensors: Mapping[str, np.ndarray], by: float) -> dict[str, np.ndarray]:
    """The same tensors with `by` added to every gain that a raw export stores shifted."""
    return {
        name: (x.astype(np.float32) + by).astype(x.dtype) if x.ndim == 1 and name.endswith(GAINS) else x
        for name, x in tensors.items()
    }


def sharp(seed: int = 5) -> Made:
    """A model that is sure of what comes next, so that its own text makes sense to it."""
    made = make(SHARP, seed=seed, vision=False, mtp=False)
    for tensors, name in ((made.raw, "lm_head.weight"), (made.canonical, "language_model.lm_head.weight")):
        tensors[name] = (tensors[name].astype(np.float32) * 8).astype(BF16)
    return made


def own_text(folder: Path, n_tokens: int = 40) -> tuple[int, ...]:
    """What the model says, each token drawn from its own distribution."""
    source, plan, checkpoint = opened(folder)
    decoder = load_decoder(checkpoint.config, Weights(open_view(source, plan), {}), tied=plan.tied, keep=True)
    cache, random, tokens = decoder.make_cache(), np.random.default_rng(0), [3]
    while len(tokens) < n_tokens:
        logits = np.array(decoder(np.array([tokens[-1:]]), cache)[0, -1].astype(mx.float32), dtype=np.float64)
        chances = np.exp(logits - logits.max())
        tokens.append(int(random.choice(len(chances), p=chances / chances.sum())))
    return tuple(tokens)


@pytest.mark.parametrize("sizes", [Sizes(), SPARSE])
def test_a_raw_source_and_its_canonical_form_pass_every_step(tmp_path: Path, sizes: Sizes) -> None:
    made = make(sizes)
    source, plan, _ = opened(raw(tmp_path / "raw", made))
    result = opened(canonical(tmp_path / "canonical", made))
    options = VerifyOptions(deep=True, tokens=tuple(range(9, 30)))
    for triple, more in ((result, Original(source, plan)), (opened(tmp_path / "raw"), None)):
        found = verify(*triple, replace(options, original=more))
        assert found.exit_code == 0
        wanted = {"structure", "values", "kernel", "prompt", "invariants", "serving"} | ({"source"} if more else set())
        assert {check.name for check in found.checks} == wanted
        assert [check.name for check in found.checks if check.passed is not True] == ["prompt"]  # untrained weights


def test_the_quick_steps_are_three(tmp_path: Path) -> None:
    found = run(raw(tmp_path, make()), steps=QUICK, tokens=(1, 2, 3), deep=True)
    assert list(found) == ["structure", "values", "kernel"]


def test_a_plan_without_one_tensor_fails_the_structure(tmp_path: Path) -> None:
    source, plan, checkpoint = opened(raw(tmp_path, make()))
    first, *others = plan.shards
    cut = replace(first, writes=first.writes[1:])
    found = verify(source, replace(plan, shards=(cut, *others)), checkpoint, VerifyOptions(steps=(Step.STRUCTURE,)))
    assert found.exit_code == 1
    assert first.writes[0].name in found.checks[0].summary


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_value_that_is_not_finite_is_found(tmp_path: Path, bad: float) -> None:
    made = make()
    name = "language_model.model.layers.2.mlp.down_proj.weight"
    weight = made.canonical[name].copy()
    weight[5, 3] = bad
    found = run(canonical(tmp_path, made, {name: weight}), steps=(Step.VALUES,))["values"]
    assert found.passed is False
    assert name in found.summary


def test_a_sample_looks_at_part_of_a_large_tensor_and_deep_at_all(tmp_path: Path) -> None:
    made = make(Sizes(vocab=20_000), tied=True)
    name = "language_model.model.embed_tokens.weight"
    weight = made.canonical[name].copy()
    weight[5_000, 3] = np.nan  # 240 KB in, where no sample of 64 KB lies
    folder = canonical(tmp_path, made, {name: weight})
    assert run(folder, steps=(Step.VALUES,))["values"].passed is True
    found = run(folder, steps=(Step.VALUES,), deep=True)["values"]
    assert found.passed is False
    assert dict(found.details)["bytes looked at"] > dict(found.details).get("bytes sampled", 0)  # type: ignore[operator]


@pytest.mark.parametrize(("by", "generation"), [(1, "double-shifted"), (-1, "never-shifted")])
def test_broken_gains_fail_and_are_named(tmp_path: Path, by: float, generation: str) -> None:
    made = make()
    found = verify(*opened(canonical(tmp_path, made, moved(made.canonical, by))))
    assert found.exit_code == 1
    (failed,) = (check for check in found.checks if check.passed is False)
    assert failed.name == "values"
    assert generation in failed.summary
    assert "norm gains" in failed.summary


@pytest.mark.parametrize("case", ["broken-double-shifted", "broken-never-shifted", "broken-raw-names-gamma"])
def test_broken_exports_fail_and_the_gains_are_named(case: str) -> None:
    found = verify(*opened(oracle(case) / "src"))
    assert found.exit_code == 1
    assert any("norm gains" in check.summary for check in found.checks if check.passed is False)


def test_one_flipped_bit_is_found_against_the_source(tmp_path: Path) -> None:
    made = make(SPARSE, experts="single")
    source, plan, _ = opened(raw(tmp_path / "raw", made))
    n_bytes = sum(x.nbytes for x in made.canonical.values())
    options = {"steps": (Step.SOURCE,), "original": Original(source, plan)}
    right = run(canonical(tmp_path / "right", made), **options)["source"]
    assert right.passed is True
    assert dict(right.details)["bytes compared"] == n_bytes
    name = "language_model.model.layers.1.mlp.switch_mlp.up_proj.weight"
    flipped = made.canonical[name].copy()
    flipped.view(np.uint16)[4, 1, 2] ^= 1
    wrong = run(canonical(tmp_path / "wrong", made, {name: flipped}), **options)["source"]
    assert wrong.passed is False
    assert name in wrong.summary


def test_a_source_is_compared_under_the_options_of_its_result(tmp_path: Path) -> None:
    made = make(mtp=False)
    folder = raw(tmp_path / "raw", made)
    source, _, checkpoint = opened(folder)
    exact = {
        name: made.raw[stored].astype(np.float32) + 1
        for stored, name in ((n, n.replace("model.language_model", "language_model.model")) for n in made.raw)
        if made.raw[stored].ndim == 1 and name.endswith(GAINS)
    }
    result = opened(canonical(tmp_path / "exact", made, exact))
    original = Original(source, plan_like(checkpoint, result[1]))
    found = verify(*result, VerifyOptions(steps=(Step.SOURCE,), original=original))
    assert found.checks[0].passed is True, found.checks[0].summary


@pytest.mark.parametrize("dtype", list(RunDtype))
def test_the_kernel_check_passes_in_every_dtype(tmp_path: Path, dtype: RunDtype) -> None:
    found = run(raw(tmp_path, make()), steps=(Step.KERNEL,), dtype=dtype, backend="ops")["kernel"]
    assert found.passed is True, found
    assert dict(found.details)["backend"] == "ops"


def test_the_kernel_check_fails_where_a_run_forgets_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(*args: mx.array, backend: str) -> tuple[mx.array, mx.array]:
        q, k, v, g, beta, state = args
        return gated_delta(q, k, v, g, beta, state * 0.99, backend=backend)

    monkeypatch.setattr("qwen35conv.verify.kernel_check.gated_delta", forgetful)
    found = run(raw(tmp_path, make()), steps=(Step.KERNEL,), dtype=RunDtype.FLOAT32)["kernel"]
    assert found.passed is False
    assert "float64" in found.summary


def test_a_text_that_makes_sense_proves_the_gains_right(tmp_path: Path) -> None:
    made = sharp()
    folder = raw(tmp_path, made)
    found = run(folder, steps=(Step.PROMPT,), tokens=own_text(folder), max_new_tokens=6)["prompt"]
    assert found.passed is True, found.summary
    details = dict(found.details)
    assert details["loss per token"] < details["ln(vocabulary)"]  # type: ignore[operator]
    assert len(str(details["continuation"]).split()) == 6


@pytest.mark.parametrize(("by", "told"), [(-1, "one shift short"), (1, "shifted once too often")])
def test_a_text_that_makes_more_sense_with_other_gains_fails(tmp_path: Path, by: float, told: str) -> None:
    made = sharp()
    text = own_text(raw(tmp_path / "raw", made))
    broken = canonical(tmp_path / "broken", made, moved(made.canonical, by))
    found = run(broken, steps=(Step.PROMPT,), tokens=text)["prompt"]
    assert found.passed is False
    assert told in found.summary


def test_the_counterfactual_moves_the_gains_a_shifted_file_would_have(tmp_path: Path) -> None:
    made = make(gain_dtype=np.dtype("f4"))
    ids = np.arange(8, 25)[None]
    losses: dict[tuple[float, float], float] = {}
    for by in (0, 1, -1):
        source, plan, checkpoint = opened(canonical(tmp_path / str(by), made, moved(made.canonical, by)))
        decoder = load_decoder(checkpoint.config, Weights(open_view(source, plan), {}), tied=plan.tied)
        scores = score(decoder, run_layers(decoder, ids, (0.0, 1.0, -1.0)).hidden, ids)
        losses |= {(by, shift): s.loss for shift, s in scores.items()}
    assert losses[0, 1] == pytest.approx(losses[1, 0], abs=1e-4)
    assert losses[0, -1] == pytest.approx(losses[-1, 0], abs=1e-4)
    assert abs(losses[0, 0] - losses[1, 0]) > 1e-3


def test_scores_are_those_of_a_plain_softmax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, plan, checkpoint = opened(raw(tmp_path, make(seed=8)))
    monkeypatch.setattr("qwen35conv.model.decoder.HEAD_SLICE", 400)  # eight rows at a time
    decoder = load_decoder(checkpoint.config, Weights(open_view(source, plan), {}, mx.float32), tied=plan.tied)
    ids = np.arange(20, 33)[None]
    found = score(decoder, {0.0: decoder.hidden(ids)}, ids)[0.0]
    logits = np.array(decoder(ids)[0], dtype=np.float64)
    chances = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    assert found.losses == pytest.approx(-np.log(chances[np.arange(12), ids[0, 1:]]), abs=1e-5)
    best = np.argsort(-chances[-1])[:5]
    assert [token for token, _ in found.top] == best.tolist()
    assert [chance for _, chance in found.top] == pytest.approx(chances[-1][best], rel=1e-4)


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ((2.0, 7.0, 9.0), True),
        ((7.0, 2.0, 9.0), False),
        ((7.0, 9.0, 2.0), False),
        ((0.3, 0.6, 5.0), True),  # a text known by heart
        ((0.6, 0.3, 5.0), False),
        ((9.8, 9.9, 11.0), None),  # nothing makes sense
        ((2.0, 2.1, 9.0), None),  # too close
        ((math.nan, 2.0, 2.0), None),  # a single token
    ],
)
def test_the_counterfactual_judges_by_clear_differences(
    losses: tuple[float, float, float], verdict: bool | None
) -> None:
    scores = {by: Scores(np.full(9, loss), (), True) for by, loss in zip((0.0, 1.0, -1.0), losses, strict=True)}
    assert judge_losses(scores, uniform=10.0)[0] is verdict


def test_a_few_tokens_fail_no_checkpoint() -> None:
    scores = {by: Scores(np.full(3, loss), (), True) for by, loss in ((0.0, 7.0), (1.0, 2.0), (-1.0, 9.0))}
    assert judge_losses(scores, uniform=10.0)[0] is None


def test_a_forward_pass_that_overflows_fails(tmp_path: Path) -> None:
    made = make(vision=False, mtp=False)
    name = "language_model.lm_head.weight"
    folder = canonical(tmp_path, made, {name: made.canonical[name] * BF16.type(3e38)})
    found = run(folder, steps=(Step.PROMPT,), tokens=(1, 2, 3, 4))["prompt"]
    assert found.passed is False
    assert "infinity" in found.summary


def test_without_a_text_the_prompt_step_cannot_judge(tmp_path: Path) -> None:
    found = run(raw(tmp_path, make()), steps=(Step.PROMPT,))["prompt"]
    assert found.passed is None


def test_tokens_that_the_model_has_not_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="token 50 "):
        run(raw(tmp_path, make()), steps=(Step.PROMPT,), tokens=(49, 50))


def with_tokenizer(folder: Path, **config: str) -> Path:
    words = {word: i for i, word in enumerate(("<unk>", "<user>", "<answer>", "the", "mill", "turns", "slowly"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_prompt_goes_through_the_checkpoint_s_tokenizer_and_chat_template(tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="chat templates need jinja2")
    template = "<user> {{ messages[0]['content'] }}{% if add_generation_prompt %} <answer>{% endif %}"
    source = open_source(str(with_tokenizer(raw(tmp_path, make()), chat_template=template)))
    tokenizer = read_tokenizer(source)
    assert encode(source, tokenizer, "the mill turns", chat=False) == (3, 4, 5)
    assert encode(source, tokenizer, "the mill turns", chat=True) == (1, 3, 4, 5, 2)
    found = run(tmp_path, steps=(Step.PROMPT,), prompt="the mill turns slowly")["prompt"]
    assert dict(found.details)["tokens"] == 4


ATTACKS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ self._TemplateReference__context.eval_ctx.environment.loader.x }}",
    "{{ messages.append(1) }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ ('x' | attr('__class__')).mro() }}",
    "{% for i in range(10 ** 12) %}x{% endfor %}",
    "{% for i in range(1000000000) %}x{% endfor %}",
    "{{ 'x' * 1000000000000 }}",
    "{{ [0] * 1000000 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ '%1000000000000d' % 1 }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ raise_exception('no') }}",
    "{{ 1 / 0 }}",
    "{{ messages[0].absent.deeper }}",
    "{% if %}",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_chat_template_runs_in_a_sandbox(attack: str, tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="chat templates need jinja2")
    source = open_source(str(with_tokenizer(raw(tmp_path, make()), chat_template=attack)))
    with pytest.raises(TextError, match="chat template fails"):
        encode(source, read_tokenizer(source), "the mill", chat=True)


def test_a_prompt_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"no tokenizer\.json"):
        run(raw(tmp_path, make()), steps=(Step.PROMPT,), prompt="the mill")


@pytest.mark.parametrize("case", ["raw-dense-vl-mtp", "raw-moe-text-per-expert"])
def test_reference_logits_of_transformers_are_met_in_float32(case: str) -> None:
    folder = oracle(case)
    options = {"steps": (Step.REFERENCE,), "reference": folder / "logits.safetensors", "dtype": RunDtype.FLOAT32}
    found = run(folder / "src", **options)["reference"]
    assert found.passed is True, found.summary
    assert dict(found.details)["equal first choices"] == 1.0
    assert run(folder / "src", **options, atol=1e-6)["reference"].passed is False


def test_reference_logits_of_another_model_fail_or_are_refused(tmp_path: Path) -> None:
    folder = raw(tmp_path / "raw", make())
    random = np.random.default_rng(1)
    ids = np.arange(10, dtype=np.int32)[None]
    for n_rows, name in ((50, "wrong"), (51, "misshapen")):
        logits = random.standard_normal((1, 10, n_rows)).astype(np.float32)
        save_file({"input_ids": ids, "logits": logits}, tmp_path / name)
    found = run(folder, steps=(Step.REFERENCE,), reference=tmp_path / "wrong")["reference"]
    assert found.passed is False
    with pytest.raises(SourceError, match="expected input_ids"):
        run(folder, steps=(Step.REFERENCE,), reference=tmp_path / "misshapen")


@pytest.mark.parametrize(
    ("ids", "told"),
    [([[50]], "token 50 is not"), ([[-1]], "token -1 is not"), ([[2**40]], f"token {2**40} is not"),
     (np.zeros((1, 0), np.int32), "one token id and more"), (np.zeros((0, 3), np.int32), "one token id and more"),
     (np.zeros((1, 3), np.float32), "one token id and more")],
)  # fmt: skip
def test_a_reference_to_tokens_that_are_none_is_refused(tmp_path: Path, ids: Any, told: str) -> None:
    ids = np.asarray(ids)
    save_file({"input_ids": ids, "logits": np.zeros((*ids.shape, 50), np.float32)}, tmp_path / "reference")
    with pytest.raises(SourceError, match=told):
        read_reference(tmp_path / "reference", 50)


def test_a_prompt_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="not valid Unicode"):
        run(TINY, steps=(Step.PROMPT,), prompt="a\udcff")


def test_a_chat_template_may_be_one_of_several(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "tiny")
    templates = [{"name": "tool", "template": "x"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    (tmp_path / "tiny" / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    chat = run(tmp_path / "tiny", steps=(Step.PROMPT,), prompt="Vera took a kettle", chat=True)["prompt"]
    plain = run(tmp_path / "tiny", steps=(Step.PROMPT,), prompt="Vera took a kettle")["prompt"]
    assert chat.details == plain.details


def test_the_invariants_fail_where_padding_reaches_the_convolution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = GatedDeltaNet.__call__

    def careless(self: GatedDeltaNet, x: mx.array, span: Any, cache: DeltaCache | None = None) -> mx.array:
        y = plain(self, x, span, cache)
        if cache is not None and cache.tail is not None:
            cache.tail = mx.zeros_like(cache.tail)
        return y

    monkeypatch.setattr(GatedDeltaNet, "__call__", careless)
    found = run(raw(tmp_path, make()), steps=(Step.INVARIANTS,), deep=True)["invariants"]
    assert found.passed is False
    assert "token by token" in found.summary


@pytest.mark.parametrize(
    ("module", "n_run"),
    [
        ("language_model.model.layers.2.mlp.up_proj", 2),
        ("language_model.lm_head", 4),
        ("language_model.model.embed_tokens", 0),
    ],
)
def test_a_module_in_a_foreign_mode_stops_the_pass_there_and_is_named(tmp_path: Path, module: str, n_run: int) -> None:
    made = make(vision=False, mtp=False)
    tensors = dict(made.canonical)
    tensors[f"{module}.trellis"] = np.arange(12, dtype=np.uint16)
    del tensors[f"{module}.weight"]
    quantization = {"group_size": 64, "bits": 4, "mode": "affine", module: {"mode": "trellis", "bits": 3}}
    folder = save(tmp_path, tensors, {**made.config, "quantization": quantization}, metadata={"format": "mlx"})
    found = verify(*opened(folder), VerifyOptions(tokens=(3, 4, 5, 6), deep=True))
    assert found.exit_code == 0
    checks = {check.name: check for check in found.checks}
    assert checks["kernel"].passed is True  # layer 0 is plain
    assert checks["prompt"].passed is None
    assert dict(checks["prompt"].details)["layers run"] == n_run
    assert dict(checks["prompt"].details)["modules that can't be run"] == module
    assert checks["invariants"].passed is (True if n_run == 4 else None)


def test_streaming_and_memory_give_the_same_losses(tmp_path: Path) -> None:
    folder = raw(tmp_path, make(SPARSE))
    kept, streamed = (
        run(folder, steps=(Step.PROMPT,), tokens=(3, 9, 27, 31, 43), max_memory=n, max_new_tokens=5)["prompt"]
        for n in (1 << 30, 0)
    )
    assert kept == streamed


def test_a_vocabulary_of_one_token_is_not_judged(tmp_path: Path) -> None:
    found = run(raw(tmp_path, make(Sizes(vocab=1))), steps=(Step.PROMPT,), tokens=(0, 0, 0))["prompt"]
    assert (found.passed, found.summary) == (None, "a vocabulary of one token has no loss")


def test_progress_is_told_for_each_layer(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    options = VerifyOptions(steps=(Step.PROMPT,), tokens=(1, 2))
    verify(*opened(raw(tmp_path, make())), options, lambda *event: told.append(event))
    assert told == [("layers", i, 4) for i in (1, 2, 3, 4)]


def test_plans_made_for_broken_checkpoints_keep_the_verdict(tmp_path: Path) -> None:
    made = make()
    checkpoint = opened(canonical(tmp_path, made, moved(made.canonical, 1)))[2]
    assert plan_to_verify(checkpoint).shift == 0
    assert not plan_to_verify(checkpoint).verdict.converts
    right = opened(raw(tmp_path / "raw", made))[2]
    assert plan_to_verify(right) == make_plan(right)


TINY = Path(__file__).parent / "data" / "tiny"
TINY_PROMPTS = Path(__file__).parent / "data" / "tiny-prompts.txt"


@pytest.mark.skipif(not TINY.is_dir(), reason="the tiny trained model is not in tests/data")
@pytest.mark.parametrize("line", range(10))
def test_a_trained_model_tells_the_right_fold_from_both_wrong_ones(tmp_path: Path, line: int) -> None:
    prompt = TINY_PROMPTS.read_text(encoding="utf-8").splitlines()[line]
    source, plan, checkpoint = opened(TINY)
    view = open_view(source, plan)
    options = VerifyOptions(steps=(Step.PROMPT,), prompt=prompt, max_new_tokens=0)
    assert verify(source, plan, checkpoint, options).checks[0].passed is True
    tensors = {name: _as_numpy(x) for name, x in view.items()}
    for by, told in ((1, "shifted once too often"), (-1, "one shift short")):
        folder = save(tmp_path / str(by), moved(tensors, by), dict(checkpoint.config.document))
        (folder / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
        source_, plan_, checkpoint_ = opened(folder)
        found = verify(source_, plan_, checkpoint_, options)
        assert found.checks[0].passed is False
        assert told in found.checks[0].summary


def _as_numpy(x: mx.array) -> np.ndarray:
    return np.array(x.view(mx.uint16)).view(BF16) if x.dtype == mx.bfloat16 else np.array(x)


@pytest.mark.skipif(not TINY.is_dir(), reason="the tiny trained model is not in tests/data")
def test_a_trained_model_has_the_logits_that_transformers_gives() -> None:
    reference = TINY.parent / "tiny-logits.safetensors"
    found = run(TINY, steps=(Step.REFERENCE,), reference=reference, dtype=RunDtype.FLOAT32)["reference"]
    assert found.passed is True, found.summary
