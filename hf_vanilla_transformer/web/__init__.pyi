from .page import CONTENT_TYPES as CONTENT_TYPES
from .page import page_files as page_files
