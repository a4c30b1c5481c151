"""Which requests come and when, made up or recorded, and what became of them: alike for benchmarks and simulations.
No jax."""
