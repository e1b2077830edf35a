"""The Hub as it never is: answers that are wrong, odd or endless, and settings that lead nowhere.

Whatever comes, the command ends with one error in two lines, and no token, no password in them.
"""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from hub_server import Fault, HubServer, blob_of
from hub_tool import REPO, SIZES, Tool, files_of, told
from huggingface_hub import constants

from qwen35conv.errors import SourceError
from qwen35conv.hub.faults import seconds_to_wait
from qwen35conv.hub.ranges import parse_count
from qwen35conv.hub.source import open_hub

SECRET = "hf_neverPrinted"
SHARD = "model.safetensors-00002-of-00003.safetensors"


@pytest.fixture
def tool(tool: Tool) -> Tool:
    tool.environment["HF_TOKEN"] = SECRET
    return tool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.make(SIZES)
    folder = tiny.save(tmp_path_factory.mktemp("hostile") / "model", made.raw, made.config, n_shards=3)
    (folder / "tokenizer.json").write_text(json.dumps({"filler": "x" * 3000}))
    return folder


def with_sibling(**entry: Any) -> Callable[[dict[str, Any]], Any]:
    """A listing with one more file."""
    return lambda info: info | {"siblings": [*info["siblings"], {"size": 3, "blobId": "a" * 40} | entry]}


def of_shard(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    """A listing that says something else of a shard."""
    return lambda info: (
        info | {"siblings": [one | (changes if one["rfilename"] == SHARD else {}) for one in info["siblings"]]}
    )


LISTINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda info: [info],
    "a text": lambda info: "hello",
    "nothing": lambda info: None,
    "no commit": lambda info: info | {"sha": None},
    "a commit that is a number": lambda info: info | {"sha": 7},
    "a commit that is a path": lambda info: info | {"sha": "../../../etc"},
    "a commit that is empty": lambda info: info | {"sha": ""},
    "a commit with escapes": lambda info: info | {"sha": "\x1b[31mred"},
    "no files": lambda info: info | {"siblings": None},
    "files as an object": lambda info: info | {"siblings": {"config.json": 1}},
    "files as names": lambda info: info | {"siblings": ["config.json"]},
    "a file without a name": with_sibling(),
    "a name that is a number": with_sibling(rfilename=3),
    "a name that is a list": with_sibling(rfilename=["a"]),
    "a name that leads out": with_sibling(rfilename="../evil.json"),
    "a name that leads out further in": with_sibling(rfilename="a/../../evil.safetensors"),
    "a name that is absolute": with_sibling(rfilename="/etc/passwd"),
    "an empty name": with_sibling(rfilename=""),
    "a name with a NUL": with_sibling(rfilename="a\0b.json"),
    "a name that is no text": with_sibling(rfilename="\ud800.json"),
    "a name twice": with_sibling(rfilename="config.json"),
    "no size": of_shard(size=None, lfs=None),
    "a size below 0": of_shard(size=-1),
    "a size that is a text": of_shard(size="12"),
    "a size with a fraction": of_shard(size=1.5),
    "a size that is true": of_shard(size=True),
    "a size without end": of_shard(size=2**70),
    "LFS as a text": of_shard(lfs="abc"),
    "LFS as a list": of_shard(lfs=[1]),
    "a digest that is a number": of_shard(lfs={"sha256": 5, "size": 5}),
    "a blob that is a list": of_shard(lfs=None, blobId=[5]),
}


