"""``megatrain doctor``: what this machine is, what it can train, and what to correct. Needs neither a GPU nor torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from megatrain.errors import UserError
from megatrain.machine import GIB, Machine, disk_free
from megatrain.machines import measured_file, measured_lines

# Host memory per parameter: FP32 master, two FP32 moments, and a BF16 gradient.
_BYTES_PER_PARAMETER = 14
_KEPT_FREE = 0.1  # share of memory that is left to the system, the data and the framework


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``fix`` is empty when all is well. ``blocks``: training is impossible without the fix."""

    subject: str
    text: str
    fix: str = ""
    blocks: bool = False


def examine(machine: Machine, folder: Path) -> list[Finding]:
    """What was found, in the order of the report; ``folder`` is where runs would be written."""
    return [
        Finding("system", machine.system + (", WSL 2" if machine.wsl else "")),
        _cores(machine),
        _memory(machine),
        *_gpu(machine),
        _pinned(machine),
        Finding("disk", f"{disk_free(folder) / GIB:.0f} GiB free in {folder}"),
        _torch(machine),
        _kernel(),
    ]


def measured_rates(machine: Machine, folder: Path, progress: Callable[[str], None]) -> Iterator[Finding]:
    """What links, arithmetic, optimizer and disk reach: measured once for this hardware and these versions.

    The planner goes by it from then on. ``progress`` is told what is measured next.
    """
    cpu = not machine.gpus
    file = measured_file(machine, cpu=cpu)
    lines = measured_lines(file)
    if "disk" not in (subject for subject, _, _ in lines):  # `megatrain train` leaves it out
        progress("starting to measure")
        from megatrain.rates import measure_and_keep

        try:
            lines = measure_and_keep(machine, "cpu" if cpu else "cuda", folder, progress)
        except UserError as error:
            yield Finding("rates", str(error).removeprefix("rates "))
            return
    yield from (Finding(*line) for line in lines)
    if file.is_file():
        yield Finding("kept", f"{file}, for megatrain plan and train; remove it to measure again")


def verdict(machine: Machine, findings: list[Finding]) -> str:
    """One sentence: what can be trained here, or what stands in the way."""
    blocking = [f.subject for f in findings if f.blocks]
    if blocking:
        return f"cannot train yet: see {', '.join(blocking)}"
    each = _BYTES_PER_PARAMETER
    billions = machine.memory_free * (1 - _KEPT_FREE) / each / 1e9
    size = f"models up to about {billions:.1f}B parameters (free RAM at {each} bytes a parameter)"
    if machine.gpus:
        return f"ready: trains {size}"
    return f"ready, on the CPU only, which is slow: {size} with compute.dtype=bfloat16; FP32 takes 16"


def _cores(machine: Machine) -> Finding:
    text = f"{machine.cores} of {machine.cores_present} cores allowed"
    if machine.cores_by_node:
        text += f", on {len(machine.cores_by_node)} NUMA nodes of {', '.join(map(str, machine.cores_by_node))}"
    few = machine.gpus and machine.cores < 4
    return Finding("cores", text, "allow this process at least 4 cores: they run the optimizer" if few else "")


def _memory(machine: Machine) -> Finding:
    free, total = machine.memory_free / GIB, machine.memory / GIB
    text = f"{free:.1f} of {total:.1f} GiB free, limited by {machine.memory_limited_by}"
    fix = "in .wslconfig, set [wsl2] memory= to what Windows can spare" if machine.wsl else ""
    if machine.huge_pages == "never":
        text += ", no huge pages"
        fix = fix or "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return Finding("memory", text, fix)


def _gpu(machine: Machine) -> list[Finding]:
    if not machine.gpus:
        return [
            Finding(
                "gpu",
                f"none: {machine.gpu_problem}",
                "training runs on the CPU; for a GPU, install the NVIDIA driver",
            )
        ]
    findings = []
    for gpu in machine.gpus:
        major, minor = gpu.compute_capability
        text = (
            f"{gpu.name}, {gpu.memory_free / GIB:.1f} of {gpu.memory / GIB:.1f} GiB free, "
            f"compute {major}.{minor}, driver {gpu.driver}, BF16 {'yes' if major >= 8 else 'no'}"
        )
        findings.append(Finding("gpu", text, "" if major >= 8 else "set compute.dtype=float32: this GPU has no BF16"))
    return findings


def _pinned(machine: Machine) -> Finding:
    if machine.wsl:
        return Finding(
            "pinned",
            f"WSL pins at most half of its memory, {machine.memory / 2 / GIB:.1f} GiB; the rest passes through buffers",
            "give WSL twice the memory that the model needs, or go on: copies of the rest are several times slower",
        )
    if machine.locked_limit is None:
        return Finding("pinned", "no limit on locked memory")
    return Finding("pinned", f"locked memory limited to {machine.locked_limit / GIB:.2f} GiB (CUDA pins beyond it)")


def _torch(machine: Machine) -> Finding:
    if util.find_spec("torch") is None:
        return Finding("torch", "not installed", "pip install 'torch>=2.11'", blocks=True)
    version = metadata.version("torch")
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()) < (2, 11):
        return Finding("torch", version, "pip install 'torch>=2.11'", blocks=True)
    if machine.gpus and "+cpu" in version:
        return Finding("torch", f"{version}, built without CUDA", "install the CUDA build of torch", blocks=True)
    return Finding("torch", version)


def _kernel() -> Finding:
    from megatrain import kernels

    try:
        return Finding("kernel", kernels.load("native").reason)
    except UserError as e:
        return Finding(
            "kernel",
            f"plain torch, about {kernels.REFERENCE_SLOWDOWN} times slower: {e}",
            "see the reason above",
        )
