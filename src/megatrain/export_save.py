"""``megatrain export``: a save of a run as a Hugging Face checkpoint, without training further."""

from __future__ import annotations

import shutil
from pathlib import Path

from megatrain.checkpoint import latest_complete
from megatrain.config_file import load_config
from megatrain.datasets._load import Progress
from megatrain.errors import UserError
from megatrain.hub import find_model
from megatrain.trainer import open_model

_DTYPES = (None, "bfloat16", "float16", "float32")


def export_save(source: Path, target: Path, dtype: str | None, progress: Progress) -> None:
    """Write the newest save of the run ``source``, or the save ``source`` itself, to ``target``.

    Raises :class:`UserError` if there is no save or ``target`` holds something.
    """
    if dtype not in _DTYPES:
        raise UserError(f"--dtype: {dtype!r} is not one of {', '.join(d for d in _DTYPES if d)}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: exists and is not empty\n  fix:   name a new folder")
    if (source / "resolved.yaml").is_file():
        run, save = source, latest_complete(source / "checkpoints")[0]
    else:
        run, save = source.absolute().parent.parent, source
    resolved = run / "resolved.yaml"
    if save is None or not save.is_dir() or not resolved.is_file():
        raise UserError(
            f"{source}: holds no save of a run\n  fix:   name a run's folder, or one of its checkpoints/step-..."
        )
    config = load_config(str(resolved), [])
    m = config.model
    folder = find_model(m.name_or_path, m.revision, m.trust_remote_code, progress)
    with open_model(config, folder, config.compute.dtype, progress) as model:
        model.load_state(save)
        model.save_pretrained(target, dtype=dtype or config.export.dtype, progress=progress)
    template = config.data.chat_template
    if template not in (None, "none"):
        shutil.copyfile(template, target / "chat_template.jinja")
