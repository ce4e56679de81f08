"""What cannot be traced is refused, and what transformers traces gives our logits."""

import copy

import pytest
import torch
from torch import nn

from hf_vanilla_transformer.interop.exported_programs import export_module, refuse
from hf_vanilla_transformer.utils.errors import UserError
from tests.interop.foreign import Record
from tests.model_helpers import tiny_model


def test_export_refuses_adapters(record_property: Record) -> None:
    model = tiny_model()
    model.model.encoder.layers[0].self_attn.q_proj = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(UserError, match="q_proj.*merge"):
        refuse(model)
    record_property("not exported", "layers of another class, such as adapters")


class DataDependentActivation(nn.Module):
    """Control flow that depends on values cannot be traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.max() > 1 else x.relu()


def test_untraceable_module_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="datadependentactivation: [^\\n]*$"):
        export_module(DataDependentActivation(), (torch.ones(2),), ({},))


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 4])
def test_exporters_of_transformers_record_the_usual_loop(beams: int) -> None:
    """A decode step of several tokens then gives the logits of the model, whatever the length of the cache."""
    exporters = pytest.importorskip("transformers.exporters")
    model = tiny_model().eval()
    model.generation_config.num_beams = beams
    inputs = {
        "input_ids": torch.arange(3, 17).view(2, 7),
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
    }
    dynamo = exporters.DynamoExporter()
    settings = {"multi_token_decode": True}
    exported = dynamo.export_for_generation(
        model, inputs, exporters.DynamoConfig(dynamic=True), **settings
    )
    _, decode = exporters.utils.decompose_for_generation(model, inputs, **settings)["decode"]
    arguments = {
        name: value for name, value in decode.items() if name not in ("use_cache", "return_dict")
    }
    for _ in range(3):
        with torch.no_grad():
            expected = model(
                **copy.deepcopy(decode)
                | {"past_key_values": copy.deepcopy(arguments["past_key_values"])}
            )
        actual = exported.runners["decode"](**copy.deepcopy(arguments))
        assert torch.equal(actual.logits, expected.logits)
        assert len(expected.logits) == 2 * beams
        arguments["past_key_values"] = expected.past_key_values
