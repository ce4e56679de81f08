"""In Node: transformers.js's stock pipeline and the page's engine translate a site's model as `generate` does."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

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
from tests.interop.foreign import SOURCES, TARGETS, converted, write_opus_folder, write_two_tokenizers
from tests.interop.test_search_settings import OF_ONNX, SETTINGS
from tests.interop.two_vocabularies import write_separate_opus_folder
from tests.paper_inside import assert_is_inside
from tests.web.conftest import Site
from tests.web.tools import require_npm, run_node

pytestmark = pytest.mark.slow

TEXTS = [*LINES, "  two   hundred ", "Größe </s> <pad> 東京", "a", "x y z " * 20]


def translate(folder: Path, lines: list[str], dtype: str = "fp32", **options) -> list[dict]:
    answer = run_node("page_engine.mjs", str(folder), dtype, json.dumps(options), lines=lines)
    assert "error" not in answer, answer["error"]
    return answer["found"]


def generated(site: Site, line: str, **settings) -> tuple[list[int], torch.Tensor]:
    """Tokens of the best hypothesis without the start token, and its score."""
    source, _ = load_tokenizers(site.source)
    output = site.model.generate(**source(line, return_tensors="pt"), return_dict_in_generate=True, **settings)
    return output.sequences[0, 1:].tolist(), getattr(output, "sequences_scores", [None])[0]


def test_stock_pipeline_gives_our_greedy_translations(site: Site) -> None:
    _, target = load_tokenizers(site.source)
    lines = [line for line in TEXTS if "</s>" not in line]  # which the library takes for a special token
    answer = run_node(
        "stock_pipeline.mjs", str(site.folder / "model"), "fp32", "{}", lines=lines
    )  # ends after 12 tokens
    expected = [target.decode(generated(site, line, num_beams=1)[0], skip_special_tokens=True) for line in lines]
    assert answer["found"] == expected and len(set(expected)) > 2


@pytest.mark.parametrize("beams", [1, 4])
def test_engine_finds_our_best_hypothesis(site: Site, beams: int) -> None:
    for line, found in zip(TEXTS, translate(site.folder, TEXTS, num_beams=beams), strict=True):
        tokens, score = generated(site, line.strip(), num_beams=beams)
        assert [token["id"] for token in found["tokens"]] == tokens, line
        if score is not None:
            assert found["hypotheses"][0]["score"] == pytest.approx(float(score), abs=1e-4)


def test_engine_shows_the_inside_as_the_paper_has_it(site: Site) -> None:
    (found,) = translate(site.folder, [LINES[2]], inside=True)
    ids = [[token["id"] for token in found[side]] for side in ("source", "tokens")]
    assert_is_inside(found["inside"], copy.deepcopy(site.model), *ids)
    assert "inside" not in translate(site.folder, [LINES[2]])[0]


@torch.no_grad()
def test_engine_gives_our_probabilities_and_attention(site: Site) -> None:
    source, target = load_tokenizers(site.source)
    (found,) = translate(site.folder, [LINES[2]], num_beams=2, alternatives=3)
    ids = [token["id"] for token in found["tokens"]]
    site.model.set_attn_implementation("eager")
    batch, decoder_input_ids = source(LINES[2], return_tensors="pt"), torch.tensor([[0, *ids[:-1]]])
    output = site.model(**batch, decoder_input_ids=decoder_input_ids, output_attentions=True)
    probabilities = output.logits[0].softmax(dim=-1)  # (T, V)
    own = probabilities.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert torch.tensor(found["probabilities"]).sub(own).abs().max() < 1e-4
    values, best = probabilities.topk(3)
    assert [[each["id"] for each in row] for row in found["alternatives"]] == best.tolist()
    shown = torch.tensor([[each["probability"] for each in row] for row in found["alternatives"]])
    assert (shown - values).abs().max() < 1e-4
    attention = torch.tensor(found["attention"])  # (L, H, T, S)
    assert (attention - torch.cat(output.cross_attentions)).abs().max() < 6e-4  # three decimals
    assert [token["id"] for token in found["source"]] == batch["input_ids"][0].tolist()
    assert "".join(token["text"] for token in found["source"][:-1]) == LINES[2]
    assert found["text"] == target.decode(ids, skip_special_tokens=True).strip()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_engines_apply_generation_settings(settings: dict, beams: int, site: Site, tmp_path: Path) -> None:
    """The page's engine in a beam search, and transformers.js in a greedy one."""
    if settings not in OF_ONNX:
        pytest.skip("refused")
    settings = settings | {"max_new_tokens": 7, "num_beams": beams}
    model = copy.deepcopy(site.model)
    model.generation_config.update(**settings)
    shutil.copytree(site.folder, tmp_path / "site")
    path = tmp_path / "site" / "site.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"search": search_settings(model)}))
    changed = Site(model, site.source, tmp_path / "site")
    for line, found in zip(LINES, translate(changed.folder, LINES), strict=True):
        tokens, score = generated(changed, line)
        assert [token["id"] for token in found["tokens"]] == tokens, line
        if score is not None:
            assert found["hypotheses"][0]["score"] == pytest.approx(float(score), abs=1e-4)
    if beams == 1:
        path = tmp_path / "site" / "model" / "generation_config.json"
        path.write_text(json.dumps(transformers_js.generation_settings(model)))
        stock = str(tmp_path / "site" / "model"), "fp32", '{"max_new_tokens": 7}'
        answer = run_node("stock_pipeline.mjs", *stock, lines=LINES)
        _, target = load_tokenizers(site.source)
        assert answer["found"] == [
            target.decode(generated(changed, line)[0], skip_special_tokens=True) for line in LINES
        ]


