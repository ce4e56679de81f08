"""Losses of users: what `compute_loss` overrides read of a training step is what a plain output layer gives."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import prune, weight_norm
from transformers import Trainer

from hf_vanilla_transformer import VanillaTransformerTrainer
from tests import trainer_helpers
from tests.model_helpers import assert_near, gradients, tiny_model, translation_batch
from tests.trainer_helpers import DESCENT, random_pairs

TEACHER = tiny_model(3)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1))


def distillation(trainer: Trainer, model: Any, inputs: Any) -> Any:
    student = model(**inputs)
    with torch.no_grad():
        teacher = TEACHER(**inputs)
    kl = F.kl_div(F.log_softmax(student.logits / 2, -1), F.softmax(teacher.logits / 2, -1), reduction="batchmean")
    return student.loss + kl, student


def focal(trainer: Trainer, model: Any, inputs: Any) -> Any:
    outputs = model(**inputs)
    labels = inputs["labels"]
    log_p = outputs.logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    return (-((1 - log_p.exp()) ** 2) * log_p)[labels != -100].mean(), outputs


def entropy_bonus(trainer: Trainer, model: Any, inputs: Any) -> Any:
    outputs = model(**inputs)
    p = torch.softmax(outputs["logits"], dim=-1)
    return outputs["loss"] + 0.1 * (p * p.log()).sum(-1).mean(), outputs


def of_a_tuple(trainer: Trainer, model: Any, inputs: Any) -> Any:
    loss, logits = model(**inputs, return_dict=False)[:2]
    return loss + cross_entropy(logits, inputs["labels"]), None


def without_labels(trainer: Trainer, model: Any, inputs: Any) -> Any:
    labels = inputs.pop("labels")
    decoder_input_ids = trainer.model.prepare_decoder_input_ids_from_labels(labels)
    outputs = model(**inputs, decoder_input_ids=decoder_input_ids)
    return cross_entropy(outputs.logits, labels), outputs


def token_weights(trainer: Trainer, model: Any, inputs: Any) -> Any:
    loss, outputs = super(type(trainer), trainer).compute_loss(model, inputs, return_outputs=True)
    weight = torch.linspace(0.5, 1.5, outputs.logits.shape[-1])
    return loss + F.cross_entropy(outputs.logits.flatten(0, 1), inputs["labels"].flatten(), weight=weight), outputs


LOSSES = [distillation, focal, entropy_bonus, of_a_tuple, without_labels, token_weights]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
}


def trained(base: type, loss: Any, folder: Path, plain_output_layer: bool, **settings: Any) -> dict[str, Tensor]:
    """The weights after two updates with a user's loss."""

    class Custom(base):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            value, outputs = loss(self, model, inputs)
            return (value, outputs) if return_outputs else value

    model = tiny_model(1, dropout=0.0, label_smoothing=0.1)
    if plain_output_layer:
        # A hook of the output layer makes the model call it.
        model.lm_head.register_forward_hook(lambda module, inputs, output: None)
    settings = DESCENT | {"learning_rate": 0.1, "max_steps": 2, "per_device_train_batch_size": 3} | settings
    trainer_helpers.trained(folder, random_pairs(12), model, Custom, **settings)
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


# tests/compatibility tries every loss with every setting, also in the stock trainer
CASES = [(loss, "plain") for loss in LOSSES] + [(distillation, setting) for setting in SETTINGS if setting != "plain"]


@pytest.mark.parametrize(("loss", "setting"), CASES, ids=[f"{loss.__name__}-{setting}" for loss, setting in CASES])
def test_custom_loss_trains_as_with_a_plain_output_layer(loss: Any, setting: str, tmp_path: Path) -> None:
    settings, base = SETTINGS[setting], VanillaTransformerTrainer
    expected = trained(base, loss, tmp_path / "a", plain_output_layer=True, **settings)
    for name, weight in trained(base, loss, tmp_path / "b", plain_output_layer=False, **settings).items():
        assert_near(weight, expected[name], 1e-2 if setting == "bf16" else 1e-6, name)


