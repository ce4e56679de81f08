from .card import CardFacts as CardFacts
from .card import write_model_card as write_model_card
