"""How the arguments of `generate` are read: the score of hypotheses, and the requests left to transformers' loops."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.utils import logging

from hf_vanilla_transformer import generation_vanilla_transformer as generation
from hf_vanilla_transformer.generation_vanilla_transformer import (
    VanillaTransformerGenerationConfig,
    plan_search,
)
from hf_vanilla_transformer.inference import optimize_for_inference
from hf_vanilla_transformer.search_vanilla_transformer import LengthPenalty
from tests.search_helpers import AS_DICT, LENGTHS, Model, by_transformers, source, varied_model

GREEDY = {"num_beams": 1, "max_new_tokens": 6}


def test_length_penalty_formulas() -> None:
    lengths = torch.tensor([1.0, 13.0])
    for formula, longer in (("gnmt", 3**0.6), ("power", 13**0.6)):
        penalties = LengthPenalty(0.6, formula)(lengths)
        assert penalties.tolist() == pytest.approx([1.0, longer])


@pytest.mark.parametrize(
    ("own", "given", "config", "alpha", "formula"),
    [
        ({}, {}, {}, 0.6, "gnmt"),
        ({}, {"paper_length_penalty": 0.9}, {}, 0.9, "gnmt"),
        ({"paper_length_penalty": 0.3}, {}, {}, 0.3, "gnmt"),
        ({}, {"length_penalty": 1.0}, {}, 1.0, "power"),
        ({"length_penalty": 1.5}, {}, {}, 1.5, "power"),
        ({"length_penalty": 1.0}, {"paper_length_penalty": 0.9}, {}, 1.0, "power"),
        ({}, {}, {"length_penalty": 2.0}, 2.0, "power"),
        ({}, {}, {"num_beams": 3}, 0.6, "gnmt"),
    ],
)
def test_length_penalty_of_caller_and_model(own, given, config, alpha, formula):
    model = varied_model()
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    config = GenerationConfig(**config) if config else None
    search, _, uncovered = plan_search(model, source([4, 3])["input_ids"], config, given)
    assert search is not None
    assert search.keywords["penalty"] == LengthPenalty(alpha, formula)
    assert not uncovered


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences"])
@pytest.mark.parametrize("count", [0, -1])
def test_counts_below_one_are_refused(name: str, count: int) -> None:
    """transformers' loops end in tracebacks here, or return another number of translations."""
    model = varied_model()
    ids = source([4, 3])["input_ids"]
    with pytest.raises(ValueError, match=f"^{name}: {count}: give at least 1$"):
        model.generate(ids, **{name: count})
    with pytest.raises(ValueError, match=f"^{name}: {count}: give at least 1$"):
        model.generate(ids, GenerationConfig(**{name: count}))
    model.generate(ids, **{name: 1}, max_new_tokens=1)


def test_assistant_of_a_beam_search_is_refused() -> None:
    model = varied_model()
    settings = {"inputs": source([4])["input_ids"], "assistant_model": varied_model()}
    with pytest.raises(ValueError, match=r"num_beams=4, but assisted .*: give num_beams=1$"):
        model.generate(**settings)
    plain = model.generate(settings["inputs"], **GREEDY)
    assert model.generate(**settings, **GREEDY).equal(plain)


def fill_in_defaults(model: Model) -> None:
    """Do as `Seq2SeqTrainer.prediction_step` does after each evaluation."""
    config = model.generation_config
    config.update(**config._get_default_generation_params(), defaults_only=True)


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"length_penalty": 1.7},
        {"length_penalty": 1.0},
        {"num_beams": 2},
    ],
)
def test_defaults_that_trainer_fills_in_are_no_choice(own: dict[str, Any], tmp_path: Any) -> None:
    def translations(model: Any) -> Any:
        model.generation_config.max_length_over_source = 9
        return model.generate(**source(LENGTHS), **AS_DICT)

    model = varied_model()
    model.generation_config.update(**own)
    fill_in_defaults(model)
    assert model.generation_config.max_length == 20
    model.save_pretrained(tmp_path)
    clean = varied_model()
    clean.generation_config.update(**own)
    wanted = translations(clean)
    for filled in (model, Model.from_pretrained(tmp_path)):
        found = translations(filled)
        assert found.sequences.equal(wanted.sequences)
        assert found.sequences_scores.equal(wanted.sequences_scores)


def test_a_field_that_is_set_after_trainer_filled_it_in_counts() -> None:
    model = varied_model(end=-1e4)
    fill_in_defaults(model)
    model.generation_config.max_length = 20
    assert model.generate(**source([4])).shape[1] == 20
    config = VanillaTransformerGenerationConfig.from_dict(model.generation_config.to_dict())
    assert (config.max_length, config.length_penalty) == (20, None)


def test_generation_config_of_the_caller_may_be_changed_later() -> None:
    model = varied_model(end=-1e4)
    config = GenerationConfig(
        num_beams=1,
        max_new_tokens=3,
        decoder_start_token_id=0,
        pad_token_id=1,
    )
    model.generation_config = config
    config.max_new_tokens = 6
    assert model.generate(**source([4])).shape[1] == 7
    fill_in_defaults(model)
    assert config.length_penalty == 1.0
    assert "length_penalty" not in config.to_diff_dict()


# Cases that the search does not cover


