"""Models around `torch.nn.Transformer`: small, with random weights."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.interop.foreign import installed
from tests.paper import paper_position

PEER = f"`torch.nn.Transformer`, {installed('torch')}"

#: What a state dictionary of PyTorch's tutorial lacks, but for the number of heads.
TUTORIAL_OPTIONS = {
    "unk_token_id": 0,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "scale_embedding": True,
}
SIZES = {
    "d_model": 32,
    "nhead": 4,
    "num_encoder_layers": 2,
    "num_decoder_layers": 3,
    "dim_feedforward": 40,
}


class Output(dict):
    __getattr__ = dict.__getitem__


class AroundTorch(nn.Module):
    """The model that the tutorials build around `nn.Transformer`, with the names of each."""

    def __init__(
        self, names: dict[str, str], shared: bool = False, scale: bool = True, **settings: Any
    ):
        super().__init__()
        self.transformer = nn.Transformer(**SIZES | {"dropout": 0.0} | settings)
        width = SIZES["d_model"]
        self.names = names
        self.scale = math.sqrt(width) if scale else 1.0
        self.add(names["source"], nn.Embedding(41, width))
        self.add(
            names["target"],
            self.get_submodule(names["source"]) if shared else nn.Embedding(37, width),
        )
        self.add(
            names["output"], nn.Linear(width, 41 if shared else 37, bias=settings.get("bias", True))
        )
        for side in ("source_positions", "target_positions"):
            if side in names:
                self.add(names[side], nn.Embedding(20, width))
        self.sines = torch.tensor(np.stack([paper_position(i, width) for i in range(100)])).float()
        if "table" in names:
            holder, name = names["table"].split(".")
            self.add(holder, nn.Module())
            self.get_submodule(holder).register_buffer(name, self.sines[:, None])  # (P, 1, D)

    def add(self, name: str, module: nn.Module) -> None:
        *path, last = name.split(".")
        parent = self
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
        parent.add_module(last, module)

    def embed(self, side: str, ids: Tensor) -> Tensor:
        rows = self.get_submodule(self.names[side])(ids) * self.scale
        learned = self.names.get(f"{side}_positions")
        table = self.get_submodule(learned).weight if learned else self.sines
        return rows + table[: ids.shape[1]]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor, **_: Any
    ) -> Output:
        padding = attention_mask.eq(0)
        length = decoder_input_ids.shape[1]
        states = [
            self.embed("source", input_ids),
            self.embed("target", decoder_input_ids),
        ]
        if not self.transformer.batch_first:
            states = [each.transpose(0, 1) for each in states]
        decoded = self.transformer(
            *states,
            tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        if not self.transformer.batch_first:
            decoded = decoded.transpose(0, 1)
        return Output(logits=self.get_submodule(self.names["output"])(decoded))


PYTORCH_TUTORIAL = {
    "source": "src_tok_emb.embedding",
    "target": "tgt_tok_emb.embedding",
    "output": "generator",
}
