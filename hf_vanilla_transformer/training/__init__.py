"""Training: arguments and recipes, the trainer, checkpoints and their average, and a whole run."""
