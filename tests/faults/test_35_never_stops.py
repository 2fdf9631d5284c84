"""Fault 35: the model never learns to stop. The end marker is trained although it is also the padding."""

from __future__ import annotations

from pathlib import Path

from _runs import arguments, make_model, megatrain, write_rows
from _tokenizers import small_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.config import DataConfig
from megatrain.datasets._batches import IGNORED, Batches
from megatrain.datasets._load import load_dataset

PAIRS = [("hello?", "yes"), ("And you?", "I am well, thank you."), ("What?", "Paris."), ("how?", "no no")]
ROWS = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in PAIRS]
END = 2


def test_each_turn_s_end_is_a_target_and_no_padding_is(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == END
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    data = load_dataset(DataConfig(train=str(file)), tokenizer, vocab_size=320, positions=256, progress=lambda *_: None)
    batches = Batches(
        data.rows, batch_size=4, micro_batch_size=4, seed=0, shuffle=False, pad_id=END, fingerprint=data.fingerprint
    )
    micro = batches.next_step().micro_batches[0]
    lengths = sorted((len(r) for r in data.rows), reverse=True)
    assert lengths[0] != lengths[-1]
    for ids, labels, length in zip(micro["input_ids"], micro["labels"], lengths, strict=True):
        targets = labels != IGNORED
        assert labels[targets][-1] == END
        assert (labels[targets] == END).sum() == 1
        assert (ids[length:] == END).all()
        assert not targets[length:].any()


def test_an_overfitted_model_stops_by_itself(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    write_rows(tmp_path / "chats.jsonl", ROWS)
    words = ["train.max_steps=80", "optim.lr=3e-3", "schedule.warmup=5"]
    result = megatrain("train", *arguments(tmp_path, *words))
    assert result.exit_code == 0, result.output
    final = tmp_path / "run" / "final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    for question, answer in PAIRS:
        turn = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**inputs, do_sample=False, max_new_tokens=60, pad_token_id=END, eos_token_id=END)
        said = out[0, inputs["input_ids"].shape[1] :].tolist()
        assert said[-1] == END
        assert tokenizer.decode(said[:-1]) == answer
