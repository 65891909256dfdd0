"""Patch sets for SGLang 0.5.22 and 0.5.23: one module per name, each with :class:`~dflash_deploy.patching.patch.PatchSet`."""
