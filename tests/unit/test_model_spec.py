"""Model specs equal what training cuts, ship for known models, and are cached."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _fixtures import tiny_config

from megatrain.errors import UserError
from megatrain.model_spec import FOLDER, known_models, load_model_spec, spec_data
from megatrain.models.decoder import Decoder

PUBLISHED = {
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b-v0.3": 7_248_023_552,
    "smollm2-135m": 134_515_008,
    "mistral-large-2": 122_610_069_504,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
QUICK = ["smollm2-135m", "qwen3-0.6b", "mistral-7b-v0.3"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatrain" / "models"


def test_known_models_have_their_published_size() -> None:
    assert len(known_models()) >= 20
    assert {name: load_model_spec(name).parameters for name in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in known_models()]
)
def test_a_known_model_is_what_building_it_gives(name: str) -> None:
    data = json.loads((FOLDER / f"{name}.json").read_text())
    assert json.loads(json.dumps(spec_data(data["config"]))) == data["spec"]


@pytest.mark.parametrize("tied", [False, True])
def test_units_and_layouts_are_those_of_training(tmp_path: Path, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    config.save_pretrained(tmp_path)
    spec = load_model_spec(str(tmp_path))
    decoder = Decoder(config, dtype=torch.float32, device=torch.device("cpu"))
    assert [(u.name, u.layout, u.structure, u.uses, u.lookup) for u in spec.units] == [
        (u.name, u.layout, u.structure, u.uses, u.cheap_graph) for u in decoder.units
    ]
    assert spec.tied == tied
    assert (spec.width, spec.vocabulary, spec.layers) == (64, 320, 4)


def test_of_a_mixture_the_experts_that_a_token_meets_are_active() -> None:
    """Published: 3.3B of Qwen3-30B-A3B, 12.9B of Mixtral 8x7B; 5.1B of gpt-oss-120b, which leaves out its embedding."""
    active = {
        name: load_model_spec(name).active_parameters for name in ("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-120b")
    }
    assert active["qwen3-30b-a3b"] == pytest.approx(3.35e9, rel=0.01)
    assert active["mixtral-8x7b"] == pytest.approx(12.9e9, rel=0.01)
    assert active["gpt-oss-120b"] - 201_088 * 2880 == pytest.approx(5.13e9, rel=0.01)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_what_a_mixture_computes_and_keeps(tmp_path: Path, family: str) -> None:
    config = tiny_config(family)
    config.save_pretrained(tmp_path)
    spec = load_model_spec(str(tmp_path))
    expert = config.moe_intermediate_size if family == "qwen3_moe" else config.intermediate_size
    assert (spec.experts, spec.experts_per_token, spec.fused_attention) == (8, 2, family == "qwen3_moe")
    layer = spec.units[1]  # attention, two of eight experts of three matrices, and the router
    outer = sum(p.numel for p in layer.layout.parameters if "attn" in p.local and len(p.shape) == 2)
    assert spec.matrix_flops(layer) == 2 * (outer + 2 * 3 * 64 * expert + 8 * 64)
    assert spec.intermediate == max(2 * expert, config.intermediate_size if family == "qwen3_moe" else 0)


def test_flops_count_attention_causally() -> None:
    spec = load_model_spec("qwen2.5-7b")
    matrices = 6 * (spec.parameters - spec.vocabulary * spec.width)  # the embedding multiplies nothing
    assert spec.flops_per_token(1) == pytest.approx(matrices, rel=1e-3)
    pairs = sum(range(1, 4097)) / 4096  # keys that a token sees, on average
    attention = 3 * 28 * 4 * pairs * 3584
    assert spec.flops_per_token(4096) - spec.flops_per_token(1) == pytest.approx(attention, rel=1e-3)


def test_the_second_sight_needs_no_torch(tmp_path: Path, cache: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    lines: list[str] = []
    first = load_model_spec(str(tmp_path), lines.append)
    assert len(lines) == 1
    assert "without weights" in lines[0]
    program = (
        "import sys, megatrain.model_spec as m;"
        f"s = m.load_model_spec({str(tmp_path)!r}, lambda line: sys.exit(3)); m.load_model_spec('qwen2.5-72b');"
        f"sys.exit('torch' in sys.modules or s.parameters != {first.parameters})"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_a_damaged_or_outdated_cache_is_made_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_config().save_pretrained(tmp_path)
    first = load_model_spec(str(tmp_path))
    (file,) = cache.iterdir()
    for damage in ("{", "{}", '{"units": 3}', '{"structures": []}'):
        file.write_text(damage)
        assert load_model_spec(str(tmp_path)) == first
    monkeypatch.setattr("megatrain.model_spec.metadata.version", lambda name: "99")
    load_model_spec(str(tmp_path))
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", r"config\.json: cannot be read as JSON"),
        ("[]", "has no model_type"),
        ('{"model_type": "nothing-of-the-kind"}', "nothing-of-the-kind"),
        ("[" * 200_000, r"config\.json: cannot be read as JSON"),
        ('{"model_type": "llama", "vocab_size": 0}', r"config\.json: vocab_size: 0 is no whole number"),
        ('{"model_type": "llama", "hidden_size": -64}', r"config\.json: hidden_size: -64 is no"),
        ('{"model_type": "llama", "num_hidden_layers": 0}', r"config\.json: num_hidden_layers: 0"),
        ('{"model_type": "llama", "hidden_size": "256"}', "hidden_size"),
        ('{"model_type": "llama", "num_key_value_heads": 3}', r"num_key_value_heads: 3 does not divide 32"),
        ('{"model_type": "qwen3_moe", "num_experts_per_tok": 0}', r"num_experts_per_tok: 0 is not between 1 and all"),
        ('{"model_type": "mixtral", "num_experts_per_tok": 9}', r"num_experts_per_tok: 9 is not between 1 and all 8"),
    ],
)
def test_a_config_that_cannot_be_planned(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        load_model_spec(str(tmp_path / "config.json"))


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"did you mean qwen2\.5-7b.*llama-3\.1-8b"):
        load_model_spec("Qwen/Qwen2.5-7")
