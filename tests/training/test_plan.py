"""The plan of a recipe: arithmetic as torch counts it, and a row for each of the paper's recipes."""

import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_vanilla_transformer.training import plan
from tests.model_helpers import tiny_model


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"head_dim": 6, "value_head_dim": 10, "encoder_layers": 3, "decoder_ffn_dim": 20},
        {"decoder_attention_heads": 2},
    ],
)
def test_matrix_products_are_those_that_torch_counts(fields):
    model = tiny_model(attn_implementation="eager", **fields)
    source, target = torch.full((1, 9), 5), torch.full((1, 7), 6)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=source, decoder_input_ids=target)
    assert plan.forward_flops(model.config, 9, 7) == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        model(input_ids=source, decoder_input_ids=target).logits.sum().backward()
    assert 3 * plan.forward_flops(model.config, 9, 7) == counter.get_total_flops()


def test_a_ring_sends_each_gradient_almost_twice():
    # 4 devices, a quarter of the gradients each: three quarters are summed on the way, and three come back
    assert plan.exchanged_bytes(1000, 4) == 4 * 1000 * (3 / 4 + 3 / 4)
    assert plan.exchanged_bytes(1000, 1) == 0


def test_the_papers_recipes_have_a_row_each(repository, monkeypatch, capsys):
    recipes = sorted((repository / "scripts" / "recipes").glob("wmt14_*.yaml"))
    half = ["--peak", "500", "--utilisation", "0.4", "0.2", "--bandwidth", "1e9"]
    monkeypatch.setattr(sys, "argv", ["plan", *map(str, recipes), *half])
    plan.main()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == [path.stem for path in recipes]
    for row in rows:
        work, (fast, slow) = float(row[4].removesuffix(" TFLOP")), map(float, row[-1].split(" / "))
        updates = int(row[2].split("·")[1].replace(",", ""))
        assert fast == pytest.approx(work * updates / (8 * 500 * 0.4) / 3600, abs=0.06)
        assert slow == pytest.approx(2 * fast, abs=0.11)
