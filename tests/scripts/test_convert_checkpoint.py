"""`vanilla-transformer convert`: from a foreign checkpoint to a folder that `translate` loads."""

import json

import pytest
import torch
from transformers import MarianMTModel, MarianTokenizer

from tests.interop.checkpoints import fairseq
from tests.interop.checkpoints.torch_transformer import PYTORCH_TUTORIAL, AroundTorch
from tests.interop.foreign import SOURCES, write_m2m100_folder, write_opus_folder


@pytest.fixture(scope="module")
def opus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("opus")
    write_opus_folder(folder)
    return folder


def test_converted_folder_translates_like_the_peer(command, opus, tmp_path):
    status, out, err = command("convert", "--from", "marian", opus, tmp_path / "ours")
    assert (status, err) == (0, "") and "with its tokenizer" in out
    names = {path.name for path in (tmp_path / "ours").iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "source.spm",
        "target.spm",
    } <= names
    assert {"modeling_vanilla_transformer.py", "tokenizer_config.json", "vocab.json"} <= names
    assert list(tmp_path.iterdir()) == [tmp_path / "ours"]
    (tmp_path / "lines").write_text("\n".join([*SOURCES, ""]))
    arguments = (
        "--input",
        tmp_path / "lines",
        "--output",
        tmp_path / "out",
        "--device",
        "cpu",
        "--batch_size",
        "1",
    )
    assert command("translate", "--model", tmp_path / "ours", *arguments)[0] == 0
    peer, tokenizer = MarianMTModel.from_pretrained(opus), MarianTokenizer.from_pretrained(opus)
    with torch.inference_mode():
        rows = [peer.generate(**tokenizer(text, return_tensors="pt"))[0] for text in SOURCES]
    expected = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    assert (tmp_path / "out").read_text().splitlines() == expected


def test_convert_overwrites_only_when_asked(command, opus, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "thesis.tex").write_text("years of work")
    arguments = ("convert", "--from", "marian", opus, tmp_path / "there")
    status, out, err = command(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1) and "--overwrite" in err
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["thesis.tex"]
    assert command(*arguments, "--overwrite")[0] == 0
    assert (tmp_path / "there" / "model.safetensors").is_file() and len(
        list(tmp_path.iterdir())
    ) == 1
    assert not (tmp_path / "there" / "thesis.tex").exists()


def test_convert_keeps_a_folder_that_contains_its_source(command, opus):
    status, _, err = command("convert", "--from", "marian", opus, opus.parent, "--overwrite")
    assert (
        (status, err.count("\n")) == (2, 1)
        and "contains the model" in err
        and (opus / "config.json").is_file()
    )


def test_convert_keeps_the_old_folder_on_failure(command, opus, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "model.safetensors").write_text("old")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text(json.dumps({"model_type": "marian"}))
    status, _, err = command(
        "convert", "--from", "marian", tmp_path / "broken", tmp_path / "old", "--overwrite"
    )
    assert (status, err.count("\n")) == (2, 1)
    assert (tmp_path / "old" / "model.safetensors").read_text() == "old"


WRONG_VALUES = [
    "heads=two",
    "heads=2.5",
    "heads=",
    "norm_first=7",
    "layer_norm_eps=nan",
    "pad_token_id=true",
]


def test_convert_reads_values_as_the_type_of_the_option(command, tmp_path):
    write_m2m100_folder(tmp_path / "m2m")
    languages = ("--set", "source_language=no", "--set", "target_language=no")
    assert (
        command("convert", "--from", "m2m100", tmp_path / "m2m", tmp_path / "ours", *languages)[0]
        == 0
    )
    settings = json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text())
    assert (settings["src_lang"], settings["tgt_lang"]) == ("no", "no")
    model = AroundTorch(PYTORCH_TUTORIAL, norm_first=True, layer_norm_eps=1e-3)
    torch.save(model.state_dict(), tmp_path / "2020")
    options = [
        f"--set={value}"
        for value in ("heads=4", "layer_norm_eps=1e-3", "norm_first=yes", "bos_token_id=4")
    ]
    options += [
        f"--set={value}" for value in ("scale_embedding=true", "pad_token_id=1", "eos_token_id=3")
    ]
    assert (
        command("convert", "--from", "torch", tmp_path / "2020", tmp_path / "torch", *options)[0]
        == 0
    )
    config = json.loads((tmp_path / "torch" / "config.json").read_text())
    assert (config["layer_norm_eps"], config["layer_norm_position"], config["bos_token_id"]) == (
        1e-3,
        "pre",
        4,
    )
    fairseq.save(tmp_path / "in" / "model.pt", fairseq.weights(23, 29))
    names = {"en": [f"s{n}" for n in range(19)], "de": [f"t{n}" for n in range(25)]}
    fairseq.write_dictionaries(tmp_path / "2021", names)
    checkpoint, data = tmp_path / "in" / "model.pt", tmp_path / "2021"
    status, out, _ = command(
        "convert", "--from", "fairseq", checkpoint, tmp_path / "fs", "--set", f"data={data}"
    )
    assert status == 0 and "with its tokenizer" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "heads"), "NAME=VALUE"),
        *(
            (("--set", f"{name}=8"), f"{name}: marian has no such option")
            for name in ("heads", "source", "overwrite")
        ),
        *((("--from", "torch", "--set", value), value.partition("=")[0]) for value in WRONG_VALUES),
    ],
)
def test_convert_reports_wrong_options_in_one_line(command, opus, tmp_path, arguments, message):
    status, _, err = command("convert", "--from", "marian", opus, tmp_path / "ours", *arguments)
    assert (status, err.count("\n")) == (2, 1) and message in err
    assert not (tmp_path / "ours").exists()
