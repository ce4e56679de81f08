"""The cost estimate of a recipe: FLOPs as torch counts them, and a table row per recipe."""

import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_vanilla_transformer.benchmarks import plan
from hf_vanilla_transformer.errors import UserError
from tests.model_helpers import tiny_model


def formula(config, source, target):
    """FLOPs of the matrix products: 2·m·k·n for (m, k) and (k, n). Attention (§3.2.2) has four projections, the scores
    and the weighted sum of the values."""
    d = config.d_model

    def attention(heads, queries, keys):
        width = heads * ((config.head_dim or d // heads) + (config.value_head_dim or d // heads))
        return 2 * width * ((queries + keys) * d + queries * keys)

    encoder = attention(config.encoder_attention_heads, source, source) + 4 * source * d * config.encoder_ffn_dim
    decoder = sum(attention(config.decoder_attention_heads, target, keys) for keys in (target, source))
    decoder += 4 * target * d * config.decoder_ffn_dim
    output = 2 * target * d * config.target_vocab_size
    return config.encoder_layers * encoder + config.decoder_layers * decoder + output


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"head_dim": 6, "value_head_dim": 10, "encoder_layers": 3, "decoder_ffn_dim": 20},
        {"decoder_attention_heads": 2, "attn_implementation": "eager"},
    ],
)
def test_size_and_flops_equal_the_formula_and_the_model(fields):
    model = tiny_model(**fields)
    assert plan.size_and_flops(model.config, 9, 7) == (model.num_parameters(), formula(model.config, 9, 7))
    source, target = torch.full((1, 9), 5), torch.full((1, 7), 6)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=source, decoder_input_ids=target).logits.sum().backward()
    if "attn_implementation" in fields:  # torch counts no backward pass of other kernels on a CPU
        assert 3 * formula(model.config, 9, 7) == counter.get_total_flops()


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
