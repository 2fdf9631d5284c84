"""On the CPU with the reference kernel: bitwise the plain loop, for every memory option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _fixtures import tiny_config
from _oracle import Oracle, random_batches

from megatrain import AdamW, Model

STEPS = 10
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run_both(
    config: Any,
    *,
    micros: int = 1,
    rows: int = 4,
    steps: int = STEPS,
    device: str = "cpu",
    chunk: int = 10_000,
    dtype: str = "float32",
    **options: Any,
) -> None:
    batches = random_batches(config.vocab_size, steps=steps, micros=micros, rows=rows)
    with Model.from_config(
        config,
        seed=7,
        device=device,
        compute_dtype=dtype,
        max_grad_norm=None,
        kernel="reference",
        optimizer=AdamW(lr=1e-3, weight_decay=0.01),
        loss_chunk_tokens=chunk,
        **options,
    ) as model:
        oracle = Oracle(config, model.state_dict(), seed=7, chunk=chunk, dtype=DTYPES[dtype])
        for index, step in enumerate(batches):
            result = model.step(step, keep_gradients=True)
            expected = oracle.step(step)
            # Micro-batches: each loss is exact, and their sum is divided once here, every time there.
            assert result.loss == pytest.approx(oracle.losses[-1], rel=0 if micros == 1 else 1e-15, abs=0), index
            gradients = model.gradients()
            assert gradients.keys() == expected.keys()
            for name, gradient in expected.items():
                assert torch.equal(gradients[name], gradient), f"gradient of {name} at step {index}"
        masters = model.state_dict()
        for name, master in oracle.state_dict().items():
            assert torch.equal(masters[name], master), f"master of {name}"


DEEP = pytest.mark.slow
PLACED = [pytest.param("float32", marks=DEEP), "bfloat16"]
"""Dtypes of placements: FP32 itself is `test_fp32`."""


@pytest.mark.parametrize("activations", ["recompute", "selective", "keep"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("layers", "slots"),
    [(2, 1), (2, 2), (2, 4), *(pytest.param(12, slots, marks=DEEP) for slots in (1, 2, 14))],
)
def test_fp32(layers: int, slots: int, tied: bool, dropout: float, activations: str) -> None:
    if dropout and activations == "selective":
        pytest.skip("refused")
    config = tiny_config(num_hidden_layers=layers, tie_word_embeddings=tied, attention_dropout=dropout)
    run_both(config, slots=slots, activations=activations)


@pytest.mark.parametrize("activations", ["recompute", "selective", "keep"])
@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_bf16(tied: bool, micros: int, activations: str) -> None:
    run_both(tiny_config(tie_word_embeddings=tied), dtype="bfloat16", micros=micros, activations=activations, chunk=32)


ALL = ["embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head"]


@pytest.mark.parametrize("dtype", PLACED)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("weights", "states"),
    [(ALL, None), (None, ALL), (["layers.2", "head"], ["embedding", "layers.0"]), (["embedding"], ["head"])],
)
def test_residency(weights: list[str] | None, states: list[str] | None, tied: bool, dtype: str) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    run_both(config, dtype=dtype, weights_on_device=weights, states_on_device=states, chunk=32)


@pytest.mark.parametrize("dtype", PLACED)
@pytest.mark.parametrize("activations", [["layers.1", "layers.3"], "50%"])
def test_some_activations_kept(activations: str | list[str], dtype: str) -> None:
    run_both(tiny_config(), activations=activations, dtype=dtype, chunk=32)


@pytest.mark.parametrize("dtype", PLACED)
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("activations", ["recompute", "selective", "keep 34%, selective 34%", ["layers.2"]])
def test_boundaries_on_the_host(activations: str | list[str], micros: int, dtype: str) -> None:
    config = tiny_config(num_hidden_layers=6, attention_dropout=0.0 if "selective" in activations else 0.1)
    run_both(config, boundaries="host", activations=activations, micros=micros, rows=5, steps=3, dtype=dtype)


@pytest.mark.parametrize("dtype", PLACED)
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize(
    ("every", "options"),
    [
        (2, {"slots": 1}),
        (3, {"slots": 3, "boundaries": "host"}),
        (4, {"activations": ["layers.2"]}),
        (100, {"boundaries": "host", "states_on_device": "50%"}),
    ],
)
def test_boundary_every(every: int, options: dict[str, Any], micros: int, dtype: str) -> None:
    config = tiny_config(num_hidden_layers=7, attention_dropout=0.1)
    run_both(config, boundary_every=every, micros=micros, rows=5, steps=3, dtype=dtype, **options)


@pytest.mark.parametrize("dtype", PLACED)
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"weights_on_device": "100%"},
        {"states_on_device": "100%", "activations": "keep"},
        {"weights_on_device": ALL, "states_on_device": ["layers.0", "head"], "boundaries": "host", "boundary_every": 2},
    ],
)
def test_micro_batch_major(options: dict[str, Any], tied: bool, micros: int, dtype: str) -> None:
    config = tiny_config(tie_word_embeddings=tied, attention_dropout=0.1)
    run_both(config, order="micro_batch", micros=micros, rows=5, steps=3, dtype=dtype, **options)


def test_on_the_simulator() -> None:
    run_both(tiny_config(), device="sim")


def test_in_chunks_of_seven_tokens() -> None:
    run_both(tiny_config("tiny-tied"), chunk=7)
