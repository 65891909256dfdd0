"""Releases on the host: what is there, what is current, what runs.

Nothing here changes anything: steps are planned in :mod:`dflash_deploy.plan.release` and run by
:mod:`dflash_deploy.execute`.
"""
