"""The trainer: updates, their losses, evaluations that translate."""
