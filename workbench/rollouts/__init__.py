"""Rollouts: what writes completions for online methods, and how it gets the weights."""
