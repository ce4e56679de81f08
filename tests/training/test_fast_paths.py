"""Fast paths of training: whatever a caller overrides, the run with the path is the plain run, or it is refused.

The hooks of the trainer are read from the installed transformers, and those of the model from the bundle. A hook that
nobody has decided about fails a test.
"""

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from transformers import (
    AttentionInterface,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    TrainerCallback,
)

from hf_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTrainer,
    VanillaTransformerTrainingArguments,
)
from hf_vanilla_transformer.attention_vanilla_transformer import eager_attention_forward
from hf_vanilla_transformer.engine.ownership import foreign_part
from hf_vanilla_transformer.layers_vanilla_transformer import (
    VanillaTransformerAttention,
    VanillaTransformerDecoderLayer,
    VanillaTransformerEncoderLayer,
)
from hf_vanilla_transformer.training.trainer import forward_choice
from hf_vanilla_transformer.training.trainer.fast_paths import PACKED_ROWS
from hf_vanilla_transformer.training.trainer.forward import CompiledForward
from tests import trainer_helpers
from tests.model_helpers import PAD, error_of, randomise, tiny_config, tiny_model
from tests.trainer_helpers import (
    DESCENT,
    collate,
    flat,
    make_trainer,
    padding_collator,
    random_pairs,
)

SIZES: dict[str, Any] = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "d_model": 16,
}
PAIRS = random_pairs(14)
WHOLE: dict[str, Any] = {
    **DESCENT,
    "learning_rate": 0.1,
    "max_tokens_per_batch": 512,
    "tokens_per_update": 10**6,
    "max_steps": 2,
}


def small_model() -> Any:
    return tiny_model(1, **SIZES)


def trained(folder: Path, model: Any = None, data: Any = PAIRS, **settings: Any) -> Any:
    """A trainer after two updates of all pairs."""
    model = model or small_model()
    settings = {**WHOLE, "data_collator": padding_collator(model), **settings}
    return trainer_helpers.trained(folder, data, model, **settings)


def weights(folder: Path, **settings: Any) -> Tensor:
    """All weights after two updates of all pairs."""
    return flat(trained(folder, **settings).model)


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """The weights of a run in which nothing is overridden."""
    return weights(tmp_path_factory.mktemp("run"), pack=False)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-6)


# Methods of the trainer


def words(text: str) -> set[str]:
    return set(text.split())


# Packed rows refuse them: they make padded batches or change them.
REFUSED = {"get_train_dataloader", "get_batch_samples", "_prepare_inputs", "_prepare_input"}
# Token batches, packed or padded, refuse them: their loader would never call them.
BY_NUMBER_OF_PAIRS = {"_get_train_sampler", "_get_dataloader", "_get_num_items_in_batch"}
# Packed rows have their effect, but are no default.
CARRIED = {
    "compute_loss",
    "training_step",
    "_remove_unused_columns",
    "_get_collator_with_removed_columns",
    "_set_signature_columns_if_needed",
}
# An update calls them, or may, on a batch of any form.
CALLED = words(
    """
    _build_accelerator_args _clip_grad_norm _defer_fsdp_gradient_reduction _finalize_training _finish_current_push
    _get_grad_norm _get_output_dir
    _get_learning_rate _has_mixed_mesh_grads _hp_search_setup _init_training_state _inner_training_loop
    _load_callback_state _load_optimizer_and_scheduler _load_rng_state _load_scaler _maybe_log_save_evaluate
    _mixed_mesh_grad_norm _move_model_to_device _prepare_context_parallel_inputs _prepare_for_training _run_epoch
    _sync_replicated_trainable_parameters _track_num_input_tokens _update_auto_batch_size _validate_args _wrap_model
    add_callback autocast_smart_context_manager call_model_init compute_loss_context_manager
    create_accelerator_and_postprocess create_optimizer create_optimizer_and_scheduler create_scheduler
    floating_point_ops get_cp_size get_decay_parameter_names get_optimizer_cls_and_kwargs get_sp_size
    get_total_train_batch_size get_tp_size is_local_process_zero is_world_process_zero load_generation_config log
    num_examples set_initial_training_values store_flos train
    """
)
# No update calls them: evaluation, checkpoints, the Hub and searches.
ELSEWHERE = words(
    """
    _determine_best_metric _evaluate _get_eval_sampler _issue_warnings_after_load
    _load_best_model _load_from_checkpoint _pad_tensors_to_max_len _push_from_checkpoint _report_to_hp_search _save
    _save_checkpoint _save_optimizer_and_scheduler _save_rng_state _save_scaler _tune_save_checkpoint
    create_model_card end evaluate evaluation_loop get_eval_dataloader get_learning_rates
    get_num_trainable_parameters get_optimizer_group get_test_dataloader hyperparameter_search init_hf_repo
    log_metrics metrics_format pop_callback predict prediction_step push_to_hub remove_callback save_metrics
    save_model save_state
    """
)
DECIDED = [REFUSED, BY_NUMBER_OF_PAIRS, CARRIED, CALLED, ELSEWHERE]


