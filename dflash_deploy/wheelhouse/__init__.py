"""A folder of wheels that installs one stack on hosts without a network: built here, checked, carried over SSH.

``house`` is the data, ``closure`` says what a set of wheels lacks, ``build`` resolves and downloads with pip, ``check``
proves a folder, ``send`` brings the wheels to a host's cache.
"""

from __future__ import annotations

from dflash_deploy.wheelhouse.house import House, Wheel, WheelTarget

__all__ = ["House", "Wheel", "WheelTarget"]
