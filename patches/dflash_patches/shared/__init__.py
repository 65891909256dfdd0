"""Patches that several generations share, as data or as functions of what differs. No sets: those are per generation."""