def hooks_of_trainer() -> list[str]:
    members = inspect.getmembers(Seq2SeqTrainer, inspect.isroutine)
    return [name for name, _ in members if not name.startswith("__")]


def test_every_method_of_the_trainer_is_decided() -> None:
    decided = [name for names in DECIDED for name in names]
    # Older versions, which Python 3.10 has, lack some.
    assert set(hooks_of_trainer()) <= set(decided), (
        "decide what packed rows do with a method that is new"
    )
    assert len(decided) == len(set(decided))


def overriding(name: str, called: list[str]) -> type:
    """A trainer whose method scales a weight when it is called in training for the first time."""
    plain = getattr(VanillaTransformerTrainer, name)
    is_static = isinstance(inspect.getattr_static(VanillaTransformerTrainer, name), staticmethod)

    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs) if is_static else plain(self, *args, **kwargs)
        if getattr(self, "is_in_train", False) and not called:
            called.append(name)
            model = self.accelerator.unwrap_model(self.model)
            model.model.encoder.layers[0].fc1.weight.data.mul_(1.5)
        return found

    return type("Own", (VanillaTransformerTrainer,), {name: override})


@pytest.mark.parametrize("name", hooks_of_trainer())
def test_overridden_method_has_its_effect_or_is_refused(
    name: str, unchanged: Tensor, tmp_path: Path
) -> None:
    called: list[str] = []
    kind = overriding(name, called)
    if name in BY_NUMBER_OF_PAIRS:
        for pack in (False, True):
            line = error_of(trained, tmp_path, kind=kind, pack=pack)
            assert (
                f"max_tokens_per_batch=512 makes its own loader and never calls {name} of Own"
                in line
            )
        return
    plain = weights(tmp_path, kind=kind, pack=False)
    if name in ELSEWHERE or not called:
        assert not called
        assert name not in REFUSED
        return
    assert not torch.allclose(plain, unchanged), "the override has an effect"
    called.clear()
    if name in REFUSED:
        assert (
            error_of(trained, tmp_path, kind=kind, pack=True)
            == f"pack=True does not go with {name} of Own"
        )
    else:
        assert_equal(weights(tmp_path, kind=kind, pack=True), plain)


# What else a caller brings


class Reversing(DataCollatorForSeq2Seq):
    """Changes the source, as word dropout, masking, truncation and tags do."""

    def __call__(self, features: Any, return_tensors: Any = None) -> Any:
        return super().__call__([{**row, "input_ids": row["input_ids"][::-1]} for row in features])


def own_start(rows: Any) -> Any:
    """A start token of each target, as for languages and styles."""
    batch = collate(rows)
    labels = batch["labels"]
    start = labels[:, :1] % 7 + 4
    shifted = torch.cat([start, labels[:, :-1]], dim=1)
    return batch | {"decoder_input_ids": shifted.masked_fill(shifted == -100, PAD)}


def with_weights(rows: Any) -> Any:
    return collate(rows) | {"weights": torch.ones(len(rows))}


