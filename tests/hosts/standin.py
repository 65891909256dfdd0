"""A small stack that installs like a real one and serves like one, for tests of everything around the server.

Small wheels from the index (one of them compiled), and wheels made here that stand in for torch, transformers and
SGLang: ``python -m tests.hosts.standin up HOST --stack standin ...`` is the command line with that stack in its table.
The server answers the tiny pair's probes as the pair itself would.
"""

from __future__ import annotations

import base64
import hashlib
import os
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from dflash_deploy.audit import stacks
from tests.facts.elf_writer import write_elf

VERSION = "0.0.9"
REAL = ("jinja2==3.1.6", "tomli==2.2.1", "idna==3.10")
"""Jinja2 brings MarkupSafe, which is compiled."""

STACK = stacks.Stack(
    name="standin",
    sglang=VERSION,
    device="cpu",
    torch=VERSION,
    torch_variant="",
    requirements=(f"torch=={VERSION}", f"transformers=={VERSION}", *REAL),
    no_deps=(f"sglang=={VERSION}",),
    min_glibc=(2, 17),
    installed_mib=64,
    transformers=VERSION,
)

SERVER = """
import http.server, json, os, signal, socket, sys, time
from pathlib import Path

argv = sys.argv[1:]
def option(name, default=None):
    return argv[argv.index(name) + 1] if name in argv else default

PORT, MODEL = int(option("--port")), option("--model-path")
ALGORITHM = option("--speculative-algorithm")
# What a test wants of it: a file beside the model says "die" or "sick".
mood = Path(os.environ.get("STANDIN_MOOD", "/nonexistent"))
if mood.exists() and mood.read_text().strip() == "die":
    print("RuntimeError: the stand-in was told to die", flush=True)
    sys.exit(3)
probes = Path(MODEL).parent / "probe.json"
KNOWN = {json.dumps(p.get("messages", p.get("prompt"))): p.get("expect", p.get("text", "")) for p in json.loads(probes.read_text())} if probes.exists() else {}

def meta(text):
    found = {"completion_tokens": max(1, len(text.split()))}
    if ALGORITHM:
        found.update(spec_verify_ct=4, spec_num_correct_drafts=8, spec_correct_drafts_histogram=[0, 1, 2, 1])
    return found

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args): pass

    def send(self, status, data):
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if mood.exists() and mood.read_text().strip() == "sick":
            return self.send(500, {"error": "sick, as told"})
        if self.path == "/health":
            return self.send(200, {})
        if self.path in ("/server_info", "/get_server_info"):
            return self.send(200, {"version": "0.0.9", "model_path": MODEL, "port": PORT,
                                   "speculative_algorithm": ALGORITHM, "internal_states": [{}]})
        if self.path == "/v1/models":
            return self.send(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        if self.path in ("/get_model_info", "/model_info"):
            return self.send(200, {"model_path": MODEL, "is_generation": True, "tokenizer_path": MODEL})
        self.send(404, {})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = json.dumps(asked.get("messages", asked.get("text", asked.get("prompt"))))
        text = KNOWN.get(key, " the stand-in answers.")
        for stop in asked.get("sampling_params", {}).get("stop", []):
            text = text.partition(stop)[0]
        if asked.get("stream"):
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            for piece in (text[: len(text) // 2], text[len(text) // 2 :]):
                choice = {"delta": {"content": piece}} if "messages" in asked else {"text": piece}
                self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\\n\\n")
            self.wfile.write(b"data: [DONE]\\n\\n")
            self.close_connection = True
            return
        if self.path == "/generate":
            return self.send(200, {"text": text, "meta_info": meta(text)})
        choice = {"message": {"role": "assistant", "content": text}, "text": text, "index": 0, "finish_reason": "stop", "meta_info": meta(text)}
        self.send(200, {"id": "x", "object": "chat.completion", "model": MODEL, "choices": [choice], "usage": {"completion_tokens": meta(text)["completion_tokens"]}})

class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

# Several hosts serve together: they meet at the first one's address before any of them is ready.
NODES, RANK, MEETING = int(option("--nnodes", "1")), int(option("--node-rank", "0")), option("--dist-init-addr")
if NODES > 1:
    address, _, port = MEETING.rpartition(":")
    print("reached at", os.environ.get("SGLANG_HOST_IP"), "on", os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
    if RANK == 0:
        with socket.create_server((address, int(port))) as door:
            came = [door.accept() for _ in range(NODES - 1)]
        ranks = sorted(int(peer.recv(16)) for peer, _ in came)
        print("ranks that came:", ranks, "from", sorted(where[0] for _, where in came), flush=True)
        assert ranks == list(range(1, NODES)), ranks
    else:
        while True:
            try:
                first = socket.create_connection((address, int(port)))
                break
            except OSError:
                time.sleep(0.1)
        first.sendall(str(RANK).encode())
        print("met the first at", MEETING, flush=True)

print("The server is fired up and ready to roll!", flush=True)
Server((option("--host", "127.0.0.1"), PORT), Handler).serve_forever()
"""  # noqa: E501