BATCH = translation_batch([5, 3], [6, 4])


def after(context: Any, outputs: Any) -> Tensor:
    """The logits, when they were read before without gradients."""
    with context:
        outputs.logits.argmax(-1)
    return outputs.logits


READERS: dict[str, Any] = {
    "metric first": lambda outputs: after(torch.no_grad(), outputs),
    "inference mode first": lambda outputs: after(torch.inference_mode(), outputs),
    "index": lambda outputs: outputs[1],
    "slice": lambda outputs: outputs[:2][1],
    "get": lambda outputs: outputs.get("logits"),
    "dictionary": lambda outputs: {**outputs}["logits"],
    "items": lambda outputs: {name: value * 1 for name, value in outputs.items()}["logits"],
    "tensors among the items": lambda outputs: [v for _, v in outputs.items() if torch.is_tensor(v)][1],
    "values": lambda outputs: [value.clone() for value in outputs.values()][1],
    "copy": lambda outputs: copy.copy(outputs).logits,
    "leaves": lambda outputs: torch.utils._pytree.tree_leaves(outputs)[1].clone(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_logits_have_gradients_for_every_reader(read: Any) -> None:
    model = tiny_model().train()
    outputs = model(**BATCH)
    computed = model(**BATCH, skip_logits=False).logits
    logits = read(outputs)
    assert logits.equal(computed) and logits.requires_grad
    assert type(outputs.get("logits")) is Tensor and outputs.logits is outputs["logits"] is outputs[1]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    found, expected = (torch.autograd.grad(z.sin().sum(), weights) for z in (logits, computed))
    for gradient, wanted in zip(found, expected, strict=True):
        assert_near(gradient, wanted)


def test_logits_are_not_computed_for_whoever_does_not_read_them() -> None:
    model = tiny_model().train()
    outputs = model(**BATCH)
    assert any(type(value) is not Tensor for value in outputs.values())
    assert outputs["loss"] is outputs[0] is outputs.get("loss")
    outputs.loss.backward()
    assert any(type(value) is not Tensor for value in outputs.values())


def test_logits_after_an_optimizer_step_are_refused() -> None:
    model = tiny_model().train()
    outputs = model(**BATCH)
    outputs.loss.backward()
    assert outputs.logits.shape == (2, 6, 40)  # between backward pass and step they are right
    outputs = model(**BATCH)
    outputs.loss.backward()
    torch.optim.AdamW(model.parameters()).step()
    with pytest.raises(RuntimeError, match="logits"):
        _ = outputs.logits


def test_hooks_of_the_output_layer_run_in_training() -> None:
    model = tiny_model()

    def mask_token(module: torch.nn.Module, inputs: Any, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([7]), -1e4)

    plain = model(**BATCH).loss.item()
    model.lm_head.register_forward_hook(mask_token)
    losses = [model.train(training)(**BATCH).loss.item() for training in (False, True)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] != plain


def test_hooks_of_all_modules_see_the_output_layer_in_training() -> None:
    model = tiny_model()

    def double(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return 2 * output if module is model.lm_head else None

    plain = model(**BATCH).loss.item()
    hook = torch.nn.modules.module.register_module_forward_hook(double)
    try:
        losses = [model.train(training)(**BATCH).loss.item() for training in (False, True)]
    finally:
        hook.remove()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] != plain


@pytest.mark.parametrize(
    "change",
    [lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5), weight_norm],
    ids=["pruning", "weight norm"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_reparametrised_output_layer_trains(change: Any) -> None:
    model = tiny_model(tie_word_embeddings=False)
    change(model.lm_head)
    for _ in range(2):
        loss, found = gradients(model.train(), **BATCH)
        assert loss == pytest.approx(model.eval()(**BATCH).loss.item(), rel=1e-6)
        assert any(name.startswith("lm_head.weight_") and gradient.abs().sum() > 0 for name, gradient in found.items())
        with torch.no_grad():
            for weight in model.parameters():
                weight.sub_(0.01 * weight.grad)
