from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from qwen35conv.errors import DestinationError
from qwen35conv.writing.journal import JOURNAL, Finished, destination_error
from qwen35conv.writing.publish import Partial, check_destination, publishing

ROOT = Path(__file__).parents[1]
SHARD = "model-00001-of-00002.safetensors"
OTHER = "model-00002-of-00002.safetensors"
SCHEMA = "qwen35/journal/1"


class StoppedError(Exception):
    pass


def write_shard(partial: Partial, file: str, content: bytes) -> None:
    partial.temporary(file).write_bytes(content)
    partial.finish(Finished(file, len(content), None))


def stop_after(target: Path, *files: str, key: str = "key", overwrite: bool = False) -> None:
    """Leave a partial folder with some whole shards, a side file and a shard that is not whole."""
    with pytest.raises(StoppedError), publishing(target, key=key, overwrite=overwrite) as partial:  # noqa: PT012
        for file in files:
            write_shard(partial, file, file.encode())
        partial.write_file("README.md", b"old")
        partial.temporary("model-00009-of-00009.safetensors").write_bytes(b"half")
        raise StoppedError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(target: Path, *, overwrite: bool = False) -> DestinationError:
    with pytest.raises(DestinationError) as caught, publishing(target, key="key", overwrite=overwrite):
        raise AssertionError("the block must not run")
    assert caught.value.exit_code == 4
    assert caught.value.hint
    return caught.value


def test_the_folder_appears_when_the_block_ends_well_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "new" / "parents" / "out"
    with publishing(target, key="key", overwrite=False) as partial:
        assert not target.exists()
        write_shard(partial, SHARD, b"abc")
        partial.write_file("config.json", b"{}")
        partial.write_file("additional_chat_templates/tool.jinja", iter([b"a", b"b"]))
    assert names(target.parent) == ["out"]
    assert names(target) == ["additional_chat_templates", "config.json", SHARD]
    assert (target / SHARD).read_bytes() == b"abc"
    assert (target / "additional_chat_templates" / "tool.jinja").read_bytes() == b"ab"


def test_an_error_leaves_no_target_and_only_whole_shards(tmp_path: Path) -> None:
    stop_after(tmp_path / "out", SHARD)
    assert names(tmp_path) == ["out.partial"]
    assert names(tmp_path / "out.partial") == [JOURNAL, SHARD]


def test_an_error_before_the_first_whole_shard_leaves_nothing(tmp_path: Path) -> None:
    stop_after(tmp_path / "out")
    assert names(tmp_path) == []


def test_an_interrupt_keeps_whole_shards_too(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), publishing(target, key="key", overwrite=False) as partial:  # noqa: PT012
        write_shard(partial, SHARD, b"abc")
        raise KeyboardInterrupt
    assert names(tmp_path / "out.partial") == [JOURNAL, SHARD]


def test_the_next_run_finds_the_whole_shards(tmp_path: Path) -> None:
    stop_after(tmp_path / "out", SHARD)
    with publishing(tmp_path / "out", key="key", overwrite=False) as partial:
        assert partial.finished == {SHARD: Finished(SHARD, len(SHARD), None)}
        assert partial.n_finished_bytes == len(SHARD)
        write_shard(partial, OTHER, b"xy")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == [SHARD, OTHER]


def test_files_beside_the_shards_are_not_taken_over_from_a_run_that_failed(tmp_path: Path) -> None:
    stop_after(tmp_path / "out", SHARD)
    (tmp_path / "out.partial" / "README.md").write_bytes(b"stale")  # as a killed run leaves it
    with publishing(tmp_path / "out", key="key", overwrite=False):
        pass
    assert names(tmp_path / "out") == [SHARD]


