from .augmentation import with_augmentation as with_augmentation
from .encoding import EncodingReport as EncodingReport
from .encoding import encode_pairs as encode_pairs
from .packing import PackedCollator as PackedCollator
