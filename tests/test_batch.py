"""A batch as it runs: results like plain conversions, resumed, skipped, stopped, and told to CI."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import tiny
from test_cli import qwen35

from qwen35conv.batch.finished import STAMP
from qwen35conv.batch.jobs import Job, read_jobs
from qwen35conv.batch.results import Ended, Moved, Result, State, exit_code_of
from qwen35conv.batch.runner import Stop, run_jobs
from qwen35conv.batch.survey import Action, survey_jobs
from qwen35conv.convert import write
from qwen35conv.planning.plan import Options, make_plan
from qwen35conv.reading import read_checkpoint
from qwen35conv.report.batch_files import build_junit, build_summary
from qwen35conv.source import open_source
from qwen35conv.writing.writer import publishing, write_shards

NAMES = ("a", "b", "c")


def make_models(folder: Path, names: tuple[str, ...] = NAMES, sizes: tiny.Sizes = tiny.SMALL) -> None:
    for seed, name in enumerate(names, 1):
        made = tiny.make(sizes, seed=seed)
        tiny.save(folder / "models" / name, made.raw, made.config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_models(tmp_path)
    return tmp_path


def jobs_of(folder: Path, text: str = "", **options: str) -> tuple[Job, ...]:
    top = "".join(f"{key.replace('_', '-')} = {value}\n" for key, value in options.items())
    text = text or '[[job]]\nsource = "models/*"\n'
    (folder / "jobs.toml").write_text(f'destination = "out/{{name}}"\n{top}{text}')
    return read_jobs(folder / "jobs.toml")


def run(jobs: tuple[Job, ...], *, n_at_once: int = 2, fail_fast: bool = False) -> dict[str, Result]:
    events = run_jobs(jobs, n_at_once=n_at_once, fail_fast=fail_fast, stop=Stop())
    return {event.result.name: event.result for event in events if isinstance(event, Ended)}


def states(results: dict[str, Result]) -> dict[str, State]:
    return {name: result.state for name, result in results.items()}


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder and its digest, without the stamps of a batch."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != STAMP
    }


def converted(source: Path, target: Path, options: Options | None = None) -> Path:
    opened = open_source(str(source))
    write(opened, make_plan(read_checkpoint(opened), options), target)
    return target


def test_a_batch_writes_what_plain_conversions_write(folder: Path) -> None:
    results = run(jobs_of(folder), n_at_once=3)
    assert states(results) == dict.fromkeys(("out/a", "out/b", "out/c"), State.CONVERTED)
    for name in NAMES:
        plain = converted(folder / "models" / name, folder / "plain" / name)
        assert contents(folder / "out" / name) == contents(plain)
        assert sorted(
            {path.name for path in (folder / "out" / name).iterdir()} - {p.name for p in plain.iterdir()}
        ) == [STAMP]
    result = results["out/a"]
    assert (result.verdict, result.exit_code, result.n_shards, result.n_resumed) == ("raw", 0, 2, 0)
    assert [check.passed for check in result.checks] == [True, True, True]


def test_finished_jobs_are_skipped_and_nothing_of_them_is_touched(folder: Path) -> None:
    run(jobs_of(folder, checksum="true"))
    before = {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("*")}
    assert set(states(run(jobs_of(folder, checksum="true"))).values()) == {State.FINISHED}
    assert set(states(run(jobs_of(folder))).values()) == {State.FINISHED}  # less is asked than was done
    assert {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("*")} == before


CHANGES: dict[str, Any] = {
    "a weight of the source": lambda source, out: poke(source, -1),
    "a side file of the source": lambda source, out: (source / "generation_config.json").write_text('{"a": 1}'),
    "config.json of the source": lambda source, out: rewrite(source / "config.json", "rms_norm_eps", 1e-5),
    "another source of the same names": lambda source, out: replace_source(source),
    "a shard of the result": lambda source, out: next(iter(out.glob("model-*"))).write_bytes(b"short"),
    "config.json of the result": lambda source, out: rewrite(out / "config.json", "extra", 1),
    "the receipt": lambda source, out: rewrite(out / "qwen35.json", "gain_shift", 0),
    "no receipt": lambda source, out: (out / "qwen35.json").unlink(),
    "a weight of the result": lambda source, out: poke(out, -1),
    "a weight of the result, and its time as it was": lambda source, out: poke(out, -1, keep_time=True),
    "the index": lambda source, out: (out / "model.safetensors.index.json").write_text("{}"),
    "no index": lambda source, out: (out / "model.safetensors.index.json").unlink(),
    "no gains of the source": lambda source, out: (out / "qwen35-source-gains.bin").unlink(),
    "a side file of the result": lambda source, out: (out / "generation_config.json").write_text("{ }"),
    "another shard": lambda source, out: shutil.copy(next(out.glob("model-*")), out / "model-00009.safetensors"),
    "a pipe for a receipt": lambda source, out: put_pipe(out / "qwen35.json"),
    "no stamp, and a weight of the source": lambda source, out: poke(source, -1, without=out / STAMP),
    "no stamp, and a weight of the result": lambda source, out: poke(out, -1, without=out / STAMP),
    "no stamp, and a side file": lambda source, out: (
        (out / STAMP).unlink(),
        (out / "generation_config.json").write_text("[]"),
    ),
}


def poke(source: Path, offset: int, without: Path | None = None, *, keep_time: bool = False) -> None:
    if without is not None:
        without.unlink()
    path = sorted(source.glob("*.safetensors"))[0]
    content, before = bytearray(path.read_bytes()), path.stat()
    content[offset] ^= 1
    path.write_bytes(bytes(content))
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def rewrite(path: Path, key: str, value: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def replace_source(source: Path) -> None:
    shutil.rmtree(source)
    made = tiny.make(seed=9)
    tiny.save(source, made.raw, made.config)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_is_no_longer_what_the_job_makes_is_refused_and_replaced_only_when_told(folder: Path, change: Any) -> None:
    (folder / "models/a/generation_config.json").write_text("{}")
    run(jobs_of(folder))
    change(folder / "models" / "a", folder / "out" / "a")
    again = run(jobs_of(folder))
    assert states(again) == {"out/a": State.FAILED, "out/b": State.FINISHED, "out/c": State.FINISHED}
    assert (again["out/a"].exit_code, "exists" in (again["out/a"].reason or "")) == (4, True)
    replaced = run(jobs_of(folder, overwrite="true"))
    assert states(replaced)["out/a"] is State.CONVERTED
    assert states(replaced)["out/b"] is State.FINISHED
    plain = converted(folder / "models" / "a", folder / "plain")
    assert contents(folder / "out" / "a") == contents(plain)


def test_what_a_plain_conversion_made_is_compared_once_and_then_finished(folder: Path) -> None:
    for name in NAMES:
        converted(folder / "models" / name, folder / "out" / name)
    before = contents(folder / "out")
    assert {look.action for look in survey_jobs(jobs_of(folder), n_at_once=1).looks} == {Action.VERIFY}
    assert set(states(run(jobs_of(folder))).values()) == {State.VERIFIED}
    assert set(states(run(jobs_of(folder))).values()) == {State.FINISHED}
    assert contents(folder / "out") == before
    (folder / "out" / "a" / STAMP).unlink()
    assert states(run(jobs_of(folder, mtp='"keep"')))["out/a"] is State.FAILED


def test_what_changes_no_byte_of_a_result_is_compared_once_and_then_finished(folder: Path) -> None:
    run(jobs_of(folder))
    (folder / "out" / "a" / "notes.txt").write_text("mine")
    shutil.copytree(folder / "out" / "b", folder / "copy")
    shutil.rmtree(folder / "out" / "b")
    (folder / "copy").rename(folder / "out" / "b")
    put_pipe(folder / "out" / "c" / STAMP)
    assert set(states(run(jobs_of(folder))).values()) == {State.VERIFIED}
    assert set(states(run(jobs_of(folder))).values()) == {State.FINISHED}


@pytest.mark.parametrize("option", [{"mtp": '"keep"'}, {"keep_vision": "true"}, {"max_shard_size": '"20KB"'}])
def test_other_options_are_another_job(folder: Path, option: dict[str, str]) -> None:
    run(jobs_of(folder))
    assert set(states(run(jobs_of(folder, **option))).values()) == {State.FAILED}


def test_what_was_not_asked_before_is_verified_without_converting_again(folder: Path) -> None:
    run(jobs_of(folder, no_verify="true"))
    shard = next((folder / "out" / "a").glob("model-*"))
    before = shard.stat().st_ino
    quick = run(jobs_of(folder))
    assert set(states(quick).values()) == {State.VERIFIED}
    assert [check.name for check in quick["out/a"].checks] == ["structure", "values", "kernel"]
    deep = run(jobs_of(folder, deep="true"))
    assert set(states(deep).values()) == {State.VERIFIED}
    assert "source" in [check.name for check in deep["out/a"].checks]
    for options in ({"deep": "true"}, {}, {"no_verify": "true"}):
        assert set(states(run(jobs_of(folder, **options))).values()) == {State.FINISHED}
    assert shard.stat().st_ino == before


def test_a_draft_head_beside_the_model_is_part_of_what_is_finished(folder: Path) -> None:
    options = {"mtp": '"sidecar"', "deep": "true"}
    results = run(jobs_of(folder, **options))
    assert set(states(results).values()) == {State.CONVERTED}
    assert [check.passed for check in results["out/a"].checks if check.name == "source"] == [True]
    assert set(states(run(jobs_of(folder, **options))).values()) == {State.FINISHED}
    next((folder / "out" / "a-mtp").glob("mtp-*")).unlink()
    poke(folder / "out" / "b-mtp", -1)
    stamp = folder / "out" / "c" / STAMP  # as a run leaves it that is killed right after it published
    whole = stamp.read_bytes()
    document = json.loads(whole)
    del document["result"]
    stamp.write_text(json.dumps(document))
    again = states(run(jobs_of(folder, **options)))
    assert again == {"out/a": State.FAILED, "out/b": State.FAILED, "out/c": State.FINISHED}
    assert stamp.read_bytes() == whole


def test_a_verification_that_fails_publishes_nothing(folder: Path) -> None:
    n = tiny.SMALL.vocab
    from safetensors.numpy import save_file

    ids = np.arange(5)[None].astype(np.int32)
    save_file({"input_ids": ids, "logits": np.full((1, 5, n), 7, np.float32)}, folder / "logits.safetensors")
    text = '[[job]]\nsource = "models/a"\nreference = "logits.safetensors"\n'
    results = run(jobs_of(folder, text))
    assert (results["out/a"].state, results["out/a"].exit_code) == (State.FAILED, 1)
    assert "reference" in (results["out/a"].reason or "")
    assert not (folder / "out" / "a").exists()
    again = run(jobs_of(folder, text.replace("reference", "# reference")))
    assert (again["out/a"].state, again["out/a"].n_resumed) == (State.CONVERTED, 2)


def broken(folder: Path, name: str) -> None:
    made = tiny.make(mtp=False)
    gains = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")
    twice = {name: value + np.array(1, tiny.BF16) if name.endswith(gains) else value
             for name, value in made.canonical.items()}  # fmt: skip
    tiny.save(folder / "models" / name, twice, made.config)


def test_a_job_that_fails_does_not_stop_the_others_and_decides_the_exit_code(folder: Path) -> None:
    shutil.rmtree(folder / "models" / "b")
    text = "".join(f'[[job]]\nsource = "models/{name}"\n' for name in NAMES)
    results = run(jobs_of(folder, text))
    assert states(results) == {"out/a": State.CONVERTED, "out/b": State.FAILED, "out/c": State.CONVERTED}
    assert (results["out/b"].exit_code, exit_code_of(results.values())) == (3, 3)
    (folder / "out" / "d").mkdir()
    make_models(folder, ("d",))
    results = run(jobs_of(folder, text + '[[job]]\nsource = "models/d"\n'))
    assert (results["out/d"].exit_code, exit_code_of(results.values())) == (4, 4)
    broken(folder, "e")
    results = run(jobs_of(folder, text + '[[job]]\nsource = "models/d"\n[[job]]\nsource = "models/e"\n'))
    assert (results["out/e"].verdict, exit_code_of(results.values())) == ("double-shifted", 1)


def test_fail_fast_stops_the_others(folder: Path) -> None:
    text = '[[job]]\nsource = "models/none"\n' + "".join(f'[[job]]\nsource = "models/{name}"\n' for name in NAMES)
    results = run(jobs_of(folder, text), n_at_once=1, fail_fast=True)
    assert states(results)["out/none"] is State.FAILED
    assert len(results) == 4
    assert State.NOT_RUN in states(results).values()
    assert exit_code_of(results.values()) == 3


def test_a_stop_in_the_middle_keeps_whole_shards_and_the_next_run_resumes(tmp_path: Path) -> None:
    made = tiny.make()
    tiny.save(tmp_path / "models" / "a", made.raw, made.config, n_shards=12)
    stop = Stop()
    results: dict[str, Result] = {}
    for event in run_jobs(jobs_of(tmp_path, jobs="1"), n_at_once=1, fail_fast=False, stop=stop):
        if isinstance(event, Moved) and list((tmp_path / "out" / "a.partial").glob("model-*")):
            stop.ask()
        if isinstance(event, Ended):
            results[event.result.name] = event.result
    assert results["out/a"].state is State.STOPPED
    assert not (tmp_path / "out" / "a").exists()
    assert list((tmp_path / "out" / "a.partial").glob("model-*"))
    again = run(jobs_of(tmp_path, jobs="1"))
    assert again["out/a"].state is State.CONVERTED
    assert 0 < again["out/a"].n_resumed < 12
    assert contents(tmp_path / "out/a") == contents(converted(tmp_path / "models/a", tmp_path / "plain"))


def test_the_budget_bounds_the_steps_of_all_conversions_together(folder: Path) -> None:
    class Counting:
        def __init__(self) -> None:
            self.room = threading.BoundedSemaphore(2)
            self.lock = threading.Lock()
            self.now = self.most = self.total = 0

        def __enter__(self) -> None:
            self.room.acquire()
            with self.lock:
                self.now, self.total = self.now + 1, self.total + 1
                self.most = max(self.most, self.now)
            time.sleep(0.0005)

        def __exit__(self, *error: object) -> None:
            with self.lock:
                self.now -= 1
            self.room.release()

    budget = Counting()

    def convert_one(name: str) -> None:
        source = open_source(str(folder / "models" / name))
        plan = make_plan(read_checkpoint(source))
        with publishing(folder / "out" / name, key=name, overwrite=False) as partial:
            write_shards(plan.shards, source, partial, jobs=3, checksum=False, budget=budget)

    threads = [threading.Thread(target=convert_one, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.most == 2
    assert budget.total > 10
    for seed, name in enumerate(NAMES, 1):
        tiny.assert_same(tiny.load(folder / "out" / name), tiny.make(seed=seed).canonical)


def test_two_runs_at_once_never_write_the_same_destination(folder: Path) -> None:
    jobs_of(folder)
    command = [sys.executable, "-m", "qwen35conv", "batch", str(folder / "jobs.toml")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    ends = []
    for process in processes:
        out, _ = process.communicate(timeout=120)
        ends += [json.loads(line) for line in out.splitlines() if '"event": "job"' in line]
    for end in ends:
        assert end["state"] in ("converted", "finished before") or end["exit_code"] == 4, end
    for name in NAMES:
        assert sum(end["state"] == "converted" for end in ends if end["job"] == f"out/{name}") == 1
        assert contents(folder / "out" / name) == contents(converted(folder / "models" / name, folder / "p" / name))
    assert sorted(path.name for path in (folder / "out").iterdir()) == list(NAMES)


def test_a_dry_run_tells_what_each_job_would_do_and_changes_nothing(folder: Path) -> None:
    run(jobs_of(folder, '[[job]]\nsource = "models/a"\n'))
    broken(folder, "d")
    stop_after_one_shard(folder / "models" / "c", folder / "out" / "c")
    before = contents(folder)
    jobs = jobs_of(folder)
    survey = survey_jobs(jobs, n_at_once=2)
    assert [look.action for look in survey.looks] == [Action.NOTHING, Action.CONVERT, Action.RESUME, Action.REFUSE]
    assert [look.verdict for look in survey.looks] == ["raw", "raw", "raw", "double-shifted"]
    assert survey.exit_code == 1
    (system,) = survey.file_systems
    assert system.n_needed == sum(look.n_bytes for look in survey.looks) > 0
    assert system.fits
    assert contents(folder) == before | {"jobs.toml": contents(folder)["jobs.toml"]}
    wanted = survey.looks[1].n_bytes
    results = run(jobs)
    written = sum(p.stat().st_size for p in (folder / "out" / "b").iterdir() if p.name not in (STAMP, "qwen35.json"))
    gains = (folder / "out" / "b" / "qwen35-source-gains.bin").stat().st_size
    assert wanted == written - gains
    assert results["out/c"].n_resumed == 1
    again = {look.job.name: look.action for look in survey_jobs(jobs_of(folder, deep="true"), n_at_once=2).looks}
    assert again["out/a"] is Action.VERIFY


def stop_after_one_shard(source: Path, target: Path) -> None:
    """A conversion that was stopped after its first shard."""
    opened = open_source(str(source))

    def on_bytes(n_bytes: int) -> None:
        if list(target.with_name(f"{target.name}.partial").glob("model-*")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(opened, make_plan(read_checkpoint(opened)), target, jobs=1, on_bytes=on_bytes)


def test_the_command_prints_a_line_an_event_and_writes_what_ci_reads(folder: Path) -> None:
    broken(folder, "d")
    jobs_of(folder)
    shared = folder / "shared.md"
    shared.write_text("before\n")
    found = qwen35(
        "batch", folder / "jobs.toml", "--junit", folder / "junit.xml", "--summary", shared, "--jobs", 2,
        GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(shared),
    )  # fmt: skip
    assert found.returncode == 1, found.stderr
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert {line["schema"] for line in lines} == {"qwen35/batch/1"}
    assert lines[-1]["states"] == {"converted": 3, "failed": 1}
    assert lines[-1]["exit_code"] == 1
    assert {line["event"] for line in lines} == {"phase", "job", "end"}
    (annotation,) = [line for line in found.stderr.splitlines() if line.startswith("::")]
    assert annotation.startswith("::error title=qwen35 batch%3A out/d::double-shifted: ")
    assert "%0A--repair" in annotation
    suite = ElementTree.parse(folder / "junit.xml").getroot()
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "1", "0")
    failure = cases["out/d"].find("failure")
    assert failure is not None
    assert "double-shifted" in (failure.get("message") or "")
    assert cases["out/a"].find("failure") is None
    text = shared.read_text()
    assert text.startswith("before\n## qwen35 batch: 3 right, 1 not")
    assert "| ❌ | `out/d` | double-shifted | failed |" in text


def test_a_part_of_the_jobs_and_a_dry_run_from_the_command(folder: Path) -> None:
    jobs_of(folder)
    made = []
    for i in (1, 2):
        found = qwen35("batch", folder / "jobs.toml", "--slice", f"{i}/2", "--dry-run", "--json")
        assert found.returncode == 0, found.stderr
        made += [line["job"] for line in map(json.loads, found.stdout.splitlines()) if line["event"] == "planned"]
    assert sorted(made) == ["out/a", "out/b", "out/c"]
    shown = qwen35("batch", folder / "jobs.toml", "--dry-run")
    assert "Disks" in shown.stdout
    assert not (folder / "out").exists()
    assert qwen35("batch", folder / "jobs.toml", "--slice", "3/2").returncode == 2
    (folder / "jobs.toml").write_text("sauce = 1\n[[job]]\nsource = 'models/a'\n")
    wrong = qwen35("batch", folder / "jobs.toml", "--json")
    assert wrong.returncode == 2
    assert "jobs.toml:1: unknown key 'sauce'" in json.loads(wrong.stdout)["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_in_order_and_the_same_command_resumes(tmp_path: Path, number: signal.Signals, code: int) -> None:
    make_models(tmp_path, ("a", "b"), tiny.Sizes(vocab=200_000, hidden=96))
    jobs_of(tmp_path, jobs="1")
    command = [sys.executable, "-m", "qwen35conv", "batch", str(tmp_path / "jobs.toml"), "--jobs", "1",
               "--junit", str(tmp_path / "junit.xml")]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line).get("phase") == "writing":
            process.send_signal(number)
            break
    out, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    ends = [json.loads(line) for line in out.splitlines()]
    assert ends[-1]["exit_code"] == code
    assert {end["job"] for end in ends if end["event"] == "job"} == {"out/a", "out/b"}
    assert len(list(ElementTree.parse(tmp_path / "junit.xml").iter("testcase"))) == 2
    again = qwen35("batch", tmp_path / "jobs.toml")
    assert again.returncode == 0, again.stderr
    assert contents(tmp_path / "out/b") == contents(converted(tmp_path / "models/b", tmp_path / "plain"))


def test_files_for_ci_hold_odd_names_and_every_state() -> None:
    results = [
        Result("out/a|`b`", "s", "d", State.CONVERTED, "raw", 10),
        Result("out/<x>&\x1b[1m", "s", "d", State.FAILED, "mixed", reason="a|b <c>\x00", exit_code=1, kind="K"),
        Result("read", "s", "d", State.FAILED, reason="gone", exit_code=3, kind="SourceError"),
        Result("later", "s", "d", State.NOT_RUN, reason="the batch was stopped"),
    ]
    root = ElementTree.fromstring(build_junit(results))
    assert [root.get(key) for key in ("tests", "failures", "errors", "skipped")] == ["4", "1", "1", "1"]
    tags = [[child.tag for child in case if child.tag != "properties"] for case in root.iter("testcase")]
    assert tags == [[], ["failure"], ["error"], ["skipped"]]
    rows = [line for line in build_summary(results).splitlines() if line.startswith("| ")]
    assert all(line.replace("\\|", "").count("|") == 7 for line in rows[1:])


def test_results_that_cant_be_written_are_told_before_the_batch_runs(folder: Path) -> None:
    jobs_of(folder)
    found = qwen35("batch", folder / "jobs.toml", "--junit", folder / "none" / "junit.xml")
    assert found.returncode == 4
    assert not (folder / "out").exists()


def test_results_never_overwrite_the_job_file_or_each_other(folder: Path) -> None:
    jobs_of(folder)
    text = (folder / "jobs.toml").read_text()
    (folder / "link.xml").symlink_to(folder / "jobs.toml")
    for options in (["--junit", folder / "link.xml"], ["--junit", folder / "a", "--summary", folder / "." / "a"]):
        found = qwen35("batch", folder / "jobs.toml", *options)
        assert (found.returncode, found.stdout) == (2, "")
    assert (folder / "jobs.toml").read_text() == text
    assert not (folder / "out").exists()


def test_an_annotation_of_a_workflow_holds_no_escapes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    jobs_of(folder, '[[job]]\nsource = "models/\\u001b31mnone"\n')
    found = qwen35("batch", folder / "jobs.toml")
    assert found.returncode == 3
    assert found.stderr.startswith("::error title=qwen35 batch%3A out/\\x1b31mnone::no verdict: models/\\x1b31mnone")
    assert found.stderr.rstrip("\n").isprintable()
