"""In Node: transformers.js's stock pipeline and the page's engine translate a site's model as `generate` does."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.inference.candidates import translate_candidates
from hf_vanilla_transformer.interop import transformers_js
from hf_vanilla_transformer.search_vanilla_transformer import LengthPenalty
from hf_vanilla_transformer.text import load_tokenizers
from hf_vanilla_transformer.utils.shipped_models import model_folder
from hf_vanilla_transformer.web.site import search_settings, write_site
from tests.interop.exports import LINES, require_onnx, write_model
from tests.interop.foreign import (
    SOURCES,
    TARGETS,
    converted,
    write_opus_folder,
    write_two_tokenizers,
)
from tests.interop.test_search_settings import OF_ONNX, SETTINGS
from tests.interop.two_vocabularies import write_separate_opus_folder
from tests.paper_inside import assert_is_inside
from tests.web.conftest import Site
from tests.web.tools import require_npm, run_node

pytestmark = pytest.mark.slow

TEXTS = [*LINES, "  two   hundred ", "Größe </s> <pad> 東京", "a", "x y z " * 20]


def translate(folder: Path, lines: list[str], **options: Any) -> list[dict]:
    """What the page's engine finds for each line."""
    answer = run_node("page_engine.mjs", str(folder), "fp32", json.dumps(options), lines=lines)
    assert "error" not in answer, answer["error"]
    return answer["found"]


def stock_translations(folder: Path, lines: list[str], **options: Any) -> list[str]:
    """What transformers.js finds for each line, with the model of a site."""
    model = str(folder / "model")
    return run_node("stock_pipeline.mjs", model, "fp32", json.dumps(options), lines=lines)["found"]


def generated(site: Site, line: str, **settings: Any) -> tuple[list[int], Any]:
    """Tokens of the best hypothesis without the start token, and its score if it has one."""
    source, _ = load_tokenizers(site.source)
    batch = source(line, return_tensors="pt")
    output = site.model.generate(**batch, return_dict_in_generate=True, **settings)
    scores = getattr(output, "sequences_scores", [None])
    return output.sequences[0, 1:].tolist(), scores[0]


def greedy_texts(site: Site, lines: list[str], **settings: Any) -> list[str]:
    _, target = load_tokenizers(site.source)
    rows = [generated(site, line, num_beams=1, **settings)[0] for line in lines]
    return target.batch_decode(rows, skip_special_tokens=True)


def token_ids(found: dict, side: str = "tokens") -> list[int]:
    return [token["id"] for token in found[side]]


def assert_is_best(found: dict, expected: tuple[list[int], Any]) -> None:
    """The translation has the tokens and the score of `generated`."""
    tokens, score = expected
    assert token_ids(found) == tokens
    if score is not None:
        assert found["hypotheses"][0]["score"] == pytest.approx(float(score), abs=1e-4)


def written(model: Any, folder: Path) -> Site:
    """The site of the model in a folder, beside it."""
    require_onnx()
    output = folder.parent / "site"
    write_site(folder, output, runtime=require_npm(), dtypes=["fp32"])
    return Site(model, folder, output)


def test_stock_pipeline_gives_our_greedy_translations(site: Site) -> None:
    lines = [
        line for line in TEXTS if "</s>" not in line
    ]  # which the library takes for a special token
    expected = greedy_texts(site, lines)
    assert stock_translations(site.folder, lines) == expected
    assert len(set(expected)) > 2


@pytest.mark.parametrize("beams", [1, 4])
def test_engine_finds_our_best_hypothesis(site: Site, beams: int) -> None:
    for line, found in zip(TEXTS, translate(site.folder, TEXTS, num_beams=beams), strict=True):
        assert_is_best(found, generated(site, line.strip(), num_beams=beams))


def test_engine_shows_the_inside_as_the_paper_has_it(site: Site) -> None:
    (found,) = translate(site.folder, [LINES[2]], inside=True)
    ids = [token_ids(found, side) for side in ("source", "tokens")]
    assert_is_inside(found["inside"], copy.deepcopy(site.model), *ids)
    (found,) = translate(site.folder, [LINES[2]])
    assert "inside" not in found


