"""Where sonames resolve: the environment's own libraries, and another copy that LD_LIBRARY_PATH puts before them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_deploy.facts.remote.linker import TORCH_SYMBOL
from dflash_deploy.facts.remote.venvs import scan
from tests.facts.elf_writer import write_elf


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """cuSPARSE, which needs a symbol of the nvJitLink beside it."""
    for name, data in {
        "cusparse/lib/libcusparse.so.12": write_elf(
            needed=["libnvJitLink.so.12"], undefined=["__nvJitLinkComplete_12_8"], runpath="$ORIGIN/../../nvjitlink/lib"
        ),
        "nvjitlink/lib/libnvJitLink.so.12": write_elf(exports=["__nvJitLinkComplete_12_8"]),
    }.items():
        path = tmp_path / "site/nvidia" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    return tmp_path / "site"


def test_the_environments_own_copy_is_loaded(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    found = scan([str(site)], [])
    assert found["shadowed"] == [] and found["modules"] == []


@pytest.mark.parametrize(("release", "missing"), [("12_4", ["__nvJitLinkComplete_12_8"]), ("12_8", [])])
def test_another_copy_comes_before(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, missing: list[str]
) -> None:
    toolkit = tmp_path / "cuda/lib64"
    toolkit.mkdir(parents=True)
    (toolkit / "libnvJitLink.so.12").write_bytes(write_elf(exports=[f"__nvJitLinkComplete_{release}"]))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nonexistent:{toolkit}")
    found = scan([str(site)], [])
    assert [(item["soname"], item["by"]) for item in found["shadowed"]] == [
        ("libnvJitLink.so.12", f"{toolkit}/libnvJitLink.so.12")
    ]
    (module,) = [item for item in found["modules"] if "cusparse" in item["path"]]
    assert module["missing"] == missing


def test_the_same_file_by_another_path_shadows_nothing(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(site / "nvidia/nvjitlink/lib")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "link"))
    assert scan([str(site)], [])["shadowed"] == []


@pytest.mark.parametrize(
    ("name", "of_torch"),
    [
        (b"_ZNK3c106SymInt22maybe_as_int_slow_pathEv", True),
        (b"_ZN4c10d12ProcessGroup9allreduceEv", True),
        (b"_ZTIN5torch8autograd4NodeE", True),
        (b"_ZTVN2at10TensorImplE", True),
        (b"THPVariableClass", True),
        (b"aoti_torch_delete_tensor_object", True),
        (b"_ZNSt6vectorIN2at6TensorESaIS1_EED1Ev", False),
        (b"_ZN3tvm3ffi5ErrorC1Ev", False),
        (b"malloc", False),
    ],
)
def test_names_of_torch(name: bytes, of_torch: bool) -> None:
    assert bool(TORCH_SYMBOL.match(name)) is of_torch
