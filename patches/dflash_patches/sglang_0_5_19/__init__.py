"""Patch sets for SGLang 0.5.19 to 0.5.21: one module per name, each with :class:`~dflash_deploy.patching.patch.PatchSet`."""
