"""The data of runs: long evaluation sentences are left out with a count and their lines. What loading calls."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from hf_vanilla_transformer.training.run import run_data
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of
from tests.trainer_helpers import run_tiny, write_pairs

PAIRS = [
    ("two hundred", "zweihundert"),
    ("thirty", "dreißig"),
    ("seven", "sieben"),
    ("one", "eins"),
]


def train(folder, long_side, **values):
    """Two updates. Line 3 of the validation and of the test data has over 8,000 tokens on one side."""
    long_pair = ["seven", "sieben"]
    long_pair[long_side] = "seven " * 8000
    evaluated = [*PAIRS[:2], tuple(long_pair), PAIRS[3]]
    return run_tiny(
        folder / "run",
        **write_pairs(folder, PAIRS, "train"),
        **write_pairs(folder, evaluated, "validation", "test"),
        **values,
        max_steps=2,
        save_strategy="no",
        min_frequency=1,
        eval_strategy="steps",
        eval_steps=1,
    )


@pytest.mark.parametrize("long_side", [0, 1])
def test_long_evaluation_pairs_are_left_out_and_reported(tmp_path, capsys, long_side):
    results = train(tmp_path, long_side)
    printed = capsys.readouterr().out
    for split in ("validation", "test"):
        assert (
            f"{split}: left out 1 of 4 pairs: longer than max_eval_length=1024 tokens (line 3)"
            in printed
        )
    stored = json.loads((tmp_path / "run" / "all_results.json").read_text())
    assert results["test_sentences"] == stored["test_sentences"] == 3
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert "kept 3 of 4 pairs; dropped 1: longer than max_eval_length=1024 tokens (line 3)" in card


def test_evaluation_limit_that_leaves_nothing_is_refused_before_training(tmp_path):
    with pytest.raises(UserError, match="validation: .* 4 .*max_eval_length=1 "):
        train(tmp_path, 0, max_eval_length=1)
    assert not list(tmp_path.glob("run/*.safetensors"))


@pytest.fixture
def patch(monkeypatch):
    """Replace functions that loading calls, by functions or by what they return."""

    def replace(**values):
        for name, value in values.items():
            function = value if callable(value) else lambda *_, value=value, **__: value
            monkeypatch.setattr(run_data, name, function)

    return replace


@pytest.mark.parametrize(
    ("base", "checkpoint", "lora", "loads"),
    [
        (None, None, 0, False),
        ("base", None, 0, True),
        ("base", "saved", 0, False),
        ("base", "saved", 1, True),
        (None, "saved", 1, False),
    ],
)
@pytest.mark.parametrize("trusts", [False, True])
@pytest.mark.parametrize("teacher", [None, ["teacher"]])
@pytest.mark.parametrize("model_class", [None, "m:C"])
def test_base_model_is_loaded_where_training_starts_from_it(
    patch, base, checkpoint, lora, loads, trusts, teacher, model_class
):
    trusted = []
    compared = []
    patch(
        base_folder=lambda args, fetch: fetch,
        model_facts=lambda args, folder: {"fetched": folder},
        read_run_state=SimpleNamespace(fixed={}),
        require_same=lambda checkpoint, *_: compared.append(checkpoint),
        import_class=lambda name: f"class {name}",
        trust_code=lambda path: trusted.append(str(path)),
        load_base_model=lambda name, model_class, importers: name,
    )
    args = SimpleNamespace(
        model_name_or_path=base,
        lora_r=lora,
        model_class=model_class,
        trust_remote_code=trusts,
        teacher=teacher,
    )
    found = run_data.load_base(args, checkpoint, None)
    assert found == (base if loads else None, model_class and "class m:C", {"fetched": loads})
    assert trusted == ([*filter(None, [base]), *(teacher or [])] if trusts else [])
    assert compared == [*filter(None, [checkpoint])]


@pytest.mark.parametrize("is_tuned", [False, True])
@pytest.mark.parametrize("task", [None, "language", "sequence"])
@pytest.mark.parametrize("process", [0, 1, 2])
def test_data_are_loaded_by_the_first_process_and_for_the_base(
    patch, capsys, is_tuned, task, process
):
    def note(name):
        return lambda *facts, **named: noted.update({name: named or facts})

    def turns(name, is_first):
        noted[name] = is_first
        return nullcontext()

    noted = {}
    patch(
        loaded_tokenizers=None,
        take_task=None,
        take_source_form=None,
        model_languages=lambda name: f"of {name}",
        taking_turns=turns,
        load_corpus=note("corpus"),
        choose_by_pairs=lambda parsed, *_: (*parsed, {}),
        prepare_model=note("base"),
        train_tokenizers=lambda corpus, size, *_: (f"{size} source", "target"),
        describe_sizes="the sizes",
        set_task=note("task"),
        record_form=note("form"),
        match_case=None,
        tokenizer_task=task or "language",
        run_languages=None,
        name_languages=note("names"),
        encode_corpus=lambda *_: ({"train": 1}, {}),
        changed_in_each_epoch=2,
    )
    args = SimpleNamespace(
        model_name_or_path="base" if is_tuned else None,
        trust_remote_code=False,
        local_process_index=process,
        seed=5,
    )
    data_args = SimpleNamespace(data=None, task=task, source_form="NFC")
    base = SimpleNamespace(tokenizers=("its source", "target")) if is_tuned else None
    data = run_data.load_data((SimpleNamespace(vocab_size=7), data_args, args), None, base)
    assert data.encoded == {"train": 2}
    source = "its source" if is_tuned else "7 source"
    assert data.tokenizers == (source, "target")
    assert (noted["reading"], noted["encoding"]) == (process == 0, process == 0)
    assert noted["corpus"][1:3] == (1, "of base" if is_tuned else None)
    assert noted["form"] == (source, "NFC")
    assert noted.get("task") == (task and {"new": not is_tuned})
    assert ("names" in noted) is (task != "sequence")
    assert ("base" in noted) is is_tuned
    assert ("the sizes" in capsys.readouterr().out) is not is_tuned


def test_prepared_data_have_the_tokenizer_of_the_model(patch):
    patch(tokenizer_folder=None, load_tokenizers="m", tokenizer_digest=lambda tokenizer: tokenizer)
    run_data._require_tokenizers(SimpleNamespace(data="x"), "m")
    for other in "az":
        message = error_of(run_data._require_tokenizers, SimpleNamespace(data="x"), other)
        assert message.startswith("data: x was prepared with another tokenizer")
