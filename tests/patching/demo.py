"""A small installed package and a patch set for it."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from dflash_deploy.patching.anchors import Before, First, Stmt
from dflash_deploy.patching.edits import AddImport, InsertStatements
from dflash_deploy.patching.patch import Contract, Patch, PatchSet

SOURCES = {
    "demo/__init__.py": "",
    "demo/a.py": "from demo.b import g\n\n\ndef f():\n    return g(0)\n",
    "demo/b.py": "def g(a, *, k=0):\n    return a\n",
    "demo/c.py": "def h():\n    return 1\n",
}

HOOKS = PatchSet(
    "hooks",
    package="demo",
    versions="==1.0",
    tested=("1.0",),
    payload=True,
    patches=(
        Patch("hook-a", "a.py", "why", InsertStatements("f", "g(1, k=2)", at=Before(Stmt("return ...")))),
        Patch("hook-b", "b.py", "why", AddImport("import brought"), (Contract("c.py", "h", ()),)),
    ),
)
MORE = PatchSet("more", "demo", "==1.0", (Patch("hook-c", "c.py", "why", InsertStatements("h", "pass", at=First())),))
CPU = PatchSet("slow", "demo", "==1.0", MORE.patches, device="cpu")


def install(site: Path, version: str = "1.0", record: bool = True) -> Path:
    """Write the package as an installer would."""
    site.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, text in SOURCES.items():
        path = site / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(text)}")
    info = site / f"demo-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: demo\nVersion: {version}\n")
    if record:
        (info / "RECORD").write_text("\n".join([*lines, f"demo-{version}.dist-info/RECORD,,"]) + "\n")
    return site


def payload(folder: Path, text: str = "VALUE = 1\n") -> Path:
    """A payload package with a folder in it."""
    root = folder / "brought"
    (root / "deep").mkdir(parents=True, exist_ok=True)
    (root / "__init__.py").write_text(text)
    (root / "deep" / "__init__.py").write_text("")
    (root / "deep" / "table.txt").write_text("data\n")
    return root


def hashes(site: Path) -> dict[str, str]:
    """Digest and mode of everything below ``site``, bytecode aside; folders too."""
    found = {}
    for path in sorted(site.rglob("*")):
        if "__pycache__" in path.parts:
            continue
        text = "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        found[path.relative_to(site).as_posix()] = f"{text} {path.stat().st_mode:o}"
    return found
