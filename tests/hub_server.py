"""The Hub on loopback: a real HTTP server that speaks as much of its API as the real client asks for, and its faults.

Large files are answered with a redirect to another host name (`localhost`), as the Hub sends its readers to a CDN; a
token must not arrive there. Every request is kept, with the bytes that went out for it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_LFS_FROM = 1 << 16  # bytes: smaller files are Git's own
_BLOCK = 1 << 14
_ZERO = "0" * 40


@dataclass(frozen=True)
class Blob:
    """One file's content: on disk, or in memory."""

    content: Path | bytes
    n_bytes: int
    git: str
    sha256: str | None  # of a LFS file

    @property
    def etag(self) -> str:
        return self.sha256 or self.git

    def read(self, begin: int, end: int) -> bytes:
        if isinstance(self.content, bytes):
            return self.content[begin:end]
        with self.content.open("rb") as opened:
            opened.seek(begin)
            return opened.read(end - begin)


def blob_of(content: Path | bytes, *, sparse: bool = False) -> Blob:
    """A blob; of a sparse file only the name of its content is made up, as nobody reads all of it."""
    n_bytes = len(content) if isinstance(content, bytes) else content.stat().st_size
    if sparse:
        raw = str((content, n_bytes)).encode()
    else:
        raw = content if isinstance(content, bytes) else content.read_bytes()
    is_lfs = n_bytes >= _LFS_FROM
    git = hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()
    return Blob(content, n_bytes, git, hashlib.sha256(raw).hexdigest() if is_lfs else None)


@dataclass
class Repo:
    """A repository: its commits, the newest last."""

    commits: list[tuple[str, dict[str, Blob]]] = field(default_factory=list)
    gated: bool = False
    renamed: str | None = None  # where it is now
    private: bool = False
    token: str | None = None  # that opens it

    def at(self, revision: str) -> tuple[str, dict[str, Blob]] | None:
        if revision == "main":
            return self.commits[-1] if self.commits else (_ZERO, {})
        return next((commit for commit in self.commits if commit[0] == revision), None)


@dataclass
class Fault:
    """Something that goes wrong with the requests whose path holds `where`, so many times."""

    where: str
    times: int = 1
    after: int = 0  # requests that still go well
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    drop_after: int | None = None  # bytes, then the connection breaks
    etag: str | None = None
    n_bytes: int | None = None  # the length that is claimed
    short_by: int = 0  # bytes that are neither sent nor promised
    stall: float = 0.0  # seconds before the body
    no_ranges: bool = False  # the whole file, whatever was asked for
    answer: bytes | Callable[[str, str], bytes] | None = None  # verbatim, or made from path and range; then a close
    seconds_a_byte: float = 0.0  # of that answer's body


@dataclass
class Asked:
    """One request, and what went out for it."""

    method: str
    path: str
    range: str | None
    authorization: str | None
    status: int = 0
    n_bytes: int = 0


