"""Job files: three languages, one meaning; what is wrong is told with its line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35conv.batch.job_file import JobFileError
from qwen35conv.batch.jobs import EXAMPLE, Job, read_jobs, take_slice, write_example
from qwen35conv.batch.settings import KEYS, Settings
from qwen35conv.cli import app
from qwen35conv.errors import DestinationError
from qwen35conv.facts.config import ModuleQuantization
from qwen35conv.generation.convention import Generation
from qwen35conv.planning.plan import Mtp, NormDtype

DEFAULTS: dict[str, Any] = {"destination": "out/{name}-mlx", "mtp": "keep", "checksum": True, "max-shard-size": "2KiB"}
JOBS: list[dict[str, Any]] = [
    {"source": "models/a"},
    {"source": "models/b.safetensors", "mtp": "drop", "assume": "raw", "tokens": [3, 1], "atol": 1, "reference": "r"},
    {"source": "owner/name", "destination": "elsewhere/{parent}", "norm-dtype": "float32", "no-verify": True},
]


def toml_value(value: Any) -> str:
    return json.dumps(value)


def as_toml(defaults: dict[str, Any], jobs: list[dict[str, Any]]) -> str:
    lines = [f"{key} = {toml_value(value)}" for key, value in defaults.items()]
    for job in jobs:
        lines += ["", "[[job]]", *(f"{key} = {toml_value(value)}" for key, value in job.items())]
    return "\n".join(lines) + "\n"


def as_yaml(defaults: dict[str, Any], jobs: list[dict[str, Any]]) -> str:
    return yaml.safe_dump({**defaults, "job": jobs}, sort_keys=False)


def as_lines(defaults: dict[str, Any], jobs: list[dict[str, Any]]) -> str:
    first = [json.dumps({"defaults": defaults})] if defaults else []
    return "\n".join([*first, *map(json.dumps, jobs)]) + "\n"


LANGUAGES = {"jobs.toml": as_toml, "jobs.yaml": as_yaml, "jobs.jsonl": as_lines}


def read(folder: Path, name: str, text: str) -> tuple[Job, ...]:
    (folder / name).write_text(text, encoding="utf-8")
    return read_jobs(folder / name)


def error(folder: Path, name: str, text: str) -> JobFileError:
    with pytest.raises(JobFileError) as caught:
        read(folder, name, text)
    assert caught.value.exit_code == 2
    return caught.value


@pytest.mark.parametrize("name", LANGUAGES)
def test_every_language_says_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / "models" / "a").mkdir(parents=True)
    (tmp_path / "r").write_bytes(b"")
    a, b, c = read(tmp_path, name, LANGUAGES[name](DEFAULTS, JOBS))
    assert (a.name, a.source, a.destination) == ("out/a-mlx", str(tmp_path / "models/a"), tmp_path / "out/a-mlx")
    assert (a.settings.options.mtp, a.settings.checksum, a.settings.options.max_shard_bytes) == (Mtp.KEEP, True, 2048)
    assert (b.name, b.settings.options.mtp, b.settings.options.assume) == ("out/b-mlx", Mtp.DROP, Generation.RAW)
    assert b.settings.verifying.tokens == (3, 1)
    assert (b.settings.verifying.atol, b.settings.verifying.reference) == (1.0, tmp_path / "r")
    assert (c.source, c.destination) == ("owner/name", tmp_path / "elsewhere/owner")
    assert (c.settings.options.norm_dtype, c.settings.no_verify) == (NormDtype.FLOAT32, True)
    assert not c.settings.verifying.is_asked


WRONG = {
    "unknown": ({"sauce": 1}, "unknown key 'sauce'", "did you mean source?"),
    "flag": ({"checksum": "yes"}, "checksum: expected true or false, found 'yes'", None),
    "choice": ({"mtp": "maybe"}, "mtp: expected drop or keep or sidecar, found 'maybe'", None),
    "assume": ({"assume": "mixed"}, "assume: expected raw or canonical, found 'mixed'", None),
    "size": ({"max-shard-size": "five"}, "max-shard-size: expected a size such as 5GB", None),
    "number": ({"jobs": 0}, "jobs: expected a number from 1 to 64, found 0", None),
    "token": ({"tokens": [3, -1]}, "tokens: expected a number", None),
    "template": ({"destination": "out/{model}"}, "destination: unknown {model}", "known are {name}, {parent}"),
    "conversion": ({"destination": "out/{name!r:>9}"}, "destination: unknown {name!r:>9}", None),
    "padding": ({"destination": "out/{name:>99999999999}"}, "destination: unknown {name:>99999999999}", None),
    "nobody": ({"destination": "~nobody-here/x"}, "destination: no valid path: ", None),
    "no prompt": ({"prompt-file": "nowhere.txt"}, "prompt-file: no such file: ", None),
    "no reference": ({"reference": "nowhere.safetensors"}, "reference: no such file: ", None),
    "braces": ({"destination": "out/{name"}, "destination: ", None),
    "empty": ({"source": ""}, "source: expected a text, found ''", None),
    "no folder": ({"destination": "/"}, "destination: '/' names no folder", None),
    "converted field": ({"destination": "{name!r}"}, "destination: unknown {name!r}", None),
    "wide field": ({"destination": "{name:>9999999}"}, "destination: unknown {name:>9999999}", None),
    "glob": ({"source": "none/*"}, "source: nothing matches 'none/*'", None),
    "both": ({"prompt": "a", "tokens": "1,2"}, "prompt and tokens exclude each other", None),
    "told twice": ({"repair": True, "assume": "raw"}, "repair and assume exclude each other", None),
    "chat": ({"chat": True}, "chat needs prompt", None),
    "huge": ({"atol": 10**400}, "atol: expected a number from 0 on", None),
    "atol": ({"atol": 0.5}, "atol needs reference", None),
    "unproved": ({"no-verify": True, "deep": True}, "no-verify and deep exclude each other", None),
}


@pytest.mark.parametrize("name", LANGUAGES)
@pytest.mark.parametrize(("keys", "message", "hint"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_told_with_its_line(
    name: str, keys: dict[str, Any], message: str, hint: str | None, tmp_path: Path
) -> None:
    jobs = [{"source": "m/a"}, {"source": "m/b", **keys}, {"source": "m/c"}]
    text = LANGUAGES[name]({"destination": "out/{name}"}, jobs)
    found = error(tmp_path, name, text)
    word = list(keys)[-1]
    others = ("m/a", "m/c") if word != "source" else ("m/a", "m/b", "m/c")
    line = [n for n, row in enumerate(text.splitlines(), 1) if word in row and not any(one in row for one in others)][
        -1
    ]
    assert message in str(found)
    assert str(found).startswith(f"{tmp_path / name}:{line}: ")
    if hint is not None:
        assert hint in (found.hint or "")


@pytest.mark.parametrize("name", LANGUAGES)
def test_an_unknown_default_is_told_with_its_line(name: str, tmp_path: Path) -> None:
    found = error(tmp_path, name, LANGUAGES[name]({"destination": "{name}", "mtpp": "keep"}, JOBS[:1]))
    assert f"{name}:{1 if name.endswith('jsonl') else 2}: unknown key 'mtpp'" in str(found)


@settings(deadline=None, max_examples=60)
@given(
    before=st.lists(
        st.sampled_from(["# surprise = 1", "", 'prompt = """\nsurprise = 2\n"""', "deep = false"]), max_size=4
    ),
    n_jobs=st.integers(1, 4),
    wrong=st.integers(0, 3),
    after=st.sampled_from(["", "# surprise", "checksum = true # surprise"]),
)
def test_the_line_of_an_unknown_toml_key_is_where_it_stands(
    tmp_path_factory: pytest.TempPathFactory, before: list[str], n_jobs: int, wrong: int, after: str
) -> None:
    before = [line for i, line in enumerate(before) if line not in before[:i] or not line.strip("# ")]
    lines = ['destination = "{name}"', "# [[job]]"]
    for i in range(n_jobs):
        lines += ["[[job]]", f'source = "m/{i}"', *before]
        if i == wrong % n_jobs:
            lines.append("surprise = 3")
        lines.append(after)
    text = "\n".join(lines)
    found = error(tmp_path_factory.mktemp("toml"), "jobs.toml", text)
    assert f":{text.splitlines().index('surprise = 3') + 1}: unknown key 'surprise'" in str(found)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("jobs.toml", 'destination = "x"\n[[job]]\nsource = \n', 3),
        ("jobs.yaml", "destination: x\njob:\n  - source: [\n", 4),
        ("jobs.yaml", "job:\n  - source: a\n    source: b\n", 3),
        ("jobs.jsonl", '{"source": "a", "destination": "b"}\n{"source"}\n', 2),
        ("jobs.jsonl", '{"source": "a", "source": "b"}\n', 1),
        ("jobs.jsonl", '{"source": "a", "destination": "b"}\n\n{"defaults": {}}\n', 3),
        ("jobs.jsonl", "[1]\n", 1),
        ("jobs.toml", "destination = 'x'\njob = 3\n", 2),
        ("jobs.yaml", "destination: x\njob: 3\n", 2),
        ("jobs.yaml", "job:\n  - source: a\n  - text\n", 3),
        ("jobs.toml", "[[job]]\ndestination = 'x'\n", 1),
    ],
)
def test_what_is_no_document_is_told_with_its_line(name: str, text: str, line: int, tmp_path: Path) -> None:
    assert str(error(tmp_path, name, text)).startswith(f"{tmp_path / name}:{line}: ")


@pytest.mark.parametrize(
    ("name", "text"), [("jobs.toml", ""), ("jobs.yaml", "{}"), ("jobs.yaml", ""), ("jobs.jsonl", "\n"), ("j.ini", "x")]
)
def test_a_file_without_jobs_is_an_error(name: str, text: str, tmp_path: Path) -> None:
    assert error(tmp_path, name, text).hint


ENDLESS = {
    "lists too deep": ("jobs.toml", "x = " + "[" * 5000 + "]" * 5000),
    "a number too long": ("jobs.toml", "x = " + "9" * 5000),
    "lists too deep in YAML": ("jobs.yaml", "job: " + "[" * 3000 + "]" * 3000),
    "a date that is none": ("jobs.yaml", "job:\n  - source: m/a\n    jobs: 2020-13-45\n"),
    "a NUL": ("jobs.yaml", "job:\n  - source: a\0b\n"),
    "a NUL by its name": ("jobs.jsonl", '{"source": "m/a", "destination": "x", "prompt-file": "a\\u0000"}'),
    "half a sign": ("jobs.jsonl", '{"source": "m/a", "destination": "x\\ud800"}'),
}


@pytest.mark.parametrize(("name", "text"), ENDLESS.values(), ids=ENDLESS)
def test_what_no_parser_takes_is_a_usage_error(name: str, text: str, tmp_path: Path) -> None:
    found = error(tmp_path, name, text)
    assert name in str(found)
    assert len(str(found).splitlines()) == 1


def test_a_name_longer_than_any_is_the_jobs_own_error(tmp_path: Path) -> None:
    (job,) = read(tmp_path, "jobs.jsonl", json.dumps({"source": "m" * 5000, "destination": "x"}))
    assert job.source == "m" * 5000


def test_a_shard_of_a_checkpoint_that_matches_is_no_job_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "m" / "a").mkdir(parents=True)
    for name in ("config.json", "model-00001-of-00001.safetensors"):
        (tmp_path / "m" / "a" / name).write_text("{}")
    jobs = read(tmp_path, "jobs.toml", '[[job]]\ndestination = "out/{name}"\nsource = "m/**"\n')
    assert [job.name for job in jobs] == ["out/a"]


def test_a_missing_file_and_one_that_is_no_text_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="can't be read"):
        read_jobs(tmp_path / "none.toml")
    (tmp_path / "jobs.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobFileError, match="no UTF-8"):
        read_jobs(tmp_path / "jobs.toml")


def test_a_glob_is_a_job_for_each_checkpoint_and_skips_what_jobs_make(tmp_path: Path) -> None:
    for name in ("a", "b", "a-mlx", "notes"):
        (tmp_path / "m" / name).mkdir(parents=True)
        if name != "notes":
            (tmp_path / "m" / name / "config.json").write_text("{}")
    (tmp_path / "m" / "c.safetensors").write_bytes(b"")
    jobs = read(tmp_path, "jobs.toml", 'destination = "m/{name}-mlx"\n[[job]]\nsource = "m/*"\n')
    assert [job.name for job in jobs] == ["m/a-mlx", "m/b-mlx", "m/c-mlx"]


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ({"source": "m/x"}, {"source": "n/x"}, "x-mlx is the destination of m/x (line 3) too"),
        ({"source": "m/x", "mtp": "sidecar"}, {"source": "m/y", "destination": "x-mlx-mtp"}, "x-mlx-mtp is the"),
        ({"source": "m/x"}, {"source": "x-mlx", "destination": "z"}, "another job makes this source"),
        ({"source": "m/x"}, {"source": "x-mlx/y", "destination": "z"}, "another job makes this source"),
        ({"source": "m/x"}, {"source": "m/y", "destination": "q/../x-mlx"}, "x-mlx is the destination of m/x"),
        ({"source": "m/x"}, {"source": "m/y", "destination": "link"}, "link is the destination of m/x"),
        ({"source": "m/x"}, {"source": "m/y", "destination": "here/x-mlx"}, "x-mlx is the destination of m/x"),
        ({"source": "m/x"}, {"source": "here/x-mlx", "destination": "z"}, "another job makes this source"),
        ({"source": "m/x"}, {"source": "m/y", "destination": "x-mlx/y"}, "lies inside the destination of another job"),
        ({"source": "m/x", "destination": "o/y/z"}, {"source": "m/y", "destination": "o/y"}, "o/y/z: lies inside the"),
        ({"source": "m/x"}, {"source": "n", "destination": "m/x/y"}, "lies inside the source of another job, x-mlx"),
    ],
)
def test_jobs_that_are_in_each_others_way_are_refused(
    first: dict[str, Any], second: dict[str, Any], told: str, tmp_path: Path
) -> None:
    (tmp_path / "x-mlx").mkdir()
    (tmp_path / "link").symlink_to("x-mlx")
    (tmp_path / "here").symlink_to(tmp_path)
    for place in ("m/x", "m/y", "n", "x-mlx/y"):
        (tmp_path / place).mkdir(parents=True)
    text = as_toml({"destination": "{name}-mlx"}, [first, second]).replace("\n\n", "\n")
    assert told in str(error(tmp_path, "jobs.toml", text)).replace(f"{tmp_path}/", "")


def test_a_file_without_end_is_no_job_file(tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").symlink_to("/dev/zero")
    with pytest.raises(JobFileError, match="more than"):
        read_jobs(tmp_path / "jobs.toml")


@settings(deadline=None)
@given(names=st.lists(st.text("abc/", min_size=1), unique=True, min_size=1), n=st.integers(1, 12), data=st.data())
def test_slices_part_the_jobs_whatever_their_order(names: list[str], n: int, data: st.DataObject) -> None:
    jobs = [Job(name, "s", Path(name), Settings()) for name in names]
    parts = [take_slice(jobs, (i, n)) for i in range(1, n + 1)]
    assert sorted(job.name for part in parts for job in part) == sorted(names)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    shuffled = data.draw(st.permutations(jobs))
    assert [{job.name for job in take_slice(shuffled, (i, n))} for i in range(1, n + 1)] == [
        {job.name for job in part} for part in parts
    ]


def test_the_example_is_a_job_file_that_names_real_keys(tmp_path: Path) -> None:
    for name in ("Qwen3.5-0.8B", "finetunes/mine"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
    write_example(tmp_path / "jobs.toml")
    assert [job.name for job in read_jobs(tmp_path / "jobs.toml")] == [
        "converted/Qwen3.5-0.8B-mlx",
        "converted/mine-mlx",
    ]
    (tmp_path / "models" / "odd-export").mkdir()
    woken = "\n".join(line.removeprefix("# ") if line.startswith("# ") and (" = " in line or "[[" in line) else line
                      for line in EXAMPLE.splitlines())  # fmt: skip
    assert len(read(tmp_path, "woken.toml", woken)) == 3
    with pytest.raises(DestinationError, match="exists"):
        write_example(tmp_path / "jobs.toml")
    with pytest.raises(JobFileError):
        write_example(tmp_path / "jobs.json")


def commands_of(name: str) -> list[Any]:
    """The parameters of a command."""
    command: Any = typer.main.get_command(app)
    return list(command.commands[name].params)


def test_keys_are_the_long_names_of_options_of_convert_and_verify() -> None:
    parameters = [*commands_of("convert"), *commands_of("verify")]
    known = {option.removeprefix("--") for parameter in parameters for option in parameter.opts}
    assert set(KEYS) - known <= {"destination"}
    assert known - set(KEYS) <= {"dry-run", "json", "debug", "help", "checkpoint"}


def test_the_readme_shows_a_job_file_and_workflows_that_hold(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    for name in ("Qwen3.5-0.8B", "finetunes/mine"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
    (shown,) = re.findall(r"```toml\n(destination.*?)```", text, re.DOTALL)
    assert len(read(tmp_path, "jobs.toml", shown)) == 2
    (workflow,) = re.findall(r"```yaml\n(name: convert.*?)```", text, re.DOTALL)
    steps = yaml.safe_load(workflow)["jobs"]["convert"]["steps"]
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", text, re.DOTALL)
    commands = [step["run"] for step in steps if "qwen35 batch" in step.get("run", "")]
    commands += [line for line in script.splitlines() if "qwen35 batch" in line]
    assert len(commands) == 2
    known = {option for parameter in commands_of("batch") for option in parameter.opts}
    for command in commands:
        assert set(re.findall(r"--[a-z-]+", command)) <= known


def test_a_job_quantises_as_convert_does(tmp_path: Path) -> None:
    job = 'source = "a"\ndestination = "b"\n'
    (made,) = read(tmp_path, "jobs.toml", f"[[job]]\n{job}quantize = 4\ngroup-size = 32\ndequantize = true\n")
    assert made.settings.options.dequantize
    assert made.settings.options.quantize == ModuleQuantization(group_size=32, bits=4, mode="affine")
    for wrong, told in (("mode = 'mxfp4'", "mode needs quantize"), ("quantize = 7", "affine packing has")):
        found = error(tmp_path, "jobs.toml", f"[[job]]\n{job}{wrong}\n")
        assert told in str(found)
        assert "4" in str(found)  # the line
