"""A default run chooses the checkpoint that its language's own BLEU chooses, and its log is right in every script."""

import json

import pytest
import torch
from num2words import num2words
from sacrebleu.metrics import BLEU
from transformers import AutoModelForSeq2SeqLM

from hf_vanilla_transformer.evaluation.bleu_tokenizers import fitting_tokenizer
from hf_vanilla_transformer.hub.card import _examples
from hf_vanilla_transformer.text import load_tokenizers
from hf_vanilla_transformer.training.run.report import SampleTranslations
from hf_vanilla_transformer.utils.markdown import isolated
from tests.model_helpers import slow
from tests.trainer_helpers import run_tiny, write_pairs

CHINESE = str.maketrans("0123456789", "零一二三四五六七八九")
LANGUAGES = {
    "zh": (lambda number: f"现在的号码是{number}，谢谢。".translate(CHINESE), "zh"),
    "ja": (lambda number: f"これは{num2words(number, lang='ja')}です。", "ja-mecab"),
    "th": (lambda number: f"หมายเลข{num2words(number, lang='th')}ครับ", "char"),
}


@pytest.mark.parametrize("language", ["zh", *slow("ja", "th")])
def test_default_run_chooses_the_checkpoint_of_its_languages_bleu(language: str, tmp_path) -> None:
    spell, tokenizer_of_language = LANGUAGES[language]
    pairs = [(f"the number is {' '.join(str(number))}", spell(number)) for number in range(100, 1000, 7)]
    validation = pairs[::4]
    run_tiny(
        tmp_path / "run",
        **write_pairs(tmp_path, pairs, "train"),
        **write_pairs(tmp_path, validation, "validation"),
        d_model=32,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=330,
        warmup_steps=10,
        per_device_train_batch_size=32,
        learning_rate=0.01,
        max_steps=150,
        generation_max_length=40,
        eval_strategy="steps",
        eval_steps=30,
        save_strategy="steps",
        save_steps=30,
        seed=3,
        load_best_model_at_end=True,
        metric_for_best_model="bleu",
        logging_steps=50,
    )
    references = [target for _, target in validation]
    name = fitting_tokenizer(references)
    assert name in (tokenizer_of_language, "char")  # without MeCab characters stand for Japanese words
    scores = {}
    wrong = {}
    for folder in (tmp_path / "run").glob("checkpoint-*"):
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
        tokenizer, _ = load_tokenizers(folder)
        inputs = tokenizer([source for source, _ in validation], return_tensors="pt", padding=True)
        with torch.inference_mode():
            ids = model.generate(**inputs, num_beams=1, max_length=40)
        hypotheses = tokenizer.batch_decode(ids, skip_special_tokens=True)
        step = int(folder.name.split("-")[1])
        scores[step] = BLEU(tokenize=name).corpus_score(hypotheses, [references]).score
        wrong[step] = BLEU(tokenize="13a").corpus_score(hypotheses, [references]).score
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    logged = {entry["step"]: entry["eval_bleu"] for entry in state["log_history"] if "eval_bleu" in entry}
    assert logged.keys() == scores.keys()
    assert len(scores) == 5
    assert state["best_global_step"] == max(logged, key=logged.get)
    # Near ties of a young model fall differently in batches of another size. BLEU of 13a is far off.
    for step in sorted(scores)[-2:]:
        assert abs(logged[step] - scores[step]) < 0.2 * abs(logged[step] - wrong[step])


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