class OtherInputs(Model):
    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        ids = inputs["decoder_input_ids"]
        return inputs | {"decoder_input_ids": torch.where(ids == 5, 6, ids)}


def never(ids: Tensor, scores: Tensor) -> Tensor:
    """A criterion by which no sentence ends."""
    return torch.zeros(len(ids), dtype=torch.bool)


UNCOVERED: list[dict[str, Any]] = [  # the name in the warning is the last one
    {"do_sample": True},
    {**AS_DICT, "output_scores": True},
    {**AS_DICT, "output_attentions": True},
    {**AS_DICT, "output_hidden_states": True},
    {"use_cache": False},
    {"cache_implementation": "static"},
    {"stopping_criteria": [never]},
    {"max_time": 100.0},
    {"max_time": 0.0},
    {
        "decoder_input_ids": torch.full((2, 2), 5),
        "decoder_attention_mask": torch.ones(2, 2).long(),
    },
]


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages that `generate` logs once."""
    messages: list[str] = []
    monkeypatch.setattr(generation.logger, "warning_once", messages.append)
    return messages


def assert_by_transformers(model: Model, warned: list[str], name: str, **settings: Any) -> None:
    """transformers' own loop has decoded, and it is said why."""
    settings |= source([4, 3]) | {"max_new_tokens": 6}
    torch.manual_seed(1)
    ours = model.generate(**settings)
    assert len(warned) == 1
    assert f"because of {name};" in f"{warned[0]};"
    torch.manual_seed(1)
    theirs = by_transformers(model, **settings, length_penalty=0.6)
    if not isinstance(ours, Tensor):
        assert ours.keys() == theirs.keys()
        ours = ours.sequences
        theirs = theirs.sequences
    assert ours.equal(theirs)


@pytest.mark.parametrize("settings", UNCOVERED, ids=lambda settings: list(settings)[-1])
@pytest.mark.parametrize("optimized", [False, True])
def test_uncovered_settings_go_to_transformers(optimized, settings, warned):
    *_, name = settings
    needs_eager = name == "output_attentions"
    model = varied_model(attn_implementation="eager" if needs_eager else "sdpa")
    if optimized and not needs_eager:
        optimize_for_inference(model)
    says = "use_cache=False" if name == "use_cache" else name
    assert_by_transformers(model, warned, says, **settings)


def test_empty_cache_of_the_caller_is_filled(warned: list[str]) -> None:
    model = varied_model()
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    inputs = source([4, 3]) | GREEDY
    found = model.generate(**inputs, past_key_values=cache)
    assert found.equal(by_transformers(model, **inputs))
    assert cache.get_seq_length() == found.shape[1] - 1
    assert "past_key_values" in warned[0]


def test_own_prepare_inputs_for_generation_goes_to_transformers(warned: list[str]) -> None:
    model = OtherInputs(varied_model().config)
    model.load_state_dict(varied_model().state_dict())
    assert_by_transformers(model.eval(), warned, "prepare_inputs_for_generation")


def test_covered_settings_do_not_warn(warned: list[str]) -> None:
    settings = {
        "no_repeat_ngram_size": 2,
        "num_return_sequences": 2,
        "temperature": 0.5,
    }
    varied_model().generate(**source([4, 3]), **settings)
    assert not warned


def test_prefix_tuning_goes_to_transformers(warned: list[str]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3)
    tuned = peft.get_peft_model(varied_model(), config).eval()
    with torch.no_grad():
        for weight in tuned.prompt_encoder.parameters():
            weight.copy_(3 * torch.randn(weight.shape))
    inputs = source([4, 3]) | GREEDY
    plain = tuned.get_base_model().generate(**inputs)
    warned.clear()
    found = tuned.generate(**inputs)
    assert len(warned) == 1
    assert "prepare_inputs_for_generation" in warned[0]
    assert not found.equal(plain)


def test_gradient_checkpointing_in_training_goes_to_transformers(warned: list[str]) -> None:
    model = varied_model()
    model.gradient_checkpointing_enable()
    inputs = source(LENGTHS) | {"length_penalty": 1.0, "max_new_tokens": 8}
    expected = model.generate(**inputs)
    assert not warned
    model.train()  # where transformers' own loop reads one token without its past, unless it is told use_cache=False
    assert model.generate(**inputs).equal(expected)
    assert len(warned) == 1
    assert "gradient checkpointing" in warned[0]


def test_generation_config_of_the_caller_causes_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    logger = logging.get_logger("transformers.generation.utils")
    monkeypatch.setattr(logger, "warning_once", messages.append)
    config = GenerationConfig(
        max_new_tokens=3,
        num_beams=2,
        decoder_start_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
    )
    assert len(varied_model().generate(**source([4, 3]), generation_config=config)) == 2
    assert messages == []


@pytest.mark.parametrize(("beams", "says"), [(1, False), (2, True)])
def test_warning_names_the_search_only_if_one_runs(
    warned: list[str], beams: int, says: bool
) -> None:
    """Also a rule that transformers' loop does not have."""
    model = varied_model()
    model.generation_config.beam_search_rule = "opennmt3"
    model.generation_config.counted_prefix = 1
    model.generate(**source([4, 3]), num_beams=beams, max_new_tokens=2, do_sample=True)
    assert len(warned) == 1
    for name in ("beam search", "beam_search_rule=opennmt3", "counted_prefix=1"):
        assert (name in warned[0]) == says
