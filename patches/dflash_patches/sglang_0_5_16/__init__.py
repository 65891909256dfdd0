"""Patch sets for SGLang 0.5.16: one module per set, each a :class:`~dflash_deploy.patching.patch.PatchSet`."""
