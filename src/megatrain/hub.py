"""A model by folder or by hub name, to a folder with its files. A complete cached copy is used without a connection."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatrain.errors import UserError

Progress = Callable[[str, int, int], None]

_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
_CODE = ["*.py"]
# A second copy of the weights in another layout (Mistral's own), never read here.
_SKIPPED = ["consolidated*", "original/*", "onnx/*", "*.gguf", "*/*.safetensors"]


def find_model(name: str, revision: str | None, trust_remote_code: bool, progress: Progress) -> Path:
    """The folder that holds the model ``name``: the folder itself, the hub's cache, or a new download into that cache.

    Raises :class:`UserError`, naming repository, cause and command, for what cannot be found, read or downloaded.
    """
    if Path(name).is_dir():
        check_adapter(Path(name))
        if revision is not None:
            raise UserError(
                "model.revision: only a hub name has revisions\n  fix:   remove model.revision, or name a hub model"
            )
        folder = Path(name)
    else:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or _looks_local(name):
            raise UserError(
                f"model.name_or_path: {name}: no such folder\n"
                f"  fix:   {_near_folder(name) or 'check the path; a hub name has the form owner/model'}"
            )
        folder = _cached(name, revision, trust_remote_code) or _download(name, revision, trust_remote_code, progress)
    check_code(folder, name, trust_remote_code)
    return folder


def check_adapter(folder: Path) -> None:
    """Raise :class:`UserError` if ``folder`` holds a LoRA adapter and not a whole model."""
    file = folder / "adapter_config.json"
    if file.is_file() and not (folder / "config.json").is_file():
        base = read_json(file).get("base_model_name_or_path") or "its base model"
        raise UserError(
            f"model.name_or_path: {folder} is an adapter (adapter_config.json), made for {base}, not a whole model\n"
            f"  fix:   train {base}; or merge the two first, with peft:\n"
            f"         AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload()"
            ".save_pretrained('merged')"
        )


def _near_folder(name: str) -> str | None:
    """``did you mean ...?`` for a mistyped folder, None if none has such a name."""
    path = Path(name)
    beside = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, beside, 1)
    return f"did you mean the folder {path.with_name(near[0])}?" if near else None


def _not_here(name: str) -> str:
    """What to add to an error of the hub, for a name that may have been meant as a folder."""
    return f"\n         as a folder: there is no {Path(name).absolute()}; {_near_folder(name) or 'check the path'}"


def _looks_local(name: str) -> bool:
    path = Path(name)
    return name.startswith((".", "/", "~")) or path.exists() or (path.parent != Path() and path.parent.is_dir())


def _patterns(trust_remote_code: bool) -> dict[str, Any]:
    return {"allow_patterns": [*_FILES, *(_CODE if trust_remote_code else [])], "ignore_patterns": _SKIPPED}


def _cached(name: str, revision: str | None, trust_remote_code: bool) -> Path | None:
    """The cached copy of the revision, if every file that training needs is there. Opens no connection."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True, **_patterns(trust_remote_code)))
    except LocalEntryNotFoundError:
        return None
    complete = (folder / "config.json").is_file() and not missing_shards(folder) and any(folder.glob("*.safetensors"))
    return folder if complete and any(folder.glob("tokenizer*")) else None


def _download(name: str, revision: str | None, trust_remote_code: bool, progress: Progress) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"model.name_or_path: {name}"
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"{page}: no complete copy in the cache, and HF_HUB_OFFLINE is set\n"
            f"  found: {constants.HF_HUB_CACHE}\n"
            f"  fix:   unset HF_HUB_OFFLINE and run: hf download {name}{_not_here(name)}"
        )
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                tqdm_class=_progress_class(progress),
                **_patterns(trust_remote_code),
            )
        )
    except GatedRepoError:
        raise UserError(
            f"{page}: the repository is gated: its owner wants you to accept terms first\n"
            f"  fix:   accept them at huggingface.co/{name}, then run: hf auth login"
        ) from None
    except RevisionNotFoundError:
        raise UserError(
            f"model.revision: {revision!r} is not a branch, tag or commit of {name}\n"
            "  fix:   leave it out for the main branch"
        ) from None
    except RepositoryNotFoundError as e:
        if e.response is not None and e.response.status_code == 401:
            raise UserError(
                f"{page}: the repository is private, or does not exist: without a login the hub does not say which\n"
                f"  fix:   check the name, or log in with: hf auth login{_not_here(name)}"
            ) from None
        raise UserError(
            f"{page}: no such repository for this login\n"
            f"  fix:   check owner and name at huggingface.co/{name}{_not_here(name)}"
        ) from None
    except (LocalEntryNotFoundError, ConnectionError, TimeoutError) as e:
        raise UserError(
            f"{page}: not in the cache, and the hub cannot be reached (no network?)\n  found: {_first_line(e)}\n"
            f"  fix:   run where there is a network: hf download {name}{_not_here(name)}"
        ) from None
    except HfHubHTTPError as e:
        raise UserError(f"{page}: the hub refused: {_first_line(e)}\n  fix:   try again later") from None
    except OSError as e:
        raise UserError(
            f"{page}: cannot be saved in {constants.HF_HUB_CACHE}: {e.strerror or _first_line(e)}\n"
            "  fix:   free space, or set HF_HOME to another disk"
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]


def _progress_class(progress: Progress) -> type:
    """The hub's progress bars, without the bars: bytes of all files together go to ``progress``."""
    from tqdm.auto import tqdm

    class Bytes(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if self._counts_bytes:
                progress("downloading", int(self.n), int(self.total or 0))
            return None

    return Bytes


def missing_shards(folder: Path) -> list[str]:
    """The weight files that the index names and the folder lacks."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    return sorted({f for f in read_json(index).get("weight_map", {}).values() if not (folder / f).is_file()})


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises :class:`UserError` naming the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"model.name_or_path: {file}: no such file\n  fix:   name a folder that holds a whole model"
        ) from None
    except (OSError, ValueError) as e:
        raise UserError(f"model.name_or_path: {file} cannot be read: {e}\n  fix:   fetch the file again") from None
    if not isinstance(value, dict):
        raise UserError(f"model.name_or_path: {file} holds no JSON object\n  fix:   fetch the file again")
    return value


def check_code(folder: Path, name: str, trust_remote_code: bool) -> None:
    """Raise :class:`UserError` if the model can only be built by its own Python code and that is not trusted."""
    from transformers import CONFIG_MAPPING

    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    if "auto_map" in config and kind not in CONFIG_MAPPING and not trust_remote_code:
        raise UserError(
            f"model.trust_remote_code: {name} (model_type {kind}) brings its own Python code, which is not run\n"
            "  fix:   read that code, then set model.trust_remote_code=true"
        )
