"""An import changes nothing in the process, and the hooks of the inference engine come and go with it."""

import gc
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from hf_vanilla_transformer.engine import optimize
from hf_vanilla_transformer.inference import optimize_for_inference
from tests.search_helpers import varied_model

# What an import may change, before and after the import of the trainer. torch, transformers and their libraries change
# some of it themselves, and come first.
STATE = """
import json, locale, os, signal, sys, threading, warnings
import accelerate, datasets, torch, transformers
from transformers import Seq2SeqTrainer
import transformers.trainer_seq2seq

def state():
    modules, optimizer = torch.nn.modules.module, sys.modules["torch.optim.optimizer"]
    names = [(module, name) for module in (modules, optimizer) for name in vars(module)]
    hooks = {name: len(getattr(module, name) or ()) for module, name in names if name.startswith("_global_")}
    return {
        "hooks": hooks,
        "threads": [thread.name for thread in threading.enumerate()],
        "torch threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "seed": torch.initial_seed(),
        "attention": [
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ],
        "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "benchmark": torch.backends.cudnn.benchmark,
        "verbosity": transformers.utils.logging.get_verbosity(),
        "environment": dict(os.environ),
        "warnings": [str(each) for each in warnings.filters],
        "locale": locale.setlocale(locale.LC_ALL),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
        "working directory": os.getcwd(),
    }

before = state()
from hf_vanilla_transformer import Translator, VanillaTransformerTrainer
print(json.dumps([before, state()]))
"""


def test_import_of_the_trainer_changes_nothing_in_the_process() -> None:
    output = subprocess.run([sys.executable, "-c", STATE], check=True, capture_output=True, text=True).stdout
    before, after = json.loads(output)
    assert before == after
    assert before["hooks"]["_global_module_registration_hooks"] == 0


def registered() -> tuple[int, int]:
    """The hooks of the process that an engine registers."""
    modules, optimizer = torch.nn.modules.module, sys.modules["torch.optim.optimizer"]
    return len(modules._global_module_registration_hooks), len(optimizer._global_optimizer_post_hooks)


def test_hooks_are_registered_with_the_first_engine_and_removed_with_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.collect()
    # other tests of this process may still have engines
    monkeypatch.setattr(optimize, "_engines", {})
    monkeypatch.setattr(optimize, "_hooks", [])
    others = registered()

    def added() -> tuple[int, int]:
        now = registered()
        return now[0] - others[0], now[1] - others[1]

    assert added() == (0, 0)
    first = optimize_for_inference(varied_model())
    second = optimize_for_inference(varied_model())
    assert added() == (1, 1)
    first.train()
    gc.collect()
    assert added() == (1, 1)
    del second
    gc.collect()
    assert added() == (0, 0)
    optimize_for_inference(first.eval())
    assert added() == (1, 1)
    del first
    gc.collect()
    assert added() == (0, 0)


def test_modules_are_built_while_engines_come_and_go() -> None:
    model = varied_model()

    def build(_: int) -> int:
        return sum(len(list(nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU())).modules())) for _ in range(20))

    def optimize(_: int) -> int:
        optimize_for_inference(model).inference_engine = None
        return 80

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(optimize if number % 4 == 0 else build, number) for number in range(200)]
        assert {job.result() for job in jobs} == {80}
