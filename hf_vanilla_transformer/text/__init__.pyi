from .tokenizer_files import load_tokenizers as load_tokenizers
from .tokenizer_files import save_tokenizers as save_tokenizers
from .tokenizer_training import train_tokenizer as train_tokenizer
