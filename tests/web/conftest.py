"""A tiny translator as a site, made once for all tests that use it."""

from pathlib import Path
from typing import NamedTuple

import pytest

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.web.site import write_site
from tests.interop.exports import require_onnx, write_model
from tests.web.tools import require_npm

EXAMPLES = ["two hundred", "thirty-four cats"]


class Site(NamedTuple):
    """A model, its folder, and the site made of it."""

    model: VanillaTransformerForConditionalGeneration
    source: Path
    folder: Path


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """With the runtime from npm, so that it works without a network. Its translations have at most 12 tokens."""
    require_onnx()
    folder = tmp_path_factory.mktemp("web")
    model = write_model(folder / "model")
    model.generation_config.update(num_beams=4, max_new_tokens=12)
    model.generation_config.save_pretrained(folder / "model")
    (folder / "model" / "README.md").write_text("---\nlanguage:\n- en\n- de\n---\n")
    write_site(folder / "model", folder / "site", runtime=require_npm(), examples=EXAMPLES)
    return Site(model, folder / "model", folder / "site")
