"""`export --to web`: the site's text about its model, and refusals before any writing."""

import json
from pathlib import Path

import pytest

from hf_vanilla_transformer.utils.errors import UserError
from hf_vanilla_transformer.web import page_files, site
from hf_vanilla_transformer.web.site import PACKAGES, _local_runtime, search_settings, write_site
from tests.interop.exports import write_model
from tests.model_helpers import error_of, tiny_model


@pytest.mark.usefixtures("limit_of_the_package")
def test_search_settings_are_those_of_generate() -> None:
    model = tiny_model()
    paper = {
        "num_beams": 4,
        "length_penalty": 0.6,
        "formula": "gnmt",
        "max_length_over_source": 50,
    }
    found = search_settings(model)
    assert paper.items() <= found.items()
    assert "max_new_tokens" not in found
    assert "max_positions" not in found
    assert (
        found["decoder_start_token_id"],
        found["eos_token_ids"],
        found["suppressed_tokens"],
    ) == (0, [2], [])

    model = tiny_model(position_encoding_type="learned", max_position_embeddings=64)
    model.generation_config.update(
        length_penalty=1.0, num_beams=6, bad_words_ids=[[1]], forced_eos_token_id=2
    )
    model.generation_config.update(max_length=40, suppress_tokens=[3], early_stopping=True)
    found = search_settings(model)
    other = {
        "num_beams": 6,
        "length_penalty": 1.0,
        "formula": "power",
        "early_stopping": True,
        "max_new_tokens": 39,
    }
    assert other.items() <= found.items()
    assert found["suppressed_tokens"] == [1, 3]
    assert found["forced_eos_token_id"] == 2
    assert found["max_positions"] == 64


def test_site_has_the_page_the_graphs_and_the_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other bytes in place of the graphs, which take seconds, and of the runtime, which is a download."""

    def write_graphs(model: object, source: Path, output: Path, dtypes: object) -> dict[str, int]:
        output.mkdir(parents=True)
        (output / "graphs").write_bytes(bytes(2_740_000))
        return {"fp32": 2_740_000}

    runtime = tmp_path / "installed.wasm"
    runtime.write_bytes(bytes(1_000_000))
    monkeypatch.setattr(site, "write", write_graphs)
    monkeypatch.setattr(site, "self_test", lambda *arguments, **settings: "")
    monkeypatch.setattr(site, "_local_runtime", lambda folder: {"wasm": runtime})
    write_model(tmp_path / "model")
    output = tmp_path / "site"
    report = write_site(
        tmp_path / "model", output, dtypes=["fp32"], runtime=tmp_path, examples=["two"]
    )

    description = json.loads((output / "site.json").read_text(encoding="utf-8"))
    expected = page_files(description)
    for name, content in expected.items():
        assert (output / name).read_bytes() == content
    assert description["examples"] == ["two"]
    assert description["dtypes"]["fp32"]["bytes"] == 2_740_000
    assert (output / "runtime" / "installed.wasm").read_bytes() == runtime.read_bytes()
    total = 3_740_000 + sum(map(len, expected.values()))
    assert report.startswith(f"{output}: {total / 1e6:.1f} MB (model: fp32 2.7 MB)")


def test_site_does_not_replace_the_model(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    for output in (tmp_path / "model", tmp_path):
        assert "output " in error_of(write_site, tmp_path / "model", output, overwrite=True)
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_site_overwrites_only_when_asked(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "thesis.tex").write_text("years of work")
    assert "--overwrite" in error_of(write_site, tmp_path / "model", tmp_path / "site")
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["thesis.tex"]


def test_runtime_of_the_tests_is_the_pinned_one(repository: Path) -> None:
    installed = (
        (repository / "tests" / "web" / "npm_packages.txt").read_text(encoding="utf-8").split()
    )
    assert set(PACKAGES) <= set(installed)


def test_runtime_must_be_the_pinned_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="npm install") as missing:
        _local_runtime(tmp_path)
    assert all(package in str(missing.value) for package in PACKAGES)
    file = tmp_path / "node_modules" / "onnxruntime-web" / "dist" / "ort.wasm.bundle.min.mjs"
    file.parent.mkdir(parents=True)
    file.write_text("another version")
    assert "onnxruntime-web@1.30.0" in error_of(_local_runtime, tmp_path)
