"""A small Hugging Face Hub on the loopback interface, sufficient for the real client to upload and download a model.

It implements the Hub's HTTP API (repositories, branches, preupload, git-LFS, commits, resolve) in memory. A test can
inject faults into the next responses to a kind of request.
"""

import base64
import hashlib
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "loopbackTOKEN" * 3
LFS_ENDINGS = (".safetensors", ".bin", ".png", ".spm", ".model", ".onnx", ".wasm")


@dataclass
class Commit:
    message: str
    files: dict[str, bytes]
    changed: list[str]
    deleted: list[str]

    @property
    def oid(self) -> str:
        text = repr(
            (
                self.message,
                sorted((name, hashlib.sha1(data).hexdigest()) for name, data in self.files.items()),
            )
        )
        return hashlib.sha1(text.encode()).hexdigest()


@dataclass
class Repository:
    private: bool
    branches: dict[str, list[Commit]] = field(default_factory=dict)

    def head(self, revision: str) -> Commit | None:
        if revision in self.branches:
            return self.branches[revision][-1]
        commits = (commit for branch in self.branches.values() for commit in branch)
        return next((commit for commit in commits if commit.oid == revision), None)


class LoopbackHub:
    """`with LoopbackHub() as hub:`. The client must use `hub.endpoint`.

    Attributes:
        repositories: by name. Each has branches of commits.
        requests: (method, kind) of every request. `count(kind)` counts them.
        faults: kind -> faults of the next requests: (status, headers) of an error response, or "lost" to close the
            connection before the response of a request that succeeded.
        writers: namespaces in which the token may write.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.faults: dict[str, list[Any]] = {}
        self.writers = {"me"}
        hub = self

        class Bound(Handler):
            pass

        Bound.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> "LoopbackHub":
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def count(self, kind: str) -> int:
        return Counter(kind for _, kind in self.requests)[kind]

    def make(self, name: str, private: bool = False) -> Repository:
        first = Commit("initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"}, [], [])
        self.repositories[name] = Repository(private, {"main": [first]})
        return self.repositories[name]

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        return self.repositories[name].branches[branch][-1].files


class Handler(BaseHTTPRequestHandler):
    """One request. Faults and counts refer to its `kind`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or head and body of an answer, two writes, are 40 ms apart
    hub: LoopbackHub

    def log_message(self, *_: Any) -> None:
        pass

    def handle_any(self) -> None:
        self.path_parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        kind, answer = self.route()
        self.hub.requests.append((self.command, kind))
        fault = self.hub.faults.get(kind) or []
        fault = fault.pop(0) if fault else None
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length) if length else self.read_chunks()
        if isinstance(fault, tuple):
            return self.reply(fault[0], {"error": "as ordered"}, fault[1])
        if self.headers.get("Authorization", f"Bearer {TOKEN}") != f"Bearer {TOKEN}":
            return self.reply(401, {"error": "Invalid credentials in Authorization header"})
        if (
            self.command in ("POST", "PUT")
            and kind != "put"
            and "Authorization" not in self.headers
        ):
            return self.reply(401, {"error": "Invalid username or password."})
        self.lost = fault == "lost"
        return answer()

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def read_chunks(self) -> bytes:
        """A chunked body, in which the client streams files."""
        body = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        return body

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()

    def reply(
        self,
        status: int,
        value: Any = None,
        headers: dict[str, str] | None = None,
        data: bytes = b"",
    ) -> None:
        if getattr(self, "lost", False):
            return self.hang_up()
        data = data or (json.dumps(value).encode() if value is not None else b"")
        self.send_response(status)
        for name, text in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def route(self) -> tuple[str, Any]:
        match self.path_parts:
            case ["api", "whoami-v2"]:
                return "whoami", lambda: self.reply(200, {"name": "me", "type": "user", "orgs": []})
            case ["api", "validate-yaml"]:
                return "yaml", lambda: self.reply(200, {"errors": [], "warnings": []})
            case ["api", "repos", "create"]:
                return "create", self.create
            case ["api", "models", owner, name, "preupload", revision]:
                return "preupload", lambda: self.preupload(f"{owner}/{name}", revision)
            case ["api", "models", owner, name, "commit", revision]:
                return "commit", lambda: self.commit(f"{owner}/{name}", revision)
            case ["api", "models", owner, name, "branch", branch]:
                return "branch", lambda: self.branch(f"{owner}/{name}", branch)
            case ["api", "models", owner, name, "tree", revision, *folder]:
                return "tree", lambda: self.tree(f"{owner}/{name}", revision, "/".join(folder))
            case ["api", "models", owner, name, "revision", revision]:
                return "info", lambda: self.info(f"{owner}/{name}", revision)
            case ["api", "models", owner, name]:
                return "info", lambda: self.info(f"{owner}/{name}", "main")
            case [owner, git, "info", "lfs", "objects", "batch"] if git.endswith(".git"):
                return "batch", self.batch
            case ["lfs", oid]:
                return "put", lambda: self.put(oid)
            case ["lfs", oid, "verify"]:
                return "verify", lambda: self.reply(200 if oid in self.hub.objects else 404, {})
            case [owner, name, "resolve", revision, *path]:
                return "resolve", lambda: self.resolve(f"{owner}/{name}", revision, "/".join(path))
        return self.path, lambda: self.reply(404, {"error": f"no {self.path}"})

    # Requests by kind

    def create(self) -> None:
        asked = json.loads(self.body)
        owner = asked.get("organization") or "me"
        name = f"{owner}/{asked['name']}"
        url = {"url": f"{self.hub.endpoint}/{name}"}
        if owner not in self.hub.writers:
            return self.reply(
                403, {"error": f"You don't have the rights to create a model under {owner}"}
            )
        if name in self.hub.repositories:
            return self.reply(409, {"error": "You already created this model repo", **url})
        # sent by huggingface_hub 2 and 1, respectively
        self.hub.make(name, asked.get("visibility") == "private" or bool(asked.get("private")))
        return self.reply(200, url)

    def found(self, name: str, revision: str) -> Commit | None:
        repository = self.hub.repositories.get(name)
        commit = repository.head(revision) if repository else None
        if commit is None:
            code = "RevisionNotFound" if repository else "RepoNotFound"
            self.reply(404, {"error": code}, {"X-Error-Code": code})
        return commit

    def branch(self, name: str, branch: str) -> None:
        branches = self.hub.repositories[name].branches
        if branch in branches:
            return self.reply(409, {"error": "Reference already exists"})
        branches[branch] = list(branches["main"])
        return self.reply(200, {})

    def preupload(self, name: str, revision: str) -> None:
        if (commit := self.found(name, revision)) is None:
            return None
        answers = []
        for each in json.loads(self.body)["files"]:
            path = each["path"]
            lfs = path.endswith(LFS_ENDINGS)
            answer = {
                "path": path,
                "uploadMode": "lfs" if lfs else "regular",
                "shouldIgnore": False,
            }
            if path in commit.files:
                data = commit.files[path]
                blob = f"blob {len(data)}\0".encode() + data
                answer["oid"] = (
                    hashlib.sha256(data).hexdigest() if lfs else hashlib.sha1(blob).hexdigest()
                )
            answers.append(answer)
        return self.reply(200, {"files": answers})

    def batch(self) -> None:
        objects = []
        for each in json.loads(self.body)["objects"]:
            answer = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.hub.objects:
                href = f"{self.hub.endpoint}/lfs/{each['oid']}"
                answer["actions"] = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
            objects.append(answer)
        return self.reply(200, {"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self.reply(400, {"error": "the content is not what was announced"})
        self.hub.objects[oid] = self.body
        return self.reply(200, {})

    def commit(self, name: str, revision: str) -> None:
        if (head := self.found(name, revision)) is None:
            return None
        lines = [json.loads(line) for line in self.body.splitlines() if line.strip()]
        files, changed, deleted = dict(head.files), [], []
        message = ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
                changed.append(value["path"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
                changed.append(value["path"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
                deleted.append(value["path"])
        commit = Commit(message, files, changed, deleted)
        self.hub.repositories[name].branches[revision].append(commit)
        url = f"{self.hub.endpoint}/{name}/commit/{commit.oid}"
        return self.reply(200, {"success": True, "commitOid": commit.oid, "commitUrl": url})

    def info(self, name: str, revision: str) -> None:
        if (commit := self.found(name, revision)) is None:
            return None
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        private = self.hub.repositories[name].private
        return self.reply(
            200, {"id": name, "sha": commit.oid, "private": private, "siblings": siblings}
        )

    def tree(self, name: str, revision: str, folder: str) -> None:
        if (commit := self.found(name, revision)) is None:
            return None
        inside = {
            path: data
            for path, data in commit.files.items()
            if not folder or path.startswith(f"{folder}/")
        }
        if folder and not inside:
            return self.reply(404, {"error": "no folder"}, {"X-Error-Code": "EntryNotFound"})
        rows = [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in inside.items()
        ]
        return self.reply(200, rows)

    def resolve(self, name: str, revision: str, path: str) -> None:
        if (commit := self.found(name, revision)) is None:
            return None
        commit_header = {"X-Repo-Commit": commit.oid}
        if path not in commit.files:
            return self.reply(
                404, {"error": "no file"}, {"X-Error-Code": "EntryNotFound", **commit_header}
            )
        data = commit.files[path]
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        headers = {"ETag": etag, **commit_header}
        start = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0]
        if start != "0":
            return self.reply(206, headers=headers, data=data[int(start) :])
        return self.reply(200, headers=headers, data=data)