class HubServer:
    """The server, its repositories, its faults, and what it was asked."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.asked: list[Asked] = []
        self.bytes_a_second: float | None = None  # of each connection to the CDN
        self.several_ranges = True
        self.n_connections = 0  # that were opened
        self.uploads: dict[str, bytes] = {}
        self.token: str | None = None  # that may write
        self.edit_info: Callable[[dict[str, Any]], Any] | None = None  # what a repository is said to hold
        self._lock = threading.Lock()
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.daemon_threads = True
        self._http.hub = self  # type: ignore[attr-defined]
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def publish(self, repo: str, folder: Path, *, sparse: bool = False) -> str:
        """Commit a folder as all that a repository holds. The commit."""
        files = {
            path.relative_to(folder).as_posix(): blob_of(path, sparse=sparse and path.suffix == ".safetensors")
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        return self.commit(repo, files)

    def commit(self, repo: str, files: Mapping[str, Blob]) -> str:
        found = self.repos.setdefault(repo, Repo())
        text = json.dumps([len(found.commits), sorted((name, blob.etag) for name, blob in files.items())])
        sha = hashlib.sha1(text.encode()).hexdigest()
        found.commits.append((sha, dict(files)))
        return sha

    def forget_requests(self) -> None:
        with self._lock:
            self.asked.clear()

    def reads(self, what: str = "") -> list[Asked]:
        """The requests for files' bytes whose path holds `what`, redirects left out."""
        with self._lock:
            return [one for one in self.asked if "/cdn/" in one.path or "/resolve/" in one.path if what in one.path]

    def fault_for(self, path: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.where in path and fault.times:
                    if fault.after:
                        fault.after -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    def note(self, asked: Asked) -> None:
        with self._lock:
            self.asked.append(asked)


class _Http(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the server."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serving() -> Iterator[HubServer]:
    server = HubServer()
    try:
        yield server
    finally:
        server.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "hub"
    asked: Asked
    fault: Fault | None

    @property
    def hub(self) -> HubServer:
        found: HubServer = self.server.hub  # type: ignore[attr-defined]
        return found

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests ask `asked`."""

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def setup(self) -> None:
        super().setup()
        self.hub.n_connections += 1

    def _serve(self) -> None:
        self.asked = Asked(self.command, self.path, self.headers.get("Range"), self.headers.get("Authorization"))
        self.hub.note(self.asked)
        self.fault = self.hub.fault_for(self.path)
        n_body = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(n_body) if n_body else b""
        with suppress(BrokenPipeError, ConnectionResetError):
            if self.fault is not None and self.fault.answer is not None:
                self._answer(self.fault.answer, self.fault.seconds_a_byte)
            elif self.fault is not None and self.fault.status is not None:
                self._json({"error": "fault"}, self.fault.status, dict(self.fault.headers))
            else:
                self._route()

    def _answer(self, answer: bytes | Callable[[str, str], bytes], seconds_a_byte: float) -> None:
        raw = answer if isinstance(answer, bytes) else answer(self.path, self.headers.get("Range") or "")
        head, _, body = raw.partition(b"\r\n\r\n")
        self.wfile.write(head + b"\r\n\r\n")
        step = 1 if seconds_a_byte else max(len(body), 1)
        for at in range(0, len(body), step):
            self.wfile.write(body[at : at + step])
            time.sleep(seconds_a_byte)
        self._break()

    def _route(self) -> None:
        quoted = urlsplit(self.path).path
        path = unquote(quoted)
        if match := re.fullmatch(r"/cdn/([0-9a-f]+)", path):
            self._cdn(match[1])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", quoted):
            self._resolve(*map(unquote, match.groups()))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", quoted):
            self._tree(*map(unquote, match.groups()))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/([^/]+))?", quoted):
            self._info(match[1], unquote(match[2] or "main"))
        else:
            self._write(path)

    def _write(self, path: str) -> None:
        hub = self.hub
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}" and "/lfs/" not in path:
            self._json({"error": "Invalid credentials in Authorization header"}, 401,
                       {"X-Error-Message": "Invalid credentials in Authorization header"})  # fmt: skip
        elif path == "/api/whoami-v2":
            self._json({"type": "user", "name": "owner", "orgs": [], "auth": {}})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            wanted = json.loads(self.body)
            repo = f"{wanted.get('organization') or 'owner'}/{wanted['name']}"
            status = 409 if repo in hub.repos else 200
            made = hub.repos.setdefault(repo, Repo())
            if status == 200:
                made.private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
                made.token = hub.token
            self._json({"url": f"{hub.endpoint}/{repo}", "name": repo, "error": "exists"}, status)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", path):
            files = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["size"] >= _LFS_FROM else "regular",
                    "shouldIgnore": False,
                    "oid": self._oid(match[1], one["path"]),
                }
                for one in json.loads(self.body)["files"]
            ]  # fmt: skip
            self._json({"files": files})
        elif re.fullmatch(r"/[^/]+/[^/]+\.git/info/lfs/objects/batch", path):
            self._batch()
        elif match := re.fullmatch(r"/lfs/([0-9a-f]{64})", path):
            hub.uploads[match[1]] = self.body
            self._json({})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", path):
            self._commit(match[1])
        else:
            self._json({"error": f"no such place: {path}"}, 404)

    def _oid(self, repo: str, file: str) -> str | None:
        found = self.hub.repos[repo].at("main")
        blob = found[1].get(file) if found is not None else None
        return None if blob is None else blob.etag

    def _batch(self) -> None:
        objects: list[dict[str, Any]] = []
        for one in json.loads(self.body)["objects"]:
            entry: dict[str, Any] = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.hub.uploads:
                entry["actions"] = {"upload": {"href": f"{self.hub.endpoint}/lfs/{one['oid']}", "header": {}}}
            objects.append(entry)
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, repo: str) -> None:
        found = self.hub.repos[repo].at("main")
        files = dict(found[1]) if found is not None else {}
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = blob_of(base64.b64decode(value["content"]))
            elif entry["key"] == "lfsFile":
                content = self.hub.uploads[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                files[value["path"]] = Blob(content, len(content), _ZERO, value["oid"])
        sha = self.hub.commit(repo, files)
        self._json({"commitUrl": f"{self.hub.endpoint}/{repo}/commit/{sha}", "commitOid": sha, "pullRequestUrl": None})

    def _open(self, name: str, *, info: bool = False) -> Repo | None:
        """The repository, if the reader may see it; else the answer is given."""
        repo = self.hub.repos.get(name)
        is_let_in = repo is not None and self.headers.get("Authorization") == f"Bearer {repo.token}"
        if repo is not None and repo.renamed is not None:
            place = self.path.replace(name, repo.renamed, 1)
            self._json({"error": "moved"}, 307, {"Location": place})
            return None
        if repo is None or (repo.private and not is_let_in):
            self._json({"error": "Repository not found"}, 401, {"X-Error-Code": "RepoNotFound"})
            return None
        if repo.gated and not is_let_in and not info:
            status = 401 if self.headers.get("Authorization") is None else 403
            self._json({"error": "Access is restricted"}, status, {"X-Error-Code": "GatedRepo"})
            return None
        return repo

    def _at(self, name: str, revision: str, *, info: bool = False) -> tuple[str, dict[str, Blob]] | None:
        repo = self._open(name, info=info)
        if repo is None:
            return None
        found = repo.at(revision)
        if found is None:
            self._json({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        return found

    def _info(self, name: str, revision: str) -> None:
        found = self._at(name, revision, info=True)
        if found is None:
            return
        siblings = []
        for file, blob in found[1].items():
            entry: dict[str, Any] = {"rfilename": file, "size": blob.n_bytes, "blobId": blob.git}
            if blob.sha256 is not None:
                entry["lfs"] = {"sha256": blob.sha256, "size": blob.n_bytes, "pointerSize": 130}
            siblings.append(entry)
        info = {"id": name, "modelId": name, "sha": found[0], "siblings": siblings, "tags": [], "downloads": 0}
        self._json(info if self.hub.edit_info is None else self.hub.edit_info(info))

    def _tree(self, name: str, revision: str) -> None:
        found = self._at(name, revision)
        if found is None:
            return
        entries = []
        for file, blob in found[1].items():
            entry: dict[str, Any] = {"type": "file", "path": file, "size": blob.n_bytes, "oid": blob.git}
            if blob.sha256 is not None:
                entry["lfs"] = {"oid": blob.sha256, "size": blob.n_bytes, "pointerSize": 130}
            entries.append(entry)
        self._json(entries)

    def _resolve(self, name: str, revision: str, file: str) -> None:
        found = self._at(name, revision)
        if found is None:
            return
        commit, files = found
        blob = files.get(file)
        if blob is None:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        etag = blob.etag if self.fault is None or self.fault.etag is None else self.fault.etag
        if blob.sha256 is None:
            self._send(blob, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'})
            return
        self._json({}, 302, {
            "X-Repo-Commit": commit,
            "X-Linked-Size": str(self._length(blob)),
            "X-Linked-Etag": f'"{etag}"',
            "Location": f"http://localhost:{self.hub.port}/cdn/{blob.sha256}?file={file}",
        })  # fmt: skip

    def _cdn(self, sha256: str) -> None:
        for repo in self.hub.repos.values():
            for _, files in repo.commits:
                for blob in files.values():
                    if blob.sha256 == sha256:
                        etag = blob.git if self.fault is None or self.fault.etag is None else self.fault.etag
                        self._send(blob, {"ETag": f'"{etag}"'}, slow=True)
                        return
        self._json({"error": "no such object"}, 404)

    def _length(self, blob: Blob) -> int:
        return blob.n_bytes if self.fault is None or self.fault.n_bytes is None else self.fault.n_bytes

    def _send(self, blob: Blob, headers: dict[str, str], *, slow: bool = False) -> None:
        n_bytes = self._length(blob)
        wanted = self.headers.get("Range")
        spans = _parse_ranges(wanted, n_bytes) if wanted is not None else []
        if spans is None:
            self._json({}, 416, {"Content-Range": f"bytes */{n_bytes}"})
            return
        if len(spans) > 1 and not self.hub.several_ranges:
            spans = []
        if self.fault is not None and self.fault.no_ranges:
            spans = []
        if len(spans) > 1:
            head = "\r\n--part\r\nContent-Type: application/octet-stream\r\nContent-Range: bytes {}-{}/{}\r\n\r\n"
            body = b"".join(head.format(b, e - 1, n_bytes).encode() + blob.read(b, e) for b, e in spans)
            body += b"\r\n--part--\r\n"
            blob, spans = Blob(body, len(body), "", None), [(0, len(body))]
            headers |= {"Content-Type": "multipart/byteranges; boundary=part"}
            status = 206
        elif spans:
            headers |= {"Content-Range": f"bytes {spans[0][0]}-{spans[0][1] - 1}/{n_bytes}"}
            status = 206
        else:
            spans, status = [(0, n_bytes)], 200
        begin, end = spans[0]
        end -= 0 if self.fault is None else min(self.fault.short_by, end - begin)
        self._head(status, end - begin, headers)
        if self.command == "HEAD":
            return
        if self.fault is not None and self.fault.stall:
            time.sleep(self.fault.stall)
        self._pour(blob, begin, end, slow)

    def _pour(self, blob: Blob, begin: int, end: int, slow: bool) -> None:
        begun, first = time.monotonic(), begin
        drop = None if self.fault is None else self.fault.drop_after
        while begin < end:
            part = blob.read(begin, min(begin + _BLOCK, end))
            if drop is not None and begin - first + len(part) > drop:
                part = part[: max(0, drop - (begin - first))]
                self.wfile.write(part)
                self.asked.n_bytes += len(part)
                self._break()
                return
            self.wfile.write(part)
            self.asked.n_bytes += len(part)
            begin += len(part)
            if slow and self.hub.bytes_a_second is not None:
                time.sleep(max(0.0, begun + (begin - first) / self.hub.bytes_a_second - time.monotonic()))

    def _break(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _head(self, status: int, n_bytes: int, headers: Mapping[str, str]) -> None:
        self.asked.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(n_bytes))
        self.end_headers()

    def _json(self, document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps(document).encode()
        self._head(status, len(body), {"Content-Type": "application/json"} | dict(headers or {}))
        if self.command != "HEAD":
            self.wfile.write(body)


def _parse_ranges(header: str, n_bytes: int) -> list[tuple[int, int]] | None:
    """The ranges of a Range header; None where one lies past the end."""
    spans = []
    for begin, end in re.findall(r"(\d+)-(\d*)", header):
        if int(begin) >= n_bytes:
            return None
        spans.append((int(begin), min(int(end) + 1, n_bytes) if end else n_bytes))
    return spans
