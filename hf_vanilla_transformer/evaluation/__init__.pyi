from .comparison import compare_systems as compare_systems
from .metrics import example_translations as example_translations
from .metrics import score_translations as score_translations
from .plots import cross_attention as cross_attention
from .plots import plot_attention as plot_attention
from .trainer_metrics import translation_metrics as translation_metrics
