"""A stack that stands in for SGLang where only the deployment matters: three tiny wheels, a server that answers the
health ladder in milliseconds, a patch set for it. Everything else is real: pip, SSH, systemd, the command itself.

    python -m tests.releases.standin up HOST --stack standin ...     the command with this stack added

``STANDIN_BIG`` (1.0 or 2.0) chooses the pins, ``STANDIN_PATCH`` (a word) what is patched in.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_deploy.audit import stacks
from dflash_deploy.audit.stacks import Stack
from tests.hosts.standin import as_bytes, torch_libraries

if TYPE_CHECKING:
    from dflash_deploy.patching.patch import PatchSet

VERSION = "0.0.1"
SERVER = '''
"""Answers like a served tiny pair."""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from sglang.hook import hook

words = sys.argv[1:]
if "--config" in words:
    at = words.index("--config")
    for line in Path(words[at + 1]).read_text().splitlines():
        name, _, value = line.partition(": ")
        words += ["--" + name, json.loads(value)]
value = {w[2:].replace("-", "_"): words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else True
         for i, w in enumerate(words) if w.startswith("--")}
if "stand_in_die" in value:
    print("RuntimeError: as asked", flush=True)
    sys.exit(3)
print("server_args=", value, flush=True)
print("token", os.environ.get("HF_TOKEN", "none"), flush=True)
model = Path(value["model_path"])
answers = {}
for row in json.loads((model.parent / "probe.json").read_text()):
    answers[row["prompt"] if "prompt" in row else row["messages"][-1]["content"]] = row["expect"]
META = {"completion_tokens": 12, "spec_verify_ct": 4, "spec_num_correct_drafts": 8,
        "spec_correct_drafts_histogram": [0, 1, 2, 1]}
import big
INFO = {**{k: v for k, v in value.items() if "key" not in k}, "version": "0.0.1", "port": int(value["port"]),
        "internal_states": [{}], "hook": hook(), "big": big.VERSION}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def send(self, status, data):
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def allowed(self):
        wanted = value.get("api_key")
        if wanted and self.headers.get("Authorization") != "Bearer " + wanted:
            self.send(401, {"error": "Unauthorized"})
            return False
        return True

    def do_GET(self):
        if self.allowed():
            self.send(200, INFO if self.path == "/server_info" else b"")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        prompt = asked.get("text") or asked.get("prompt") or asked.get("messages", [{"content": ""}])[-1]["content"]
        text = "xq zz" if "stand_in_garbage" in value else answers.get(prompt, "Paris.")
        for stop in asked.get("sampling_params", {}).get("stop", []):
            text = text.partition(stop)[0]
        if asked.get("stream"):
            self.send_response(200)
            self.end_headers()
            chat = "messages" in asked
            choice = {"delta": {"content": text}} if chat else {"text": text}
            self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\\n\\ndata: [DONE]\\n\\n")
        elif "messages" in asked:
            self.send(200, {"choices": [{"message": {"content": text}, "meta_info": META}]})
        else:
            self.send(200, {"text": text, "meta_info": META})


time.sleep(float(value.get("stand_in_slow", 0)))
print("The server is fired up and ready to roll!", flush=True)
ThreadingHTTPServer((value.get("host", "127.0.0.1"), int(value["port"])), Handler).serve_forever()
'''
WHEELS: dict[tuple[str, str], dict[str, str | bytes]] = {
    ("torch", VERSION): {
        "torch/__init__.py": f"__version__ = '{VERSION}'\n",
        "torch/version.py": f"__version__ = '{VERSION}'\ncuda = None\n",
        **torch_libraries(),
    },
    ("transformers", VERSION): {"transformers/__init__.py": ""},
    ("big", "1.0"): {"big/__init__.py": "VERSION = '1.0'\n", "big/data.bin": "x" * (1 << 20)},
    ("big", "2.0"): {"big/__init__.py": "VERSION = '2.0'\n", "big/data.bin": "y" * (1 << 20)},
    ("sglang", VERSION): {
        "sglang/__init__.py": f"__version__ = '{VERSION}'\n",
        "sglang/hook.py": "def hook():\n    return 'plain'\n",
        "sglang/srt/__init__.py": "",
        "sglang/srt/server_args.py": "",
        "sglang/launch_server.py": SERVER,
    },
}


def make_wheels(folder: Path) -> Path:
    """Write the wheels; the same bytes each time."""
    folder.mkdir(parents=True, exist_ok=True)
    for (name, version), files in WHEELS.items():
        info = f"{name}-{version}.dist-info"
        files = {
            **files,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = "".join(
            f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(as_bytes(text)).digest()).rstrip(b'=').decode()},"
            f"{len(as_bytes(text))}\n"
            for path, text in files.items()
        )
        files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            for path, text in files.items():
                wheel.writestr(zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0)), text)
    return folder


def stack() -> Stack:
    """The stack of these wheels."""
    big = os.environ.get("STANDIN_BIG", "1.0")
    return Stack(
        name="standin",
        sglang=VERSION,
        device="cpu",
        torch=VERSION,
        torch_variant="",
        requirements=(f"torch=={VERSION}", f"transformers=={VERSION}", f"big=={big}"),
        no_deps=(f"sglang=={VERSION}",),
        min_glibc=(2, 17),
        patch_sets=("standin",),
        rank=-1,
    )


@functools.cache
def patch_set() -> PatchSet:
    """The patch set of these wheels."""
    from dflash_deploy.patching.anchors import First
    from dflash_deploy.patching.edits import InsertStatements
    from dflash_deploy.patching.patch import Patch, PatchSet

    word = os.environ.get("STANDIN_PATCH", "one")
    return PatchSet(
        "standin",
        package="sglang",
        versions=f"=={VERSION}",
        tested=(VERSION,),
        patches=(
            Patch("hook", "hook.py", "shows what is patched", InsertStatements("hook", f"return {word!r}", at=First())),
        ),
    )


def install() -> None:
    """Make stack and patch set known to this process; the parser is loaded when a command asks for the set."""
    from dflash_deploy.cli import patch

    stacks.STACKS = (*stacks.STACKS, stack())
    choose, digest = patch.choose_sets, patch.inputs_digest

    def choose_sets(*args: Any, **more: Any) -> Any:
        from dflash_patches import registry

        registry.all_sets = lambda: (patch_set(),)  # type: ignore[assignment]
        return choose(*args, **more)

    word = os.environ.get("STANDIN_PATCH", "one")
    patch.choose_sets = choose_sets
    patch.inputs_digest = lambda *args: digest(*args) + word


if __name__ == "__main__":
    from dflash_deploy.cli import main

    install()
    sys.exit(main())
