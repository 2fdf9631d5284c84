from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from _exports import export, export_files, export_tensors, logits, reload
from _fixtures import (
    FAMILIES,
    peak_rss,
    random_checkpoint,
    round_parameters,
    tiny_checkpoint,
    tiny_config,
    tiny_model,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatrain import UserError
from megatrain._safetensors import item_bytes, read_header
from megatrain._side_files import edited_config
from megatrain.export import ExportTensor, check_export, write_model
from megatrain.model_files import INDEX, SINGLE, ModelFiles

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def trained(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The same model with every value changed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_of_every_family(tmp_path: Path, family: str) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    model = trained(tiny_checkpoint(source, family, max_shard_size="100KB"))
    export(model, target, source, max_shard_bytes=100_000)
    assert torch.equal(logits(reload(target)), logits(model))
    assert (target / "config.json").read_bytes() == (source / "config.json").read_bytes()
    before, after = ModelFiles(source), ModelFiles(target)
    assert after.names == before.names
    assert [(after.shape(n), after.dtype(n)) for n in after.names] == [
        (before.shape(n), before.dtype(n)) for n in before.names
    ]
    index = json.loads((target / INDEX).read_text())
    assert index["metadata"]["total_size"] == before.nbytes
    assert len(list(target.glob("*.safetensors"))) > 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_without_a_source(tmp_path: Path, family: str, dtype: str) -> None:
    model = tiny_model(family)
    export(model, tmp_path / "target", None, dtype)
    loaded = reload(tmp_path / "target")
    assert loaded.dtype == TORCH[dtype]
    assert torch.equal(logits(loaded), logits(round_parameters(model, TORCH[dtype])))
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    rope = model.config.rope_parameters
    assert config["rope_parameters"] == rope
    assert config["rope_theta"] == rope.get("full_attention", rope)["rope_theta"]


def test_scaled_rope_is_written_in_both_forms(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    model = tiny_model("tiny", rope_parameters={**rope, "original_max_position_embeddings": 64})
    export(model, tmp_path / "target", None)
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"]["factor"] == 8.0
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert torch.equal(logits(reload(tmp_path / "target")), logits(model))


def test_rounding_is_that_of_torch(tmp_path: Path) -> None:
    values = torch.randint(-(2**31), 2**31 - 1, (100_000,), dtype=torch.int32).view(torch.float32)
    values = values[values.abs() < 3e38]
    tensor = ExportTensor("w", tuple(values.shape), lambda: values.split(777))
    write_model(tmp_path / "x", [tensor], dtype="bfloat16", source=None, config=tiny_config())
    assert torch.equal(load_file(tmp_path / "x" / SINGLE)["w"], values.to(torch.bfloat16))


def test_buffers_of_the_source_and_mixed_dtypes_survive(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"dtype": "bfloat16"}')
    original = {
        "a": torch.randn(3).to(torch.bfloat16),
        "b": torch.randn(5),
        "ids": torch.arange(7),
        "z": torch.arange(3, dtype=torch.int32),
        "flag": torch.tensor([True, False, True]),
        "c": torch.randn(2, 3).to(torch.float16),
    }
    save_file(original, source / SINGLE)
    changed = {name: original[name].float() + 1 for name in "abc"}
    tensors = [ExportTensor(name, tuple(v.shape), lambda v=v: [v]) for name, v in changed.items()]
    for dtype in (None, "bfloat16"):
        target = tmp_path / str(dtype)
        write_model(target, tensors, dtype=dtype, source=source, config={})
        with safe_open(target / SINGLE, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        saved = load_file(target / SINGLE)
        assert saved.keys() == original.keys()
        for entry in read_header(target / SINGLE).values():  # readers map the file: unaligned views fail there
            assert entry.start % item_bytes(entry.dtype) == 0, entry
        for name in ("ids", "z", "flag"):
            assert torch.equal(saved[name], original[name])
        for name, value in changed.items():
            assert torch.equal(saved[name], value.to(TORCH[dtype] if dtype else original[name].dtype))


def test_alias_is_written_only_if_the_source_had_it(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "source", "tiny-tied")
    weights = load_file(tmp_path / "source" / SINGLE)
    embedding = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": embedding.clone()}, tmp_path / "source" / SINGLE)
    export(trained(model), tmp_path / "both", tmp_path / "source")
    saved = load_file(tmp_path / "both" / SINGLE)
    assert torch.equal(saved["lm_head.weight"], saved["model.embed_tokens.weight"])
    assert torch.equal(saved["lm_head.weight"], model.lm_head.weight)
    del weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": embedding.clone()}, tmp_path / "source" / SINGLE)
    export(model, tmp_path / "alias", tmp_path / "source")
    assert "model.embed_tokens.weight" not in load_file(tmp_path / "alias" / SINGLE)
    assert torch.equal(logits(reload(tmp_path / "alias")), logits(model))


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (torch.nan, "float32", "'w' holds NaN or infinity"),
        (torch.inf, "bfloat16", "'w' holds NaN or infinity"),
        (70000.0, "float16", "'w' holds values beyond the range of F16; export as bfloat16"),
        (3.4e38, "bfloat16", "'w' holds values beyond the range of BF16"),
    ],
)
def test_values_that_cannot_be_written(tmp_path: Path, value: float, dtype: str, message: str) -> None:
    values = torch.zeros(10)
    values[7] = value
    tensor = ExportTensor("w", (10,), lambda: values.split(4))
    with pytest.raises(UserError, match=message):
        write_model(tmp_path / "x", [tensor], dtype=dtype, source=None, config=tiny_config())
    assert not list(tmp_path.iterdir())


def test_blocks_that_do_not_fit_their_shape_are_a_programming_error(tmp_path: Path) -> None:
    tensor = ExportTensor("w", (10,), lambda: [torch.zeros(9)])
    with pytest.raises(RuntimeError, match="w: "):
        write_model(tmp_path / "x", [tensor], dtype=None, source=None, config=tiny_config())
    assert not list(tmp_path.iterdir())


def test_target_that_holds_something_is_refused(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "source", "tiny")
    with pytest.raises(UserError, match="not an empty folder"):
        export(model, tmp_path / "source", tmp_path / "source")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="not an empty folder"):
        export(model, tmp_path / "file", tmp_path / "source")
    (tmp_path / "empty").mkdir()
    export(model, tmp_path / "empty", tmp_path / "source")
    reload(tmp_path / "empty")


def test_disk_too_small_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("tiny")
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"needs 0\.\d+ GiB, the disk has 0\.00 GiB free"):
        export(model, tmp_path / "a" / "b", None)
    assert not list(tmp_path.iterdir())


