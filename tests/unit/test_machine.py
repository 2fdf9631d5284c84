"""What the machine has, with the limits of a container."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatrain import machine

GIB = machine.GIB


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(str(content))


def test_cgroup_v2_limits_of_all_levels(tmp_path: Path) -> None:
    (tmp_path / "proc").write_text("0::/pod/app\n")
    root = tmp_path / "fs"
    write(root)
    write(root / "pod", memory__max=8 * GIB, memory__current=3 * GIB, memory__stat=f"anon 1\ninactive_file {GIB}\n")
    write(root / "pod" / "app", memory__max="max", memory__current=GIB)
    assert machine._cgroup_limits(root, tmp_path / "proc") == [(8 * GIB, 2 * GIB)]


def test_cgroup_v2_in_a_container_whose_path_is_the_host_s(tmp_path: Path) -> None:
    (tmp_path / "proc").write_text("0::/../../kubepods/x\n")
    write(tmp_path / "fs", memory__max=4 * GIB, memory__current=GIB, memory__stat="")
    assert (4 * GIB, GIB) in machine._cgroup_limits(tmp_path / "fs", tmp_path / "proc")


def test_cgroup_v1(tmp_path: Path) -> None:
    (tmp_path / "proc").write_text("5:cpu,cpuacct:/a\n9:memory:/docker/x\n")
    folder = tmp_path / "fs" / "memory" / "docker" / "x"
    files = {"memory__limit_in_bytes": 2 * GIB, "memory__usage_in_bytes": GIB}
    write(folder, **files, memory__stat=f"total_inactive_file {GIB // 2}\n")
    assert machine._cgroup_limits(tmp_path / "fs", tmp_path / "proc") == [(2 * GIB, GIB // 2)]


def test_the_tightest_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=60 * GIB))
    monkeypatch.setattr(machine, "_cgroup_limits", lambda: [(16 * GIB, 4 * GIB), (32 * GIB, 31 * GIB)])
    assert machine._memory() == (16 * GIB, 1 * GIB, "the container (cgroup)")
    monkeypatch.setattr(machine, "_cgroup_limits", lambda: [(1 << 62, 0)])
    assert machine._memory() == (64 * GIB, 60 * GIB, "the machine")


def test_no_driver_is_a_finding_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine._gpus() == ((), "the package nvidia-ml-py is not installed")


class Nvml:
    """The driver's library on a machine with three GPUs."""

    NVMLError = RuntimeError
    uuids = ("GPU-aaa1", "GPU-aab2", "GPU-ccc3")

    def __getattr__(self, name: str) -> object:
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "580",
            "nvmlDeviceGetCount": lambda: len(self.uuids),
            "nvmlDeviceGetHandleByIndex": lambda i: i,
            "nvmlDeviceGetUUID": lambda i: self.uuids[i],
            "nvmlDeviceGetMemoryInfo": lambda i: SimpleNamespace(total=(i + 1) * GIB, free=i * GIB),
            "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
            "nvmlDeviceGetName": lambda i: f"NVIDIA {i}",
        }
        return answers[name]


@pytest.mark.parametrize(
    ("asked", "seen"),
    [
        (None, [0, 1, 2]),
        ("2", [2]),
        (" 2, 0", [2, 0]),
        ("GPU-c,GPU-aab", [2, 1]),
        ("1,GPU-aaa1", [1, 0]),
        ("1,7,0", [1]),
        ("0,-1,2", [0]),
        ("2,x,0", [2]),
        ("GPU-aa,0", []),
        ("1,1", []),
        ("", []),
    ],
)
def test_the_gpus_are_those_that_cuda_sees(monkeypatch: pytest.MonkeyPatch, asked: str | None, seen: list[int]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if asked is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    gpus, problem = machine._gpus()
    assert [gpu.name for gpu in gpus] == [f"NVIDIA {i}" for i in seen]
    assert [gpu.memory for gpu in gpus] == [(i + 1) * GIB for i in seen]
    assert problem == ("" if seen else f"CUDA_VISIBLE_DEVICES={asked} shows none")


def test_this_machine() -> None:
    found = machine.probe()
    assert 1 <= found.cores <= found.cores_present
    assert 0 < found.memory_free <= found.memory


def test_disk_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert machine.disk_free(tmp_path / "a" / "b") > 0
