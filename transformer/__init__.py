"""The Measured Transformer: attention and what is built on it, exported from a book.

Import from the modules: ``from transformer.attention import MultiHeadAttention``.
"""

__version__ = "0.1.0"