FLAGS = ("model-path", "host", "log-level-http", "speculative-algorithm", "speculative-draft-model-path",
         "speculative-draft-attention-backend", "dist-init-addr")  # fmt: skip
NUMBERS = ("port", "context-length", "tp-size", "nnodes", "node-rank")
ARGUMENTS = "def add_cli_args(parser):\n" + "".join(
    f"    parser.add_argument('--{name}', type={kind})\n"
    for kind, names in (("str", FLAGS), ("int", NUMBERS))
    for name in names
)


def wheel(
    folder: Path, name: str, files: Mapping[str, str | bytes], requires: tuple[str, ...] = (), version: str = VERSION
) -> Path:
    """Write a pure wheel; the same input gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    content: dict[str, str | bytes] = {
        **files,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: standin\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(as_bytes(text)).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(as_bytes(text))}\n"
    content[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    target = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in content.items():
            archive.writestr(zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0)), text)
    return target


def torch_libraries() -> dict[str, str | bytes]:
    """What the audit looks for in a torch that is whole."""
    names = ("libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so")
    return {f"torch/lib/{name}": write_elf(soname=name) for name in names}


def as_bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode()


def make_wheels(folder: Path, version: str = VERSION) -> Path:
    """The stand-ins for torch, transformers and SGLang, as a folder for pip's find-links."""
    ballast = "".join(hashlib.sha256(str(i).encode()).hexdigest() + "\n" for i in range(20_000))
    about = f"__version__ = {version!r}\ncuda = None\n"
    wheel(folder, "torch", {"torch/__init__.py": about, "torch/version.py": about, **torch_libraries(),
                            "torch/ballast.txt": ballast})  # fmt: skip
    wheel(folder, "transformers", {"transformers/__init__.py": ""}, ("idna>=3",))
    files: dict[str, str | bytes] = {"sglang/__init__.py": f"__version__ = {version!r}\n", "sglang/srt/__init__.py": ""}
    files |= {"sglang/srt/server_args.py": ARGUMENTS, "sglang/launch_server.py": SERVER}
    wheel(folder, "sglang", files, ("torch", "a-package-that-no-index-has"))
    return folder


def environment(links: Path, **more: str) -> dict[str, str]:
    """Variables for a run of :func:`main` on this machine, whose pip then finds the stand-ins too."""
    given = os.environ.get("PIP_FIND_LINKS", "")
    top = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PIP_FIND_LINKS": f"{links} {given}".strip(), "PYTHONPATH": top, **more}


def main() -> None:
    """The command line, with the stand-in among its stacks."""
    from dflash_deploy.cli import main as command

    stacks.STACKS = (*stacks.STACKS, STACK)
    command()


if __name__ == "__main__":
    sys.argv[0] = "dflash-deploy"
    main()
