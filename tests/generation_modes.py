"""Every mode of transformers' `generate`, without this package.

`tests/test_generation_modes.py` calls it, and runs it in a process that only has the code in a checkpoint.
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING

LIMIT = 12
BEAMS = 3
PLAIN: dict[str, Any] = {
    "num_beams": 1,
    "max_new_tokens": LIMIT,
    "length_penalty": 0.0,  # Hugging Face's score is then log P, of which every length of a hypothesis makes the same
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
}
WITH_SCORES = {"return_dict_in_generate": True, "output_scores": True}


def never(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
    """A stopping criterion that is never met."""
    return torch.zeros(len(ids), dtype=torch.bool)


class Listener:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


# Greedy and beam search have two loops: this package's, and transformers' as soon as they are asked for more.
GREEDY: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy with scores": WITH_SCORES,
    "greedy with a stopping criterion": {"stopping_criteria": StoppingCriteriaList([never])},
    "greedy with a static cache": {"cache_implementation": "static"},
    "greedy without a cache": {"use_cache": False},
    "greedy with a streamer": {"streamer": Listener},
}
ASSISTED: dict[str, dict[str, Any]] = {
    "assisted": {"assistant_model": "the assistant"},
    "assisted by the text": {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
}
BEAM: dict[str, dict[str, Any]] = {
    "beam search": {"num_beams": BEAMS},
    "beam search with scores": {"num_beams": BEAMS, **WITH_SCORES},
    "beam search with a static cache": {"num_beams": BEAMS, "cache_implementation": "static"},
    "beam search without a cache": {"num_beams": BEAMS, "use_cache": False},
}
SAMPLED: dict[str, dict[str, Any]] = {
    "sampling of the best token": {"do_sample": True, "top_k": 1},
    "sampling": {"do_sample": True},
    "sampling with a processor": {
        "do_sample": True,
        "logits_processor": LogitsProcessorList([lambda ids, s: s]),
    },
}
BEAM_SAMPLED: dict[str, dict[str, Any]] = {
    "beam sampling": {"do_sample": True, "num_beams": BEAMS},
    "beam sampling without a cache": {"do_sample": True, "num_beams": BEAMS, "use_cache": False},
}
MODES = {
    GenerationMode.GREEDY_SEARCH: GREEDY,
    GenerationMode.ASSISTED_GENERATION: ASSISTED,
    GenerationMode.BEAM_SEARCH: BEAM,
    GenerationMode.SAMPLE: SAMPLED,
    GenerationMode.BEAM_SAMPLE: BEAM_SAMPLED,
}
OF_ONE_SENTENCE = ("streamer", "assistant_model", "prompt_lookup_num_tokens")


def modes_of_transformers() -> set[GenerationMode]:
    """The modes that the installed version has itself. The others are code on the Hub, with a slash in its name."""
    on_the_hub = {mode for mode, code in GENERATION_MODES_MAPPING.items() if "/" in code}
    return set(GenerationMode) - on_the_hub


def written(model: Any, assistant: Any, inputs: dict[str, Tensor]) -> dict[str, list[list[int]]]:
    """The tokens of every mode, each sentence without padding after its end."""
    found = {}
    for name, settings in (GREEDY | ASSISTED | BEAM | SAMPLED | BEAM_SAMPLED).items():
        batches = [inputs]
        if not settings.keys().isdisjoint(OF_ONE_SENTENCE):
            rows = range(len(inputs["input_ids"]))
            batches = [{key: value[[row]] for key, value in inputs.items()} for row in rows]
        found[name] = [
            row for batch in batches for row in _generate(model, assistant, batch, settings)
        ]
    return found


def _generate(
    model: Any, assistant: Any, inputs: dict[str, Tensor], settings: dict[str, Any]
) -> list[list[int]]:
    settings = PLAIN | settings
    if "assistant_model" in settings:
        settings["assistant_model"] = assistant
    if "streamer" in settings:
        settings["streamer"] = Listener()
    torch.manual_seed(0)
    output = model.generate(**inputs, **settings)
    tokens = output if isinstance(output, Tensor) else output.sequences
    if "streamer" in settings:
        assert settings["streamer"].tokens == tokens.flatten().tolist()
    pad = model.generation_config.pad_token_id
    numbers = torch.arange(1, tokens.shape[1] + 1)
    lengths = (tokens.ne(pad) * numbers).amax(dim=1)
    return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]


def main(folder: str, output: str) -> None:
    """Load a checkpoint with its own code, and write the tokens of the translator and of its decoder alone."""
    with open(f"{folder}/inputs.json", encoding="utf-8") as file:
        inputs = json.load(file)
    found = {}
    for name, auto_class in (
        ("translator", AutoModelForSeq2SeqLM),
        ("decoder", AutoModelForCausalLM),
    ):
        model, assistant = (
            auto_class.from_pretrained(f"{folder}/{each}", trust_remote_code=True).eval()
            for each in ("model", "assistant")
        )
        assert not type(model).__module__.startswith("hf_vanilla_transformer")
        tensors = {key: torch.tensor(value) for key, value in inputs[name].items()}
        found[name] = written(model, assistant, tensors)
    with open(output, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
