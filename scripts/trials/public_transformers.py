"""Public implementations of the Transformer that `scripts.trials.check` reads, and how each is built.

No code of theirs is here: a checkout has it. An adapter builds the model with small sizes and calls it. An edit
replaces a few characters of a file.
"""

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

HEADER = "import copy\nimport math\nimport sys\nimport torch\nimport torch.nn as nn\n"


class Edit(NamedTuple):
    """Replace the first `count` occurrences of `old` in a file, or the last one if `count` is -1."""

    file: str
    old: str
    new: str
    count: int = 1


class Cut(NamedTuple):
    """A file of some definitions alone, out of a Python file, a notebook or a page of Markdown."""

    path: str
    names: str  # separated by white space
    header: str = HEADER


@dataclass(frozen=True)
class Implementation:
    """A public implementation.

    Attributes:
        repository: its owner and name on GitHub.
        commit: the commit that was tried.
        files: patterns of the Python files that are copied.
        root: the folder of the repository that is on the path of imports.
        cuts: file -> the definitions that it gets. Several cuts are joined.
        stubs: file -> its text, in place of what is not needed.
        ports: edits for today's NumPy and PyTorch, and for small sizes.
        adapter: code that defines `Mine`, the class or the function that is checked.
        differences: places of true differences from the paper -> what differs.
        repairs: edits that mend all of them, before mistakes are planted.
    """

    repository: str
    commit: str
    adapter: str
    files: tuple[str, ...] = ("*.py",)
    root: str = ""
    cuts: Mapping[str, tuple[Cut, ...]] = field(default_factory=dict)
    stubs: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[Edit, ...] = ()
    differences: Mapping[str, str] = field(default_factory=dict)
    repairs: tuple[Edit, ...] = ()

    @property
    def owner(self) -> str:
        return self.repository.partition("/")[0]

    @property
    def commands(self) -> str:
        """How a checkout is made in the folder of sources."""
        url = f"https://github.com/{self.repository}"
        return f"git clone {url} {self.owner} && git -C {self.owner} checkout {self.commit}"


def write(
    implementation: Implementation, checkout: Path, folder: Path, edits: Collection[Edit]
) -> Path:
    """Write the files of an implementation, with edits, and return its adapter.

    Raises:
        OSError, ValueError: the checkout lacks a file, or a file has other text.
    """
    root = checkout / implementation.root
    for pattern in implementation.files:
        paths = sorted(root.glob(pattern))
        if not paths:
            raise FileNotFoundError(f"there is no {root / pattern}")
        for path in paths:
            _write(folder / path.relative_to(root), path.read_text("utf-8"))
    for name, cuts in implementation.cuts.items():
        bodies = [_definitions(checkout / cut.path, cut.names.split()) for cut in cuts]
        _write(folder / name, "\n\n".join([cuts[0].header, *bodies]))
    for name, text in implementation.stubs.items():
        _write(folder / name, text)
    for edit in (*implementation.ports, *edits):
        path = folder / edit.file
        path.write_text(_edited(path.read_text("utf-8"), edit), "utf-8")
    adapter = folder / "mine.py"
    adapter.write_text(f"import torch\nfrom torch import nn\n{implementation.adapter}", "utf-8")
    return adapter


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def _edited(text: str, edit: Edit) -> str:
    if edit.old not in text:
        raise ValueError(f"{edit.file} has no {edit.old!r}")
    if edit.count == -1:
        before, _, after = text.rpartition(edit.old)
        return before + edit.new + after
    return text.replace(edit.old, edit.new, edit.count)


def _definitions(path: Path, names: Collection[str]) -> str:
    """The first definition of each name, in the order of the file."""
    found: dict[str, str] = {}
    for text in _code_of(path):
        try:
            tree = ast.parse(text)
        except SyntaxError:  # a cell with commands of the shell
            continue
        lines = text.splitlines()
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names:
                start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                found.setdefault(node.name, "\n".join(lines[start - 1 : node.end_lineno]))
    if missing := set(names) - set(found):
        raise ValueError(f"{path}: no {', '.join(sorted(missing))}")
    return "\n\n\n".join(found.values()) + "\n"