def hide_first(rows: Any) -> Any:
    batch = collate(rows)
    mask = batch["attention_mask"]
    mask[:, 0] = mask.sum(dim=1) == 1
    return batch


class Drawn(torch.utils.data.Dataset):
    """Another source in each epoch, as with subword regularisation."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(PAIRS)

    def __getitem__(self, number: int) -> Any:
        ids = [4 + (token + self.epoch) % 30 for token in PAIRS[number]["input_ids"]]
        return {**PAIRS[number], "input_ids": ids + [5] * self.epoch}


class Rows(list):
    def __getitem__(self, number: Any) -> Any:
        return {**super().__getitem__(number), "input_ids": [7, 8]}


def transformed() -> Dataset:
    table = Dataset.from_list(PAIRS)
    table.set_transform(
        lambda rows: {**rows, "input_ids": [ids[::-1] for ids in rows["input_ids"]]}
    )
    return table


def hidden_tokens() -> Dataset:
    """A table that hides the first token of each source that has others."""
    lengths = [len(pair["input_ids"]) for pair in PAIRS]
    masks = [[int(length == 1)] + [1] * (length - 1) for length in lengths]
    return Dataset.from_list(PAIRS).add_column("attention_mask", masks)


def masked_labels() -> list[dict[str, list[int]]]:
    rows = copy.deepcopy(PAIRS)
    for row in rows[1::2]:
        row["labels"][0] = -100
    return rows


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Of each position (B T,)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")


def squared(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses = token_losses(outputs.logits, labels)
    return (losses**2).sum() / num_items_in_batch


class Squared(VanillaTransformerTrainer):
    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        outputs = model(**inputs)
        loss = squared(outputs, inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class Mixing:
    """Reads the place before each, as lightweight convolutions do. Its gate is 0 at the start."""

    def __init__(self, config: Any, layer_idx: int):
        super().__init__(config, layer_idx)  # type: ignore[call-arg]
        self.gate = nn.Parameter(torch.zeros(1))

    def feed_forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return super().feed_forward(x + self.gate * before)  # type: ignore[misc]


class Gated:
    def __init__(self, config: Any, layer_idx: int):
        super().__init__(config, layer_idx)  # type: ignore[call-arg]
        self.gate = nn.Linear(config.d_model, config.d_model)

    def feed_forward(self, x: Tensor) -> Tensor:
        return super().feed_forward(x) * self.gate(x)  # type: ignore[misc]


def with_layers(part: type) -> Any:
    layers = (VanillaTransformerEncoderLayer, VanillaTransformerDecoderLayer)
    kinds = tuple(type(f"{part.__name__}Layer", (part, layer), {}) for layer in layers)
    kind = type("Own", (VanillaTransformerForConditionalGeneration,), {"layer_classes": kinds})
    model = randomise(kind(tiny_config(**SIZES)), 1).eval()
    for name, weight in model.named_parameters():
        if name.endswith("gate"):
            weight.data.zero_()
    return model


class Pooling(VanillaTransformerForConditionalGeneration):
    """Adds a penalty on the length of each sentence."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids, attention_mask, **kwargs)
        length = attention_mask.sum(dim=1).float().mean()
        outputs.loss = outputs.loss + 0.01 * length * self.lm_head.weight.mean()
        return outputs


def with_hook(hook: Callable) -> Any:
    model = small_model()
    model.model.encoder.layers[0].register_forward_hook(hook)
    return model


def with_forward() -> Any:
    model = small_model()

    def forward(self: Any, **inputs: Any) -> Any:
        outputs = type(self).forward(self, **inputs)
        outputs.loss = outputs.loss * 2
        return outputs

    model.forward = MethodType(forward, model)
    return model


def near(module: Any, query: Any, *others: Any, **kwargs: Any) -> Any:
    return eager_attention_forward(module, 1.5 * query, *others, **kwargs)


def by_places(module: Any, query: Any, key: Any, *others: Any, **kwargs: Any) -> Any:
    places = torch.arange(key.shape[2])[:, None]
    return eager_attention_forward(module, query, key * places, *others, **kwargs)