@torch.no_grad()
def test_engine_gives_our_probabilities_and_attention(site: Site) -> None:
    source, target = load_tokenizers(site.source)
    (found,) = translate(site.folder, [LINES[2]], num_beams=2, alternatives=3)
    ids = token_ids(found)
    batch = source(LINES[2], return_tensors="pt")
    site.model.set_attn_implementation("eager")
    output = site.model(
        **batch,
        decoder_input_ids=torch.tensor([[0, *ids[:-1]]]),
        output_attentions=True,
    )
    probabilities = output.logits[0].softmax(dim=-1)  # (T, V)
    own = probabilities.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert torch.tensor(found["probabilities"]).sub(own).abs().max() < 1e-4
    values, best = probabilities.topk(3)
    offered = found["alternatives"]
    assert [[each["id"] for each in row] for row in offered] == best.tolist()
    shown = torch.tensor([[each["probability"] for each in row] for row in offered])
    assert (shown - values).abs().max() < 1e-4
    attention = torch.tensor(found["attention"])  # (L, H, T, S)
    assert (attention - torch.cat(output.cross_attentions)).abs().max() < 6e-4  # three decimals
    assert token_ids(found, "source") == batch["input_ids"][0].tolist()
    assert "".join(token["text"] for token in found["source"][:-1]) == LINES[2]
    assert found["text"] == target.decode(ids, skip_special_tokens=True).strip()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_engines_apply_generation_settings(
    settings: dict, beams: int, site: Site, tmp_path: Path
) -> None:
    """The page's engine in a beam search, and transformers.js in a greedy one."""
    if settings not in OF_ONNX:
        pytest.skip("refused")
    model = copy.deepcopy(site.model)
    changes = settings | {"max_new_tokens": 7, "num_beams": beams}
    model.generation_config.update(**changes)
    folder = tmp_path / "site"
    shutil.copytree(site.folder, folder)
    path = folder / "site.json"
    description = json.loads(path.read_text())
    path.write_text(json.dumps(description | {"search": search_settings(model)}))
    changed = Site(model, site.source, folder)
    for line, found in zip(LINES, translate(folder, LINES), strict=True):
        assert_is_best(found, generated(changed, line))
    if beams == 1:
        path = folder / "model" / "generation_config.json"
        path.write_text(json.dumps(transformers_js.generation_settings(model)))
        assert stock_translations(folder, LINES, max_new_tokens=7) == greedy_texts(changed, LINES)


def test_engine_goes_on_from_a_prefix(site: Site) -> None:
    prefix = [17, 23, 42]
    (found,) = translate(site.folder, LINES[:1], num_beams=4, prefix=prefix)
    start = torch.tensor([[0, *prefix]])
    expected = generated(
        site,
        LINES[0],
        num_beams=4,
        decoder_input_ids=start,
        max_new_tokens=12 - 3,
    )
    assert_is_best(found, expected)
    assert token_ids(found)[:3] == prefix


def test_engine_ends_at_an_end_token(site: Site) -> None:
    (found,) = translate(site.folder, LINES[:1], num_beams=4, prefix=[17, 2])
    (hypothesis,) = found["hypotheses"]
    assert token_ids(found) == hypothesis["tokens"] == [17, 2]
    assert found["parts"][0]["target"] == found["text"]


def test_engine_keeps_the_layout_of_a_text(site: Site) -> None:
    text = f"{LINES[0]}\n\n - {LINES[1]}! {LINES[0]}?\r\n{{name}} https://x.org/a\t{LINES[2]} \n"
    single = [LINES[0], f"{LINES[1]}!", f"{LINES[0]}?", LINES[2]]
    first, second, third, fourth = (each["text"] for each in translate(site.folder, single))
    (found,) = translate(site.folder, [text])
    parts = found["parts"]
    expected = f"{first}\n\n - {second} {third}\r\n{{name}} https://x.org/a\t{fourth} \n"
    assert "".join(part["source"] for part in parts) == text
    assert "".join(part["target"] for part in parts) == expected
    assert parts[found["sentence"]]["source"] == LINES[2]
    (found,) = translate(site.folder, [text], caret=len(LINES[0]) + 8)
    assert found["parts"][found["sentence"]]["source"] == f"{LINES[1]}!"


def test_engines_normalise_their_sources(site: Site) -> None:
    line = LINES[0]
    lines = [
        line,
        line.replace(" ", "\u00a0"),
        "\ufeff" + line,
        "".join(chr(ord(c) + 0xFEE0) if c > " " else c for c in line),
    ]
    first, *others = translate(site.folder, lines)
    assert first["text"]
    for found in others:
        assert (found["text"], len(found["tokens"])) == (
            first["text"],
            len(first["tokens"]),
        )
    assert token_ids(others[0], "source") == token_ids(first, "source")
    assert len(set(stock_translations(site.folder, lines))) == 1