def _code_of(path: Path) -> Iterator[str]:
    """The Python code of a file, of a notebook's cells, or of a page's blocks for PyTorch."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        yield from ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    elif path.suffix == ".md":
        for block in re.findall(r"(?ms)^```\{\.python[^\n]*\n(.*?)^```", text):
            tab, _, code = block.partition("\n")
            if "pytorch" in tab:
                yield code
    else:
        yield text


_SCALE = "no sqrt(d_model)"

IMPLEMENTATIONS = {
    "hkproj": Implementation(
        "hkproj/pytorch-transformer",
        "3beddd2604bfa5e0fbd53f52361bd887dc027a8c",
        """
from model import build_transformer

class Mine(nn.Module):
    def __init__(self, src_vocab, tgt_vocab, d_model, d_ff, h, N):
        super().__init__()
        self.model = build_transformer(src_vocab, tgt_vocab, 40, 40, d_model, N, h, 0.0, d_ff)

    def forward(self, src, tgt, src_mask, tgt_mask):
        memory = self.model.encode(src, src_mask)
        return self.model.project(self.model.decode(memory, src_mask, tgt, tgt_mask))
""",
    ),
    "harvardnlp": Implementation(
        "harvardnlp/annotated-transformer",
        "debc9fd747bb2123160a98046ad1c2d4da44a567",
        "from annotated import make_model as Mine\n",
        files=(),
        cuts={
            "annotated.py": (
                Cut(
                    "the_annotated_transformer.py",
                    """
                    EncoderDecoder Generator clones Encoder LayerNorm SublayerConnection EncoderLayer Decoder
                    DecoderLayer subsequent_mask attention MultiHeadedAttention PositionwiseFeedForward Embeddings
                    PositionalEncoding make_model
                    """,
                    HEADER + "from torch.nn.functional import log_softmax\n",
                ),
            )
        },
    ),
    "bentrevett": Implementation(
        "bentrevett/pytorch-seq2seq",
        "b3cd54c72cd6e4e63f672d334c795b4fe744ef92",
        """
from seq2seq import Decoder, Encoder, Seq2Seq

def Mine(src_vocab, tgt_vocab, d_model, d_ff, h, N):
    encoder = Encoder(src_vocab, d_model, N, h, d_ff, 0.0, "cpu")
    return Seq2Seq(encoder, Decoder(tgt_vocab, d_model, N, h, d_ff, 0.0, "cpu"), 0, 0, "cpu")
""",
        files=(),
        cuts={
            "seq2seq.py": (
                Cut(
                    "legacy/6 - Attention is All You Need.ipynb",
                    """
                    Encoder EncoderLayer MultiHeadAttentionLayer PositionwiseFeedforwardLayer Decoder DecoderLayer
                    Seq2Seq
                    """,
                ),
            )
        },
    ),
    "hyunwoongko": Implementation(
        "hyunwoongko/transformer",
        "63286547b9cd174a6cfc204832271814d685181f",
        "from models.model.transformer import Transformer as Mine\n",
        files=("models/**/*.py",),
        differences={"embedding scale": _SCALE},
        repairs=(
            Edit(
                "models/embedding/transformer_embedding.py",
                "tok_emb = self.tok_emb(x)",
                "tok_emb = self.tok_emb(x) * self.tok_emb.embedding_dim ** 0.5",
            ),
        ),
    ),
    "SamLynnEvans": Implementation(
        "SamLynnEvans/Transformer",
        "49e01800aab01dcd83403a056c059f429a7d7512",
        "from Models import Transformer as Mine\n",
        differences={"positions": "2i doubled, and the cosine's exponent is another"},
        repairs=(
            Edit("Embed.py", "(2 * i)/d_model", "i/d_model"),
            Edit("Embed.py", "(2 * (i + 1))/d_model", "i/d_model"),
        ),
    ),
    "devjwsong": Implementation(
        "devjwsong/transformer-translator-pytorch",
        "1e95679d541388d15751aba83b6c3816b6d2a647",
        "from transformer import Transformer as Mine\n",
        root="src",
        ports=(
            Edit("constants.py", "seq_len = 200", "seq_len = 12"),
            Edit("constants.py", "num_heads = 8", "num_heads = 4"),
            Edit("constants.py", "num_layers = 6", "num_layers = 2"),
            Edit("constants.py", "d_model = 512", "d_model = 32"),
            Edit("constants.py", "d_ff = 2048", "d_ff = 48"),
            Edit("constants.py", "drop_out_rate = 0.1", "drop_out_rate = 0.0"),
        ),
        differences={"positions": "2i doubled, and the cosine's exponent is another"},
        repairs=(Edit("layers.py", "2 * i / d_model", "2 * (i // 2) / d_model", 2),),
    ),
    "aladdinpersson": Implementation(
        "aladdinpersson/Machine-Learning-Collection",
        "71faea865041410473a8c0543aaf48b51c63e92f",
        "from transformer_from_scratch import Transformer as Mine\n",
        root="ML/Pytorch/more_advanced/transformer_from_scratch",
        differences={
            "heads": "one projection for all heads",
            "embedding scale": _SCALE,
            "attention scale": "sqrt(embed_size)",
        },
    ),
    "gordicaleksa": Implementation(
        "gordicaleksa/pytorch-original-transformer",
        "d5b29a41c5c3f68e1bcd0c528a58281632fa9d6d",
        """