def with_attention(function: Callable) -> Any:
    AttentionInterface.register("own", function)
    return tiny_model(1, **SIZES, attn_implementation="own")


def padding_otherwise() -> Any:
    class Tokenizer(PreTrainedTokenizerFast):
        def pad(self, rows: Any, **kwargs: Any) -> Any:
            cut = [{**row, "input_ids": row["input_ids"][:3]} for row in rows]
            return super().pad(cut, **kwargs)

    backend = padding_collator(None).tokenizer.backend_tokenizer
    return DataCollatorForSeq2Seq(Tokenizer(tokenizer_object=backend, pad_token="<pad>"))


#: The argument of each case, and what makes its value.
CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "collator": ("data_collator", lambda: Reversing(padding_collator(None).tokenizer)),
    "function as collator": ("data_collator", lambda: collate),
    "start of each pair": ("data_collator", lambda: own_start),
    "hidden tokens of a collator": ("data_collator", lambda: hide_first),
    "tokenizer that pads": ("data_collator", padding_otherwise),
    "collator of another model": (
        "data_collator",
        lambda: padding_collator(tiny_model(decoder_start_token_id=9)),
    ),
    "tensor of a collator": ("data_collator", lambda: with_weights),
    "dataset by epoch": ("data", Drawn),
    "part of a dataset by epoch": ("data", lambda: torch.utils.data.Subset(Drawn(), range(9))),
    "list with items of its own": ("data", lambda: Rows(PAIRS)),
    "transform": ("data", transformed),
    "column of hidden tokens": ("data", hidden_tokens),
    "labels of -100": ("data", masked_labels),
    "labels of -100 in a table": ("data", lambda: Dataset.from_list(masked_labels())),
    "column": ("data", lambda: Dataset.from_list([{**pair, "weights": 1} for pair in PAIRS])),
    "loss": ("kind", lambda: Squared),
    "function of the loss": ("compute_loss_func", lambda: squared),
    "smoothing by the trainer": ("label_smoothing_factor", lambda: 0.2),
    "layers by place": ("model", lambda: with_layers(Gated)),
    "layers that mix places": ("model", lambda: with_layers(Mixing)),
    "forward of a class": ("model", lambda: randomise(Pooling(tiny_config(**SIZES)), 1)),
    "forward of a model": ("model", with_forward),
    "hook by place": ("model", lambda: with_hook(lambda module, inputs, output: 1.5 * output)),
    "hook that mixes places": (
        "model",
        lambda: with_hook(lambda module, inputs, x: x - x.mean(1, True)),
    ),
    "attention": ("model", lambda: with_attention(near)),
    "attention by places": ("model", lambda: with_attention(by_places)),
    "noise by the length": ("neftune_noise_alpha", lambda: 5.0),
    "order": ("train_sampling_strategy", lambda: "sequential"),
}
#: What refuses packed rows.
REFUSALS = {
    "tensor of a collator": "no place for weights",
    "column": "no place for weights",
    "layers that mix places": "does not keep pairs apart",
    "forward of a class": "does not keep pairs apart",
    "hook that mixes places": "does not keep pairs apart",
    "attention by places": "does not keep pairs apart",
    "noise by the length": "neftune_noise_alpha=5.0, which scales",
    "order": "leave train_sampling_strategy=sequential out",
}
# They are the package's own, so that packed rows are the default on a GPU.
DEFAULT = {
    "column of hidden tokens",
    "labels of -100",
    "labels of -100 in a table",
    "smoothing by the trainer",
}


def brought(name: str) -> dict[str, Any]:
    """The arguments of a case."""
    argument, make = CASES[name]
    return {argument: make(), "remove_unused_columns": name != "column"}


@pytest.mark.parametrize("name", CASES)
def test_what_a_caller_brings_has_its_effect_or_is_refused(
    name: str, unchanged: Tensor, tmp_path: Path
) -> None:
    if name in REFUSALS:
        assert REFUSALS[name] in error_of(trained, tmp_path, pack=True, **brought(name))
        return
    packed = weights(tmp_path, pack=True, **brought(name))
    plain = weights(tmp_path, pack=False, **brought(name))
    assert_equal(packed, plain)
    same = len(plain) == len(unchanged) and torch.allclose(plain, unchanged, atol=1e-6)
    assert same is (name == "function as collator")


