#!/usr/bin/env bash
# Train, score, save, reload and use a translator of number words: bash scripts/quickstart.sh [--FIELD VALUE …]
#
# Does what the README's quick start does: creates .venv if it is missing, installs the same extras, and trains the
# recipe numbers_en_de into runs/quickstart. An earlier model there is kept. Arguments go to `vanilla-transformer train`.
# Fails if the model has not learnt the task.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

model=$root/runs/quickstart
target=(--output_dir "$model")
arguments=("$@")
for ((i = 0; i < $#; i++)); do
  case ${arguments[i]} in
    --output_dir=*) model=${arguments[i]#*=} target=() ;;
    --output_dir) model=${arguments[i + 1]-} target=() ;;
  esac
done
started=$SECONDS

# `train` checks the folder, too, but after the installation. It knows --resume_from_checkpoint.
if ((${#target[@]})) && [ -n "$(ls -A -- "$model" 2>/dev/null)" ]; then
  die "$model is kept, with the run in it: move it away, or name another folder: bash $0 --output_dir runs/another"
fi
use_own_environment_beside_an_installed_package
ensure_environment "$readme_extras"
"$python" -m vanilla_transformer_cli train numbers_en_de ${target[@]+"${target[@]}"} "$@"

# New processes load the model from its folder.
sentences=$(
  cat <<'END'
seven
thirty-one
two hundred and thirty-four
nine hundred and ninety-nine
six thousand, eight hundred and fifty-two
END
)
translations=$("$python" -m vanilla_transformer_cli translate --model "$model" <<<"$sentences")
attention_map=$("$python" -m vanilla_transformer_cli attention --model "$model" --sentence "two hundred and thirty-four" \
  --output "$model/attention.png")

printf '\nSample translations\n'
paste -- <(printf '%s\n' "$sentences") <(printf '%s\n' "$translations") |
  while IFS=$'\t' read -r source translation; do printf '  %-42s → %s\n' "$source" "$translation"; done

"$python" - "$model" "$attention_map" "$((SECONDS - started))" <<'END'
import json
import sys

model, attention_map, seconds = sys.argv[1:]
with open(f"{model}/all_results.json", encoding="utf-8") as file:
    results = json.load(file)
exact, bleu = results["test_exact_match"], results["test_bleu"]
print(f"""
Held-out numbers    exact match {exact:.1f} %, BLEU {bleu:.2f}
Training curve      {model}/curve.png
Attention map       {attention_map}
Time                {int(seconds) // 60} min {int(seconds) % 60} s, installation included

Load the model in Python ({sys.executable}):

    import hf_vanilla_transformer
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model = AutoModelForSeq2SeqLM.from_pretrained({model!r})
    tokenizer = AutoTokenizer.from_pretrained({model!r})
    inputs = tokenizer(["two hundred and thirty-four"], return_tensors="pt")
    print(tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True))

Open your translator in a browser, at http://127.0.0.1:5000/:

    {sys.executable} -m vanilla_transformer_cli serve --model {model}
""")
if exact < 98 or bleu < 99:
    sys.exit("error: the model has not learnt the task: exact match should be at least 98 % and BLEU at least 99")
END