@pytest.mark.parametrize("edit", LISTINGS.values(), ids=LISTINGS)
def test_a_listing_that_the_hub_never_gives_is_one_error(
    hub: HubServer, folder: Path, edit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    hub.publish(REPO, folder)
    hub.edit_info = edit
    with pytest.raises(SourceError, match=f"{REPO}: {hub.endpoint} answers, but not as the Hub does") as caught:
        open_hub(REPO)
    assert str(caught.value).isprintable()
    assert not hub.reads()


ODD_NAMES = (
    "a\\b.json",
    "a\\..\\b.json",
    "C:\\x.json",
    "x\ny.json",
    "\x1b[31mred.json",
    "x?y#z.json",
)


@pytest.mark.slow
def test_names_that_only_look_dangerous_take_no_part(hub: HubServer, tool: Tool, folder: Path, tmp_path: Path) -> None:
    hub.publish(REPO, folder)
    hub.repos[REPO].commits[0][1].update({name: blob_of(b"{}") for name in ODD_NAMES})
    assert tool("convert", folder, tmp_path / "local").returncode == 0
    run = tool("convert", REPO, tmp_path / "out")
    assert run.returncode == 0, run.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"local", "out"}
    shards = {name: raw for name, raw in files_of(tmp_path / "local").items() if "safetensors" in name}
    assert shards.items() <= files_of(tmp_path / "out").items()


HTML = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 20\r\n\r\n<html>login</html>\r\n"
ANSWERS: dict[str, tuple[Fault, str]] = {
    "a page for people": (Fault("/api/", answer=HTML), "not as the Hub does"),
    "a page in place of a file": (Fault("config.json", answer=HTML), "20 bytes, not"),
    "an endless redirect": (Fault("/api/", status=302, headers={"Location": "/api/models/a/b"}, times=99), "redirects"),
    "an endless redirect of a file": (
        Fault("/resolve/", status=302, headers={"Location": "/o/m/resolve/x/y"}, times=99),
        "redirects without end",
    ),
    "a redirect to a file here": (
        Fault("/resolve/", status=302, headers={"Location": "file:///etc/passwd"}),
        "sends us to file:///etc/passwd, which is no web address",
    ),
    "a redirect to nothing": (Fault("/resolve/", status=302, headers={"Location": "http://[::1"}), "no web address"),
    "a redirect with escapes": (Fault("/resolve/", status=302, headers={"Location": "http://a\x7fb"}), "web address"),
    "forbidden by law": (
        Fault("/resolve/", status=451, headers={"X-Error-Message": "\x1b[31mbanned"}),
        "HTTP 451: \\x1b[31mbanned",
    ),
    "too many headers": (
        Fault("/cdn/", answer=b"HTTP/1.1 206 P\r\nX: " + b"a" * 3_000_000 + b"\r\nContent-Length: 0\r\n\r\n", times=99),
        "can't be reached",
    ),
    "no HTTP at all": (Fault("/api/", answer=b"SSH-2.0-hello\r\n\r\n", times=99), "can't be reached"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        pytest.param(*case, id=name, marks=() if name.endswith("to nothing") else pytest.mark.slow)
        for name, case in ANSWERS.items()
    ],
)
def test_an_answer_that_is_none_is_one_error(hub: HubServer, tool: Tool, folder: Path, fault: Fault, text: str) -> None:
    hub.publish(REPO, folder)
    hub.faults = [fault]
    run = tool("inspect", REPO)
    told(run, 3, text)
    assert SECRET not in run.stderr


def test_the_token_does_not_follow_a_redirect_to_another_host(hub: HubServer, tool: Tool, folder: Path) -> None:
    hub.publish(REPO, folder)
    elsewhere = {"Location": f"http://localhost:{hub.port}/api/elsewhere"}
    hub.faults = [Fault("/api/models/", status=302, headers=elsewhere)]
    told(tool("inspect", REPO), 3, "HTTP 404")
    hub.faults = [Fault("/resolve/", status=302, headers=elsewhere)]
    told(tool("inspect", REPO), 3, "HTTP 404")
    asked = [one.authorization for one in hub.asked if "elsewhere" in one.path]
    assert asked == [None, None]
    assert f"Bearer {SECRET}" in {one.authorization for one in hub.asked}


def test_a_repository_that_was_renamed_is_found(hub: HubServer, tool: Tool, folder: Path, tmp_path: Path) -> None:
    hub.publish("owner/new-name", folder)
    hub.publish(REPO, folder)
    hub.repos[REPO].renamed = "owner/new-name"
    assert tool.json("inspect", REPO)["verdict"] == "raw"


