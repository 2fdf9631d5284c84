"""Writes docs/config.md from the configuration tree:  python tools/config_docs.py > docs/config.md"""

from __future__ import annotations

from dataclasses import MISSING, fields

from megatrain.config import RunConfig, options
from megatrain.config_file import OTHER_TRAINERS, expected

HEAD = """\
# Configuration

Generated from `src/megatrain/config.py` by `python tools/config_docs.py > docs/config.md`.

A run is described by a YAML file, by `section.key=value` words on the command line, or by both; words win. Three
options are required: `model.name_or_path`, `data.train` and `output_dir`. The resolved options of a run are saved as
`resolved.yaml` in its folder. Numbers may be written as `1e-5`; sizes as `400MiB` or `24GiB`.
"""


def reference() -> str:
    """The page: one table a section, then the names that other trainers use."""
    parts = [HEAD]
    for section in fields(RunConfig):
        if "section" in section.metadata:
            doc = (section.metadata["section"].__doc__ or "").strip()
            parts.append(f"## {section.name}\n\n{doc}\n\n{_table(section.name + '.')}")
    parts.append(f"## output_dir\n\n{_table('output_dir')}")
    rows = [f"| `{theirs}` | `{ours}` |" for theirs, ours in sorted(OTHER_TRAINERS.items())]
    parts.append(
        "## Names of other trainers\n\nThey are refused with ours, so that nothing is passed over unnoticed. "
        "`train.batch_size` counts the rows of a whole optimizer step.\n\n"
        "| elsewhere | here |\n| --- | --- |\n" + "\n".join(rows) + "\n"
    )
    return "\n".join(parts)


def _table(prefix: str) -> str:
    lines = ["| option | default | accepts | meaning |", "| --- | --- | --- | --- |"]
    for name, (f, _) in options().items():
        if name.startswith(prefix):
            required = f.default is MISSING and f.default_factory is MISSING
            value = f.default if f.default is not MISSING else "" if required else f.default_factory()  # type: ignore[misc]
            shown = "required" if required else "null" if value is None else f"`{str(value).lower()}`"
            lines.append(f"| `{name}` | {shown} | {expected(name)} | {f.metadata['doc']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