@pytest.mark.parametrize("name", [name for name in CASES if name != "order"])
def test_packed_rows_are_the_default_where_all_is_known(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {"model": small_model(), "data": PAIRS, **brought(name)}
    settings = {**WHOLE, "data_collator": padding_collator(case["model"]), **case}
    trainer = make_trainer(tmp_path, **settings)
    monkeypatch.setattr(VanillaTransformerTrainingArguments, "device", torch.device("cuda"))
    trainer._decide_packing()
    assert trainer.packs is (name in DEFAULT)
    assert trainer.args.pack is None
    line = PACKED_ROWS.line(trainer, trainer.packs)
    assert line.startswith(
        "packed rows: yes" if name in DEFAULT else "packed rows: no, because packing "
    )


# The model


def methods_of_bundle() -> list[tuple[str, str]]:
    """The modules of a tiny model and the methods that their classes have from the bundle."""
    chosen = {}
    for path, module in tiny_model(**SIZES).named_modules():
        kind = type(module)
        for base in kind.__mro__:
            if not base.__module__.endswith("_vanilla_transformer"):
                continue
            for name, value in vars(base).items():
                if inspect.isfunction(value) and name != "__init__":
                    chosen[kind, name] = path
    return [(path, name) for (_, name), path in chosen.items()]


def test_models_of_the_package_are_known(tmp_path: Path) -> None:
    model = trained(tmp_path, gradient_checkpointing=True).model
    assert foreign_part(model) is None, "after training"
    model.save_pretrained(tmp_path / "saved")
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "saved")
    assert foreign_part(loaded) is None
    peft = pytest.importorskip("peft", reason="needs PEFT")
    lora = peft.LoraConfig(
        r=2,
        target_modules=["q_proj", "fc1"],
        task_type="SEQ_2_SEQ_LM",
    )
    assert foreign_part(peft.get_peft_model(loaded, lora)) is None
    prompts = peft.PromptTuningConfig(
        task_type="SEQ_2_SEQ_LM",
        num_virtual_tokens=2,
        num_layers=1,
        token_dim=16,
    )
    assert foreign_part(peft.get_peft_model(small_model(), prompts)) is not None


def test_replaced_methods_of_the_model_are_noticed() -> None:
    for path, name in methods_of_bundle():
        model = tiny_model(**SIZES)
        module = model.get_submodule(path)
        plain = getattr(module, name)
        setattr(module, name, lambda *args, plain=plain, **kwargs: plain(*args, **kwargs))
        assert foreign_part(model) is not None, (path, name)


