"""Marian's own files. Marian cannot be installed with the tests. The references are the NumPy restatement, with the
formulas of Marian's source, and CTranslate2's converter of the same files.
"""

import math
import re
from pathlib import Path

import ctranslate2
import numpy as np
import pytest
import sacremoses
import sentencepiece
import torch
import yaml

from hf_vanilla_transformer.interop.marian_npz import NEVER, from_marian_npz
from tests.interop.checkpoints import D
from tests.interop.checkpoints.marian_npz import PEER, restated, save, weights
from tests.interop.conftest import Compare
from tests.interop.foreign import (
    SOURCES,
    TARGETS,
    Record,
    assert_fields,
    converted,
    installed,
    learnt_codes,
    train_sentencepiece,
)
from tests.model_helpers import assert_near, error_of


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    return tmp_path / "model.npz"


@pytest.mark.parametrize("tying", ["all", "src", "none"])
@pytest.mark.parametrize("separate", [False, True])
@torch.no_grad()
def test_marian_npz_gives_its_logits(
    tying: str, separate: bool, model_file: Path, compared: Compare
) -> None:
    target_size = 29 if tying == "none" else 23
    arrays = weights((23, target_size), tying)
    save(model_file, arrays, separate=separate)
    ours, tokenizer, _ = compared(PEER, "marian-npz", model_file, restated(arrays))
    assert tokenizer is None
    assert_fields(
        ours.config,
        pad_token_id=target_size,
        decoder_start_token_id=target_size,
        share_encoder_decoder_embeddings=tying != "none",
        tie_word_embeddings=tying == "all",
    )
    # the added padding starts the decoder and is never generated
    written = torch.tensor([[target_size, 3]])
    added = ours(input_ids=torch.tensor([[5, 0]]), decoder_input_ids=written).logits[
        ..., target_size:
    ]
    assert added.numel()
    assert added.max() < NEVER / 2


def test_marian_npz_of_task_transformer_base_prenorm(model_file: Path, compared: Compare) -> None:
    arrays = {
        f"{name}_pre" if "_ln_" in name else name: array
        for name, array in weights((23, 23)).items()
    }
    generator = np.random.default_rng(9)
    for name in (
        f"{stack}_top_ln_{part}" for stack in ("encoder", "decoder") for part in ("scale", "bias")
    ):
        arrays[name] = generator.normal(size=(1, D)).astype(np.float32)
    save(
        model_file,
        arrays,
        transformer_preprocess="n",
        transformer_postprocess="da",
        transformer_postprocess_top="n",
    )
    compared(PEER, "marian-npz", model_file, restated(arrays, pre_norm=True))


@pytest.mark.parametrize(
    "name", ["transformer_train_positions", "transformer_train_position_embeddings"]
)
def test_marian_npz_with_learned_positions_and_relu(
    name: str, model_file: Path, compared: Compare
) -> None:
    arrays = weights((23, 23)) | {
        "Wpos": np.random.default_rng(1).normal(size=(16, D)).astype(np.float32)
    }
    save(model_file, arrays, transformer_ffn_activation="relu", **{name: True})
    theirs = restated(
        arrays,
        position=lambda index, _: arrays["Wpos"][index].astype(float),
        scale=False,
        activation="relu",
    )
    compared(PEER, "marian-npz", model_file, theirs)


@pytest.mark.parametrize(
    ("version", "exact"),
    [
        ("v1.12.42 8f2ce30 2024-05-01", True),
        ("v1.12.1", True),
        ("1.13.0", True),
        ("v2.0.0", True),
        ("v10.1.0", True),
        ("v1.12.0 65bf82f 2023-02-21", False),
        ("v1.11.99", False),
        ("v1.9.0", False),
        (None, False),
    ],
)
def test_marian_npz_gelu_is_exact_in_versions_since_march_2023(version, exact, model_file):
    save(model_file, weights((23, 23)), transformer_ffn_activation="gelu", version=version)
    model = from_marian_npz(model_file).model
    x = torch.linspace(-3, 3, 40)
    expected = x * (1 + torch.erf(x / math.sqrt(2))) / 2 if exact else x * torch.sigmoid(1.702 * x)
    torch.testing.assert_close(model.model.encoder.layers[0].activation(x), expected)