def test_engine_goes_on_from_a_prefix(site: Site) -> None:
    prefix = [17, 23, 42]
    (found,) = translate(site.folder, LINES[:1], num_beams=4, prefix=prefix)
    settings = {"num_beams": 4, "decoder_input_ids": torch.tensor([[0, *prefix]]), "max_new_tokens": 12 - 3}
    tokens, score = generated(site, LINES[0], **settings)
    assert [token["id"] for token in found["tokens"]] == tokens and tokens[:3] == prefix
    assert found["hypotheses"][0]["score"] == pytest.approx(float(score), abs=1e-4)


def test_engine_ends_at_an_end_token(site: Site) -> None:
    (found,) = translate(site.folder, LINES[:1], num_beams=4, prefix=[17, 2])
    assert [token["id"] for token in found["tokens"]] == found["hypotheses"][0]["tokens"] == [17, 2]
    assert len(found["hypotheses"]) == 1 and found["parts"][0]["target"] == found["text"]


def test_engine_keeps_the_layout_of_a_text(site: Site) -> None:
    text = f"{LINES[0]}\n\n - {LINES[1]}! {LINES[0]}?\r\n{{name}} https://x.org/a\t{LINES[2]} \n"
    (found,) = translate(site.folder, [text])
    single = [LINES[0], f"{LINES[1]}!", f"{LINES[0]}?", LINES[2]]
    first, second, third, fourth = [each["text"] for each in translate(site.folder, single)]
    assert "".join(part["source"] for part in found["parts"]) == text
    expected = f"{first}\n\n - {second} {third}\r\n{{name}} https://x.org/a\t{fourth} \n"
    assert "".join(part["target"] for part in found["parts"]) == expected
    assert found["parts"][found["sentence"]]["source"] == LINES[2]
    (found,) = translate(site.folder, [text], caret=len(LINES[0]) + 8)
    assert found["parts"][found["sentence"]]["source"] == f"{LINES[1]}!"


def test_engines_normalise_their_sources(site: Site) -> None:
    line = LINES[0]
    variants = [
        line.replace(" ", "\u00a0"),
        "\ufeff" + line,
        "".join(chr(ord(c) + 0xFEE0) if c > " " else c for c in line),
    ]
    found = translate(site.folder, [line, *variants])
    assert len({(answer["text"], len(answer["tokens"])) for answer in found}) == 1 and found[0]["text"]
    assert [token["id"] for token in found[1]["source"]] == [token["id"] for token in found[0]["source"]]
    model = str(site.folder / "model")
    assert len(set(run_node("stock_pipeline.mjs", model, "fp32", "{}", lines=[line, *variants])["found"])) == 1


