"""Imports go one way, offsets are added up in one place, and planning needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatrain

PACKAGE = Path(megatrain.__file__).parent

# From the bottom to the top; a module imports from lower layers, or from its own without a cycle.
LAYERS = [
    {"errors", "checks"},
    {"config"},
    {"layout", "numa", "devices", "kernels", "_durable", "_safetensors", "_side_files", "schedule"},
    {"models", "losses", "optimizers", "datasets", "loggers", "machine", "machines", "hub"},
    {"store", "model_files", "model_spec", "export", "rates"},
    {"engine", "checkpoint", "costs", "choices", "bounds", "search", "planner"},
    {"assembly", "lifecycle", "results"},
    {"model"},
    {
        "auto",
        "trainer",
        "preflight",
        "resume",
        "run_folder",
        "timeline_page",
        "trace_events",
        "tracing",
        "checked",
    },
    {"config_file", "doctor", "dry_run", "plan_report", "export_save", "generate"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
PUBLIC_HOMES = {"Model": "model", "AdamW": "optimizers", "UserError": "errors", "__version__": ""}
WITHOUT_TORCH = [
    "config",
    "errors",
    "layout",
    "machine",
    "machines/__init__",
    "costs",
    "engine/simulate",
    "engine/placement",
    "choices",
    "bounds",
    "search",
    "planner",
    "auto",
    "plan_report",
]


def top_level_name(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def sources() -> list[Path]:
    return [file for file in sorted(PACKAGE.rglob("*.py")) if file != PACKAGE / "__init__.py"]


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted names that a module imports anywhere, with the line; imported names are appended."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def edges() -> Iterator[tuple[str, str, str]]:
    """(importing module, imported module, where) by top-level names of the package."""
    for file in sources():
        for name, line in imported(ast.parse(file.read_text())):
            parts = name.split(".")
            if parts[0] == "megatrain" and len(parts) > 1:
                target = PUBLIC_HOMES.get(parts[1], parts[1])
                if target:
                    yield top_level_name(file), target, f"{file.relative_to(PACKAGE)}:{line}"


def test_every_module_has_a_layer() -> None:
    unknown = {top_level_name(file) for file in sources()} - set(RANK)
    assert not unknown, f"give {sorted(unknown)} a place in LAYERS"


def test_imports_go_downwards() -> None:
    wrong = [f"{where}: {source} imports {target}" for source, target, where in edges() if RANK[target] > RANK[source]]
    assert not wrong, "\n".join(wrong)


def test_no_cycles_within_a_layer() -> None:
    followers: dict[str, set[str]] = {}
    for source, target, _ in edges():
        if source != target:
            followers.setdefault(source, set()).add(target)

    def reaches(start: str, goal: str, seen: set[str]) -> bool:
        for name in followers.get(start, set()) - seen:
            seen.add(name)
            if name == goal or reaches(name, goal, seen):
                return True
        return False

    cyclic = sorted(name for name in followers if reaches(name, name, set()))
    assert not cyclic, f"import each other in a circle: {cyclic}"


def test_only_layout_adds_offsets_up() -> None:
    found = []
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
                name = ast.unparse(node.target)
                if "offset" in name and top_level_name(file) != "layout":
                    found.append(f"{file.relative_to(PACKAGE)}:{node.lineno}: {name} +=")
    assert not found, "offsets belong to layout.py: " + ", ".join(found)


@pytest.mark.parametrize("name", [name for name in WITHOUT_TORCH if (PACKAGE / f"{name}.py").exists()])
def test_planning_modules_never_import_torch(name: str) -> None:
    tree = ast.parse((PACKAGE / f"{name}.py").read_text())
    assert not [line for target, line in imported(tree) if target.split(".")[0] == "torch"]
    module = name.replace("/", ".").removesuffix(".__init__")
    program = f"import sys, megatrain.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
