"""A static folder that translates in the browser: the page, the model in transformers.js's layout, the runtime."""

import base64
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..generation_vanilla_transformer import ALPHA, BEAMS, MAX_LENGTH_OVER_SOURCE
from ..inference.languages import model_languages
from ..interop.exporting import load_translator, refuse_languages
from ..interop.search_settings import (
    PAGE,
    banned_tokens,
    ends,
    longest,
    search_differences,
    shortest,
)
from ..interop.self_test import self_test
from ..interop.transformers_js import DTYPES, GRAPHS, write
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..text.source_form import form_note
from ..text.token_kinds import tokenizer_task
from ..text.tokenizer_files import load_tokenizers
from ..utils.atomic_write import new_folder, require_apart
from ..utils.errors import UserError
from .page import page_facts, page_files

# The libraries of the page, pinned: the npm package with its version, the file in it, and the hash (SRI) of that file.
_HOST = "https://cdn.jsdelivr.net/npm"
_ONNXRUNTIME = "onnxruntime-web@1.30.0"
_TOKENIZERS = "@huggingface/tokenizers@0.2.0"
_RUNTIME = {
    "onnxruntime": (
        _ONNXRUNTIME,
        "dist/ort.wasm.bundle.min.mjs",
        "sha384-PLWz+nHEVHpjwBsO0YVdvQj6n5814Iv8E3b8FG0Rp/uIAtjFMCKOpP66iPzedrIG",
    ),
    "wasm": (
        _ONNXRUNTIME,
        "dist/ort-wasm-simd-threaded.wasm",
        "sha384-vjBJ1z7qrhkTyYsNqKeF6c7N+nOJSU94czEo+tvZcu8G75JparGq9kB+kTnEUNVM",
    ),
    "tokenizers": (
        _TOKENIZERS,
        "dist/tokenizers.min.mjs",
        "sha384-Tl2lMbeE3RCGFLOUGQ7LhvaagysxiOw/9dulz2sD6jxNa1MckRJQBbYdVHhOoqEs",
    ),
}
_WASM_BYTES = 14_239_897
PACKAGES = [_TOKENIZERS, _ONNXRUNTIME]

#: transformers.js uses q8 by default in a browser, and fp32 in Node.
DEFAULT_DTYPES = ("q8", "fp32")


def write_site(
    source: str | Path,
    output: str | Path,
    *,
    overwrite: bool = False,
    dtypes: Sequence[str] = DEFAULT_DTYPES,
    runtime: str | Path | None = None,
    examples: Sequence[str] = (),
) -> str:
    """Write a model folder as a site, and return lines about it.

    Args:
        source: a model folder with its tokenizer.
        output: a new folder. It appears when it is complete.
        overwrite: replace an existing folder.
        dtypes: of the weights, keys of `interop.transformers_js.DTYPES`. The page starts with the first.
        runtime: folder after `npm install` of `PACKAGES`. The site contains the runtime and works without a network.
            None lets the page load the runtime from a content delivery network and check its hash.
        examples: sentences that the page offers. Without any, those of the run's test or of the card's `widget`.

    Raises:
        UserError: the folder is not empty, the model is damaged, the runtime has a different version, or
            `interop.transformers_js.write` refuses the model.
    """
    source = Path(source)
    output = Path(output)
    require_apart(output, source)
    files = None if runtime is None else _local_runtime(Path(runtime))
    with new_folder(output, overwrite) as folder:
        model = load_translator(source).to(torch.float32)
        tokenizers = load_tokenizers(source)
        refuse_languages("onnx", tokenizers)
        sizes = write(model, source, folder / "model", dtypes)
        note = form_note(tokenizers[0]) + search_differences(model, PAGE)
        note += self_test("onnx", model, tokenizers, folder / "model", exact="fp32" in dtypes)
        site = describe(model, source, sizes, list(examples), local=files is not None)
        for name, content in page_files(site).items():
            (folder / name).write_bytes(content)
        if files is not None:
            (folder / "runtime").mkdir()
            for path in files.values():
                shutil.copyfile(path, folder / "runtime" / path.name)
        total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    listed = ", ".join(f"{dtype} {size / 1e6:.1f} MB" for dtype, size in sizes.items())
    return (
        f"{output}: {total / 1e6:.1f} MB (model: {listed}){note}\n"
        f"to try it: python -m http.server --bind 127.0.0.1 --directory {output} 8000, then http://127.0.0.1:8000/"
    )


