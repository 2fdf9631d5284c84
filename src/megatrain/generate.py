"""One answer of an exported model, by plain transformers. For models that fit the memory they are loaded into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatrain import machine
from megatrain.errors import UserError
from megatrain.hub import check_adapter, read_json
from megatrain.run_folder import quiet_libraries


def answer(folder: Path, prompt: str, max_new_tokens: int) -> str:
    """The model's most likely answer to ``prompt``, under its chat template if it has one.

    Raises :class:`UserError` if ``folder`` is no exported model or does not fit host memory.
    """
    check_adapter(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json\n  fix:   name an exported model, such as runs/first/final")
    read_json(folder / "config.json")
    need, free = sum(f.stat().st_size for f in folder.glob("*.safetensors")), machine.probe().memory_free
    if need > free:
        raise UserError(
            f"{folder}: {need / 1e9:.1f} GB of weights, but {free / 1e9:.1f} GB of memory are free\n"
            "  fix:   use a serving engine"
        )
    quiet_libraries()
    import torch
    from transformers import AutoModelForCausalLM

    from megatrain.models._skeleton import read_config
    from megatrain.preflight import read_tokenizer

    read_config(folder, trust_remote_code=False)
    tokenizer = read_tokenizer(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
    if torch.cuda.is_available() and need < torch.cuda.mem_get_info()[0]:
        model = model.cuda()
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": prompt}]
        inputs: Any = tokenizer.apply_chat_template(
            turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    # The end marker that the template writes may not be the end token of the config.
    ends = {i for i in (tokenizer.eos_token_id, model.generation_config.eos_token_id) if isinstance(i, int)}
    out = model.generate(
        **{k: v.to(model.device) for k, v in inputs.items()},
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()
