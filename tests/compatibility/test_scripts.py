"""Users' scripts around transformers: each runs on MarianMTModel and on this model with the same expectations.

Every tool runs in an environment where it is installed, and is skipped with its name elsewhere.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForTextEncoding,
    Seq2SeqTrainer,
    TrainerCallback,
)

from tests.compatibility.scripts import MODELS, loss_of, stock_trainer, text_pairs, word_tokenizer
from tests.model_helpers import assert_near
from tests.test_custom_losses import LOSSES
from tests.trainer_helpers import DESCENT, QUIET, TORCHRUN, collate, launch, random_pairs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
both = pytest.mark.parametrize("kind", MODELS)


# Losses


@pytest.mark.parametrize("loss", LOSSES, ids=[loss.__name__ for loss in LOSSES])
@both
def test_custom_loss_is_that_of_its_formula(kind: str, loss: Any, tmp_path: Path) -> None:
    """The first training loss of the override equals the same formula on the logits of the untrained model."""

    class Custom(Seq2SeqTrainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
        ) -> Any:
            value, outputs = loss(self, model, inputs)
            return (value, outputs) if return_outputs else value

    model = MODELS[kind]()
    trainer = stock_trainer(model, tmp_path, Custom, per_device_train_batch_size=8, **DESCENT)
    with torch.no_grad():
        expected = loss(trainer, model.eval(), dict(collate(random_pairs(8))))[0].item()
    before = loss_of(model)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-6)
    assert loss_of(model) != before


@pytest.mark.parametrize(
    "setting", ["accumulation", "bf16", "compile", "checkpointing", "two processes"]
)
def test_custom_losses_train_as_with_a_plain_output_layer(
    setting: str, tmp_path: Path, repository: Path
) -> None:
    """In both trainers. The worker compares a model whose output layer has a hook, and is called, with one that has
    none."""
    worker = repository / "tests" / "compatibility" / "losses_worker.py"
    start = [*TORCHRUN, f"--nproc_per_node={2 if setting == 'two processes' else 1}"]
    launch(repository, *start, str(worker), str(tmp_path), setting)
    assert int((tmp_path / "compared").read_text()) == 2 * (
        1 if setting == "compile" else len(LOSSES)
    )


# Callbacks and loops


@both
def test_callbacks_see_and_change_the_run(kind: str, tmp_path: Path) -> None:
    seen: list[str] = []

    class Watch(TrainerCallback):
        def on_step_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
        ) -> None:
            assert (
                model is not None
                and {"optimizer", "lr_scheduler", "processing_class"} <= kwargs.keys()
            )

        def on_pre_optimizer_step(
            self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
        ) -> None:
            seen.append(
                "gradients"
                if all(p.grad is not None for p in model.parameters() if p.requires_grad)
                else "none"
            )

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = state.global_step == 2
            control.should_evaluate = control.should_save = True
            return control

        def on_evaluate(
            self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any
        ) -> None:
            seen.append(f"evaluated {'eval_loss' in metrics}")

    trainer = stock_trainer(MODELS[kind](), tmp_path, callbacks=[Watch()])
    trainer.train()
    assert trainer.state.global_step == 2 and seen == ["gradients", "evaluated True"] * 2
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()


@both
def test_accelerate_loop_trains_and_resumes(kind: str, tmp_path: Path) -> None:
    """Accumulation, clipping, `save_state`, `load_state`, `save_model`, and the same weights after a resume."""
    from accelerate import Accelerator

    def run(resume: Path | None, save: Path | None) -> Any:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = MODELS[kind]()
        loader = torch.utils.data.DataLoader(random_pairs(8), batch_size=2, collate_fn=collate)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), 1e-2), loader
        )
        if resume:
            accelerator.load_state(str(resume))
        for _ in range(1 if resume or save else 2):
            for batch in loader:
                with accelerator.accumulate(model.train()):
                    accelerator.backward(model(**batch).loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        if save:
            accelerator.save_state(str(save))
            accelerator.save_model(model, str(save / "model"))
        return accelerator.unwrap_model(model)

    whole, half = run(None, None), run(None, tmp_path)
    resumed = run(tmp_path, None)
    for name, weight in whole.named_parameters():
        assert weight.equal(dict(resumed.named_parameters())[name]), name
    again = MODELS[kind](seed=3)
    from safetensors.torch import load_model

    load_model(again, tmp_path / "model" / "model.safetensors")
    assert loss_of(again) == pytest.approx(loss_of(half), rel=1e-6)


@both
def test_lightning_module_trains(kind: str, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = MODELS[kind]()

        def training_step(self, batch: Any, index: int) -> Any:
            outputs = self.model(**batch)
            accuracy = (outputs.logits.argmax(-1) == batch["labels"]).float().mean()
            self.log("accuracy", accuracy)
            return outputs.loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    module = Module()
    before = loss_of(module.model)
    loader = torch.utils.data.DataLoader(random_pairs(8), batch_size=4, collate_fn=collate)
    settings = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        max_epochs=4, default_root_dir=tmp_path, accumulate_grad_batches=2, **settings
    )
    trainer.fit(module, loader)
    assert loss_of(module.model) < before
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    again = Module.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    assert loss_of(again.model) == pytest.approx(loss_of(module.model), rel=1e-6)


@both
def test_optuna_searches_the_learning_rate(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="optuna is not installed")
    trainer = stock_trainer(
        None, tmp_path, model_init=lambda trial: MODELS[kind](), eval_strategy="steps", eval_steps=3
    )
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)
        },
        n_trials=3,
        backend="optuna",
        direction="minimize",
    )
    assert 1e-4 <= best.hyperparameters["learning_rate"] <= 1e-2 and 0 < best.objective < 10


@both
def test_tensorboard_gets_the_losses(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = stock_trainer(
        MODELS[kind](), tmp_path, report_to="tensorboard", eval_strategy="steps", eval_steps=1
    )
    trainer.train()
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    for name, key in (("train/loss", "loss"), ("eval/loss", "eval_loss")):
        logged = [entry[key] for entry in trainer.state.log_history if key in entry]
        assert [event.value for event in events.Scalars(name)] == pytest.approx(
            logged, rel=1e-4
        ) and len(logged) == 3


@both
def test_map_takes_a_second_translation_from_its_cache(kind: str, tmp_path: Path) -> None:
    from datasets import Dataset

    model, tokenizer = MODELS[kind](), word_tokenizer()

    def translate(batch: dict[str, list[str]]) -> dict[str, list[str]]:
        ids = tokenizer(batch["source"], return_tensors="pt", padding=True)
        ids.pop("token_type_ids", None)
        rows = model.generate(**ids, max_new_tokens=5)
        return {"mt": tokenizer.batch_decode(rows, skip_special_tokens=True)}

    rows = Dataset.from_list(text_pairs(6))
    rows.save_to_disk(str(tmp_path / "rows"))
    results = []
    for _ in range(2):
        rows = Dataset.load_from_disk(str(tmp_path / "rows"))
        results.append(rows.map(translate, batched=True, batch_size=3))
    assert results[0]["mt"][:] == results[1]["mt"][:] and len(results[0]) == 6
    assert results[0].cache_files == results[1].cache_files


# Adapters, quantization, preferences


@pytest.mark.parametrize("bits", [8, 4])
@both
def test_quantized_model_trains_an_adapter(kind: str, bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import BitsAndBytesConfig

    MODELS[kind](d_model=64).save_pretrained(tmp_path / "model")
    fields = (
        {"load_in_8bit": True}
        if bits == 8
        else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    )

    def load() -> (
        Any
    ):  # bitsandbytes packs 4-bit weights at the first evaluation, and then they cannot be trained
        config = BitsAndBytesConfig(**fields)
        return AutoModelForSeq2SeqLM.from_pretrained(
            tmp_path / "model", quantization_config=config, device_map="cpu"
        )

    full = loss_of(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model"))
    assert loss_of(load()) == pytest.approx(full, rel=0.1)
    model = peft.prepare_model_for_kbit_training(load())
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trainer = stock_trainer(model, tmp_path / "run", max_steps=6, learning_rate=0.1)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(full, rel=0.1) and losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["cpo", "orpo"])
@both
def test_preference_optimization_trains(kind: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    import importlib

    from datasets import Dataset

    module = importlib.import_module(f"trl.experimental.{name}")
    config_class, trainer_class = (
        getattr(module, f"{name.upper()}{part}") for part in ("Config", "Trainer")
    )
    rows = [
        {"prompt": row["source"], "chosen": row["target"], "rejected": other["target"]}
        for row, other in zip(text_pairs(8), reversed(text_pairs(8)), strict=True)
    ]
    model = MODELS[kind]()
    settings = QUIET | {
        "max_steps": 3,
        "learning_rate": 1e-2,
        "bf16": False,
        "per_device_train_batch_size": 4,
    }
    arguments = config_class(
        output_dir=str(tmp_path), max_length=16, max_completion_length=16, **settings
    )
    before = {key: weight.detach().clone() for key, weight in model.named_parameters()}
    data, tokenizer = Dataset.from_list(rows), word_tokenizer()
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=data, processing_class=tokenizer
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and all(torch.isfinite(torch.tensor(losses)))
    assert any(not weight.equal(before[key]) for key, weight in model.named_parameters())


@pytest.mark.parametrize(
    ("kind", "saved"), [("marian", "whole"), ("ours", "whole"), ("ours", "encoder")]
)
@pytest.mark.parametrize("again", [False, True], ids=["", "saved again"])
def test_sentence_transformer_encodes_a_model_folder(
    kind: str, saved: str, again: bool, tmp_path: Path
) -> None:
    """A vector for each sentence, here the mean of the encoder's states over the tokens of the sentence."""
    library = pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is not installed"
    )
    model, tokenizer = MODELS[kind](), word_tokenizer()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    if saved == "encoder":
        AutoModelForTextEncoding.from_pretrained(tmp_path).save_pretrained(tmp_path)
    sentences = [row["source"] for row in text_pairs(5)]
    embedder = library.SentenceTransformer(str(tmp_path), device="cpu")
    if again:
        embedder.save_pretrained(str(tmp_path / "again"))
        embedder = library.SentenceTransformer(str(tmp_path / "again"), device="cpu")
    found = embedder.encode(sentences)
    assert found.shape == (5, model.config.d_model)
    for sentence, vector in zip(sentences, found, strict=True):
        ids = tokenizer(sentence, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = model.get_encoder()(ids).last_hidden_state[0].mean(dim=0)
        if kind == "ours":
            assert_near(torch.tensor(vector), expected, 1e-5)


@pytest.mark.parametrize("stage", [2, 3])
@both
def test_deepspeed_trains_as_plain_data_parallelism(
    kind: str, stage: int, tmp_path: Path, repository: Path
) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    worker = repository / "tests" / "compatibility" / "deepspeed_worker.py"
    launch(
        repository,
        *TORCHRUN,
        "--nproc_per_node=2",
        str(worker),
        str(tmp_path / "zero"),
        kind,
        str(stage),
    )
    launch(
        repository, *TORCHRUN, "--nproc_per_node=2", str(worker), str(tmp_path / "plain"), kind, "0"
    )
    zero, plain = (torch.load(tmp_path / name / "losses.pt") for name in ("zero", "plain"))
    assert zero == pytest.approx(plain, rel=1e-3) and len(zero) == 3