def test_disk_that_fills_up_leaves_nothing(tmp_path: Path) -> None:
    def blocks() -> list[torch.Tensor]:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="No space left on device; free space"):
        write_model(tmp_path / "x", [ExportTensor("w", (1,), blocks)], dtype=None, source=None, config=tiny_config())
    assert not list(tmp_path.iterdir())


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'int8' is unknown; use one of float32, bfloat16, float16"):
        export(tiny_model("tiny"), tmp_path / "x", None, "int8")


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    export(tiny_model("tiny"), tmp_path / "x", None, "bfloat16", progress=lambda *call: calls.append(call))
    assert calls[-1][1] == calls[-1][2] == ModelFiles(tmp_path / "x").nbytes
    assert [c[1] for c in calls] == sorted(c[1] for c in calls)


SOURCE_CONFIG = """{
    "architectures" : ["X"], "rope_theta":1000000.0,
  "torch_dtype": "bfloat16", "unicode": "h\u00e9 \\u00e9 {\\"torch_dtype\\": 1}",
  "text_config": {"vocab_size": 10, "dtype" :"bfloat16",
       "layers": [1,2 , {"dtype": "bfloat16"}]},
  "quantization_config": {"dtype": "bfloat16"},
  "eps": 1e-05, "eps2": 0.000010,
  "vocab_size":  320
}
"""