def describe(
    model: VanillaTransformerForConditionalGeneration,
    source: Path,
    sizes: dict[str, int],
    examples: list[str],
    local: bool,
) -> dict[str, object]:
    """The content of `site.json`, as README.md in this folder describes it.

    Args:
        sizes: bytes of the graphs by dtype. local: the site contains the runtime.
    """
    encoder, decoder = GRAPHS
    task = tokenizer_task(*load_tokenizers(source))
    languages = model_languages(source)
    from_language, to_language = languages or (None, None)
    return {
        "engine": "browser",
        **page_facts(model, source, from_language, to_language, task),
        **({"examples": examples} if examples else {}),
        "search": search_settings(model),
        "tokenizer": ["model/tokenizer.json", "model/tokenizer_config.json"],
        "dtypes": {
            dtype: {
                "encoder": f"model/onnx/{encoder}{DTYPES[dtype]}.onnx",
                "decoder": f"model/onnx/{decoder}{DTYPES[dtype]}.onnx",
                "bytes": size,
            }
            for dtype, size in sizes.items()
        },
        "runtime": _runtime(local),
    }


def search_settings(model: VanillaTransformerForConditionalGeneration) -> dict[str, object]:
    """The settings of the page's search, equal to `generate` with the model's generation config."""
    given = model.generation_config.to_diff_dict()
    config = model.config
    given.setdefault("eos_token_id", config.target_eos_token_id)
    settings: dict[str, object] = {
        "num_beams": given.get("num_beams", BEAMS),
        "length_penalty": given.get("length_penalty", given.get("paper_length_penalty", ALPHA)),
        "formula": "power" if "length_penalty" in given else "gnmt",
        "early_stopping": given.get("early_stopping", False),
        "max_length_over_source": given.get("max_length_over_source", MAX_LENGTH_OVER_SOURCE),
        "decoder_start_token_id": given.get(
            "decoder_start_token_id", config.decoder_start_token_id
        ),
        "eos_token_ids": ends(given),
        "suppressed_tokens": banned_tokens(given),
        "min_new_tokens": shortest(given),
    }
    if longest(given) is not None:
        settings["max_new_tokens"] = longest(given)
    for name in ("forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens"):
        if given.get(name) is not None:
            settings[name] = given[name]
    if config.position_encoding_type == "learned":
        settings["max_positions"] = config.max_position_embeddings
    return settings


def _runtime(local: bool) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for name, (package, file, integrity) in _RUNTIME.items():
        remote = {"url": f"{_HOST}/{package}/{file}", "integrity": integrity}
        entries[name] = {"url": f"runtime/{Path(file).name}"} if local else remote
    entries["wasm"]["bytes"] = _WASM_BYTES
    return entries


def _local_runtime(folder: Path) -> dict[str, Path]:
    """The files of the runtime in an npm folder, after a check of their hashes."""
    install = f"npm install {' '.join(PACKAGES)}"
    paths = {}
    for name, (package, file, integrity) in _RUNTIME.items():
        path = folder / "node_modules" / package.rpartition("@")[0] / file
        content = path.read_bytes() if path.is_file() else b""
        digest = base64.b64encode(hashlib.sha384(content).digest()).decode()
        if f"sha384-{digest}" != integrity:
            raise UserError(
                f"runtime {folder}: {path.relative_to(folder)} is missing, or not of {package}: run there {install}"
            )
        paths[name] = path
    return paths
