"""DDTree for SGLang: tree building, verification and the workers. Importing this module imports no torch."""

__version__ = "0.1.0"
