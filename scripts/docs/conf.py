"""Configuration of the documentation; `bash scripts/docs.sh` builds it. The sources are the repository's files."""

import contextlib
import dataclasses
import inspect
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.utils.math.latex2mathml import tex2mathml
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
os.environ |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "100"}  # the width of --help

project = "hf_vanilla_transformer"
copyright = "the hf_vanilla_transformer authors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "scripts/docs/index"
include_patterns = [
    "scripts/docs/**",
    "**README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "model_cards/*.md",
]
exclude_patterns = [".*", "runs", "node_modules", "scripts/docs/lessons/source"]

html_theme = "furo"
html_title = "Vanilla Transformer"
html_copy_source = False
html_show_sourcelink = False
html_extra_path = ["root"]  # an index.html that leads from the top folder to the first page
html_css_files = ["wide.css"]
html_static_path = ["static"]

myst_heading_anchors = 4  # links such as README.md#train, as on GitHub
myst_enable_extensions = ["dollarmath", "html_image"]
html_math_renderer = "mathml"  # MathJax would be loaded from the network

suppress_warnings = ["misc.highlighting_failure"]  # sketches of interfaces are not quite JavaScript

default_role = "py:obj"  # docstrings write code in single backticks
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
python_use_unqualified_type_names = True


class CommandHelp(Directive):
    """`.. command-help:: train` shows the output of `vanilla-transformer train --help`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        from vanilla_transformer_cli.main import main

        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*self.arguments, "--help"])
        return [nodes.literal_block(printed.getvalue(), printed.getvalue(), language="text")]


class NotebookParser(MystParser):
    """Show a notebook with its stored outputs."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        parts = []
        for cell in json.loads(inputstring)["cells"]:
            source = "".join(cell["source"])
            parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
            for output in cell.get("outputs", ()):
                if "text" in output:
                    parts.append(f"```text\n{''.join(output['text'])}```")
                else:
                    parts.append(f"![](data:image/png;base64,{output['data']['image/png']})")
        super().parse("\n\n".join(parts), document)


def show_formula(translator: Any, node: Any) -> None:
    block = isinstance(node, nodes.math_block)
    formula = tex2mathml(node.astext(), as_block=block)
    translator.body.append(f"<div>{formula}</div>" if block else formula)
    raise nodes.SkipNode


def own_fields(cls: type) -> list[dataclasses.Field]:
    """Return the fields that a dataclass adds to its base, which for transformers' classes has 100 others."""
    if not dataclasses.is_dataclass(cls):
        return []
    return [
        field
        for field in dataclasses.fields(cls)
        if field.name in vars(cls).get("__annotations__", {})
    ]


def show_own_fields(app: Sphinx, kind: str, name: str, cls: Any, *_: Any) -> tuple[str, str] | None:
    """Show a dataclass with the fields that it adds to its base."""
    shown = []
    for field in own_fields(cls) if kind == "class" else []:
        default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
        shown.append(f"{field.name}: {inspect.formatannotation(field.type)}{default}")
    return (f"(*, {', '.join(shown)})", "") if shown else None


def describe_own_fields(
    app: Sphinx, kind: str, name: str, cls: Any, options: Any, lines: list[str]
) -> None:
    """Append the help of each field, the text of the command line's --help."""
    for field in own_fields(cls) if kind == "class" else []:
        if help := field.metadata.get("help"):
            lines.append(f":param {field.name}: {help.replace('*', chr(92) + '*')}")


def setup(app: Sphinx) -> None:
    app.add_directive("command-help", CommandHelp)
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    app.add_html_math_renderer("mathml", (show_formula, None), (show_formula, None))
    app.connect("autodoc-process-signature", show_own_fields)
    app.connect("autodoc-process-docstring", describe_own_fields)
