"""A batch on a real Dask cluster of processes: the bytes of a plain run, also when a worker is killed in the middle."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from test_batch import contents, converted, jobs_of, make_models, states
from test_cli import qwen35

from qwen35conv.batch.cluster import _write_one, run_on_cluster
from qwen35conv.batch.results import Ended, Entered, Event, Moved, Phase, Result, State
from qwen35conv.batch.runner import Stop
from qwen35conv.errors import DestinationError, SourceError
from qwen35conv.planning.plan import make_plan
from qwen35conv.reading import read_checkpoint
from qwen35conv.source import open_source
from qwen35conv.writing.journal import Journal, open_journal
from qwen35conv.writing.sharing import Link

distributed = pytest.importorskip("distributed")

N_SHARDS = 10


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose shards take a moment each, and what a plain run makes of it."""
    folder = tmp_path_factory.mktemp("large")
    made = tiny.make(tiny.Sizes(vocab=300_000, hidden=96, intermediate=30_000))
    tiny.save(folder / "models" / "big", made.raw, made.config, n_shards=N_SHARDS)
    converted(folder / "models" / "big", folder / "plain")
    return folder


def run(
    folder: Path, client: Any, *, large_bytes: int = 1, on_event: Callable[[Event], None] = lambda event: None,
    stop: Stop | None = None, **options: str,
) -> dict[str, Result]:  # fmt: skip
    results = {}
    jobs = jobs_of(folder, **options)
    stop = stop or Stop()
    for event in run_on_cluster(jobs, client, fail_fast=False, stop=stop, large_bytes=large_bytes):
        on_event(event)
        if isinstance(event, Ended):
            results[event.result.name] = event.result
    return results


@pytest.mark.parametrize("large_bytes", [1, 1 << 40], ids=["shards", "jobs"])
def test_tasks_write_what_a_plain_run_writes(tmp_path: Path, client: Any, large_bytes: int) -> None:
    make_models(tmp_path)
    results = run(tmp_path, client, large_bytes=large_bytes, mtp='"sidecar"', checksum="true")
    assert set(states(results).values()) == {State.CONVERTED}
    tasks = {path.name: contents(path) for path in (tmp_path / "out").iterdir()}
    shutil.rmtree(tmp_path / "out")
    plain = qwen35("batch", tmp_path / "jobs.toml")
    assert plain.returncode == 0, plain.stderr
    assert tasks == {path.name: contents(path) for path in (tmp_path / "out").iterdir()}
    assert sorted(tasks) == ["a", "a-mtp", "b", "b-mtp", "c", "c-mtp"]
    assert (results["out/a"].n_resumed, results["out/a"].source) == (0, str(tmp_path / "models/a"))
    assert set(states(run(tmp_path, client, mtp='"sidecar"', checksum="true")).values()) == {State.FINISHED}


class Killer:
    """Kills one worker as soon as a shard is being written: that of the job, or another that writes one."""

    def __init__(self, client: Any, partial: Path, *, of_job: bool) -> None:
        self.client = client
        self.partial = partial
        self.of_job = of_job
        self.pids = client.run(os.getpid)
        self.killed: int | None = None
        self.n_whole = -1

    def __call__(self, event: Event) -> None:
        if self.killed is not None or not isinstance(event, (Entered, Moved)):
            return
        if isinstance(event, Entered) and event.phase is not Phase.WRITE:
            return
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for address, keys in self.client.processing().items():
                holds_job = any(key.startswith("qwen35-batch-") for key in keys)
                writes = any(key.startswith(".attempt-") for key in keys)
                is_writing = list(self.partial.glob(".attempt-*/*/.*.writing"))
                if is_writing and (holds_job if self.of_job else writes and not holds_job):
                    self.n_whole = len(list(self.partial.glob("model-*")))
                    os.kill(self.pids[address], signal.SIGKILL)
                    self.killed = self.pids[address]
                    return
            time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize("of_job", [True, False], ids=["the job's", "a shard's"])
def test_a_worker_that_is_killed_in_the_middle_costs_nothing_but_time(
    tmp_path: Path, large: Path, client: Any, of_job: bool
) -> None:
    (tmp_path / "models").symlink_to(large / "models")
    client.wait_for_workers(2, timeout=30)
    killer = Killer(client, tmp_path / "out" / "big.partial", of_job=of_job)
    results = run(tmp_path, client, on_event=killer, jobs="1")
    assert killer.killed is not None
    assert 0 <= killer.n_whole < N_SHARDS
    result = results["out/big"]
    assert result.state is State.CONVERTED, result
    assert contents(tmp_path / "out" / "big") == contents(large / "plain")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["big"]
    assert killer.killed not in client.run(os.getpid).values()