from models.definitions.transformer_model import Transformer

def Mine(src_vocab, tgt_vocab, d_model, h, N):
    return Transformer(d_model, src_vocab, tgt_vocab, h, N, 0.0)
""",
        files=("**/*.py",),
    ),
    "jadore801120": Implementation(
        "jadore801120/attention-is-all-you-need-pytorch",
        "132907dd272e2cc92e3c10e6c4e783a87ff8893d",
        "from transformer.Models import Transformer as Mine\n",
        files=("transformer/*.py",),
        differences={
            "embedding scale": "the output is scaled instead",
            "embeddings": "a normalisation follows them",
            "output scale": "1/sqrt(d_model)",
        },
    ),
    "dreamgonfly": Implementation(
        "dreamgonfly/transformer-pytorch",
        "c31e163ed57321e405771ef7fb556d4d92fd5efb",
        """
from models import build_model

def Mine(src_vocab, tgt_vocab, d_model, d_ff, h, N):
    config = dict(d_model=d_model, layers_count=N, heads_count=h, d_ff=d_ff, dropout_prob=0.0)
    return build_model(config | {"positional_encoding": True}, src_vocab, tgt_vocab)
""",
        files=("models.py", "embeddings.py", "utils/*.py"),
        ports=(Edit("utils/pad.py", ".astype('uint8')", ".astype('bool')"),),
    ),
    "tunz": Implementation(
        "tunz/transformer-pytorch",
        "e7266679f0b32fd99135ea617213f986ceede056",
        """
from model.transformer import Transformer

def Mine(src_vocab, tgt_vocab, d_model, N):
    return Transformer(src_vocab, tgt_vocab, N, d_model, 48, 0.0, False, True, 0, 0)
""",
        files=("model/*.py", "utils/utils.py"),
        ports=(Edit("utils/utils.py", "return t_self_mask", "return t_self_mask.bool()"),),
    ),
    "graykode": Implementation(
        "graykode/nlp-tutorial",
        "d05e31ec81d56d70c1db89b99ab07e948f7ebc11",
        """
import Transformer as gray

def Mine(src_vocab, tgt_vocab):
    gray.src_vocab_size, gray.tgt_vocab_size, gray.src_len, gray.tgt_len = src_vocab, tgt_vocab, 5, 5
    gray.d_model, gray.d_ff, gray.d_k, gray.d_v, gray.n_layers, gray.n_heads = 32, 48, 8, 8, 2, 4
    return gray.Transformer()
""",
        files=("Transformer.py",),
        root="5-1.Transformer",
        ports=(Edit("Transformer.py", "import matplotlib.pyplot as plt\n", ""),),
        differences={
            "embedding scale": _SCALE,
            "positions": "those of one sentence are written in the code, the source's from 1",
            "the decoder's embeddings and positions": "the target's begin with 5",
        },
        repairs=(
            Edit(
                "Transformer.py",
                "self.src_emb(enc_inputs) + self.pos_emb(torch.LongTensor([[1,2,3,4,0]]))",
                "self.src_emb(enc_inputs) * d_model ** 0.5 + self.pos_emb(torch.arange(enc_inputs.size(1))[None])",
            ),
            Edit(
                "Transformer.py",
                "self.tgt_emb(dec_inputs) + self.pos_emb(torch.LongTensor([[5,1,2,3,4]]))",
                "self.tgt_emb(dec_inputs) * d_model ** 0.5 + self.pos_emb(torch.arange(dec_inputs.size(1))[None])",
            ),
            Edit("Transformer.py", "encoding_table(src_len+1", "encoding_table(50"),
            Edit("Transformer.py", "encoding_table(tgt_len+1", "encoding_table(50"),
        ),
    ),
    "brandokoch": Implementation(
        "brandokoch/attention-is-all-you-need-paper",
        "0ff17617e29e9d80219380665ae23772c81e9cd5",
        """
