from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from _fixtures import peak_rss, random_checkpoint, tiny_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megatrain import UserError
from megatrain._safetensors import read_header
from megatrain.model_files import INDEX, SINGLE, ModelFiles

TIED = {"lm_head.weight": "model.embed_tokens.weight"}
SPECIAL = [0.0, -0.0, 1.0, -1.5, 6e-8, 1e-45, 65504.0, 3.3e38, float("inf"), float("-inf"), float("nan")]


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("shard", ["5GB", "100KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reads_what_transformers_wrote(tmp_path: Path, dtype: torch.dtype, shard: str) -> None:
    model = tiny_checkpoint(tmp_path, "tiny", dtype=dtype, max_shard_size=shard)
    files = ModelFiles(tmp_path)
    files.check(shapes(model))
    assert files.nbytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert files.dtype_name == {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    for name, parameter in model.named_parameters():
        out = torch.full(parameter.shape, torch.nan)
        files.read_into(name, out)
        assert same_bits(out, parameter.detach().float())
        assert files.shape(name) == tuple(parameter.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_special_values_and_blocks(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain._safetensors.BLOCK_ELEMENTS", 4)
    values = torch.tensor(SPECIAL).to(dtype)
    save_file({"a": values, "b": values[:8].reshape(2, 4).flip(0).contiguous()}, tmp_path / SINGLE)
    files = ModelFiles(tmp_path)
    out = torch.empty(len(SPECIAL))
    files.read_into("a", out)
    assert same_bits(out, values.float())
    blocks = [(start, block.clone()) for start, block in files.read_blocks("a")]
    assert [start for start, _ in blocks] == [0, 4, 8]
    assert same_bits(torch.cat([block for _, block in blocks]), values.float())
    raw = torch.cat(list(files.raw_blocks("b")))
    assert torch.equal(raw, values[:8].reshape(2, 4).flip(0).contiguous().view(-1).view(torch.uint8))


def test_reads_into_a_part_of_a_larger_buffer(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "tiny", dtype=torch.bfloat16)
    slab = torch.full((64 * 64 + 32,), 7.0)
    name = "model.layers.1.self_attn.q_proj.weight"
    ModelFiles(tmp_path).read_into(name, slab[16:-16])
    assert torch.equal(slab[16:-16].view(64, 64), model.get_parameter(name).detach().float())
    assert (slab[:16] == 7).all()
    assert (slab[-16:] == 7).all()


def test_a_dtype_that_is_not_trained_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4, dtype=torch.int8)}, tmp_path / SINGLE)
    files = ModelFiles(tmp_path)
    with pytest.raises(UserError, match=r"'w'.*I8.*unquantised"):
        files.read_into("w", torch.empty(4))
    with pytest.raises(UserError, match=r"not in BF16, F16 or F32.*w I8"):
        files.check({"w": (4,)})


def test_check_lists_every_kind_of_difference(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "tiny")
    expected = shapes(model)
    del expected["model.norm.weight"]
    expected |= {f"extra.{i}": (1,) for i in range(7)} | {"lm_head.weight": (321, 64)}
    with pytest.raises(UserError) as caught:
        ModelFiles(tmp_path).check(expected)
    message = str(caught.value)
    assert "7 missing" in message
    assert "extra.4 and 2 more" in message
    assert "1 unexpected (the config knows no such parameter): model.norm.weight" in message
    assert "lm_head.weight [320, 64] instead of [321, 64]" in message
    assert "config.json" in message


def test_buffers_of_old_checkpoints_are_tolerated(tmp_path: Path) -> None:
    tensors = {
        "w": torch.ones(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "mtp.x": torch.ones(1),
    }
    save_file(tensors, tmp_path / SINGLE)
    files = ModelFiles(tmp_path)
    files.check({"w": (2,)}, ignore=[r"^mtp\."])
    with pytest.raises(UserError, match=r"mtp\.x"):
        files.check({"w": (2,)})


def test_tied_alias_absent_equal_instead_of_owner_or_different(tmp_path: Path) -> None:
    owner, alias = "model.embed_tokens.weight", "lm_head.weight"
    weight = torch.randn(6, 4)
    cases = {
        "absent": {owner: weight},
        "equal": {owner: weight, alias: weight.clone()},
        "instead": {alias: weight},
    }
    for case, tensors in cases.items():
        (tmp_path / case).mkdir()
        save_file(tensors, tmp_path / case / SINGLE)
        files = ModelFiles(tmp_path / case)
        files.check({owner: (6, 4)}, TIED)
        out = torch.empty(6, 4)
        files.read_into(owner, out)
        assert torch.equal(out, weight)
    save_file({owner: weight, alias: weight + 1}, tmp_path / SINGLE)
    with pytest.raises(UserError, match=r"ties lm_head.weight.*tie_word_embeddings"):
        ModelFiles(tmp_path).check({owner: (6, 4)}, TIED)


@pytest.mark.parametrize(
    ("present", "message"),
    [
        ("pytorch_model.bin", r"pytorch_model.bin.*only safetensors is read.*save_pretrained"),
        ("consolidated.00.pth", r"consolidated.00.pth.*convert"),
        ("model-q4.gguf", r"model-q4.gguf.*gguf_file"),
        ("model-00001-of-00002.safetensors", r"neither model.safetensors nor"),
        ("adapter_config.json", "adapter.*merge"),
        ("config.json", "no weights"),
    ],
)
def test_folders_without_weights_say_what_they_hold(tmp_path: Path, present: str, message: str) -> None:
    (tmp_path / present).touch()
    with pytest.raises(UserError, match=message):
        ModelFiles(tmp_path)


def test_no_folder_names_the_way_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="hf download"):
        ModelFiles(tmp_path / "org" / "name")


def test_two_sets_of_weights_are_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "tiny", max_shard_size="100KB")
    tiny_checkpoint(tmp_path / "other", "tiny")
    (tmp_path / "other" / SINGLE).rename(tmp_path / SINGLE)
    with pytest.raises(UserError, match="two sets of weights"):
        ModelFiles(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../x.safetensors"}}'])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(UserError, match=r"index\.json"):
        ModelFiles(tmp_path)


def test_a_git_lfs_pointer_is_told(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n")
    with pytest.raises(UserError, match="git lfs pull"):
        ModelFiles(tmp_path)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=64), st.booleans())
def test_no_header_crashes_the_reader(tmp_path_factory: pytest.TempPathFactory, junk: bytes, framed: bool) -> None:
    path = tmp_path_factory.mktemp("junk") / SINGLE
    path.write_bytes(struct.pack("<Q", len(junk)) + junk if framed else junk)
    if framed and junk.strip() == b"{}":
        return
    with pytest.raises(UserError, match=SINGLE):
        read_header(path)


@pytest.mark.parametrize(
    "item",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
        {"shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]},
        7,
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, item: object) -> None:
    text = json.dumps({"w": item}).encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(UserError, match="not a sound safetensors file"):
        ModelFiles(tmp_path)


def _read_all(folder: Path) -> dict[str, torch.Tensor]:
    files = ModelFiles(folder)
    state = {name: torch.empty(files.shape(name)) for name in files.names}
    for name, out in state.items():
        files.read_into(name, out)
    return state


def test_reading_needs_a_block_beside_the_result(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, 300_000_000, shards=3)
    memory = peak_rss(_read_all, tmp_path)
    assert memory.after - memory.before > 550e6  # the FP32 result is really there
    assert memory.peak - memory.after < 40e6
