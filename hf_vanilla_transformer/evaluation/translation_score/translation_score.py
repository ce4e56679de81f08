"""A local `evaluate` module: BLEU, chrF and exact match, computed by sacreBLEU, with its signatures.

`evaluate.load("sacrebleu")` downloads its script from the Hub; this one works offline. `evaluate` copies this file
alone into its module cache, so it must not import the package.
"""

import datasets
import evaluate
from sacrebleu.metrics import BLEU, CHRF

_DESCRIPTION = """\
Corpus BLEU (Papineni et al. 2002) and chrF (Popović 2015) as computed by sacreBLEU (Post 2018), each with the
signature that makes it comparable, and the percentage of sentences that equal their reference."""

_INPUTS = """
Args:
    predictions: list of detokenised translations.
    references: list of references, one per translation.
    tokenize: sacreBLEU's tokenizer for BLEU: "13a" for detokenised text, "none" for tokenised text.
    lowercase: ignore case.
Returns:
    bleu, chrf, exact_match: percentages.
    bleu_signature, chrf_signature: the signatures of sacreBLEU.
    precisions: clipped n-gram precisions for n = 1 … 4, percentages.
    brevity_penalty; hypothesis_length, reference_length: in tokens of `tokenize`; sentences: their number.
"""

_CITATION = """\
@inproceedings{post-2018-call,
    title = {A Call for Clarity in Reporting {BLEU} Scores},
    author = {Post, Matt},
    booktitle = {Proceedings of the Third Conference on Machine Translation: Research Papers},
    year = {2018},
    url = {https://aclanthology.org/W18-6319},
    pages = {186--191},
}"""


class TranslationScore(evaluate.Metric):
    """The class that `evaluate.load` instantiates."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
            homepage="https://github.com/mjpost/sacrebleu",
        )

    def _compute(self, predictions, references, tokenize="13a", lowercase=False):
        # force: no warning that the text looks tokenised, which "none" expects
        bleu = BLEU(tokenize=tokenize, lowercase=lowercase, force=tokenize == "none")
        chrf = CHRF(lowercase=lowercase)
        bleu_score = bleu.corpus_score(predictions, [references])
        chrf_score = chrf.corpus_score(predictions, [references])
        return {
            "bleu": bleu_score.score,
            "chrf": chrf_score.score,
            "exact_match": _exact_match(predictions, references, lowercase),
            "bleu_signature": f"{bleu_score.name}|{bleu.get_signature()}",
            "chrf_signature": f"{chrf_score.name}|{chrf.get_signature()}",
            "brevity_penalty": bleu_score.bp,
            "precisions": list(bleu_score.precisions),
            "hypothesis_length": bleu_score.sys_len,
            "reference_length": bleu_score.ref_len,
            "sentences": len(predictions),
        }


def _exact_match(predictions, references, lowercase):
    """Percentage of sentences that equal their reference, ignoring spaces at the ends, as sacreBLEU does."""
    normalise = str.lower if lowercase else str
    pairs = zip(predictions, references, strict=True)
    return 100 * sum(normalise(ours).strip() == normalise(theirs).strip() for ours, theirs in pairs) / len(predictions)
