"""The parts of scripts/bench: what is compared, how it is shown. The standard library alone, but for with_*.py."""