@pytest.mark.slow
def test_a_repository_that_was_renamed_is_converted(hub: HubServer, tool: Tool, folder: Path, tmp_path: Path) -> None:
    hub.publish("owner/new-name", folder)
    hub.publish(REPO, folder)
    hub.repos[REPO].renamed = "owner/new-name"
    assert tool("convert", folder, tmp_path / "local").returncode == 0
    for way in ([], ["--via-cache"]):
        run = tool("convert", REPO, tmp_path / "out", "--overwrite", *way)
        assert run.returncode == 0, run.stderr
        assert files_of(tmp_path / "out") == files_of(tmp_path / "local")


@pytest.mark.slow
def test_branches_with_slashes_are_found_and_those_that_lead_out_are_none(
    hub: HubServer, tool: Tool, folder: Path, tmp_path: Path
) -> None:
    hub.publish(REPO, folder)
    repo = hub.repos[REPO]
    repo.commits.insert(0, ("refs/pr/1", repo.commits[0][1]))
    hub.edit_info = lambda info: info | {"sha": repo.commits[-1][0]}
    out = tmp_path / "out"
    assert tool("convert", REPO, out, "--via-cache", "--revision", "refs/pr/1").returncode == 0
    assert tool("inspect", REPO, "--revision", "refs/pr/1", HF_HUB_OFFLINE="1").returncode == 0
    hub.forget_requests()
    for revision in ("../../../x", "/etc", "a..b", "main\n", "v9\x1b[31m", "\udcff"):
        told(tool("inspect", REPO, f"--revision={revision}"), 3, "no valid revision")
    assert not hub.asked


def parts_of(folder: Path) -> Callable[[str, str], tuple[bytes, list[tuple[int, int]]]]:
    """The file and the ranges that a request for the CDN is about."""

    def found(path: str, ranges: str) -> tuple[bytes, list[tuple[int, int]]]:
        raw = (folder / path.rpartition("file=")[2]).read_bytes()
        return raw, [(int(begin), int(end) + 1) for begin, end in re.findall(r"(\d+)-(\d+)", ranges)]

    return found


def whole_answer(head: str, body: bytes) -> bytes:
    return f"HTTP/1.1 206 P\r\n{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def compressed(folder: Path) -> Callable[[str, str], bytes]:
    def answer(path: str, ranges: str) -> bytes:
        raw, spans = parts_of(folder)(path, ranges)
        begin, end = spans[0]
        head = f"Content-Encoding: gzip\r\nContent-Range: bytes {begin}-{end - 1}/{len(raw)}"
        return whole_answer(head, gzip.compress(raw[begin:end], 0))  # longer than what it holds

    return answer


def in_parts(folder: Path) -> Callable[[str, str], bytes]:
    def answer(path: str, ranges: str) -> bytes:
        raw, spans = parts_of(folder)(path, ranges)
        body = b"".join(
            f"\r\n--part\r\nContent-Range: bytes {begin}-{end - 1}/{len(raw)}\r\n\r\n".encode() + raw[begin:end]
            for begin, end in spans
        )
        return whole_answer("Content-Type: multipart/byteranges; boundary=part", body + b"\r\n--part--\r\n")

    return answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "text"), [(compressed, "the answer is compressed"), (in_parts, "names no range")], ids=["gzip", "parts"]
)
def test_bytes_that_are_not_the_files_own_are_never_written(
    hub: HubServer, tool: Tool, folder: Path, tmp_path: Path, make: Any, text: str
) -> None:
    hub.publish(REPO, folder)
    assert tool("convert", folder, tmp_path / "local").returncode == 0
    n_reads = 3 * 2  # of each shard its header and its gains: from there on weights are read, which any bytes may be
    hub.faults = [Fault("/cdn/", times=2, after=n_reads, answer=make(folder))]
    assert tool("convert", REPO, tmp_path / "out").returncode == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "local")
    hub.faults = [Fault("/cdn/", times=999, after=n_reads, answer=make(folder))]
    told(tool("convert", REPO, tmp_path / "other"), 3, text)
    assert not (tmp_path / "other").exists()


DRIP = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b" " * 100_000