TOKENS = [
    "</s>",
    "<unk>",
    "▁a",
    "▁dog",
    "yes",
    "null",
    "1",
    "'",
    '"',
    "#",
    "a: b",
    "~",
    "▁runs",
    "é",
    "<<",
    "=",
]

LINE_ENDS = ["fo\x85o", "a\u2028b", "c\u2029", "\x7f", "\u2028", "\x96x", "é", "\ue000"]


@pytest.mark.parametrize("style", ["plain", "question", "quoted"])
def test_marian_npz_vocabulary_with_line_ends_of_unicode(
    style: str, model_file: Path, tmp_path: Path
) -> None:
    """yaml-cpp, which writes Marian's vocabularies, leaves these characters bare. CTranslate2 reads them too."""
    tokens = ["</s>", "<unk>", *LINE_ENDS]
    spelt = {"plain": "{}: {}", "question": '? "{}"\n: {}', "quoted": '"{}": {}'}[style]
    lines = [spelt.format(token, number) for number, token in enumerate(tokens)]
    vocabulary = tmp_path / "vocab.yml"
    vocabulary.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")
    save(model_file, weights((len(tokens), len(tokens))))
    tokenizer = from_marian_npz(model_file, source_vocabulary=vocabulary).tokenizer
    assert tokenizer is not None
    assert tokenizer.convert_tokens_to_ids(tokens) == [*range(len(tokens))]


def write_vocabulary(path: Path, tokens: list[str]) -> Path:
    """As marian-vocab does: YAML with quotes."""
    ids = {token: number for number, token in enumerate(tokens)}
    path.write_text(yaml.safe_dump(ids, sort_keys=False, allow_unicode=True))
    return path


@torch.no_grad()
def test_marian_npz_gives_scores_of_ctranslate2(model_file: Path, tmp_path: Path) -> None:
    save(model_file, weights((len(TOKENS), len(TOKENS))))
    vocabulary = write_vocabulary(tmp_path / "vocab.yml", TOKENS)
    converter = ctranslate2.converters.MarianConverter(str(model_file), [str(vocabulary)] * 2)
    engine = ctranslate2.Translator(converter.convert(str(tmp_path / "ct2")), "cpu")
    ours, tokenizer, _ = converted(
        "marian-npz", model_file, tmp_path / "ours", source_vocabulary=vocabulary
    )
    # CTranslate2 uses transformers' sinusoids instead of Marian's, and another epsilon.
    for stack in (ours.model.encoder, ours.model.decoder):
        stack.config.position_encoding_type = "sinusoidal_split"
    for module in ours.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-5
    source = ["▁a", "▁dog", "null", "é"]
    target = ["yes", "1", "▁runs", "'"]
    scored = engine.score_batch([source], [target])[0].log_probs
    ids = tokenizer(" ".join(source), return_tensors="pt")
    written = tokenizer(" ".join(target), return_tensors="pt")["input_ids"]
    assert ids["input_ids"].tolist() == [[TOKENS.index(token) for token in source] + [0]]
    read = ours.prepare_decoder_input_ids_from_labels(written)
    log_probs = ours(**ids, decoder_input_ids=read).logits.log_softmax(-1)[0]
    actual = log_probs.gather(1, written[0][:, None])[:, 0]
    assert_near(actual, torch.tensor(scored), 1e-4)


def test_marian_npz_folder_of_opus(tmp_path: Path) -> None:
    """decoder.yml, a vocabulary of both languages, and the SentencePiece models."""
    folder = tmp_path / "opus"
    folder.mkdir()
    pieces = train_sentencepiece(folder / "source.spm", SOURCES) + train_sentencepiece(
        folder / "target.spm", TARGETS
    )
    tokens = [
        "</s>",
        "<unk>",
        *sorted(set(pieces) - {"</s>", "<unk>", "<s>", "▁dog"}),
    ]
    write_vocabulary(folder / "opus.vocab.yml", tokens)
    save(folder / "opus.npz", weights((len(tokens), len(tokens))))
    decoder = {
        "models": ["/home/me/opus.npz"],
        "vocabs": ["opus.vocab.yml", "opus.vocab.yml"],
        "beam-size": 6,
        "normalize": 0.6,
    }
    (folder / "decoder.yml").write_text(yaml.safe_dump(decoder))
    ours, tokenizer, target = converted("marian-npz", folder, tmp_path / "ours")
    assert_fields(
        ours.generation_config,
        num_beams=6,
        length_penalty=0.6,
        decoder_start_token_id=len(tokens),
    )
    ids = {token: number for number, token in enumerate(tokens)}

    def ids_of(side: str, text: str) -> list[int]:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        return [ids.get(piece, 1) for piece in processor.encode(text, out_type=str)] + [0]

    for text in [*SOURCES, "Žluťoučký dog"]:
        assert tokenizer(text)["input_ids"] == ids_of("source", text)
    for text in TARGETS:
        expected = ids_of("target", text)
        assert target(text_target=text)["input_ids"] == expected
        assert (
            target.decode([len(tokens), *expected, len(tokens)], skip_special_tokens=True) == text
        )


