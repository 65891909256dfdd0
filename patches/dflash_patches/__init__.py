"""Structural patch sets for SGLang: data and small transformers. Never imports SGLang or torch."""