from architectures.machine_translation_transformer import MachineTranslationTransformer

def Mine(vocab, d_model, d_ff, h, N):
    return MachineTranslationTransformer(d_model, N, vocab, vocab, h, d_ff, 0.0)
""",
        files=("architectures/*.py",),
        root="src",
    ),
    "labmlai": Implementation(
        "labmlai/annotated_deep_learning_paper_implementations",
        "e6b3c8a6a2cdae4071bcde1abeaaf9a2bc37bd53",
        """
from labml_nn.transformers.mha import MultiHeadAttention
from labml_nn.transformers.models import *
from labml_nn.transformers.utils import subsequent_mask

class Mine(nn.Module):
    def __init__(self, src_vocab, tgt_vocab, d_model, d_ff, h, N):
        super().__init__()

        def layer(**source):
            attention = MultiHeadAttention(h, d_model, 0.0)
            feed_forward = FeedForward(d_model, d_ff, 0.0)
            parts = dict(self_attn=attention, feed_forward=feed_forward, **source)
            return TransformerLayer(d_model=d_model, dropout_prob=0.0, **parts)

        self.model = EncoderDecoder(
            Encoder(layer(), N),
            Decoder(layer(src_attn=MultiHeadAttention(h, d_model, 0.0)), N),
            EmbeddingsWithPositionalEncoding(d_model, src_vocab),
            EmbeddingsWithPositionalEncoding(d_model, tgt_vocab),
            Generator(tgt_vocab, d_model),
        )

    def forward(self, src, tgt):
        output = self.model(src.T, tgt.T, (src.T != 0).unsqueeze(0), subsequent_mask(tgt.shape[1]))
        return self.model.generator(output).transpose(0, 1)
""",
        files=("labml_nn/transformers/*.py",),
        cuts={
            "labml_nn/utils/__init__.py": (Cut("labml_nn/utils/__init__.py", "clone_module_list"),)
        },
        stubs={
            "labml_nn/__init__.py": "",
            "labml_nn/transformers/__init__.py": "",
            "labml/__init__.py": "",
            "labml/tracker.py": "def debug(*_):\n    pass\n",
        },
    ),
    "d2l-ai": Implementation(
        "d2l-ai/d2l-en",
        "23d7a5aecceee57d1292c56e90cce307f183bb0a",
        """
from chapter import TransformerDecoder, TransformerEncoder

class Mine(nn.Module):
    def __init__(self, src_vocab, tgt_vocab, d_model, d_ff, h, N):
        super().__init__()
        self.encoder = TransformerEncoder(src_vocab, d_model, d_ff, h, N, 0.0)
        self.decoder = TransformerDecoder(tgt_vocab, d_model, d_ff, h, N, 0.0)

    def forward(self, src, tgt):
        lengths = (src != 0).sum(1)
        state = self.decoder.init_state(self.encoder(src, lengths), lengths)
        return self.decoder(tgt, state)[0]
""",
        files=(),
        cuts={
            "chapter.py": (
                Cut(
                    "d2l/torch.py",
                    """
                    masked_softmax DotProductAttention MultiHeadAttention PositionalEncoding PositionWiseFFN AddNorm
                    TransformerEncoderBlock TransformerEncoder
                    """,
                    HEADER
                    + "d2l = sys.modules[__name__]\nModule = Encoder = AttentionDecoder = nn.Module\n"
                    + "zeros = torch.zeros\narange = torch.arange\n",
                ),
                Cut(
                    "chapter_attention-mechanisms-and-transformers/transformer.md",
                    "TransformerDecoderBlock TransformerDecoder",
                ),
            )
        },
    ),
    "datawhalechina": Implementation(
        "datawhalechina/happy-llm",
        "f115ef3788bf8726b6ff65e823e03a538f270e6b",
        """
from transformer import ModelArgs, Transformer

def Mine(vocab, d_model, h, N):
    return Transformer(ModelArgs(d_model, h, d_model, 0.0, 40, vocab, 40, N))
""",
        files=("transformer.py",),
        root="docs/chapter2/code",
        ports=(Edit("transformer.py", "from transformers import BertTokenizer\n", ""),),
    ),
}