def test_marian_npz_takes_raw_text_with_the_codes_of_an_opus_release(
    model_file: Path, tmp_path: Path, record_property: Record
) -> None:
    """A vocabulary of both sides, and codes of each, which are applied after Moses. Some merges are no tokens."""
    words = {}
    for side, lines in (("source", SOURCES), ("target", TARGETS)):
        moses = sacremoses.MosesTokenizer(lang="en")
        text = [
            moses.tokenize(
                line,
                aggressive_dash_splits=True,
                return_str=True,
            )
            for line in lines * 3
        ]
        bpe = learnt_codes(tmp_path / f"{side}.bpe", text, 60)
        words[side] = [bpe.process_line(line).split() for line in text]
    tokens = [
        "</s>",
        "<unk>",
        *sorted({token for side in words.values() for line in side for token in line}),
    ]
    save(model_file, weights((len(tokens), len(tokens))))
    options = {
        "source_vocabulary": write_vocabulary(tmp_path / "vocab.yml", tokens),
        "codes": tmp_path / "source.bpe",
        "target_codes": tmp_path / "target.bpe",
        "target_language": "de",
    }
    ours, tokenizer, target = converted("marian-npz", model_file, tmp_path / "ours", **options)
    ids = {token: number for number, token in enumerate(tokens)}
    for text, expected in zip(SOURCES, words["source"], strict=False):
        if not set("“”’") & set(text):  # a normalisation of punctuation comes first
            assert tokenizer(text)["input_ids"] == [*map(ids.get, expected), 0]
    for text, expected in zip(TARGETS[:2], words["target"], strict=False):
        written = target(text)["input_ids"]
        assert written == [*map(ids.get, expected), 0]
        assert target.decode([len(tokens), *written], skip_special_tokens=True) == re.sub(
            " ([.,!])", r"\1", text
        )
    assert ours.config.pad_token_id == len(tokens) == tokenizer.pad_token_id
    record_property("tokens", installed("subword-nmt"))
    (tmp_path / "source.bpe").write_text("#version: 0.1\na b\n")
    assert "source.bpe" in error_of(from_marian_npz, model_file, **options)


def write_training_folder(folder: Path) -> None:
    """The files of `marian --model model.npz`: the model, its optimizer, and options of decoding."""
    save(folder / "model.npz", weights((len(TOKENS), len(TOKENS))))
    write_vocabulary(folder / "vocab.yml", TOKENS)
    np.savez(folder / "model.npz.optimizer.npz", adam_mt=np.zeros(9, dtype=np.float32))
    decoder = {
        "models": ["/home/me/model.npz"],
        "vocabs": ["vocab.yml", "vocab.yml"],
        "beam-size": 12,
        "normalize": 0,
        "word-penalty": 0.2,
    }
    (folder / "model.npz.decoder.yml").write_text(yaml.safe_dump(decoder))


@pytest.mark.parametrize("name", ["", "model.npz"])
def test_marian_npz_folder_of_a_training(name: str, tmp_path: Path) -> None:
    write_training_folder(tmp_path / "trained")
    found = from_marian_npz(tmp_path / "trained" / name)
    assert found.tokenizer is not None
    assert found.tokenizer("yes null")["input_ids"] == [
        TOKENS.index("yes"),
        TOKENS.index("null"),
        0,
    ]
    assert_fields(
        found.model.generation_config,
        num_beams=12,
        length_penalty=0.0,
    )
    assert "--word-penalty" in "; ".join(found.notes)