@pytest.mark.slow
def test_an_answer_that_only_drips_has_an_end(hub: HubServer, tool: Tool, folder: Path) -> None:
    hub.publish(REPO, folder)
    hub.faults = [Fault("/resolve/", times=99, answer=whole_file_that_drips(folder), seconds_a_byte=0.2)]
    begun = time.monotonic()
    told(tool("inspect", REPO, HF_HUB_DOWNLOAD_TIMEOUT="1"), 3, "hardly comes any more")
    assert time.monotonic() - begun < 60


def whole_file_that_drips(folder: Path) -> Callable[[str, str], bytes]:
    def answer(path: str, ranges: str) -> bytes:
        raw = (folder / path.rpartition("/")[2]).read_bytes()
        return f"HTTP/1.1 200 OK\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw

    return answer


@pytest.mark.slow
@pytest.mark.parametrize("where", ["/api/", "/resolve/"])
def test_a_batch_that_waits_for_the_hub_stops_when_told(
    hub: HubServer, tool: Tool, folder: Path, tmp_path: Path, where: str
) -> None:
    hub.publish(REPO, folder)
    hub.faults = [Fault(where, times=99, status=429, headers={"Retry-After": "250"})]
    jobs = tmp_path / "jobs.toml"
    jobs.write_text(f'[[job]]\nsource = "{REPO}"\ndestination = "out"\n')
    for options in ([], ["--dry-run"]):
        hub.forget_requests()
        process = subprocess.Popen(
            tool.command("batch", jobs, *options), env=tool.environment, stdout=subprocess.PIPE, text=True
        )
        while not any(one.status == 429 for one in hub.asked):
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        out, _ = process.communicate(timeout=60)
        assert time.monotonic() - begun < 10
        assert process.returncode == 143
        if not options:
            assert [json.loads(line)["state"] for line in out.splitlines() if '"event": "job"' in line][-1] == "stopped"


def test_how_long_to_wait_is_read_from_whatever_the_server_says() -> None:
    for text in ("", "abc", "-5", "0.5", "1e9", "²", "nan", "inf", "Wed, 21 Oct 99999 07:28:00 GMT"):
        assert seconds_to_wait({"retry-after": text}) is None, text
    assert seconds_to_wait({"retry-after": " 7 "}) == 7
    assert seconds_to_wait({"retry-after": "9" * 400}) == float("inf")
    assert seconds_to_wait({"retry-after": "Mon, 01 Jan 0001 00:00:00 GMT"}) == 0
    assert (seconds_to_wait({"retry-after": "Wed, 21 Oct 2099 07:28:00 GMT"}) or 0) > 1e9


def test_a_length_is_a_plain_number() -> None:
    assert parse_count("0012") == 12
    for text in (None, "", "-1", "1.5", "²", "٣", "9" * 5000, " 1"):
        assert parse_count(text) is None, text


