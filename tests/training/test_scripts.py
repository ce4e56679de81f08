"""A default run is scored by its language's own BLEU, and its log is right in every script."""

import pytest
from num2words import num2words
from sacrebleu.metrics import BLEU

from hf_vanilla_transformer import VanillaTransformerTrainer
from hf_vanilla_transformer.evaluation.bleu_tokenizers import fitting_tokenizer
from hf_vanilla_transformer.hub.card import _examples
from hf_vanilla_transformer.text import load_tokenizers
from hf_vanilla_transformer.training.run.report import SampleTranslations
from hf_vanilla_transformer.utils.markdown import isolated
from tests.trainer_helpers import run_tiny, write_pairs

CHINESE = str.maketrans("0123456789", "零一二三四五六七八九")


@pytest.mark.parametrize(
    ("spell", "tokenizer_of_language"),
    [
        (lambda number: f"现在的号码是{number}，谢谢。".translate(CHINESE), "zh"),
        (lambda number: f"これは{num2words(number, lang='ja')}です。", "ja-mecab"),
        (lambda number: f"หมายเลข{num2words(number, lang='th')}ครับ", "char"),
    ],
    ids=["zh", "ja", "th"],
)
def test_default_run_is_scored_by_its_languages_bleu(
    spell,
    tokenizer_of_language,
    tmp_path,
    monkeypatch,
) -> None:
    """Each sentence is translated as that of another one."""
    batches = []

    def predict(self, model, inputs, *args, **settings):
        labels = inputs["labels"]
        batches.append(labels)
        return None, labels.roll(1, dims=0), labels

    monkeypatch.setattr(VanillaTransformerTrainer, "prediction_step", predict)
    pairs = [(str(number), spell(number)) for number in range(100, 1000, 37)]
    results = run_tiny(
        tmp_path / "run",
        **write_pairs(tmp_path, pairs, "train", "validation"),
        max_steps=1,
        per_device_eval_batch_size=len(pairs),
    )
    tokenizer, _ = load_tokenizers(tmp_path / "run")
    labels = batches[-1].clamp(min=0)
    references = tokenizer.batch_decode(labels, skip_special_tokens=True)
    hypotheses = [references[-1], *references[:-1]]
    name = fitting_tokenizer(references)
    assert name in (
        tokenizer_of_language,
        "char",
    )  # without MeCab characters stand for Japanese words
    own, western = (
        BLEU(tokenize=each).corpus_score(hypotheses, [references]).score for each in (name, "13a")
    )
    assert results["eval_bleu"] == pytest.approx(own)
    assert own > western + 1


def test_samples_and_cards_isolate_text_from_right_to_left() -> None:
    texts = ["שלום, עולם!", "مرحبا (abc) بالعالم؟", "abc, 日本!"]
    printed = ""
    for text in texts:
        samples = SampleTranslations([{"source": text, "target": text}])
        samples._sample = (0, text)
        printed += "\n".join(samples.lines())
    table = _examples([[text] * 3 for text in texts], "translation")
    for text in texts[:2]:
        assert isolated(text) == f"\u2068{text}\u2069"
        assert printed.count(f"  \u2068{text}\u2069") == 3
        assert f"| \u2068{text}\u2069 |" in table
    assert isolated(texts[2]) == texts[2]
    assert f"  {texts[2]}\n" in printed
    assert "".join(map(isolated, ["", "123", "é 한"])) == "123é 한"
