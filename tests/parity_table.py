"""`python -m tests.parity_table` prints the largest differences that the parity tests find."""

from collections import defaultdict

from tests.peers import BACKENDS
from tests.test_parity import PEERS, compare


def main() -> None:
    columns = ("encoder", "logits", "loss", "gradient")
    print("| peer | compared |", " | ".join(columns), "|\n|---|---|" + "---|" * len(columns))
    for peer, (_, seeds, _) in PEERS.items():
        largest: dict[tuple[str, str], float] = defaultdict(float)
        for found in (compare(peer, seed, backend) for seed in seeds for backend in BACKENDS):
            for pair, each in found.items():
                for what, difference in each.items():
                    cell = pair, what.split()[0]
                    largest[cell] = max(largest[cell], difference)
        for pair in found:
            cells = (
                f"{largest[pair, column]:.1e}" if (pair, column) in largest else ""
                for column in columns
            )
            print(f"| {peer} | {pair} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