def test_another_key_starts_anew(tmp_path: Path) -> None:
    stop_after(tmp_path / "out", SHARD)
    with publishing(tmp_path / "out", key="another", overwrite=False) as partial:
        assert partial.finished == {}
        assert names(partial.folder) == [JOURNAL]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\0" * 200, id="zeros"),
        pytest.param(b"not json\n", id="text"),
        pytest.param(b"[]\n", id="a list"),
        pytest.param(b'{"key": "key"}\n', id="no schema"),
        pytest.param(b'{"schema": "qwen35/journal/1"}\n', id="no key"),
        pytest.param(b'{"schema": "qwen35/journal/1", "key": "key"}\n{"file": "x"}\n', id="an entry lacks facts"),
        pytest.param(b'{"schema": "qwen35/journal/1", "key": "key"}\n{"fi\n7\n', id="a line is cut, another follows"),
    ],
)
def test_a_damaged_journal_starts_anew(damage: bytes, tmp_path: Path) -> None:
    stop_after(tmp_path / "out", SHARD)
    (tmp_path / "out.partial" / JOURNAL).write_bytes(damage)
    with publishing(tmp_path / "out", key="key", overwrite=False) as partial:
        assert partial.finished == {}
        assert names(partial.folder) == [JOURNAL]
    assert names(tmp_path / "out") == []


def test_a_last_line_that_a_crash_cut_short_costs_that_shard_alone(tmp_path: Path) -> None:
    stop_after(tmp_path / "out", SHARD, OTHER)
    journal = tmp_path / "out.partial" / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-9])
    for _ in range(2):  # the second time, what the first appended must still be read
        target = tmp_path / "out"
        with pytest.raises(StoppedError), publishing(target, key="key", overwrite=False) as partial:  # noqa: PT012
            if OTHER not in partial.finished:
                write_shard(partial, OTHER, b"anew")
            assert set(partial.finished) == {SHARD, OTHER}
            raise StoppedError
    assert (tmp_path / "out.partial" / OTHER).read_bytes() == b"anew"


@pytest.mark.parametrize("content", [None, b"short"], ids=["gone", "another length"])
def test_a_shard_that_is_no_longer_what_the_journal_says_is_written_again(
    content: bytes | None, tmp_path: Path
) -> None:
    stop_after(tmp_path / "out", SHARD, OTHER)
    path = tmp_path / "out.partial" / SHARD
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with publishing(tmp_path / "out", key="key", overwrite=False) as partial:
        assert set(partial.finished) == {OTHER}
        assert names(partial.folder) == [JOURNAL, OTHER]


def test_a_partial_folder_of_a_stranger_is_left_alone(tmp_path: Path) -> None:
    stranger = tmp_path / "out.partial"
    stranger.mkdir()
    (stranger / "thesis.txt").write_text("years of work")
    (stranger / SHARD).write_bytes(b"x")
    assert "thesis.txt" in str(refused(tmp_path / "out"))
    assert "thesis.txt" in str(refused(tmp_path / "out", overwrite=True))
    assert names(stranger) == [SHARD, "thesis.txt"]


def test_a_partial_folder_without_a_journal_but_with_our_files_starts_anew(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / SHARD).write_bytes(b"x")
    (partial / f".{OTHER}.writing").write_bytes(b"x")
    with publishing(tmp_path / "out", key="key", overwrite=False):
        pass
    assert names(tmp_path / "out") == []


def test_a_partial_that_is_a_link_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.partial").symlink_to(tmp_path / "elsewhere")
    refused(tmp_path / "out")
    (tmp_path / "out.partial").unlink()
    (tmp_path / "out.partial").write_text("a file")
    refused(tmp_path / "out")
    assert names(tmp_path) == ["elsewhere", "out.partial"]
    assert names(tmp_path / "elsewhere") == []


def test_a_target_that_exists_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert "--overwrite" in str(refused(tmp_path / "out").hint)
    assert names(tmp_path) == ["out"]


def test_a_target_that_is_a_file_is_refused_even_to_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    refused(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out").read_text() == "precious"


def test_a_target_that_holds_the_current_folder_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "out" / "below")
    refused(tmp_path / "out", overwrite=True)
    assert names(tmp_path) == ["out"]


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    refused(tmp_path / "out", overwrite=True)
    assert names(tmp_path / "out") == ["precious.txt"]


def test_a_partial_folder_with_a_strangers_journal_is_not_emptied(tmp_path: Path) -> None:
    folder = tmp_path / "out.partial"
    folder.mkdir()
    (folder / ".journal.jsonl").write_text("hello")
    (folder / "mine.txt").write_text("mine")
    refused(tmp_path / "out")
    assert names(folder) == [".journal.jsonl", "mine.txt"]


