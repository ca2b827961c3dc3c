"""Proof that numbers are what they should be: `parity` replays what another trainer logged."""
