"""LoRA folders of PEFT: every field of its configuration gives what PEFT gives, or is refused by name."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, PeftModel, PeftType, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    FSMTForConditionalGeneration,
    M2M100ForConditionalGeneration,
    MarianMTModel,
    MarianTokenizer,
    PreTrainedModel,
)

from hf_vanilla_transformer.interop.converting import convert
from hf_vanilla_transformer.interop.lora import UNDERSTOOD
from hf_vanilla_transformer.text import load_tokenizers
from hf_vanilla_transformer.utils.errors import UserError
from tests.interop.foreign import SOURCES, write_fsmt_folder, write_m2m100_folder, write_opus_folder
from tests.model_helpers import assert_near, error_of

pytestmark = pytest.mark.filterwarnings("ignore")

ATTENTION = ["q_proj", "v_proj"]


class Case(NamedTuple):
    """An adapter, and a word of the refusal if it is refused."""

    settings: dict[str, Any]
    refused: str | None = None
    base: str = "tied"


def plain(**settings: Any) -> Case:
    return Case({"target_modules": ATTENTION, **settings})


def tied(refused: str, **settings: Any) -> Case:
    """PEFT's merge changes all matrices that are tied, its adapter one of them."""
    return Case({"target_modules": ATTENTION, **settings}, refused)


def untied(**settings: Any) -> Case:
    return Case({"target_modules": ATTENTION, **settings}, base="untied")