def test_engine_tree_holds_the_hypotheses(site: Site) -> None:
    (found,) = translate(site.folder, LINES[:1], num_beams=4)
    nodes = found["tree"]

    def path(index: int) -> list[int]:
        return [] if index < 0 else [*path(nodes[index]["parent"]), nodes[index]["id"]]

    best = next(index for index, node in enumerate(nodes) if node["state"] == "best")
    tokens = found["hypotheses"][0]["tokens"]
    assert path(best) == tokens and all(node["parent"] < index for index, node in enumerate(nodes))
    penalty = float(LengthPenalty(0.6, "gnmt")(torch.tensor(float(len(tokens)))))
    assert found["hypotheses"][0]["score"] == pytest.approx(nodes[best]["log_probability"] / penalty, abs=1e-6)
    widths = [sum(len(path(index)) == length for index in range(len(nodes))) for length in range(1, 4)]
    assert all(width >= 4 for width in widths)


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
        assert [one["text"] for one in page["predictions"]] == [one.text for one in candidates]
        shares = [one["probability"] for one in page["predictions"]]
        assert shares == pytest.approx([one.probability for one in candidates], abs=1e-3)
    assert [page["text"] for page in found[1:]] == ["K IH T AH N", "W ER L D"]


def test_engine_ignores_blank_text(site: Site) -> None:
    for found in translate(site.folder, ["", "  \n "]):
        assert found["text"] == "" and found["tokens"] == [] and found["hypotheses"] == []


def test_two_vocabularies_and_learned_positions_translate_in_both_engines(tmp_path: Path) -> None:
    require_onnx()
    fields = {"share_encoder_decoder_embeddings": False, "vocab_size": 320, "decoder_vocab_size": 330}
    positions = {"position_encoding_type": "learned", "max_position_embeddings": 24}
    model = write_model(tmp_path / "model", **fields, **positions)
    model.generation_config.update(num_beams=4)
    model.generation_config.save_pretrained(tmp_path / "model")
    _, target = write_two_tokenizers(tmp_path / "model")
    write_site(tmp_path / "model", tmp_path / "site", runtime=require_npm(), dtypes=["fp32"])
    site = Site(model, tmp_path / "model", tmp_path / "site")
    lines = [LINES[0], "a dog"]
    for line, found in zip(lines, translate(site.folder, lines, inside=True), strict=True):
        tokens, _ = generated(site, line, num_beams=4)
        assert [token["id"] for token in found["tokens"]] == tokens, line
        source = load_tokenizers(site.source)[0](line)["input_ids"]
        assert_is_inside(found["inside"], copy.deepcopy(model), source, tokens)
    answer = run_node("stock_pipeline.mjs", str(site.folder / "model"), "fp32", '{"max_new_tokens": 9}', lines=lines)
    expected = [generated(site, line, num_beams=1, max_new_tokens=9)[0] for line in lines]
    assert answer["found"] == target.batch_decode(expected, skip_special_tokens=True)
    answer = run_node("page_engine.mjs", str(site.folder), "fp32", "{}", lines=["two hundred " * 40])
    assert " 24" in answer["error"]


@pytest.mark.parametrize("write", [write_opus_folder, write_separate_opus_folder])
def test_opus_models_translate_in_both_engines(write: Callable, tmp_path: Path) -> None:
    require_onnx()
    write(tmp_path / "opus")
    model, source, target = converted("marian", tmp_path / "opus", tmp_path / "ours")
    assert source is target
    write_site(tmp_path / "ours", tmp_path / "site", runtime=require_npm(), dtypes=["fp32"])
    site = Site(model, tmp_path / "ours", tmp_path / "site")
    lines = [*SOURCES, *TARGETS, "Ünknown žluťoučký 漢字 ™️ words …", "öß a balloon"]
    texts = [line.split() for line in SOURCES + TARGETS]
    lines += [" ".join(words[i : i + n]) for n in range(2, 9) for words in texts for i in range(len(words) - n)]
    lines = list(dict.fromkeys(lines))[:200]
    assert len(lines) == 200
    expected = [generated(site, line, num_beams=1)[0] for line in lines]
    answer = run_node("stock_pipeline.mjs", str(site.folder / "model"), "fp32", "{}", lines=lines)
    assert answer["found"] == target.batch_decode(expected, skip_special_tokens=True)
    found = translate(site.folder, lines[:2], num_beams=1)  # the page divides longer text into sentences
    assert [[token["id"] for token in line["tokens"]] for line in found] == expected[:2]


@pytest.mark.parametrize(
    "name", ["model/onnx/decoder_model_merged.onnx", "model/tokenizer.json", "model/tokenizer_config.json"]
)
def test_damaged_file_is_named(site: Site, tmp_path: Path, name: str) -> None:
    shutil.copytree(site.folder, tmp_path / "site")
    file = tmp_path / "site" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    answer = run_node("page_engine.mjs", str(tmp_path / "site"), "fp32", "{}", lines=LINES)
    assert answer["error"].startswith(f"{name} ") and answer["found"] == []
