"""What this machine has: cores, memory with the limits of a container, GPU, disk. No torch, nothing is started."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatrain import numa

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU; memory in bytes."""

    name: str
    memory: int
    memory_free: int
    compute_capability: tuple[int, int]
    driver: str


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine as this process may use it; memory in bytes.

    ``memory`` is what the container or the machine has, ``memory_free`` what is left of it; ``locked_limit`` is the
    most that may be pinned (None: no limit). ``gpu_problem`` says why no GPU was found, where that is known.
    ``cores_by_node`` are those of the NUMA nodes, or of the machine; ``huge_pages`` is the kernel's mode.
    """

    cores: int
    cores_present: int
    memory: int
    memory_free: int
    memory_limited_by: str
    locked_limit: int | None
    gpus: tuple[Gpu, ...]
    gpu_problem: str
    system: str
    wsl: bool
    cpu: str = ""
    cores_by_node: tuple[int, ...] = ()
    huge_pages: str = ""


def probe() -> Machine:
    """This machine. Takes milliseconds; the GPU is asked through the driver's library, not through torch."""
    memory, free, limited_by = _memory()
    gpus, problem = _gpus()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    release = platform.release().lower()
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        cores_present=os.cpu_count() or 1,
        memory=memory,
        memory_free=free,
        memory_limited_by=limited_by,
        locked_limit=None if soft == resource.RLIM_INFINITY else soft,
        gpus=gpus,
        gpu_problem=problem,
        system=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        wsl="microsoft" in release or "wsl" in release,
        cpu=_field(Path("/proc/cpuinfo"), "model name"),
        cores_by_node=tuple(len(node.cores) for node in numa.nodes()),
        huge_pages=_chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
    )


def _field(file: Path, name: str) -> str:
    """The value of the first ``name : value`` line; empty where there is none."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _chosen(file: Path) -> str:
    """The word in brackets, of a kernel setting such as ``always [madvise] never``; empty where there is none."""
    try:
        return file.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def disk_free(folder: str | Path) -> int:
    """Bytes free where ``folder`` is or would be made."""
    return shutil.disk_usage(existing(folder)).free


def existing(folder: str | Path) -> Path:
    """The folder, or the nearest one around it that exists."""
    path = Path(folder).absolute()
    return next(place for place in (path, *path.parents) if place.is_dir())


def _memory() -> tuple[int, int, str]:
    """``(total, free, what limits it)``: the machine's memory, or the tightest cgroup around this process."""
    machine = psutil.virtual_memory()
    total, free, by = machine.total, machine.available, "the machine"
    for limit, used in _cgroup_limits():
        if limit < total:
            total, by = limit, "the container (cgroup)"
        free = min(free, max(0, limit - used))
    return total, free, by


def _cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")
) -> list[tuple[int, int]]:
    """``(limit, used)`` in bytes of each memory-limited cgroup from this process up to the root, v2 and v1.

    Page cache that the kernel would give back (``inactive_file``) does not count as used.
    """
    try:
        lines = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except OSError:
        return []
    found = []
    for number, controllers, path in lines:
        if number == "0":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = (
                root / "memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        here = base / path.lstrip("/")
        # Inside a container the path may be that of the host and not exist; the mount point is then the group.
        for folder in (f for f in (here, *here.parents) if f == base or base in f.parents):
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None:
                found.append((limit, max(0, used - _stat(folder / "memory.stat", names[2]))))
    return found


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), 0)


def _visible(uuids: list[str], asked: str) -> list[int]:
    """Which GPUs CUDA sees where CUDA_VISIBLE_DEVICES is ``asked``, first its first; ``uuids`` in the driver's order.

    As CUDA reads it: numbers and beginnings of UUIDs; what names no single GPU ends the list, and a GPU that is named
    twice leaves none. Of GPUs of several kinds CUDA counts the fastest first, unless CUDA_DEVICE_ORDER=PCI_BUS_ID: here
    numbers are always the driver's.
    """
    chosen: list[int] = []
    for entry in map(str.strip, asked.split(",")):
        if entry.isdecimal():
            found = [int(entry)] if int(entry) < len(uuids) else []
        else:
            found = [i for i, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)]
        if len(found) != 1:
            break
        if found[0] in chosen:
            return []
        chosen += found
    return chosen


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    """The NVIDIA GPUs that CUDA sees, first the one that torch takes, or none and why."""
    try:
        import pynvml
    except ImportError:
        return (), "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as e:
        return (), f"no NVIDIA driver ({e})"
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        if not handles:
            return (), "the driver reports no GPU"
        asked = os.environ.get("CUDA_VISIBLE_DEVICES")
        if asked is not None:
            handles = [handles[i] for i in _visible([pynvml.nvmlDeviceGetUUID(handle) for handle in handles], asked)]
        gpus = []
        for handle in handles:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            gpus.append(Gpu(pynvml.nvmlDeviceGetName(handle), memory.total, memory.free, tuple(capability), driver))
        return tuple(gpus), "" if gpus else f"CUDA_VISIBLE_DEVICES={asked} shows none"
    except pynvml.NVMLError as e:
        return (), f"the driver gave no answer ({e})"
    finally:
        pynvml.nvmlShutdown()
