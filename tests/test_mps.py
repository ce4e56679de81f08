"""A GPU of Apple ("mps") has no float64: nothing makes such a tensor on the model's device."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.inference.scoring import score_translations_of
from hf_vanilla_transformer.layers_vanilla_transformer import sinusoidal_positions
from hf_vanilla_transformer.serving.inspection import Inspector
from hf_vanilla_transformer.serving.schemas import PageRequest
from tests.model_helpers import save_model, tiny_model, translation_batch
from tests.trainer_helpers import run_tiny, write_pairs

OF_MPS = "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64"


class PretendedMps(TorchDispatchMode):
    """Refuses float64. Tensors count as on the GPU until `Tensor.cpu` copies them."""

    def __init__(self, patch: pytest.MonkeyPatch):
        super().__init__()
        # It has a branch for "mps", which a test of its own enters.
        self.allowed = {sinusoidal_positions.__name__}
        self.on_host: dict[int, Tensor] = {}  # kept, so that no other tensor gets the address
        copy = Tensor.cpu

        def cpu(tensor: Tensor) -> Tensor:
            return self.keep(copy(tensor).clone())

        patch.setattr(Tensor, "cpu", cpu)

    def keep(self, tensor: Tensor) -> Tensor:
        self.on_host[id(tensor)] = tensor
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if inputs and all(id(each) in self.on_host for each in inputs):
            return tree_map(lambda each: self.keep(each) if isinstance(each, Tensor) else each, results)
        for each in tree_leaves(results):
            if isinstance(each, Tensor) and each.dtype in (torch.float64, torch.complex128) and not self._is_allowed():
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
    folder = save_model(tmp_path_factory.mktemp("model"), ["two hundred and one", "zweihunderteins"] * 3)
    return Translator.from_pretrained(folder, device="cpu", dtype="float32")


def test_pretended_gpu_refuses_float64(mps: PretendedMps) -> None:
    with mps:
        numbers = torch.rand(3)
        assert numbers.cpu().double().round(decimals=2).dtype == torch.float64
        for make in (numbers.double, lambda: torch.zeros(3, dtype=torch.float64), lambda: numbers + numbers.double()):
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
    pairs = write_pairs(tmp_path, [("One dog", "Ein Hund"), ("Two cats", "Zwei Katzen")] * 4, "train", "validation")
    with mps:
        run_tiny(tmp_path / "run", **pairs, max_steps=1)


DECODERS: dict[str, dict[str, Any]] = {
    "beam": {"num_beams": 3},
    "greedy": {"num_beams": 1},
    "hypotheses": {"num_beams": 3, "num_return_sequences": 3},
    "without cache": {"num_beams": 1, "use_cache": False},
    "sampling": {"do_sample": True, "num_beams": 1, "top_k": 5, "temperature": 0.7},
    "transformers' beams": {"num_beams": 3, "output_scores": True, "return_dict_in_generate": True},
    "processors": {"num_beams": 2, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2, "bad_words_ids": [[5]]},
    "attentions": {"num_beams": 1, "output_attentions": True, "return_dict_in_generate": True},
    "prompt lookup": {"num_beams": 1, "prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("settings", DECODERS.values(), ids=DECODERS)
def test_decoders_have_no_float64(settings: dict[str, Any], mps: PretendedMps, translator: Translator) -> None:
    batch = translator.source_tokenizer(["two hundred"], return_tensors="pt")
    with mps:
        translator.model.generate(**batch, max_new_tokens=4, **settings)


USES: dict[str, Callable[[Translator], Any]] = {
    "translations": lambda translator: list(translator.translate(["two hundred", "one"], max_new_tokens=4)),
    "scores": lambda translator: list(score_translations_of(translator, [("two hundred", "zweihundert")])),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_translator_has_no_float64(use: Callable[[Any], Any], mps: PretendedMps, translator: Translator) -> None:
    with mps:
        assert use(translator)


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
def test_sinusoids_on_mps_have_no_float64(layout: str, mps: PretendedMps, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = torch.arange(9)[None]
    expected = sinusoidal_positions(positions, 8, layout)
    for make in (torch.arange, torch.linspace):
        monkeypatch.setattr(torch, make.__name__, lambda *sizes, make=make, device, **named: make(*sizes, **named))
    mps.allowed = set()
    with mps:
        actual = sinusoidal_positions(positions.as_subclass(OnMps), 8, layout)
    torch.testing.assert_close(actual.as_subclass(Tensor), expected, rtol=0, atol=1e-5)