SETTINGS: dict[str, tuple[dict[str, str], str]] = {
    "no address": ({"HF_ENDPOINT": "foo"}, "HF_ENDPOINT is no address of a Hub"),
    "an empty address": ({"HF_ENDPOINT": ""}, "HF_ENDPOINT"),
    "another protocol": ({"HF_ENDPOINT": "ftp://x"}, "HF_ENDPOINT"),
    "half an address": ({"HF_ENDPOINT": "http://[::1"}, "HF_ENDPOINT"),
    "a port out of range": ({"HF_ENDPOINT": "http://localhost:99999"}, "HF_ENDPOINT"),
    "a newline": ({"HF_ENDPOINT": "http://localhost\n"}, "HF_ENDPOINT"),
    "a query": ({"HF_ENDPOINT": "http://localhost?a=b"}, "HF_ENDPOINT"),
    "a password in the address": ({"HF_ENDPOINT": f"http://user:{SECRET}@127.0.0.1:9"}, "http://127.0.0.1:9 can't be"),
    "a proxy of another protocol": ({"ALL_PROXY": "ftp://x:1"}, "settings can't be used"),
    "half a proxy": ({"ALL_PROXY": "http://[::1"}, "settings can't be used"),
    "SOCKS": ({"ALL_PROXY": f"socks5://user:{SECRET}@127.0.0.1:9"}, "settings can't be used"),
    "no certificates": ({"SSL_CERT_FILE": "/nowhere"}, "settings can't be used"),
    "certificates that are none": ({"SSL_CERT_FILE": __file__}, "SSL_CERT_FILE"),
    "a token that is none": ({"HF_TOKEN": f"€{SECRET}"}, "HF_TOKEN"),
    "a timeout that is none": ({"HF_HUB_DOWNLOAD_TIMEOUT": "soon"}, "HF_HUB_DOWNLOAD_TIMEOUT"),
    "a timeout below 0": ({"HF_HUB_DOWNLOAD_TIMEOUT": "-1"}, "HF_HUB_DOWNLOAD_TIMEOUT"),
}


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        pytest.param(*case, id=name, marks=() if name == "SOCKS" else pytest.mark.slow)
        for name, case in SETTINGS.items()
    ],
)
def test_settings_that_lead_nowhere_are_named_and_their_secrets_are_not(
    hub: HubServer, tool: Tool, folder: Path, environment: dict[str, str], text: str
) -> None:
    hub.publish(REPO, folder)
    run = tool("inspect", REPO, **(environment | {"NO_PROXY": ""}))
    told(run, 3, text)
    assert SECRET not in run.stderr
    assert not hub.asked


@pytest.mark.slow
@pytest.mark.parametrize("place", ["HF_HOME", "HF_HUB_CACHE"])
def test_a_cache_that_can_not_be_written_is_named_and_needed_only_by_downloads(
    hub: HubServer, tool: Tool, folder: Path, tmp_path: Path, place: str
) -> None:
    hub.publish(REPO, folder)
    environment = {place: str(folder / "config.json")}
    told(tool("convert", REPO, tmp_path / "out", "--via-cache", **environment), 4, "the download fails", "HF_HOME")
    assert not (tmp_path / "out").exists()
    assert tool("convert", REPO, tmp_path / "out", **environment).returncode == 0


@pytest.mark.slow
def test_a_download_that_is_not_what_was_promised_is_the_sources_fault(
    hub: HubServer, tool: Tool, folder: Path, tmp_path: Path
) -> None:
    hub.publish(REPO, folder)
    hub.faults = [Fault("/tree/", status=200)]
    told(tool("convert", REPO, tmp_path / "out", "--via-cache"), 3, "not as the Hub does")
    hub.faults = [Fault("/cdn/", after=6, times=99, short_by=1000)]
    told(tool("convert", REPO, tmp_path / "out", "--via-cache"), 3, "the download fails", "--via-cache")
    assert not (tmp_path / "out").exists()


DISORDER: dict[str, Callable[[Path], object]] = {
    "a reference that is no text": lambda repo: (repo / "refs" / "main").write_bytes(b"\xff\xfe\0"),
    "a reference that leads out": lambda repo: (repo / "refs" / "main").write_text("../../../.."),
    "a file in place of a folder": lambda repo: (
        (repo / "snapshots").rename(repo / "old"),
        (repo / "snapshots").write_text("x"),
    ),
    "no contents": lambda repo: (repo / "blobs").rename(repo / "old"),
}


@pytest.mark.slow
def test_a_cache_in_disorder_is_as_good_as_none(hub: HubServer, tool: Tool, folder: Path, tmp_path: Path) -> None:
    hub.publish(REPO, folder)
    for n, (name, change) in enumerate(DISORDER.items()):
        tool.environment["HF_HOME"] = str(tmp_path / f"home{n}")
        assert tool("convert", REPO, tmp_path / "first", "--via-cache", "--overwrite").returncode == 0, name
        (repo,) = (tmp_path / f"home{n}" / "hub").glob("models--*")
        change(repo)
        told(tool("inspect", REPO, HF_HUB_OFFLINE="1"), 3, "not in the local cache")
        assert tool("convert", REPO, tmp_path / "second", "--overwrite").returncode == 0, name
        assert files_of(tmp_path / "second") == files_of(tmp_path / "first")