def test_a_pipe_as_journal_is_an_error_and_no_wait(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    os.mkfifo(tmp_path / "out.partial" / ".journal.jsonl")
    refused(tmp_path / "out")


def test_overwrite_replaces_the_old_only_after_the_new_is_whole(tmp_path: Path) -> None:
    (tmp_path / "out" / "sub").mkdir(parents=True)
    (tmp_path / "out" / "sub" / "old").write_text("old")
    (tmp_path / "out" / "config.json").write_text("{}")
    stop_after(tmp_path / "out", SHARD, overwrite=True)
    assert names(tmp_path / "out") == ["config.json", "sub"]
    with publishing(tmp_path / "out", key="key", overwrite=True):
        assert names(tmp_path / "out") == ["config.json", "sub"]
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == [SHARD]


def test_a_link_at_the_target_leads_to_the_folder_that_is_written(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "real")
    for overwrite in (False, True):
        with publishing(tmp_path / "out", key="key", overwrite=overwrite) as partial:
            assert partial.folder == tmp_path.resolve() / "disk" / "real.partial"
    assert (tmp_path / "out").is_symlink()
    assert names(tmp_path / "disk") == ["real"]


def test_a_target_that_someone_makes_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(DestinationError), publishing(target, key="k", overwrite=False) as made:  # noqa: PT012
        write_shard(made, SHARD, b"abc")
        (tmp_path / "out").mkdir()
    assert names(tmp_path / "out") == []
    assert SHARD in names(tmp_path / "out.partial")


def killed_at(rename: int, target: Path) -> None:
    """Run a replacement in a process of its own that dies without a word before its n-th rename of a folder."""
    program = f"""
        import os, signal, sys
        from pathlib import Path
        from qwen35conv.writing.journal import Finished
        from qwen35conv.writing.publish import publishing

        renames = iter(range(99))
        def audit(event, arguments):
            if event in ("os.rename", "shutil.rmtree") and not str(arguments[0]).endswith(".writing"):
                if next(renames) == {rename}:
                    os.kill(os.getpid(), signal.SIGKILL)
        with publishing(Path({str(target)!r}), key="key", overwrite=True) as partial:
            if {SHARD!r} not in partial.finished:
                partial.temporary({SHARD!r}).write_bytes(b"new")
                partial.finish(Finished({SHARD!r}, 3, None))
            sys.addaudithook(audit)
    """
    died = subprocess.run([sys.executable, "-c", dedent(program)], cwd=ROOT, capture_output=True, text=True)
    assert died.returncode == -9, died.stderr


@pytest.mark.parametrize("rename", [0, 1, 2], ids=["before", "between the renames", "before the old is removed"])
@pytest.mark.parametrize("again", ["overwrite", "refuse"])
def test_a_crash_while_replacing_loses_neither_and_the_next_run_puts_it_right(
    rename: int, again: str, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old.safetensors").write_text("old")
    killed_at(rename, target)
    found = {path.name for path in tmp_path.rglob("*")}
    assert {"old.safetensors", SHARD} <= found, "both the old and the new can be had"
    if again == "overwrite":
        with publishing(target, key="key", overwrite=True) as partial:
            assert set(partial.finished) == ({SHARD} if rename < 2 else set())
            if not partial.finished:
                write_shard(partial, SHARD, b"new")
        assert names(tmp_path) == ["out"]
        assert (target / SHARD).read_bytes() == b"new"
        assert names(target) == [SHARD]
    else:
        refused(target)
        assert names(target) == (["old.safetensors"] if rename < 2 else [SHARD])
        assert names(tmp_path) == (["out", "out.partial"] if rename < 2 else ["out"])


def test_a_second_conversion_to_one_destination_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    with publishing(tmp_path / "out", key="key", overwrite=False) as partial:
        write_shard(partial, SHARD, b"abc")
        partial.temporary(OTHER).write_bytes(b"half")
        for key in ("key", "another"):
            with (
                pytest.raises(DestinationError, match="another conversion"),
                publishing(tmp_path / "out", key=key, overwrite=True),
            ):
                raise AssertionError
        assert names(partial.folder) == [JOURNAL, f".{OTHER}.writing", SHARD]
        partial.temporary(OTHER).unlink()
    assert names(tmp_path / "out") == [SHARD]


def test_a_lock_does_not_outlive_a_killed_process(tmp_path: Path) -> None:
    program = f"""
        import os, signal
        from pathlib import Path
        from qwen35conv.writing.publish import publishing
        with publishing(Path({str(tmp_path / "out")!r}), key="key", overwrite=False) as partial:
            partial.temporary("model-00001-of-00001.safetensors").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    died = subprocess.run([sys.executable, "-c", dedent(program)], cwd=ROOT, capture_output=True)
    assert died.returncode == -9
    with publishing(tmp_path / "out", key="key", overwrite=False) as partial:
        assert names(partial.folder) == [JOURNAL]


def test_the_journal_has_a_line_for_each_whole_shard(tmp_path: Path) -> None:
    stop_after(tmp_path / "out", SHARD, OTHER)
    lines = (tmp_path / "out.partial" / JOURNAL).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"schema": SCHEMA, "key": "key"},
        {"file": SHARD, "n_bytes": len(SHARD), "sha256": None, "n_shared": 0},
        {"file": OTHER, "n_bytes": len(OTHER), "sha256": None, "n_shared": 0},
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_parent_that_may_not_be_written_is_a_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert "Permission denied" in str(refused(tmp_path / "out"))
    finally:
        tmp_path.chmod(0o700)


def test_a_parent_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file" / "out")
    refused(tmp_path / "file" / "deeper" / "out")


@pytest.mark.parametrize("text", ["/", "a\0b", "~nobody-by-this-name/out", "x" * 300])
def test_a_destination_that_is_no_path_is_a_clear_error(text: str) -> None:
    refused(Path(text))


def test_a_file_beside_the_shards_that_cant_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DestinationError), publishing(tmp_path / "out", key="key", overwrite=False) as partial:
        partial.write_file("x" * 300, b"")


def test_an_error_that_is_not_of_the_disk_is_passed_on_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), publishing(tmp_path / "out", key="key", overwrite=False):
        (tmp_path / "absent").read_bytes()
    with pytest.raises(ConnectionError), publishing(tmp_path / "out", key="key", overwrite=False) as partial:
        partial.write_file("config.json", (b"" for _ in (_ for _ in ()).throw(ConnectionError())))
    assert names(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG, errno.EIO])
def test_every_failed_write_says_what_was_still_needed_and_what_to_do(number: int) -> None:
    error = destination_error(Path("/disk/out"), OSError(number, os.strerror(number)), n_needed=12345)
    assert error.exit_code == 4
    assert "/disk/out" in str(error)
    assert "12345 bytes" in str(error)
    assert error.hint


def make_source(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param("model", "model", id="equal"),
        pytest.param("model", "model/", id="a slash behind"),
        pytest.param("model", "other/../model", id="equal by a detour"),
        pytest.param("model", "model/out", id="inside"),
        pytest.param("model", "model/deep/er/out", id="deep inside"),
        pytest.param("model", "link", id="a link to the source"),
        pytest.param("link", "model", id="the source by a link"),
        pytest.param("model", "link/out", id="inside by a link"),
        pytest.param("parent/model", "parent", id="holds the source"),
        pytest.param("out.partial", "out", id="its partial folder is the source"),
        pytest.param("linked", "cache", id="holds what the source links to"),
    ],
)
def test_a_destination_that_could_touch_the_source_is_refused(source: str, target: str, tmp_path: Path) -> None:
    for name in ("model", "other", "parent/model", "out.partial", "cache", "linked"):
        make_source(tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "model")
    (tmp_path / "linked" / "model.safetensors").symlink_to(tmp_path / "cache" / "config.json")
    with pytest.raises(DestinationError) as caught:
        check_destination(tmp_path / source, tmp_path / target)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("target", ["out", "model-mlx", "other/model", "model.partial", "new/model"])
def test_a_destination_beside_the_source_is_allowed(target: str, tmp_path: Path) -> None:
    make_source(tmp_path / "model")
    make_source(tmp_path / "other")
    check_destination(tmp_path / "model", tmp_path / target)


def test_a_destination_relative_to_the_current_folder_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_source(tmp_path / "model"))
    check_destination(Path(), Path("../out"))
    for target in (".", "out", "../model"):
        with pytest.raises(DestinationError):
            check_destination(Path(), Path(target))
