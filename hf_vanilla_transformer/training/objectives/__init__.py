"""Training objectives beyond cross-entropy: consistency and word-level distillation, and the gradients they share."""
