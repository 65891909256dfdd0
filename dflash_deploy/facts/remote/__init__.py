"""The probe: modules that run on the host, sent as text over stdin. Standard library only, Python 3.8 or later; they
import each other and nothing else of this package, write nothing and never raise for what they meet (absence and
failure are values)."""