#: Values that are written to adapter_config.json after PEFT has saved the adapter, because PEFT needs data, another
#: library or another architecture for such an adapter.
EDITED: dict[str, list[Any]] = {
    "peft_type": [kind.value for kind in PeftType if kind != PeftType.LORA],
    "megatron_config": [{"tensor_model_parallel_size": 2}],
    "megatron_core": ["other.core"],
    "layer_replication": [[[0, 1], [0, 2]]],
    "use_bdlora": [{"target_modules_bd_a": ["q_proj"], "nblocks": 2}],
    "arrow_config": [{"top_k": 3}],
    "velora_config": [{"num_groups": 2}],
    "monteclora_config": [{"num_samples": 2}],
    "kasa_config": [{"beta": 1.0}],
    "target_parameters": [["fc1.weight"]],
    "use_qalora": [True],
    "qalora_group_size": [8],
    "init_lora_weights": ["corda", "loftq", "lora_ga", "mica", "pissa_niter_4", "a new one"],
    "field_of_the_future": [True, 3, "x", [1]],
}
#: Values that say nothing about the weights: the adapter stays the same.
NEUTRAL: dict[str, list[Any]] = {
    "task_type": ["SEQ_2_SEQ_LM", "FEATURE_EXTRACTION", "SEQ_CLS"],
    "auto_mapping": [{"base_model_class": "MarianMTModel", "parent_library": "transformers.models.marian"}],
    "peft_version": ["0.5.0", "99.0"],
    "inference_mode": [False],
    "eva_config": [{"rho": 2.0}],
    "corda_config": [{"corda_method": "kpm"}],
    "loftq_config": [{"loftq_bits": 4}],
    "lora_ga_config": [{"direction": "ArB2r"}],
    "runtime_config": [{"ephemeral_gpu_offload": True}],
    "revision": ["main"],
    "field_of_the_future": [None, False, [], {}],
}
CASES: dict[str, list[Case]] = {
    "base_model_name_or_path": [
        Case({"target_modules": ["fc1", "out_proj"]}, base=base) for base in ("tied", "untied")
    ],
    "r": [plain(r=1), plain(r=7)],
    "target_modules": [
        plain(target_modules="all-linear"),
        plain(target_modules=r".*decoder.*\.(q|v)_proj"),
        tied("target_modules", target_modules=["q_proj", "lm_head"]),
        tied("target_modules", target_modules=["q_proj", "embed_tokens"]),
        tied("target_modules", target_modules=["q_proj", "shared"]),
        untied(target_modules=["q_proj", "lm_head", "embed_tokens"]),
    ],
    "exclude_modules": [plain(exclude_modules=["encoder_attn.q_proj"]), plain(exclude_modules=r".*encoder\.layers.*")],
    "lora_alpha": [plain(lora_alpha=1), plain(lora_alpha=0.5)],
    "lora_dropout": [plain(lora_dropout=0.5)],
    "fan_in_fan_out": [plain(fan_in_fan_out=True)],
    "bias": [plain(bias="all"), plain(bias="lora_only")],
    "use_rslora": [plain(use_rslora=True), plain(use_rslora=True, rank_pattern={"q_proj": 2})],
    "modules_to_save": [
        plain(modules_to_save=["embed_tokens"]),
        plain(modules_to_save=["lm_head"]),
        plain(modules_to_save=["embed_tokens", "lm_head"]),
        plain(modules_to_save=["shared"]),
        plain(modules_to_save=["final_layer_norm"]),
        untied(modules_to_save=["embed_tokens", "lm_head"]),
    ],
    "init_lora_weights": [
        plain(init_lora_weights=value) for value in (True, False, "gaussian", "eva", "orthogonal", "olora", "pissa")
    ],
    "layers_to_transform": [plain(layers_to_transform=1), plain(layers_to_transform=[0, 2])],
    "layers_pattern": [plain(layers_to_transform=[0], layers_pattern=["layers"])],
    "rank_pattern": [
        plain(rank_pattern={r"decoder.layers.\d+.self_attn.q_proj": 2}, alpha_pattern={"encoder.*v_proj": 3}),
        plain(rank_pattern={"^model.decoder.layers.0.self_attn.q_proj": 2}),
        plain(rank_pattern={"decoder.layers.0.self_attn.q_proj": 6, "q_proj": 2}),
    ],
    "alpha_pattern": [
        plain(alpha_pattern={"(q_proj|v_proj)": 16}),
        plain(alpha_pattern={"decoder.layers.0.self_attn.q_proj": 16, "q_proj": 1}),
    ],
    "trainable_token_indices": [
        plain(trainable_token_indices=[3, 5]),
        tied("trainable_token_indices", trainable_token_indices={"embed_tokens": [3, 5]}),
        tied("trainable_token_indices", trainable_token_indices={"shared": [3, 5]}),
        untied(trainable_token_indices=[3, 5]),
        untied(trainable_token_indices={"embed_tokens": [3], "lm_head": [5]}),
    ],
    "use_dora": [
        plain(use_dora=True),
        untied(use_dora=True, target_modules=["q_proj", "embed_tokens"]),
        tied("target_modules", use_dora=True, target_modules=["q_proj", "embed_tokens"]),
    ],
    "lora_bias": [plain(lora_bias=True, init_lora_weights=False)],
    "alora_invocation_tokens": [tied("alora_invocation_tokens", alora_invocation_tokens=[5, 6])],
    "ensure_weight_tying": [
        tied("ensure_weight_tying", ensure_weight_tying=True, target_modules=["q_proj", "embed_tokens", "lm_head"])
    ],
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    write_opus_folder(folder / "tied")
    write_opus_folder(folder / "untied", share_encoder_decoder_embeddings=False, tie_word_embeddings=False)
    return folder


def write_adapter(folder: Path, base: PreTrainedModel, **settings: Any) -> PeftModel:
    """As PEFT saves it after training."""
    torch.manual_seed(1)
    model: Any = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ATTENTION, **settings}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Of all tokens but the padding, so that a changed one is seen."""
    rows = [len(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())]
    padding = model.config.pad_token_id
    source, target = (torch.tensor([[token for token in range(size) if token != padding]]) for size in rows)
    mask = torch.ones_like(source)
    return model.eval()(input_ids=source, attention_mask=mask, decoder_input_ids=target, use_cache=False).logits


def assert_like_peft(
    source_format: str, base: Callable[[], PreTrainedModel], adapter: Path, output: Path, reload: Any = None
) -> None:
    """The converted folder gives the logits of PEFT's reloaded adapter and of its merged model."""
    reloaded = PeftModel.from_pretrained(base(), adapter) if reload is None else reload
    expected = logits(reloaded)
    merged = logits(reloaded.merge_and_unload())
    convert(source_format, adapter, output)
    actual = logits(AutoModelForSeq2SeqLM.from_pretrained(output))
    assert_near(actual, expected)
    assert_near(actual, merged)


