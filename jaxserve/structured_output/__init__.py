"""Text of a wanted form: a caller's grammar read, compiled over a vocabulary, and turned into masks of what may come
next. No jax."""
