"""Small random checkpoints in the layouts of other toolkits, and restatements of their models in NumPy."""

#: d_model, d_ff, layers of encoder and decoder, and heads of all these models
D, FFN, LAYERS, HEADS = 12, 20, (2, 1), 3