def test_config_keeps_every_other_byte() -> None:
    assert edited_config(SOURCE_CONFIG, {"vocab_size": 320}, "bfloat16") == SOURCE_CONFIG
    edited = edited_config(SOURCE_CONFIG, {"vocab_size": 384, "text_config": {"vocab_size": 11}}, "float32")
    expected = (
        SOURCE_CONFIG.replace('"torch_dtype": "bfloat16"', '"torch_dtype": "float32"')
        .replace('"vocab_size": 10, "dtype" :"bfloat16"', '"vocab_size": 11, "dtype" :"float32"')
        .replace('"vocab_size":  320', '"vocab_size":  384')
    )
    assert edited == expected


def test_a_repeated_key_is_edited_where_parsers_read_it() -> None:
    text = '{"dtype": "float16", "dtype": "bfloat16"}'
    assert edited_config(text, {}, "float32") == '{"dtype": "float16", "dtype": "float32"}'


def test_side_files_are_copied_byte_for_byte(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    model = tiny_checkpoint(source, "tiny", dtype=torch.bfloat16)
    copied = [
        "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "vocab.json",
        "chat_template.jinja", "added_tokens.json", "generation_config.json", "merges.txt",
        "preprocessor_config.json", "LICENSE", "NOTICE.md", "qwen.tiktoken", "modeling_x.py",
        "chat_template.json", "additional_chat_templates/rag.jinja",
    ]  # fmt: skip
    left = [
        "README.md",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "trainer_state.json",
        "x.gguf",
        ".gitattributes",
    ]
    (source / "additional_chat_templates").mkdir()
    for name in copied + left:
        (source / name).write_bytes(b'{"temperature": 0.7,  "tokenizer_class":"TokenizersBackend"}\r\n' + name.encode())
    export(model, target, source)
    for name in copied:
        assert (target / name).read_bytes() == (source / name).read_bytes(), name
    assert not [name for name in left if (target / name).exists()]


def test_tokenizer_without_a_source_gets_a_class_of_transformers_4(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "<x>": 2}, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", extra_special_tokens=["<x>"]
    )
    export(tiny_model("tiny"), tmp_path / "x", None, tokenizer=tokenizer)
    config = json.loads((tmp_path / "x" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["additional_special_tokens"] == ["<x>"]
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "x")
    assert again.convert_tokens_to_ids(["a", "<x>"]) == [1, 2]
    assert "<x>" in again.all_special_tokens


def test_trial_save_leaves_nothing_and_finds_what_would_fail(tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = tiny_checkpoint(source, "tiny")
    shapes = {t.name: t.shape for t in export_tensors(model)}
    check_export(tmp_path / "x", shapes, dtype=None, source=source, config=model.config)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    (source / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"trial save.*config\.json was made anew"):
        check_export(tmp_path / "x", shapes, dtype=None, source=source, config=model.config)
    with pytest.raises(UserError, match="not an empty folder"):
        check_export(source, shapes, dtype=None, source=source, config=model.config)


def test_a_source_that_vanished_costs_its_side_files_only(tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = tiny_checkpoint(source, "tiny", dtype=torch.bfloat16)
    files = ModelFiles(source)
    shutil.rmtree(source)
    with pytest.raises(UserError, match=r"weights are saved in .*config\.json was made anew"):
        write_model(tmp_path / "x", export_tensors(model), dtype=None, source=files, config=model.config)
    assert torch.equal(logits(reload(tmp_path / "x")), logits(model))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_export_needs_a_few_blocks_whatever_the_size(tmp_path: Path, dtype: str) -> None:
    random_checkpoint(tmp_path / "source", 200_000_000, shards=2)
    memory = peak_rss(export_files, tmp_path / "source", tmp_path / "target", dtype)
    assert ModelFiles(tmp_path / "target").nbytes > 190e6
    assert memory.peak - memory.before < 80e6


def test_config_says_what_was_written_even_if_the_source_did_not(tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = tiny_checkpoint(source, "tiny")
    text = (source / "config.json").read_text()
    (source / "config.json").write_text(text.replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    export(model, tmp_path / "x", source)
    assert (tmp_path / "x" / "config.json").read_text() == text
