"""Structured output: parses and compiles grammars, and computes token masks. Imports no jax."""
