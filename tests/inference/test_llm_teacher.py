"""Causal language models as teachers, against `generate` by hand, sentence by sentence."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_vanilla_transformer.inference.distilled_text import distil
from hf_vanilla_transformer.inference.llm_teacher import PROMPT, CausalTeacher, read_prompt, translation_in
from hf_vanilla_transformer.utils.errors import UserError
from tests.inference.test_distilled_text import ALONE, pairs
from tests.model_helpers import save_model, word_tokenizer

LINES = ["one two three", "", "two two", "three one one two", "two", "one {text} \\1"]
WORDS = ["one", "two", "three", "English", "German", "Translate", "from", "into", ".", "Give", "user", ":", "only"]
CHAT = (
    "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} German{% endif %}"
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    return tmp_path / "source"


def tokenizer_of(chat: bool) -> Any:
    tokenizer = word_tokenizer(["<s>", "</s>", "<unk>", *WORDS], bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT if chat else None
    return tokenizer


def causal_model(kind: str, vocab_size: int) -> Any:
    ends = {"bos_token_id": 0, "eos_token_id": 1, "vocab_size": vocab_size}
    if kind == "gpt2":
        model: Any = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, **ends))
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=64, initializer_range=0.6, **sizes, **ends))
    model.generation_config.update(do_sample=True, temperature=0.6, eos_token_id=[1, 4, 8, 9])  # as of a chat model
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a translator, a causal model and text."""
    folder = tmp_path_factory.mktemp("teachers")
    save_model(folder / "model", ["one two three"] * 3, vocab_size=265)
    tokenizer = tokenizer_of(True)
    causal_model("llama", len(tokenizer)).save_pretrained(folder / "llm")
    tokenizer.save_pretrained(folder / "llm")
    (folder / "source").write_text("one\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize(("kind", "chat"), [("llama", True), ("llama", False), ("gpt2", False)])
def test_causal_model_answers_as_generate_by_hand_in_any_batch(kind, chat, source, tmp_path, command, caplog):
    tokenizer = tokenizer_of(chat)
    model = causal_model(kind, len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    template = read_prompt(PROMPT, "en", "de")
    expected = []
    for line in filter(None, LINES):
        prompt = template.replace("{text}", line)
        if chat:
            messages = [{"role": "user", "content": prompt}]
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            inputs = tokenizer(prompt, return_tensors="pt")
        ids = torch.as_tensor(inputs["input_ids"])
        [sequence] = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, pad_token_id=1
        )
        answer = sequence[ids.shape[1] :].tolist()
        if answer[-1] in (1, 4, 8, 9):
            expected.append((line, tokenizer.decode(answer, skip_special_tokens=True)))
    expected = [pair for pair in expected if pair[1]]
    for batch_size in (1, 4):
        out = tmp_path / str(batch_size)
        flags = ["--teacher", tmp_path / "model", "--source_lang", "en", "--target_lang", "de", "--max_new_tokens", 8]
        flags += ["--source_file", source, "--output_dir", out, "--batch_size", batch_size, "--device", "cpu"]
        status, _, errors = command("distil", *flags)
        assert status == 0, errors
        assert pairs(out) == expected != []
    assert caplog.text.count("left out") == 2 * (len(expected) < sum(map(bool, LINES)))


def test_causal_model_samples_or_searches_several_answers(source, tmp_path):
    tokenizer = tokenizer_of(True)
    model = causal_model("llama", len(tokenizer))
    teacher = CausalTeacher(model, tokenizer, "{text}")
    for name, settings in {"sampled": {"temperature": 2.0}, "beams": {"num_beams": 3}}.items():
        distil(teacher, source, tmp_path / name, ALONE, n_best=3, max_new_tokens=12, **settings)
        counts = Counter(line for line, _ in pairs(tmp_path / name))
        assert max(counts.values()) > 1 and len(set(pairs(tmp_path / name))) == counts.total()
    with pytest.raises(UserError, match="n_best"):
        distil(teacher, source, tmp_path / "none", ALONE, n_best=3)
    with pytest.raises(UserError, match="output_dir"):
        distil(CausalTeacher(model, tokenizer, "de: {text}"), source, tmp_path / "beams", ALONE, n_best=3, num_beams=3)


def test_causal_model_refuses_a_prompt_that_fills_its_positions(source, tmp_path):
    tokenizer = tokenizer_of(False)
    teacher = CausalTeacher(causal_model("gpt2", len(tokenizer)), tokenizer, "one " * 63 + "{text}")
    with pytest.raises(UserError, match="line 1"):
        distil(teacher, source, tmp_path / "out", ALONE)


CLEANED = [
    ("a b", " Eins\nzwei \r\n\u2028drei\n", "Eins zwei drei"),
    ("a b", '"Eins zwei."', "Eins zwei."),
    ("a b", "„Eins“", "Eins"),
    ("don't", "“It's”", "It's"),
    ('say "a"', '"Eins"', '"Eins"'),
    ("a b", '"Eins" und "zwei"', '"Eins" und "zwei"'),
    ("a b", '"', '"'),
    ("a b", "<think>\nhm\n</think>\n\nEins", "Eins"),
]


@pytest.mark.parametrize(("source", "answer", "expected"), CLEANED)
def test_answer_becomes_one_line_without_quotes_that_the_source_lacks(source, answer, expected):
    assert translation_in(answer, source) == expected


REFUSED_FLAGS = [
    ("--teacher llm", "source_lang"),
    ("--teacher llm --source_lang en", "target_lang"),
    ("--teacher llm --prompt translate", "prompt"),
    (f"--teacher llm --prompt {'long' * 99}", "prompt"),
    ("--teacher llm --prompt {text} --ray local", "ray"),
    ("--teacher llm --prompt {text} --temperature -1", "temperature"),
    ("--teacher llm --prompt {text} --source_column x", "source_column"),
    ("--teacher llm --prompt {text} --n_best 2", "n_best"),
    ("--teacher model llm --prompt {text}", "llm"),
    ("--teacher model --prompt {text}", "prompt"),
]


@pytest.mark.parametrize(("flags", "named"), REFUSED_FLAGS)
def test_flags_without_an_effect_are_refused_in_one_line(flags, named, folders, monkeypatch, command):
    monkeypatch.chdir(folders)
    status, _, errors = command("distil", *flags.split(), "--source_file", "source", "--output_dir", "out")
    assert status == 2 and named in errors and errors.count("\n") == 1


def test_prompt_from_a_file_keeps_braces_and_unknown_languages(tmp_path):
    (tmp_path / "prompt").write_text('{"from": "{source_lang}"}\n{text}\n')
    assert read_prompt(str(tmp_path / "prompt"), "tlh", None) == '{"from": "tlh"}\n{text}'