@pytest.mark.parametrize("kind", [VanillaTransformerEncoderLayer, VanillaTransformerAttention])
def test_method_that_is_replaced_in_its_class_is_noticed(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = kind.forward
    assert foreign_part(tiny_model(**SIZES)) is None
    monkeypatch.setattr(kind, "forward", lambda *args, **kwargs: plain(*args, **kwargs))
    assert foreign_part(tiny_model(**SIZES)) is not None


# Weights that are cast together, and compiled updates

PASSES = [
    "loss",
    "function of the loss",
    "layers by place",
    "forward of a model",
    "hook by place",
    "attention",
    "collator",
]


@pytest.mark.parametrize("name", PASSES)
def test_cast_weights_are_those_of_autocast(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = weights(tmp_path, bf16=True, **brought(name))
    monkeypatch.setattr(forward_choice, "is_bound_by_launches", lambda device: True)
    assert weights(tmp_path, bf16=True, **brought(name)).equal(plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PASSES, "smoothing by the trainer"])
def test_compiled_updates_are_eager_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("BACKEND", "MODE"):
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{variable}", "")
        monkeypatch.delenv(f"ACCELERATE_DYNAMO_{variable}")
    torch._dynamo.reset()
    compiled = weights(
        tmp_path,
        torch_compile=True,
        torch_compile_backend="aot_eager",
        pack=True,
        **brought(name),
    )
    assert_equal(compiled, weights(tmp_path, **brought(name)))


# Changes of the model after the paths are chosen


class Changing(TrainerCallback):
    """Changes the model when training begins, or before the second update."""

    def __init__(self, change: Callable[[Any], Any], at_start: bool):
        self.change = change
        self.at_start = at_start

    def on_train_begin(self, *_: object, model: Any, **__: object) -> None:
        if self.at_start:
            self.change(model)

    def on_step_begin(self, args: Any, state: Any, *_: object, model: Any, **__: object) -> None:
        if state.global_step == 1 and not self.at_start:
            self.change(model)


def wrap_forward(model: Any) -> None:
    before = model.forward

    def forward(**inputs: Any) -> Any:
        outputs = before(**inputs)
        outputs.loss = outputs.loss * 2
        return outputs

    model.forward = forward


def replace_layer(model: Any) -> None:
    layer = nn.Linear(16, model.config.decoder_ffn_dim)
    layer.load_state_dict({"weight": torch.eye(*layer.weight.shape), "bias": layer.bias * 0})
    model.model.decoder.layers[0].fc1 = layer


def register_hook(model: Any, hook: Callable = lambda module, inputs, x: 1.5 * x) -> None:
    model.model.encoder.layers[0].register_forward_hook(hook)


def set_attention(model: Any) -> None:
    AttentionInterface.register("own", near)
    model.set_attn_implementation("own")


CHANGES: dict[str, Callable[[Any], None]] = {
    "hook": register_hook,
    "forward": wrap_forward,
    "layer": replace_layer,
    "pruned layer": lambda model: prune.l1_unstructured(
        model.model.decoder.layers[0].fc1, "weight", 0.9
    ),
    "attention": set_attention,
}


@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_change_by_a_callback_has_its_effect(
    name: str, at_start: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(**settings: Any) -> Tensor:
        return weights(tmp_path, callbacks=[Changing(CHANGES[name], at_start)], **settings)

    plain = run(pack=False, bf16=True, max_tokens_per_batch=None, tokens_per_update=None)
    assert_equal(run(pack=True), run(pack=False))
    monkeypatch.setattr(forward_choice, "is_bound_by_launches", lambda device: True)
    cast = run(pack=False, bf16=True, max_tokens_per_batch=None, tokens_per_update=None)
    assert cast.equal(plain)


@pytest.mark.parametrize("at_start", [True, False])
def test_line_says_that_a_path_is_left(
    at_start: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    def run(hook: Callable = lambda module, inputs, x: 1.5 * x, **settings: Any) -> Any:
        change = Changing(lambda model: register_hook(model, hook), at_start)
        return trained(tmp_path, callbacks=[change], **settings)

    monkeypatch.setattr(forward_choice, "is_bound_by_launches", lambda device: True)
    # No pass is compiled with this shape, so that the test needs no compiler
    monkeypatch.setattr(CompiledForward, "fits", lambda *_: False)
    run(pack=True, bf16=True, torch_compile=True)
    update = f"\nupdate {1 if at_start else 2}: "
    printed = capsys.readouterr().out
    reason = "no, because the run has its own hooks of model.encoder.layers.0"
    for path in ("compiled updates", "weights cast together"):
        assert printed.count(f"{update}{path}: {reason}") == 1
    assert printed.count("\nupdate ") == 2
    error = error_of(run, lambda module, inputs, x: x - x.mean(1, True), pack=True)
    assert error.startswith(
        f"{update.strip()} the model was changed, and packing does not keep pairs apart"
    )


class OwnAutocast(VanillaTransformerTrainer):
    def compute_loss_context_manager(self) -> Any:
        return torch.autocast("cpu", enabled=False)


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (
            {"max_tokens_per_batch": None, "tokens_per_update": None},
            ["packed rows: no, because packing is the default"],
        ),
        (
            {"pack": True},
            [
                "packed rows: yes, 1 updates an epoch",
                "compiled updates: no, because the run is not on a GPU",
            ],
        ),
        (
            {"pack": False},
            ["packed rows: no, because packing is not asked for: padded batches"],
        ),
        (
            {"pack": True, "kind": Squared, "torch_compile": True},
            [
                "packed rows: yes, 1 updates an epoch",
                "compiled updates: no, because the run has a loss of its own: eager ones",
            ],
        ),
        (
            {"bf16": True, "kind": OwnAutocast},
            [
                "rounded shapes: yes",
                "weights cast together: no, because the run is on a CPU",
            ],
        ),
        (
            {"bf16": True, "kind": Squared},
            ["rounded shapes: no, because the run has compute_loss of Squared"],
        ),
        (
            {"label_smoothing_factor": 0.1},
            ["loss without logits: no, because the run has label_smoothing_factor"],
        ),
    ],
)
def test_first_lines_say_which_paths_are_on(
    settings: dict[str, Any], lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    trained(tmp_path, **settings)
    printed = "\n" + capsys.readouterr().out
    others = [
        "packed rows: ",
        "compiled updates: ",
        "weights cast together: ",
        "loss without logits: ",
    ]
    for line in [*lines, *others, "rounded shapes: "]:
        assert f"\n{line}" in printed


# Quantities that a tensor's shape decides


class WeightedTokens(VanillaTransformerTrainer):
    """A loss with a weight of each target token, that the collator makes."""

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        factors = inputs.pop("factors")  # (B, T)
        logits = model(**inputs).logits
        losses = token_losses(logits, inputs["labels"])
        return (losses * factors.flatten()).sum() / num_items_in_batch


def test_tensors_of_a_collator_are_trained_in_bf16(tmp_path: Path) -> None:
    def with_factors(rows: Any) -> Any:
        batch = collate(rows)
        labels = batch["labels"]
        return batch | {"factors": torch.linspace(0.5, 2, labels.shape[1]).expand_as(labels)}

    found, expected = (
        weights(
            tmp_path,
            kind=WeightedTokens,
            data_collator=with_factors,
            remove_unused_columns=False,
            bf16=bf16,
        )
        for bf16 in (True, False)
    )
    moved = expected - flat(small_model())
    assert (found - expected).norm() < 0.05 * moved.norm()


@pytest.mark.parametrize(
    "settings",
    [
        {"pack": True},
        {"pack": False},
        {"bf16": True},
    ],
    ids=str,
)
def test_seen_tokens_are_those_of_the_pairs(settings: dict[str, Any], tmp_path: Path) -> None:
    trainer = trained(tmp_path, include_num_input_tokens_seen="non_padding", **settings)
    tokens = sum(len(pair["input_ids"]) for pair in PAIRS)
    assert trainer.state.num_input_tokens_seen == 2 * tokens


def test_seen_tokens_are_those_of_a_mask_with_four_dimensions(tmp_path: Path) -> None:
    def with_wide_mask(rows: Any) -> Any:
        batch = collate(rows)
        wide = batch["attention_mask"][:, None, None].bool()  # (B, 1, 1, S)
        return batch | {"attention_mask": wide, "cross_attention_mask": wide}

    trainer = trained(
        tmp_path, data_collator=with_wide_mask, include_num_input_tokens_seen="non_padding"
    )
    tokens = sum(len(pair["input_ids"]) for pair in PAIRS)
    assert trainer.state.num_input_tokens_seen == 2 * tokens


def test_muon_and_an_optimizer_of_the_caller_are_refused(tmp_path: Path) -> None:
    def refusal(kind: Any, **others: Any) -> str:
        args = VanillaTransformerTrainingArguments(str(tmp_path), muon=True, report_to="none")
        return error_of(kind, model, args, train_dataset=PAIRS, data_collator=collate, **others)

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters())
    line = refusal(VanillaTransformerTrainer, optimizers=(optimizer, None))
    assert line.startswith("muon=True does not go with optimizers")
    for name in ("create_optimizer", "get_optimizer_cls_and_kwargs"):
        assert refusal(overriding(name, [])).startswith(f"muon=True does not go with {name} of Own")