def test_engine_tree_holds_the_hypotheses(site: Site) -> None:
    (found,) = translate(site.folder, LINES[:1], num_beams=4)
    nodes = found["tree"]

    def path(index: int) -> list[int]:
        return [] if index < 0 else [*path(nodes[index]["parent"]), nodes[index]["id"]]

    (best, *_) = (index for index, node in enumerate(nodes) if node["state"] == "best")
    hypothesis = found["hypotheses"][0]
    tokens = hypothesis["tokens"]
    assert path(best) == tokens
    assert all(node["parent"] < index for index, node in enumerate(nodes))
    penalty = float(LengthPenalty(0.6, "gnmt")(torch.tensor(float(len(tokens)))))
    assert hypothesis["score"] == pytest.approx(nodes[best]["log_probability"] / penalty, abs=1e-6)
    lengths = [len(path(index)) for index in range(len(nodes))]
    assert all(lengths.count(length) >= 4 for length in (1, 2, 3))


@pytest.mark.parametrize("beams", [1, 5])
def test_engine_lists_the_candidates_of_a_sequence(tmp_path: Path, beams: int) -> None:
    require_onnx()
    folder = model_folder("g2p_en")
    write_site(folder, tmp_path / "site", runtime=require_npm(), dtypes=["fp32"])
    words = ["record", "Kitten", "WORLD"]
    translator = Translator.from_pretrained(folder, "cpu", "float32")
    expected = translate_candidates(translator, words, beams, num_beams=beams)
    found = translate(tmp_path / "site", words, num_beams=beams)
    for page, candidates in zip(found, expected, strict=True):
        predictions = page["predictions"]
        assert [one["text"] for one in predictions] == [one.text for one in candidates]
        shares = [one["probability"] for one in predictions]
        assert shares == pytest.approx([one.probability for one in candidates], abs=1e-3)
    assert [page["text"] for page in found[1:]] == ["K IH T AH N", "W ER L D"]


def test_engine_ignores_blank_text(site: Site) -> None:
    for found in translate(site.folder, ["", "  \n "]):
        assert found["text"] == ""
        assert found["tokens"] == found["hypotheses"] == []


def test_two_vocabularies_and_learned_positions_translate_in_both_engines(
    tmp_path: Path,
) -> None:
    model = write_model(
        tmp_path / "model",
        share_encoder_decoder_embeddings=False,
        vocab_size=320,
        decoder_vocab_size=330,
        position_encoding_type="learned",
        max_position_embeddings=24,
    )
    model.generation_config.update(num_beams=4)
    model.generation_config.save_pretrained(tmp_path / "model")
    write_two_tokenizers(tmp_path / "model")
    site = written(model, tmp_path / "model")
    source, _ = load_tokenizers(site.source)
    lines = [LINES[0], "a dog"]
    for line, found in zip(lines, translate(site.folder, lines, inside=True), strict=True):
        tokens, _ = generated(site, line, num_beams=4)
        assert token_ids(found) == tokens, line
        assert_is_inside(
            found["inside"],
            copy.deepcopy(model),
            source(line)["input_ids"],
            tokens,
        )
    expected = greedy_texts(site, lines, max_new_tokens=9)
    assert stock_translations(site.folder, lines, max_new_tokens=9) == expected
    answer = run_node(
        "page_engine.mjs",
        str(site.folder),
        "fp32",
        "{}",
        lines=["two hundred " * 40],
    )
    assert " 24" in answer["error"]


@pytest.mark.parametrize("write", [write_opus_folder, write_separate_opus_folder])
def test_opus_models_translate_in_both_engines(write: Callable, tmp_path: Path) -> None:
    write(tmp_path / "opus")
    model, source, target = converted("marian", tmp_path / "opus", tmp_path / "ours")
    assert source is target
    site = written(model, tmp_path / "ours")
    texts = [line.split() for line in SOURCES + TARGETS]
    lines = [
        *SOURCES,
        *TARGETS,
        "Ünknown žluťoučký 漢字 ™️ words …",
        "öß a balloon",
    ]
    lines += [
        " ".join(words[i : i + n])
        for n in range(2, 9)
        for words in texts
        for i in range(len(words) - n)
    ]
    lines = list(dict.fromkeys(lines))[:200]
    assert len(lines) == 200
    expected = [generated(site, line, num_beams=1)[0] for line in lines]
    decoded = target.batch_decode(expected, skip_special_tokens=True)
    assert stock_translations(site.folder, lines) == decoded
    found = translate(
        site.folder, lines[:2], num_beams=1
    )  # the page divides longer text into sentences
    assert list(map(token_ids, found)) == expected[:2]


@pytest.mark.parametrize(
    "name",
    [
        "model/onnx/decoder_model_merged.onnx",
        "model/tokenizer.json",
        "model/tokenizer_config.json",
    ],
)
def test_damaged_file_is_named(site: Site, tmp_path: Path, name: str) -> None:
    shutil.copytree(site.folder, tmp_path / "site")
    file = tmp_path / "site" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    answer = run_node("page_engine.mjs", str(tmp_path / "site"), "fp32", "{}", lines=LINES)
    assert answer["error"].startswith(f"{name} ")
    assert answer["found"] == []
