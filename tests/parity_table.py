"""`python -m tests.parity_table` prints the largest differences that the parity tests find."""

from collections import defaultdict

from tests import test_parity_fsmt, test_parity_m2m_100, test_parity_marian, test_parity_torch
from tests.peers import BACKENDS

PEERS = {
    "torch.nn.Transformer": test_parity_torch,
    "MarianMTModel": test_parity_marian,
    "FSMTForConditionalGeneration": test_parity_fsmt,
    "M2M100ForConditionalGeneration": test_parity_m2m_100,
}


def main() -> None:
    columns = ("encoder", "logits", "loss", "gradient")
    print("| peer | compared |", " | ".join(columns), "|\n|---|---|" + "---|" * len(columns))
    for peer, module in PEERS.items():
        largest: dict[tuple[str, str], float] = defaultdict(float)
        for found in (module.compare(seed, backend) for seed in module.SEEDS for backend in BACKENDS):
            for pair, each in found.items():
                for what, difference in each.items():
                    cell = pair, what.split()[0]
                    largest[cell] = max(largest[cell], difference)
        for pair in found:
            cells = (f"{largest[pair, column]:.1e}" if (pair, column) in largest else "" for column in columns)
            print(f"| {peer} | {pair} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