@pytest.mark.slow
def test_a_stop_cancels_what_runs_and_the_next_run_resumes(tmp_path: Path, large: Path, client: Any) -> None:
    (tmp_path / "models").symlink_to(large / "models")
    client.wait_for_workers(2, timeout=30)
    stop = Stop()

    def on_event(event: Event) -> None:
        if isinstance(event, Moved):
            stop.ask()

    results = run(tmp_path, client, on_event=on_event, stop=stop, jobs="1")
    assert results["out/big"].state is State.STOPPED
    assert not (tmp_path / "out" / "big").exists()
    deadline = time.monotonic() + 60
    while True:  # the tasks end at their next step
        again = run(tmp_path, client)["out/big"]
        if again.exit_code != DestinationError.exit_code or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert again.state is State.CONVERTED, again
    assert contents(tmp_path / "out" / "big") == contents(large / "plain")


def test_a_task_that_comes_too_late_or_sees_other_files_writes_nothing(tmp_path: Path, client: Any) -> None:
    make_models(tmp_path, ("a",))
    spec = str(tmp_path / "models" / "a")
    source = open_source(spec)
    plan = make_plan(read_checkpoint(source))
    shard = plan.shards[0]
    right = dict(plan.checkpoint.identities)
    before = contents(tmp_path)
    for identities, error in ((right, DestinationError), (dict.fromkeys(right, "1:2:3"), SourceError)):
        arguments = (spec, None, 1, False, Link.AUTO, shard, identities, str(tmp_path / "over"))
        with pytest.raises(error):
            client.submit(_write_one, *arguments, pure=False).result()
    assert contents(tmp_path) == before


def test_a_destination_that_someone_is_writing_is_waited_for(tmp_path: Path, client: Any) -> None:
    make_models(tmp_path, ("a",))
    (tmp_path / "out" / "a.partial").mkdir(parents=True)
    lock = open_journal(tmp_path / "out" / "a.partial")
    assert lock is not None
    tries = []

    def on_event(event: Event, lock: Journal = lock) -> None:
        if isinstance(event, Entered) and event.phase is Phase.WRITE:
            tries.append(event)
            if len(tries) == 3:
                lock.close()

    results = run(tmp_path, client, on_event=on_event)
    assert results["out/a"].state is State.CONVERTED, results
    assert len(tries) >= 3  # the first two found it held
    assert contents(tmp_path / "out" / "a") == contents(converted(tmp_path / "models/a", tmp_path / "plain"))


def test_jobs_that_fail_are_told_as_in_a_plain_run(tmp_path: Path, client: Any) -> None:
    make_models(tmp_path)
    (tmp_path / "models" / "b" / "config.json").write_text("{")
    (tmp_path / "out" / "c").mkdir(parents=True)
    results = run(tmp_path, client)
    assert {name: result.exit_code for name, result in results.items()} == {"out/a": 0, "out/b": 3, "out/c": 4}


@pytest.mark.slow
def test_the_command_starts_a_cluster_and_joins_one(tmp_path: Path, client: Any) -> None:
    make_models(tmp_path)
    jobs_of(tmp_path)
    joined = qwen35("batch", tmp_path / "jobs.toml", "--scheduler", client.scheduler.address)
    assert joined.returncode == 0, joined.stderr
    assert json.loads(joined.stdout.splitlines()[-1])["states"] == {"converted": 3}
    started = qwen35("batch", tmp_path / "jobs.toml", "--local-cluster", 1)
    assert started.returncode == 0, started.stderr
    assert json.loads(started.stdout.splitlines()[-1])["states"] == {"finished before": 3}
    both = qwen35("batch", tmp_path / "jobs.toml", "--local-cluster", 1, "--scheduler", "tcp://localhost:1")
    assert both.returncode == 2


@pytest.mark.slow
def test_a_scheduler_that_dies_is_a_failure_in_few_words(tmp_path: Path) -> None:
    made = tiny.make(tiny.Sizes(vocab=60_000, hidden=256, intermediate=3000))
    for n in range(8):
        tiny.save(tmp_path / "models" / f"m{n}", made.raw, made.config)
    (tmp_path / "jobs.toml").write_text('[[job]]\nsource = "models/*"\ndestination = "out/{name}"\nchecksum = true\n')
    place = tmp_path / "scheduler.json"
    started = [started_process("distributed.cli.dask_scheduler", "--port", "0", "--scheduler-file", place)]
    try:
        while not (place.is_file() and place.read_text()):
            time.sleep(0.05)
        address = json.loads(place.read_text())["address"]
        started.append(started_process("distributed.cli.dask_worker", address, "--no-nanny", "--nthreads", "1"))
        batch = subprocess.Popen(
            [sys.executable, "-m", "qwen35conv", "batch", str(tmp_path / "jobs.toml"), "--scheduler", address],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert batch.stdout is not None
        assert any('"converted"' in line for line in batch.stdout)
        started[0].kill()
        out, err = batch.communicate(timeout=60)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert (batch.returncode, err) == (4, "")
    ended = [json.loads(line) for line in out.splitlines() if '"event": "job"' in line]
    lost = [result for result in ended if result["state"] != "converted"]
    assert lost
    assert all(result["exit_code"] == 4 and "scheduler is gone" in result["reason"] for result in lost)


def started_process(module: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
