"""Known fault 23: no compiler, a failing one, a broken library. The engine falls back and says so once."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "megatrain"

# Loads the kernel twice, trains a little, and prints what a user would see and get. A development install has
# an import finder that comes before PYTHONPATH; only the standard ones stay.
PROGRAM = """
import json, logging, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]
import torch
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("megatrain").addHandler(handler)
from megatrain import kernels
kernel = kernels.load()
assert kernels.load() is kernel
generator = torch.Generator().manual_seed(0)
state = [torch.randn(1000, generator=generator) for _ in range(3)] + [torch.zeros(1000), torch.zeros(1000)]
head, tail = torch.empty(1000, dtype=torch.bfloat16), torch.empty(1000, dtype=torch.int16)
kernel.split(state[0], head, tail)
for step in (1, 2):
    kernel.adamw(head, tail, state[3], state[4], state[step], lr=1e-3, beta1=.9, beta2=.99, eps=1e-8,
                 weight_decay=.1, step=step)
kernel.join(head, tail, state[0])
try:
    kernels.load("native")
    error = None
except ValueError as refusal:
    error = str(refusal)
print(json.dumps({"name": kernel.name, "reason": kernel.reason, "messages": messages, "error": error,
                  "path": kernels.__file__, "bits": state[0].view(torch.int32).tolist()}))
"""


def run(*command: object, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT.anchor
    )


def outcome(folder: Path) -> dict[str, Any]:
    """What PROGRAM reports with the package in ``folder``."""
    result = run(sys.executable, "-c", PROGRAM, environment=os.environ | {"PYTHONPATH": str(folder)})
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    assert Path(report["path"]).is_relative_to(folder)
    return report


def assert_clear_fallback(report: dict[str, Any], *parts: str) -> None:
    assert report["name"] == "reference"
    assert len(report["messages"]) == 1
    for text in (report["messages"][0], report["error"]):
        assert all(part in text for part in (*parts, "C++17 compiler")), text
    assert "times slower" in report["messages"][0]
    assert report["reason"] in report["messages"][0]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package's sources without the compiled kernel."""
    folder = tmp_path / "copy"
    shutil.copytree(PACKAGE, folder / "megatrain", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


@pytest.fixture(scope="module")
def right_bits(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The result of the package as it is here (with the native kernel where it is built)."""
    return list(outcome(PACKAGE.parent)["bits"])


def test_kernel_that_was_not_built(copy: Path, right_bits: list[int]) -> None:
    report = outcome(copy)
    assert_clear_fallback(report, "it was not built", "make native")
    assert report["bits"] == right_bits


def truncate(library: Path) -> None:
    """As a full disk leaves it: the loader alone would end the process with SIGBUS."""
    library.write_bytes(library.read_bytes()[:1000])


def cut_the_end(library: Path) -> None:
    library.write_bytes(library.read_bytes()[:-1])


def replace_by_text(library: Path) -> None:
    library.write_text("not a shared library")


def empty(library: Path) -> None:
    library.write_bytes(b"")


# Where none is built: an ELF header that promises one section entry at byte 2000.
SHARED_LIBRARY = b"\x7fELF\x02\x01" + bytes(0x22) + struct.pack("<Q10xHH", 2000, 64, 1) + bytes(2000)


@pytest.mark.parametrize("corrupt", [truncate, cut_the_end, replace_by_text, empty])
def test_corrupted_library(copy: Path, right_bits: list[int], corrupt: Callable[[Path], None]) -> None:
    built = sorted((PACKAGE / "kernels").glob("_native*.so"))
    library = copy / "megatrain" / "kernels" / (built[0].name if built else "_native.abi3.so")
    library.write_bytes(built[0].read_bytes() if built else SHARED_LIBRARY)
    corrupt(library)
    report = outcome(copy)
    assert_clear_fallback(report, "it failed to load", "_native")
    assert report["bits"] == right_bits


@pytest.mark.parametrize("content", ["", "INTERFACE = 0"])
def test_library_of_another_version(copy: Path, right_bits: list[int], content: str) -> None:
    (copy / "megatrain" / "kernels" / "_native.py").write_text(content)
    report = outcome(copy)
    assert_clear_fallback(report, "another version")
    assert report["bits"] == right_bits


WRONG_MODULE = """
INTERFACE = 3
def instruction_sets(): return ["avx2"]
def shutdown(): pass
def split(*args): pass
def join(*args): pass
def adamw(*args): pass
"""


def test_library_that_computes_wrongly(copy: Path, right_bits: list[int]) -> None:
    (copy / "megatrain" / "kernels" / "_native.py").write_text(WRONG_MODULE)
    report = outcome(copy)
    assert_clear_fallback(report, "self-test failed")
    assert report["bits"] == right_bits


def tools_path(folder: Path, compiler: str | None) -> Path:
    """A search path with all that a build needs; ``compiler`` is the script that stands for the compilers."""
    folder.mkdir()
    for name in ("sh", "env", "uname", "make", "ninja", "cmake", "git", "ar", "ld", "ranlib"):
        found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if found:
            (folder / name).symlink_to(found)
    for name in ("cc", "c++", "gcc", "g++", "clang", "clang++") if compiler else ():
        script = folder / name
        script.write_text(compiler or "")
        script.chmod(0o755)
    return folder


def install(source: Path, target: Path, environment: dict[str, str]) -> str:
    """Install offline with pip, as the README says; returns pip's output."""
    if not find_spec("scikit_build_core") or not find_spec("nanobind"):
        pytest.skip("scikit-build-core and nanobind are needed to build offline")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-v",
        "--no-index",
        "--no-build-isolation",
        "--no-deps",
    ]
    result = run(*command, "--target", target, source, environment=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what a build needs: it must not write into the checkout."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("pyproject.toml", "CMakeLists.txt", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


def without_compiler_settings(path: Path | str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "PYTHONPATH")}
    return kept | {"PATH": str(path)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiler", [None, "#!/bin/sh\necho 'fatal error: out of luck' >&2\nexit 1\n"], ids=["none", "failing"]
)
def test_install_without_a_working_compiler(
    tmp_path: Path, source: Path, right_bits: list[int], compiler: str | None
) -> None:
    path = tools_path(tmp_path / "bin", compiler)
    log = install(source, tmp_path / "target", without_compiler_settings(path))
    if compiler:
        assert "out of luck" in log
    report = outcome(tmp_path / "target")
    assert_clear_fallback(report, "it was not built")
    assert report["bits"] == right_bits


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_install_with_a_compiler(tmp_path: Path, source: Path, right_bits: list[int]) -> None:
    install(source, tmp_path / "target", without_compiler_settings(os.environ["PATH"]))
    report = outcome(tmp_path / "target")
    assert report["name"] == "native"
    assert report["messages"] == []
    assert report["bits"] == right_bits
    assert not list((tmp_path / "target").rglob("*.cpp"))
