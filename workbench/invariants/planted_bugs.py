"""The planted bugs."""
MUTANTS = {}
