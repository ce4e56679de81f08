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
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def distillation(trainer: Trainer, model: Any, inputs: Any) -> Any:
    student = model(**inputs)
    with torch.no_grad():
        teacher = TEACHER(**inputs)
    log_p = F.log_softmax(student.logits / 2, -1)
    wanted = F.softmax(teacher.logits / 2, -1)
    kl = F.kl_div(log_p, wanted, reduction="batchmean")
    return student.loss + kl, student


def focal(trainer: Trainer, model: Any, inputs: Any) -> Any:
    outputs = model(**inputs)
    labels = inputs["labels"]
    index = labels.clamp(min=0)[..., None]
    log_p = outputs.logits.log_softmax(-1).gather(2, index)[..., 0]
    losses = -((1 - log_p.exp()) ** 2) * log_p
    return losses[labels != -100].mean(), outputs


def entropy_bonus(trainer: Trainer, model: Any, inputs: Any) -> Any:
    outputs = model(**inputs)
    p = torch.softmax(outputs["logits"], dim=-1)
    entropy = -(p * p.log()).sum(-1).mean()
    return outputs["loss"] - 0.1 * entropy, outputs


def of_a_tuple(trainer: Trainer, model: Any, inputs: Any) -> Any:
    loss, logits = model(**inputs, return_dict=False)[:2]
    return loss + cross_entropy(logits, inputs["labels"]), None


def without_labels(trainer: Trainer, model: Any, inputs: Any) -> Any:
    labels = inputs.pop("labels")
    decoder_input_ids = trainer.model.prepare_decoder_input_ids_from_labels(labels)
    outputs = model(**inputs, decoder_input_ids=decoder_input_ids)
    return cross_entropy(outputs.logits, labels), outputs


def token_weights(trainer: Trainer, model: Any, inputs: Any) -> Any:
    base = super(type(trainer), trainer)
    loss, outputs = base.compute_loss(model, inputs, return_outputs=True)
    logits = outputs.logits.flatten(0, 1)
    labels = inputs["labels"].flatten()
    weight = torch.linspace(0.5, 1.5, logits.shape[-1])
    return loss + F.cross_entropy(logits, labels, weight=weight), outputs


LOSSES = [
    distillation,
    focal,
    entropy_bonus,
    of_a_tuple,
    without_labels,
    token_weights,
]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
}


def trained(
    base: type,
    loss: Any,
    folder: Path,
    plain_output_layer: bool,
    **settings: Any,
) -> dict[str, Tensor]:
    """The weights after two updates with a user's loss."""

    class Custom(base):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
        ) -> Any:
            value, outputs = loss(self, model, inputs)
            return (value, outputs) if return_outputs else value

    model = tiny_model(1, dropout=0.0, label_smoothing=0.1)
    if plain_output_layer:
        # A hook of the output layer makes the model call it.
        model.lm_head.register_forward_hook(lambda module, inputs, output: None)
    plan = {
        "learning_rate": 0.1,
        "max_steps": 2,
        "per_device_train_batch_size": 3,
    }
    trainer_helpers.trained(folder, random_pairs(12), model, Custom, **DESCENT | plan | settings)
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


# tests/compatibility tries every loss with every setting, also in the stock trainer
PLAIN = [(loss, "plain") for loss in LOSSES]
CASES = dict.fromkeys(PLAIN + [(distillation, setting) for setting in SETTINGS])


@pytest.mark.parametrize(("loss", "setting"), CASES)
def test_custom_loss_trains_as_with_a_plain_output_layer(
    loss: Any, setting: str, tmp_path: Path
) -> None:
    expected, found = (
        trained(VanillaTransformerTrainer, loss, tmp_path / str(plain), plain, **SETTINGS[setting])
        for plain in (True, False)
    )
    tolerance = 1e-2 if setting == "bf16" else 1e-6
    for name, weight in found.items():
        assert_near(weight, expected[name], tolerance, name)


BATCH = translation_batch([5, 3], [6, 4])


@torch.no_grad()
def measure(outputs: Any) -> None:
    outputs.logits.argmax(-1)


READERS: dict[str, Any] = {
    "metric first": lambda outputs: measure(outputs) or outputs.logits,
    "inference mode first": lambda outputs: (
        torch.inference_mode()(measure)(outputs) or outputs.logits
    ),
    "index": lambda outputs: outputs[1],
    "slice": lambda outputs: outputs[:2][1],
    "get": lambda outputs: outputs.get("logits"),
    "dictionary": lambda outputs: {**outputs}["logits"],
    "items": lambda outputs: dict(outputs.items())["logits"] * 1,
    "tensors among the items": lambda outputs: [
        v for _, v in outputs.items() if torch.is_tensor(v)
    ][1],
    "values": lambda outputs: list(outputs.values())[1].clone(),
    "copy": lambda outputs: copy.copy(outputs).logits,
    "leaves": lambda outputs: torch.utils._pytree.tree_leaves(outputs)[1].clone(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_logits_have_gradients_for_every_reader(read: Any) -> None:
    model = tiny_model().train()
    outputs = model(**BATCH)
    computed = model(**BATCH, skip_logits=False).logits
    logits = read(outputs)
    assert logits.equal(computed)
    assert logits.requires_grad
    assert type(outputs.get("logits")) is Tensor
    assert outputs.logits is outputs["logits"] is outputs[1]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    found = torch.autograd.grad(logits.sin().sum(), weights)
    expected = torch.autograd.grad(computed.sin().sum(), weights)
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


def add_to_one_module(model: Any, hook: Any) -> Any:
    return model.lm_head.register_forward_hook(hook)


def add_to_all_modules(model: Any, hook: Any) -> Any:
    return torch.nn.modules.module.register_module_forward_hook(hook)


@pytest.mark.parametrize("register", [add_to_one_module, add_to_all_modules])
def test_hooks_see_the_output_layer_in_training(register: Any) -> None:
    model = tiny_model()

    def double(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return 2 * output if module is model.lm_head else None

    plain = model(**BATCH).loss.item()
    hook = register(model, double)
    try:
        evaluated = model(**BATCH).loss.item()
        trained = model.train()(**BATCH).loss.item()
    finally:
        hook.remove()
    assert trained == pytest.approx(evaluated, rel=1e-6)
    assert evaluated != plain


def pruned(layer: torch.nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.5)


@pytest.mark.parametrize("change", [pruned, weight_norm])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_reparametrised_output_layer_trains(change: Any) -> None:
    model = tiny_model(tie_word_embeddings=False)
    change(model.lm_head)
    for _ in range(2):
        loss, found = gradients(model.train(), **BATCH)
        expected = model.eval()(**BATCH).loss.item()
        assert loss == pytest.approx(expected, rel=1e-6)
        own = [gradient for name, gradient in found.items() if name.startswith("lm_head.weight_")]
        assert any(gradient.any() for gradient in own)
        with torch.no_grad():
            for weight in model.parameters():
                weight.sub_(0.01 * weight.grad)
