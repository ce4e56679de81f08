"""Random runs, models, requests and documents by the thousand, with their oracles. Slow tests run a part of each."""
