"""What an accelerator reaches: kernels, steps and peers, timed in commands of a few minutes each."""