@pytest.mark.parametrize("allowed", [False, True])
def test_marian_npz_never_generates_unknown_tokens_unless_allowed(
    allowed: bool, model_file: Path
) -> None:
    arrays = weights((len(TOKENS), len(TOKENS)))
    arrays["decoder_ff_logit_out_b"][0, 1] = 50  # <unk> has the highest score everywhere
    save(model_file, arrays)
    if allowed:
        model_file.with_name("decoder.yml").write_text("allow-unk: true\nbeam-size: 2\n")
    model = from_marian_npz(model_file).model
    written = model.generate(torch.tensor([[5, 6, 0]]), max_new_tokens=5)
    assert bool((written == 1).any()) is allowed


def test_marian_npz_with_sentencepiece_vocabularies(
    model_file: Path, tmp_path: Path, record_property: Record
) -> None:
    vocabularies = [tmp_path / f"vocab.{side}.spm" for side in ("en", "de")]
    sizes = [
        len(
            train_sentencepiece(
                file,
                lines,
                size,
                eos_id=0,
                unk_id=1,
                bos_id=-1,
            )
        )
        for file, lines, size in zip(
            vocabularies,
            (SOURCES, TARGETS),
            (70, 75),
            strict=True,
        )
    ]
    save(
        model_file,
        weights(tuple(sizes), "none"),
        vocabs=[file.name for file in vocabularies],
    )
    _, tokenizer, for_target = converted("marian-npz", model_file, tmp_path / "ours")
    source, target = (
        sentencepiece.SentencePieceProcessor(model_file=str(file)) for file in vocabularies
    )
    for text in SOURCES:
        assert tokenizer(text)["input_ids"] == [*source.encode(text), 0]
    for text in TARGETS:
        ids = [*target.encode(text), 0]
        assert for_target(text_target=text)["input_ids"] == ids
        assert for_target.decode(ids, skip_special_tokens=True) == text
    record_property("tokens", installed("sentencepiece"))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("type", "s2s"),
        ("transformer_preprocess", "n"),
        ("transformer_postprocess", "da"),
        ("transformer_postprocess", "dar"),
        ("transformer_postprocess_emb", "nd"),
        ("transformer_postprocess_top", "n"),
        ("transformer_decoder_autoreg", "average-attention"),
        ("transformer_no_projection", True),
        ("transformer_ffn_depth", 3),
        ("transformer_tied_layers", [1, 1]),
        ("transformer_ffn_activation", "prelu"),
        ("lemma_dim_emb", 8),
        ("transformer_disable_position_embeddings", True),
        ("right_left", True),
        ("input_reorder", [1, 0]),
        ("vocabs", ["vocab.fsv", "vocab.fsv"]),
    ],
)
def test_marian_npz_refuses_other_architectures(option, value, model_file, record_property):
    save(model_file, weights((9, 9)), **{option: value})
    spelt = f"--{option.replace('_', '-')}"
    assert f"{spelt}=" in error_of(from_marian_npz, model_file)
    record_property("refused", f"{spelt} {value}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "</s>: 0\n<unk>: 1\n" + "".join(f"w{n}: {n}\n" for n in range(2, 12)),
            "vocab.yml: 13 .* 10",
        ),
        ("</s>: 0\n<unk>: 5\n", "vocab.yml"),
        ("a: 0\nb: 1\n", "</s>"),
        ("- a\n- b\n", "vocab.yml"),
        ("a: [", "vocab.yml"),
        ("!!python/object/apply:os.system ['true']: 0\n", "vocab.yml"),
    ],
)
def test_marian_npz_refuses_inconsistent_vocabularies(
    text: str, message: str, model_file: Path
) -> None:
    save(model_file, weights((9, 9)))
    vocabulary = model_file.with_name("vocab.yml")
    vocabulary.write_text(text)
    assert re.search(message, error_of(from_marian_npz, model_file, source_vocabulary=vocabulary))


def test_marian_npz_refuses_sentencepiece_without_a_vocabulary(model_file: Path) -> None:
    save(model_file, weights((9, 9)))
    assert "vocabular" in error_of(
        from_marian_npz, model_file, source_sentencepiece=model_file.with_name("a.spm")
    )
