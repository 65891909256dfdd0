"""dflash-deploy: SGLang with DFlash and DDTree speculative decoding, on your own hosts."""

__version__ = "0.1.0"
