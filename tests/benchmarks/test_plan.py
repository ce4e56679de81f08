"""The cost estimate of a recipe: FLOPs as torch counts them, and a table row per recipe."""

import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_vanilla_transformer.benchmarks import plan
from hf_vanilla_transformer.errors import UserError
from tests.model_helpers import tiny_model


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"head_dim": 6, "value_head_dim": 10, "encoder_layers": 3, "decoder_ffn_dim": 20},
        {"decoder_attention_heads": 2},
    ],
)
def test_forward_flops_equal_those_that_torch_counts(fields):
    model = tiny_model(attn_implementation="eager", **fields)
    source, target = torch.full((1, 9), 5), torch.full((1, 7), 6)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=source, decoder_input_ids=target)
    assert plan.forward_flops(model.config, 9, 7) == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        model(input_ids=source, decoder_input_ids=target).logits.sum().backward()
    assert 3 * plan.forward_flops(model.config, 9, 7) == counter.get_total_flops()


def test_all_reduce_bytes_are_those_of_a_ring():
    # 4 devices: reduce-scatter moves three quarters of the gradients, all-gather three more
    assert plan.all_reduce_bytes(1000, 4) == 4 * 1000 * (3 / 4 + 3 / 4)
    assert plan.all_reduce_bytes(1000, 1) == 0


def test_plan_prints_a_row_per_recipe(repository, monkeypatch, capsys):
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


def test_plan_needs_token_updates(repository):
    recipe = str(repository / "scripts" / "recipes" / "numbers_en_de.yaml")
    with pytest.raises(UserError, match="numbers_en_de.yaml: .*tokens_per_update.*max_steps"):
        plan.table_row(recipe, None)