def test_every_field_of_peft_is_tried_here() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields <= CASES.keys() | EDITED.keys() | NEUTRAL.keys()
    assert UNDERSTOOD - {"peft_type"} <= CASES.keys() | NEUTRAL.keys()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{name}-{i}", marks=[pytest.mark.slow] if i else [])
        for name, cases in CASES.items()
        for i, case in enumerate(cases)
    ],
)
def test_adapter_gives_what_peft_gives_or_is_refused_by_name(case: Case, bases: Path, tmp_path: Path) -> None:
    def base() -> MarianMTModel:
        return MarianMTModel.from_pretrained(bases / case.base)

    write_adapter(tmp_path / "adapter", base(), **case.settings)
    if case.refused is None:
        assert_like_peft("marian", base, tmp_path / "adapter", tmp_path / "ours")
        return
    assert f"{case.refused}=" in error_of(convert, "marian", tmp_path / "adapter", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def edit(adapter: Path, **values: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture(scope="module")
def trained(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "adapter"
    write_adapter(folder, MarianMTModel.from_pretrained(bases / "tied"))
    return folder


def test_field_of_another_meaning_is_refused_by_name(trained: Path, tmp_path: Path) -> None:
    for name, values in EDITED.items():
        for value in values:
            adapter = shutil.copytree(trained, tmp_path / "adapter", dirs_exist_ok=True)
            edit(adapter, **{name: value})
            assert f"{name}=" in error_of(convert, "marian", adapter, tmp_path / "ours")
            assert not (tmp_path / "ours").exists()


@pytest.mark.slow
def test_field_that_says_nothing_about_the_weights_changes_nothing(trained: Path, tmp_path: Path) -> None:
    convert("marian", trained, tmp_path / "plain")
    expected = (tmp_path / "plain" / "model.safetensors").read_bytes()
    adapter = shutil.copytree(trained, tmp_path / "adapter")
    for name, values in NEUTRAL.items():
        for value in values:
            shutil.copy(trained / "adapter_config.json", adapter)
            edit(adapter, **{name: value})
            convert("marian", adapter, tmp_path / "ours", True)
            assert (tmp_path / "ours" / "model.safetensors").read_bytes() == expected, (name, value)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"r": "x"}, "adapter_config.json"),
        ({"r": 0}, "adapter_config.json"),
        ({"rank_pattern": [1]}, "adapter_config.json"),
        ({"alpha_pattern": {"q_proj": "x"}}, "adapter_config.json"),
        ({"target_modules": 5}, "adapter_config.json"),
        ({"target_modules": "("}, "adapter_config.json"),
        ({"target_modules": ["fc1"]}, "fc1|q_proj"),
        ({"base_model_name_or_path": "no/such"}, "no/such"),
        ({"base_model_name_or_path": ["x"]}, "base_model_name_or_path"),
        ({"lora_alpha": float("inf")}, "PEFT|finite|logits"),
        ({"lora_alpha": 1e38}, "PEFT|finite|logits"),
        ({"bias": "x"}, "adapter_config.json"),
        ({"trainable_token_indices": ["x"]}, "adapter_config.json"),
        ({"modules_to_save": ["lm_head"]}, "adapter"),
    ],
)
def test_hostile_adapters_give_one_line(change: dict, name: str, trained: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(trained, tmp_path / "adapter")
    edit(adapter, **change)
    with pytest.raises(UserError, match=name) as raised:
        convert("marian", adapter, tmp_path / "ours")
    assert "\n" not in str(raised.value) and not (tmp_path / "ours").exists()


def test_weights_that_the_adapter_lacks_or_the_base_does_not_have_are_refused(trained: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    whole = load_file(trained / "adapter_model.safetensors")
    some = min(whole)
    damaged = {
        "lack": {name: tensor for name, tensor in whole.items() if name != some},
        "has": {**whole, "base_model.model.model.decoder.layers.9.fc1.lora_A.weight": torch.ones(4, 32)},
        "PEFT": {**whole, some: torch.ones(4, 31)},
    }
    for word, tensors in damaged.items():
        adapter = shutil.copytree(trained, tmp_path / word)
        save_file(tensors, adapter / "adapter_model.safetensors")
        with pytest.raises(UserError, match=word) as raised:
            convert("marian", adapter, tmp_path / "ours")
        assert "\n" not in str(raised.value)


def test_adapter_with_new_tokens_has_them_in_model_and_tokenizer(bases: Path, tmp_path: Path) -> None:
    tokenizer = MarianTokenizer.from_pretrained(bases / "tied")
    tokenizer.add_tokens(["<x>", "<y>"])

    def base() -> Any:
        model = MarianMTModel.from_pretrained(bases / "tied")
        model.resize_token_embeddings(len(tokenizer))
        return model

    for number, settings in enumerate(({}, {"modules_to_save": ["embed_tokens", "lm_head"]})):
        adapter, output = tmp_path / f"adapter{number}", tmp_path / f"ours{number}"
        trained = base()
        write_adapter(adapter, trained, **settings)
        tokenizer.save_pretrained(adapter)
        assert_like_peft("marian", base, adapter, output)
        ours, _ = load_tokenizers(output)
        assert ours("<x> " + SOURCES[0])["input_ids"] == tokenizer("<x> " + SOURCES[0])["input_ids"]


@pytest.mark.parametrize("source_format", ["fsmt", "m2m100"])
def test_adapters_of_other_bases(source_format: str, tmp_path: Path) -> None:
    write: Any = {"fsmt": write_fsmt_folder, "m2m100": write_m2m100_folder}[source_format]
    classes = {"fsmt": FSMTForConditionalGeneration, "m2m100": M2M100ForConditionalGeneration}
    write(tmp_path / "base")

    def base() -> Any:
        return classes[source_format].from_pretrained(tmp_path / "base")

    write_adapter(tmp_path / "adapter", base(), target_modules=["q_proj", "fc2"], init_lora_weights="pissa")
    assert_like_peft(source_format, base, tmp_path / "adapter", tmp_path / "ours")


def test_weights_of_torch_save_are_read_without_running_code(trained: Path, bases: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    adapter = shutil.copytree(trained, tmp_path / "adapter")
    weights = load_file(adapter / "adapter_model.safetensors")
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(weights, adapter / "adapter_model.bin")
    assert_like_peft("marian", lambda: MarianMTModel.from_pretrained(bases / "tied"), adapter, tmp_path / "ours")
    torch.save({**weights, "x": exit}, adapter / "adapter_model.bin")
    assert "Nothing of it was run" in error_of(convert, "marian", adapter, tmp_path / "other")


def test_each_of_several_adapters_is_a_folder(bases: Path, tmp_path: Path) -> None:
    def base() -> Any:
        return MarianMTModel.from_pretrained(bases / "tied")

    torch.manual_seed(2)
    model: Any = get_peft_model(base(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model.add_adapter("other", LoraConfig(target_modules=["fc1"], init_lora_weights=False, r=3))
    model.save_pretrained(tmp_path / "adapter")
    for folder in (tmp_path / "adapter", tmp_path / "adapter" / "other"):
        assert_like_peft("marian", base, folder, tmp_path / f"ours of {folder.name}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_keep_the_dtype_of_the_base(dtype: torch.dtype, bases: Path, tmp_path: Path) -> None:
    half = MarianMTModel.from_pretrained(bases / "tied", dtype=dtype)
    half.save_pretrained(tmp_path / "half")
    MarianTokenizer.from_pretrained(bases / "tied").save_pretrained(tmp_path / "half")
    write_adapter(tmp_path / "adapter", MarianMTModel.from_pretrained(tmp_path / "half"))
    convert("marian", tmp_path / "adapter", tmp_path / "ours")
    ours = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours")
    assert ours.dtype == dtype
    base: Any = MarianMTModel.from_pretrained(tmp_path / "half").float()
    merged: Any = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    theirs = {name.replace("encoder_attn", "cross_attn"): weight for name, weight in merged.named_parameters()}
    for name, weight in ours.named_parameters():
        if name in theirs:
            assert torch.equal(weight, theirs[name].to(dtype)), name


def test_base_whose_configuration_ties_what_differs(bases: Path, tmp_path: Path) -> None:
    """As opus-mt-tc models: transformers warns, and keeps the matrices apart."""
    shutil.copytree(bases / "untied", tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    values = json.loads(file.read_text()) | {"share_encoder_decoder_embeddings": True, "tie_word_embeddings": True}
    file.write_text(json.dumps(values))

    def base() -> Any:
        return MarianMTModel.from_pretrained(tmp_path / "base")

    write_adapter(tmp_path / "adapter", base())
    assert_like_peft("marian", base, tmp_path / "adapter", tmp_path / "ours")


def test_base_of_another_family_is_refused(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "mbart"}')
    adapter = shutil.copytree(trained, tmp_path / "adapter")
    edit(adapter, base_model_name_or_path=str(tmp_path / "base"))
    assert "mbart" in error_of(convert, "marian", adapter, tmp_path / "ours")


def test_tokenizer_is_of_the_base_unless_the_adapter_has_one(trained: Path, bases: Path, tmp_path: Path) -> None:
    convert("marian", trained, tmp_path / "ours")
    ours, _ = load_tokenizers(tmp_path / "ours")
    assert ours(SOURCES)["input_ids"] == MarianTokenizer.from_pretrained(bases / "tied")(SOURCES)["input_ids"]
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours").generation_config.num_beams == 4
