"""Patch sets for SGLang 0.5.17 and 0.5.18: one module per name, each with :class:`~dflash_deploy.patching.patch.PatchSet`."""
