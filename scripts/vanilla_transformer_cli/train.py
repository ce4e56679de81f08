"""Train a translation model, or fine-tune one.

  vanilla-transformer train numbers_en_de --output_dir runs/numbers
  vanilla-transformer train small_corpus --train train.en train.de --output_dir runs/mine
  vanilla-transformer train small_sequences --tokens chars --train words.tsv --output_dir runs/words
  vanilla-transformer train --model_name_or_path opus-mt-en-de --train train.en train.de --output_dir runs/tuned

A recipe is a YAML file of fields. Each field is also a flag, and flags win. The common fields are below. --help-all
lists every field with its default.
"""

from collections.abc import Callable
from typing import Any

from .parsing import parse_run, unparsed

# Importing the definitions of the fields takes seconds.
HELP = """usage: {prog} [RECIPE] [--FIELD VALUE ...]

{description}
RECIPE                              name (`vanilla-transformer recipes` lists them), or path of a YAML file
-h, --help                          show this help and exit
--help-all                          list every field and exit

data:
  --train INPUT                     text to train on: train.en train.de, a CSV, TMX or other file, a prefix, a dataset,
                                    or several
  --data DIR                        or a folder of `prepare`, which several runs and processes share
  --validation INPUT                text that selects the best checkpoint
  --held_out_pairs N                without validation: hold out N training pairs
  --test INPUT                      text that is scored once, at the end
  --train_weights N                 how often the pairs of each input occur in an epoch
  --source_lang CODE                source language, such as en
  --target_lang CODE                target language, such as de
  --source_column NAME              column of the source in a table (target_column: of the target), its number if the
                                    table has no header, or several: '{{3:;}}{{1}}' (tokens: tagged)
  --line_pattern REGEX              text whose lines have both sides: IN: (?P<source>.*) OUT: (?P<target>.*)
  --tokens KIND                     bpe, sentencepiece, chars, bytes, words, smiles, tagged or a regular expression
                                    (source_tokens)
  --rewrite MODULE:FUNCTION         other spellings of each pair, drawn anew in every epoch
  --augment NAME=P                  perturb random training pairs: typos=0.12 upper=0.05 ... (see evaluate --perturb)
  --max_eval_samples N              evaluate on the first N pairs only (max_test_samples)

model:
  --model_name_or_path X            fine-tune this one: a model folder, a folder of an OPUS-MT model, a Hub name
  --model_class MODULE:CLASS        train a subclass of one's own (guide: extending the model)
  --lora_r N                        train LoRA adapters of this rank, not all weights of model_name_or_path
  --preset NAME                     a row of Table 3 of the paper: base, big, ...
  --vocab_size N                    tokens of the tokenizer that is trained
  --d_model N                       width (encoder_ffn_dim, decoder_ffn_dim: of the feed-forward layers)
  --encoder_layers N                layers (decoder_layers)
  --encoder_attention_heads N       heads (decoder_attention_heads)
  --dropout P                       dropout
  --label_smoothing E               label smoothing
  --lowercase BOOL                  lower-case all text (source_lowercase: the source alone); the case is lost

training:
  --output_dir DIR                  becomes a model folder
  --max_minutes N                   stop after N minutes, with a checkpoint
  --max_steps N                     or after N updates
  --num_train_epochs N              or after N passes over the training text
  --per_device_train_batch_size N   sentences per batch
  --max_tokens_per_batch N          instead: tokens per batch, padding included
  --tokens_per_update N             target tokens per update, over several batches
  --learning_rate R                 peak learning rate (default: the paper's)
  --warmup_steps N                  updates of linear warm-up
  --auto_bf16 BOOL                  train in bfloat16 if that is faster here
  --seed N                          of weights, order and dropout
  --seeds N                         several runs instead, in output_dir/seed-1 ..., and a table of mean and deviation
                                    (the same command again goes on with them)
  --resume_from_checkpoint true     go on with the run in output_dir

evaluation:
  --eval_strategy WHEN              no, steps (every eval_steps updates) or epoch
  --eval_steps N                    updates between evaluations
  --save_steps N                    updates between checkpoints
  --logging_steps N                 updates between lines of the log
  --load_best_model_at_end BOOL     keep the weights with the best score
  --early_stopping_patience N       stop after N evaluations without improvement
  --average_last N                  average the last N checkpoints, if that scores higher (section 6.1)
  --test_num_beams N                beams for the test, and in the saved model
  --bleu_tokenize NAME              tokenizer of sacreBLEU: 13a, intl, char, zh, none; by default as the script needs
  --base_test INPUT                 fine-tuning: a test set of the base model, scored before and after
  --report_to NAME                  tensorboard, wandb, trackio or none
"""


def parse_arguments(arguments: list[str], prog: str) -> list[str]:
    return unparsed(arguments, HELP.format(prog=prog, description=__doc__))


def main(arguments: list[str]) -> None:
    from hf_vanilla_transformer.cleaning.judging import sample_warnings
    from hf_vanilla_transformer.training.run.run import run_training
    from hf_vanilla_transformer.training.run.seeds import run_seeds

    def run(flags: list[str], check_facts: Callable[[dict[str, Any]], None] | None = None) -> None:
        parsed, importers = parse_run([*arguments, *flags])
        run_training(
            *parsed,
            pair_warnings=sample_warnings,
            importers=importers,
            check_facts=check_facts,
        )

    parsed, _ = parse_run(arguments)
    if parsed[-1].seeds:
        run_seeds(parsed, run)
    else:
        run([])
