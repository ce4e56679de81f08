"""Transformers whose names and forms say little: roles follow from the operations alone. Written for these tests."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional


def wave(length, width, shift=0.0):
    position = torch.arange(length)[:, None] + shift
    angles = position / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.stack((torch.sin(angles), torch.cos(angles)), dim=2).flatten(1)


def future(length):
    return torch.ones(length, length).triu(1).bool()


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


# 1. One-letter names, own parameters instead of nn.Linear, the output is x @ table.T, heads are a constant

H = 8


class A(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.w = nn.ParameterList([nn.Linear(d, d).weight for _ in range(4)])

    def forward(self, x, y, m):
        b, t, d = x.shape
        q, k, v = (split(z @ w, H) for z, w in zip((x, y, y), self.w, strict=False))
        s = q @ k.transpose(-1, -2) / math.sqrt(d // H)
        s = s.masked_fill(m, -1e9)
        e = torch.exp(s - s.max(-1, keepdim=True).values)
        z = e / e.sum(-1, keepdim=True) @ v
        return z.transpose(1, 2).reshape(b, t, d) @ self.w[3]


class L(nn.Module):
    def __init__(self, d, f, parts):
        super().__init__()
        self.a = nn.ModuleList(A(d) for _ in range(parts))
        self.n = nn.ModuleList(nn.LayerNorm(d) for _ in range(parts + 1))
        self.u = nn.Conv1d(d, f, 1)
        self.d = nn.Conv1d(f, d, 1)

    def forward(self, x, m, y=None, p=None):
        x = self.n[0](x + self.a[0](x, x, m))
        if y is not None:
            x = self.n[1](x + self.a[1](x, y, p))
        z = self.u(x.transpose(1, 2)).relu()
        z = self.d(z).transpose(1, 2)
        return self.n[-1](x + z)


class Letters(nn.Module):
    def __init__(self, src_vocab, tgt_vocab, d_model, d_ff):
        super().__init__()
        self.se = nn.Embedding(src_vocab, d_model)
        self.te = nn.Embedding(tgt_vocab, d_model)
        self.x = nn.ModuleList(L(d_model, d_ff, 1) for _ in range(2))
        self.y = nn.ModuleList(L(d_model, d_ff, 2) for _ in range(2))

    def forward(self, src, tgt):
        d = self.se.embedding_dim
        p = src.eq(0)[:, None, None]
        m = future(tgt.size(1))
        x = self.se(src) * d**0.5 + wave(src.size(1), d)
        y = self.te(tgt) * d**0.5 + wave(tgt.size(1), d)
        for each in self.x:
            x = each(x, p)
        for each in self.y:
            y = each(y, m, x, p)
        return y @ self.te.weight.T


# 2. A frozen table of positions, projections outside the attention, normalisations with a gain of another name


class Gain(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        x = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps)
        return x * self.scale + self.shift


def attend(q, k, v, heads, hidden):
    q, k, v = (split(each, heads) for each in (q, k, v))
    scores = torch.matmul(q, k.mT) / np.sqrt(q.size(-1))
    x = scores.masked_fill(hidden, -1e9).softmax(-1) @ v
    return x.transpose(1, 2).flatten(2)


class Step(nn.Module):
    def __init__(self, width, heads, inner, crosses):
        super().__init__()
        names = ("own", "other") if crosses else ("own",)
        self.maps = nn.ModuleDict(
            {f"{name}{i}": nn.Linear(width, width) for name in names for i in range(4)}
        )
        self.gains = nn.ModuleDict({name: Gain(width) for name in (*names, "last")})
        self.first = nn.Linear(width, inner)
        self.second = nn.Linear(inner, width)
        self.heads = heads

    def one(self, name, x, y, hidden):
        q, k, v = (self.maps[f"{name}{i}"](z) for i, z in enumerate((x, y, y)))
        z = self.maps[f"{name}3"](attend(q, k, v, self.heads, hidden))
        return self.gains[name](x + z)

    def forward(self, x, hidden, memory=None, padding=None):
        x = self.one("own", x, x, hidden)
        if memory is not None:
            x = self.one("other", x, memory, padding)
        return self.feed(x)

    def feed(self, x):
        return self.gains["last"](x + self.second(functional.relu(self.first(x))))


def steps(width, heads, crosses):
    return nn.ModuleList(Step(width, heads, 3 * width, crosses) for _ in range(2))


class Frozen(nn.Module):
    def __init__(self, vocab_size, hidden_size, heads_count=2, shift=0.0):
        super().__init__()
        width = hidden_size
        self.words = nn.ModuleList(nn.Embedding(vocab_size, width) for _ in range(2))
        self.table = nn.Embedding.from_pretrained(wave(50, width, shift), freeze=True)
        self.go = nn.Sequential(*steps(width, heads_count, False))
        self.back = nn.Sequential(*steps(width, heads_count, True))
        self.end = nn.Linear(width, vocab_size)

    def embed(self, side, ids):
        table = self.words[side]
        positions = self.table(torch.arange(ids.size(1)))
        return table(ids) * math.sqrt(table.embedding_dim) + positions

    def encode(self, source, padding):
        memory = self.embed(0, source)
        for step in self.go:
            memory = step(memory, padding)
        return memory

    def forward(self, source, target):
        padding = source.eq(0)[:, None, None]
        memory = self.encode(source, padding)
        return self.decode(target, future(target.size(1)), memory, padding)

    def decode(self, target, future, memory, padding):
        x = self.embed(1, target)
        for step in self.back:
            x = step(x, future, memory, padding)
        return self.end(x)


# 3. PyTorch's own stacks, eight heads in the code, the masks of a batch-first translation model


class TorchEight(nn.Module):
    def __init__(self, src_vocab, tgt_vocab, d_model, bug=None):
        super().__init__()
        self.one = nn.Embedding(src_vocab, d_model)
        self.two = nn.Embedding(tgt_vocab, d_model)
        self.net = nn.Transformer(d_model, 8, 2, 2, 64, 0.0, batch_first=True)
        self.out = nn.Linear(d_model, tgt_vocab)
        self.bug = bug

    def embed(self, table, ids):
        width = table.embedding_dim
        return table(ids) * width**0.5 + wave(ids.size(1), width)

    def forward(self, src, tgt):
        pad = src == 0
        x = self.embed(self.one, src)
        y = self.embed(self.two, tgt)
        if self.bug == "factor":
            y = y * 1.1
        states = self.net(
            x,
            y,
            tgt_mask=future(tgt.size(1)),
            src_key_padding_mask=pad,
            memory_key_padding_mask=None if self.bug == "memory" else pad,
        )
        return self.out(states)


# 4. The output layer is called by the trainer, masks come from outside and may be left out


class Outside(nn.Module):
    def __init__(self, src_vocab, tgt_vocab, d_model, heads=4):
        super().__init__()
        self.words = nn.Embedding(src_vocab, d_model)
        self.answers = nn.Embedding(tgt_vocab, d_model)
        self.lower = steps(d_model, heads, False)
        self.upper = steps(d_model, heads, True)
        self.scores = nn.Linear(d_model, tgt_vocab)

    embed = TorchEight.embed

    def hidden(self, mask):
        return torch.tensor(False) if mask is None else mask.unsqueeze(1) == 0

    def forward(self, src, tgt, src_mask=None, tgt_mask=None):
        hidden = self.hidden(src_mask)
        future = self.hidden(tgt_mask)
        x = self.embed(self.words, src)
        for step in self.lower:
            x = step(x, hidden)
        y = self.embed(self.answers, tgt)
        for step in self.upper:
            y = step(y, future, x, hidden)
        return y


# 5. The causal mask exists in training mode alone


class TrainingMask(Frozen):
    def forward(self, source, target, valid_lens):
        padding = torch.arange(source.size(1)) >= valid_lens[:, None]
        padding = padding[:, None, None]
        memory = self.encode(source, padding)
        return self.decode(target, future(target.size(1)) & self.training, memory, padding)


# 6. The decoder takes a state and returns it, to decode token by token in eval mode


class StateDecoder(nn.Module):
    def __init__(self, vocab_size, width, heads, bug):
        super().__init__()
        self.words = nn.Embedding(vocab_size, width)
        self.steps = steps(width, heads, True)
        self.end = nn.Linear(width, vocab_size)
        self.bug = bug

    def forward(self, ids, state):
        memory, padding, past = state
        start = 0 if past[0] is None or self.bug == "restart" else past[0].size(1)
        width = self.words.embedding_dim
        length = ids.size(1)
        x = self.words(ids) * width**0.5 + wave(start + length, width)[start:]
        hidden = future(length) & self.training
        for number, step in enumerate(self.steps):
            keys = x if past[number] is None else torch.cat((past[number], x), 1)
            past[number] = x if self.bug == "forgets" else keys
            x = step.one("own", x, keys, hidden)
            x = step.one("other", x, memory, padding)
            x = step.feed(x)
        return self.end(x), state


class Stateful(Frozen):
    def __init__(self, vocab_size, hidden_size, heads_count=2, bug=None):
        super().__init__(vocab_size, hidden_size, heads_count)
        del self.back, self.end
        self.words = self.words[:1]
        self.decoder = StateDecoder(vocab_size, hidden_size, heads_count, bug)

    def forward(self, source, target):
        padding = source.eq(0)[:, None, None]
        memory = self.encode(source, padding)
        logits, _ = self.decoder(target, [memory, padding, [None, None]])
        return logits
