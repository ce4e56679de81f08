"""A GPU of Apple ("mps") has no float64: nothing makes such a tensor on the model's device."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.inference.scoring import score_translations_of
from hf_vanilla_transformer.layers_vanilla_transformer import sinusoidal_positions
from hf_vanilla_transformer.serving.inspection import Inspector
from hf_vanilla_transformer.serving.schemas import PageRequest
from tests.model_helpers import save_model, tiny_model, translation_batch
from tests.trainer_helpers import run_tiny, write_pairs

OF_MPS = "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64"
DOUBLE = {torch.float64, torch.complex128}


def tensors_in(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


class PretendedMps(TorchDispatchMode):
    """Refuses float64. Tensors count as on the GPU until `Tensor.cpu` copies them."""

    def __init__(self, patch: pytest.MonkeyPatch):
        super().__init__()
        # It has a branch for "mps", which a test of its own enters.
        self.allowed = {sinusoidal_positions.__name__}
        self.on_host: dict[int, Tensor] = {}  # kept, so that no other tensor gets the address
        copy = Tensor.cpu

        def cpu(tensor: Tensor) -> Tensor:
            copied = copy(tensor).clone()
            self.on_host[id(copied)] = copied
            return copied

        patch.setattr(Tensor, "cpu", cpu)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        inputs = tensors_in((args, kwargs))
        outputs = tensors_in(results)
        if inputs and all(id(each) in self.on_host for each in inputs):
            self.on_host |= {id(each): each for each in outputs}
        elif not {each.dtype for each in outputs}.isdisjoint(DOUBLE) and not self._is_allowed():
            raise TypeError(f"{OF_MPS}: {func}")
        return results

    def _is_allowed(self) -> bool:
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code.co_name not in self.allowed:
            frame = frame.f_back
        return frame is not None


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> PretendedMps:
    return PretendedMps(monkeypatch)


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    folder = save_model(
        tmp_path_factory.mktemp("model"), ["two hundred and one", "zweihunderteins"] * 3
    )
    return Translator.from_pretrained(folder, device="cpu", dtype="float32")


def test_pretended_gpu_refuses_float64(mps: PretendedMps) -> None:
    with mps:
        numbers = torch.rand(3)
        assert numbers.cpu().double().round(decimals=2).dtype == torch.float64
        for make in (numbers.double, lambda: torch.zeros(3, dtype=torch.float64)):
            with pytest.raises(TypeError, match="float64"):
                make()


def test_training_step_has_no_float64(mps: PretendedMps) -> None:
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with mps:
        model(**translation_batch([3, 2], [2, 4])).loss.backward()
        optimizer.step()


@pytest.mark.slow
def test_training_has_no_float64(mps: PretendedMps, tmp_path: Path) -> None:
    sentences = [("One dog", "Ein Hund"), ("Two cats", "Zwei Katzen")] * 4
    pairs = write_pairs(tmp_path, sentences, "train", "validation")
    with mps:
        run_tiny(tmp_path / "run", **pairs, max_steps=1)


DECODERS: list[dict[str, Any]] = [
    {"num_beams": 3},
    {"num_beams": 3, "num_return_sequences": 3},
    {"num_beams": 3, "output_scores": True},
    {"num_beams": 2, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2, "bad_words_ids": [[5]]},
    {"num_beams": 1},
    {"num_beams": 1, "use_cache": False},
    {"num_beams": 1, "do_sample": True, "top_k": 5, "temperature": 0.7},
    {"num_beams": 1, "output_attentions": True},
    {"num_beams": 1, "prompt_lookup_num_tokens": 2},
]


@pytest.mark.parametrize("settings", DECODERS, ids=str)
def test_decoders_have_no_float64(
    settings: dict[str, Any], mps: PretendedMps, translator: Translator
) -> None:
    batch = translator.source_tokenizer(["two hundred"], return_tensors="pt")
    with mps:
        translator.model.generate(
            **batch, max_new_tokens=4, return_dict_in_generate=True, **settings
        )


def test_translator_has_no_float64(mps: PretendedMps, translator: Translator) -> None:
    pairs = [("two hundred", "zweihundert")]
    with mps:
        assert list(translator.translate(["two hundred", "one"], max_new_tokens=4))
        assert list(score_translations_of(translator, pairs))


def test_view_of_the_page_has_no_float64(mps: PretendedMps, translator: Translator) -> None:
    inspector = Inspector(translator)
    request = PageRequest(text="two hundred", inside=True)
    with mps:
        picture = inspector.picture(translator, "two hundred", 2, request)
    inspector.close()
    assert picture["inside"]["decoder"]["positions"]


class OnMps(Tensor):
    """A tensor that says that it is on a GPU of Apple."""

    device = property(lambda _: torch.device("mps"))  # type: ignore[assignment]


@pytest.mark.parametrize("layout", ["sinusoidal", "sinusoidal_split", "sinusoidal_fairseq"])
def test_sinusoids_on_mps_have_no_float64(
    layout: str, mps: PretendedMps, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = torch.arange(9)[None]
    expected = sinusoidal_positions(positions, 8, layout)
    for make in (torch.arange, torch.linspace):
        monkeypatch.setattr(
            torch, make.__name__, lambda *sizes, make=make, device, **named: make(*sizes, **named)
        )
    mps.allowed = set()
    with mps:
        actual = sinusoidal_positions(positions.as_subclass(OnMps), 8, layout)
    torch.testing.assert_close(actual.as_subclass(Tensor), expected, rtol=0, atol=1e-5)
