"""Patch sets for SGLang 0.5.10.post1, which has no DFLASH: one module per set."""
